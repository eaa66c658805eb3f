"""Trainings whose streams are checked: one rank of a world that is not there, on a device that is not there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from shardeddp import ActivationCheckpointing, CPUOffload, ShardedDP
from shardeddp.checkpoint.snapshot import HostMemory, take_snapshot
from support.stream_races import DEVICE, Checker, Issued, virtual_device
from support.trainers import PoolEnvironment, make_trainer

WIDTH = 8
STEPS = 3
"""Optimizer steps; orders are known from the second on, and memory of the first is used again."""


class Block(nn.Module):
    """Two layers and a BatchNorm, whose buffers a forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keeps = False
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH) to the same."""
        if self.keeps:
            self.kept = self.down.weight.detach()[0]
        return x + self.down(self.norm(self.up(x)).relu())


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run to check."""

    strategy: str = "full_shard"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the strategy."""

    accumulate: int = 1
    precision: str = "32-true"
    clip: float | None = None
    outside: bool = False
    """A parameter is used outside of its unit."""

    muon: bool = False
    manual: bool = False
    snapshots: bool = False
    """Checkpoints are copied to the host while training goes on."""

    between: bool = False
    """A unit is called between steps, and one of its parameters is written to at once."""

    assigns: bool = False
    """Gradients are assigned before the backward, which adds to them."""

    keeps: bool = False
    """A view of a parameter is used after its unit's forward, and dropped at once."""

    ranks: int = 8

    def __str__(self) -> str:
        told = [self.strategy, *(_told(name, value) for name, value in self.options.items())]
        for name in (
            "accumulate",
            "precision",
            "clip",
            "outside",
            "muon",
            "manual",
            "snapshots",
            "between",
            "assigns",
            "keeps",
        ):
            if getattr(self, name) != getattr(Scenario, name):
                told.append(f"{name}={getattr(self, name)}")
        return ", ".join(told)


def _told(name: str, value: Any) -> str:
    if name == "activation_checkpointing":
        return "recomputed" if isinstance(value, set) else "recomputed from the host"
    if isinstance(value, CPUOffload):
        return "offload of " + " and ".join(
            it for it in ("params", "optimizer") if getattr(value, it)
        )
    return f"{name}={value}"


