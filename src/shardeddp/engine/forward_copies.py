"""Forward copies: gathered parameters that the forward of their own module alone computes with.

Under autocast a ``Linear`` casts its weight before the product, so the cast can precede the gather,
at half the bytes and with the same result. All other readers of the weight (a penalty, a cosine
head, a moving average that is written in the step) must see the parameter itself, in its own dtype,
as in an unsharded run. So the module keeps its sharded parameters, and its forward runs on a shadow
of the module that holds the gathered ones. The shadow is made for each call from the current
attributes of the module, as hooks and steps may set any of them.

The same holds, without autocast and in their own dtype, for parameters that tensor-parallel ranks
split: only the forward of their layer can compute with a part, or with its wrapper.

Only torch's own code may see the shadow. With other code (a subclass, a patched forward or
function, a torch function mode), the forward runs on the module; layers that ranks split and that
run other code are split layers (``split_layers.py``).

The forward is a bound method, which a deep copy of the module binds to the copy, and it has no side
effects on the module's parameters: ``torch.compile`` traces it without a break, and into one graph
for all blocks. It traces the shadow that was made when the unit was gathered, if the module's
attributes are still the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import has_torch_function

from shardeddp.tensor.distributed import flatten_boxes
from shardeddp.tensor.module_hooks import state_of
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.tensor.unsharded import accumulate_in
from shardeddp.torch_private import (
    DeviceContext,
    torch_function_modes,
    without_torch_function,
)
from shardeddp.wrap.tree import ParameterSpec

_COPIES = "_shardeddp_forward_copies"  # attribute of a module
_SETTING = (bool, int, float, str, tuple, list)


class _Forward(NamedTuple):
    """Code of a forward that casts its parameters under autocast before any other use."""

    parameters: tuple[str, ...]
    functions: tuple[str, ...] = ()
    """Names of the functions of ``torch.nn.functional`` that it calls."""

    methods: tuple[str, ...] = ()
    """Names of the methods of its class that it calls."""


def _convolution(function: str, method: str) -> _Forward:
    return _Forward(("weight", "bias"), (function,), (method,))


_LINEAR = _Forward(("weight", "bias"), ("linear",))
_FORWARDS: dict[type[nn.Module], _Forward] = {
    nn.Linear: _LINEAR,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _LINEAR,
    nn.Conv1d: _convolution("conv1d", "_conv_forward"),
    nn.Conv2d: _convolution("conv2d", "_conv_forward"),
    nn.Conv3d: _convolution("conv3d", "_conv_forward"),
    nn.ConvTranspose1d: _convolution("conv_transpose1d", "_output_padding"),
    nn.ConvTranspose2d: _convolution("conv_transpose2d", "_output_padding"),
    nn.ConvTranspose3d: _convolution("conv_transpose3d", "_output_padding"),
    nn.MultiheadAttention: _Forward(
        (
            *("in_proj_weight", "in_proj_bias"),
            *("q_proj_weight", "k_proj_weight", "v_proj_weight"),
        ),
        ("multi_head_attention_forward", "linear", "scaled_dot_product_attention"),
        ("merge_masks",),
    ),
    nn.Embedding: _Forward(("weight",), ("embedding",)),
    nn.LayerNorm: _Forward(("weight", "bias"), ("layer_norm",)),
    nn.RMSNorm: _Forward(("weight",), ("rms_norm",)),
}
_WITHOUT_CAST = {
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
}  # autocast leaves their parameters as they are
_FORWARDS_BY_NAME = {"transformers.pytorch_utils.Conv1D": _Forward(("weight", "bias"))}


def is_cast_by_autocast(spec: ParameterSpec) -> bool:
    """Return whether autocast casts a parameter before any other use.

    False for a subclass of torch's module or a patched forward or function: they might compute with
    the parameter in its own dtype.
    """
    return (
        spec.dtype is torch.float32
        and not spec.is_wrapped  # autocast casts the tensor made of it
        and all(
            type(module) not in _WITHOUT_CAST and is_used_by_torch(module, name)
            for module, name in spec.registrations
        )
    )


def is_used_by_torch(module: nn.Module, name: str) -> bool:
    """Return whether torch's own forward reads a parameter and changes no attribute."""
    forward = _forward_of(module)
    if forward is None or name not in forward.parameters or "forward" in vars(module):
        return False
    code = _code(module, forward)
    if any(name in vars(module) for name in forward.parameters):  # computed by somebody's hook
        return False
    origins = {type(module).__module__, functional.__name__}
    return code is not None and all(
        isinstance(it, BuiltinFunctionType)
        or (isinstance(it, FunctionType) and it.__globals__.get("__name__") in origins)
        for it in code
    )


