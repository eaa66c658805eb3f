"""Scope of an optimizer: the elements that one new value depends on, and a step has to see."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import optim

from shardeddp.config import OptimizerScope, Options
from shardeddp.errors import ConfigurationError

ELEMENTWISE: set[type[optim.Optimizer]] = {
    *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
}

SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})
"""States of these optimizers with one number per parameter of any shape."""

# By name: torch 2.11 is supported, which does not have all of them.
_OTHERS: dict[str, OptimizerScope] = {
    "Adafactor": "parameter",
    "Muon": "parameter",
    "LBFGS": "model",
}

KNOWN: dict[type, OptimizerScope] = {
    **dict.fromkeys(ELEMENTWISE, "element"),
    **{vars(optim)[name]: scope for name, scope in _OTHERS.items() if name in vars(optim)},
}
"""Scopes of torch's own optimizers."""

# Names that a subclass may define without a change to its step.
_HARMLESS = {
    *("__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__slots__"),
    *("__weakref__", "__dict__", "__firstlineno__", "__static_attributes__"),
    *("__parameters__", "__orig_bases__"),
}


def scope_of(
    kind: type, stated: Mapping[str, OptimizerScope] | None = None
) -> OptimizerScope | None:
    """Return the scope of an optimizer's class; None: unknown, to be treated as ``model``.

    Known classes are torch's own, subclasses of them that only change their construction, and those
    that the user states.
    """
    for ancestor in kind.__mro__:
        for name in (f"{ancestor.__module__}.{ancestor.__qualname__}", ancestor.__qualname__):
            if stated and name in stated:
                return stated[name]
        if ancestor in KNOWN:
            return KNOWN[ancestor]
        if not _steps_as_its_parent(ancestor):
            return None
    return None


def _steps_as_its_parent(kind: type) -> bool:
    own = vars(kind).keys() - _HARMLESS
    return len(kind.__bases__) == 1 and (not own or (own == {"step"} and _is_hook_of_torch(kind)))


def _is_hook_of_torch(kind: type) -> bool:
    """Return whether ``step`` is only the wrapper that torch puts into every instantiated class."""
    step = vars(kind)["step"]
    inherited = inspect.getattr_static(kind.__base__, "step", None)
    return (
        inspect.isfunction(step)
        and step.__code__.co_filename == inspect.getfile(optim.Optimizer)
        and vars(step).get("__wrapped__") in (inherited, vars(inherited).get("__wrapped__"))
    )


def refuse_beside_axes(optimizer: optim.Optimizer, options: Options) -> None:
    """Refuse an optimizer whose new values depend, or may depend, on other ranks of an axis."""
    scope = scope_of(type(optimizer), options.optimizer_scope)
    for option, size, allowed, those in (
        (
            "tensor_parallel_size",
            options.tensor_parallel_size,
            ("element", "parameter"),
            "optimizers whose new value of an element depends on its parameter at most (AdamW, SGD, "
            "Muon and the like)",
        ),
        (
            "expert_parallel_size",
            options.expert_parallel_size,
            ("element",),
            "element-wise optimizers (AdamW, SGD and the like)",
        ),
    ):
        if size > 1 and scope not in allowed:
            name = type(optimizer).__name__
            known = (
                f"of which nothing is known: if it is one, say so with "
                f"optimizer_scope={{{name!r}: {allowed[-1]!r}}}"
                if scope is None
                else f"whose scope is {scope!r}"
            )
            raise ConfigurationError(f"{option} works with {those}, found {name}, {known}")


# Packages with optimizers that divide parameters or average gradients over ranks by themselves.
_DISTRIBUTED = (
    *("torch.distributed.", "deepspeed.", "fairscale.", "colossalai."),
    *("megatron.", "apex.contrib.optimizers."),
)


def refuse(optimizer: Any) -> None:
    """Refuse an optimizer that divides its work over ranks itself, or needs sparse gradients."""
    kind = type(optimizer)
    if any(f"{ancestor.__module__}.".startswith(_DISTRIBUTED) for ancestor in kind.__mro__):
        raise ConfigurationError(
            f"{kind.__module__}.{kind.__qualname__} divides parameters among ranks or averages "
            f"over them by itself, which ShardedDP does already: both together would step on wrong "
            f"values. Return the optimizer inside of it (such as torch.optim.AdamW) from "
            f"configure_optimizers: its states will be sharded, with "
            f"sharding_strategy='shard_optimizer' they and nothing else"
        )
    if any(ancestor is optim.SparseAdam for ancestor in kind.__mro__):
        raise ConfigurationError(
            f"{kind.__qualname__} steps on sparse gradients, expected an optimizer for dense ones: "
            f"gradients of sharded parameters are averaged over ranks, and come dense, also those "
            f"of an embedding with sparse=True. Use torch.optim.Adam; it moves rows without a "
            f"gradient as well, as long as they have momentum"
        )
