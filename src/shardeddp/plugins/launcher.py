"""The launchers of a sharded run: Lightning's own, with full weights brought back from spawned processes."""

from typing import Any

from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer import Trainer
from torch import nn
from typing_extensions import override

from shardeddp.checkpoint.full import gather_full


class ShardedMultiProcessingLauncher(_MultiProcessingLauncher):
    """Spawns or forks the ranks; at the end the main process gets the full weights, as it does under DDP."""

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        def gather(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
            # All ranks pass here; only rank 0 keeps what it gathers and sends it to the main process.
            state_dict.update(gather_full(dict(state_dict), keep=self._strategy.is_global_zero))

        handle = trainer.lightning_module.register_state_dict_post_hook(gather)
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            handle.remove()
