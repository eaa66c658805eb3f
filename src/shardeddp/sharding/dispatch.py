"""What each operation does when it meets a ShardTensor without gradients: locally, as a global reduction, or gathered.

Nothing returns a local answer to a global question. In order:

1. questions about the tensor and copies of it are answered from the shard,
2. element-wise operations work on this rank's interval (their other operands are cut to it),
3. reductions over all elements combine the ranks' results,
4. everything else gathers; what it wrote into a gathered operand is cut back into the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from shardeddp.comm import Pending
from shardeddp.comm.collectives import ReduceKind

if TYPE_CHECKING:
    from shardeddp.sharding.shard_tensor import ShardSpec, ShardTensor

aten = torch.ops.aten

# Same elements in the same order: the result is a shard like its operand.
_SAME_ELEMENTS = {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
}

# Reductions over all elements: (local result, how ranks combine it).
_REDUCTIONS: dict[Any, tuple[Callable[[torch.Tensor], torch.Tensor], ReduceKind]] = {
    aten.sum.default: (lambda local: local.sum(), "sum"),
    aten.max.default: (lambda local: _or_extreme(local, local.max, -1), "max"),
    aten.min.default: (lambda local: _or_extreme(local, local.min, 1), "min"),
    aten.any.default: (lambda local: local.any().to(torch.int32), "max"),
    aten.all.default: (lambda local: local.all().to(torch.int32), "min"),
}


def run(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen operation that has at least one ``ShardTensor`` among its arguments."""
    name = func.overloadpacket.__name__
    if name.startswith("_foreach_"):
        return _run_foreach(cls, func, name, args, kwargs)
    if func in _SAME_ELEMENTS or torch.Tag.pointwise in func.tags:
        spec = _common_spec(cls, func, args, kwargs)
        if spec is not None:
            return _run_local(cls, func, spec, args, kwargs)
    if func in _REDUCTIONS:
        return _reduce(func, args[0])
    if func is aten.mean.default:
        return _reduce(aten.sum.default, args[0]) / args[0].spec.numel
    norm_order = _norm_order(func, args, kwargs)
    if norm_order is not None:
        return norms([args[0]], norm_order)[0]
    return _run_gathered(cls, func, args, kwargs)


def gather(sharded: ShardTensor) -> torch.Tensor:
    """The full tensor; a collective of the shard group."""
    spec, local = sharded.spec, sharded.to_local()
    with torch.no_grad():
        full = local.new_empty(spec.numel)
        pieces = [full[interval.start : interval.stop] for interval in spec.intervals]
        pieces[spec.mesh.shard_rank].copy_(local)
        spec.mesh.gather_lane.issue(lambda: spec.mesh.gather.all_gather_uneven_(pieces)).wait()
    return full.view(spec.shape)


def norms(tensors: Sequence[ShardTensor], order: float) -> list[torch.Tensor]:
    """The global vector norm of every tensor (0-dim, in each tensor's dtype), with one reduction for all of them."""
    locals_ = [tensor.to_local() for tensor in tensors]
    if order == float("inf"):
        partial = torch.stack([_or_zero(local, lambda t: t.abs().max()) for local in locals_])
        kind: ReduceKind = "max"
    else:
        partial = torch.stack([torch.linalg.vector_norm(local, order) for local in locals_]).pow(order)
        kind = "sum"
    reduced = reduce_partials(partial, tensors[0].spec, kind)
    if kind == "sum":
        reduced = reduced.pow(1.0 / order)
    return list(reduced.unbind())


def reduce_partials(partial: torch.Tensor, spec: ShardSpec, kind: ReduceKind) -> torch.Tensor:
    """Combine this rank's partial results with those of its shard group, in place."""

    def action() -> Pending:
        return spec.mesh.reduce.all_reduce_(partial, kind)

    spec.mesh.reduce_lane.issue(action).wait()
    return partial


