"""Reshard callbacks: another sharding strategy at given optimizer steps, or when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from shardeddp.config import ShardingStrategyName
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    Callback,
    LightningModule,
    Trainer,
    TrainerFn,
    rank_zero_warn,
)
from shardeddp.lightning.out_of_memory import refusal_to_repeat, refusal_to_reshard
from shardeddp.lightning.strategy import ShardedDP
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES


class ReshardSchedule(Callback):
    """Callback that changes the sharding strategy with :meth:`shardeddp.ShardedDP.reshard`.

    A growing model, longer sequences or a larger batch may need more sharding later in a run; less
    sharding is faster until then. A resumed run continues with the strategy of its step.

    Args:
        strategies: Names of strategies by optimizer step (``trainer.global_step``) at which each
            begins.
    """

    changes_by_step = True
    """True of callbacks that set the strategy at given steps, whatever it is."""

    def __init__(self, strategies: Mapping[int, ShardingStrategyName]) -> None:
        names = [*SHARDING_STRATEGIES]
        given: Any = strategies  # may come from a YAML file
        if (
            not isinstance(given, Mapping)
            or not given
            or not all(type(step) is int and step >= 0 for step in given)  # type: ignore[reportUnknownVariableType]
            or not all(name in names for name in given.values())  # type: ignore[reportUnknownVariableType]
        ):
            raise ConfigurationError(
                f"expected ReshardSchedule({{step: name, ...}}) with steps from 0 on and names of "
                f"{', '.join(sorted(names))}, found {given}"
            )
        self.strategies: dict[int, ShardingStrategyName] = dict(sorted(strategies.items()))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that cannot change, before the training."""
        _changeable(trainer, self)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Change the strategy from its step on, except during gradient accumulation."""
        due: list[ShardingStrategyName] = [
            name for step, name in self.strategies.items() if step <= trainer.global_step
        ]
        if due:
            _change(trainer, due[-1])


class ReshardOnOutOfMemory(Callback):
    """Callback that shards deeper when memory runs out in a training step, and repeats the step.

    The forward or backward of the first micro-batch of a step runs again, on all ranks, if all of
    them have run out of memory at the same place in it: ranks with batches of equal shape do. The
    run continues as if it had had the deeper strategy before. A resumed run begins with it. In all
    other cases the error ends the run: if some ranks have enough memory, if gradients of earlier
    micro-batches would be lost, in an optimizer's step, or with the deepest strategy.

    Attributes, buffers, torchmetrics and random states that the step has changed are set back, as
    far as the module, the callbacks and the datamodule hold them; copies of buffers and metrics
    take memory during the step. A step that has written to parameters, or in place to tensors
    without a copy, is not repeated, and an error is logged. What a ``training_step`` changes
    elsewhere (globals of Python modules, iterators, states of extensions, its batch), it changes
    twice.

    Args:
        strategies: Names of the strategies to change to, in the order of the memory that they take.
        patience_s: Maximum wait for other ranks to run out of memory too, in seconds.
    """

    def __init__(
        self,
        strategies: Sequence[ShardingStrategyName] = ("shard_grad_op", "full_shard"),
        patience_s: float = 30.0,
    ) -> None:
        names = [*SHARDING_STRATEGIES]
        given: Any = strategies  # may come from a YAML file
        if not isinstance(given, list | tuple) or not given or not {*given} <= {*names}:
            raise ConfigurationError(
                f"expected ReshardOnOutOfMemory([name, ...]) with names of "
                f"{', '.join(sorted(names))}, found {given}"
            )
        if not patience_s > 0:
            raise ConfigurationError(
                f"expected ReshardOnOutOfMemory(patience_s=...) above 0, found {patience_s}"
            )
        self.strategies: list[ShardingStrategyName] = [*strategies]
        self.patience_s = patience_s
        self._reached: ShardingStrategyName | None = None  # None: memory has not run out

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse runs whose steps cannot be repeated, and watch the others."""
        strategy = _changeable(trainer, self)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if refusal := refusal_to_repeat(trainer, pl_module, strategy.options):
            raise ConfigurationError(f"ReshardOnOutOfMemory {refusal}")
        for name in self.strategies:  # refused now, and not hours later
            sharding = strategy.options.with_sharding(name, None).sharding
            sharding.topology(strategy.num_nodes, strategy.num_processes)
        strategy.repeat_steps(partial(self._deepen, trainer, strategy), self.patience_s)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Change to the strategy that a resumed run had reached, if it is deeper."""
        if self._reached is not None and self._reached in _deeper(_present(trainer)):
            _change(trainer, self._reached)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"reached": self._reached}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        reached = state_dict.get("reached")
        self._reached = reached if reached in SHARDING_STRATEGIES else None

    def _deepen(
        self, trainer: Trainer, strategy: ShardedDP, error: BaseException
    ) -> Callable[[], None] | None:
        present = _present(trainer)
        left: list[ShardingStrategyName] = [it for it in _deeper(present) if it in self.strategies]
        text = str(error).partition("\n")[0]

        def deepen() -> None:
            rank_zero_warn(
                f"memory has run out in step {trainer.global_step} with {present} on all ranks "
                f"({text}): the step is repeated with {left[0]}"
            )
            strategy.reshard(left[0])
            self._reached = left[0]

        return deepen if left else None


_BY_DEPTH: list[ShardingStrategyName] = [
    "no_shard",
    "shard_optimizer",
    "shard_grad_op",
    "hybrid_shard",
    "full_shard",
]
"""Strategies by the memory that they take, the most first."""


def _present(trainer: Trainer) -> ShardingStrategyName:
    strategy: Any = trainer.strategy
    return strategy.options.sharding_strategy


def _deeper(name: ShardingStrategyName) -> list[ShardingStrategyName]:
    """Return the strategies that take less memory than another one, the next one first."""
    return [*_BY_DEPTH[_BY_DEPTH.index(name) + 1 :]]


def _change(trainer: Trainer, name: ShardingStrategyName) -> None:
    """Change the strategy between two steps if it is another one."""
    strategy: Any = trainer.strategy
    if _present(trainer) != name and not strategy.mesh.run.incomplete:
        strategy.reshard(name)


def _changeable(trainer: Trainer, callback: Callback) -> ShardedDP:
    """Return the strategy of a Trainer, if it can change in the middle of a run."""
    strategy, name = trainer.strategy, type(callback).__name__
    if not isinstance(strategy, ShardedDP):
        raise ConfigurationError(f"{name} needs Trainer(strategy=ShardedDP(...))")
    if refusal := refusal_to_reshard(strategy.options):
        raise ConfigurationError(f"{name} {refusal}")
    return strategy
