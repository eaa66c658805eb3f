"""Precision: Lightning's plugins with global gradient clipping, and dtypes of each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from shardeddp.config import MixedPrecision as MixedPrecisionOptions
from shardeddp.config import ModuleClasses
from shardeddp.engine.forward_copies import (
    compute_with_copies,
    compute_with_parameters,
    is_cast_by_autocast,
    is_used_by_torch,
)
from shardeddp.engine.hooks import drop_forward_hooks
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    DoublePrecision,
    GradClipAlgorithmType,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from shardeddp.optim.clip import clip_grad_norm_, clip_grad_value_
from shardeddp.torch_private import compiled_only_inside
from shardeddp.wrap import ClassPolicy
from shardeddp.wrap.tree import (
    ParameterSpec,
    UnitSpec,
    outermost_modules,
    with_one_dtype_of_memory,
)

# -- Plugins: stock precisions with global gradient clipping

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Dtype of the autocast by the Trainer's precision."""


class ShardedPrecision(Precision):
    """Lightning's precision plugin that clips sharded gradients by their global norm.

    By itself it computes in float32; other precisions inherit from this class and the stock one, so
    that code that asks for the stock class finds it.
    """

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of the autocast around every step; None: no autocast."""
        return AUTOCAST.get(str(self.precision))

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm_(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value_(self.main_params(optimizer), clip_val)


class _HalfPrecision(ShardedPrecision, HalfPrecision):
    """``bf16-true`` and ``16-true``."""


class _DoublePrecision(ShardedPrecision, DoublePrecision):
    """``64-true``."""


class ShardedMixedPrecision(ShardedPrecision, MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``: autocast around every step, and a loss scaler for float16.

    Main shards, gradients and optimizer states stay in float32. All ranks skip a step together: the
    scaler's search for infinities is global if gradients are sharded.
    """

    # Lightning saves the scaler's state under this name. The stock plugin's name lets a run under
    # one strategy resume under another.
    __qualname__ = "MixedPrecision"

    @override
    def __reduce__(self) -> Any:
        """Pickle without that name, under which the module has the stock class."""
        return _sharded, (MixedPrecision, vars(self))

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if (
            self.scaler is not None
            and clip_val > 0
            and vars(optimizer).get("_step_supports_amp_scaling")
        ):
            raise ConfigurationError(
                f"gradient_clip_val={clip_val} with precision='16-mixed': "
                f"{type(optimizer).__name__}(fused=True) divides gradients by the loss scale "
                f"inside its step, after they would have been clipped; make it with fused=False"
            )
        # The stock class refuses fused optimizers without a scaler, too.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


SHARDED: Mapping[type[Precision], type[ShardedPrecision]] = {
    Precision: ShardedPrecision,
    HalfPrecision: _HalfPrecision,
    DoublePrecision: _DoublePrecision,
    MixedPrecision: ShardedMixedPrecision,
}
"""Plugins of a sharded run by the stock plugin."""


def shard_precision(plugin: Precision | None) -> Precision:
    """Return the plugin of a sharded run in which Lightning has chosen ``plugin``.

    It has the attributes of the stock plugin. Plugins that Lightning does not ship are returned
    unchanged.

    Raises:
        ConfigurationError: ShardedDP does not support the precision.
    """
    if plugin is None:
        return ShardedPrecision()
    if type(plugin) in SHARDED:
        return _sharded(type(plugin), vars(plugin))
    if type(plugin).__module__.startswith(("lightning.", "pytorch_lightning.")):
        raise ConfigurationError(
            f"ShardedDP does not work with {type(plugin).__name__}; use precision='32-true', "
            f"'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true'"
        )
    return plugin


def _sharded(stock: type[Precision], attributes: Mapping[str, Any]) -> ShardedPrecision:
    made = SHARDED[stock].__new__(SHARDED[stock])
    vars(made).update(attributes)
    return made


# -- Dtypes of gathered parameters and reductions, and casts between modules


def assign_dtypes(
    root: nn.Module,
    units: Sequence[UnitSpec],
    options: MixedPrecisionOptions | None,
    autocast: torch.dtype | None,
) -> list[UnitSpec]:
    """Return the units with the dtypes in which each parameter is gathered and reduced.

    Without the user's ``param_dtype``, autocast decides: a parameter that it would cast before
    every use is gathered in the autocast dtype, with half the bytes and the same result; all others
    compute in their own dtype, as under DDP.
    """
    options = options or MixedPrecisionOptions()
    param_dtype = cast("torch.dtype | None", options.param_dtype)
    reduce_dtype = cast("torch.dtype | None", options.reduce_dtype)
    kept = _inside(_kept_modules(root, options.keep_fp32))

    def assigned(spec: ParameterSpec) -> ParameterSpec:
        if not spec.dtype.is_floating_point:
            return spec
        if param_dtype is None:
            compute_in = autocast if is_cast_by_autocast(spec) else None
        else:
            compute_in = None if _is_kept(spec, kept) else param_dtype
        by_autocast = compute_in is not None and param_dtype is None
        return replace(
            spec,
            compute_in=compute_in,
            is_forward_copy=by_autocast or _is_layers_own(spec),
            reduce_in=reduce_dtype,
        )

    units = [
        replace(unit, parameters=with_one_dtype_of_memory(map(assigned, unit.parameters)))
        for unit in units
    ]
    copied = [spec for unit in units for spec in unit.parameters if spec.is_forward_copy]
    _prepare_copies(root, copied, by_autocast=param_dtype is None)
    return units


