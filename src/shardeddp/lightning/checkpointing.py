"""Saving checkpoints: as one file or as a directory of shards, now or in a thread.

Also deletion of checkpoints and of leftovers.
"""

from __future__ import annotations

import os
import platform
import uuid
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardeddp.checkpoint import clean
from shardeddp.checkpoint.find import last_checkpoints
from shardeddp.checkpoint.full_write import save_full, stream_full, with_plain_views
from shardeddp.checkpoint.location import is_remote, local_path, location
from shardeddp.checkpoint.manifest import TrainingRun
from shardeddp.checkpoint.remote import RemotePath, require_writable
from shardeddp.checkpoint.schema import count_in
from shardeddp.checkpoint.snapshot import ParameterNames, nbytes_of, take_snapshot
from shardeddp.checkpoint.write import Saver
from shardeddp.comm import Mesh, agree_on_any, run_on_all_ranks
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    LIGHTNING_VERSION,
    CheckpointIO,
    Trainer,
    rank_zero_info,
)
from shardeddp.lightning.checkpoint_paths import (
    checkpoint_folders,
    folders_to_be,
    lies_in,
    paths_after_move,
    place_of,
    unlink_last,
)
from shardeddp.lightning.restore import CODECS, clear_away, is_default_io
from shardeddp.lightning.run_group import RunGroup

_HOW_TO_READ = (
    "trainer.fit(ckpt_path=), MyModule.load_from_checkpoint() where shardeddp is imported, and "
    "`shardeddp consolidate` read them; torch.load() does not"
)


