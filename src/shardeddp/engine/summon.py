"""Summoning: modules temporarily hold whole plain parameters, to inspect, save or write to."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import nn

from shardeddp.comm import agree_on_any
from shardeddp.comm.consistency import checksum
from shardeddp.engine.runtime import Runtime, units_of_all
from shardeddp.engine.unit import Unit, register
from shardeddp.tensor.shard_tensor import ShardTensor, end_writes, gather
from shardeddp.tensor.unsharded import FQN, SHARED_WITH, WholeParameter
from shardeddp.wrap.tree import module_behind, registry_of


@dataclass(kw_only=True)
class _Summoned:
    """Parameter while it is whole."""

    sharded: ShardTensor
    unit: Unit | None
    """Unit of the parameter; None in a copy of the model, which has no units."""

    registrations: list[tuple[nn.Module, str]] = field(default_factory=list[tuple[nn.Module, str]])
    whole: WholeParameter | None = None
    """Whole parameter; None on ranks that keep their shards."""

    checksum: torch.Tensor | None = None
    """Checksum of the new whole parameter.

    It also reveals writes that autograd does not count (NumPy's).
    """


@contextmanager
def summon(
    runtime: Runtime, module: nn.Module, *, writeback: bool, rank0_only: bool, offload_to_cpu: bool
) -> Generator[None]:
    """Let a module and its submodules hold whole parameters; entered and left by all ranks.

    The module is the runtime's model, a submodule of it, or a copy of either. See
    ``strategy.summon_full_params`` for the other arguments.
    """
    passthrough = [] if writeback and not offload_to_cpu else list(_passthrough_in(module))
    summoned = list(_find(module).values())
    try:
        for parameter, values in passthrough:
            parameter.data = values.to("cpu" if offload_to_cpu else values.device, copy=True)
        memory = {
            id(spec.parameter): spec.memory
            for unit in units_of_all()
            for spec in unit.spec.parameters
        }
        gathered: dict[int, torch.Tensor] = {}  # by memory, which parameters go on sharing
        for each in summoned:
            key = memory.get(id(each.sharded), id(each.sharded))
            if key not in gathered:
                gathered[key] = _gather(each.sharded, offload_to_cpu)
            if runtime.mesh.rank == 0 or not rank0_only:
                each.whole = _make_whole(each.sharded, gathered[key])
                each.checksum = (
                    checksum(gathered[key]) if writeback and runtime.mesh.rank == 0 else None
                )
        _register(summoned, whole=True)
        yield
        if writeback:
            for parameter, values in passthrough:
                values.copy_(parameter.data)
    finally:
        _register(summoned, whole=False)
        for parameter, values in passthrough:
            parameter.data = values
    if writeback:
        _write_back(runtime, summoned)


def _find(module: nn.Module) -> dict[int, _Summoned]:
    """Find the sharded parameters of a module, by ``id``, even if their unit is unsharded."""
    found: dict[int, _Summoned] = {}
    inside = dict.fromkeys(module.modules())  # in the same order on all ranks
    for unit in units_of_all():
        for registry, sharded in unit.tensors_when_sharded():
            if module_behind(registry) in inside and isinstance(sharded, ShardTensor):
                found.setdefault(id(sharded), _Summoned(sharded=sharded, unit=unit))
    for each in inside:
        for name, parameter in each._parameters.items():
            if isinstance(parameter, ShardTensor):
                entry = found.setdefault(id(parameter), _Summoned(sharded=parameter, unit=None))
                entry.registrations.append((registry_of(each), name))
    return found


def _passthrough_in(module: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield passthrough parameters, which are whole anyway, and their values."""
    inside = {id(parameter) for parameter in module.parameters()}
    for parameter in (spec.parameter for unit in units_of_all() for spec in unit.spec.passthrough):
        if id(parameter) in inside:
            yield parameter, parameter.data


def _gather(sharded: ShardTensor, offload_to_cpu: bool) -> torch.Tensor:
    values = gather(sharded, "summon_full_params of")
    values = values.cpu() if offload_to_cpu else values
    # A tensor of inference mode could not be written to outside of it.
    with torch.inference_mode(False):
        return values.clone() if values.is_inference() else values


def _make_whole(sharded: ShardTensor, values: torch.Tensor) -> WholeParameter:
    with torch.inference_mode(False):
        whole = WholeParameter(values, sharded.requires_grad)
    fqn = sharded.spec.fqn
    vars(whole).update({FQN: fqn, SHARED_WITH: sharded.shared_with})

    def refuse(parameter: torch.Tensor) -> None:
        parameter.grad = None
        raise RuntimeError(
            f"a backward reached {fqn} inside of summon_full_params, where a parameter is a whole "
            f"copy: its gradient would not reach the optimizer. Compute what is differentiated by "
            f"backward() outside of the context"
        )

    if whole.requires_grad:
        whole.register_post_accumulate_grad_hook(refuse)
    return whole


def _register(summoned: list[_Summoned], whole: bool) -> None:
    """Register whole parameters with their modules, or sharded ones again."""
    for each in summoned:
        if each.whole is None:
            continue
        before, now = (each.sharded, each.whole) if whole else (each.whole, each.sharded)
        if each.unit is not None:
            each.unit.register_sharded(each.sharded, now)
            continue
        for module, name in each.registrations:
            if module._parameters.get(name) is before:
                register(module, name, now)


@torch.no_grad()
def _write_back(runtime: Runtime, summoned: list[_Summoned]) -> None:
    mesh = runtime.mesh
    changed = [
        each.whole is not None
        and each.checksum is not None
        and bool(checksum(each.whole) != each.checksum)
        for each in summoned
    ]
    for each in compress(summoned, agree_on_any(changed, mesh.control)):
        spec, local = each.sharded.spec, each.sharded.to_local()
        if each.whole is None:
            values = torch.empty(spec.shape, dtype=local.dtype, device=mesh.device)
        else:
            values = each.whole.detach().to(mesh.device).contiguous()
        mesh.broadcast_whole_(values)
        local.copy_(spec.localize(values))
        end_writes(each.sharded)
