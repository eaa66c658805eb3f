"""Experts of a model: which modules hold them, and which of them each rank keeps."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.plan.layout import whole_of
from shardeddp.tensor.distributed import (
    Distribution,
    boxes_along,
    local_part,
    replace_parameters,
)
from shardeddp.tensor.expert_dispatch import DividedExperts, ForeignExpert, Routing
from shardeddp.tensor.module_hooks import MARK, refuse_split
from shardeddp.tensor.parallel_styles import TensorAxis, linear_sizes
from shardeddp.wrap.policy import NamePolicy, Policy, PolicyLike, resolve_policy
from shardeddp.wrap.tree import join


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of one layer."""

    name: str
    module: nn.Module
    """Module with all experts: stacked along dim 0 of its parameters, or as its children."""

    count: int
    stacked: bool

    @property
    def is_routed(self) -> bool:
        """True if its forward is that of transformers, which sends tokens to no other rank."""
        return self.stacked and _has_forward_of_transformers(self.module)


class ChosenUnits(Policy):
    """Policy with the units that another policy chose before the experts were divided.

    Modules inside of a list of experts are no units, since ranks run different ones, and none
    inside of stacked ones, whose forward takes all of them.
    """

    def __init__(self, policy: Policy, root: nn.Module, experts: Sequence[Experts]) -> None:
        lists = tuple(f"{it.name}." for it in experts if not it.stacked)
        inside = tuple(f"{it.name}." for it in experts)
        self.names = [
            name
            for name in policy.select(root)
            if not (f"{name}.".startswith(lists) or name.startswith(inside))
        ]

    def select(self, root: nn.Module) -> list[str]:  # noqa: D102
        return self.names


def resolve_experts(value: PolicyLike, size: int) -> Policy | None:
    """Return the policy for ``experts``; None: ``auto``. Strings with a star are name patterns."""
    if value is not None and size == 1:
        raise ConfigurationError(
            "experts needs expert_parallel_size=2 or more: one rank has all of them"
        )
    if value is None or (isinstance(value, str) and value.lower() == "auto"):
        return None
    given = [value] if isinstance(value, str) else value
    several = [*given] if isinstance(given, (list, tuple, set, frozenset)) else []
    names = [it for it in several if isinstance(it, str) and "*" in it]
    try:
        if names and len(names) == len(several):
            return NamePolicy(names)
        return resolve_policy(value)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"experts: expected classes of modules with experts, or patterns of their names "
            f"('layers.*.experts'). {error}"
        ) from error


def find_experts(root: nn.Module, policy: Policy | None, size: int) -> list[Experts]:
    """Return the experts of each layer of a model; the model is not changed.

    The policy chooses modules of stacked experts, or experts in a list. Without one: modules of
    stacked experts with the forward of transformers.
    """
    modules = dict(root.named_modules())
    refuse_split(root)
    if policy is None:
        names: Collection[str] = [
            name
            for name, it in modules.items()
            if _has_forward_of_transformers(it) and _stacked(it, listed=True)
        ]
    else:
        names = policy.select(root)
    found: dict[str, Experts] = {}
    for name in names:
        parent = name.rpartition(".")[0]
        around = modules[parent]
        is_listed = isinstance(around, nn.ModuleList)
        if count := _stacked(modules[name], is_listed):
            found[name] = Experts(name=name, module=modules[name], count=count, stacked=True)
            continue
        if not is_listed:
            raise ConfigurationError(
                f"experts: expected modules of stacked experts, whose parameters all have as many "
                f"rows (dim 0) and one has 3 dims, or members of an nn.ModuleList, found {name!r}. If "
                f"it is none of the experts that ranks divide (a shared one), name those by a pattern, "
                f"experts='model.layers.*.experts.*'"
            )
        found[parent] = Experts(name=parent, module=around, count=len(around), stacked=False)
    if not found:
        raise ConfigurationError(
            "expert_parallel_size is for modules with experts, and none was found that has them as "
            "transformers does (forward(hidden_states, top_k_index, top_k_weights)): name their "
            "class or their names, experts='model.layers.*.experts'"
        )
    for each in found.values():
        _check(root, each, size)
    return list(found.values())


