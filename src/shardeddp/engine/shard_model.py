"""Sharding of a model: agreement on the plan, shards, buffers on the device, and the runtime."""

import gc
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import compress

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardeddp.comm import Collectives, Mesh, agree_on_layout, run_on_all_ranks
from shardeddp.config import Options
from shardeddp.engine.deferred_init import Materializer, MetaGuard, record_resets
from shardeddp.engine.recording import Recording
from shardeddp.engine.runtime import Runtime
from shardeddp.engine.takeover import Takeover
from shardeddp.engine.unit import Unit
from shardeddp.errors import ConfigurationError, first_three
from shardeddp.garbage import collector_paused
from shardeddp.plan.sharding_strategy import ShardingStrategy
from shardeddp.tensor.autograd import patch_functions
from shardeddp.tensor.collectives import patch_collectives
from shardeddp.torch_private import storage_of
from shardeddp.wrap.flat_buffers import UnitPlan, plan_unit
from shardeddp.wrap.tree import ParameterSpec, UnitSpec, extent_nbytes, is_computed, join

# -- Buffers and metrics on the device of a rank


def place_module(module: nn.Module, device: torch.device) -> None:
    """Move all tensors except parameters to ``device``; these are there already, as shards."""
    for child in module.children():
        place_module(child, device)
    if next(module.parameters(), None) is None:
        module.to(device)  # metrics move states that are not buffers
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)


# -- Sharding of a model: agreed plan, shards, runtime


@collector_paused()
def shard_model(
    specs: Sequence[UnitSpec],
    mesh: Mesh,
    options: Options,
    *,
    precision: object = None,
    recording: Recording | None = None,
    takeover: Takeover | None = None,
    load: Callable[[], None] | None = None,
    is_only: bool = False,
) -> Runtime:
    """Shard every unit in place and attach the runtime's hooks; a collective of all ranks.

    Tensors on the meta device get their values here, directly in the shards. A single rank leaves
    parameters unsharded, unless they are cast or offloaded.

    Args:
        specs: Units of the model, the root unit first.
        mesh: Process groups of the ranks that share the model.
        options: Options of the strategy.
        precision: Choice of the dtypes in ``specs``, compared when the model is set up again.
        recording: Recorded construction of tensors on the meta device; None: no recording.
        takeover: Takeover of parameters that were sharded before; None: there are none.
        load: Function that loads a checkpoint into the shards; tensors that it does not load are
            initialised. None: no checkpoint.
        is_only: True if no other recorded module will be sharded.

    Returns:
        Runtime of the model.

    Raises:
        LayoutMismatchError: Ranks hold different models; nothing has been changed.
        ConfigurationError: A tensor on the meta device cannot get values.
        RankError: A rank failed to cut or to initialise its parameters.
    """
    sharding, offload = options.sharding, options.cpu_offload
    on_host = sharding.offload_params and mesh.device.type != "cpu"
    is_single_rank = mesh.data.size == mesh.tensor.size == 1 and not (
        offload.params or offload.optimizer
    )
    plans = [
        plan_unit(
            _passing_through(spec) if is_single_rank else spec,
            mesh.topology,
            reshard=sharding.reshard,
            regather_size=sharding.regather_size,
            on_host=on_host,
        )
        for spec in specs
    ]
    agree_on_layout([*options.order_of_gathers, *layout_lines(plans, mesh, sharding)], mesh.control)
    recording = recording or Recording()

    def find_deferred() -> Materializer:
        record_resets(specs[0].module, recording)
        return Materializer(specs, recording, load, is_only=is_only)

    materializer = run_on_all_ranks("finding deferred parameters", find_deferred, mesh.control)
    views = run_on_all_ranks(
        "finding views of parameters",
        lambda: _held_views(specs[0].module, specs),
        mesh.control,
    )
    follow_rank_zero(specs, mesh)
    with recording.active():
        _detach_computed(specs[0].module)
    former = _former_memory(specs, mesh.device)
    strided = {
        it.fqn for spec in specs for it in spec.parameters if not it.parameter.is_contiguous()
    }
    for plan in plans:
        _move_passthrough(plan.spec, mesh.device)
    units = run_on_all_ranks(
        "sharding the model",
        lambda: [Unit(plan, mesh) for plan in plans],
        mesh.control,
    )
    for module, attribute, spec in views:
        vars(module)[attribute] = spec.parameter.detach()
    if takeover is not None:
        takeover.fill(units)
    kept = materializer.fill(mesh)
    if units:
        sharded = {spec.fqn for unit in units for spec in unit.spec.parameters}
        _warn_of_former_memory(former, sharded, kept)
        _warn_of_strides(strided & sharded, mesh)
    guard = MetaGuard if materializer.is_needed else nullcontext
    # For the whole process: torch sees full tensors of sharded parameters from now on.
    patch_functions()
    patch_collectives()
    return Runtime(units, mesh, options, precision=precision, guard=guard)


