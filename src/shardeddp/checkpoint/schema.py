"""Schema of a Lightning checkpoint: every field that a run uses is checked before it is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from shardeddp.errors import CheckpointError

Check: TypeAlias = Callable[[Any, str], None]
"""Raises for a value, at a dotted path, that is not what stands there."""


def check_fields(checkpoint: Any, source: object, *, loads: bool = False) -> dict[str, Any]:
    """Check the fields of a checkpoint that Lightning or this package uses; others may be anything.

    A field may be missing: files that other tools have put together leave some out.

    Args:
        checkpoint: As it was read.
        source: Its path, for errors.
        loads: Whether Lightning is going to load it, which takes weights and a version.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: A field is not what it has to be: says which, and what was found.
    """
    try:
        _CHECKPOINT(checkpoint, "")
        if loads:
            _LOADED(checkpoint, "")
    except _WrongError as error:
        raise CheckpointError(f"{source} is no checkpoint of Lightning: {error}") from None
    return checkpoint


def check_like(saved: Any, own: Any, path: str) -> None:
    """Check that a saved state has values of the kinds that its owner has now.

    Args:
        saved: As it was read.
        own: The state of the object that is going to load it, of the same class.
        path: Where it is in the checkpoint, for errors.

    Raises:
        CheckpointError: A value is of another kind, as text instead of a number: says which.
    """
    if saved is None:
        return
    found, expected = _kind(saved), _kind(own)
    if expected and found != expected:
        raise CheckpointError(
            f"{path} in the checkpoint is {found or 'an object'} ({type(saved).__name__}), expected "
            f"{expected}: it is damaged, or of another object"
        )
    if expected == "a mapping" == found:
        for name in own.keys() & saved.keys():
            check_like(saved[name], own[name], f"{path}.{name}")
    elif expected == "a list" == found and len({*map(_kind, own)}) == 1:
        # In lists of one length, items are of the same owner: schedulers of a sequence, functions of
        # parameter groups. Of a list that grows, they are all alike.
        owners = own if len(own) == len(saved) else [own[0]] * len(saved)
        for index, (item, owner) in enumerate(zip(saved, owners, strict=True)):
            check_like(item, owner, f"{path}.{index}")


def _kind(value: Any) -> str:
    """In a word, of the values that have one; nothing of the others, which may be anything."""
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


def _fail(value: Any, path: str, expected: str) -> None:
    found = (
        f"found {value}" if type(value) in (int, float, bool) else f"found a {type(value).__name__}"
    )
    raise _WrongError(f"{path[:200] or 'its root'}: expected {expected}, {found}")


def _is(expected: str, *kinds: type) -> Check:
    def check(value: Any, path: str) -> None:
        # A bool is an int for Python, and no count for anybody.
        if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):
            _fail(value, path, expected)

    return check


def _count(value: Any, path: str) -> None:
    if not isinstance(value, int) or type(value) is bool or value < 0:
        _fail(value, path, "a count")


def _names(value: Any, path: str) -> None:
    _MAPPING(value, path)
    for key in value:
        if not isinstance(key, str):
            raise _WrongError(f"{path}: expected names, found a key that is a {type(key).__name__}")


def _record(fields: Mapping[str, Check], *required: str) -> Check:
    """A mapping; those of its fields that are there are checked."""

    def check(value: Any, path: str) -> None:
        _MAPPING(value, path)
        for name in required:
            if name not in value:
                raise _WrongError(f"{path or 'its root'}: expected {name} in it, found none")
        for name, inner in fields.items():
            if name in value:
                inner(value[name], f"{path}.{name}".lstrip("."))

    return check


def _list_of(inner: Check) -> Check:
    def check(value: Any, path: str) -> None:
        _LIST(value, path)
        for index, item in enumerate(value):
            inner(item, f"{path}.{index}")

    return check


def _keys_of(inner: Check) -> Check:
    def check(value: Any, path: str) -> None:
        _MAPPING(value, path)
        for key in value:
            inner(key, f"a key of {path}")

    return check


def _mapping_of(inner: Callable[[str], Check]) -> Check:
    """A mapping; what is checked depends on the name."""

    def check(value: Any, path: str) -> None:
        _MAPPING(value, path)
        for name, item in value.items():
            inner(str(name))(item, f"{path}.{name}")

    return check


def _or_none(inner: Check) -> Check:
    return lambda value, path: None if value is None else inner(value, path)


def _list_or_empty(inner: Check) -> Check:
    """A list; a mapping without entries will do: whoever goes through either finds nothing."""
    check = _list_of(inner)
    return lambda value, path: (
        None if isinstance(value, Mapping) and not value else check(value, path)
    )


def _all_of(*checks: Check) -> Check:
    def check(value: Any, path: str) -> None:
        for each in checks:
            each(value, path)

    return check


def _version(value: Any, path: str) -> None:
    _TEXT(value, path)
    if not _VERSION.fullmatch(value):
        _fail(value, path, "a version")


def _counts(value: Any, path: str) -> None:
    """Counts and flags."""
    _MAPPING(value, path)
    for name, item in value.items():
        if type(item) is not bool:
            _count(item, f"{path}.{name}")


def _progress(value: Any, path: str) -> None:
    """Of a loop: all of its time, and since it has begun."""
    _TRACKED(value, path)
    rest = {name: item for name, item in value.items() if name not in ("total", "current")}
    _counts(rest, path)


def _anything(value: Any, path: str) -> None:
    pass


def _callbacks(value: Any, path: str) -> None:
    """States by key; early releases of Lightning had classes for keys."""
    _MAPPING(value, path)
    for key, state in value.items():
        kind = str(key).split("{")[0]
        if kind in _CALLBACKS:
            _CALLBACKS[kind](state, f"{path}.{kind}")


_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.?dev|\.?post)\d*)*(\+[a-z0-9.]+)?", re.IGNORECASE)
_MAPPING = _is("a mapping", Mapping)
_LIST = _is("a list", list, tuple)
_TEXT = _is("text", str)
_NUMBER = _is("a number", int, float)
_SCORE = _or_none(_is("a tensor or a number", torch.Tensor, int, float))

_TRACKED = _record({"total": _counts, "current": _counts}, "total", "current")
_OPTIMIZATION = _record(
    {"optimizer": _record({"step": _progress, "zero_grad": _progress}, "step", "zero_grad")},
    "optimizer",
)
_BATCHES = _all_of(_progress, _record({"is_last_batch": _is("a flag", bool)}, "is_last_batch"))
_OF_LOOP = _record({"_batches_that_stepped": _count, "combined_loader": _LIST})
_EVALUATION = _mapping_of(lambda name: _BATCHES if name == "batch_progress" else _anything)
_LOOP = _mapping_of(
    lambda name: (
        _OPTIMIZATION
        if name.endswith("optim_progress")
        else _BATCHES
        if name in ("epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress")
        else _progress
        if name.endswith("progress")
        else _OF_LOOP
        if name.endswith("state_dict")
        else _anything
    )
)
_NUMBER_OR_NAME = _is("a number or a name", int, str)
_OPTIMIZER = _record(
    {
        "state": _keys_of(_NUMBER_OR_NAME),
        "param_groups": _list_of(_record({"params": _list_of(_NUMBER_OR_NAME)}, "params")),
    }
)
_BEST = _record(
    {
        "best_model_score": _SCORE,
        "best_model_path": _or_none(_TEXT),
        "current_score": _SCORE,
        "best_k_models": _mapping_of(lambda name: _SCORE),
        "kth_best_model_path": _or_none(_TEXT),
        "kth_value": _SCORE,
        "last_model_path": _or_none(_TEXT),
    },
    "best_model_path",
)
_STOPPING = _record(
    {
        "wait_count": _count,
        "stopped_epoch": _count,
        "best_score": _SCORE,
        "patience": _count,
    },
    *("wait_count", "stopped_epoch", "best_score", "patience"),
)
_TIMER = _record({"time_elapsed": _mapping_of(lambda name: _NUMBER)})
_CALLBACKS = {"ModelCheckpoint": _BEST, "EarlyStopping": _STOPPING, "Timer": _TIMER}
"""Of Lightning's own, by class; their keys are ``"Class"`` or ``"Class{arguments}"``."""

_OWN = _record(
    {
        "loader_states": _LIST,
        "kept_shards": _list_of(_LIST),
        "optimizer_parameters": _list_of(_list_of(_TEXT)),
    }
)

_CHECKPOINT = _record(
    {
        "state_dict": _names,
        "epoch": _count,
        "global_step": _count,
        "pytorch-lightning_version": _version,
        "optimizer_states": _list_or_empty(_OPTIMIZER),
        "lr_schedulers": _list_or_empty(_MAPPING),
        "loops": _all_of(
            _record({"validate_loop": _EVALUATION, "test_loop": _EVALUATION}, "fit_loop"),
            _mapping_of(lambda name: _LOOP),
        ),
        "callbacks": _callbacks,
        "hparams_name": _or_none(_TEXT),
        "shardeddp": _OWN,
    }
)
_LOADED = _record({}, "state_dict", "pytorch-lightning_version")
