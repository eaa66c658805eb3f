"""Storage of a unit: the gathered buffer and the unsharded parameters, which are views of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from shardeddp.engine.states import BUFFER_VERBS, BufferState, state_after
from shardeddp.plan.layout import FlatLayout
from shardeddp.tensor.unsharded import (
    DTYPE,
    FQN,
    ReleasedParameter,
    UnshardedParameter,
    derived_class,
)
from shardeddp.torch_private import (
    make_subclass,
    runs_eagerly,
    set_data,
    slice_storage,
    storage_of,
    storage_of_weak_reference,
    storage_use_count,
    without_torch_function,
)
from shardeddp.wrap.tree import ParameterSpec

# -- Allocation of flat buffers, and views of them


def empty_on_host(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised host tensor of equal shape and dtype; pinned for a CUDA device."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=device.type == "cuda", device="cpu")


def allocate_storage(flat: torch.Tensor) -> None:
    """Allocate a flat buffer's memory, uninitialised; do nothing if it is allocated."""
    storage = flat.untyped_storage()
    if storage.nbytes() != flat.nbytes:  # resizing to the same size would copy all of it
        storage.resize_(flat.nbytes)


def release_storage(flat: torch.Tensor) -> None:
    """Free a flat buffer's memory; its views must not be used until :func:`allocate_storage`."""
    flat.untyped_storage().resize_(0)


def local_view(
    shard: torch.Tensor, layout: FlatLayout, index: int, slice_rank: int
) -> torch.Tensor:
    """Return a view of one parameter's elements in a rank's slice of a flat buffer; 1D."""
    interval = layout.local_interval(layout.slots[index], slice_rank)
    return shard[interval.start : interval.stop]


# -- ReleasedMemory: host memory between two gathers


class ReleasedMemory:
    """Host memory of the last released buffer, reused by the next buffer of its size.

    A new block takes as long to allocate as the all-gather into it (docs/decisions, 86). Device
    allocators cache memory themselves.
    """

    def __init__(self) -> None:
        self._block: torch.UntypedStorage | None = None

    def take(self, nbytes: int) -> torch.UntypedStorage | None:
        """Hand the block over to the caller; None if there is none of this size."""
        block, self._block = self._block, None
        return block if block is not None and block.nbytes() == nbytes else None

    def give(self, flat: torch.Tensor) -> bool:
        """Keep the memory of a tensor that only the caller refers to, and is about to drop.

        Returns:
            True if the memory was kept; the caller then drops weak references to it. False for a
            tensor on a device, or if a view, a graph or a transfer refers to its storage.
        """
        block = flat.untyped_storage()
        if block.device.type != "cpu" or storage_use_count(block._cdata) != _ALONE:
            return False
        self._block = block
        return True

    def clear(self, for_nbytes: float = math.inf) -> None:
        """Free the block if it is smaller than an allocation of ``for_nbytes`` that follows."""
        if self._block is not None and self._block.nbytes() < for_nbytes:
            self._block = None


RELEASED_MEMORY = ReleasedMemory()
"""Released memory of this process, shared by all models."""


# -- GatheredBuffer: all-gather memory, with unsharded parameters as its views


# Bypass the methods of UnshardedBase: called per parameter and gather, and per saved view.
_set_attribute = object.__setattr__
_as_strided = torch.Tensor.as_strided