class Net(LightningModule):
    """Blocks between two layers of the root unit."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario
        self.losses: list[torch.Tensor] = []
        self.automatic_optimization = not scenario.manual
        self.input = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks[1].keeps = scenario.keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH) to the same."""
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Mean of squares."""
        loss = self._loss(batch)
        if self.scenario.manual:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            self.manual_backward(self._loss(batch + 1))
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self(batch).square().mean()
        self.losses.append(loss.detach())
        block: Any = self.blocks[1]
        if block.keeps:
            loss = loss + 1e-3 * block.kept.square().sum()
            block.kept = None
        if self.scenario.outside:
            weight = self.blocks[1].down.weight
            loss = loss + 1e-3 * weight.square().sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, or Muon for matrices."""
        if self.scenario.muon:
            matrices = [it for it in self.parameters() if it.ndim == 2]
            return torch.optim.Muon(matrices, lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(Callback):
    """Takes snapshots, and counts what holds the host up in a step that is like others."""

    def __init__(self, checker: Checker, scenario: Scenario) -> None:
        self._checker, self._scenario = checker, scenario
        self._memory = HostMemory()
        self.holds: Counter[str] = Counter()
        """In the last step."""

    def on_train_batch_start(self, trainer: Trainer, _: Any, __: Any, index: int) -> None:
        """Count anew."""
        if index % trainer.accumulate_grad_batches == 0:
            self._checker.host_waits.clear()

    def on_before_backward(self, _: Any, module: LightningModule, *__: Any) -> None:
        """Assign gradients."""
        if self._scenario.assigns:
            for parameter in module.parameters():
                parameter.grad = parameter.detach() * 1e-3

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        """Copy all that a checkpoint has."""
        self.holds = self._checker.host_waits.copy()
        if self._scenario.between:
            block: Any = module.blocks[1]
            with torch.no_grad():
                block(torch.ones(2, WIDTH, device=DEVICE, dtype=block.up.weight.dtype))
                block.up.weight.mul_(0.5)
        if self._scenario.snapshots and trainer.global_step > 0:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            names = [[name for name, _ in module.named_parameters()]]
            mesh: Any = trainer.strategy.mesh
            take_snapshot(checkpoint, names, mesh, ()).copied(self._memory)


class Place(PoolEnvironment):
    """Nodes of four ranks."""

    def __init__(self) -> None:
        super().__init__(4)


@dataclass(kw_only=True)
class Outcome:
    """What a run showed."""

    violations: list[str]
    holds: dict[str, int]
    collectives: list[Issued]
    losses: list[float]
    """Of all micro-batches; other ranks are taken to hold what this one holds."""


def check(scenario: Scenario, rank: int = 0) -> Outcome:
    """Train as one rank of so many; in a process without a process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=scenario.ranks)
    try:
        with (
            patch.object(ShardedDP, "root_device", property(lambda _: DEVICE)),
            patch.object(CPUAccelerator, "setup_device", lambda *_: None),
            patch.object(dist, "broadcast_object_list", lambda *_, **__: None),
            virtual_device() as checker,
        ):
            torch.manual_seed(0)
            watch = Watch(checker, scenario)
            plugins: list[Any] = [Place()]
            precision: dict[str, Any] = {"precision": scenario.precision}
            if scenario.precision == "16-mixed":
                scaler = torch.amp.GradScaler("cpu")
                scaler._device = "cuda"
                plugins.append(MixedPrecision("16-mixed", "cpu", scaler))
                precision = {}
            trainer = make_trainer(
                ShardedDP(scenario.strategy, auto_wrap_policy={Block}, **scenario.options),
                num_nodes=scenario.ranks // 4,
                plugins=plugins,
                max_steps=STEPS,
                accumulate_grad_batches=scenario.accumulate,
                gradient_clip_val=scenario.clip,
                callbacks=[watch],
                use_distributed_sampler=False,
                **precision,
            )
            data = torch.randn(2 * STEPS * scenario.accumulate, WIDTH)
            model = Net(scenario)
            trainer.fit(model, DataLoader(data, batch_size=2))
            if trainer.global_step != STEPS:
                raise RuntimeError(f"{scenario} has made {trainer.global_step} steps")
    finally:
        dist.destroy_process_group()
    return Outcome(
        violations=[f"{violation} ({count} times)" for violation, count in checker.found.items()],
        holds=dict(watch.holds),
        collectives=checker.collectives,
        losses=[float(loss) for loss in model.losses],
    )


# -- Grid: choices, and runs in which all pairs of them (or triples) meet

STRATEGIES = ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
ON_HOST = ActivationCheckpointing(modules={Block}, cpu_offload=True)
CHOICES: dict[str, Sequence[Any]] = {
    "strategy": STRATEGIES,
    "groups": ("usual", "world", "hpz"),
    "accumulate": (1, 2),
    "precision": ("32-true", "bf16-mixed", "16-mixed", "bf16-true"),
    "recomputed": (None, {Block}, ON_HOST),
    "offload": (
        None,
        CPUOffload(params=True),
        CPUOffload(optimizer=True),
        CPUOffload(params=True, optimizer=True),
    ),
    "clip": (None, 0.1),
    "outside": (False, True),
    "muon": (False, True),
    "manual": (False, True),
    "snapshots": (False, True),
    "between": (False, True),
}


def _fits(chosen: dict[str, Any]) -> bool:
    strategies = {"usual": STRATEGIES, "world": STRATEGIES[1:2], "hpz": STRATEGIES[:1]}
    by_hand = chosen["manual"] and (chosen["accumulate"] > 1 or chosen["clip"])
    refused = chosen["muon"] and chosen["offload"] == CPUOffload(optimizer=True)
    return chosen["strategy"] in strategies[chosen["groups"]] and not by_hand and not refused


def _scenario(chosen: dict[str, Any]) -> Scenario:
    given = dict(chosen)
    options: dict[str, Any] = {
        "usual": {},
        "world": {"optimizer_shard": "world"},
        "hpz": {"reshard_after_forward": 4},
    }[given.pop("groups")]
    if (recomputed := given.pop("recomputed")) is not None:
        options["activation_checkpointing"] = recomputed
    if (offload := given.pop("offload")) is not None:
        options["cpu_offload"] = offload
    return Scenario(options=options, **given)


def covering(strength: int) -> list[Scenario]:
    """Runs in which all so many choices of different kinds that fit together meet; always the same.

    Args:
        strength: 2 for pairs.
    """
    generator = random.Random(0)

    def draw() -> dict[str, Any]:
        while True:
            chosen = {name: generator.randrange(len(values)) for name, values in CHOICES.items()}
            if _fits({name: CHOICES[name][index] for name, index in chosen.items()}):
                return chosen

    def met(chosen: dict[str, Any]) -> set[tuple[Any, ...]]:
        return set(combinations(chosen.items(), strength))

    possible = set().union(*(met(draw()) for _ in range(1_500 * strength)))
    found: list[Scenario] = []
    while possible:
        best = max((draw() for _ in range(20)), key=lambda it: len(met(it) & possible))
        if new := met(best) & possible:
            possible -= new
            found.append(_scenario({name: CHOICES[name][index] for name, index in best.items()}))
    return found
