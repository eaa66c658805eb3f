"""Memory of a unit's forward and backward over time, on tensors without memory."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

from shardeddp.torch_private import pytree, storage_of


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Bytes that a unit's backward holds after each of its operations.

    They are counted beside the tensors that its forward has saved, so they get negative while
    these are freed.
    """

    activations: Sequence[int] = ()
    """Gradients of activations, and what is computed from saved tensors."""

    gradients: Sequence[int] = ()
    """Gradients of parameters, in their compute dtype."""

    @cached_property
    def peak(self) -> int:
        """Largest sum of both."""
        return max(map(sum, zip(self.activations, self.gradients, strict=True)), default=0)

    @cached_property
    def accumulating_peak(self) -> int:
        """Largest sum where each gradient of a parameter is added to an earlier one and freed."""
        before = [0, *self.gradients]
        return max(
            (
                own + gradients - former
                for own, gradients, former in zip(
                    self.activations, self.gradients, before, strict=False
                )
            ),
            default=0,
        )

    def extrapolate(self, two: MemoryRecord, micro_batch: int) -> MemoryRecord:
        """Extrapolate to ``micro_batch`` samples; this one is of one sample, ``two`` of two."""
        if len(self.activations) != len(two.activations):  # other operations: the peaks alone
            return self._at_peak().extrapolate(two._at_peak(), micro_batch)
        return MemoryRecord(
            activations=extrapolated(self.activations, two.activations, micro_batch),
            gradients=self.gradients,
        )

    def _at_peak(self) -> MemoryRecord:
        gradients = max(self.gradients, default=0)
        return MemoryRecord(activations=[self.peak - gradients], gradients=[gradients])


@dataclass(frozen=True, kw_only=True)
class UnitMemory:
    """Bytes that a unit needs while it runs, beside those that others have saved."""

    forward: Sequence[int] = ()
    """What a forward has made and not freed after each of its operations; includes what it saves."""

    backward: MemoryRecord = MemoryRecord()

    @cached_property
    def forward_nbytes(self) -> int:
        """Largest sum of what a forward has made and not freed."""
        return max(self.forward, default=0)

    def extrapolate(self, two: UnitMemory, micro_batch: int) -> UnitMemory:
        """Extrapolate to ``micro_batch`` samples; this one is of one sample, ``two`` of two."""
        return UnitMemory(
            forward=extrapolated(self.forward, two.forward, micro_batch),
            backward=self.backward.extrapolate(two.backward, micro_batch),
        )


@dataclass(frozen=True, kw_only=True)
class RootMemory:
    """Bytes of tensors that are alive outside of units' forwards, without what units have saved."""

    between: Sequence[Sequence[int]] = ()
    """After each operation of the root: before each forward of a unit, and after the last one."""

    at_begin: int = 0
    """At the begin of a ``training_step``: the batch."""

    at_forward: Sequence[int] = ()
    """At the begin of each forward of a unit."""

    held_nbytes: int = 0
    """Bytes that the step holds at its end, and that no backward frees: nothing has saved them."""

    @cached_property
    def peaks(self) -> Sequence[int]:
        """Most bytes before each forward of a unit, and after the last one."""
        return [max(span, default=0) for span in self.between]

    def extrapolate(self, two: RootMemory, micro_batch: int) -> RootMemory:
        """Extrapolate to ``micro_batch`` samples; this one is of one sample, ``two`` of two."""
        pairs = zip(self.between, two.between, strict=True)
        first, second = ((it.at_begin, it.held_nbytes) for it in (self, two))
        at_begin, held_nbytes = extrapolated(first, second, micro_batch)
        return RootMemory(
            between=[extrapolated(*pair, micro_batch) for pair in pairs],
            at_begin=at_begin,
            at_forward=extrapolated(self.at_forward, two.at_forward, micro_batch),
            held_nbytes=held_nbytes,
        )


def extrapolated(one: Sequence[int], two: Sequence[int], micro_batch: int) -> list[int]:
    """Extrapolate each number: with more samples, another moment may be that of the peak.

    The largest ones alone if they differ in length, as other operations have run then.
    """
    if len(one) != len(two):
        one, two = [max(one, default=0)], [max(two, default=0)]
    return [
        first + (micro_batch - 1) * (second - first) for first, second in zip(one, two, strict=True)
    ]


