"""Dtypes of gathered parameters and of reductions, and casts between modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from shardeddp.config import MixedPrecision, ModuleClasses
from shardeddp.engine.forward_copies import (
    compute_with_copies,
    compute_with_parameters,
    is_cast_by_autocast,
    is_used_by_torch,
)
from shardeddp.engine.hooks import drop_forward_hooks, map_tensors
from shardeddp.errors import ConfigurationError
from shardeddp.torch_private import compiled_only_inside
from shardeddp.wrap import ClassPolicy
from shardeddp.wrap.tree import (
    ParameterSpec,
    UnitSpec,
    outermost_modules,
    with_one_dtype_of_memory,
)


def assign_dtypes(
    root: nn.Module,
    units: Sequence[UnitSpec],
    options: MixedPrecision | None,
    autocast: torch.dtype | None,
) -> list[UnitSpec]:
    """Return the units as :func:`with_dtypes` does, and let forwards compute with forward copies."""
    units = with_dtypes(root, units, options, autocast)
    copied = [spec for unit in units for spec in unit.parameters if spec.is_forward_copy]
    _prepare_copies(root, copied, by_autocast=options is None or options.param_dtype is None)
    return units


def with_dtypes(
    root: nn.Module,
    units: Sequence[UnitSpec],
    options: MixedPrecision | None,
    autocast: torch.dtype | None,
) -> list[UnitSpec]:
    """Return the units with the dtypes in which each parameter is gathered and reduced.

    Without the user's ``param_dtype``, autocast decides: a parameter that it would cast before
    every use is gathered in the autocast dtype, with half the bytes and the same result; all others
    compute in their own dtype, as under DDP.
    """
    options = options or MixedPrecision()
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

    return [
        replace(unit, parameters=with_one_dtype_of_memory(map(assigned, unit.parameters)))
        for unit in units
    ]


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
    root: nn.Module, units: Sequence[UnitSpec], options: MixedPrecision | None
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

    return map_tensors(value, to_dtype)


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)