def _held_views(
    root: nn.Module, specs: Sequence[UnitSpec]
) -> list[tuple[nn.Module, str, ParameterSpec]]:
    """Return attributes of modules that are detached views of a whole parameter, and follow it.

    Module, attribute name and parameter of each.

    Raises:
        ConfigurationError: A buffer, or a view of a part, shares memory with a parameter.
    """
    parameters = [spec for unit in specs for spec in unit.parameters]
    parameters = [it for it in parameters if it.parameter.numel() and it.shares_memory_with is None]
    parameters.sort(key=lambda spec: _span(spec.parameter))
    spans = [_span(spec.parameter) for spec in parameters]
    found: list[tuple[nn.Module, str, ParameterSpec]] = []
    for name, module in root.named_modules():
        for attribute, value in (*vars(module).items(), *module._buffers.items()):
            if (
                not isinstance(value, torch.Tensor)
                or value.layout is not torch.strided
                or not value.numel()
            ):
                continue
            if isinstance(value, nn.Parameter) or is_computed(module, attribute):
                continue
            memory, start, stop = span = _span(value)
            last = bisect_left(spans, (memory, stop)) - 1  # last span that begins before `stop`
            if last < 0 or spans[last][0] != memory or spans[last][2] <= start:
                continue
            spec = parameters[last]
            is_all = (span, value.shape, value.stride()) == (
                spans[last],
                spec.parameter.shape,
                spec.parameter.stride(),
            )
            if attribute in module._buffers or not is_all:
                raise ConfigurationError(
                    f"{join(name, attribute)} is made of the memory of parameter {spec.fqn}, which "
                    f"is about to be sharded, and would not follow it any more: expected tensors "
                    f"of their own beside parameters. Clone it, or compute it from the parameter "
                    f"where it is needed"
                )
            found.append((module, attribute, spec))
    return found


def _detach_computed(root: nn.Module) -> None:
    """Detach tensors that modules computed from parameters, and copy their memory."""
    for module in root.modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and is_computed(module, attribute):
                vars(module)[attribute] = value.detach().clone()


def _former_memory(specs: Sequence[UnitSpec], device: torch.device) -> dict[str, StorageWeakRef]:
    """Return the storages of parameters before sharding, by fqn, if they are on the device."""
    parameters = {spec.fqn: spec.parameter for unit in specs for spec in unit.parameters}
    return {
        fqn: StorageWeakRef(parameter.untyped_storage())
        for fqn, parameter in parameters.items()
        if parameter.device == device and parameter.numel()
    }


def _warn_of_former_memory(
    former: dict[str, StorageWeakRef], sharded: set[str], deferred: set[str]
) -> None:
    """Warn about references to memory of parameters from before sharding.

    Under another strategy they would follow the parameters.
    """
    if any(not memory.expired() for memory in former.values()):
        gc.collect()
    found = {fqn for fqn, memory in former.items() if not memory.expired()} | deferred
    if kept := sorted(found & sharded):
        warnings.warn(
            f"something still refers to the memory that {first_three(kept)} had before "
            f"being sharded: a view in a list or a closure, a NumPy array, a state dict. It keeps "
            f"its values and its bytes, and does not follow the parameters. Take values from a "
            f"parameter where they are needed, or clone() what is to stay",
            stacklevel=2,
        )