def _common_spec(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardSpec | None:
    """The spec that an element-wise operation can work in; None when its result is not a shard like its operands."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if _mutates(func):
        # The target decides; whatever else takes part is cut to its interval.
        target = kwargs.get("out", args[0])
        return target.spec if isinstance(target, cls) else None
    specs = {tensor.spec for tensor in tensors if isinstance(tensor, cls)}
    if len(specs) != 1:
        return None
    spec = specs.pop()
    return spec if torch.broadcast_shapes(*(tensor.shape for tensor in tensors)) == spec.shape else None


def _run_local(
    cls: type[ShardTensor], func: Any, spec: ShardSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    local_args, local_kwargs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: _operand(cls, tensor, spec), (args, dict(kwargs))
    )
    local_kwargs.pop("memory_format", None)  # a shard is 1D: it has one memory format
    result = func(*local_args, **local_kwargs)
    if _mutates(func):
        return kwargs.get("out", args[0])
    return pytree.tree_map_only(torch.Tensor, lambda local: cls(local, spec), result)


def _operand(cls: type[ShardTensor], tensor: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """This rank's part of an operand of an element-wise operation."""
    if isinstance(tensor, cls):
        return tensor.to_local() if tensor.spec is spec else spec.localize(gather(tensor))
    return tensor if tensor.dim() == 0 else spec.localize(tensor.expand(spec.shape))


def _run_foreach(cls: type[ShardTensor], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "_foreach_norm":
        return _foreach_norm(cls, args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2)))
    if name == "_foreach_max":
        return [tensor.max() for tensor in args[0]]
    specs = [tensor.spec if isinstance(tensor, cls) else None for tensor in args[0]]

    def localize(argument: Any) -> Any:
        if not isinstance(argument, (list, tuple)):
            return argument
        return [
            item if spec is None or not isinstance(item, torch.Tensor) else _operand(cls, item, spec)
            for item, spec in zip(argument, specs, strict=True)
        ]

    local_args = [localize(argument) for argument in args]
    results = func(*local_args, **{key: localize(value) for key, value in kwargs.items()})
    if results is None or _mutates(func):
        return None
    return [
        result if spec is None else cls(result, spec) for result, spec in zip(results, specs, strict=True)
    ]


def _foreach_norm(cls: type[ShardTensor], tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    sharded = iter(norms([tensor for tensor in tensors if isinstance(tensor, cls)], order))
    return [
        next(sharded) if isinstance(tensor, cls) else torch.linalg.vector_norm(tensor, order) for tensor in tensors
    ]


def _reduce(func: Any, sharded: ShardTensor) -> torch.Tensor:
    local_result, kind = _REDUCTIONS[func]
    reduced = reduce_partials(local_result(sharded.to_local()), sharded.spec, kind)
    return reduced.to(torch.bool) if func in (aten.any.default, aten.all.default) else reduced


def _norm_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The order of a vector norm over all elements; None for anything else."""
    if func is aten.linalg_vector_norm.default:
        order, rest = (args[1] if len(args) > 1 else kwargs.get("ord", 2)), args[2:]
        plain = all(item in (None, False) for item in rest) and not any(
            kwargs.get(key) for key in ("dim", "keepdim", "dtype")
        )
    elif func is aten.norm.Scalar:
        order, plain = (args[1] if len(args) > 1 else kwargs.get("p", 2)), True
    else:
        return None
    return float(order) if plain and float(order) > 0 else None


def _run_gathered(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fulls: dict[int, tuple[ShardTensor, torch.Tensor]] = {}

    def to_full(sharded: ShardTensor) -> torch.Tensor:
        if id(sharded) not in fulls:
            fulls[id(sharded)] = (sharded, gather(sharded))
        return fulls[id(sharded)][1]

    full_args, full_kwargs = pytree.tree_map_only(cls, to_full, (args, kwargs))
    result = func(*full_args, **full_kwargs)
    if not _mutates(func):
        return result
    for sharded, full in fulls.values():
        sharded.to_local().copy_(sharded.spec.localize(full))
    originals = {id(full): sharded for sharded, full in fulls.values()}
    return pytree.tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), result)


def _mutates(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _or_zero(local: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return reduce(local) if local.numel() else local.new_zeros(())


def _or_extreme(local: torch.Tensor, reduce: Callable[[], torch.Tensor], sign: int) -> torch.Tensor:
    """The reduction, or its neutral element where this rank holds no element."""
    if local.numel():
        return reduce()
    limits = torch.finfo(local.dtype) if local.dtype.is_floating_point else torch.iinfo(local.dtype)
    return local.new_full((), limits.max if sign > 0 else limits.min)
