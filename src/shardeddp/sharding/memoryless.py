"""Memoryless: tensors without memory of their own, which say so by name to whoever asks for it."""

from __future__ import annotations

from typing import Any

import torch


class Memoryless:
    """What a sharded tensor and a view of one refuse, because what is written to raw memory could not be seen."""

    def data_ptr(self) -> int:  # noqa: D102
        raise self._refusal("data_ptr")

    def untyped_storage(self) -> torch.UntypedStorage:  # noqa: D102
        raise self._refusal("untyped_storage")

    def __dlpack__(self, **options: Any) -> Any:
        raise self._refusal("__dlpack__")

    def apply_(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102
        raise self._refusal("apply_")

    def map_(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102
        raise self._refusal("map_")

    def map2_(self, *arguments: Any, **options: Any) -> Any:  # noqa: D102
        raise self._refusal("map2_")

    def _refusal(self, asked: str) -> RuntimeError:
        tensor: Any = self  # both have a spec
        return RuntimeError(
            f"{tensor.spec.fqn} is sharded: no memory holds all of its elements for {asked}(). Ask to_local() for this "
            f"rank's elements, or full_tensor() for a copy of all of them, and write to it with copy_()"
        )
