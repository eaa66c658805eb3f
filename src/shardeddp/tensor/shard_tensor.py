"""ShardTensor: a parameter outside its unit's compute; it looks whole and holds one interval of it.

[Note: the tensors of a parameter]
One parameter of the user's model is, in the engine, up to five tensors:

- the *sharded parameter*: the user's own object, turned into a ``ShardTensor``. ``parameters()``,
  optimizers and state dicts see it. It holds a view of the main shard.
- the *unsharded parameter*: a plain ``nn.Parameter``, a view of the unit's gathered flat buffer.
  The module computes with it, and autograd leaves the unsharded gradient on it. It is usable only
  while its unit is unsharded.
- the *local parameter*: a plain 1D view of the main shard, this rank's interval. Element-wise
  optimizers step on it.
- the *sharded gradient*: a ``ShardTensor`` over a view of the unit's gradient shard; ``.grad`` of
  the sharded parameter.
- the *local gradient*: that view itself; ``.grad`` of the local parameter.

The file is long because it has one concept: nearly all of it is the class ``ShardTensor``, whose
methods are what users and torch may ask of a parameter, one by one. Operations on it are elsewhere
(``dispatch.py``, ``views.py``, ``autograd.py``).
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils.hooks import RemovableHandle

from shardeddp.comm import Mesh
from shardeddp.plan.layout import Box, Interval, boxes, whole_of
from shardeddp.tensor.backward import (
    are_requested,
    store_gradient,
    stored_gradient,
)
from shardeddp.tensor.distributed import flatten_boxes
from shardeddp.tensor.gradient_hooks import (
    CompletionHook,
    GradientHook,
    GradientHooks,
    Hooks,
    weakly,
)
from shardeddp.tensor.unsharded import (
    ReleasedParameter,
    SameParameter,
    UnshardedBase,
    keep_shared_memory,
    parameter_in,
    part_from_aliases,
    sharded_of,
    without_released,
)
from shardeddp.torch_private import (
    is_in_backward,
    make_subclass,
    make_wrapper_subclass,
    never_traced,
    outside_selective_checkpoints,
    pytree,
    refuse_data_pointer,
    storage_of,
    without_torch_function,
)

T = TypeVar("T")

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function or an operation of torch with arguments and keyword arguments."""


class Handlers:
    """Handlers of calls that meet a ``ShardTensor``.

    They work on its instances, so their files import this one; ``tensor/__init__.py`` sets them.
    """

    function: Call
    """Runs functions of torch's Python API, such as ``torch.autograd.grad``, above autograd."""
    operation: Call
    """Runs ATen operations, below autograd."""


handlers = Handlers()

