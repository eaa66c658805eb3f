"""Schema of a Lightning checkpoint: names of its entries, and checks of every field that a run uses."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from shardeddp.checkpoint.state_codec import versions_of
from shardeddp.errors import CheckpointError

# -- Names of entries

WEIGHTS = "state_dict"
OPTIMIZERS = "optimizer_states"
TRAINED = "current_model_state"
"""Entry of the trained model under Lightning's weight averaging; the averages are WEIGHTS."""

VERSION = "pytorch-lightning_version"
"""Version of Lightning that wrote it; in every checkpoint of a Trainer, and in directories."""

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
"""Entries that only the construction of the module needs."""

KEY = "shardeddp"
"""Entry of this package's own values, under the names below."""

NAMES = "optimizer_parameters"
"""Fqns of each optimizer's parameters, in the order of its groups."""

KEPT = "kept_shards"
"""Paths of shards outside of model and optimizers, see ``kept_shards.py``."""

STATES = "random_states"
"""Random states of all ranks, see ``random_state.py``."""

LOADERS = "loader_states"
"""Loader states of all ranks, if they differ."""

# -- Checks


def check_entries(checkpoint: Any, source: object, *, loads: bool = False) -> dict[str, Any]:
    """Return a checkpoint after a check of the fields that are used while it is read.

    Others may be anything. Fields that the user's hooks see before their use are checked at their
    use: the hooks may undo their own changes to a saved checkpoint. A field may be missing: files
    of other tools lack some. Lightning requires weights and a version of one that it ``loads``.
    """
    with _named(source):
        _check(checkpoint, _READ, "")
        if loads:
            _check(checkpoint, _LOADED, "")
        release = checkpoint.get(VERSION)
        if release is not None and release.split(".")[0] in ("0", "1"):
            # Lightning migrates it before any other code sees it.
            _check(checkpoint, _MIGRATED, "")
    return checkpoint


def check_optimizers(checkpoint: Mapping[str, Any], source: object) -> None:
    """Check the states of optimizers and schedulers, after the hooks that see a checkpoint."""
    with _named(source):
        _check(checkpoint, _TRAINING, "")


def optimizers_in(checkpoint: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the states of optimizers; none if a user's hook keeps them in a form of its own."""
    states = checkpoint.get(OPTIMIZERS, ())
    try:
        _check(states, [_OPTIMIZER], "")
    except _WrongError:
        return ()
    return states


def check_run(
    checkpoint: Mapping[str, Any],
    classes: Mapping[Any, str],
    source: object,
    kept: Mapping[Any, tuple[Any, int]] = MappingProxyType({}),
) -> None:
    """Check counters, and the states that Lightning's own callbacks are going to load.

    Args:
        checkpoint: Checkpoint after the hooks of the module.
        classes: Names of callback classes by the keys of their states; states under other keys
            belong to other callbacks, and may be anything.
        source: Path of the checkpoint, for errors.
        kept: Directory and number of best checkpoints that a callback keeps, by key.
    """
    with _named(source):
        _check(checkpoint, _RUN, "")
        states = checkpoint.get("callbacks")
        for key, name in classes.items():
            state = (states or {}).get(key)
            if isinstance(state, torch.Tensor) or state:  # else Lightning loads nothing
                _check(checkpoint, _BESIDE.get(name), "")
                _check(state, _CALLBACKS[name], f"callbacks.{name}")
                # States of another directory are not loaded.
                if key in kept and cast("Any", state).get("dirpath") == kept[key][0]:
                    _check_worst(cast("Any", state), kept[key][1], f"callbacks.{name}")


def _check_worst(state: Mapping[str, Any], most: int, path: str) -> None:
    """Check that the checkpoint to be replaced by a better one is among those that are kept."""
    best, worst = state.get("best_k_models") or {}, state.get("kth_best_model_path") or ""
    if worst not in best and 0 < most <= len(best):
        raise _WrongError(
            f"{path}.kth_best_model_path: expected one of its {len(best)} best_k_models, of which "
            f"save_top_k={most} lets no further one in beside them, found {worst[:200]!r}"
        )


def count_in(checkpoint: Mapping[str, Any], name: str, otherwise: int) -> int:
    """Return a count of a checkpoint, such as its step; ``otherwise`` if missing or invalid."""
    value = checkpoint.get(name)
    return value if type(value) is int and value >= 0 else otherwise


def check_like(saved: Any, own: Any, path: str, *, optional: bool = True) -> None:
    """Check that a saved state has values of the same kinds as its owner's current state.

    With ``optional`` any value may be None.
    """
    if optional and saved is None:
        return
    found, expected = _kind(saved), _kind(own)
    if expected and found != expected:
        raise CheckpointError(
            f"{path} in the checkpoint is {found or 'an object'} ({type(saved).__name__}), expected "
            f"{expected}: it is damaged, or of another object"
        )
    if expected == "a mapping" == found:
        for name in own.keys() & saved.keys():
            check_like(saved[name], own[name], f"{path}.{name}", optional=optional)
    elif expected == "a list" == found and len({*map(_kind, own)}) == 1:
        # In lists of one length, items have the same owners: schedulers of a sequence, functions of
        # parameter groups. Items of a growing list are all alike.
        owners = own if len(own) == len(saved) else [own[0]] * len(saved)
        for index, (item, owner) in enumerate(zip(saved, owners, strict=True)):
            check_like(item, owner, f"{path}.{index}", optional=optional)


def _kind(value: Any) -> str:
    """Return the kind of a value in words; "" for kinds that may be anything."""
    if isinstance(value, (bool, int, float, np.generic)):
        return "a number"
    if isinstance(value, torch.Tensor):
        return "a number" if value.numel() == 1 else "a tensor"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, (list, tuple)) else ""


