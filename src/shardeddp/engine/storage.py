"""Storage of a unit: the all-gather buffer, and the unsharded parameters, which are parts of it."""

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

from shardeddp.plan.layout import FlatLayout
from shardeddp.tensor.unsharded import (
    OURS,
    ReleasedParameter,
    UnshardedParameter,
    derived_class,
)
from shardeddp.torch_private import (
    make_subclass,
    runs_eagerly,
    set_data,
    slice_storage,
    storage_of_weak_reference,
    storage_use_count,
    without_torch_function,
)
from shardeddp.wrap.tree import ParameterSpec

# -- Allocation of flat buffers, and views of them


def empty_on_host(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host memory for the elements of a tensor; pinned if a CUDA device copies from it."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=device.type == "cuda", device="cpu")


def allocate(flat: torch.Tensor) -> None:
    """Give a flat buffer memory, of undefined content; nothing happens to one that has it."""
    storage = flat.untyped_storage()
    if storage.nbytes() != flat.nbytes:  # resizing to the same size would copy all of it
        storage.resize_(flat.nbytes)


def release(flat: torch.Tensor) -> None:
    """Take a flat buffer's memory away; views of it must not be touched until it has some again."""
    flat.untyped_storage().resize_(0)


def local_view(
    shard: torch.Tensor, layout: FlatLayout, index: int, slice_rank: int
) -> torch.Tensor:
    """A rank's elements of one parameter in its slice of a flat buffer; 1D."""
    interval = layout.local_interval(layout.slots[index], slice_rank)
    return shard[interval.start : interval.stop]


# -- ReleasedMemory: host memory between two gathers


class ReleasedMemory:
    """Host memory of the buffer that was released last, for the next one of its size.

    The system takes back large blocks that a process frees, and to be given new ones takes as long
    as to receive what they are for. Units that are gathered in turn need one. Allocators of devices
    keep memory by themselves.
    """

    def __init__(self) -> None:
        self._block: torch.UntypedStorage | None = None

    def take(self, nbytes: int) -> torch.UntypedStorage | None:
        """The block, which is the caller's now; None if there is none of this size."""
        block, self._block = self._block, None
        return block if block is not None and block.nbytes() == nbytes else None

    def give(self, flat: torch.Tensor) -> bool:
        """Keep the memory of a tensor that the caller alone refers to, and is about to drop.

        Returns:
            Whether it was kept; weak references are to be forgotten then. Nothing is kept of a
            tensor on a device, or of which anything else holds a view, a graph or a transfer.
        """
        block = flat.untyped_storage()
        if block.device.type != "cpu" or storage_use_count(block._cdata) != _ALONE:
            return False
        self._block = block
        return True

    def clear(self, for_nbytes: float = math.inf) -> None:
        """Give it back to the system, before more than it has is allocated."""
        if self._block is not None and self._block.nbytes() < for_nbytes:
            self._block = None


RELEASED_MEMORY = ReleasedMemory()
"""Of this process, for all models in turn."""


# -- GatheredBuffer: all-gather memory, with unsharded parameters as its parts

# Past those of UnshardedBase: for each parameter and gather, for each saved view.
_set_attribute = object.__setattr__
_as_strided = torch.Tensor.as_strided


class SavedView(NamedTuple):
    """A view of an unsharded parameter, saved by a graph, without the memory that it was a view of."""

    buffer: GatheredBuffer
    place: int
    """Number of the parameter it is a view of."""

    version: int
    """Of that parameter's values."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class GatheredBuffer:
    """One flat buffer of whole parameters.

    [Note: the memory of a gather] To release a buffer is to drop the engine's reference to its
    memory, which is never emptied in place. A view of a parameter that has left its unit (a prompt,
    a detached weight), a graph that was recorded where no saved-tensor hooks could be set: each
    holds the memory that it refers to for as long as it needs it. While something does, later
    gathers fill that same memory: a view goes on to be one of the parameter, and what is written
    to either is read from both. Otherwise a gather has memory of its own. What a unit's forward
    saves for backward is not held (see ``saved_tensors.py``): it would keep all parameters in memory.

    An unsharded parameter is one ``nn.Parameter`` for the whole run, so that hooks, gradient
    accumulators and compiled code find the same object; binding it to the memory of a gather is an
    assignment to ``.data``. Its storage is its part of the buffer and no more, as that of a plain
    parameter: offsets count from its first element, and a view cannot reach its neighbours. Such a
    storage keeps the whole buffer alive. When released it is bound to a placeholder of its shape without memory
    of that size, and its class leads to the sharded one. A graph that has saved the parameter
    itself, and not a view of it, reads whatever the parameter is bound to: as long as there is one,
    the parameter keeps its last memory.

    Args:
        specs: The parameters, in layout order.
        layout: Where they lie.
        dtype: Of the buffer.
        device: Of the buffer.
        memory: 1D, padded_numel; what the buffer is for ever. None: each gather brings its own.
        lender: Buffer whose memory this one has while in use.
        in_turn: Whether units are released one after the other while others are gathered, which
            can have their memory.
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
        self.flat = memory
        """1D, padded_numel; None while released."""

        self.watched: dict[int, GatheredBuffer] | None = None
        """Index of buffers by storages of their parameters, for whoever meets a view; None: no index."""

        self.wrapped: dict[int, torch.Tensor] = {}
        """By number, what modules compute with in the place of some parameters."""

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
        # What carries one storage after the other to its parameter.
        self._carrier = torch.empty(0, dtype=dtype, device=device)
        # Numbers of usable parameters by address of their storages; empty while released.
        self._storages: dict[int, int] = {}
        self._bound: torch.Tensor | None = None  # the buffer that they are parts of
        self._rests = False
        # Reference count of each parameter without a graph or view.
        self._references: list[int] = []
        # Parameters' memory of the last gather that outlives it, by address: number and storage;
        # and all of that gather's memory, of which each is a part. Empty while in use.
        self._outlived: dict[int, tuple[int, StorageWeakRef]] = {}
        self._kept: StorageWeakRef | None = None
        self._lender = lender
        self._in_turn = in_turn and device.type == "cpu"
        self.fills_kept_memory = False
        """Whether the gather at hand fills memory that views hold already."""
        if memory is not None:
            self.bind()

    def count_references(self) -> None:
        """Count references to each parameter, once hooks are set and before anything uses it."""
        with without_torch_function():
            self._references = [parameter._use_count() for parameter in self.parameters]  # type: ignore[attr-defined]

    def allocate(self) -> torch.Tensor:
        """The buffer with memory: what views still hold of the last gather's, or some of undefined content.

        Called on the stream that fills it.
        """
        if self.flat is None:
            kept = None if self._kept is None else storage_of_weak_reference(self._kept.cdata)
            self._kept, self.fills_kept_memory = None, kept is not None
            if kept is None and self._in_turn:
                kept = RELEASED_MEMORY.take(self.layout.padded_numel * self.dtype.itemsize)
            numel = 0 if kept is not None else self.layout.padded_numel
            with _outside_inference():
                flat = torch.empty(numel, dtype=self.dtype, device=self._device)
                self.flat = flat if kept is None else flat.set_(kept)
        return self.flat

    def slice_of(self, rank: int, size: int) -> torch.Tensor:
        """The part of one of ``size`` ranks; 1D."""
        numel = self.layout.padded_numel // size
        return self.allocate().narrow(0, rank * numel, numel)

    def bind(self) -> None:
        """Let the parameters be parts of the buffer, and usable."""
        assert self.flat is not None
        if self._bound is self.flat:
            # Gathered anew into the same memory, whose views stay those of its parameters.
            if self._rests:
                self._rests = False
                for parameter, usable, _, _ in self._bindings:
                    _set_attribute(parameter, "__class__", usable)
            return
        storages: list[int] = []
        # Views that hold memory of the last gather, which is this one's too, are views of these.
        former = dict(self._outlived_parts())
        with _outside_inference():
            carrier, whole = self._carrier, self.flat.untyped_storage()
            for place, (parameter, usable, part, geometry) in enumerate(self._bindings):
                _set_attribute(parameter, "__class__", usable)
                storage: Any = former.get(place)
                if storage is None:
                    storage = slice_storage(whole, part)
                set_data(parameter, carrier.set_(storage, *geometry))
                storages.append(storage._cdata)
            carrier.set_()  # pyright: ignore[reportCallIssue]
        self._storages = {storage: place for place, storage in enumerate(storages)}
        self._bound = self.flat
        self._outlived = {}
        if self.watched is not None:
            self.watched.update(dict.fromkeys(storages, self))

    def wrap(self) -> None:
        """Wrap those of the usable parameters, which may require a gradient by now."""
        self.wrapped = {
            i: distribution.wrap(self.parameters[i])
            for i, distribution in self._distributions.items()
        }

    def rest(self) -> None:
        """Keep the memory of parameters that are not in use; whoever kept one has the sharded one's values.

        Those change with the next step, and the memory not before the next gather.
        """
        if self._bound is None or self._rests:
            return
        self._rests = True
        for parameter, (_, released) in zip(self.parameters, self._classes, strict=True):
            _set_attribute(parameter, "__class__", released)

    def release(self) -> None:
        """Drop the memory; the parameters raise from here on."""
        self.wrapped = {}
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
                    # Views that have left are saved like others. The weak reference keeps the
                    # address from being used again.
                    place = self._storages[storage]
                    self._outlived[storage] = place, StorageWeakRef(parameter.untyped_storage())
                elif self.watched is not None:
                    del self.watched[storage]
                if not is_saved:
                    set_data(parameter, placeholder)
                _set_attribute(parameter, "__class__", released)
        if self._outlived or self.fills_kept_memory:
            (self._lender or self)._kept = StorageWeakRef(self.flat.untyped_storage())
        self._storages, self._bound, self._rests = {}, None, False
        flat, self.flat = self.flat if self._in_turn else None, None
        # Neither a transfer has it nor a buffer that was lent it.
        if flat is not None and sys.getrefcount(flat) == _LOCAL and RELEASED_MEMORY.give(flat):
            (self._lender or self)._kept = None

    @property
    def is_usable(self) -> bool:
        """Whether the parameters can be used."""
        return self._bound is not None and not self._rests

    # -- Views that outlive their gather

    def is_viewed(self) -> bool:
        """Whether anything outside of the engine may later read stale values from this memory."""
        return not self._resident and any(True for _ in self._held_places())

    def is_held(self, place: int) -> bool:
        """Whether anything outside of the engine refers to a parameter's memory."""
        return place in self._held_places()

    def _held_places(self) -> Iterator[int]:
        for place, _ in self._outlived_parts():
            yield place
        for storage, place in self._storages.items():
            if storage_use_count(storage) > _BOUND + (place in self.wrapped):
                yield place

    def outlived(self) -> dict[int, torch.Tensor]:
        """While released, memory of the last gather that something still refers to, by parameter; 1D."""
        return {
            place: torch.empty(0, dtype=self.dtype, device=self._device).set_(storage)
            for place, storage in self._outlived_parts()
        }

    def _outlived_parts(self) -> Iterator[tuple[int, Any]]:
        for address, (place, reference) in [*self._outlived.items()]:
            storage = storage_of_weak_reference(reference.cdata)
            if storage is not None:
                yield place, storage
                continue
            del self._outlived[address]
            if self.watched is not None:
                del self.watched[address]

    # -- Tensors saved by graphs

    @runs_eagerly
    def save(self, tensor: torch.Tensor, storage: int) -> SavedView | None:
        """Substitute that a graph saves for a view of a parameter; None: the tensor itself.

        Args:
            tensor: The view.
            storage: Address of its storage.
        """
        if tensor.dtype is not self.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        former = self._outlived.get(storage)
        place = self._storages[storage] if former is None else former[0]
        with without_torch_function():  # the class of a released one leads elsewhere
            version = self.parameters[place]._version
        offset = int(tensor.storage_offset())
        return SavedView(self, place, version, tensor.size(), tensor.stride(), offset)

    def restore(self, saved: SavedView) -> torch.Tensor:
        """The view as it was saved, of the memory of the latest gather.

        Raises:
            RuntimeError: The parameter has been changed since.
        """
        if not self._storages:
            raise RuntimeError(
                f"nothing was gathered for the backward of {self.layout.slots[saved.place].fqn}"
            )
        parameter = self.parameters[saved.place]
        if parameter._version != saved.version:
            raise RuntimeError(
                f"parameter {self.layout.slots[saved.place].fqn} was changed between its forward "
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
        vars(parameter).update(zip(OURS, (spec.fqn, spec.dtype), strict=False))
        _set_attribute(parameter, "__class__", released)
        return parameter


def _outside_inference() -> AbstractContextManager[object]:
    """Where tensors can be used in training; free of cost unless inference mode is on."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


@cache
def _hollow(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Data of released parameters, for access past their class."""
    return torch.full(
        (),
        float("nan") if dtype.is_floating_point or dtype.is_complex else 0,
        dtype=dtype,
        device=device,
    )


def _count_bound() -> int:
    bound = torch.empty(0, device="cpu")
    bound.set_(torch.empty(1, device="cpu").untyped_storage()[:])  # type: ignore[call-overload]
    return storage_use_count(bound.untyped_storage()._cdata)


def _count_alone() -> int:
    block = torch.empty(1, device="cpu").untyped_storage()
    flat = torch.empty(0, device="cpu").set_(block)  # type: ignore[arg-type]
    return storage_use_count(flat.untyped_storage()._cdata)


def _count_local() -> int:
    local = torch.empty(0, device="cpu")
    return sys.getrefcount(local)


_ALONE = _count_alone()
"""References that torch counts to the storage of a tensor and a variable that leads to it."""

_LOCAL = _count_local()
"""References that Python counts to a tensor that one variable refers to."""

_BOUND = _count_bound()
"""References that torch counts to the storage of a parameter that nothing else refers to.

Releases differ in whether a storage's Python object counts once it is gone.
"""