outside_of_graphs = never_traced(
    "a sharded parameter is used here, outside the forward of its unit. Use it inside, or let a "
    "parent module be the unit (auto_wrap_policy)"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardSpec:
    """Common part of all tensors that are sharded like one parameter; compared by identity.

    Gradients and optimizer states share their parameter's spec: so operations know that intervals
    coincide.
    """

    fqn: str
    shape: torch.Size
    intervals: Sequence[Interval]
    """Interval of each rank of ``mesh.slices`` in the flattened parameter; they cover it.

    Of a parameter that is cut into boxes, they are intervals of the concatenated elements of the
    boxes that the ranks of ``mesh.slices`` share.
    """

    mesh: Mesh
    offloaded: bool = False
    """True if the shard lives in host memory while compute is on a device."""

    boxes: tuple[tuple[Box, ...], ...] = ()
    """Boxes that each slice group shares of a parameter that is cut; empty: it is not cut."""

    tensor_rank: int = 0
    """Index of this rank's group in ``boxes``."""

    _warned: set[str] = field(default_factory=set[str])

    def is_first(self, warning: str) -> bool:
        """Return whether a kind of warning is given for this parameter for the first time."""
        is_first = warning not in self._warned
        self._warned.add(warning)
        return is_first

    @cached_property
    def interval(self) -> Interval:
        """Interval that this rank owns."""
        return self.intervals[self.mesh.slices.rank]

    @property
    def shared(self) -> tuple[Box, ...]:
        """Boxes that this rank's slice group shares, in the order of their elements."""
        return self.boxes[self.tensor_rank] if self.boxes else (whole_of(self.shape),)

    @cached_property
    def pieces(self) -> tuple[tuple[Box | None, Interval], ...]:
        """Elements that this rank owns: intervals of flattened boxes; None: of the whole."""
        if not self.boxes:
            return ((None, self.interval),)
        pieces: list[tuple[Box | None, Interval]] = []
        start = 0
        for box in self.shared:
            inside = self.interval.intersect(Interval(start, start + box.numel))
            if inside.numel:
                pieces.append((box, inside.shift(-start)))
            start += box.numel
        return tuple(pieces) or ((next(iter(self.shared), None), Interval(0, 0)),)

    def read(self, elements: Callable[[Interval, Box | None], torch.Tensor]) -> torch.Tensor:
        """Return this rank's elements, 1D, from a function that reads intervals of boxes."""
        found = [elements(interval, box) for box, interval in self.pieces]
        return found[0] if len(found) == 1 else torch.cat(found)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a plain, full tensor that the group shares; 1D if it is cut."""
        return flatten_boxes(tensor, self.shared) if self.boxes else tensor

    @property
    def num_parts(self) -> int:
        """Number of ranks that together hold all elements once."""
        return self.mesh.slices.size * max(1, len(self.boxes))

    @cached_property
    def counts(self) -> bool:
        """True if this rank's elements count in a reduction over all holders.

        Tensor-parallel ranks hold replicas of parameters that are not split: only the first counts.
        """
        return bool(self.boxes) or self.mesh.tensor.rank == 0

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    def lies_like(self, other: ShardSpec) -> bool:
        """Return whether each rank has the same elements of both."""
        return self is other or (
            self.shape == other.shape
            and (self.boxes, self.tensor_rank) == (other.boxes, other.tensor_rank)
            and self.intervals == other.intervals
            and self.mesh.slices.ranks == other.mesh.slices.ranks
        )

    def device_of(self, local: torch.Tensor) -> torch.device:
        """Return the device that a tensor over this shard reports: the one that computes."""
        return self.mesh.device if self.offloaded and local.device.type == "cpu" else local.device

    def localize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's interval of a tensor of the parameter's shape, full or sharded.

        A view if possible.
        """
        if isinstance(tensor, ShardTensor) and tensor.spec is self:
            return tensor.to_local()
        return self.read(
            lambda interval, box: (tensor if box is None else tensor[box.slices]).reshape(-1)[
                interval.start : interval.stop
            ]
        )


class _FlatGroupGradients(Protocol):
    """Gradients of a unit's parameters on their way to ``.grad``: `GroupGradients`."""

    def note_kept(self) -> None: ...
    def add_outside(self, index: int, gradient: torch.Tensor) -> None: ...
    def current(self, index: int) -> torch.Tensor | None: ...
    def is_unreduced(self, index: int) -> bool: ...
    def assign(self, index: int, gradient: torch.Tensor | None) -> None: ...


class _KeepsWrites(Protocol):
    """Holder of the memory of unsharded parameters, which are views of it: `FlatGroup`."""

    def keep_writes(self) -> None: ...
    def keep_write_of(self, index: int) -> None: ...
    def refill_views(self) -> None: ...
    def is_held(self, index: int) -> bool: ...


class _ViewSource(Protocol):
    """Full elements that views of a sharded tensor show: `Gathered`."""

    def follow(self, sharded: ShardTensor) -> None: ...


class NoRawMemory:
    """Refuses raw memory access: writes through a pointer would not reach the shard."""

    def __dlpack__(self, **options: Any) -> Any:
        raise self._refusal("__dlpack__")

    def _refusal(self, asked: str) -> RuntimeError:
        tensor: Any = self  # both have a spec
        return RuntimeError(
            f"{tensor.spec.fqn} is sharded: no memory holds all of its elements for {asked}(). Call "
            f"to_local() for this rank's elements, or full_tensor() for a copy of all of them, and "
            f"write to it with copy_(). Call functions that save a model by themselves "
            f"(save_pretrained, safetensors) inside of strategy.summon_full_params()"
        )


def _refuse_access(asked: str) -> None:
    def refuse(self: NoRawMemory, *arguments: Any, **options: Any) -> Any:
        raise self._refusal(asked)

    setattr(NoRawMemory, asked, refuse)


for _name in ("data_ptr", "untyped_storage", "apply_", "map_", "map2_"):
    _refuse_access(_name)


class ShardTensor(NoRawMemory, torch.Tensor):
    """A tensor with its global shape; this rank holds one interval of its flattened elements.

    With gradients enabled, an operation on a ``ShardTensor`` that requires grad works on the
    gathered full tensor, and the gradient is averaged over all ranks in backward: correct wherever
    a parameter is used, at the cost of a gather per use, which one warning per parameter mentions.
    Without gradients, element-wise operations work on the local interval, reductions over all
    elements give the global value, and everything else gathers. A view (``weight[0]``) is a view of
    gathered elements; writes to it reach the shard. All of these but the element-wise operations
    need every rank to take part.
    """

    _local: torch.Tensor  # 1D, spec.interval.numel
    _spec: ShardSpec
    _unsharded: nn.Parameter | None = None  # of a sharded parameter: its unsharded one
    _hooks: GradientHooks | None = None  # of a sharded parameter: made with the first of them
    # Of a sharded parameter: the gradients of its group, by index there.
    _group_gradients: _FlatGroupGradients | None = None
    _is_routed: bool = False  # whether gradients of uses outside of a unit are averaged
    # `.grad` from before such a gradient, while that is in flight
    _former_gradient: torch.Tensor | None = None
    # Of an alias: its origin, which lives as long as the alias.
    _source: ShardTensor | None = None
    # Tensors that share its memory: `.data`, detached
    _aliases: list[weakref.ref[ShardTensor]] | None = None
    _views: weakref.WeakSet[_ViewSource] | None = None  # full elements of which there may be views
    # Of a parameter: brings writes inside of its unit to the shard.
    _writes: weakref.ref[_KeepsWrites] | None = None
    _index_in_group: int = 0  # index of the parameter there
    shared_with: str = ""
    """Name of another parameter that shares this one's memory; empty: none does."""

    def __new__(  # noqa: D102
        cls, local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False
    ) -> ShardTensor:
        made = make_wrapper_subclass(
            cls,
            spec.shape,
            dtype=local.dtype,
            device=spec.device_of(local),
            requires_grad=requires_grad,
        )
        made._local = local
        made._spec = spec
        refuse_data_pointer(made)  # it has none: kernels that get it fail, and do not crash
        return made

    def __init__(self, local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> None:
        """Wrap this rank's interval, a 1D tensor of its elements.

        The spec has the intervals of all slices.
        """

    @property
    def spec(self) -> ShardSpec:
        """Spec of the parameter that this tensor is a shard of."""
        return self._spec

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """True if operations on it are recorded; setting it also sets the unsharded parameter's."""
        with without_torch_function():
            return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> ShardTensor:  # type: ignore[override]  # noqa: D102
        with without_torch_function():
            super().requires_grad_(requires_grad)
            if self._unsharded is not None:
                torch.Tensor.requires_grad_(self._unsharded, requires_grad)
        return self

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same shard without its history; writing to it changes the parameter.

        Assigning copies the values in. Tensors handed out before keep the former values, as for a
        parameter that gets other memory. An alias that is assigned to is an alias no more.
        """
        return self.detach()

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if self._is_mine(data):
            return  # module.to() with the dtype and the device that the module has
        if (data.shape, data.dtype, data.device) != (self.shape, self.dtype, self.device):
            raise RuntimeError(
                f"{self._spec.fqn} is sharded and cannot be given other memory (.data = ..., "
                f".half(), .to()): expected it to stay {tuple(self.shape)}, {self.dtype} on "
                f"{self.device}, found {tuple(data.shape)}, {data.dtype} on {data.device}. Change "
                f"that before the model is sharded"
            )
        if (
            self._source is not None
        ):  # it gets memory of its own, and the parameter keeps its values
            self._leave_views(self._source.alias())
            values = self._spec.localize(data.detach())
            self._local = values.to(self._local.device, copy=True)
            self._source = self._writes = None
            return
        keep_shared_memory(self._spec.fqn, self.shared_with)
        self.note_assigned(data)
        self.leave_values()
        self._warn_of_held_parts()
        with torch.no_grad():
            self.copy_(data)

    def _is_mine(self, data: torch.Tensor) -> bool:
        """Return whether a tensor has this tensor's own memory, shape and strides."""
        sharded = data if isinstance(data, ShardTensor) else getattr(data, "sharded", None)
        return (
            isinstance(sharded, ShardTensor)
            # Empty shards may share memory on this rank and not on others: names decide.
            and sharded._spec.fqn in (self._spec.fqn, self.shared_with)
            and is_same_memory(sharded._local, self._local)
            and (sharded is data or (data.shape, data.stride()) == (self.shape, self.stride()))
        )

    def share_memory_with(self, other: ShardTensor) -> None:
        """Note that the two have the same memory, as their unit has planned."""
        self.shared_with, other.shared_with = other._spec.fqn, self._spec.fqn

    def note_assigned(self, data: torch.Tensor) -> None:
        """Note whether ``.data = ...`` assigns another parameter's memory to this one.

        It takes the values, and keeps its own memory. If the other one is not assigned to in turn
        (two parameters that are swapped), the next step reports it.
        """
        other = _parameter_of_data(data)
        of_other = None if other is None or other is self else other._spec.fqn
        self._spec.mesh.run.note_memory(self._spec.fqn, of_other)

    def leave_values(self) -> None:
        """Leave the values to the tensors and views that share them; the parameter gets others."""
        group = self.group
        if group is not None:
            group.keep_write_of(self._index_in_group)
        sharing = [each for each in self._living_aliases() if each._local is self._local]
        if sharing or self._views:
            former = self._local.clone()
            for alias in sharing:
                alias.move_to(former)
            self._leave_views(ShardTensor(former, self._spec))
        self._aliases = None
        if self._unsharded is not None:
            part_from_aliases(self._unsharded)

    def _warn_of_held_parts(self) -> None:
        # Within a step graphs hold views too, many of which are dropped without a backward.
        group = None if self._spec.mesh.run.in_step else self.group
        is_held = group is not None and group.is_held(self._index_in_group)
        if is_held and self._spec.is_first("held"):
            warnings.warn(
                f"parameter {self._spec.fqn} gets other values by `.data = ...`, and something holds "
                f"a part of it that was taken in a step (a view such as `p.detach()[:2]`, or a graph "
                f"whose backward has not run): that has the new values here, where an unsharded "
                f"parameter would leave it the former ones. Take a copy (clone()) if it should keep "
                f"them",
                stacklevel=3,
            )

    def note_view(self, view: _ViewSource) -> None:
        """Register a view of this tensor's full elements."""
        if self._views is None:
            self._views = weakref.WeakSet()
        self._views.add(view)

    def _leave_views(self, sharded: ShardTensor) -> None:
        views, self._views = [*(self._views or ())], None
        for view in views:
            view.follow(sharded)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: D102
        if (
            isinstance(source, torch.Tensor)
            and not args
            and not kwargs
            and source.shape == self.shape
        ):
            self.data = source.detach()
            return self
        make: Any = super().set_
        return make(source, *args, **kwargs)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The averaged gradient, sharded; between micro-batches the part accumulated so far."""
        gradient = stored_gradient(self)
        if self._group_gradients is None or (
            gradient is not None and not self._spec.mesh.run.incomplete
        ):
            return gradient
        return self._group_gradients.current(self._index_in_group)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if isinstance(gradient, ShardTensor):
            gradient = self._laid_out(gradient)
        if self._group_gradients is None:
            store_gradient(self, gradient)
        else:
            self._group_gradients.assign(self._index_in_group, gradient)

    def _laid_out(self, gradient: ShardTensor) -> ShardTensor:
        """Return a gradient in this parameter's layout; gather it first if it has another one."""
        if gradient.shape != self.shape or gradient._spec.lies_like(self._spec):
            return gradient
        whole = gather(gradient, f"assigning to the gradient of {self._spec.fqn} that of")
        return ShardTensor(self._spec.localize(whole).to(self._local.device, copy=True), self._spec)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def unsharded(self) -> nn.Parameter | None:
        """The parameter that its module computes with; None: it is no parameter of a unit."""
        return self._unsharded

    def register_hook(self, hook: GradientHook) -> RemovableHandle:  # type: ignore[override]
        """Call a hook with each gradient of the parameter; see :class:`GradientHooks`."""
        if not self.is_leaf or not self.requires_grad:
            with without_torch_function():
                return super().register_hook(hook)
        return self._made_hooks().add(hook)

    def pass_gradients_through_hooks(self) -> None:
        """Pass gradients of the unsharded parameter through hooks, also of those set later."""
        self._made_hooks().listen()

    def show_node(self) -> None:
        """Expose the one autograd node at which gradients of all uses end from now on to a user.

        It is that of the unsharded parameter; hooks may be set on it.
        """
        self._made_hooks().show_node()

    @property
    def node_is_known(self) -> bool:
        """True if a user has been given the node; it is that of the present sharding."""
        return self._hooks is not None and self._hooks.node_is_known

    def hooks_of_users(self) -> Hooks:
        """Return the dictionaries of users' hooks; a parameter that takes over this one has them."""
        return (None, None) if self._hooks is None else self._hooks.of_users()

    def _made_hooks(self) -> GradientHooks:
        self._hooks = self._hooks or GradientHooks(self, self._unsharded)
        return self._hooks

    def register_post_accumulate_grad_hook(self, hook: CompletionHook) -> RemovableHandle:
        """Call a hook with the parameter when a backward has completed its gradient.

        See :class:`GradientHooks`.
        """
        if not self.is_leaf or not self.requires_grad:
            with without_torch_function():
                return super().register_post_accumulate_grad_hook(hook)
        return self._made_hooks().add_completion(hook)

    def take_part(self, group_gradients: _FlatGroupGradients) -> None:
        """Join the reduction of a unit's gradients, also with gradients of uses outside of it."""
        self._group_gradients = group_gradients

    def keep_gradient(self) -> None:
        """Note that the local gradient may be kept elsewhere, as in the states of an optimizer."""
        if self._group_gradients is not None:
            self._group_gradients.note_kept()

    def move_to(self, local: torch.Tensor) -> None:
        """Replace the local memory by other memory with the same elements."""
        self._local = local

    def _move_with_aliases(self, local: torch.Tensor, spec: ShardSpec) -> None:
        for alias in self._living_aliases():
            if alias._local is self._local:
                alias._local, alias._spec = local, spec
        self._local, self._spec = local, spec

    def join_unit(self, unsharded: nn.Parameter, group: _KeepsWrites, index: int) -> None:
        """Join a unit, which computes with the unsharded parameter.

        The group, referenced weakly, copies writes to it to the shard; ``index`` is that of the
        parameter in the group.
        """
        self._unsharded, self._writes, self._index_in_group = unsharded, weakref.ref(group), index

    def leave_unit(self, local: torch.Tensor) -> None:
        """Leave the unit, as the parameter of a deep copy does; each use gathers it from here on.

        ``local`` has the elements of this rank, in memory that is not the unit's.
        """
        self._move_with_aliases(local, self._spec)
        self._group_gradients = self._unsharded = self._writes = None
        if self._hooks is not None:
            self._hooks = GradientHooks(self, None, self._hooks.of_users())
        self.shared_with = ""

    def forget_route(self) -> None:
        """Route gradients again at the next use: the hooks for that are gone."""
        self._is_routed = False

    def take_over(self, former: ShardTensor) -> None:
        """Replace another sharded tensor of this shape; a collective of all ranks.

        It takes over values, gradient, hooks, and tensors that share its memory, such as
        ``parameter.data``. The former one may be sharded over any ranks of this process's run.
        """
        same = self._spec.lies_like(former._spec) and self._spec.mesh is former._spec.mesh
        if same and (self._spec.fqn, self._spec.offloaded) == (
            former._spec.fqn,
            former._spec.offloaded,
        ):
            self._spec = former._spec  # kept copies (averages) remain sharded like it
        self._local.copy_(self._part_of(former))
        gradient = stored_gradient(former)
        if gradient is not None:
            local = self._part_of(gradient).to(self._local, copy=True)
            if isinstance(gradient, ShardTensor) and gradient.dtype is local.dtype:
                gradient._move_with_aliases(local, self._spec)  # users may hold it
            else:
                gradient = ShardTensor(local, self._spec)
            store_gradient(self, gradient)
        if former._hooks is not None:
            self.adopt_hooks(*former._hooks.of_users())
        for alias in former._living_aliases():
            if alias._local is former._local and alias.dtype == self.dtype:
                alias._local, alias._spec = self._local, self._spec
                alias._as_alias_of(self)

    def _part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, ShardTensor):
            return tensor.part_for(self._spec, "sharding anew of")
        return self._spec.localize(tensor)

    def part_for(self, spec: ShardSpec, operation: str) -> torch.Tensor:
        """Return the elements, 1D, that this rank has of it under another spec; a collective.

        A view if they are here already.
        """
        if self._spec.lies_like(spec):
            return self.to_local()
        is_whole = self._spec.mesh.slices.size == 1 and not self._spec.boxes
        return spec.localize(
            self.to_local().view(self._spec.shape) if is_whole else gather(self, operation)
        )

    def shard_anew(self, spec: ShardSpec) -> None:
        """Become sharded by another spec of this shape, in the same object; a collective."""
        if self._spec is not spec:
            part = self.part_for(spec, "sharding anew of")
            if not self._spec.lies_like(spec):
                part = part.to(self._local.device, copy=True)  # the whole is released
            self._move_with_aliases(part, spec)

    def _living_aliases(self) -> list[ShardTensor]:
        return [alias for each in self._aliases or () if (alias := each()) is not None]

    def full_for_autograd(self, operation: str) -> torch.Tensor:
        """Gather the whole tensor, with a gradient that is averaged over all ranks."""
        if self._spec.mesh is not self._spec.mesh.dense and is_in_backward():
            raise RuntimeError(
                f"{self._spec.fqn} belongs to experts that ranks divide, and a recomputation reads it "
                f"that begins inside of their forward: call the whole module inside of checkpoint(), "
                f"checkpoint(self.experts, x), or name its class in activation_checkpointing"
            )
        self.route_gradient()
        # Hooks see the sum of the gradients of all uses: it ends where that of the unit's forward
        # does.
        leaf = (
            self
            if self._unsharded is None or not (self._hooks and self._hooks.listens)
            else self._unsharded
        )
        # Not by Function.apply, which gives sharded arguments to the forward as full ones.
        apply: Any = super(torch.autograd.Function, _FullTensor)
        with without_torch_function():
            return apply.apply(leaf, weakref.ref(self), operation)

    def route_gradient(self) -> None:
        """Average gradients over ranks that autograd brings to the parameter itself.

        They come from uses outside of the parameter's unit.
        """
        if self._is_routed or not (self.requires_grad and self.is_leaf):
            return
        self._is_routed = True
        with without_torch_function():
            # Weak: autograd holds hooks where the garbage collector cannot see them.
            super().register_hook(weakly(self, ShardTensor._take_gradient))
            super().register_post_accumulate_grad_hook(weakly(self, ShardTensor._end_accumulation))

    def warn_outside(self, stacklevel: int = 4) -> None:
        """Warn, once, of the cost of a use outside of the unit's forward."""
        if not self._spec.is_first("outside"):
            return
        nbytes = self._spec.numel * self.element_size()
        warnings.warn(
            f"parameter {self._spec.fqn} is used outside the forward of the unit that holds it: "
            f"each such use gathers {nbytes:,} bytes. The result is right. To make it fast, use "
            f"the parameter inside its module's forward, or choose other units "
            f"(auto_wrap_policy): a parent module that uses it, or the module itself where "
            f"networks are stepped in turn, as those of a GAN",
            stacklevel=stacklevel,
        )

    def _take_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Pass on this rank's sum of gradients from uses outside of a unit: whole, not averaged."""
        if self._hooks is not None:
            gradient = self._hooks.run(gradient)
        if are_requested():
            return gradient
        if not self.requires_grad:
            return None  # frozen since its use: autograd leaves nothing
        gradient = gradient.full_tensor() if isinstance(gradient, ShardTensor) else gradient
        if self._group_gradients is None:
            is_copy = self._unsharded is None
            return _Average.apply(gradient, self._spec, self._local.device, is_copy)
        with torch.no_grad():
            self._former_gradient = stored_gradient(self)
            self._group_gradients.add_outside(self._index_in_group, gradient.detach())
            if self._spec.boxes:
                self._spec.mesh.run.observe(self._spec.fqn, gradient)
            return ShardTensor(self._local.new_zeros(()).expand(self._local.shape), self._spec)

    def _end_accumulation(self, parameter: torch.Tensor) -> None:
        """Remove the placeholder gradient that autograd accumulates beside a unit's reduction."""
        if self._group_gradients is not None:
            former, self._former_gradient = self._former_gradient, None
            store_gradient(self, former)
        gradients_complete([self])

    def adopt_hooks(self, *former: Any) -> None:
        """Take over the hooks that the parameter had before it was sharded."""
        self._hooks = GradientHooks(self, self._unsharded, former)  # type: ignore[arg-type]

    def tolist(self) -> Any:  # noqa: D102
        return gather(self, "tolist of").tolist()

    def numpy(self, *, force: bool = False) -> Any:  # noqa: D102
        array = gather(self, "numpy of").requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False  # writes to an array go unseen
        return array

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements, 1D; shares memory, so writing to it changes the shard."""
        group = None if self._writes is None else self._writes()
        if group is not None:
            group.keep_write_of(self._index_in_group)
        return self._local

    @property
    def group(self) -> _KeepsWrites | None:
        """Group of the flat buffer that holds this parameter's shard; None without a buffer."""
        return None if self._writes is None else self._writes()

    @property
    def index_in_group(self) -> int:
        """Index of the parameter in :attr:`group`."""
        return self._index_in_group

    @property
    def raw_local(self) -> torch.Tensor:
        """This rank's elements as stored.

        Writes inside of the unit since it was gathered are not in them.
        """
        return self._local

    def full_tensor(self) -> torch.Tensor:
        """Gather the whole tensor; a collective of all ranks of the shard group.

        No gradient flows through it.
        """
        return gather(self, "full_tensor of")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        spec, interval = self._spec, self._spec.interval
        return (
            f"ShardTensor({spec.fqn}, shape={tuple(spec.shape)}, dtype={self._local.dtype}, "
            f"elements {interval.start}..{interval.stop} of {spec.numel} on rank {spec.mesh.rank}, "
            f"local={self._local!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) not in memo:
            copied = type(self)(self.to_local().detach().clone(), self._spec, self.requires_grad)
            vars(copied).update(
                {k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k not in _ATTRIBUTES}
            )
            memo[id(self)] = copied
        return memo[id(self)]

    def __copy__(self) -> ShardTensor:
        copied = type(self)(self._local, self._spec, self.requires_grad)
        vars(copied).update({k: v for k, v in vars(self).items() if k not in _ATTRIBUTES})
        return copied._as_alias_of(self)

    def user_attributes(self) -> dict[str, Any]:
        """Return the attributes that users have set on the parameter."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in (*_ATTRIBUTES, "_is_param")
        }

    def alias(self) -> ShardTensor:
        """Return the same shard as another object, without history."""
        return ShardTensor(self._local, self._spec)._as_alias_of(self)

    def _as_alias_of(self, source: ShardTensor) -> ShardTensor:
        """Share the memory of a sharded tensor until other values are assigned to that."""
        self._source, self._writes, self._index_in_group = (
            source,
            source._writes,
            source._index_in_group,
        )
        origin = source.origin
        origin._aliases = [
            *(each for each in origin._aliases or () if each() is not None),
            weakref.ref(self),
        ]
        return self

    def whole(self, operation: str) -> torch.Tensor:
        """Gather a plain tensor or parameter of the original class; a collective of all ranks."""
        whole = gather(self, operation)
        return self.parameter_over(whole) if isinstance(self, nn.Parameter) else whole

    def parameter_over(self, values: torch.Tensor) -> nn.Parameter:
        """Return a plain parameter with the class and attributes that users have given this one."""
        if type(self) is ShardTensor:
            parameter = nn.Parameter(values, self.requires_grad)
        else:
            original = type(self).__bases__[1]
            parameter: Any = make_subclass(original, values, self.requires_grad)
        vars(parameter).update(self.user_attributes())
        return parameter

    @property
    def is_of_a_unit(self) -> bool:
        """True for a parameter of a unit and its aliases; False for a copy of a parameter.

        No unit gathers and reduces a copy.
        """
        return self.origin._group_gradients is not None

    @property
    def origin(self) -> ShardTensor:
        """Origin of an alias; any other tensor itself."""
        origin = self
        while origin._source is not None:
            origin = origin._source
        return origin

    __hash__ = torch.Tensor.__hash__

    @outside_of_graphs
    def __eq__(self, other: object) -> Any:
        if isinstance(other, UnshardedBase) and sharded_of(other) is self:
            return SameParameter.like(self)
        return super().__eq__(other)

    def note_write(self, operation: str, values: torch.Tensor | None = None) -> None:
        """Record a write, which ranks compare later.

        Each keeps a shard of the written values; see :class:`WriteDigest`.
        """
        mesh = self._spec.mesh
        if mesh.slices.size > 1 and self.is_of_a_unit:
            mesh.run.written.note(self._spec.fqn, operation, values)

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = self.whole("pickling")
        spawning = get_spawning_popen()
        if spawning is not None:
            # It is passed as the number of an open file, once all of the process's arguments are
            # pickled.
            vars(spawning).setdefault("shardeddp_kept", []).append(whole)
        return whole.__reduce_ex__(protocol)

    # `torch.distributed.checkpoint` calls these three, so `dcp.save` and `dcp.load` take the state
    # dict of a sharded model as it is. Checkpoints of the Trainer do not use them.

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=self._spec.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of one of its boxes; loading writes to it."""
        position = 0
        for box in self._boxes():
            if index.offset is None or box.offsets == tuple(index.offset):
                return self.to_local().detach()[position : position + box.numel].view(box.sizes)
            position += box.numel
        raise ValueError(
            f"rank {self._spec.mesh.rank} has no box of {self._spec.fqn} at {index.offset}"
        )

    def _boxes(self) -> list[Box]:
        whole = whole_of(self._spec.shape)
        return [
            each.outside(box or whole)
            for box, interval in self._spec.pieces
            for each in boxes(interval, (box or whole).sizes)
        ]

    @classmethod
    @outside_of_graphs
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if any(issubclass(kind, ReleasedParameter) for kind in types):
            args, named = without_released(args, named)
        with without_torch_function():
            return handlers.function(func, args, named)

    @classmethod
    @outside_of_graphs
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            # Recorded with the parameter itself: the __torch_function__ of another class (a nested
            # tensor) came first.
            for each in pytree.tree_leaves((args, kwargs)):
                if isinstance(each, ShardTensor):
                    each.route_gradient()
        return handlers.operation(func, args, kwargs)


# Called for all parameters of an optimizer or a model in every step: no call for each parameter.


def local_or_whole(tensor: T) -> T | torch.Tensor:
    """Return this rank's elements of a sharded tensor; a plain tensor or None unchanged."""
    return tensor.to_local() if isinstance(tensor, ShardTensor) else tensor


def increment_versions(parameters: Iterable[ShardTensor]) -> None:
    """Count a write of this rank's elements, so that what was gathered is gathered again."""
    torch.autograd.graph.increment_version([each._local for each in parameters])


def meshes_of_units(parameters: Iterable[ShardTensor]) -> set[Mesh]:
    """Return the meshes of the units that the parameters are of; copies are of none."""
    return {
        each._spec.mesh
        for each in parameters
        if (each if each._source is None else each.origin)._group_gradients is not None
    }


def gradients_complete(parameters: Iterable[ShardTensor]) -> None:
    """Announce to users' hooks that the running backward has set the ``.grad`` of these parameters."""
    for each in parameters:
        if each._hooks is not None:  # pyright: ignore[reportPrivateUsage]
            each._hooks.announce()  # pyright: ignore[reportPrivateUsage]


def unreduced_of(parameters: Iterable[torch.Tensor]) -> ShardTensor | None:
    """Return a parameter with an unreduced gradient (no synchronisation), which no step can use."""
    sharded = [each for each in parameters if isinstance(each, ShardTensor)]
    for each in [it for it in sharded if it._spec.mesh.run.incomplete]:
        found = each._group_gradients
        if found is not None and found.is_unreduced(each._index_in_group):
            return each
    return None


def keep_writes(parameters: Iterable[Any]) -> None:
    """Bring writes made inside of units, to parameters or their views, to the shards."""
    for reference in {each._writes for each in parameters if isinstance(each, ShardTensor)}:
        group = None if reference is None else reference()
        if group is not None:
            group.keep_writes()


@outside_selective_checkpoints()
def gather(sharded: ShardTensor, operation: str = "reading") -> torch.Tensor:
    """Gather the full tensor, plain; a collective of ``mesh.slices``."""
    spec, local = sharded.spec, sharded.to_local()
    spec.mesh.fingerprints.call(f"{operation} {spec.fqn}")
    with torch.no_grad():
        # Not a view: autograd would refuse writes to it with an error of its own.
        shape = [sum(box.numel for box in spec.shared)] if spec.boxes else spec.shape
        full = torch.empty(shape, dtype=local.dtype, device=spec.mesh.device)
        pieces = [full.view(-1)[interval.start : interval.stop] for interval in spec.intervals]
        pieces[spec.mesh.slices.rank].copy_(local)
        # Compute allocates what the stream fills, here and in `_from_boxes`, and waits for that
        # before it reads: memory that it frees afterwards is written again behind both.
        spec.mesh.gather_stream.issue(lambda: spec.mesh.slices.all_gather_uneven_(pieces)).wait()
        return _from_boxes(full, spec) if spec.boxes else full


def _from_boxes(own: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return the full tensor from the boxes of each rank that splits its layer."""
    group = spec.mesh.tensor
    pieces = [own.new_empty(sum(box.numel for box in shared)) for shared in spec.boxes]
    pieces[group.rank].copy_(own)
    spec.mesh.gather_stream.issue(lambda: group.all_gather_uneven_(pieces)).wait()
    full = own.new_empty(spec.shape)
    for shared, piece in zip(spec.boxes, pieces, strict=True):
        for box, elements in zip(shared, piece.split([it.numel for it in shared]), strict=True):
            full[box.slices].copy_(elements.view(box.sizes))
    return full


def end_writes(*targets: torch.Tensor) -> None:
    """Count writes to sharded or plain tensors, and bring them to existing views of parameters."""
    groups: dict[_KeepsWrites, None] = {}
    for target in targets:
        if not isinstance(target, ShardTensor):
            mark_written(target)
            continue
        mark_written(target.to_local())
        if target.group is not None:
            groups[target.group] = None
    for group in groups:
        group.refill_views()


def mark_written(local: torch.Tensor) -> None:
    """Count a write to a shard in its version counter.

    Operations on shards run below autograd, where nothing else counts versions.
    """
    if not local.is_inference():
        torch.autograd.graph.increment_version(local)


def refuse_recorded_write(sharded: ShardTensor, operation: str) -> None:
    """Raise RuntimeError for a write that autograd would have to record."""
    raise RuntimeError(
        f"parameter {sharded.spec.fqn} is sharded and cannot be written to by {operation} while "
        f"gradients are recorded; it is unchanged. Write to it under torch.no_grad(), or to a copy "
        f"of it (clone())"
    )


class _FullTensor(torch.autograd.Function):
    """Gather in forward; pass on this rank's own gradient in backward.

    Its leaf is the parameter or its unsharded one.
    """

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, sharded: weakref.ref[ShardTensor], operation: str
    ) -> torch.Tensor:
        ctx.sharded, found = sharded, sharded()
        assert found is not None
        return gather(found, operation)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return gradient, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:  # type: ignore[override]
        return gather(tangent) if isinstance(tangent, ShardTensor) else tangent


def origin_of(tensor: Any) -> ShardTensor | None:
    """Return the sharded parameter that a plain tensor was gathered from for autograd, or None."""
    node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
    return node.sharded() if isinstance(node, _FullTensor._backward_cls) else None  # type: ignore[attr-defined]


class _Average(torch.autograd.Function):
    """Average whole gradients over all ranks and keep this rank's interval."""

    @staticmethod
    def forward(
        ctx: Any, gradient: torch.Tensor, spec: ShardSpec, device: torch.device, is_copy: bool
    ) -> ShardTensor:
        total = gradient.contiguous().clone()
        spec.mesh.data.all_reduce_(total).wait()
        size = spec.mesh.data.size
        # Compared once: the comparison synchronizes the device.
        if is_copy and spec.is_first("copy") and _differs(total, gradient * size):
            warnings.warn(
                f"a copy of parameter {spec.fqn} is sharded as that is, and gets the average of "
                f"all ranks' gradients, which are not the same. Under DDP each rank trains a "
                f"copy by its own. For that, copy whole values: copy.deepcopy(module) inside of "
                f"strategy.summon_full_params(), or full_tensor() of the parameter",
                stacklevel=2,
            )
        local = spec.localize(total).div(size)
        return ShardTensor(local.to(device), spec)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        # Uses of the average took it whole, so the arriving gradient has been averaged over ranks
        # already.
        whole = gather(gradient) if isinstance(gradient, ShardTensor) else gradient
        return whole, None, None, None


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ by more than rounding."""
    return bool((one - other).norm() > 1e-3 * one.norm())


def _parameter_of_data(data: torch.Tensor) -> ShardTensor | None:
    """Return the parameter that a tensor is or is an alias of (`p.data`); None: of none."""
    if not isinstance(data, ShardTensor):
        unsharded = parameter_in(data)
        if unsharded is None or unsharded.data_ptr() != data.data_ptr():
            return None  # or an alias that the parameter has left
        return sharded_of(unsharded)
    origin = data.origin
    shares = isinstance(origin, nn.Parameter) and is_same_memory(origin._local, data._local)
    return origin if shares else None


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare memory; also of empty shards, so that the result is the same on all ranks."""
    return (
        storage_of(one) == storage_of(other)
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
    )


_ATTRIBUTES = (*ShardTensor.__annotations__,)
