"""Units of a model under a policy: each parameter in exactly one; refuses unshardable models."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from shardeddp.errors import ConfigurationError, listing, nearest
from shardeddp.garbage import collector_paused
from shardeddp.tensor.distributed import Distribution
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import storage_of
from shardeddp.wrap.policy import Policy
from shardeddp.wrap.tree import (
    ParameterSpec,
    UnitSpec,
    compiled_shells,
    extent_nbytes,
    has_forward,
    join,
    memory_of,
    module_behind,
    registry_of,
)

# By name: importing them would import sharding engines that this package does without.
_WRAPPERS = {
    "DataParallel": "torch.nn.DataParallel",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "FullyShardedDataParallel": "FSDP1 (FullyShardedDataParallel)",
    "FSDPModule": "FSDP2 (fully_shard)",
}


@collector_paused()
def build_units(
    root: nn.Module,
    policy: Policy,
    split: Mapping[nn.Parameter, Distribution] = MappingProxyType({}),
) -> list[UnitSpec]:
    """Return the units of a model: the root, then the policy's, in ``named_modules`` order.

    Every parameter belongs to the nearest unit around it. One that is registered in several units
    (a tied parameter) belongs to the innermost unit that encloses all of its registrations, so it
    is gathered once and present wherever it is used. So do parameters that share their memory.
    Chosen modules without a forward, and inner units without a parameter, are left out. ``split``
    has the split of parameters that are parts; the others are whole.
    """
    _reject_unshardable(root)
    modules = _unit_modules(root, policy)
    chains = _unit_chains(root, modules)
    parameters: dict[int, list[ParameterSpec]] = {key: [] for key in modules}
    for sharing in _by_memory(_specs_of(root)):
        places = [module_behind(module) for spec in sharing for module, _ in spec.registrations]
        unit = _innermost_common([chain for place in places for chain in chains[id(place)]])
        first, *others = sharing
        if others and any(it.parameter in split for it in sharing):
            raise ConfigurationError(
                f"{first.fqn} and {others[0].fqn} have the same memory and are split over ranks: "
                f"expected one parameter at both places, or memory of their own"
            )
        parameters[unit] += [
            replace(
                it,
                shares_memory_with=None if it is first else first.parameter,
                distribution=split.get(it.parameter),
            )
            for it in sharing
        ]
    return [
        UnitSpec(name=name, module=module, parameters=tuple(parameters[key]))
        for key, (name, module) in modules.items()
        if parameters[key] or module is root
    ]


def require_parameters(root: nn.Module) -> None:
    """Raise for a model without parameters, which has nothing to train."""
    if next(root.parameters(), None) is None:
        raise ConfigurationError(
            f"Expected a model with parameters, found none in {type(root).__name__}. Register them "
            f"in __init__ or configure_model, as nn.Parameter or in submodules; a plain Python "
            f"list of modules registers none."
        )


def _specs_of(root: nn.Module) -> list[ParameterSpec]:
    """Return every parameter object with all of its registrations, in module order."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    registrations: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for name, module in root.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), (join(name, attribute), parameter))
            registrations[id(parameter)].append((registry_of(module), attribute))
    return [
        ParameterSpec(fqn=fqn, parameter=parameter, registrations=tuple(registrations[key]))
        for key, (fqn, parameter) in found.items()
    ]