def _is_layers_own(spec: ParameterSpec) -> bool:
    """True if only its layer's forward may see this rank's part of a parameter, or its wrapper.

    Other code (a penalty, a logged norm, a hook) sees the whole parameter then, gathered or not.
    """
    split = spec.distribution
    return (
        split is not None
        and (bool(split.boxes) or spec.is_wrapped)
        and not split.is_dtensor
        and not split.of_experts  # the expert around the layer may use it, too
        and all(
            not isinstance(module, nn.MultiheadAttention) and is_used_by_torch(module, name)
            for module, name in spec.registrations
        )
    )


def _prepare_copies(root: nn.Module, specs: Sequence[ParameterSpec], *, by_autocast: bool) -> None:
    """Make forwards compute with gathered copies that no code outside of them sees."""
    names: dict[int, list[str]] = {}
    cast: set[int] = set()
    for spec in specs:
        for module, name in spec.registrations:
            names.setdefault(id(module), []).append(name)
            if by_autocast and spec.compute_in is not None:
                cast.add(id(module))
    for module in reversed([*root.modules()]):  # inner ones first
        # MultiheadAttention reads the parameters of its child `out_proj` without calling it.
        inner = {"out_proj": module.out_proj} if isinstance(module, nn.MultiheadAttention) else {}
        if id(module) in names:
            own = tuple(names[id(module)])
            compute_with_copies(module, own, inner, by_autocast=id(module) in cast)


def cast_at_boundaries(
    root: nn.Module, units: Sequence[UnitSpec], options: MixedPrecisionOptions | None
) -> None:
    """Cast inputs and outputs of modules, and buffers, by the user's options.

    Inputs of units and of the model's outermost modules are cast, and outputs of the outermost
    modules. ``keep_fp32`` modules take inputs in their own dtype and return ``param_dtype``.
    Without options there is no cast.
    """
    if options is None:
        return
    param_dtype = cast("torch.dtype | None", options.param_dtype)
    output_dtype = cast("torch.dtype | None", options.output_dtype)
    buffer_dtype = cast("torch.dtype | None", options.buffer_dtype)
    kept = _kept_modules(root, options.keep_fp32)
    outermost = [root, *outermost_modules(root)]
    if param_dtype is not None:
        boundaries = {
            id(module): module for module in (*outermost, *(unit.module for unit in units))
        }
        if options.cast_forward_inputs:
            for key, module in boundaries.items():
                if key not in kept:
                    _cast_inputs(module, param_dtype)
        for module in kept.values():
            own = next((parameter.dtype for parameter in module.parameters()), torch.float32)
            _cast_inputs(module, own)
            _cast_outputs(module, param_dtype)
    if output_dtype is not None:
        for module in outermost:
            _cast_outputs(module, output_dtype)
    if buffer_dtype is not None:
        inside = _inside(kept)
        for module in root.modules():
            if id(module) not in inside:
                _cast_buffers(module, buffer_dtype)


def forget_dtypes(root: nn.Module) -> None:
    """Remove the casts of an earlier setup, except for casts of buffers."""
    for module in root.modules():
        drop_forward_hooks(module, _is_cast)
        compute_with_parameters(module)


def _is_cast(hook: object) -> bool:
    return isinstance(hook, partial) and hook.func in (_cast_before, _cast_after)


def _is_kept(spec: ParameterSpec, kept: Mapping[int, nn.Module]) -> bool:
    keeps = [id(module) in kept for module, _ in spec.registrations]
    if any(keeps) and not all(keeps):
        raise ConfigurationError(
            f"parameter {spec.fqn} is shared between a module whose class is in keep_fp32 and one "
            f"whose class is not: expected one dtype for it. Name the classes of both, or of "
            f"neither"
        )
    return any(keeps)


def _kept_modules(root: nn.Module, keep_fp32: ModuleClasses) -> dict[int, nn.Module]:
    """Return the outermost modules that keep their dtype, by ``id``."""
    if not keep_fp32:
        return {}
    names = ClassPolicy(list(keep_fp32)).select(root)
    found = {id(module): module for module in map(root.get_submodule, names)}
    inner = {
        id(child) for module in found.values() for child in module.modules() if child is not module
    }
    return {key: module for key, module in found.items() if key not in inner}


def _inside(modules: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    return {id(inner): inner for module in modules.values() for inner in module.modules()}


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    module.register_forward_pre_hook(partial(_cast_before, dtype), with_kwargs=True)


def _cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    module.register_forward_hook(partial(_cast_after, dtype))


@compiled_only_inside
def _cast_before(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast(args, dtype), _cast(kwargs, dtype)


@compiled_only_inside
def _cast_after(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(value, torch.Tensor, to_dtype)


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)
