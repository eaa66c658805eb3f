"""Drives a model through the engine without Lightning, and the same model through one process, to compare the two.

Everything here runs on a rank, with ``torch.distributed`` initialised. A *loss* is a function of (model, rank, step):
what that rank computes in that step. One process that trains on the mean of all ranks' losses is the reference for
everything.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn, optim

from shardeddp.comm import Mesh
from shardeddp.config import MixedPrecision, OptimizerScope, Options, parse_options
from shardeddp.engine.dtypes import assign_dtypes, cast_at_boundaries
from shardeddp.engine.recording import Recording
from shardeddp.engine.runtime import Runtime
from shardeddp.engine.shard_model import shard_model
from shardeddp.engine.unit import Unit
from shardeddp.optim.attach import attach_optimizer
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES, ShardingStrategy, ShardSize
from shardeddp.plan.topology import Topology
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.wrap import NamePolicy, SingleUnitPolicy, build_units

STRATEGIES = tuple(SHARDING_STRATEGIES)
RUNTIMES = ("full_shard", "shard_grad_op", "shard_optimizer", "no_shard")
"""Strategies that differ on one replica: the rest is arithmetic of ranks, which the parity grid covers."""

Loss = Callable[[nn.Module, int, int], torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model is sharded in a test."""

    strategy: str = "full_shard"
    units: tuple[str, ...] = ()
    """Names or patterns of the modules that become units beside the root."""

    shard_size: int | None = None
    """None: the world, or 1 for ``no_shard``."""

    prefetch: int = 1

    reduce_every_backward: bool | None = None
    """None: what the strategy says."""

    split: bool = False
    """Replicas split the optimizer's share."""

    reshard_after_forward: bool | None = None
    """None: what the strategy says."""

    regather: int | None = None
    """Ranks that gather for the backward what they have kept of the forward's gather."""

    order: tuple[int, ...] | None = None
    """Ranks in which members of a shard group, which are ascending, are adjacent."""

    nearest: tuple[int, ...] | None = None
    """Ranks in which those near each other are adjacent; None: as the order."""

    uneven: bool = False
    """Ranks are known to use different units."""

    def mesh(self) -> Mesh:
        """The mesh of all ranks; a collective."""
        world_size = dist.get_world_size()
        given = SHARDING_STRATEGIES[self.strategy].shard_size
        size = self.shard_size or (world_size if isinstance(given, ShardSize) else given)
        topology = Topology(
            world_size=world_size,
            shard_size=size,
            split_replicas=self.split,
            order=self.order,
            nearest=self.nearest or self.order,
        )
        return Mesh(topology, torch.device("cpu"), timedelta(seconds=20), self.regather)

    def apply(
        self,
        model: nn.Module,
        autocast: torch.dtype | None = None,
        options: MixedPrecision | None = None,
        recording: Recording | None = None,
        is_only: bool = False,
    ) -> Runtime:
        """Shard a model in place, for a precision; a collective."""
        policy = NamePolicy(self.units) if self.units else SingleUnitPolicy()
        units = assign_dtypes(model, build_units(model, policy), options, autocast)
        cast_at_boundaries(model, units, options)
        return shard_model(units, self.mesh(), self.asked, recording=recording, is_only=is_only)

    @property
    def asked(self) -> Options:
        """How a user asks for it."""
        return parse_options(
            {
                "sharding_strategy": self.strategy,
                "reshard_after_forward": self.regather or self.reshard_after_forward,
                "reduce_every_backward": self.reduce_every_backward,
                "optimizer_shard": "world" if self.split else "group",
                "forward_prefetch": self.prefetch,
                "backward_prefetch": self.prefetch,
                "uneven_units": self.uneven,
            }
        )

    @property
    def sharding(self) -> ShardingStrategy:
        """What the strategy is to the engine."""
        return self.asked.sharding