class _WrongError(Exception):
    pass


@contextmanager
def _named(source: object) -> Generator[None]:
    try:
        yield
    except _WrongError as error:
        raise CheckpointError(f"{source} is no checkpoint of Lightning: {error}") from None


def _fail(value: Any, path: str, expected: str) -> None:
    found = (
        f"found {value}" if type(value) in (int, float, bool) else f"found a {type(value).__name__}"
    )
    raise _WrongError(f"{path[:200] or 'its root'}: expected {expected}, {found}")


# -- Specifications and their interpreter
#
# A string is the kind of a value, in the words of errors; with `?` it may be None. A list has the
# specification of its items; with a second entry, an empty mapping is fine, too: a loop over either
# finds nothing. A mapping has specifications of fields: by name, or by suffix after `*`; the first
# match counts; with `!` the field is required. None accepts anything; a function checks by itself.

_TYPES: dict[str, tuple[type, ...]] = {
    "a mapping": (Mapping,),
    "a list": (list, tuple),
    "text": (str,),
    "a flag": (bool,),
    "a count": (int,),
    "a number": (int, float),
    "a number or a name": (int, str),
    "one element or a number": (torch.Tensor, int, float),
    "a scalar tensor": (torch.Tensor,),
}


def _check(value: Any, spec: Any, path: str) -> None:
    if isinstance(spec, str):
        if value is not None or not spec.endswith("?"):
            _check_kind(value, spec.removesuffix("?"), path)
    elif isinstance(spec, list):
        if spec[1:] and isinstance(value, Mapping) and not value:
            return
        _check(value, "a list", path)
        for index, item in enumerate(value):
            _check(item, spec[0], f"{path}.{index}")
    elif isinstance(spec, Mapping):
        _check(value, "a mapping", path)
        _check_items(value, cast("Mapping[str, Any]", spec), path)
    elif spec is not None:
        spec(value, path)


def _check_kind(value: Any, kind: str, path: str) -> None:
    # A bool is an int for Python, but not a count.
    wrong = not isinstance(value, _TYPES[kind]) or (type(value) is bool and kind != "a flag")
    if isinstance(value, torch.Tensor):
        wrong |= bool(value.ndim) if kind == "a scalar tensor" else value.numel() != 1
    if wrong or (kind == "a count" and value < 0):
        _fail(value, path, kind)


def _check_items(value: Mapping[Any, Any], spec: Mapping[str, Any], path: str) -> None:
    for name in (each[:-1] for each in spec if each.endswith("!")):
        if name not in value:
            raise _WrongError(f"{path or 'its root'}: expected {name} in it, found none")
    for key, item in value.items():
        name = str(key)
        fits = (
            inner
            for pattern, inner in spec.items()
            if name == pattern.removesuffix("!")
            or (pattern[0] == "*" and name.endswith(pattern[1:]))
        )
        _check(item, next(fits, None), f"{path}.{name}".lstrip("."))


def _count_or_flag(value: Any, path: str) -> None:
    if type(value) is not bool:
        _check(value, "a count", path)