def _by_memory(found: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Return the parameters grouped by shared memory; most groups have one."""
    groups: dict[object, list[ParameterSpec]] = {}
    extents: dict[int, list[tuple[int, int, ParameterSpec]]] = {}  # by storage
    for spec in found:
        parameter = spec.parameter
        if not parameter.numel() or parameter.layout is not torch.strided:
            groups[id(parameter)] = [spec]
            continue
        storage = storage_of(parameter)
        start = int(parameter.storage_offset()) * parameter.element_size()
        groups.setdefault(memory_of(parameter), []).append(spec)
        extent = start, start + extent_nbytes(parameter), spec
        extents.setdefault(storage, []).append(extent)
    for lying in extents.values():
        lying.sort(key=lambda extent: extent[:2])
        for (_, end, one), (start, _, other) in pairwise(lying):
            same = (
                any(one in group and other in group for group in groups.values())
                if start < end
                else True
            )
            if not same:
                raise ConfigurationError(
                    f"Expected parameters that share all of their memory or none of it, found "
                    f"{one.fqn!r} ({tuple(one.parameter.shape)}) and {other.fqn!r} "
                    f"({tuple(other.parameter.shape)}), which share a part or see it in another "
                    f"shape. Give one of them memory of its own (.data = ....clone()), or register "
                    f"one parameter at both places."
                )
    return list(groups.values())


def _unit_modules(root: nn.Module, policy: Policy) -> dict[int, tuple[str, nn.Module]]:
    """Return first name and module of every unit by the module's identity, root first."""
    by_name = dict(root.named_modules(remove_duplicate=False))
    # Code outside of the compiled module calls the shell.
    shells = compiled_shells(root)
    chosen = {id(root)}
    for name in policy.select(root):
        if name not in by_name:
            raise ConfigurationError(
                f"{type(policy).__name__}: expected names of modules of {type(root).__name__}, "
                f"found {name!r}; {nearest(name, by_name)} Return names as named_modules() gives "
                f"them."
            )
        module = by_name[name]
        if has_forward(module):
            chosen.add(id(shells.get(id(module), module)))
    return {
        id(module): (name, module) for name, module in root.named_modules() if id(module) in chosen
    }


# The units around a module on one path from the root, outermost first, as module identities. A
# module that is registered several times has several.
_Chain = tuple[int, ...]


def _unit_chains(
    root: nn.Module, units: dict[int, tuple[str, nn.Module]]
) -> dict[int, list[_Chain]]:
    """Return every distinct chain of enclosing units, for each module."""
    chains: dict[int, list[_Chain]] = {}
    pending: list[tuple[nn.Module, _Chain]] = [(root, ())]
    while pending:
        module, outer = pending.pop()
        chain = (*outer, id(module)) if id(module) in units else outer
        known = chains.setdefault(id(module), [])
        if chain not in known:
            known.append(chain)
            pending += [(child, chain) for child in module.children()]
    return chains


def _innermost_common(chains: list[_Chain]) -> int:
    """Return the last unit of a chain that is on all of them.

    Example:
        A weight tied between two layers of the decoder belongs to the decoder's unit::

            (root, decoder, layer 0)
            (root, decoder, layer 1)  ->  decoder
    """
    common = set(chains[0]).intersection(*chains)
    return next(unit for unit in reversed(chains[0]) if unit in common)


def _reject_unshardable(root: nn.Module) -> None:
    """Raise for models that no policy can make trainable."""
    for name, module in root.named_modules():
        wrapper = next(
            (
                _WRAPPERS[base.__name__]
                for base in type(module).__mro__
                if base.__name__ in _WRAPPERS
            ),
            None,
        )
        if wrapper is not None:
            raise ConfigurationError(
                f"Expected a model that nothing else distributes, found {name or '(root)'!r} "
                f"wrapped by {wrapper}. Pass the bare module: the strategy shards it itself."
            )
    parameters = dict(root.named_parameters())
    lazy = [
        name
        for name, parameter in parameters.items()
        if isinstance(parameter, UninitializedParameter)
    ]
    if lazy:
        raise ConfigurationError(
            f"Expected parameters with shapes, found {len(lazy)} uninitialized: {listing(lazy)}. "
            f"Run one forward through the lazy modules before training, for instance at the end of "
            f"__init__."
        )
    distributed = [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]
    if distributed:
        raise ConfigurationError(
            f"Expected plain parameters, found {len(distributed)} that are DTensors already: "
            f"{listing(distributed)}. Pass the bare module, without fully_shard, distribute_tensor "
            f"or parallelize_module."
        )
    sharded = [name for name, parameter in parameters.items() if isinstance(parameter, ShardTensor)]
    if sharded:
        raise ConfigurationError(
            f"Expected plain parameters, found {len(sharded)} that are sharded already: "
            f"{listing(sharded)}. An earlier setup of this module failed half way: build the "
            f"module anew."
        )