def _warn_of_strides(fqns: set[str], mesh: Mesh) -> None:
    """Warn about parameters that sharding has made contiguous: strides lead to other elements."""
    if fqns and mesh.rank == 0:
        warnings.warn(
            f"{first_three(sorted(fqns))}: a parameter that was not contiguous "
            f"(transposed, channels_last) is once it is sharded. Its shape and values stay; "
            f"as_strided() on it finds other elements, view() of its transpose may ask for "
            f"reshape(), and a convolution converts a weight that was channels_last",
            stacklevel=2,
        )


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the memory of a strided tensor: its storage if on meta, first byte, and end byte."""
    offset = int(tensor.storage_offset()) * tensor.element_size()
    start = offset if tensor.is_meta else tensor.data_ptr()
    return storage_of(tensor) if tensor.is_meta else 0, start, start + extent_nbytes(tensor)


def _passing_through(spec: UnitSpec) -> UnitSpec:
    """Exclude a single rank's parameters from the unit, unless they are cast or on meta.

    Training with them costs the same as without a strategy.
    """
    busy = [it.parameter.is_meta or it.param_dtype is not it.dtype for it in spec.parameters]
    passthrough = tuple(
        it for it, is_busy in zip(spec.parameters, busy, strict=True) if not is_busy
    )
    return replace(spec, parameters=tuple(compress(spec.parameters, busy)), passthrough=passthrough)


def _move_passthrough(spec: UnitSpec, device: torch.device) -> None:
    """Move parameters that are not sharded, and their gradients, to the device."""
    for parameter in (it.parameter for it in spec.passthrough):
        parameter.data = parameter.data.to(device)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(device)


def follow_rank_zero(specs: Sequence[UnitSpec], mesh: Mesh) -> None:
    """Broadcast rank 0's initial parameter values, as ``DistributedDataParallel`` does."""
    if mesh.data.size == mesh.tensor.size == 1:
        return
    for unit in specs:
        for spec in unit.parameters:
            # Experts have followed rank 0 already, while they were whole.
            if spec.parameter.numel() and not spec.parameter.is_meta and not spec.is_of_experts:
                # Other ranks of a split layer do not have this part.
                whole = [mesh.tensor] if spec.distribution is None else []
                take_values(spec.parameter, mesh.device, mesh.data, *whole)


@torch.no_grad()
def take_values(parameter: nn.Parameter, device: torch.device, *groups: Collectives) -> None:
    """Give a parameter the values of the first rank of each group; a collective of these groups."""
    values = parameter.detach().to(device, memory_format=torch.contiguous_format, copy=True)
    for group in groups:
        group.broadcast_(values, 0).wait()
    parameter.copy_(values)


def layout_lines(plans: Sequence[UnitPlan], mesh: Mesh, sharding: ShardingStrategy) -> list[str]:
    """Return lines that must be equal on all ranks: mesh, sharding strategy, every parameter.

    The flat buffers of a plan follow from these.
    """
    lines = [f"mesh {mesh.topology}", f"sharding strategy {sharding}"]
    for plan in plans:
        lines.append(f"unit {plan.spec.label}")
        lines += [_describe(spec) for spec in plan.spec.parameters]
    buffers = plans[0].spec.module.named_buffers()
    return lines + [
        f"buffer {name} on the meta device" for name, buffer in buffers if buffer.is_meta
    ]


def _describe(spec: ParameterSpec) -> str:
    trained = "trainable" if spec.parameter.requires_grad else "frozen"
    split = spec.distribution
    shape = split.shape if split is not None and split.of_experts else spec.parameter.shape
    return (
        f"parameter {spec.fqn}: {spec.dtype}, shape {tuple(shape)}, {trained}, "
        f"registered {len(spec.registrations)} times, gathered in {spec.param_dtype}, reduced in "
        f"{spec.reduce_dtype}"
    )