def _version(value: Any, path: str) -> None:
    _check(value, "text", path)
    if not _VERSION.fullmatch(value):
        _fail(value, path, "a version")


def _loops(value: Any, path: str) -> None:
    if value is not None:
        _check(value, _LOOPS, path)


def _names(value: Any, path: str) -> None:
    _check(value, "a mapping", path)
    for key in value:
        if not isinstance(key, str):
            raise _WrongError(f"{path}: expected names, found a key that is a {type(key).__name__}")
    versions = versions_of(value)
    _check(
        {} if versions is None else versions, {"*": {"version": "a count?"}}, f"versions of {path}"
    )


def _states(value: Any, path: str) -> None:
    _check(value, "a mapping", path)
    if any(isinstance(key, torch.Tensor) for key in value):  # keys by identity: no state is found
        raise _WrongError(f"{path}: expected numbers or names of parameters, found a Tensor")


_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.?dev|\.?post)\d*)*(\+[a-z0-9.]+)?", re.IGNORECASE)

_COUNTS = {"*": _count_or_flag}
_PROGRESS = {"total!": _COUNTS, "current!": _COUNTS, "*": _count_or_flag}
_BATCHES = {"total!": _COUNTS, "current!": _COUNTS, "is_last_batch!": "a flag", **_COUNTS}
_LOOP = {
    "*optim_progress": {"optimizer!": {"step!": _PROGRESS, "zero_grad!": _PROGRESS}},
    "epoch_loop.batch_progress": _BATCHES,
    "epoch_loop.val_loop.batch_progress": _BATCHES,
    "*progress": _PROGRESS,
    "*state_dict": {"_batches_that_stepped": "a count", "combined_loader": "a list"},
}
_EVALUATION = {"batch_progress": _BATCHES, **_LOOP}
_BEST = {
    "best_model_path!": "text?",
    "best_model_score": "one element or a number?",
    "current_score": "one element or a number?",
    "best_k_models": {"*": "one element or a number"},
    "kth_best_model_path": "text?",
    "kth_value": "one element or a number?",
    "last_model_path": "text?",
}
_STOPPING = {
    "wait_count!": "a count",
    "stopped_epoch!": "a count",
    "best_score!": "a scalar tensor",
    "patience!": "a count",
    "stopping_reason": "a count",
    "stopping_reason_message": "text?",
}
_UNFREEZING = {
    "internal_optimizer_metadata": {"*": [{"params!": ["text"]}]},
    "previous_backbone_lr!": "a number?",
}
_STOCHASTIC = {
    "n_averaged!": "a count",
    "latest_update_epoch!": "a number",
    "scheduler_state!": "a mapping?",
    "average_model_state!": "a mapping?",
}
_CALLBACKS: dict[str, Any] = {
    "ModelCheckpoint": _BEST,
    "EarlyStopping": _STOPPING,
    "Timer": {"time_elapsed": {"*": "a number"}},
    "BackboneFinetuning": _UNFREEZING,
    "StochasticWeightAveraging": _STOCHASTIC,
    "WeightAveraging": {"latest_update_step!": "a count"},
}
"""Specifications of the states of Lightning's own callbacks, by class."""

_BESIDE = {"WeightAveraging": {TRAINED: _names, "averaging_state": "a mapping"}}
"""Specifications of further entries of a checkpoint that one of them loads."""

_OPTIMIZER = {"state": _states, "param_groups": [{"params!": ["a number or a name"]}]}
_LOOPS = {
    "fit_loop!": _LOOP,
    "validate_loop": _EVALUATION,
    "test_loop": _EVALUATION,
    "*": _LOOP,
}
_READ: dict[str, Any] = {
    WEIGHTS: _names,
    VERSION: _version,
    "loops": _loops,
    "hparams_name": "text?",
    KEY: {LOADERS: "a list", KEPT: ["a list"], NAMES: [["text"]]},
}
_LOADED = {f"{WEIGHTS}!": None, f"{VERSION}!": None}
_TRAINING = {OPTIMIZERS: [_OPTIMIZER, {}], "lr_schedulers": [None, {}]}
_RUN = {"epoch": "a count", "global_step": "a count", "callbacks": "a mapping?"}
_MIGRATED = {**_RUN, **_TRAINING, "callbacks": "a mapping", "lr_schedulers": ["a mapping", {}]}
