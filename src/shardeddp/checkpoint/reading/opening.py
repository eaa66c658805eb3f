"""Opening: a sharded checkpoint as the dictionary that Lightning saved, for a run; large tensors stay on the disk."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardeddp.checkpoint.format.encoding import Codec
from shardeddp.checkpoint.format.manifest import PLAIN_EXTRA
from shardeddp.checkpoint.reading.contents import read_contents
from shardeddp.checkpoint.reading.lazy import LazyTensor
from shardeddp.errors import CheckpointError


def open_checkpoint(path: Path, weights_only: bool | None, codecs: Sequence[Codec] = ()) -> dict[str, Any]:
    """Read everything of a checkpoint but the tensors of model and optimizers, and what was sharded elsewhere.

    Args:
        path: The directory.
        weights_only: False: objects that only pickle could save are unpickled, which runs the code of whoever wrote
            them. Else they are refused, or left out of hyper-parameters with a warning.
        codecs: For values of further types in it.

    Raises:
        CheckpointError: It is damaged, or holds objects that are not to be unpickled.
    """
    trust = "loading it with weights_only=False"
    try:
        contents = read_contents(path, trust_pickle=weights_only is False, how_to_trust=trust, codecs=codecs)
    except CheckpointError as error:
        raise error if str(path) in str(error) else type(error)(f"{path}: {error}") from error
    for note in contents.notes:
        warnings.warn(f"{path}: {note}", stacklevel=2)
    return {key: _with_small_tensors(value) for key, value in contents.checkpoint.items()}


def _with_small_tensors(value: Any) -> Any:
    """What callbacks keep is small and looked at often: read at once."""
    if isinstance(value, LazyTensor):
        return value.whole() if value.path[: len(PLAIN_EXTRA)] == PLAIN_EXTRA else value
    if isinstance(value, Mapping):
        read = {key: _with_small_tensors(item) for key, item in value.items()}
        if isinstance(value, dict):
            value.update((key, item) for key, item in read.items() if item is not value[key])
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_with_small_tensors, value))
    return value
