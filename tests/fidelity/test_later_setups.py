"""Modules that are set up again, changed, with other options or as a part of another one, train as under DDP."""

import copy
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardeddp import AutoPolicy, MixedPrecision, ShardedDP
from support.fidelity import STRATEGIES, ranks_of
from support.tasks import Recorded
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(300)

EXPECTED = (
    "parameter .* is used outside the forward|something still refers to the memory|find_unused_parameters=True was|"
    "nothing is known about the optimizer|unit .* holds .* parameters|"
    "You're resuming from a checkpoint|You're using the WeightAveraging|`trainer.validate|"
    "`torch.jit.script. is deprecated|Found .* module.s. in eval mode"
)


class Layer(nn.Module):
    """A unit with buffers."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(Recorded):
    """Layers and a head; momentum, so that states of optimizers count."""

    def __init__(self, body: nn.Module | None = None, head: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(Layer(), Layer()) if body is None else body
        self.head = nn.Linear(6, 3) if head is None else head
        self.adds_in_configure_model = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self(batch), batch[:, :3])

    def configure_model(self) -> None:
        if self.adds_in_configure_model:
            self.adds_in_configure_model = False
            self.body.append(as_on_this_rank(Layer))  # type: ignore[operator]

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.losses.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def as_on_this_rank(make: Callable[[], Any]) -> Any:
    """Something whose values differ between ranks: those of rank 0 are to be trained."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + dist.get_rank())
        return make()


def batches() -> DataLoader[Tensor]:
    """Two epochs and a half of the usual steps."""
    data = torch.randn(2 * 4 * dist.get_world_size(), 6, generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_size=4)  # type: ignore[arg-type]


class Fits:
    """Fits modules one after the other, under DDP or a sharding strategy.

    Args:
        strategy: Its name; None: DDP.
        options: Of the strategy.
    """

    def __init__(self, strategy: str | None, options: dict[str, Any]) -> None:
        self.strategy, self.options = strategy, options

    def __call__(self, module: Net, *, ours: Any = None, **options: Any) -> Any:
        """Fit for three steps; ``ours`` are more arguments of the sharding strategy, and its name."""
        if self.strategy is None:
            strategy: Any = DDPStrategy(find_unused_parameters=True)
        else:
            arguments = {**self.options, **(ours or {})}
            name = arguments.pop("name", self.strategy)
            if name != "hybrid_shard":
                arguments.pop("shard_size", None)
            strategy = ShardedDP(name, **{"auto_wrap_policy": {Layer}, **arguments})
        path = options.pop("ckpt_path", None)
        trainer = make_trainer(strategy, max_steps=3, max_epochs=-1, **options)
        trainer.fit(module, batches(), ckpt_path=path)
        return trainer


Program = Callable[[Fits, str], list[Net]]
"""Fits modules, and returns those to compare; it may write into a folder."""


