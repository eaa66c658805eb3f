"""CheckpointStrategy: what Lightning asks of a strategy about checkpoints, as one file or as a directory of shards."""

from __future__ import annotations

import os
import platform
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from typing_extensions import override

from shardeddp.checkpoint.disk import cleaning
from shardeddp.checkpoint.disk.committed import carries_manifest
from shardeddp.checkpoint.format.encoding import dict_codec
from shardeddp.checkpoint.format.manifest import DCP_METADATA, Run
from shardeddp.checkpoint.reading.contents import ATTRIBUTES, read_foreign_contents
from shardeddp.checkpoint.reading.last import last_checkpoints
from shardeddp.checkpoint.reading.opening import open_checkpoint, open_file
from shardeddp.checkpoint.reading.replaced import Replaced
from shardeddp.checkpoint.reading.restore import load_model, load_optimizer, stage
from shardeddp.checkpoint.reading.verification import newest_verified
from shardeddp.checkpoint.writing.full import save_full, stream_full
from shardeddp.checkpoint.writing.saver import Saver
from shardeddp.checkpoint.writing.snapshot import ParameterNames, nbytes_of, take_snapshot
from shardeddp.comm import agree_on_any, gather_results, together
from shardeddp.config import CheckpointOptions
from shardeddp.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from shardeddp.lightning_api import (
    LIGHTNING_VERSION,
    AttributeDict,
    LightningOptimizer,
    TorchCheckpointIO,
    Trainer,
    TrainerFn,
    rank_zero_info,
    rank_zero_warn,
)
from shardeddp.plugins.paths import is_remote, local_path
from shardeddp.plugins.placing import place_module
from shardeddp.sharding.hooks import runtime_of
from shardeddp.strategy.processes import ProcessStrategy

T = TypeVar("T")

_ADVICE_S = 60.0
"""How long to look for a checkpoint that can be used instead of a damaged one, while all ranks wait."""

StateDictType = Literal["auto", "sharded", "full"]

_HOW_TO_READ = (
    "trainer.fit(ckpt_path=), MyModule.load_from_checkpoint() where shardeddp is imported, and `shardeddp consolidate` "
    "read them; torch.load() does not"
)

_CODECS = (dict_codec(AttributeDict, ATTRIBUTES),)


