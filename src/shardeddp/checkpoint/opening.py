"""Opening: a sharded checkpoint as the dictionary that Lightning saved, its large tensors still on the disk."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardeddp.checkpoint.encoding import Codec, decode, opaque_paths
from shardeddp.checkpoint.lazy import LazyTensor
from shardeddp.checkpoint.manifest import LIGHTNING_META, STATE
from shardeddp.checkpoint.reading import CheckpointReader
from shardeddp.errors import CheckpointError

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
"""What a run that goes on does not need."""


def open_checkpoint(path: Path, weights_only: bool | None, codecs: Sequence[Codec] = ()) -> dict[str, Any]:
    """Read everything of a checkpoint but its tensors.

    Args:
        path: The directory.
        weights_only: False: objects that only pickle could save are unpickled, which runs the code of whoever wrote
            them. Else they are refused, or left out of hyper-parameters with a warning.
        codecs: For values of further types in it.

    Raises:
        CheckpointError: It is damaged, or holds objects that are not to be unpickled.
    """
    reader = CheckpointReader(path)
    checkpoint = _decoded(reader, codecs)
    opaque = {key: paths for key, value in checkpoint.items() if (paths := opaque_paths(value))}
    if opaque and weights_only is False:
        checkpoint |= _unpickled(reader, opaque)
    elif opaque:
        _refuse_unknown(path, opaque)
    return checkpoint


def _decoded(reader: CheckpointReader, codecs: Sequence[Codec]) -> dict[str, Any]:
    try:
        checkpoint = decode(reader.tree(), partial(_tensor, reader), codecs)
        if type(checkpoint) is not dict:
            raise CheckpointError(f"{STATE} holds a {type(checkpoint).__name__}, expected a dict")
    except CheckpointError as error:
        known = str(reader.path) in str(error)
        raise CheckpointError(f"{'' if known else f'{reader.path}: '}{error}") from error
    return checkpoint


def _tensor(reader: CheckpointReader, name: str) -> torch.Tensor:
    try:
        tensor = reader.tensors[name]
    except KeyError:
        raise CheckpointError(f"{reader.path} refers to {name!r} and holds no such tensor") from None
    lazy = LazyTensor(tensor.path, tensor.shape, tensor.dtype, partial(reader.read, name))
    # What callbacks keep is small and looked at often; what was sharded is read into shards again.
    return lazy.whole() if tensor.path[:2] == ("extra", "plain") else lazy


def _unpickled(reader: CheckpointReader, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that could not be encoded, from Lightning's own file."""
    meta = torch.load(io.BytesIO(reader.file(LIGHTNING_META)), map_location="cpu", weights_only=False)
    return {key: meta[key] for key in keys if key in meta}


def _refuse_unknown(path: Path, opaque: Mapping[str, list[str]]) -> None:
    places = [f"{key}.{place}".rstrip(".") for key, found in opaque.items() for place in found]
    text = f"{path} holds objects that only pickle can save, at {', '.join(places)}"
    if not opaque.keys() <= set(_HYPER_PARAMETERS):
        raise CheckpointError(
            f"{text}. If you trust whoever wrote it, load it with weights_only=False: that unpickles them, which can "
            f"run any code"
        )
    warnings.warn(f"{text}; they were not loaded (weights_only=False unpickles them)", stacklevel=2)