class SavedView(NamedTuple):
    """View of an unsharded parameter that a graph saves without its memory."""

    buffer: GatheredBuffer
    parameter_index: int
    """Index of the parameter in the buffer's layout."""

    version: int
    """Version counter of the parameter when the view was saved."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class GatheredBuffer:
    """Flat buffer of whole parameters, with memory while its unit is unsharded.

    [Note: the memory of a gather] Releasing a buffer drops the engine's reference to its memory,
    which is never emptied in place: views and graphs hold it for as long as they need it, and later
    gathers fill that same memory meanwhile (docs/decisions, 81). Otherwise each gather has memory
    of its own, unless the buffer was given permanent ``memory`` (1D, padded_numel) or a ``lender``.
    Tensors that a unit's forward saves for backward do not hold memory (see ``saved_tensors.py``):
    they would keep all parameters in memory.

    An unsharded parameter is one ``nn.Parameter`` for the whole run, so that hooks, gradient
    accumulators and compiled code find the same object. An assignment to ``.data`` binds it to the
    memory of a gather. Its storage is its slot of the buffer only, like the storage of a plain
    parameter: offsets count from its first element, and a view cannot reach its neighbours. The
    storage of the slot keeps the whole buffer alive. A released parameter is bound to a
    placeholder of its shape without memory of that size, and its class forwards to the sharded
    parameter. A graph that has saved the parameter itself, and not a view of it, reads the memory
    that the parameter is bound to: while such a graph exists, the parameter keeps its last memory.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        layout: FlatLayout,
        dtype: torch.dtype,
        device: torch.device,
        memory: torch.Tensor | None,
        lender: GatheredBuffer | None = None,
        *,
        in_turn: bool = False,
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.state = BufferState.RELEASED if memory is None else BufferState.ALLOCATED
        self.flat = memory
        """1D, padded_numel; None while released."""

        # See `enter_in`; None: graphs do not save views of this buffer.
        self._index: dict[int, GatheredBuffer] | None = None
        self.wrapped: dict[int, torch.Tensor] = {}
        """Wrappers of parameters that modules compute with, by index of the parameter."""

        self._distributions = {
            i: spec.distribution
            for i, spec in enumerate(specs)
            if spec.distribution is not None and spec.is_wrapped
        }
        self._device = device
        self._resident = memory is not None
        self._classes = [
            (
                derived_class(UnshardedParameter, "Unsharded", type(spec.parameter)),
                derived_class(ReleasedParameter, "Released", type(spec.parameter)),
            )
            for spec in specs
        ]
        self._placeholders = [_hollow(dtype, device).expand(spec.parameter.shape) for spec in specs]
        self.parameters = [self._make(spec, i) for i, spec in enumerate(specs)]
        """The unsharded parameters, in layout order."""

        size = dtype.itemsize
        self._bindings = [
            (
                parameter,
                usable,
                slice(slot.interval.start * size, slot.interval.stop * size),
                (0, slot.shape, torch.empty(slot.shape, device="meta").stride()),
            )
            for parameter, (usable, _), slot in zip(
                self.parameters, self._classes, layout.slots, strict=True
            )
        ]
        # Tensor that carries each storage in turn into the `.data` of its parameter.
        self._carrier = torch.empty(0, dtype=dtype, device=device)
        # Indices of parameters by address of their storages, parts of the memory; empty until bound.
        self._storages: dict[int, int] = {}
        # Reference count of each parameter without a graph or view.
        self._references: list[int] = []
        # Memory of the last gather that outlives it, by storage address: index of the parameter and
        # its storage. Empty while in use.
        self._outlived: dict[int, tuple[int, StorageWeakRef]] = {}
        # The whole memory of that gather, also while a later one fills it.
        self._outlived_memory: StorageWeakRef | None = None
        self._lender = lender
        self._in_turn = in_turn and device.type == "cpu"
        if memory is not None:
            self.bind()

    def enter_in(self, index: dict[int, GatheredBuffer]) -> None:
        """Keep the buffer in an index by storage address, which identifies views of parameters."""
        self._index = index

    def count_references(self) -> None:
        """Count the references to each parameter, after hooks are set and before its first use."""
        with without_torch_function():
            self._references = [parameter._use_count() for parameter in self.parameters]  # type: ignore[attr-defined]

    def allocate(self) -> torch.Tensor:
        """Give the buffer memory and return it: the last gather's if views hold it, else new.

        Called on the stream that fills the buffer. A buffer that borrows has the lender's memory.
        """
        if self.flat is None:
            lender = self._lender
            self.flat = self._allocate() if lender is None else lender.allocate()
            self._move("allocate")
        return self.flat

    def _allocate(self) -> torch.Tensor:
        kept = (
            None
            if self._outlived_memory is None
            else storage_of_weak_reference(self._outlived_memory.cdata)
        )
        if kept is None:
            self._outlived_memory = None
            if self._in_turn:
                kept = RELEASED_MEMORY.take(self.layout.padded_numel * self.dtype.itemsize)
        numel = 0 if kept is not None else self.layout.padded_numel
        with _outside_inference():
            flat = torch.empty(numel, dtype=self.dtype, device=self._device)
            return flat if kept is None else flat.set_(kept)

    @property
    def fills_outlived_memory(self) -> bool:
        """Whether the buffer has memory of an earlier gather, which views hold."""
        return self._outlived_memory is not None

    def part_of(self, rank: int, size: int) -> torch.Tensor:
        """Return one of ``size`` equal parts of a buffer with memory; 1D, padded_numel // size."""
        assert self.flat is not None
        numel = self.layout.padded_numel // size
        return self.flat.narrow(0, rank * numel, numel)

    def bind(self) -> None:
        """Bind the parameters to the buffer's memory and make them usable."""
        self._move("bind")
        assert self.flat is not None
        if self._storages:
            # Gathered anew into the same memory: its views remain views of the parameters.
            for parameter, usable, _, _ in self._bindings:
                _set_attribute(parameter, "__class__", usable)
            return
        storages: list[int] = []
        # Views that hold memory of the last gather remain views of these parameters: it is reused.
        former = dict(self._outlived_parts())
        with _outside_inference():
            carrier, whole = self._carrier, self.flat.untyped_storage()
            for index, (parameter, usable, part, geometry) in enumerate(self._bindings):
                _set_attribute(parameter, "__class__", usable)
                storage: Any = former.get(index)
                if storage is None:
                    storage = slice_storage(whole, part)
                set_data(parameter, carrier.set_(storage, *geometry))
                storages.append(storage._cdata)
            carrier.set_()  # pyright: ignore[reportCallIssue]
        self._storages = {storage: index for index, storage in enumerate(storages)}
        self._outlived = {}
        if self._index is not None:
            self._index.update(dict.fromkeys(storages, self))

    def wrap(self) -> None:
        """Make the wrappers of usable parameters, whose ``requires_grad`` may have changed."""
        self.wrapped = {
            i: distribution.wrap(self.parameters[i])
            for i, distribution in self._distributions.items()
        }

    def unbind(self) -> None:
        """Keep the memory, but let the unsharded parameters read the values of the sharded ones.

        The next step changes the values; the memory keeps its own until the next gather.
        """
        self._move("unbind")
        for parameter, (_, released) in zip(self.parameters, self._classes, strict=True):
            _set_attribute(parameter, "__class__", released)

    def release(self) -> None:
        """Drop the engine's reference to the memory; views and graphs that hold it keep it.

        The parameters forward to the sharded ones from here on.
        """
        self.wrapped = {}
        self._move("release")
        if self.flat is None:
            return
        with without_torch_function():
            for parameter, storage, placeholder, references, (_, released) in zip(
                self.parameters,
                self._storages,
                self._placeholders,
                self._references,
                self._classes,
                strict=False,  # there are no storages if it was never bound
            ):
                is_saved = parameter._use_count() > references  # type: ignore[attr-defined]
                if is_saved or storage_use_count(storage) > _BOUND:
                    # Views that have left their unit are saved like others. The weak reference
                    # keeps the address from being used again.
                    index = self._storages[storage]
                    self._outlived[storage] = index, StorageWeakRef(parameter.untyped_storage())
                elif self._index is not None:
                    del self._index[storage]
                if not is_saved:
                    set_data(parameter, placeholder)
                _set_attribute(parameter, "__class__", released)
        if self._outlived or self.fills_outlived_memory:
            # Its last holder may drop it right after compute has used it, and no stream follows
            # compute then: the allocator waits for compute, too, before the memory is unmapped.
            if self.flat.is_cuda:
                self.flat.record_stream(torch.cuda.current_stream(self._device))
            self.fill_next(StorageWeakRef(self.flat.untyped_storage()))
        self._storages = {}
        flat, self.flat = self.flat if self._in_turn else None, None
        # No transfer refers to it, and no borrowing buffer.
        if flat is not None and sys.getrefcount(flat) == _LOCAL and RELEASED_MEMORY.give(flat):
            self.fill_next(None)

    def fill_next(self, memory: StorageWeakRef | None) -> None:
        """Let the next gather fill the memory of this one, while something holds it; None: new."""
        if self._lender is None:
            self._outlived_memory = memory
        else:
            self._lender.fill_next(memory)

    def _move(self, verb: str) -> None:
        self.state = state_after(BUFFER_VERBS, verb, self.state, self)

    @override
    def __str__(self) -> str:
        return f"the buffer of {self.layout.slots[0].fqn}"

    # -- Views that outlive their gather

    def is_viewed(self) -> bool:
        """Return whether code outside of the engine could later read stale values from memory."""
        return not self._resident and any(True for _ in self._held())

    def is_held(self, index: int) -> bool:
        """Return whether code outside of the engine refers to memory of a parameter, by index."""
        return index in self._held()

    def _held(self) -> Iterator[int]:
        for index, _ in self._outlived_parts():
            yield index
        for storage, index in self._storages.items():
            if storage_use_count(storage) > _BOUND + (index in self.wrapped):
                yield index

    def outlived(self) -> dict[int, torch.Tensor]:
        """Return 1D memory of the last gather that views hold, by parameter; empty while in use."""
        return {
            index: torch.empty(0, dtype=self.dtype, device=self._device).set_(storage)
            for index, storage in self._outlived_parts()
        }

    def _outlived_parts(self) -> Iterator[tuple[int, Any]]:
        if self._outlived and self.state is BufferState.RELEASED:
            self._drop_unused()
        for address, (index, reference) in [*self._outlived.items()]:
            storage = storage_of_weak_reference(reference.cdata)
            if storage is not None:
                yield index, storage
                continue
            del self._outlived[address]
            if self._index is not None:
                del self._index[address]

    def _drop_unused(self) -> None:
        """Free the memory of released parameters that graphs have saved and that no graph has now."""
        with without_torch_function():
            for index in {index for index, _ in self._outlived.values()}:
                parameter = self.parameters[index]
                if parameter._use_count() <= self._references[index]:  # type: ignore[attr-defined]
                    set_data(parameter, self._placeholders[index])

    # -- Tensors saved by graphs

    @runs_eagerly
    def save(self, tensor: torch.Tensor, storage: int) -> SavedView | None:
        """Return the substitute that a graph saves for a view; None: save the tensor itself.

        ``storage`` is the address of the view's storage.
        """
        if tensor.dtype is not self.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        former = self._outlived.get(storage)
        index = self._storages[storage] if former is None else former[0]
        with without_torch_function():  # the class of a released one forwards to the sharded one
            version = self.parameters[index]._version
        offset = int(tensor.storage_offset())
        return SavedView(self, index, version, tensor.size(), tensor.stride(), offset)

    def restore(self, saved: SavedView) -> torch.Tensor:
        """Return the saved view, over the memory of the latest gather."""
        if not self._storages:
            raise RuntimeError(
                f"expected {self.layout.slots[saved.parameter_index].fqn} to be gathered for its "
                f"backward, found it released (a bug of shardeddp; please report it)"
            )
        parameter = self.parameters[saved.parameter_index]
        if parameter._version != saved.version:
            raise RuntimeError(
                f"parameter {self.layout.slots[saved.parameter_index].fqn} was changed between its forward "
                f"and its backward (by an optimizer step, a copy or a write to `.data`): the "
                f"gradients would belong to neither state. Run backward first"
            )
        if not torch.is_grad_enabled():  # mostly: a context would take as long again
            return _as_strided(parameter, saved.size, saved.stride, saved.offset)
        with torch.no_grad():
            return _as_strided(parameter, saved.size, saved.stride, saved.offset)

    def _make(self, spec: ParameterSpec, index: int) -> nn.Parameter:
        usable, released = self._classes[index]
        # .data: a version counter of its own, as in an unsharded model.
        values = self._placeholders[index].data
        parameter: Any = make_subclass(usable, values, spec.parameter.requires_grad)
        vars(parameter).update({FQN: spec.fqn, DTYPE: spec.dtype})
        _set_attribute(parameter, "__class__", released)
        return parameter