def head_replaced(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    fit(net)
    net.head = as_on_this_rank(lambda: nn.Linear(6, 3))
    fit(net)
    return [net]


def layers_appended_inserted_and_unpickled(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    fit(net)
    net.body.append(as_on_this_rank(Layer))  # type: ignore[operator]
    net.body.insert(0, pickle.loads(pickle.dumps(as_on_this_rank(Layer))))  # type: ignore[operator]
    net.body[1].linear.register_buffer("counts", torch.zeros(2))  # type: ignore[union-attr,index]
    fit(net)
    net.body.append(pickle.loads(pickle.dumps(net.body[1])))  # type: ignore[operator,index]  # a trained one
    fit(net)
    return [net]


def layers_in_configure_model(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    fit(net)
    net.adds_in_configure_model = True
    fit(net)
    return [net]


def layers_removed_and_moved(fit: Fits, folder: str) -> list[Net]:
    net = Net(nn.Sequential(Layer(), Layer(), Layer()))
    fit(net)
    del net.body[1]  # type: ignore[attr-defined]
    fit(net)
    net.body = nn.Sequential(net.body[1], net.body[0])  # type: ignore[index]
    fit(net)
    return [net]


def parameters_replaced(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    fit(net)
    net.head.weight = as_on_this_rank(lambda: nn.Parameter(torch.randn(3, 6)))
    net.head.bias = nn.Parameter(net.head.bias.detach() * 2)  # type: ignore[operator]
    net.body[0].linear.bias = nn.Parameter(net.body[0].linear.bias.detach())  # type: ignore[union-attr,index]
    fit(net)
    net.body[1].linear.bias = None  # type: ignore[union-attr,index]
    fit(net)
    return [net]


def layers_tied_later(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    fit(net)
    net.body[1].linear.weight = net.body[0].linear.weight  # type: ignore[union-attr,index]
    net.body.append(net.body[0])  # type: ignore[operator,index]
    fit(net)
    return [net]


def encoder_of_another_module(fit: Fits, folder: str) -> list[Net]:
    pretrained = Net()
    fit(pretrained)
    tuned = Net(pretrained.body, as_on_this_rank(lambda: nn.Linear(6, 3)))
    fit(tuned)
    pretrained.losses.append(pretrained.loss(torch.ones(4, 6)).item())  # with what was tuned
    fit(pretrained)  # which takes it back
    fit(tuned)
    return [pretrained, tuned]


def module_inside_of_another(fit: Fits, folder: str) -> list[Net]:
    inner = Net(head=nn.Linear(6, 6))
    inner.loss = lambda batch: F.mse_loss(inner(batch), batch)  # type: ignore[method-assign]
    fit(inner)
    outer = Net(nn.Sequential(inner, Layer()))
    fit(outer)
    outer.body[0].head.requires_grad_(False)  # type: ignore[union-attr,index]
    fit(outer)
    return [outer]


def deep_copy_with_a_layer(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    fit(net)
    copied = copy.deepcopy(net)
    copied.body.append(as_on_this_rank(Layer))  # type: ignore[operator]
    fit(copied)
    fit(net)
    return [copied, net]


def other_strategies(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    for name in ("no_shard", "full_shard", "shard_optimizer", "shard_grad_op", None):
        fit(net, ours={} if name is None else {"name": name})
    return [net]


def without_statistics() -> Layer:
    """What is computed twice counts twice in those of a BatchNorm."""
    layer = Layer()
    layer.norm = nn.LayerNorm(6)  # type: ignore[assignment]
    return layer


def other_units_and_recomputation(fit: Fits, folder: str) -> list[Net]:
    net = Net(nn.Sequential(without_statistics(), without_statistics()))
    fit(net)
    fit(net, ours={"auto_wrap_policy": None, "forward_prefetch": 0})
    fit(
        net, ours={"auto_wrap_policy": AutoPolicy(min_numel=1), "activation_checkpointing": {Layer}}
    )
    net.body.append(as_on_this_rank(without_statistics))  # type: ignore[operator]
    fit(net, ours={"activation_checkpointing": {Layer}})
    fit(net)
    return [net]


def other_precisions(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    for precision in ("bf16-mixed", "32-true", "bf16-mixed", "64-true"):
        fit(net, precision=precision)
    return [net]


def other_mixed_precision(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    fit(
        net, ours={"mixed_precision": MixedPrecision(param_dtype="float32", reduce_dtype="float64")}
    )
    fit(net, ours={"mixed_precision": MixedPrecision(param_dtype="float32")})
    fit(net)
    return [net]


class KeepsItsOptimizer(Net):
    """Makes it once, and hands it out for every fit."""

    kind: Any = staticmethod(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    def __init__(self) -> None:
        super().__init__(nn.Sequential(without_statistics(), without_statistics()))
        self.optimizer = self.kind(list(self.parameters()))

    def configure_optimizers(self) -> Any:
        return self.optimizer


class KeepsAdam(KeepsItsOptimizer):
    kind = staticmethod(lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-2))


class KeepsAdafactor(KeepsItsOptimizer):
    kind = staticmethod(lambda p: torch.optim.Adafactor(p, lr=0.05, eps=(None, 1e-2)))


def optimizers_that_are_kept(fit: Fits, folder: str) -> list[Net]:
    nets = []
    for kind in (KeepsItsOptimizer, KeepsAdam, KeepsAdafactor):
        net = kind()
        fit(net)
        layer = as_on_this_rank(without_statistics)
        net.body.append(layer)  # type: ignore[operator]
        net.optimizer.add_param_group({"params": list(layer.parameters())})
        fit(net)
        fit(net, ours={"auto_wrap_policy": None})
        fit(net, ours={"name": "no_shard"})
        fit(net)
        nets.append(net)
    return nets


def hooks_attributes_and_gradients(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    weight, seen = net.head.weight, list[float]()
    weight.note = "of the user"  # type: ignore[attr-defined]
    handle = weight.register_hook(lambda gradient: gradient * 2)
    fit(net)
    done = weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))  # type: ignore[union-attr]
    data, gradient = weight.data, weight.grad
    net.body.append(as_on_this_rank(Layer))  # type: ignore[operator]
    fit(net)
    assert net.head.weight is weight
    assert weight.note == "of the user"  # type: ignore[attr-defined]
    assert len(seen) == 3
    assert gradient is not None
    assert torch.equal(data, weight.detach())  # it still follows the parameter
    handle.remove()
    net.body.append(as_on_this_rank(Layer))  # type: ignore[operator]
    fit(net)
    done.remove()
    fit(net)
    assert len(seen) == 6
    return [net]


def checkpoint_of_the_changed_module(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    net.body.append(Layer())  # type: ignore[operator]
    trainer = fit(net)
    trainer.save_checkpoint(f"{folder}/{fit.strategy}.ckpt")
    again = Net()
    fit(again)
    again.body.append(as_on_this_rank(Layer))  # type: ignore[operator]
    again.trainer.fit_loop.epoch_progress.reset()
    if fit.strategy is None:
        trainer = make_trainer(DDPStrategy(find_unused_parameters=True), max_steps=6, max_epochs=-1)
    else:
        ours = {"auto_wrap_policy": {Layer}, **fit.options}
        trainer = make_trainer(ShardedDP(fit.strategy, **ours), max_steps=6, max_epochs=-1)
    trainer.fit(again, batches(), ckpt_path=f"{folder}/{fit.strategy}.ckpt")
    return [again]


def averages_of_the_changed_module(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    fit(net, callbacks=[EMAWeightAveraging(decay=0.5)])
    net.body.append(as_on_this_rank(Layer))  # type: ignore[operator]
    fit(net, callbacks=[EMAWeightAveraging(decay=0.5)])
    fit(net, callbacks=[EMAWeightAveraging(decay=0.5)], ours={"auto_wrap_policy": None})
    return [net]


def evaluations_between(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    fit(net)
    net.body.append(as_on_this_rank(Layer).eval())  # type: ignore[operator]
    net.body[-1].load_state_dict(net.body[0].state_dict())  # type: ignore[union-attr,index]
    trainer = net.trainer
    trainer.validate(net, DataLoader(torch.ones(8, 6), batch_size=4), verbose=False)  # type: ignore[arg-type]
    fit(net)
    return [net]


def shared_memory(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    net.body[1].linear.weight.data = net.body[0].linear.weight.data  # type: ignore[union-attr,index]
    fit(net)
    net.head = as_on_this_rank(lambda: nn.Linear(6, 3))
    fit(net)
    return [net]


class Penalized(Net):
    """Uses its parameters outside of their units, too."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + 0.01 * sum(p.square().sum() for p in self.parameters())


def scripted_layers_and_penalties(fit: Fits, folder: str) -> list[Net]:
    net = Penalized(nn.Sequential(Layer(), torch.jit.script(nn.Linear(6, 6))))  # type: ignore[no-untyped-call]
    fit(net)
    net.body.append(as_on_this_rank(Layer))  # type: ignore[operator]
    fit(net)
    tuned = Penalized(net.body, as_on_this_rank(lambda: nn.Linear(6, 3)))
    fit(tuned)
    fit(tuned, ours={"auto_wrap_policy": None})
    return [net, tuned]


class Scaled(nn.Parameter):
    """A class of a user's."""


def classes_of_parameters(fit: Fits, folder: str) -> list[Net]:
    net = Net()
    net.head.weight = Scaled(net.head.weight.detach())
    fit(net)
    net.body.append(as_on_this_rank(Layer))  # type: ignore[operator]
    fit(net)
    assert isinstance(net.head.weight, Scaled)
    return [net]


class Anchored(Net):
    """Is drawn to former values, by an importance of each (EWC, L2-SP)."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: dict[str, Tensor] = {}
        self.view: Tensor | None = None
        self.importance: Tensor | None = None
        self.teacher: Tensor | None = None

    def loss(self, batch: Tensor) -> Tensor:
        total = super().loss(batch)
        weight = self.head.weight
        if isinstance(getattr(self, "anchor", None), Tensor):
            total = total + (self.importance * (weight - self.anchor) ** 2).sum()
        if self.view is not None:
            total = total + 0.1 * (self.view * weight).sum()
        if self.teacher is not None:
            total = total + 0.1 * (self.teacher - weight).square().sum()
        for name, value in self.anchors.items():
            total = total + 0.1 * (self.get_parameter(name) - value).square().sum()
        return total

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if (gradient := self.head.weight.grad) is not None:
            self.importance = gradient.detach() ** 2


def computed_from_parameters(fit: Fits, folder: str) -> list[Net]:
    """Buffers and attributes that were computed from sharded parameters are values; views follow theirs."""
    net = Anchored()
    fit(net)
    net.register_buffer("anchor", net.head.weight.detach().clone())
    net.importance = net.head.weight.detach() ** 2 + 1
    fit(net)
    net.view = net.head.weight.detach()
    net.body.append(as_on_this_rank(Layer))
    fit(net)
    net.anchors = {name: it.detach().clone() for name, it in net.named_parameters()}
    net.body.append(as_on_this_rank(Layer))
    fit(net)
    student = Anchored()
    student.teacher = net.head.weight.detach().clone()
    student.register_buffer("copied", net.head.weight.detach() * 2)
    fit(student)
    return [net, student]


PROGRAMS: list[Program] = [
    head_replaced,
    layers_appended_inserted_and_unpickled,
    layers_in_configure_model,
    layers_removed_and_moved,
    parameters_replaced,
    layers_tied_later,
    encoder_of_another_module,
    module_inside_of_another,
    deep_copy_with_a_layer,
    other_strategies,
    other_units_and_recomputation,
    other_precisions,
    other_mixed_precision,
    optimizers_that_are_kept,
    hooks_attributes_and_gradients,
    checkpoint_of_the_changed_module,
    averages_of_the_changed_module,
    evaluations_between,
    shared_memory,
    scripted_layers_and_penalties,
    classes_of_parameters,
    computed_from_parameters,
]


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder of all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    yield box[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0])


def run(programs: list[Program], strategy: str | None) -> list[Any]:
    """Losses and weights that each program leaves, or its error."""
    results: list[Any] = []
    for program in programs:
        warnings.filterwarnings("ignore", EXPECTED)
        seed_everything(1, verbose=False)
        fit = Fits(strategy, {} if strategy is None else STRATEGIES[strategy])
        with shared_folder() as folder:
            nets = program(fit, folder)
        results.append([(net.losses, full_weights(net)) for net in nets])
    return results


@pytest.fixture(scope="module")
def under_ddp(world: Worlds) -> Callable[[int], list[Any]]:
    """What DDP leaves on so many ranks."""
    known = dict[int, list[Any]]()

    def results(size: int) -> list[Any]:
        if size not in known:
            known[size] = world(size).run(run, PROGRAMS, None, timeout_s=250)
        return known[size]

    return results


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_that_are_set_up_again_train_as_under_ddp(
    world: Worlds, under_ddp: Callable[[int], list[Any]], strategy: str
) -> None:
    size = ranks_of(strategy)
    ours = world(size).run(run, PROGRAMS, strategy, timeout_s=250)
    for found, expected in zip(ours, under_ddp(size), strict=True):
        for program, mine, his in zip(PROGRAMS, found, expected, strict=True):
            rtol = 0.05 if program is other_precisions else 1e-4
            for (losses, weights), (their_losses, their_weights) in zip(mine, his, strict=True):
                torch.testing.assert_close(
                    losses, their_losses, rtol=rtol, atol=1e-6, msg=f"losses of {program.__name__}"
                )
                try:
                    assert_same_weights(weights, their_weights, rtol)
                except AssertionError as error:
                    raise AssertionError(f"{program.__name__}: {error}") from error
