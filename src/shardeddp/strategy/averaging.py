"""AveragingStrategy: what callbacks keep of a model and tell of it - averages, summaries - fits a sharded one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from shardeddp.lightning_api import LightningModule, Trainer, TrainerFn, rank_zero_info
from shardeddp.monitor.units import describe_units, print_units
from shardeddp.plugins.refused import refuse_callbacks
from shardeddp.plugins.summary import complete_summaries, restore_summaries
from shardeddp.sharding.hooks import runtime_of
from shardeddp.sharding.runtime import Runtime
from shardeddp.strategy.averages import Averages
from shardeddp.strategy.continuing import ContinuingStrategy


class AveragingStrategy(ContinuingStrategy):
    """Shards the averages of a model that callbacks keep, completes their summaries, and describes units.

    Args:
        options: Of :class:`ContinuingStrategy`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._averages = Averages()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            self._averages.keep_in_place(module.trainer, module)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's part of a checkpoint; what callbacks load after it waits for shards as well."""
        super().load_model_state_dict(checkpoint, strict)
        if self.lightning_module is not None:
            self._averages.await_shards(
                self.lightning_module.trainer, self.lightning_module, self.checkpoint_options.cast
            )

    @override
    def _begin_run(self, trainer: Trainer) -> None:
        super()._begin_run(trainer)
        if self.mesh.topology.world_size == 1:
            # Said wherever a process group exists; Lightning itself leaves the synchronisation of one rank out.
            warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_callbacks(trainer)
        self._averages.meet_shards(trainer.lightning_module)

    def _introduce(self, runtime: Runtime) -> None:
        """Tell people once what has become of their model."""
        if self.is_global_zero:
            rank_zero_info(f"ShardedDP: {describe_units(self._sharding_strategy, runtime)}")

    def print_units(self) -> None:
        """Print what is gathered together, and what each rank stores of it; from ``on_fit_start`` on, on any rank."""
        runtime = None if self.lightning_module is None else runtime_of(self.lightning_module)
        if runtime is None:
            raise RuntimeError("ShardedDP has no units yet: the Trainer shards the model when it starts to run")
        print_units(self._sharding_strategy, runtime)

    def _shard_averages(self, trainer: Trainer, module: LightningModule) -> None:
        """To be called by ``setup``: when the module has been sharded."""
        complete_summaries(trainer)
        load = self._averages.shard(trainer, module, self.mesh)
        if load is not None:
            self._load(load)

    @override
    def _end_run(self) -> None:
        super()._end_run()
        if self.lightning_module is not None:
            restore_summaries(self.lightning_module.trainer)
            self._averages.forget(self.lightning_module)