@dataclass(kw_only=True)
class MadeStorage:
    """Storage that an operation has made."""

    memory: StorageWeakRef
    tensor: TensorWeakRef
    """Result that has it."""
    nbytes: int
    place: int
    """Place in the history of the operation."""
    begin: int
    """Index of the first count that has it."""
    end: int | None = None
    """Index after the last count that has it, if a unit has saved it since; None: while it lives."""
    is_saved: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether any tensor has it."""
        return not self.memory.expired()

    @property
    def has_graph(self) -> bool:
        """Whether a tensor has it, and the graph that has computed it."""
        tensor = self.tensor()
        return tensor is not None and tensor.requires_grad


class LiveStorages:
    """Storages that operations have made and that are alive."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of all of them."""

        self.history: list[int] = []
        """``nbytes`` after each operation."""

        self.counts = 0
        """Number of calls of :meth:`count`."""

        self._measured: list[list[int]] = []  # histories of running calls of measure
        self._made: dict[int, MadeStorage] = {}
        self._changes: defaultdict[int, int] = defaultdict(int)  # of freed ones, by count

    def add(self, results: Iterable[torch.Tensor]) -> None:
        """Add the results of an operation; storages that were added before count once."""
        self.drop_freed()
        for it in results:
            key, memory = storage_of(it), it.untyped_storage()
            if key not in self._made:
                self._made[key] = MadeStorage(
                    memory=StorageWeakRef(memory),
                    tensor=TensorWeakRef(it),
                    nbytes=memory.nbytes(),
                    place=len(self.history),
                    begin=self.counts,
                )
                self.nbytes += memory.nbytes()
        for history in (self.history, *self._measured):
            history.append(self.nbytes)

    def drop_freed(self) -> None:
        """Leave out what has been freed."""
        for key in [key for key, it in self._made.items() if not it.is_alive]:
            freed = self._made.pop(key)
            self.nbytes -= freed.nbytes
            self._note(freed, self._changes)

    def made(self, storage: int) -> MadeStorage | None:
        """Return a storage that is alive; None: no operation of the step has made it."""
        return self._made.get(storage)

    def unsaved_since(self, begin: int) -> dict[int, MadeStorage]:
        """Return what is alive, not saved, and was made after the count with the index ``begin``."""
        self.drop_freed()
        found = self._made.items()
        return {key: it for key, it in found if it.begin > begin and not it.is_saved}

    def measure(self, call: Callable[[], Any]) -> tuple[Any, list[int]]:
        """Return a function's result, and the bytes made and alive after each operation of it."""
        at_start, history = self.nbytes, list[int]()
        self._measured.append(history)
        try:
            result = call()
        finally:
            self._measured.pop()
        return result, [nbytes - at_start for nbytes in history]

    def born(self, tensor: torch.Tensor) -> int:
        """Return the place in ``history`` of the operation that made a tensor's storage."""
        return self._made[storage_of(tensor)].place if storage_of(tensor) in self._made else 0

    def count(self) -> int:
        """Count the bytes that are alive now; return the index in :meth:`counted`."""
        self.counts += 1
        return self.counts - 1

    def counted(self) -> list[int]:
        """Return the bytes of each count, without storages from when :meth:`save` has left them out."""
        changes = self._changes.copy()
        for it in self._made.values():
            self._note(it, changes)
        return [*accumulate(changes[index] for index in range(self.counts))]

    def begin(self, storage: int) -> int:
        """Return the index of the first count that has a storage; ``sys.maxsize``: it is unknown."""
        return self._made[storage].begin if storage in self._made else sys.maxsize

    def save(self, storage: int, end: int | None) -> None:
        """Note that autograd has saved a storage; leave it out of counts from the index ``end`` on."""
        it = self._made.get(storage)
        if it is not None and not it.is_saved:
            it.is_saved, it.end = True, end

    @property
    def unsaved_nbytes(self) -> int:
        """Bytes of storages that are alive and not saved."""
        return sum(it.nbytes for it in self._made.values() if not it.is_saved)

    def _note(self, storage: MadeStorage, changes: defaultdict[int, int]) -> None:
        """Note the counts that have had a storage."""
        end = self.counts if storage.end is None else min(storage.end, self.counts)
        if storage.begin < end:
            changes[storage.begin] += storage.nbytes
            changes[end] -= storage.nbytes


def root_of(outputs: Any) -> torch.Tensor | None:
    """Return a scalar at which the backward of a module begins; its results may be freed then.

    None: no result requires a gradient.
    """
    leaves = pytree.tree_leaves(outputs)
    results = [it for it in leaves if isinstance(it, torch.Tensor) and it.requires_grad]
    return _Root.apply(*results) if results else None


