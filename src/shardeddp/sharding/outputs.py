"""Find the tensors in what a module takes and returns."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch


def find_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in mappings, sequences, sets and dataclasses; other objects are not looked into."""
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (str, bytes)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (Sequence, Set)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
