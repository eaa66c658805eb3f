"""Operations by kind: only query a tensor, write to one, communicate or draw random numbers."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

from shardeddp.torch_private import HigherOrderOperator, TensorBase, pytree

# `Module.to` calls _has_compatible_shallow_copy_type, `autograd.grad` reads grad.
_NAMES = (
    "__get__ __set__ __delete__ __hash__ __len__ __repr__ __format__ __deepcopy__ "
    "__reduce_ex__ size dim ndimension numel nelement element_size stride storage_offset "
    "is_contiguous is_floating_point is_complex is_signed is_inference is_set_to is_shared "
    "_has_compatible_shallow_copy_type grad get_device detach requires_grad_ retain_grad "
    "register_hook register_post_accumulate_grad_hook has_names zeros_like ones_like full_like "
    "empty_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty "
    "new_empty_strided new_tensor"
)

# Results are booleans or indices, which have no gradient.
_TRUTHS = (
    "equal allclose isclose eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isnan "
    "isinf isfinite any all count_nonzero argmax argmin"
)

_ASKED = {*_NAMES.split(), *_TRUTHS.split()}

# Attributes that are operations.
_COMPUTED_ATTRIBUTES = {
    vars(TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH", "real", "imag")
}


# Python functions of torch that autograd does not record: nn.init runs under no_grad, collectives
# have no backward.
_UNRECORDED = ("torch.nn.init", "torch.distributed.distributed_c10d")

COLLECTIVES = ("c10d", "_c10d_functional")

# Operations of torch.distributed without a write. All others write to their first argument; no
# schema says so.
_COLLECTIVES_THAT_WRITE_NOTHING = {"send", "barrier", "monitored_barrier_", "check_for_nan"}

# Receives, which return before the data of the other rank has arrived.
RECEIVES = {"recv_", "recv_any_source_", "irecv", "batch_p2p_ops"}


def asks_only_about(func: Any) -> bool:
    """Return whether a function has nothing to record for a backward, in any grad mode."""
    if func.__name__ in _ASKED:
        return func not in _COMPUTED_ATTRIBUTES
    return getattr(func, "__module__", None) in _UNRECORDED


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among its arguments that an operation is known to write to."""
    places = _written_places(func)
    found = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
    return [*tensors_in(found)]


def tensors_in(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an operation, and in lists of them."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_in(argument)


def writes(func: Any) -> bool:
    """Return whether an operation is known to write to some of its arguments."""
    return bool(_written_places(func))


def communicates(func: Any) -> bool:
    """Return whether an operation is one of torch.distributed."""
    return func.namespace in COLLECTIVES


@cache
def names_its_writes(func: Any) -> bool:
    """Return whether :func:`written` finds all writes of an operation.

    Operations of other libraries may leave out ``mutates_args``, and batch norms do not declare
    their writes to running statistics.
    """
    if func.namespace not in ("aten", "prims", "prim", *COLLECTIVES):
        return False
    tells = "functional" in func.__name__ or "no_training" in func.__name__
    return tells or not any(
        it.name == "running_mean" and it.alias_info is None for it in func._schema.arguments
    )


def is_random(func: Any) -> bool:
    """Return whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def reshapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes the first argument's shape or strides; ``set_`` always does."""
    if func.overloadpacket.__name__ == "set_":
        return True
    before = args[0].shape, args[0].stride()
    args, kwargs = pytree.tree_map_only(torch.Tensor, _without_elements, (args, kwargs))
    func(*args, **kwargs)
    return (args[0].shape, args[0].stride()) != before


def _without_elements(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    if isinstance(func, HigherOrderOperator):
        return []  # no schema of its own; torch refuses functions that write to what they are given
    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    if name == "batch_p2p_ops":
        return [(place, it.name) for place, it in enumerate(arguments) if it.name == "tensors"]
    if name in RECEIVES or (
        func.namespace == "c10d" and name not in _COLLECTIVES_THAT_WRITE_NOTHING
    ):
        return [(0, arguments[0].name)]
    return [
        (place, it.name)
        for place, it in enumerate(arguments)
        if it.alias_info and it.alias_info.is_write
    ]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, as those of an expanded one do."""
    return tensor.layout is torch.strided and not all(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