def run_backward(
    root: torch.Tensor,
    live: LiveStorages,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[tuple[torch.Tensor, torch.dtype]],
) -> MemoryRecord:
    """Run a backward on tensors without memory, and record what is alive.

    Args:
        root: Scalar of :func:`root_of`.
        live: Storages that are alive. A dispatch mode adds the results of operations to it.
        inputs: Tensors at which the backward ends.
        parameters: Parameters, with the dtype that the engine keeps their gradients in.
    """
    wanted = [it for it in (*inputs, *(it for it, _ in parameters)) if it.requires_grad]
    if not wanted:
        return MemoryRecord()
    live.add(())  # what the forward has freed
    live.history.clear()
    before = live.nbytes
    made: Any = torch.autograd.grad([root], wanted, allow_unused=True)
    live.add(())  # what the last operation has freed
    dtypes = {id(it): dtype for it, dtype in parameters}
    activations = [nbytes - before for nbytes in live.history]
    of_parameters = [0] * len(activations)
    for parameter, gradient in zip(wanted, made, strict=True):
        if gradient is None or id(parameter) not in dtypes:
            continue
        nbytes = gradient.untyped_storage().nbytes()
        for place in range(live.born(gradient), len(activations)):
            activations[place] -= nbytes
            of_parameters[place] += gradient.numel() * dtypes[id(parameter)].itemsize
    return MemoryRecord(activations=activations, gradients=of_parameters)


@dataclass(frozen=True)
class TensorSpec:
    """Form of a tensor, without memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(value: Any, requires_grad: bool = False) -> Any:
        """Return the form of a tensor, and any other value as it is.

        So is a tensor that requires no gradient, if ``requires_grad``.
        """
        if not isinstance(value, torch.Tensor) or (requires_grad and not value.requires_grad):
            return value
        return TensorSpec(value.size(), value.stride(), value.dtype, value.requires_grad)


def with_form(value: Any, anchors: list[torch.Tensor], before: Sequence[Any]) -> Any:
    """Return a fresh tensor of a :class:`TensorSpec`, and any other value as it is.

    ``anchors`` gets a leaf for each tensor that requires a gradient: a backward that reaches the
    tensor ends there. ``before`` is what its graph has in front of it: it lives as long.
    """
    if not isinstance(value, TensorSpec):
        return value
    if not value.requires_grad:
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype)
    anchors.append(torch.empty(0, requires_grad=True))
    return _Fresh.apply(anchors[-1], value, before)


def pass_units(outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> bool:
    """Return whether gradients of outputs by inputs may pass a unit, at whose results backwards end.

    Parameters are used where the graph has them; other leaves may be used in front of any unit.
    """
    wanted = [*inputs]
    found = _nodes((it.grad_fn for it in outputs), {it.grad_fn for it in wanted})
    cuts = {it for it in found if it.name() == f"{_Fresh.__name__}Backward"}
    leaves = {id(getattr(it, "variable", None)) for it in found}
    return any(
        not isinstance(it, nn.Parameter) or id(it) not in leaves
        if it.grad_fn is None
        else not cuts <= _nodes([it.grad_fn])  # it was made before one of these units ran
        for it in wanted
        if cuts
    )


def _nodes(begin: Iterable[Any], ends: Set[Any] = frozenset()) -> set[Any]:
    """Return the nodes of a graph in front of its ends."""
    found, waiting = set[Any](), [*begin]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and node not in ends:
            found.add(node)
            waiting += [it for it, _ in node.next_functions]
    return found


class _Root(torch.autograd.Function):
    """Scalar, whose backward makes the gradients of its operands."""

    @staticmethod
    @override
    def forward(ctx: Any, *results: torch.Tensor) -> torch.Tensor:
        ctx.forms = [*map(TensorSpec.of, results)]
        return torch.empty(())

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_strided(it.size, it.stride, dtype=it.dtype) for it in ctx.forms)


class _Fresh(torch.autograd.Function):
    """Tensor of a form, which may be changed in place like a result of a module."""

    @staticmethod
    @override
    def forward(
        ctx: Any, anchor: torch.Tensor, form: TensorSpec, before: Sequence[Any]
    ) -> torch.Tensor:
        ctx.before = before
        return torch.empty_strided(form.size, form.stride, dtype=form.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.empty(0), None, None
