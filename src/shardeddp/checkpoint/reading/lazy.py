"""LazyTensor: a tensor of a checkpoint that stands for its elements on the disk until somebody wants them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardeddp.checkpoint.format.manifest import ItemPath, name_of
from shardeddp.plan.intervals import Interval
from shardeddp.sharding.questions import asks_only_about

Read = Callable[[Interval], torch.Tensor]


class LazyTensor(torch.Tensor):
    """A tensor whose elements are read when they are used: an interval for a shard, all of them for anything else.

    To those who rename, drop or look at what a checkpoint holds it is a tensor on the CPU. An operation on it works on
    a plain tensor that is read for it. Once an operation has written to that, or given out its memory (a view, a numpy
    array), it is kept: from then on it is what this tensor holds.
    """

    path: ItemPath
    """Where it is in the checkpoint."""

    _read: Read
    _staged: dict[Interval, torch.Tensor]
    copied: Callable[[LazyTensor], None] | None
    """Told of each deep copy, which is lazy as well then; None: a deep copy is a plain tensor."""

    _kept: torch.Tensor | None  # its elements, of this shape, instead of those on the disk

    def __new__(cls, path: ItemPath, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> LazyTensor:  # noqa: D102
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.path = path
        made._read = read
        made._staged = {}
        made.copied = None
        made._kept = None
        return made

    def __init__(self, path: ItemPath, shape: tuple[int, ...], dtype: torch.dtype, read: Read) -> None:
        """Stand for a tensor.

        Args:
            path: Where it is in the checkpoint.
            shape: Of the tensor.
            dtype: Of the tensor.
            read: Reads an interval of the flattened elements, 1D.
        """

    def stage(self, interval: Interval) -> None:
        """Read an interval now, for the next :meth:`elements` of it."""
        if self._kept is None:
            self._staged[interval] = self._read(interval)

    def elements(self, interval: Interval) -> torch.Tensor:
        """An interval of the flattened elements, 1D; for the caller to keep."""
        if self._kept is not None:
            return self._kept.flatten()[interval.start : interval.stop].clone()
        staged = self._staged.pop(interval, None)
        return self._read(interval) if staged is None else staged

    def whole(self) -> torch.Tensor:
        """All elements, in the tensor's shape."""
        return self.elements(self.all_of_it).view(self.shape)

    def keep(self) -> torch.Tensor:
        """The plain tensor that this one is from now on, whatever becomes of the checkpoint."""
        if self._kept is None:
            self._kept = self.whole()
        return self._kept

    @property
    def all_of_it(self) -> Interval:
        """The interval of all elements."""
        return Interval(0, self.numel())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self.copied is None:
            return copy.deepcopy(self.whole(), memo)
        other = LazyTensor(self.path, tuple(self.shape), self.dtype, self._read)
        other.copied = self.copied
        other._kept = None if self._kept is None else self._kept.detach().clone()
        memo[id(self)] = other
        self.copied(other)
        return other

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
    read: dict[int, tuple[LazyTensor, torch.Tensor]] = {}

    def plain(lazy: LazyTensor) -> torch.Tensor:
        if id(lazy) not in read:
            read[id(lazy)] = lazy, lazy.whole() if lazy._kept is None else lazy._kept
        return read[id(lazy)][1]

    with torch._C.DisableTorchFunctionSubclass():
        arguments: Any = pytree.tree_map_only(LazyTensor, plain, (args, kwargs or {}))
    versions = {key: tensor._version for key, (_, tensor) in read.items()}
    result = func(*arguments[0], **arguments[1])
    for key, (lazy, tensor) in read.items():
        if tensor.shape != lazy.shape:
            raise RuntimeError(
                f"{func.__name__}() would change the shape of {name_of(lazy.path)}, a tensor of a checkpoint, from "
                f"{tuple(lazy.shape)} to {tuple(tensor.shape)}. Take a copy of it first: .clone()"
            )
        if func.__name__ == "__set__" or tensor._version != versions[key] or _gives_out(result, tensor):
            lazy._kept = tensor
    lazy_of = {id(tensor): lazy for lazy, tensor in read.values()}
    # An operation in place returns the tensor that it was called on.
    return pytree.tree_map_only(torch.Tensor, lambda tensor: lazy_of.get(id(tensor), tensor), result)


def _gives_out(result: Any, tensor: torch.Tensor) -> bool:
    """Whether a result may lead to the memory of a tensor."""
    memory = tensor.untyped_storage().data_ptr()
    return any(
        type(leaf) in _PLAIN and leaf.untyped_storage().data_ptr() == memory
        if isinstance(leaf, torch.Tensor)
        else type(leaf) not in _VALUES
        for leaf in pytree.tree_leaves(result)
    )


_PLAIN = (torch.Tensor, nn.Parameter)
_VALUES = (bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout)
"""What holds no memory; numpy arrays, storages and the like do."""
