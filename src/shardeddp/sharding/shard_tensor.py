"""ShardTensor: what a parameter is outside its unit's compute; the whole parameter to ask, one interval of it to hold.

[Note: the tensors of a parameter]
One parameter of the user's model is, in the engine, up to five tensors:

- the *sharded parameter*: the user's own object, turned into a ``ShardTensor``. It is what ``parameters()``, optimizers
  and state dicts see. It holds a view of the main shard.
- the *unsharded parameter*: a plain ``nn.Parameter``, a view of the unit's gathered flat buffer. The module computes
  with it, and autograd leaves the unsharded gradient on it. It is usable only while its unit is unsharded.
- the *local parameter*: a plain 1D view of the main shard, this rank's interval. Element-wise optimizers step on it.
- the *sharded gradient*: a ``ShardTensor`` over a view of the unit's gradient shard; ``.grad`` of the sharded
  parameter.
- the *local gradient*: that view itself; ``.grad`` of the local parameter.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from shardeddp.comm import Mesh
from shardeddp.plan.intervals import Interval
from shardeddp.sharding import dispatch
from shardeddp.sharding.asked_gradients import are_asked, asked_gradients, backward_to
from shardeddp.sharding.chunks import Chunked
from shardeddp.sharding.gathered import Gathered, GatheredView, gather, outside_of_graphs, refuse_recorded_write
from shardeddp.sharding.gradient_hooks import CompletionHook, GradientHook, GradientHooks
from shardeddp.sharding.memoryless import Memoryless
from shardeddp.sharding.questions import asks_only_about

Dispatch = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardSpec:
    """What all tensors that are sharded like one parameter have in common; compared by identity.

    Gradients and optimizer states share their parameter's spec, by which operations know that intervals coincide.
    """

    fqn: str
    shape: torch.Size
    intervals: tuple[Interval, ...]
    """Elements of the flattened parameter that each owner holds, in the order of ``mesh.owners``; they cover it."""

    mesh: Mesh
    offloaded: bool = False
    """Whether elements live in host memory and compute elsewhere."""

    warned: list[str] = field(default_factory=list)
    """Warnings given for this parameter, so that none is given twice."""

    @property
    def interval(self) -> Interval:
        """The elements that this rank owns."""
        return self.intervals[self.mesh.owners.rank]

    @cached_property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def device_of(self, local: torch.Tensor) -> torch.device:
        """The device that a tensor over these elements shows: where it computes."""
        return self.mesh.device if self.offloaded and local.device.type == "cpu" else local.device

    def localize(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's interval of a tensor of the parameter's shape, full or sharded; a view if it can be one."""
        if isinstance(tensor, ShardTensor) and tensor.spec is self:
            return tensor.to_local()
        return tensor.reshape(-1)[self.interval.start : self.interval.stop]