class Checkpoints:
    """Checkpoints that a run writes and deletes."""

    def __init__(self, group: RunGroup) -> None:
        self._group = group
        self._saver = Saver(group.options.checkpoint_options)
        self._announced = False  # True once logged that checkpoints are directories
        self._written: set[str] = set()

    def begin_run(self, trainer: Trainer, io: CheckpointIO) -> None:
        """Refuse a plugin that sharded checkpoints would bypass; delete leftovers of killed runs."""
        self._check_io(io)
        if self._group.is_rank_zero:
            root = trainer.default_root_dir
            clear_away([*checkpoint_folders(trainer), *([] if is_remote(root) else [root])])

    def _check_io(self, io: CheckpointIO) -> None:
        options = self._group.options
        kind, saves = options.state_dict_type, options.checkpoint_options
        if is_default_io(io) or kind == "full":
            return
        if kind == "sharded" or saves.asynchronous:
            raise ConfigurationError(
                f"checkpoint_io={type(io).__name__} writes checkpoints that are one file, and "
                f"state_dict_type={kind!r}, asynchronous={saves.asynchronous} writes "
                f"directories by itself. Use state_dict_type='full' with it; for saves behind the "
                f"back of training, checkpoint_options=CheckpointOptions(asynchronous=True) "
                f"without it"
            )

    def check_stores(self, trainer: Trainer) -> None:
        """Refuse an object store that cannot be written, before callbacks access it.

        Collective of all ranks.
        """
        refusal = ""
        if self._group.is_rank_zero:
            try:
                for folder in filter(is_remote, map(local_path, folders_to_be(trainer))):
                    require_writable(RemotePath(folder), trainer.world_size)
            except ConfigurationError as error:
                refusal = str(error)
        if refusal := self._group.broadcast(refusal):
            raise ConfigurationError(refusal)

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any,
        io: CheckpointIO,
        names: Callable[[], ParameterNames],
        trainer: Trainer | None = None,
    ) -> None:
        """Write a checkpoint according to ``state_dict_type``; a collective of all ranks.

        If a step fails on one rank: see the table in ``docs/checkpoints.md``.

        Args:
            checkpoint: Nested state with sharded tensors.
            filepath: Target path; that of rank 0 holds for all ranks.
            storage_options: Options for the plugin; they require a single file.
            io: Checkpoint plugin of the Trainer.
            names: Function that returns the parameter names of each optimizer.
            trainer: Trainer that saves; None under Fabric.
        """
        if not os.fspath(filepath) or "\0" in os.fspath(filepath):
            raise ValueError(
                f"save_checkpoint() takes the path of a checkpoint, found {filepath!r}"
            )
        self._written.add(place_of(local_path(filepath)))
        mesh = self._group.current
        if mesh is None:
            _write_by_plugin(checkpoint, filepath, storage_options, io, None)
            return
        checkpoint = with_plain_views(checkpoint)
        # Rank 0 decides for all: other ranks may have different callbacks and paths.
        why = self._why_directory(checkpoint, storage_options, io) if mesh.rank == 0 else None
        path, why = self._group.broadcast((os.path.expanduser(local_path(filepath)), why))
        place, described = location(path), self._describe(checkpoint, mesh, trainer)
        if why is None:
            self.wait()
            if streams(storage_options, io):
                stream_full(
                    checkpoint,
                    place,
                    mesh,
                    names(),
                    described,
                    self._group.options.checkpoint_options,
                )
            else:
                _write_by_plugin(checkpoint, filepath, storage_options, io, mesh)
            return
        if storage_options is not None:
            raise TypeError(
                "storage_options are for one file: use state_dict_type='full', or leave them out "
                "of save_checkpoint()"
            )
        if why and not self._announced:
            self._announced = True
            rank_zero_info(f"ShardedDP: checkpoints are directories, because {why}. {_HOW_TO_READ}")
        snapshot = run_on_all_ranks(
            "describing the checkpoint",
            partial(take_snapshot, checkpoint, names(), mesh, CODECS),
            mesh.control,
        )
        self._saver.save(snapshot, place, described, mesh.saving)

    def _why_directory(
        self,
        checkpoint: Mapping[str, Any],
        storage_options: Any,
        io: CheckpointIO,
    ) -> str | None:
        """Return the reason for a directory: "" if the user chose it, None for a single file."""
        kind = self._group.options.state_dict_type
        options = self._group.options.checkpoint_options
        if kind != "auto":
            return "" if kind == "sharded" else None
        if options.asynchronous:
            return "CheckpointOptions(asynchronous=True) is for directories"
        if not options.zip_crc:
            return "CheckpointOptions(zip_crc=False) is for directories"
        nbytes = nbytes_of(checkpoint)
        if nbytes <= options.max_file_gb * 1e9 or not streams(storage_options, io):
            return None
        return f"one has {nbytes / 1e9:.1f} GB and CheckpointOptions(max_file_gb={options.max_file_gb:g}) is less"

    def _describe(
        self, checkpoint: Mapping[str, Any], mesh: Mesh, trainer: Trainer | None
    ) -> TrainingRun:
        # A user's hook may have replaced the counts in the checkpoint.
        step, epoch = (trainer.global_step, trainer.current_epoch) if trainer else (0, 0)
        return TrainingRun(
            uuid=uuid.uuid4().hex,
            step=count_in(checkpoint, "global_step", step),
            epoch=count_in(checkpoint, "epoch", epoch),
            world_size=mesh.topology.world_size,
            shard_size=mesh.topology.shard_size,
            tensor_size=mesh.topology.tensor_size,
            expert_size=mesh.expert_size,
            sharding_strategy=self._group.options.sharding_strategy,
            versions={
                "torch": str(torch.__version__),
                "lightning": LIGHTNING_VERSION,
                "python": platform.python_version(),
            },
        )

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            CheckpointError: The background save has failed.
        """
        self._saver.wait()

    def begin_batch(self) -> None:
        """Raise the error of a failed background save.

        Collective of all ranks while a save is in progress.
        """
        if self._saver.started and not any(
            agree_on_any([self._saver.busy], self._group.mesh.control)
        ):
            self.wait()

    def remove(self, filepath: str | Path, io: CheckpointIO, trainer: Trainer | None) -> None:
        """Delete a checkpoint after saves in progress.

        A callback may have read the path from a checkpoint of another author. So it must be a
        checkpoint that this run has written, or one of this package in a checkpoint directory of
        this run's callbacks.
        """
        path = local_path(filepath)
        if trainer is None:
            raise RuntimeError(
                "ShardedDP knows where its checkpoints are only while a Trainer runs"
            )
        written = place_of(path) in self._written
        # Unlink now: the deletion may wait for a save, and until then a callback would find the
        # link and choose another name.
        unlink_last(path, trainer)
        if streams(None, io):
            roots = checkpoint_folders(trainer)
            self._saver.then(partial(clean.remove, path, roots, written=written))
        elif written or any(lies_in(path, folder) for folder in checkpoint_folders(trainer)):
            io.remove_checkpoint(path)
        else:
            warnings.warn(
                f"The checkpoint {path!r} was not deleted: this run has not written it, and it "
                f"lies outside of the directories in which callbacks keep checkpoints.",
                stacklevel=2,
            )

    def follow_move(
        self, checkpoint: Mapping[str, Any], path: str | Path, trainer: Trainer | None
    ) -> None:
        """Update callbacks' paths if the checkpoint directory was moved; a collective of all ranks.

        Rank 0 looks for the files, so that all ranks continue with the same names.
        """
        states = checkpoint.get("callbacks")
        if trainer is not None and states:
            local, moved = os.path.expanduser(local_path(path)), dict[str, Any]()
            if self._group.is_rank_zero:
                moved = paths_after_move(states, local, trainer)
            states.update(self._group.broadcast(moved))

    def find_last(self, candidates: list[str], folders: list[str], *, clears: bool) -> str | None:
        """Return the path of the checkpoint of the highest step; None if there is none.

        With ``clears``, leftovers of killed runs in the folders are deleted first.
        """
        self.wait()
        if clears:
            clear_away(folders)
        found = last_checkpoints(candidates, folders)
        return str(found[0]) if found else None


def streams(storage_options: Any, io: CheckpointIO) -> bool:
    """True if a single file can be streamed while its tensors are gathered.

    False if a plugin or storage options control the writing.
    """
    return is_default_io(io) and storage_options is None


def _write_by_plugin(
    checkpoint: dict[str, Any],
    path: str | Path,
    storage_options: Any,
    io: CheckpointIO,
    mesh: Mesh | None,
) -> None:
    """Write one file with the user's plugin, from rank 0's memory."""

    def write(full: dict[str, Any]) -> None:
        io.save_checkpoint(full, path, storage_options=storage_options)

    save_full(checkpoint, str(path), write, mesh)
