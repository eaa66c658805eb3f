"""Reshard schedule: a callback that changes the sharding strategy at given optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from shardeddp.config import ShardingStrategyName
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import Callback, LightningModule, Trainer
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
        strategy = trainer.strategy
        if not isinstance(strategy, ShardedDP):
            raise ConfigurationError("ReshardSchedule needs Trainer(strategy=ShardedDP(...))")
        tensor, experts = (
            strategy.options.tensor_parallel_size,
            strategy.options.expert_parallel_size,
        )
        if max(tensor, experts) > 1:
            raise ConfigurationError(
                f"ReshardSchedule does not work with split layers or divided experts yet, found "
                f"tensor_parallel_size={tensor} and expert_parallel_size={experts}"
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Change the strategy from its step on, except during gradient accumulation."""
        due: list[ShardingStrategyName] = [
            name for step, name in self.strategies.items() if step <= trainer.global_step
        ]
        strategy: Any = trainer.strategy
        if due and not strategy.mesh.run.incomplete:
            strategy.reshard(due[-1])