class CheckpointStrategy(ProcessStrategy):
    """Saves and loads checkpoints of sharded models.

    Args:
        sharding_strategy: For the record in each checkpoint.
        state_dict_type: What :meth:`save_checkpoint` writes.
        checkpoint_options: More about it.
        process_options: Of :class:`ProcessStrategy`.
    """

    def __init__(
        self,
        sharding_strategy: str,
        state_dict_type: StateDictType,
        checkpoint_options: CheckpointOptions,
        **process_options: Any,
    ) -> None:
        super().__init__(**process_options)
        if state_dict_type not in get_args(StateDictType):
            raise ConfigurationError(
                f"state_dict_type={state_dict_type!r}: expected one of {', '.join(get_args(StateDictType))}"
            )
        self._sharding_strategy = sharding_strategy.lower()
        self._state_dict_type: StateDictType = state_dict_type
        self.checkpoint_options = checkpoint_options
        self._saver = Saver(checkpoint_options)
        self._told = False  # that checkpoints are directories
        self._loading_from = Path()  # of the checkpoint that was read last
        self._pending_load: Callable[[], None] | None = None  # from reading a checkpoint until the model is sharded
        self._replaced: Replaced | None = None  # from loading a model until the optimizers have taken their states

    # -- saving

    @property
    @override
    def _saving_timeout(self) -> timedelta:
        seconds = self.checkpoint_options.timeout
        return super()._saving_timeout if seconds is None else timedelta(seconds=seconds)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, as ``state_dict_type`` says; a collective of all ranks."""
        if self._mesh is None:
            self._write_by_plugin(checkpoint, filepath, storage_options)
            return
        # Rank 0 decides for all: others may have other callbacks, and paths of their own.
        why = self._why_directory(checkpoint, filepath, storage_options) if self.is_global_zero else None
        path, why = self.broadcast((os.path.expanduser(local_path(filepath)), why))
        if why is None:
            self.wait_for_checkpoint()
            if self._streams(path, storage_options):
                run, options = self._describe_training(checkpoint), self.checkpoint_options
                stream_full(checkpoint, Path(path), self._mesh, self._parameter_names(), run, options)
            else:
                self._write_by_plugin(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                "storage_options are for one file: use state_dict_type='full', or leave them out of save_checkpoint()"
            )
        if is_remote(path):
            raise NotImplementedError(
                f"sharded checkpoints need a file system, found {path}: save to a local or mounted path, or use "
                f"state_dict_type='full'"
            )
        if why and not self._told:
            self._told = True
            rank_zero_info(f"ShardedDP: checkpoints are directories, because {why}. {_HOW_TO_READ}")
        taking = partial(take_snapshot, checkpoint, self._parameter_names(), self._mesh, _CODECS)
        snapshot = together("describing the checkpoint", taking, self._mesh.control)
        self._saver.save(snapshot, Path(path), self._describe_training(checkpoint), self._mesh.saving)

    def _why_directory(self, checkpoint: Mapping[str, Any], path: str | Path, storage_options: Any) -> str | None:
        """Why a checkpoint is to be a directory: "" because the user has said so, None because it is to be a file."""
        options = self.checkpoint_options
        if self._state_dict_type != "auto":
            return "" if self._state_dict_type == "sharded" else None
        if options.asynchronous:
            return "CheckpointOptions(asynchronous=True) is for directories"
        if not options.zip_crc:
            return "CheckpointOptions(zip_crc=False) is for directories"
        nbytes = nbytes_of(checkpoint)
        if nbytes <= options.max_file_gb * 1e9 or not self._streams(path, storage_options):
            return None
        return f"one has {nbytes / 1e9:.1f} GB and CheckpointOptions(max_file_gb={options.max_file_gb:g}) is less"

    def _write_by_plugin(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Write one file as the user wants files written, from rank 0's memory."""

        def write(full: dict[str, Any]) -> None:
            self.checkpoint_io.save_checkpoint(full, path, storage_options=storage_options)

        save_full(checkpoint, str(path), write, self._mesh)

    def _describe_training(self, checkpoint: Mapping[str, Any]) -> Run:
        return Run(
            uuid=uuid.uuid4().hex,
            step=checkpoint.get("global_step", 0),
            epoch=checkpoint.get("epoch", 0),
            world_size=self.mesh.topology.world_size,
            shard_size=self.mesh.topology.shard_size,
            sharding_strategy=self._sharding_strategy,
            versions={
                "torch": str(torch.__version__),
                "lightning": LIGHTNING_VERSION,
                "python": platform.python_version(),
            },
        )

    def _check_checkpoint_io(self) -> None:
        """Refuse, before anything is trained, a plugin that sharded checkpoints would go past."""
        plugin = type(self.checkpoint_io)
        if plugin is TorchCheckpointIO or self._state_dict_type == "full":
            return
        if self._state_dict_type == "sharded" or self.checkpoint_options.asynchronous:
            raise ConfigurationError(
                f"checkpoint_io={plugin.__name__} writes checkpoints that are one file, and state_dict_type="
                f"{self._state_dict_type!r}, asynchronous={self.checkpoint_options.asynchronous} writes directories by "
                f"itself. Use state_dict_type='full' with it; for saves behind the back of training, "
                f"checkpoint_options=CheckpointOptions(asynchronous=True) without it"
            )

    def _streams(self, filepath: str | Path, storage_options: Any) -> bool:
        """Whether one file can be written as its tensors are gathered: not where the user decides how it is written."""
        return type(self.checkpoint_io) is TorchCheckpointIO and storage_options is None and not is_remote(filepath)

    def wait_for_checkpoint(self) -> None:
        """Return when no checkpoint is being written any more.

        Raises:
            CheckpointError: The one that was could not be saved.
        """
        self._saver.wait()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._saver.started and not any(agree_on_any([self._saver.busy], self.mesh.control)):
            self.wait_for_checkpoint()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint, when no save is under way any more, if it lies where this run keeps checkpoints."""
        if not self.is_global_zero:
            return
        path = local_path(filepath)
        if self._streams(path, None):
            self._saver.then(partial(cleaning.remove, path, self._checkpoint_root(path)))
        else:
            self.checkpoint_io.remove_checkpoint(path)

    def _checkpoint_root(self, filepath: str | Path) -> Path:
        """The directory of a callback that keeps checkpoints around a path, else the run's own."""
        if self.trainer is None:
            raise RuntimeError("ShardedDP knows where its checkpoints are only while a Trainer runs")
        path = Path(os.path.realpath(os.path.dirname(filepath)))
        inside = [root for root in checkpoint_folders(self.trainer) if path.is_relative_to(os.path.realpath(root))]
        return Path(inside[0] if inside else self.trainer.default_root_dir)

    def _sweep(self, folders: Iterable[str | Path]) -> None:
        """Clear away what killed runs have left in directories of checkpoints."""
        if self.is_global_zero:
            for note in (note for folder in folders for note in cleaning.sweep(folder).left):
                warnings.warn(note, stacklevel=2)

    def _parameter_names(self) -> ParameterNames:
        module = self.lightning_module
        if module is None:
            raise RuntimeError("ShardedDP has no module to save: the Trainer connects it")
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return [
            [
                names.get(id(parameter), f"parameter_{index}")
                for index, parameter in enumerate(it for group in optimizer.param_groups for it in group["params"])
            ]
            for optimizer in self.optimizers
        ]

    # -- loading

    def find_last(self, candidates: list[str], folders: list[str]) -> str | None:
        """What ``ckpt_path="last"`` means: see :func:`shardeddp.checkpoint.reading.last.last_checkpoints`."""
        self.wait_for_checkpoint()
        if self._start_method == "popen":  # else it is not known yet which rank this is
            self._sweep(folders)
        found = last_checkpoints(candidates, folders)
        return str(found[0]) if found else None

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either kind; the tensors of model and optimizers are read when they are loaded."""
        self.wait_for_checkpoint()
        path = os.path.expanduser(local_path(self.broadcast(checkpoint_path)))
        self._loading_from = Path(path)
        kind = self._kind_of(path)
        if kind == "missing":
            self._sweep([self._loading_from.parent])  # it may be there under the name of what was being replaced
            self.barrier()
            kind = self._kind_of(path)
        if kind == "directory":
            options = self.checkpoint_options
            opening = partial(
                open_any, Path(path), weights_only, foreign=options.foreign, trust_pickle=options.trust_pickle
            )
            try:
                return self._together("reading the checkpoint", opening)
            except CheckpointError as error:
                raise self._with_advice(error) from error
        if type(self.checkpoint_io) is TorchCheckpointIO and kind == "archive":
            part = (0, 1) if self._mesh is None else (self.mesh.rank, self.mesh.topology.world_size)
            try:
                reading = partial(open_file, path, weights_only, part)
                return self._together("reading the checkpoint", reading)
            except CheckpointError as error:
                raise self._with_advice(error) from error
        return super().load_checkpoint(path, weights_only)

    def _together(self, step: str, action: Callable[[], T]) -> T:
        """Read on all ranks; or on this one alone, before a run, when nobody knows of the others."""
        return action() if self._mesh is None else together(step, action, self.mesh.control)

    def _kind_of(self, path: str) -> str:
        """What is at a path, in the eyes of every rank."""

        def look() -> bytes:
            if os.path.isdir(path):
                return b"directory"
            if not os.path.lexists(path):
                return b"missing"
            return b"archive" if zipfile.is_zipfile(path) else b"file"

        if self._mesh is None:
            return look().decode()
        kinds = [kind.decode() for kind in gather_results("looking for the checkpoint", look, self.mesh.control)]
        if len(set(kinds)) > 1:
            found = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
            raise CheckpointError(
                f"the ranks do not see the same at {path} ({found}). Checkpoints have to lie on a file system that all "
                f"ranks share"
            )
        return kinds[0]

    def _load(self, load: Callable[[], None]) -> None:
        try:
            self._together("loading the checkpoint", load)
        except DamagedCheckpointError as error:
            raise self._with_advice(error) from error
        if self.lightning_module is not None:
            place_module(self.lightning_module, self.root_device)  # metrics take over what they load, wherever it is

    def _with_advice(self, error: CheckpointError) -> CheckpointError:
        """Say which checkpoint can be used instead; a collective of all ranks."""
        advice = ""
        if self.is_global_zero:
            try:
                newest = newest_verified(self._loading_from.parent, within_s=_ADVICE_S)
                advice = f"The newest that is whole is {newest}" if newest else "No whole one lies beside it"
            except (CheckpointError, TimeoutError):
                advice = f"Find a whole one with: shardeddp verify {self._loading_from.parent}"
        return type(error)(f"{error}. {self.broadcast(advice)}")

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's part of a checkpoint, at once or as soon as there are shards to load it into."""
        module = self.lightning_module
        if module is None:
            raise RuntimeError("ShardedDP has no module to load into: the Trainer connects it")
        state = checkpoint["state_dict"]
        staged = [state, checkpoint.get("optimizer_states", ())] if self._fitting else [state]

        def load() -> None:
            stage(staged, module)
            # The optimizers are made when the model is there; not before can they refuse what is stored for them.
            self._replaced = Replaced(module) if self._fitting else None
            load_model(module, state, strict, self.checkpoint_options.cast)

        if runtime_of(module) is None:
            self._pending_load = load
        else:
            self._load(load)

    @property
    def _fitting(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if not states and self.optimizers:
            rank_zero_warn(
                "the checkpoint has no optimizer states: weights are loaded, and optimizers begin as in a new training"
            )

        def load() -> None:
            if states and len(states) != len(self.optimizers):
                raise CheckpointError(
                    f"the checkpoint has the states of {len(states)} optimizers, expected {len(self.optimizers)}: "
                    f"train with the optimizers that it was saved with, or load its weights alone"
                )
            for optimizer, state in zip(self.optimizers, states, strict=False):
                inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
                if not state and not inner.state_dict():
                    continue  # Lightning's stand-in for a module without optimizers
                load_optimizer(inner, state)

        self._load(load)
        self._replaced = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Leave a model whose checkpoint was refused as it was."""
        if self._replaced is not None:
            self._replaced.put_back()
            self._replaced = None


def open_any(path: Path, weights_only: bool | None, *, foreign: bool, trust_pickle: bool = False) -> dict[str, Any]:
    """Read everything of a directory but the tensors, which are read when they are used.

    Args:
        path: A sharded checkpoint of this package, or of another tool.
        weights_only: False: unpickle what only pickle could save.
        foreign: Whether it may be of another tool.
        trust_pickle: Unpickle the index of such a one without looking at what is in it.

    Raises:
        CheckpointError: It is damaged, or not to be read without saying so.
    """
    if carries_manifest(path) or not os.path.lexists(path / DCP_METADATA):
        return open_checkpoint(path, weights_only, _CODECS)
    if not foreign:
        raise CheckpointError(
            f"{path} was written by another tool, and its index is a pickle. To load it by a reader that runs none, "
            f"say so: ShardedDP(checkpoint_options=CheckpointOptions(foreign=True)), or "
            f"shardeddp.load_from_checkpoint(..., foreign=True); or convert it once, with "
            f"'shardeddp consolidate --foreign'"
        )
    return read_foreign_contents(path, trust_pickle).checkpoint


def checkpoint_folders(trainer: Trainer) -> list[str]:
    """The local directories in which callbacks keep checkpoints."""
    roots = [local_path(getattr(callback, "dirpath", None) or "") for callback in trainer.checkpoint_callbacks]
    return [root for root in roots if root and not is_remote(root)]