class ShardTensor(Chunked, Memoryless, torch.Tensor):
    """A tensor with its global shape, of which this rank holds one interval of the flattened elements.

    With gradients enabled, an operation on a ``ShardTensor`` that requires grad works on the gathered full tensor, and
    the gradient is averaged over all ranks in backward: right wherever a parameter is used, at the cost of a gather per
    use, which one warning per parameter points out. Without gradients, element-wise operations work on the local
    interval, reductions over all elements give the global value, and everything else gathers. A view of it
    (``weight[0]``) is a view of gathered elements; what is written to the view reaches the shard. All of these need
    every rank to take part, but for the element-wise ones.
    """

    _local: torch.Tensor  # 1D, spec.interval.numel
    _spec: ShardSpec
    _unsharded: nn.Parameter | None  # of a sharded parameter: its unsharded one
    _hooks: GradientHooks | None  # of a sharded parameter: made with the first of them

    def __new__(cls, local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> ShardTensor:  # noqa: D102
        made = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, dtype=local.dtype, device=spec.device_of(local), requires_grad=requires_grad
        )
        made._local = local
        made._spec = spec
        made._unsharded = None
        made._hooks = None
        torch._C._set_throw_on_mutable_data_ptr(made)  # it has none: kernels that are handed it fail, and do not crash
        return made

    def __init__(self, local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> None:
        """Wrap this rank's interval.

        Args:
            local: 1D tensor with this rank's elements.
            spec: Which elements those are, and of what.
            requires_grad: Whether operations on it are recorded.
        """

    @property
    def spec(self) -> ShardSpec:
        """What this tensor is a shard of."""
        return self._spec

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether operations on it are recorded; setting it reaches the unsharded parameter as well."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> ShardTensor:  # type: ignore[override]  # noqa: D102
        with torch._C.DisableTorchFunctionSubclass():
            super().requires_grad_(requires_grad)
            if self._unsharded is not None:
                self._unsharded.requires_grad_(requires_grad)
        return self

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same shard without its history; writing to it changes the parameter, assigning copies the values."""
        return self.detach()

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if isinstance(data, ShardTensor) and data._local is self._local:
            return  # module.to() with the dtype and the device that the module has
        if (data.shape, data.dtype, data.device) != (self.shape, self.dtype, self.device):
            raise RuntimeError(
                f"{self._spec.fqn} is sharded and cannot be given other memory (.data = ..., .half(), .to()): expected "
                f"it to stay {tuple(self.shape)}, {self.dtype} on {self.device}, found {tuple(data.shape)}, "
                f"{data.dtype} on {data.device}. Change that before the model is sharded"
            )
        with torch.no_grad():
            self.copy_(data)

    @property
    def unsharded(self) -> nn.Parameter | None:
        """Of a sharded parameter of a unit: the one that its module computes with."""
        return self._unsharded

    def register_hook(self, hook: GradientHook) -> RemovableHandle:  # type: ignore[override]
        """Call a hook with each gradient on its way to the parameter; see :class:`GradientHooks`."""
        if not self.is_leaf or not self.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                return super().register_hook(hook)
        self._hooks = self._hooks or GradientHooks(self, self._unsharded)
        return self._hooks.add(hook)

    def register_post_accumulate_grad_hook(self, hook: CompletionHook) -> RemovableHandle:
        """Call a hook with the parameter when a backward has completed its gradient; see :class:`GradientHooks`."""
        if not self.is_leaf or not self.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                return super().register_post_accumulate_grad_hook(hook)
        self._hooks = self._hooks or GradientHooks(self, self._unsharded)
        return self._hooks.add_completion(hook)

    def gradient_completes(self) -> None:
        """Take note that the backward that is running has set ``.grad``."""
        if self._hooks is not None:
            self._hooks.announce()

    def adopt_hooks(self, *former: Any) -> None:
        """Take over the hooks of the parameter that this one was before it was sharded."""
        self._hooks = GradientHooks(self, self._unsharded, former)  # type: ignore[arg-type]

    def tolist(self) -> Any:  # noqa: D102
        return gather(self, "tolist of").tolist()

    def numpy(self, *, force: bool = False) -> Any:  # noqa: D102
        array = gather(self, "numpy of").requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False  # what is written to an array could not be seen
        return array

    def to_local(self) -> torch.Tensor:
        """This rank's elements, 1D; shares memory, so writing to it changes the shard."""
        return self._local

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, gathered; a collective of all ranks of the shard group. No gradient flows through it."""
        return gather(self, "full_tensor of")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        spec, interval = self._spec, self._spec.interval
        return (
            f"ShardTensor({spec.fqn}, shape={tuple(spec.shape)}, dtype={self._local.dtype}, elements "
            f"{interval.start}..{interval.stop} of {spec.numel} on rank {spec.mesh.rank}, local={self._local!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) not in memo:
            copied = ShardTensor(self._local.detach().clone(), self._spec, self.requires_grad)
            own = ("_local", "_spec", "_unsharded", "_hooks")
            vars(copied).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k not in own})
            memo[id(self)] = copied
        return memo[id(self)]

    def __copy__(self) -> ShardTensor:
        copied = ShardTensor(self._local, self._spec, self.requires_grad)
        vars(copied).update(vars(self), _unsharded=None, _hooks=None)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = gather(self, "pickling")
        parameter = nn.Parameter(whole, self.requires_grad) if isinstance(self, nn.Parameter) else whole
        return parameter.__reduce_ex__(protocol)

    @classmethod
    @outside_of_graphs
    def __torch_function__(
        cls, func: Dispatch, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.autograd.grad:
                return asked_gradients(cls, *args, **kwargs)
            if func is torch.autograd.backward:
                return backward_to(cls, *args, **kwargs)
            if torch.is_grad_enabled() and not asks_only_about(func) and _needs_gradient((args, kwargs)):
                return _run_on_full(func, args, kwargs)
            return func(*args, **kwargs)

    @classmethod
    @outside_of_graphs
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch.run(cls, func, args, kwargs or {})


class _FullTensor(torch.autograd.Function):
    """Gather forward; average over all ranks and keep this rank's interval backward."""

    @staticmethod
    def forward(ctx: Any, sharded: ShardTensor, operation: str) -> torch.Tensor:
        ctx.spec, ctx.home = sharded.spec, sharded.to_local().device
        return gather(sharded, operation)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient if are_asked() else _Average.apply(gradient, ctx.spec, ctx.home), None


class _Average(torch.autograd.Function):
    """Average whole gradients over all ranks and keep this rank's interval."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, spec: ShardSpec, home: torch.device) -> ShardTensor:
        total = gradient.contiguous().clone()
        spec.mesh.world.all_reduce_(total).wait()
        local = spec.localize(total).div(spec.mesh.topology.world_size)
        return ShardTensor(local.to(home), spec)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        # Whoever used the average took it whole, so what arrives has been averaged over ranks already.
        return gather(gradient) if isinstance(gradient, ShardTensor) else gradient, None, None


class _View(torch.autograd.Function):
    """Hand a view of a full tensor out as a ``GatheredView``, with the view's gradients."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor, gathered: Gathered) -> GatheredView:
        return GatheredView(view, gathered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def _needs_gradient(arguments: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(arguments))


def _run_on_full(func: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that autograd records, on full tensors."""
    found: dict[int, tuple[Gathered, int]] = {}

    def to_full(sharded: ShardTensor) -> torch.Tensor:
        if id(sharded) not in found:
            operation = f"{func.__name__} of"
            with temporarily_clear_interpreter_stack():  # a transform of torch.func sees what was gathered, not how
                full = _FullTensor.apply(sharded, operation) if sharded.requires_grad else gather(sharded, operation)
            found[id(sharded)] = (Gathered(sharded, full), full._version)
        return found[id(sharded)][0].full

    def hand_out(tensor: torch.Tensor) -> torch.Tensor:
        gathered = next((gathered for gathered, _ in found.values() if gathered.aliases(tensor)), None)
        if gathered is None:
            return tensor
        return gathered.sharded if tensor is gathered.full else _View.apply(tensor, gathered)

    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, ShardTensor) and isinstance(leaf, nn.Parameter) and leaf.requires_grad:
            _warn_outside(leaf)
    full_args, full_kwargs = pytree.tree_map_only(ShardTensor, to_full, (args, kwargs))
    result = func(*full_args, **full_kwargs)
    for gathered, version in found.values():
        if gathered.full._version != version:
            refuse_recorded_write(gathered.sharded, func.__name__)
    return pytree.tree_map_only(torch.Tensor, hand_out, result)


def _warn_outside(sharded: ShardTensor) -> None:
    spec = sharded.spec
    if "outside" not in spec.warned:
        spec.warned.append("outside")
        nbytes = spec.numel * sharded.element_size()
        warnings.warn(
            f"parameter {spec.fqn} is used outside the forward of the unit that holds it: each such use gathers "
            f"{nbytes:,} bytes, and its gradient is reduced by itself. The result is right. To make it fast, use the "
            f"parameter inside its module's forward, or let a parent module be the unit (auto_wrap_policy)",
            stacklevel=5,  # whoever called the torch function
        )