def sgd(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Plain steps with weight decay, so that a parameter that was stepped by mistake shows."""
    return optim.SGD(parameters, lr=0.1, weight_decay=0.1)


class Trial:
    """One model twice: sharded over the ranks, and whole in this process.

    Args:
        model: Built alike on every rank; it is the one that is sharded.
        sharding: How.
        make_optimizer: Makes the optimizer of either.
        scopes: What is said about optimizers, by class name.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding: Sharding,
        make_optimizer: MakeOptimizer = sgd,
        scopes: Mapping[str, OptimizerScope] | None = None,
    ) -> None:
        self.reference = copy.deepcopy(model)
        self.model = model
        self.runtime = sharding.apply(model)
        self.optimizer = make_optimizer(model.parameters())
        self.reference_optimizer = make_optimizer(self.reference.parameters())
        attach_optimizer(self.optimizer, stated=scopes)

    def forward(self, loss: Loss, step: int = 0) -> torch.Tensor:
        """This rank's loss, as the strategy computes it."""
        with self.runtime.step(
            "training_step" if torch.is_grad_enabled() else "validation_step"
        ) as outputs:
            outputs.append(loss(self.model, dist.get_rank(), step))
        return outputs[0]

    def backward(self, loss: Loss, step: int = 0) -> None:
        """One forward and backward of both."""
        self.forward(loss, step).backward()
        self.reference_loss(loss, step).backward()

    def reference_loss(self, loss: Loss, step: int = 0) -> torch.Tensor:
        """The mean of all ranks' losses, in one process."""
        ranks = range(dist.get_world_size())
        return torch.stack([loss(self.reference, rank, step) for rank in ranks]).mean()

    def step(self) -> None:
        """One optimizer step of both."""
        for each in (self.optimizer, self.reference_optimizer):
            each.step()
            each.zero_grad()

    def train(self, loss: Loss, steps: int = 3) -> None:
        """Some steps of both; gradients and parameters have to agree after each, and nothing is left unsharded."""
        for step in range(steps):
            self.backward(loss, step)
            self.check_gradients()
            self.step()
            self.check_parameters()
            self.check_rest()
            for model in (self.model, self.reference):
                model.zero_grad()  # what the optimizers do not hold

    def check_gradients(self) -> None:
        """Both have the same gradients, and none where the other has none."""
        for (name, mine), expected in zip(
            self.model.named_parameters(), self.reference.parameters(), strict=True
        ):
            if expected.grad is None:
                assert mine.grad is None, f"{name} has a gradient"
            else:
                assert mine.grad is not None, f"{name} has no gradient"
                close(full(mine.grad), expected.grad, f"gradient of {name}")

    def check_parameters(self) -> None:
        """Both have the same parameters."""
        for (name, mine), expected in zip(
            self.model.named_parameters(), self.reference.parameters(), strict=True
        ):
            close(full(mine), expected, name)

    def check_rest(self) -> None:
        """The modules hold sharded parameters again."""
        for progress in self.runtime.progresses:
            assert progress.unit.state.value == "sharded", (
                f"{progress.unit.label} is {progress.unit.state.value}"
            )


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, sharded or not."""
    return (tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor).detach()


def close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Equal but for the order of summation."""
    torch.testing.assert_close(
        found,
        expected.detach(),
        rtol=2e-5,
        atol=1e-6,
        msg=lambda text: f"{name} on rank {dist.get_rank()}: {text}",
    )


def unit_of(runtime: Runtime, name: str) -> Unit:
    """The unit of a module by its name."""
    return next(progress.unit for progress in runtime.progresses if progress.unit.spec.name == name)


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Random input, different for every rank and step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


@contextmanager
def another_order() -> Iterator[None]:
    """The units may run in another order than in the first pass, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "units run in another order")
        yield


# -- a model and a loss for tests that need no special one

WIDTH = 6


def linears(count: int = 3) -> nn.Sequential:
    """Linear layers, one behind the other."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


class Chain(nn.Module):
    """Blocks that run in the order given by ``order``, which a test may change."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
                for _ in range(blocks)
            ]
        )
        self.order = list(range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index in self.order:
            x = x + self.blocks[index](x)
        return x


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The mean square of the output."""
    return model(batch(rank, step, 4, WIDTH)).pow(2).mean()


def chain(strategy: str, order: tuple[int, ...] = (0, 1, 2), prefetch: int = 1) -> Trial:
    """A chain whose blocks are units."""
    model = Chain()
    model.order = list(order)
    return Trial(model, Sharding(strategy=strategy, units=("blocks.*",), prefetch=prefetch))