def keep_own(
    root: nn.Module, experts: Sequence[Experts], axis: TensorAxis
) -> dict[nn.Parameter, Distribution]:
    """Replace experts' parameters by those of this rank's experts; other experts become empty.

    Returns the split of each former parameter, by new parameter.
    """
    made: dict[int, tuple[nn.Parameter, Distribution]] = {}
    most = max(each.count for each in experts) // axis.size
    for each in experts:
        own = each.count // axis.size
        divided = DividedExperts(
            module=each.module,
            name=each.name,
            count=each.count,
            most=most,
            axis=axis,
            is_sent=each.is_routed or not each.stacked,
            breaks_graphs=each.stacked,
            attributes={"num_experts": own} if each.is_routed else {},
        )
        vars(each.module)[MARK] = divided
        for number, expert in enumerate(() if each.stacked else each.module.children()):
            if number // own != axis.rank:
                foreign = ForeignExpert(module=expert, name=join(each.name, str(number)))
                expert.register_forward_pre_hook(foreign.refuse_call)
        for name, parameter in each.module.named_parameters():
            shape, layer = parameter.shape, each.module
            if each.stacked:
                boxes = boxes_along(0, shape, axis.size)
                part = torch.Size((own, *shape[1:]))
            else:
                holder = _number_in(each, name) // own
                boxes = tuple((whole_of(shape),) * (it == holder) for it in range(axis.size))
                part = shape if axis.rank == holder else torch.Size((0,))
                layer = layer.get_submodule(name.partition(".")[0])
            distribution = Distribution(
                shape=shape,
                boxes=boxes,
                part=part,
                of_experts=True,
                layer=layer,
            )
            made[id(parameter)] = local_part(parameter, distribution, axis.rank), distribution
        if each.is_routed:
            Routing(each.module, axis).install()
    return replace_parameters(root, made)


def _has_forward_of_transformers(module: nn.Module) -> bool:
    return (
        type(getattr(module, "num_experts", None)) is int
        and tuple(signature(module.forward).parameters) == Routing.ARGUMENTS
    )


def _stacked(module: nn.Module, listed: bool) -> int:
    """Return the number of experts that a module stacks; 0: it stacks none.

    Convolutions have such shapes, too: so a ``listed`` module must have ``num_experts``.
    """
    shapes = [it.shape for it in module.parameters()]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or max(map(len, shapes)) < 3:
        return 0
    (count,) = counts
    return count if not listed or getattr(module, "num_experts", None) == count else 0


def _number_in(experts: Experts, parameter: str) -> int:
    return list(experts.module._modules).index(parameter.partition(".")[0])


def _check(root: nn.Module, experts: Experts, size: int) -> None:
    """Refuse experts that the ranks cannot divide."""
    name, module = experts.name, experts.module
    if experts.count % size:
        raise ConfigurationError(
            f"{name!r} has {experts.count} experts, which expert_parallel_size={size} does not "
            f"divide"
        )
    if (buffer := next((it for it, _ in module.named_buffers()), None)) is not None:
        raise ConfigurationError(
            f"experts with buffers are not supported, found {join(name, buffer)!r}: all ranks get "
            f"those of rank 0, which has other experts"
        )
    if experts.stacked:
        _refuse_router(experts)
    else:
        forms = {str(_form(child)) for child in module.children()}
        if len(forms) > 1:
            raise ConfigurationError(
                f"experts of {name!r} have different parameters: expected experts that are alike "
                f"in names, shapes, dtypes and requires_grad, or other names in experts="
            )
    own = {id(it): it_name for it_name, it in module.named_parameters()}
    places: dict[int, int] = {}
    for _, other in root.named_modules(remove_duplicate=False):
        for it in other._parameters.values():
            if it is not None and id(it) in own:
                places[id(it)] = places.get(id(it), 0) + 1
    tied = next((own[key] for key, count in places.items() if count > 1), None)
    if tied is not None:
        raise ConfigurationError(
            f"{join(name, tied)!r} is registered at several places: expected parameters of one "
            f"expert alone"
        )


def _refuse_router(experts: Experts) -> None:
    """Refuse a router in the module of its experts: it would be divided with them."""
    for name, child in experts.module.named_modules():
        for attribute, parameter in child._parameters.items():
            is_router = linear_sizes(child) is not None or _ROUTERS.fullmatch(attribute)
            if parameter is not None and parameter.ndim == 2 and is_router:
                raise ConfigurationError(
                    f"experts: {experts.name!r} has {join(name, attribute)!r} of shape "
                    f"{tuple(parameter.shape)} beside its experts, which looks like their router: it "
                    f"would be divided as well. Put the experts into a module of their own, and name "
                    f"that one"
                )


_ROUTERS = re.compile(r"(\w+_)?(router|gate|gating|wg)(_weight)?")


def _form(expert: nn.Module) -> list[Any]:
    return [
        (name, tuple(it.shape), it.dtype, it.requires_grad)
        for name, it in expert.named_parameters()
    ]
