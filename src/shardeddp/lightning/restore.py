"""Restoring checkpoints: open either kind, load model and optimizers, undo a failed load."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardeddp.checkpoint import clean
from shardeddp.checkpoint.contents import (
    ATTRIBUTES,
    open_checkpoint,
    open_file,
    read_foreign_contents,
    refusal_of,
)
from shardeddp.checkpoint.find import (
    carries_manifest,
    checkpoints_in,
    content_id,
    has_lost_manifest,
    what_lies_beside,
)
from shardeddp.checkpoint.full_read import require_data
from shardeddp.checkpoint.import_foreign import FOREIGN
from shardeddp.checkpoint.load_states import (
    Replaced,
    load_model,
    load_optimizer,
    materialize_expanded_buffers,
    parameter_names,
    read_shards_ahead,
    rename_weights,
)
from shardeddp.checkpoint.location import AnyPath, Location, disk_errors, is_remote, location
from shardeddp.checkpoint.manifest import DCP_METADATA, MANIFEST
from shardeddp.checkpoint.safetensors import read_safetensors, safetensors_in
from shardeddp.checkpoint.schema import (
    KEY,
    NAMES,
    OPTIMIZERS,
    VERSION,
    WEIGHTS,
    check_entries,
    check_like,
    check_optimizers,
    check_run,
)
from shardeddp.checkpoint.state_codec import dict_codec
from shardeddp.checkpoint.verify import newest_verified
from shardeddp.comm import agree_on_highest_alike, gather_results
from shardeddp.engine.runtime import runtime_of
from shardeddp.engine.shard_model import place_module
from shardeddp.errors import CheckpointError, DamagedCheckpointError, first_three
from shardeddp.lightning.api import (
    LIGHTNING_VERSION,
    AttributeDict,
    BackboneFinetuning,
    Callback,
    CheckpointIO,
    EarlyStopping,
    LightningModule,
    LightningOptimizer,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    TorchCheckpointIO,
    WeightAveraging,
    rank_zero_info,
    rank_zero_warn,
)
from shardeddp.lightning.run_group import RunGroup

_ATTEMPTS = 3
"""Maximum number of reads of a checkpoint that is replaced while it is read."""

_ADVICE_S = 60.0
"""Time limit of the search for an alternative to a damaged checkpoint, while all ranks wait."""

CODECS = (dict_codec(AttributeDict, ATTRIBUTES),)
"""Codecs of Lightning's types in the plain part of a checkpoint."""


