"""Find the tensors in what a module takes and returns."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import Any

import torch

_WITHOUT_TENSORS = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    Enum,
    type,
)


@dataclasses.dataclass(frozen=True)
class Found:
    """The tensors in a value, and the first object that may hold tensors out of sight."""

    tensors: tuple[torch.Tensor, ...]
    opaque: object | None


def find_tensors(value: Any) -> Found:
    """Look through mappings, sequences, sets and dataclasses; anything else that is no plain value is opaque."""
    tensors: list[torch.Tensor] = []
    opaque: list[object] = []
    for leaf in _leaves(value):
        (tensors if isinstance(leaf, torch.Tensor) else opaque).append(leaf)  # type: ignore[arg-type]
    return Found(tuple(tensors), opaque[0] if opaque else None)


def _leaves(value: Any) -> Iterator[object]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _WITHOUT_TENSORS):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (Sequence, Set)):
        for item in value:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value
