"""Launchers of ranks, `ckpt_path="last"` in them, and full weights for the main process."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from shardeddp.checkpoint.durable import is_remote, local_path, location
from shardeddp.checkpoint.find import carries_manifest
from shardeddp.checkpoint.remote import RemotePath
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
from shardeddp.lightning.preemption import FILE_NAME
from shardeddp.lightning.private import SubprocessScriptLauncher

# -- ``ckpt_path="last"``: the checkpoint of the highest step
#
# Lightning takes the one with the newest time stamp.
#
# Clocks differ between machines, and a copy or a backup changes time stamps. Lightning looks the
# path up when it has launched the ranks and before it asks the strategy anything, so the launcher
# is where that can be done otherwise.


def resolve_last(trainer: Trainer) -> None:
    """Let a Trainer ask its strategy which checkpoint is the last."""
    # Each rank looks by itself, before there is a process group: what rank 0 has found holds for all.
    agree = trainer.strategy.broadcast
    private.replace_checkpoint_lookup(trainer, partial(_look_up, trainer), agree)


class ShardedScriptLauncher(SubprocessScriptLauncher):
    """Lightning's own launcher of scripts, for a strategy that finds checkpoints.

    Args:
        environment: Of the cluster.
        num_processes: Ranks of this node.
        num_nodes: Nodes of the run.
        end: Called when a run has failed, before callbacks hear of it.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        end: Callable[[], None],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._end = end

    def __getstate__(self) -> dict[str, Any]:
        """A copy has started no processes."""
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
        except BaseException:
            self._end()
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
    folders = [
        local_path(folder)
        for callback in callbacks
        if (folder := getattr(callback, "dirpath", None))
    ]
    remote = any(map(is_remote, given))
    # In a store, Lightning looks for files alone, and warns where it finds none.
    if not remote and not any(
        os.path.lexists(path) for path in given
    ):  # a link may lead nowhere yet
        return parse(ckpt_path)
    strategy: Any = trainer.strategy
    found = strategy.find_last(sorted(given), folders)
    return given.get(found, found) if found else None  # as the callback names it: a path or a text


def _preempted_in(folder: str) -> set[str]:
    """What a signal has saved there, where no callback keeps checkpoints."""
    place = location(os.path.join(folder, FILE_NAME))
    remote = isinstance(place, RemotePath)
    is_there = carries_manifest(place) or place.is_file() if remote else os.path.lexists(place)
    return {str(place)} if is_there else set()


def _saved_for_requeue(trainer: Trainer) -> set[str]:
    """Checkpoint that this job saved before SLURM requeued it; None if it was not requeued."""
    slurm = isinstance(cluster_environment_of(trainer), SLURMEnvironment)
    if not slurm or os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return set()
    return {path for path in [private.requeue_checkpoint(trainer)] if path is not None}


# -- Launcher of spawned and forked ranks
#
# Lightning's own; full weights are brought back to the main process.


class ShardedMultiProcessingLauncher(private.RankLauncher):
    """Spawns or forks the ranks; at the end the main process gets the full weights, as under DDP.

    Args:
        strategy: Whose ranks.
        start_method: How they start.
        gather: Makes a state full on the ranks that pass True; it is sent to spawned ranks, so it
            can be imported.
        materialize: Gives a module on the meta device its values in this process; whether they are
            loaded afterwards.
        on_error: Called in a rank that is about to end with an error.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: Literal["spawn", "fork", "forkserver"],
        gather: Callable[[Any, bool], Any],
        materialize: Callable[[nn.Module, bool], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__(strategy, start_method)
        self._gather, self._materialize = gather, materialize
        self._on_error, self._forks = on_error, start_method == "fork"

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
                # Its recording stays in this process, and so do relations between meta
                # tensors.
                self._materialize(trainer.lightning_module, False)
        with handed_down():
            return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def run_rank(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            # Lightning tells strategies of errors in the main process alone, where it has the text
            # of one of them.
            self._on_error(error)
            raise

    @override
    def collect_results(self, collect: Callable[[], Any], trainer: Trainer) -> Any:
        def gather(
            module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
        ) -> None:
            # All ranks pass here; only rank 0 keeps what it gathers and sends it to the main
            # process.
            state_dict.update(self._gather(dict(state_dict), self.strategy.is_global_zero))

        handle = trainer.lightning_module.register_state_dict_post_hook(gather)
        try:
            return collect()
        finally:
            handle.remove()

    @override
    def recover_results(
        self, recover: Callable[[], None], trainer: Trainer, weights_path: Any
    ) -> None:
        # The main process has sharded nothing: what was built there on the meta device has values
        # from here on, weights those that are loaded.
        self._materialize(trainer.lightning_module, True)
        recover()
