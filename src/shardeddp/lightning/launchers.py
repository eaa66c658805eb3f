"""Launchers of ranks, `ckpt_path="last"` in them, and full weights for the main process."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from shardeddp.checkpoint.full_write import gather_full
from shardeddp.checkpoint.location import is_remote, local_path, location
from shardeddp.checkpoint.manifest import MANIFEST
from shardeddp.engine.deferred_init import materialize
from shardeddp.engine.recording import Recording
from shardeddp.lightning import private
from shardeddp.lightning.api import (
    ClusterEnvironment,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    ParallelStrategy,
    SLURMEnvironment,
    Trainer,
    TrainerFn,
    cluster_environment_of,
    handed_down,
)
from shardeddp.lightning.model_sharding import ModelSharding
from shardeddp.lightning.planning import PlanLauncher
from shardeddp.lightning.preemption import FILE_NAME
from shardeddp.lightning.private import MultiProcessingLauncher, SubprocessScriptLauncher
from shardeddp.lightning.run_group import RunGroup

# -- ``ckpt_path="last"``: the checkpoint of the highest step
#
# Lightning takes the one with the newest time stamp, but clocks differ between machines, and a copy
# or a backup changes time stamps. Lightning looks up the path after it has launched the ranks and
# before it calls the strategy, so the launcher has to replace the lookup.


def resolve_last(trainer: Trainer) -> None:
    """Let a Trainer ask its strategy for the last checkpoint."""
    # Each rank looks it up before there is a process group; later the path of rank 0 holds for all.
    agree = trainer.strategy.broadcast
    private.replace_checkpoint_lookup(trainer, partial(_look_up, trainer), agree)


class ShardedScriptLauncher(SubprocessScriptLauncher):
    """Lightning's script launcher, with checkpoint lookup by the strategy.

    After a failed run it calls ``on_error``, before ``on_exception`` of the callbacks.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._on_error = on_error

    def __getstate__(self) -> dict[str, Any]:
        """Drop started processes from copies."""
        return {**vars(self), "procs": []}

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        if trainer is not None:
            resolve_last(trainer)
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException as error:
            self._on_error(error)
            raise


def _look_up(trainer: Trainer, parse: Callable[[Any], Any], ckpt_path: Any) -> Any:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    on_exception = [each for each in callbacks if isinstance(each, OnExceptionCheckpoint)]
    asked = ckpt_path == "last" or (
        ckpt_path is None and on_exception and trainer.state.fn == TrainerFn.FITTING
    )
    if not asked:
        return parse(ckpt_path)
    callbacks = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    candidates = {
        path for callback in callbacks for path in private.find_last_checkpoints(callback, trainer)
    }
    candidates |= {callback.ckpt_path for callback in on_exception} | _saved_for_requeue(trainer)
    if not callbacks:
        candidates |= _preempted_in(trainer.default_root_dir)
    given = {local_path(path): path for path in candidates}
    remote = any(map(is_remote, given))
    # lexists: the target of a link may not exist yet
    are_there = remote or any(map(os.path.lexists, given))
    folders = [
        local_path(folder)
        for callback in callbacks
        if (folder := getattr(callback, "dirpath", None))
    ]
    found = None
    if are_there or (folders and ckpt_path == "last"):
        strategy: Any = trainer.strategy
        found = strategy.find_last(sorted(given) if are_there else [], folders)
    if found:
        return given.get(found, found)  # the callback's own object: Path or str
    # In an object store, Lightning looks for files only, and warns if it finds none.
    return None if are_there else parse(ckpt_path)


def _preempted_in(folder: str) -> set[str]:
    """Checkpoint of a preempted run in a folder, saved there if no callback keeps checkpoints."""
    place = location(os.path.join(folder, FILE_NAME))
    return {str(place)} if place.is_committed(MANIFEST) else set()


def _saved_for_requeue(trainer: Trainer) -> set[str]:
    """Checkpoint that this job saved before SLURM requeued it; empty if it was not requeued."""
    slurm = isinstance(cluster_environment_of(trainer), SLURMEnvironment)
    if not slurm or os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return set()
    return {path for path in [private.requeue_checkpoint(trainer)] if path is not None}


# -- Choice of a launcher


def make_launcher(
    strategy: Any,
    environment: ClusterEnvironment,
    group: RunGroup,
    sharding: ModelSharding,
    on_error: Callable[[BaseException], None],
) -> Any:
    """Make the launcher of ``plan_only`` or of a start method; failed runs call ``on_error`` first."""
    options = group.options
    if options.plan_only:
        return PlanLauncher(strategy)
    if options.start_method == "popen":
        end = partial(_end, group, sharding, on_error)
        return ShardedScriptLauncher(environment, strategy.num_processes, strategy.num_nodes, end)
    leave = partial(_leave, group, on_error)
    return ShardedMultiProcessingLauncher(strategy, options.start_method, sharding.recording, leave)


def _end(
    group: RunGroup,
    sharding: ModelSharding,
    on_error: Callable[[BaseException], None],
    error: BaseException,
) -> None:
    """End a run that has failed in this process; callbacks are told of the error next."""
    on_error(error)
    group.explain_at_exit(error)
    sharding.end_hooks()


def _leave(
    group: RunGroup, on_error: Callable[[BaseException], None], error: BaseException
) -> None:
    """End a run that has failed in a spawned or forked rank."""
    on_error(error)
    group.explain_and_leave(error)


# -- Launcher of spawned and forked ranks
#
# Lightning's launcher, with full weights returned to the main process.


class ShardedMultiProcessingLauncher(MultiProcessingLauncher):
    """Launcher that spawns or forks ranks, and returns full weights to the main process, as in DDP.

    A rank that is about to exit with an error calls ``on_error``.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: Literal["spawn", "fork", "forkserver"],
        recording: Recording,
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__(strategy, start_method)
        self._recording, self._on_error = recording, on_error
        self._forks = start_method == "fork"

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        if trainer is not None:
            resolve_last(trainer)
            if not self._forks:
                # The recording and relations between meta tensors cannot be sent to the ranks.
                materialize(trainer.lightning_module, self._recording, is_loaded=False)
        with handed_down():
            return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _wrapping_function(self, *arguments: Any, **named: Any) -> None:
        try:
            super()._wrapping_function(*arguments, **named)
        except BaseException as error:
            # Lightning reports errors to strategies only in the main process, and only one message.
            self._on_error(error)
            raise

    @override
    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        def gather(
            module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
        ) -> None:
            # Called on all ranks; only rank 0 keeps the gathered state and sends it to the main
            # process.
            state_dict.update(gather_full(dict(state_dict), trainer.is_global_zero))

        handle = trainer.lightning_module.register_state_dict_post_hook(gather)
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            handle.remove()

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        # The main process has sharded nothing. Its tensors on the meta device get values here;
        # weights are loaded next.
        materialize(trainer.lightning_module, self._recording, is_loaded=True)
        super()._recover_results_in_main_process(worker_output, trainer)