def _outside_inference() -> AbstractContextManager[object]:
    """Leave inference mode, so that tensors can be used in training; no cost if it is off."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


@cache
def _hollow(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a NaN or 0 scalar: the data of released parameters, for access past their class."""
    return torch.full(
        (),
        float("nan") if dtype.is_floating_point or dtype.is_complex else 0,
        dtype=dtype,
        device=device,
    )


def _count_bound() -> int:
    bound = torch.empty(0, device="cpu")
    bound.set_(torch.empty(1, device="cpu").untyped_storage()[:])  # type: ignore[call-overload]
    return storage_use_count(storage_of(bound))


def _count_alone() -> int:
    block = torch.empty(1, device="cpu").untyped_storage()
    flat = torch.empty(0, device="cpu").set_(block)  # type: ignore[arg-type]
    return storage_use_count(storage_of(flat))


def _count_local() -> int:
    local = torch.empty(0, device="cpu")
    return sys.getrefcount(local)


_ALONE = _count_alone()
"""Use count of a storage that one tensor and one Python variable refer to."""

_LOCAL = _count_local()
"""Python reference count of a tensor that one variable refers to."""

_BOUND = _count_bound()
"""Use count of the storage of a parameter without other references.

Measured: torch releases differ in whether a deleted Python object of a storage still counts.
"""
