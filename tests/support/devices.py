"""One rank on one CUDA device: its world, a model to shard there, and training it beside a plain copy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import nn, optim
from torch.testing._internal.distributed import fake_pg as _registers_fake  # noqa: F401 - the backend

from shardeddp.comm import Mesh
from shardeddp.config import CPUOffload, MixedPrecision, Options, parse_options
from shardeddp.engine.dtypes import assign_dtypes, cast_at_boundaries
from shardeddp.engine.recording import Recording
from shardeddp.engine.runtime import Runtime
from shardeddp.engine.shard_model import shard_model
from shardeddp.optim.attach import attach_optimizer
from shardeddp.plan.memory import MemoryPlan, plan_memory
from shardeddp.plan.sharding_strategy import ShardingStrategy
from shardeddp.wrap import NamePolicy, build_units

DEVICE = torch.device("cuda", 0)
ROWS = 4


class Block(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, width)."""
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    """Blocks between two layers of the root unit."""

    def __init__(self, width: int = 256, depth: int = 5) -> None:
        super().__init__()
        self.input = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.output = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 8) to the same."""
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def stack(width: int = 256) -> Stack:
    """The same values every time, on the host."""
    torch.manual_seed(0)
    return Stack(width)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The mean square of the output on the step's batch."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
    return model(x.to(DEVICE)).float().square().mean()


def adamw(model: nn.Module) -> optim.Optimizer:
    """Fused: without temporaries of the size of the parameters."""
    return optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a stack is sharded on one device."""

    strategy: str = "full_shard"
    options: MixedPrecision | None = None
    autocast: torch.dtype | None = None
    offload: CPUOffload = field(default_factory=CPUOffload)

    @property
    def sharding(self) -> ShardingStrategy:
        """What the strategy is to the engine."""
        return self.asked.sharding

    @property
    def asked(self) -> Options:
        """How a user asks for it."""
        return parse_options({"sharding_strategy": self.strategy, "cpu_offload": self.offload})

    def mesh(self) -> Mesh:
        """The mesh of all ranks; for it a machine has all of them."""
        return Mesh(self.sharding.topology(1, dist.get_world_size()), DEVICE, timedelta(seconds=60))


class Training:
    """A stack that is trained sharded.

    Args:
        setting: How it is sharded.
        model: Made by :func:`stack`, or on the meta device.
        mesh: Whose streams and collectives may be local parameters; None: the setting's.
        recording: How a model on the meta device was built.
    """

    def __init__(
        self,
        setting: Setting,
        model: Stack,
        mesh: Mesh | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.setting, self.model = setting, model
        units = build_units(model, NamePolicy(("blocks.*",)))
        units = assign_dtypes(model, units, setting.options, setting.autocast)
        cast_at_boundaries(model, units, setting.options)
        mesh = mesh or setting.mesh()
        self.runtime: Runtime = shard_model(units, mesh, setting.asked, recording=recording)
        self.optimizer = adamw(model)
        if not self.runtime.is_passthrough:
            offload = setting.offload.optimizer_alone
            attach_optimizer(self.optimizer, offload=offload)

    def step(self, number: int, micro_batches: int = 1) -> torch.Tensor:
        """One step of the optimizer; the last loss."""
        for micro_batch in range(micro_batches):
            self.runtime.sync_gradients = micro_batch == micro_batches - 1
            with autocasting(self.setting.autocast), self.runtime.step("training_step") as outputs:
                outputs.append(loss_of(self.model, number + 100 * micro_batch))
            outputs[0].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return outputs[0].detach()

    def train(self, steps: int, micro_batches: int = 1) -> list[float]:
        """The losses; the host waits for the device only at the end."""
        losses = [self.step(number, micro_batches) for number in range(steps)]
        return torch.stack(losses).tolist()

    def plan(self) -> MemoryPlan:
        """What the cost model predicts for a device whose transport needs no room of its own."""
        costs = [progress.unit.costs() for progress in self.runtime.progresses]
        offloads = self.setting.offload.optimizer
        return plan_memory(
            costs,
            self.setting.sharding,
            prefetch=1,
            needs_receive_buffer=False,
            offload_optimizer=offloads,
        )


def train_plain(
    steps: int, autocast: torch.dtype | None = None, micro_batches: int = 1
) -> list[float]:
    """The losses of the same stack, not sharded."""
    model = stack().to(DEVICE)
    optimizer = adamw(model)
    losses: list[torch.Tensor] = []
    for number in range(steps):
        for micro_batch in range(micro_batches):
            with autocasting(autocast):
                loss = loss_of(model, number + 100 * micro_batch)
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def autocasting(dtype: torch.dtype | None) -> Any:
    """What surrounds a forward under a precision."""
    return (
        nullcontext() if dtype is None else torch.autocast(DEVICE.type, dtype, cache_enabled=False)
    )


@contextmanager
def alone() -> Iterator[None]:
    """A world of one rank, with the device's own backend."""
    with MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        device_id = DEVICE if DEVICE.type == "cuda" else None
        dist.init_process_group(
            backend,
            store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False),
            rank=0,
            world_size=1,
            device_id=device_id,
        )
        yield
        dist.destroy_process_group()


@contextmanager
def without_peers(size: int) -> Iterator[None]:
    """A world of several ranks of which only this one exists: its memory is true, what it receives is not."""

    def fake_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, backend=None, **options: new_group(*args, **options)

    with MonkeyPatch.context() as patch:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
        patch.setattr(dist, "new_group", fake_group(dist.new_group))
        yield
        dist.destroy_process_group()
