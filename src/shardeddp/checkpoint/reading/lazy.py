"""LazyTensor: a tensor of a checkpoint that stands for its elements on the disk until somebody wants them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardeddp.checkpoint.format.manifest import Path, name_of
from shardeddp.plan.intervals import Interval
from shardeddp.sharding.questions import asks_only_about

Read = Callable[[Interval], torch.Tensor]


class LazyTensor(torch.Tensor):
    """A tensor whose elements are read when they are used: an interval for a shard, all of them for anything else.

    To those who rename, drop or look at what a checkpoint holds it is a tensor on the CPU; an operation on it works on
    a plain tensor that is read for it, every time. Whatever an operation would write into it is refused.
    """

    path: Path
    """Where it is in the checkpoint."""

    _read: Read
    _staged: dict[Interval, torch.Tensor]

    def __new__(cls, path: Path, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> LazyTensor:  # noqa: D102
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.path = path
        made._read = read
        made._staged = {}
        return made

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> None:
        """Stand for a tensor.

        Args:
            path: Where it is in the checkpoint.
            shape: Of the tensor.
            dtype: Of the tensor.
            read: Reads an interval of the flattened elements, 1D.
        """

    def stage(self, interval: Interval) -> None:
        """Read an interval now, for the next :meth:`elements` of it."""
        self._staged[interval] = self._read(interval)

    def elements(self, interval: Interval) -> torch.Tensor:
        """An interval of the flattened elements, 1D; for the caller to keep."""
        staged = self._staged.pop(interval, None)
        return self._read(interval) if staged is None else staged

    def whole(self) -> torch.Tensor:
        """All elements, in the tensor's shape."""
        return self.elements(self.all_of_it).view(self.shape)

    @property
    def all_of_it(self) -> Interval:
        """The interval of all elements."""
        return Interval(0, self.numel())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.whole(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LazyTensor({name_of(self.path)}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if asks_only_about(func) and func.__name__ not in ("detach", "__set__", "zeros_like", "empty_like"):
                return func(*args, **(kwargs or {}))
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _on_whole(func, args, kwargs)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        read: Any = pytree.tree_map_only(LazyTensor, LazyTensor.whole, (args, kwargs or {}))
    return func(*read[0], **read[1])
