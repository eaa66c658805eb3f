"""A training that must end the same under every strategy, and the comparison with DistributedDataParallel."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from shardeddp import ShardedDP
from support.tasks import Recorded
from support.trainers import assert_same_weights, full_weights, make_trainer


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run of one rank leaves."""

    losses: list[float]
    weights: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training; its functions can be sent to the ranks of a world."""

    model: Callable[[], Recorded]
    """Builds the module; a class or a module-level function."""

    loader: Callable[..., Any]
    """Of so many samples, in batches of 4 or of what is said besides."""

    steps: int = 6
    """Optimizer steps; more than an epoch has, where ``batches`` is smaller."""

    batches: int = 4
    """Per rank and epoch, of 4 samples each."""

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More of the Trainer's arguments."""

    warns: str = "(?!)"
    """What warnings a run may give, as the start of their text; none."""

    ddp: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What DistributedDataParallel needs for it."""

    def under_ddp(self) -> Trained:
        """Train as everybody does it."""
        return self._train(DDPStrategy(**self.ddp))

    def sharded(self, sharding_strategy: str = "full_shard", **arguments: Any) -> Trained:
        """Train under ShardedDP with these arguments."""
        return self._train(ShardedDP(sharding_strategy, **arguments))

    def sharded_by(self, arguments: Mapping[str, Any]) -> Trained:
        """The same for a world, which passes positional arguments only."""
        return self.sharded(**arguments)

    def alone(self, ranks: int) -> Trained:
        """Train in one process on what so many ranks have together; for a world of one."""
        return self._train("auto", ranks)

    def _train(self, strategy: ShardedDP | DDPStrategy | str, ranks: int = 1) -> Trained:
        seed_everything(1, verbose=False)
        warnings.filterwarnings("ignore", self.warns)
        if isinstance(strategy, DDPStrategy):  # which Lightning sets up on another stream
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        model = self.model()
        trainer = make_trainer(strategy, max_steps=self.steps, max_epochs=-1, **self.options)
        together = () if ranks == 1 else (4 * ranks,)
        trainer.fit(model, self.loader(4 * self.batches * trainer.world_size * ranks, *together))
        return Trained(losses=model.losses, weights=full_weights(model))


def assert_same_training(
    found: Sequence[Trained], expected: Sequence[Trained], rtol: float = 1e-5
) -> None:
    """On every rank: each loss and each weight within ``rtol``."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=rtol, atol=0)
        assert_same_weights(ours.weights, theirs.weights, rtol)