def _forward_of(module: nn.Module) -> _Forward | None:
    kind = type(module)
    return _FORWARDS.get(kind) or _FORWARDS_BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")


def _code(module: nn.Module, forward: _Forward) -> tuple[object, ...] | None:
    """Return the functions that run in a module's forward; None if the instance overrides any."""
    if any(name in module.__dict__ for name in forward.methods):
        return None
    kind = type(module)
    return (
        kind.forward,
        *(getattr(kind, name) for name in forward.methods),
        *(getattr(functional, name) for name in forward.functions),
    )


class ForwardCopies:
    """Gathered parameters that the forward of one module computes with.

    See :func:`compute_with_copies`.
    """

    def __init__(
        self,
        module: nn.Module,
        names: tuple[str, ...],
        inner: Mapping[str, ForwardCopies],
        by_autocast: bool,
    ) -> None:
        self._by_autocast = by_autocast
        self._active = False  # the gathered parameters are usable
        # Number of forwards with gradients since the last gather or backward began.
        self._uses = 0
        # Sharded parameters of the module by name, unless other code has replaced them.
        self._sharded: dict[str, torch.Tensor | None] = dict.fromkeys(names)

        self._locals: list[torch.Tensor] = []
        self._versions: list[int] = []  # versions of `_locals` at the gather
        self._dtype = torch.float32
        self._device_type = "cpu"
        self._gathered: dict[str, nn.Parameter] = {}
        self._wrappers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        # While active, tensors that the forward computes with instead of some gathered ones.
        self._wrapped: dict[str, torch.Tensor] = {}

        self._inner = dict(inner)
        self._forward = _forward_of(module) or _Forward(())
        self._code = _code(module, self._forward)
        self._class = type(module)
        divided = state_of(module)
        changed = () if divided is None else divided.attributes
        self._settings = tuple(
            name
            for name, it in vars(module).items()
            if (it is None or isinstance(it, _SETTING)) and name not in changed
        )
        self._compiled = module
        """Shadow that compiled code computes with."""

    def are_current(self, module: nn.Module) -> bool:
        """Return whether the copies are usable and equal those that the forward would make now."""
        if not self._active or any(
            module._parameters.get(name) is not it for name, it in self._sharded.items()
        ):
            return False
        if self._by_autocast and not self._casts_alike(module):
            return False
        if torch.compiler.is_compiling():
            made_from = self._compiled.__dict__
            if any(module.__dict__.get(name) != made_from.get(name) for name in self._settings):
                return False
            if any(name in module.__dict__ for name in self._forward.parameters):
                return False
        elif [local._version for local in self._locals] != self._versions:
            return False  # written to in the step; compiled code sees that when the unit is entered next
        return all(
            copies.are_current(module._modules[name])  # type: ignore[arg-type]
            for name, copies in self._inner.items()
        )

    def _casts_alike(self, module: nn.Module) -> bool:
        """Return whether torch's forward runs under the autocast of the copies."""
        device = self._device_type
        return (
            type(module) is self._class
            and _code(module, self._forward) == self._code
            # False outside of autocast, or inside of one that the user has changed.
            and torch.is_autocast_enabled(device)
            and torch.get_autocast_dtype(device) == self._dtype
        )

    def hold(
        self,
        name: str,
        sharded: torch.Tensor,
        gathered: nn.Parameter,
        cast_to: torch.dtype | None,
        wrapper: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """Let the forward compute with a gathered parameter instead of the module's sharded one.

        It was gathered in the autocast dtype ``cast_to``, if any. The wrapper is a function of a
        tensor-parallel layer on its part.
        """
        self._sharded[name], self._gathered[name] = sharded, gathered
        self._device_type = sharded.device.type
        self._dtype = cast_to or self._dtype
        if wrapper is not None:
            self._wrappers[name] = wrapper

    def activate(self, module: nn.Module) -> None:
        """Use the gathered parameters in forwards from now on."""
        self._compiled = self._shadow(module)
        self.note_all_gather()
        self._uses, self._active = 0, True

    def compute_with(self, name: str, wrapper: torch.Tensor) -> None:
        """Use a wrapper in place of a gathered parameter, until :meth:`deactivate`."""
        self._wrapped[name] = wrapper

    def deactivate(self, module: nn.Module) -> None:
        """Stop using the gathered parameters, before their release."""
        self._active = False
        self._wrapped.clear()
        self._compiled = module  # a shadow holds memory of other parameters as well

    def shadow(self, module: nn.Module) -> nn.Module:
        """Return the module in its current state, with the gathered parameters."""
        return self._compiled if torch.compiler.is_compiling() else self._shadow(module)

    def _shadow(self, module: nn.Module) -> nn.Module:
        shadow = _holding(module, {**self._gathered, **self._wrapped})
        if self._inner:
            children = module.__dict__["_modules"]
            inner = {name: it._shadow(children[name]) for name, it in self._inner.items()}
            shadow.__dict__["_modules"] = {**children, **inner}
        return shadow

    def without(self, module: nn.Module) -> nn.Module:
        """Return the module for a forward without the gathered parameters.

        It is a shadow if a tensor-parallel rank computes with a part of a sharded parameter.
        """
        parts: dict[str, torch.Tensor] = {}
        for name, gathered in self._gathered.items():
            held = cast(ShardTensor, self._sharded[name])
            with without_torch_function():  # a released one has the whole shape
                shape = gathered.shape
            wrapper = self._wrappers.get(name)
            is_part = held.shape != shape
            if (is_part or wrapper is not None) and module._parameters.get(name) is held:
                part = held
                if is_part:
                    held.spec.mesh.run.note_cut(held.spec.fqn)
                    part = flatten_boxes(held, held.spec.shared).view(shape)
                parts[name] = part if wrapper is None else wrapper(part)
        return _holding(module, parts) if parts else module

    def begin_backward(self) -> None:
        """Count the uses of the copies anew."""
        self._uses = 0

    def note_use(self) -> None:
        """Accumulate gradients of several uses in the parameters' own dtype.

        Lightning's autocast casts for each use.
        """
        self._uses += 1
        if self._uses == 2:
            for name, gathered in self._gathered.items():
                accumulate_in(gathered, cast(ShardTensor, self._sharded[name]).dtype)
        for copies in self._inner.values():
            copies.note_use()

    def note_all_gather(self) -> None:
        """Record the versions of the shards that the copies have been gathered from."""
        self._locals = [cast(ShardTensor, it).raw_local for it in self._sharded.values()]
        self._versions = [local._version for local in self._locals]

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._active, self._uses, self._sharded, self._gathered, self._inner = False, 0, {}, {}, {}
        self._wrappers, self._wrapped = {}, {}
        self._locals, self._versions = [], []


def compute_with_copies(
    module: nn.Module,
    names: tuple[str, ...],
    inner: Mapping[str, nn.Module],
    *,
    by_autocast: bool = True,
) -> None:
    """Make a module's forward compute with gathered parameters, once :func:`copies_of` has them.

    Args:
        module: Module without a ``forward`` of its own in its dictionary.
        names: Names of the parameters.
        inner: Children, by name, with parameters that the forward reads without calling the child;
            this function has been called for them before.
        by_autocast: True if the copies are valid only under autocast.
    """
    children = {
        name: copies for name, child in inner.items() if (copies := copies_of(child)) is not None
    }
    vars(module)[_COPIES] = ForwardCopies(module, names, children, by_autocast)
    vars(module)["forward"] = MethodType(forward, module)


def compute_with_parameters(module: nn.Module) -> None:
    """Undo :func:`compute_with_copies`, also for a deep copy of such a module."""
    state = vars(module)
    its_forward = state.get("forward")
    if isinstance(its_forward, MethodType) and its_forward.__func__ is forward:
        del state["forward"]
    state.pop(_COPIES, None)


def copies_of(module: nn.Module) -> ForwardCopies | None:
    """Return the gathered parameters that a module's forward computes with; None if it has none."""
    return vars(module).get(_COPIES)


def _holding(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module that shares all attributes with another one, except for some parameters.

    Attributes of a module that ranks divide are those of its forward.
    """
    shadow = object.__new__(type(module))
    own = module.__dict__
    shadow.__dict__.update(own, _parameters={**own["_parameters"], **parameters})
    if (divided := state_of(module)) is not None:
        shadow.__dict__.update(divided.attributes)
    return shadow


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a module with copies; pickle finds its class's forward by this name."""
    copies: ForwardCopies = self.__dict__[_COPIES]
    if not copies.are_current(self) or _is_intercepted(args, kwargs):
        return type(self).forward(copies.without(self), *args, **kwargs)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        copies.note_use()
    return type(self).forward(copies.shadow(self), *args, **kwargs)


def _is_intercepted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a tensor subclass or a mode of the user intercepts functions of torch."""
    given = (*args, *kwargs.values())
    return has_torch_function(given) and (
        any(type(mode) is not DeviceContext for mode in torch_function_modes())
        or any(
            hasattr(type(it), "__torch_function__") and type(it) not in (torch.Tensor, nn.Parameter)
            for it in given
        )
    )
