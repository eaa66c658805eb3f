"""What ranks send in a training step, beside what is planned to be sent."""

from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from planner.test_collectives import sent_by_kind
from shardeddp import ShardedDP
from shardeddp.lightning.planning import plan_as_set
from shardeddp.planner.search import Planned
from support.trainers import make_trainer
from world import Worlds

LENGTH, SAMPLES, ACCUMULATED = 8, 2, 2

Counts = tuple[Counter[str], Counter[str]]
"""Bytes and calls by kind."""


class CountsSteps(Callback):
    """Counts again from zero after each optimizer step but the last."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx % ACCUMULATED == 0:
            trainer.strategy.traffic.reset()
            trainer.strategy.mesh.activation_traffic.reset()


def counted_and_planned(
    kind: type[LightningModule], strategy: ShardedDP, precision: str
) -> tuple[list[tuple[Counts, Counts]], Planned, Any]:
    """What a step sends and is planned to, of parameters and of activations; its plan; its Trainer."""
    trainer = make_trainer(
        strategy,
        max_steps=3,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[CountsSteps()],
        use_distributed_sampler=False,
        precision=precision,
    )
    batch = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
    trainer.fit(kind(), DataLoader(batch[0].expand(100, -1), batch_size=SAMPLES))  # type: ignore[arg-type]
    options = strategy.options
    (only,) = plan_as_set(
        kind(),
        batch,
        ((options.sharding_strategy, options.sharding),),
        strategy.setting(trainer),
        "A100-80",
    ).plans
    mesh = strategy.mesh
    counts = [
        (
            (+it.nbytes, +it.calls),
            sent_by_kind(
                [one for one in only.task.collectives if (one.phase == "layer") is inside]
            ),
        )
        for it, inside in ((mesh.traffic, False), (mesh.activation_traffic, True))
    ]
    return counts, only, trainer


def check(world: Worlds, ranks: int, run: Any) -> None:
    """See that all ranks have sent what is planned."""
    for data, activations in world(ranks).run(run):
        assert activations[0] == activations[1]
        assert activations[0][0].total() > 0
        for found, planned in zip(*data, strict=True):
            assert found == planned