class Restore:
    """Loader of one checkpoint at a time into a module, before or after it is sharded."""

    def __init__(self, group: RunGroup) -> None:
        self._group = group
        self.path: Location = location(".")
        """Path of the checkpoint that was read last."""

        self._saved_names: Sequence[Sequence[str]] = ()  # saved parameter names of each optimizer
        self._is_start = False  # True if only weights were read, without the state of a run
        # Load of the model, pending from the reading of a checkpoint until the model is sharded.
        self._pending: Callable[[], None] | None = None
        # Replaced values, kept from the load of the model until the optimizers have their states.
        self._replaced: Replaced | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop pending loads from copies and pickles."""
        return {**vars(self), "_pending": None, "_replaced": None}

    def open(self, path: str | Path, weights_only: bool | None, io: CheckpointIO) -> dict[str, Any]:
        """Read a checkpoint of either kind; model and optimizer tensors are read when loaded.

        Raises:
            CheckpointError: The checkpoint is damaged, or differs between ranks; the error names an
                alternative.
        """
        checkpoint = self.read(path, weights_only, io)
        check = partial(check_entries, checkpoint, path, loads=True)
        try:
            own: Mapping[str, Any] = self._group.run_on_all_ranks("reading the checkpoint", check)
        except CheckpointError as error:
            raise self._with_advice(error) from error
        self._saved_names = own.get(KEY, {}).get(NAMES, ())
        return checkpoint

    def read(self, path: str | Path, weights_only: bool | None, io: CheckpointIO) -> dict[str, Any]:
        """Read like :meth:`open`, without a check of the fields, which need not be Lightning's.

        Raises:
            FileNotFoundError: The path does not exist; the error lists nearby checkpoints.
            CheckpointError: The checkpoint is damaged, or differs between ranks.
        """
        self.path = place = location(os.path.expanduser(path))
        path = str(place)
        self._is_start = False
        kind = self._kind_of(path)
        if kind == "missing":
            if self._group.is_rank_zero:
                # An interrupted replacement may have left the checkpoint under a temporary name.
                clear_away([self.path.parent])
            self._group.barrier()
            kind = self._kind_of(path)
        if kind == "missing" and is_default_io(io):
            raise FileNotFoundError(self._group.broadcast(self._nothing_there()))
        mesh = self._group.current
        part = (0, 1) if mesh is None else (mesh.rank, mesh.topology.world_size)
        if kind == "safetensors":
            self._is_start = True
            reading = partial(_start_from, place)
        elif kind == "directory":
            options = self._group.options.checkpoint_options
            foreign, trust = options.foreign, options.trust_pickle
            reading = partial(
                open_any, place, weights_only, foreign=foreign, trust_pickle=trust, part=part
            )
        elif is_default_io(io) and kind == "archive":
            reading = partial(open_file, place, weights_only, part)
        else:
            return _read_by_plugin(place, weights_only, io, is_file=kind == "file")

        def read() -> tuple[bytes, dict[str, Any]]:
            return content_id(place), reading()

        for _ in range(_ATTEMPTS):
            try:
                content, found = self._group.run_on_all_ranks("reading the checkpoint", read)
            except CheckpointError as error:
                raise self._with_advice(error) from error
            if self._all_ranks_read_same(content, place):
                return found
        raise CheckpointError(
            f"{path} is being replaced again and again: ranks have read different checkpoints "
            f"{_ATTEMPTS} times. Load one that nothing writes to any more, such as a copy"
        )

    def _all_ranks_read_same(self, read: bytes, path: Location) -> bool:
        """True if all ranks have read the same checkpoint, and it was not replaced meanwhile."""
        stays, mesh = content_id(path) == read, self._group.current
        if mesh is None:
            return stays
        (replaced,), same = agree_on_highest_alike(
            [not stays], read, mesh.control, "agreement on the checkpoint that was read"
        )
        return same and not replaced

    def _kind_of(self, path: str) -> str:
        """Agree on the kind of a path: directory, missing, safetensors, archive or file."""
        mesh = self._group.current

        place = location(path)

        def look() -> bytes:
            with disk_errors("looking for the checkpoint", place):
                if carries_manifest(place):
                    return b"directory"
                if safetensors_in(place) and not place.holds(DCP_METADATA):
                    return b"safetensors"
                if place.is_archive():
                    return b"archive"
                return _KINDS.get(place.kind(), b"file")

        if mesh is None:
            return look().decode()
        kinds = [
            kind.decode()
            for kind in gather_results("looking for the checkpoint", look, mesh.control)
        ]
        if len(set(kinds)) > 1:
            found = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
            raise CheckpointError(
                f"the ranks do not see the same at {path} ({found}). Checkpoints have to lie on a "
                f"file system or in a store that all ranks share"
            )
        return kinds[0]

    def check_run(self, checkpoint: Mapping[str, Any], callbacks: Iterable[Callback]) -> None:
        """Check counters and states of Lightning's callbacks; a collective of all ranks."""
        classes, kept = dict[Any, str](), dict[Any, tuple[Any, int]]()
        for callback in callbacks:
            for base in _OF_LIGHTNING:
                if getattr(type(callback), "load_state_dict", None) is base.load_state_dict:
                    # Early releases of Lightning used the class itself as the key.
                    keys = callback.state_key, type(callback)
                    classes |= dict.fromkeys(keys, base.__name__)
                    if isinstance(callback, ModelCheckpoint):
                        kept |= dict.fromkeys(keys, (callback.dirpath, callback.save_top_k))
        check = partial(check_run, checkpoint, classes, self.path, kept)
        self._group.run_on_all_ranks("reading the checkpoint", check)

    def load_model(
        self, module: LightningModule, checkpoint: Mapping[str, Any], *, strict: bool, fitting: bool
    ) -> None:
        """Load the model from a checkpoint, now or as soon as it is sharded."""
        state = checkpoint["state_dict"]
        wanted = [state, checkpoint.get("optimizer_states", ())] if fitting else [state]

        def load() -> None:
            read_shards_ahead(wanted, module)
            materialize_expanded_buffers(module)
            # Optimizers are created after the load of the model, and may then refuse their states.
            self._replaced = Replaced() if fitting else None
            if self._is_start:
                self._load_start(module, state, strict)
            else:
                cast = self._group.options.checkpoint_options.cast
                load_model(module, state, strict, cast, self._replaced)

        if runtime_of(module) is None:
            self._pending = load
        else:
            self.load(load, module)

    def _load_start(self, module: nn.Module, weights: Mapping[str, Any], strict: bool) -> None:
        placed = rename_weights(module, weights)
        load_model(module, placed, strict, cast=True, replaced=self._replaced)
        own = module.state_dict(keep_vars=True)
        if missing := [name for name in own if name not in placed]:
            rank_zero_warn(f"{self.path} has nothing for {first_three(missing)}: as initialized")
        if left := [name for name in placed if name not in own]:
            rank_zero_warn(f"{self.path} has more than the model: {first_three(left)} left out")
        dtypes = sorted({str(it.dtype).removeprefix("torch.") for it in weights.values()})
        rank_zero_info(
            f"ShardedDP: {len(placed) - len(left)} tensors ({', '.join(dtypes)}) loaded from "
            f"{self.path}; it has weights alone"
        )

    def take_pending(self) -> Callable[[], None] | None:
        """Return and forget the pending load of the model; None if no checkpoint was read."""
        pending, self._pending = self._pending, None
        return pending

    def load(self, action: Callable[[], None] | None, module: nn.Module) -> None:
        """Run a load into a sharded module on all ranks; None on all ranks does nothing."""
        if action is None:
            return
        try:
            self._group.run_on_all_ranks("loading the checkpoint", action)
        except DamagedCheckpointError as error:
            raise self._with_advice(error) from error
        runtime = runtime_of(module)  # of an earlier Trainer before this one's rendezvous
        device = (self._group.mesh if runtime is None else runtime.mesh).device
        place_module(module, device)  # metrics keep loaded tensors on the device of the checkpoint

    def load_optimizers(
        self,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        checkpoint: Mapping[str, Any],
    ) -> None:
        """Load optimizer states; the model cannot be rolled back afterwards.

        First checks the states of schedulers, which Lightning loads next.
        """
        states: Sequence[Any] = checkpoint["optimizer_states"]

        def load() -> None:
            check_optimizers(checkpoint, self.path)
            saved_schedulers = checkpoint.get("lr_schedulers", ())
            for number, pair in enumerate(zip(saved_schedulers, schedulers, strict=False)):
                check_scheduler(*pair, f"lr_schedulers.{number}")
            if states and len(states) != len(optimizers):
                raise CheckpointError(
                    f"the checkpoint has the states of {len(states)} optimizers, expected "
                    f"{len(optimizers)}: train with the optimizers that it was saved with, or load "
                    f"its weights alone"
                )
            # Without names: saved by another strategy, or by an early version of this package.
            named = len(self._saved_names) == len(states)
            if not named:
                self._warn_of_order(module, checkpoint)
            names = parameter_names(module, optimizers)
            for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
                inner = (
                    optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
                )
                if not state and not inner.state_dict():
                    continue  # Lightning's placeholder for a module without optimizers
                saved = self._saved_names[number] if named else None
                load_optimizer(inner, state, saved, names[number])

        self.load(load, module)
        if not states and optimizers and not self._is_start:
            rank_zero_warn(
                "the checkpoint has no optimizer states: weights are loaded, and optimizers begin "
                "as in a new training"
            )
        self._replaced = None

    def _warn_of_order(self, module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Warn that optimizer states without names may be loaded to the wrong parameters.

        If the module's parameters have another order, those of an optimizer may have one too.
        """
        own = [name for name, _ in module.named_parameters()]
        stored = [name for name in checkpoint.get("state_dict", {}) if name in set(own)]
        if stored != own and set(stored) == set(own):
            moved = [name for name, other in zip(own, stored, strict=True) if name != other]
            rank_zero_warn(
                f"{self.path} does not name the parameters that optimizer states are of, and has "
                f"parameters in another order: {first_three(moved)}. States without names are "
                f"loaded by number: check that each optimizer gets its parameters in the same "
                f"order as when it was saved"
            )

    def roll_back(self) -> None:
        """Restore the model's former values after its checkpoint was refused."""
        if self._replaced is not None:
            self._replaced.restore_values()
            self._replaced = None

    def _nothing_there(self) -> str:
        """Return the message for a missing path; rank 0 adds nearby checkpoints."""
        beside = what_lies_beside(self.path) if self._group.is_rank_zero else ""
        return f"Checkpoint file not found: {self.path}{beside}"  # Lightning's message

    def _with_advice(self, error: CheckpointError) -> CheckpointError:
        """Add the name of an alternative checkpoint to an error; a collective of all ranks."""
        advice, folder = "", self.path.parent
        if self._group.is_rank_zero:
            try:
                with disk_errors("looking for checkpoints in", self.path):
                    if self.path.is_dir() and checkpoints_in(self.path):
                        folder = self.path  # a directory of checkpoints: suggest one inside it
                newest = newest_verified(folder, within_s=_ADVICE_S, other_than=self.path)
                advice = (
                    f"The newest that is whole is {newest}"
                    if newest
                    else "No whole one lies beside it"
                )
            except (CheckpointError, TimeoutError):
                advice = f"Find a whole one with: shardeddp verify {folder}"
        return type(error)(f"{error}. {self._group.broadcast(advice)}")


def check_scheduler(saved: Any, scheduler: Any, path: str) -> None:
    """Check the entries of a scheduler's state that torch reads, not those of user classes."""
    own: Any = scheduler.state_dict()
    kind, base = type(scheduler), {key: own[key] for key in _OF_SCHEDULERS if key in own}
    if kind.__module__.startswith("torch."):
        check_like(saved, own, path)
        numbers = {key: value for key, value in own.items() if _is_of_numbers(value)}
        check_like(saved, base | numbers, path, optional=False)
    elif getattr(kind, "load_state_dict", None) is LRScheduler.load_state_dict:
        check_like(saved, base, path, optional=False)


def _is_of_numbers(value: Any) -> bool:
    """True if a scheduler's value is a number or a list of numbers, and so never None."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(it, (int, float)) for it in values)


_OF_LIGHTNING = (
    ModelCheckpoint,
    EarlyStopping,
    Timer,
    BackboneFinetuning,
    StochasticWeightAveraging,
    WeightAveraging,
)
"""Callback classes of Lightning with checked states; subclasses count if they load states alike."""

_OF_SCHEDULERS = ("base_lrs", "last_epoch", "_step_count", "_last_lr")
"""State entries that torch's scheduler base class needs to continue."""


_KINDS = {"nothing": b"missing", "a directory": b"directory"}


def open_any(
    path: AnyPath,
    weights_only: bool | None,
    *,
    foreign: bool,
    trust_pickle: bool = False,
    part: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Read a checkpoint directory with lazy tensors, which are read on first use.

    Args:
        path: Sharded checkpoint of this package or of another tool.
        weights_only: False unpickles objects that only pickle could save.
        foreign: True if the checkpoint may be that of another tool.
        trust_pickle: True to unpickle a foreign index without a check of its content.
        part: Part of this package's files to look for on this rank: ``(rank, ranks)``.

    Raises:
        CheckpointError: The checkpoint is damaged, or foreign without ``foreign=True``.
    """
    path = location(path)
    if not path.holds(DCP_METADATA) or carries_manifest(path):
        return open_checkpoint(path, weights_only, CODECS, part)
    if not foreign and has_lost_manifest(path):
        raise CheckpointError(
            f"{path} has lost its {MANIFEST}, which says what belongs to it and with which checksums. "
            f"Take another checkpoint; or read what is left as that of another tool: "
            f"CheckpointOptions(foreign=True), shardeddp.load_from_checkpoint(..., foreign=True)"
        )
    if not foreign:
        raise CheckpointError(
            f"{path} was written by another tool, and its index is a pickle. To load it by a "
            f"reader that runs no code, set "
            f"ShardedDP(checkpoint_options=CheckpointOptions(foreign=True)), or "
            f"shardeddp.load_from_checkpoint(..., foreign=True); or convert it once, with "
            f"'shardeddp consolidate --foreign'"
        )
    return check_entries(
        read_foreign_contents(path.local_only(FOREIGN), trust_pickle).checkpoint, path
    )


def _start_from(path: Location) -> dict[str, Any]:
    """Read weights from safetensors into the form of a checkpoint at step 0."""
    found = safetensors_in(path)
    if found is None:
        raise CheckpointError(f"{path} has gone since it was found")
    return {
        WEIGHTS: read_safetensors(found),
        VERSION: LIGHTNING_VERSION,
        OPTIMIZERS: [],
        "lr_schedulers": [],
    }


def is_default_io(io: CheckpointIO) -> bool:
    """True for Lightning's own plugin: this package reads and writes its files by itself."""
    return type(io) is TorchCheckpointIO


def _read_by_plugin(
    place: Location, weights_only: bool | None, io: CheckpointIO, *, is_file: bool
) -> dict[str, Any]:
    """Read one file with the Trainer's plugin: its own format, or torch's legacy one."""
    path = str(place)
    torch.cuda.empty_cache()  # as Lightning does here
    torchs = is_default_io(io)
    if torchs and is_file and not is_remote(path) and weights_only is not False:
        require_data(path)
    try:
        return io.load_checkpoint(path, weights_only=weights_only)
    except Exception as error:  # torch's reader of the legacy format raises any exception
        # With pickle, a missing class is not damage.
        is_class = weights_only is False and isinstance(error, (AttributeError, ImportError))
        if not torchs or is_class:
            raise
        if isinstance(error, pickle.UnpicklingError):
            raise refusal_of(path, error) from error
        raise CheckpointError(
            f"{path} is no checkpoint that can be read, or was cut off while it was "
            f"written or copied: {type(error).__name__}: {error}"
        ) from error


def clear_away(folders: Iterable[str | Location]) -> None:
    """Delete leftovers of killed runs in checkpoint directories; call it on one rank."""
    for note in (note for folder in folders for note in clean.remove_leftovers(folder)):
        warnings.warn(note, stacklevel=2)
