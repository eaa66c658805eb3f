"""The launcher of spawned and forked ranks: Lightning's own, with full weights brought back to the main process."""

from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from shardeddp.lightning_api import ParallelStrategy, Trainer, handed_down, private
from shardeddp.plugins.last import resolve_last
from shardeddp.sharding.materialize import allocate_on_host


class ShardedMultiProcessingLauncher(private.RankLauncher):
    """Spawns or forks the ranks; at the end the main process gets the full weights, as it does under DDP.

    Args:
        strategy: Whose ranks.
        start_method: How they start.
        gather: Makes a state full on the ranks that pass True; it is sent to spawned ranks, so it can be imported.
        on_error: Called in a rank that is about to end with an error.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: Literal["spawn", "fork", "forkserver"],
        gather: Callable[[Any, bool], Any],
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__(strategy, start_method)
        self._gather = gather
        self._on_error = on_error

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None:
            resolve_last(trainer)
        with handed_down():
            return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def run_rank(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            # Lightning tells strategies of errors in the main process alone, where it has the text of one of them.
            self._on_error(error)
            raise

    @override
    def collect_results(self, collect: Callable[[], Any], trainer: Trainer) -> Any:
        def gather(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
            # All ranks pass here; only rank 0 keeps what it gathers and sends it to the main process.
            state_dict.update(self._gather(dict(state_dict), self.strategy.is_global_zero))

        handle = trainer.lightning_module.register_state_dict_post_hook(gather)
        try:
            return collect()
        finally:
            handle.remove()

    @override
    def recover_results(self, recover: Callable[[], None], trainer: Trainer, weights_path: Any) -> None:
        if weights_path is not None:
            # The main process has sharded nothing: loading into a module on the meta device would do nothing.
            allocate_on_host(trainer.lightning_module)
        recover()
