"""Collectives of one group of ranks: their interface, their traffic, and groups without transfers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, Protocol

import torch
import torch.distributed as dist

# -- Traffic: bytes and calls by kind of collective


class Traffic:
    """Bytes and calls of collectives that this rank has issued since the last reset.

    Bytes are those that this rank sends in a ring algorithm, whichever the backend uses:
    ``(n - 1) / n`` of the whole buffer for an all-gather, a reduce-scatter or a broadcast among
    ``n`` ranks, twice that for an all-reduce. A group of one rank counts nothing.
    """

    def __init__(self) -> None:
        self.nbytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def add(self, kind: str, nbytes: int) -> None:
        """Count one collective."""
        self.nbytes[kind] += nbytes
        self.calls[kind] += 1

    def go_on_from(self, former: Traffic) -> None:
        """Add the counts of another counter."""
        self.nbytes.update(former.nbytes)
        self.calls.update(former.calls)

    def reset(self) -> None:
        """Start again from zero."""
        self.nbytes.clear()
        self.calls.clear()

    @property
    def total_nbytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes.values())


# -- Interface of a group's collectives, and groups without transfers

ReduceKind = Literal["sum", "mean", "max", "min"]

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def split_mean_factor(tensor: torch.Tensor, size: int) -> tuple[float, float]:
    """Return the factors of an average over ``size`` ranks: before the sum, and after it.

    In float16 a product with 1/1024 loses what is below 6e-5, and a sum of 1,024 overflows at 64:
    each side gets about the square root, as in FSDP2. Other dtypes are only scaled after the sum.
    """
    if tensor.dtype is not torch.float16:
        return 1.0, 1.0 / size
    before = 2 ** (math.ceil(math.log2(size)) // 2)
    return 1.0 / before, before / size


class Work(Protocol):
    """Handle that ``torch.distributed`` returns for an asynchronous operation."""

    def wait(self) -> object:
        """Block until done (CPU), or make the current stream wait (CUDA)."""
        ...


class CollectiveHandle:
    """Handle of an issued collective.

    Args:
        works: Handles of the transfers.
        finish: Local arithmetic that completes the collective once everything has arrived.
        keep: Buffers that the transport still reads or writes; held until :meth:`wait`.
    """

    def __init__(
        self,
        works: Sequence[Work] = (),
        finish: Callable[[], None] | None = None,
        keep: Sequence[torch.Tensor] = (),
    ) -> None:
        self._works = tuple(works)
        self._finish = finish
        self._keep = tuple(keep)
        self._following: list[Callable[[], CollectiveHandle]] = []

    def then(self, issue: Callable[[], CollectiveHandle]) -> CollectiveHandle:
        """Chain a collective that needs the result of this one.

        It is issued at once where streams keep the order, else once the result has arrived.
        """
        if self._is_complete():
            following = issue()
            following._keep = (*self._keep, *following._keep)
            return following
        self._following.append(issue)
        return self

    def wait(self) -> None:
        """Complete the whole chain; further calls do nothing."""
        self._complete()
        while self._following:
            following = self._following.pop(0)()
            self._works, self._finish, self._keep = (
                following._works,
                following._finish,
                following._keep,
            )
            self._following = following._following + self._following
            if not self._is_complete():
                self._complete()

    def _is_complete(self) -> bool:
        return not self._works and self._finish is None

    def _complete(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._finish, self._keep = (), None, ()


class Collectives(ABC):
    """Collectives among the ranks of one group.

    Every rank of the group makes the same calls in the same order.

    Args:
        ranks: Global ranks of the group, ascending.
        rank: Group rank of this process, an index into ``ranks``.
        traffic: Counter of bytes and calls.
    """

    averages: bool = True
    """True if an average costs no more than a sum.

    Else it takes one more pass over memory, which a caller that scales its input can save.
    """

    def __init__(self, ranks: Sequence[int], rank: int, traffic: Traffic) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        """Number of ranks in the group."""

        self.traffic = traffic

    @abstractmethod
    def all_gather_(self, buffer: torch.Tensor) -> CollectiveHandle:
        """Fill ``buffer`` (1D, ``size`` equal slices) with every rank's slice.

        This rank's own slice is filled already.
        """

    @abstractmethod
    def all_gather_uneven_(self, pieces: Sequence[torch.Tensor]) -> CollectiveHandle:
        """Fill ``pieces`` (1D, any lengths, one per rank) with every rank's piece.

        This rank's own piece is filled already.
        """

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> CollectiveHandle:
        """Average slice ``rank`` of every rank's ``buffer`` into ``output``.

        ``buffer`` is 1D with ``size`` equal slices; it may be overwritten, and must not be touched
        before the collective is complete. ``output`` is one slice, and may be slice ``rank`` of
        ``buffer``.
        """

    @abstractmethod
    def all_reduce_(self, tensor: torch.Tensor, kind: ReduceKind = "sum") -> CollectiveHandle:
        """All-reduce ``tensor`` and overwrite it with the result."""

    @abstractmethod
    def all_to_all(
        self, arriving: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]
    ) -> CollectiveHandle:
        """Send ``leaving[r]`` to every other group rank ``r``, and receive ``arriving[r]`` from it.

        Tensors are 1D and of any lengths; this rank's own entries are ignored.
        """

    @abstractmethod
    def broadcast_(self, tensor: torch.Tensor, source: int) -> CollectiveHandle:
        """Overwrite ``tensor`` with that of group rank ``source``."""

    def count_leaving(self, leaving: Sequence[torch.Tensor]) -> None:
        """Count the bytes that an all-to-all sends."""
        self.traffic.add(
            "all_to_all",
            sum(piece.nbytes for rank, piece in enumerate(leaving) if rank != self.rank),
        )

    def count(self, kind: str, nbytes: int, passes: int = 1) -> None:
        """Count one collective over a buffer of ``nbytes``; see :class:`Traffic`."""
        self.traffic.add(kind, passes * nbytes * (self.size - 1) // self.size)


class SoloCollectives(Collectives):
    """Collectives of a group of one rank, which transfer nothing."""

    def all_gather_(self, buffer: torch.Tensor) -> CollectiveHandle:  # noqa: D102
        return CollectiveHandle()

    def all_gather_uneven_(self, pieces: Sequence[torch.Tensor]) -> CollectiveHandle:  # noqa: D102
        return CollectiveHandle()

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> CollectiveHandle:  # noqa: D102
        if output.data_ptr() != buffer.data_ptr():
            output.copy_(buffer)
        return CollectiveHandle()

    def all_reduce_(self, tensor: torch.Tensor, kind: ReduceKind = "sum") -> CollectiveHandle:  # noqa: D102
        return CollectiveHandle()

    def all_to_all(  # noqa: D102
        self, arriving: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]
    ) -> CollectiveHandle:
        return CollectiveHandle()

    def broadcast_(self, tensor: torch.Tensor, source: int) -> CollectiveHandle:  # noqa: D102
        return CollectiveHandle()


def _refused(operation: str) -> Callable[..., NoReturn]:
    """Return a method that raises instead of communicating."""

    def refuse(collectives: Collectives, *_: object, **__: object) -> NoReturn:
        raise in_forked_process(operation, collectives.ranks)

    return refuse


class InheritedCollectives(Collectives):
    """Collectives in a process that was forked from a rank: every call raises RuntimeError.

    Other ranks would take its messages for the rank's own, and never answer them.
    """

    all_gather_ = all_gather_uneven_ = _refused("a gather")
    reduce_scatter = all_reduce_ = _refused("a reduction")
    all_to_all = _refused("an all-to-all")
    broadcast_ = _refused("a broadcast")


def in_forked_process(operation: str, ranks: Sequence[int]) -> RuntimeError:
    """Return the error of a communication in a process that was forked from a rank."""
    return RuntimeError(
        f"{operation} needs ranks {[*ranks]} together, and this process is none of them: it was "
        f"forked from one, as the workers of a DataLoader are. Take what it needs of a parameter "
        f"before it is forked, in the main process of all ranks (in train_dataloader(), for "
        f"instance): parameter.full_tensor() is a plain tensor with the values of that moment. "
        f"Steps, checkpoints and all else that ranks do together belong into the main process"
    )
