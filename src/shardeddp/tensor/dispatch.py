"""Dispatch of ATen operations on sharded tensors: locally, as a global reduction, or gathered.

No operation returns a local result for a global one, and no write is lost. In order:

1. metadata operations and copies are answered from the shard,
2. element-wise operations on sharded tensors alone, or into one, work on this rank's interval,
3. reductions over all elements combine the ranks' results,
4. everything else gathers; a write into a gathered operand, then or later through a view of it, is
   brought back to the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardeddp.comm import CollectiveHandle
from shardeddp.comm.collectives import ReduceKind
from shardeddp.tensor.backward import running_backward
from shardeddp.tensor.collectives import refuse_unmet
from shardeddp.tensor.operations import reshapes, written
from shardeddp.tensor.shard_tensor import (
    ShardSpec,
    ShardTensor,
    end_writes,
    gather,
    mark_written,
)
from shardeddp.tensor.views import (
    Gathered,
    refuse_overlapping,
    run_on_whole,
    views_among,
    wrap_results,
)
from shardeddp.torch_private import pytree

aten = torch.ops.aten

# The same shard under another object.
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}

# Same elements in the same order: the result is a shard like its operand.
_SAME_ELEMENTS = {
    *(aten.clone.default, aten._to_copy.default, aten.copy_.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.empty_like.default, aten.zero_.default, aten.fill_.Scalar),
}

# Use dtype and device of their operand alone.
_CREATIONS = {
    *(aten.new_empty.default, aten.new_empty_strided.default, aten.new_full.default),
    *(aten.new_ones.default, aten.new_zeros.default),
}

# Reductions over all elements: (this rank's partial result, how ranks combine it).
_REDUCTIONS: dict[Any, tuple[Callable[[torch.Tensor, torch.dtype], torch.Tensor], ReduceKind]] = {
    aten.sum.default: (lambda local, dtype: local.sum(dtype=_wide(dtype)), "sum"),
    aten.mean.default: (lambda local, dtype: local.sum(dtype=_wide(dtype)), "sum"),
    aten.max.default: (lambda local, dtype: _or_limit(local, 0).max(), "max"),
    aten.min.default: (lambda local, dtype: _or_limit(local, 1).min(), "min"),
    aten.any.default: (lambda local, dtype: local.any().to(torch.int32), "max"),
    aten.all.default: (lambda local, dtype: local.all().to(torch.int32), "min"),
}


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen operation that has at least one ``ShardTensor`` among its arguments."""
    name = func.overloadpacket.__name__
    if func in _ALIASES:
        return args[0].alias()
    if func in _CREATIONS:
        if func is aten.new_empty_strided.default and tuple(args[1]) == tuple(args[0].shape):
            # Autograd copies a gradient into it if something else refers to that, such as a thread
            # that samples frames: a plain one would be filled by a gather, on this rank alone.
            local = args[0].to_local()
            made = local.new_empty(local.shape, dtype=kwargs.get("dtype"))
            return ShardTensor(made, args[0].spec)
        return func(args[0].to_local(), *args[1:], **kwargs)
    if func is aten.fill_.Tensor and isinstance(args[0], ShardTensor):
        return args[0].copy_(args[1])
    if torch.Tag.inplace_view in func.tags:
        return _reshape_in_place(func, args, kwargs)
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _unscale(func, *args)
    if name.startswith("_foreach_"):
        return _run_foreach(func, name, args, kwargs)
    if func in _SAME_ELEMENTS or _is_pointwise(func):
        spec = _common_spec(func, args, kwargs)
        if spec is not None:
            return _run_local(func, spec, args, kwargs)
    if func is aten.equal.default:
        return _equal(*args)
    if func in _REDUCTIONS and args[0].spec.numel:
        return _reduce(func, args[0], kwargs)
    norm_order = _norm_order(func, args, kwargs)
    if norm_order is not None:
        args[0].spec.mesh.fingerprints.call(f"{name} of {args[0].spec.fqn}")
        return norms([args[0]], norm_order)[0]
    return _run_gathered(func, args, kwargs)


def norms(tensors: Sequence[ShardTensor], order: float) -> list[torch.Tensor]:
    """Return the global vector norm of every tensor, with one reduction per mesh.

    Norms are 0D, in each tensor's (real) dtype.
    """
    if order <= 0:
        return [torch.linalg.vector_norm(gather(tensor), order) for tensor in tensors]
    found: dict[int, torch.Tensor] = {}
    for mesh in dict.fromkeys(tensor.spec.mesh for tensor in tensors):
        positions = [i for i, tensor in enumerate(tensors) if tensor.spec.mesh is mesh]
        norms_of_mesh = _norms_in_one_mesh([tensors[i] for i in positions], order)
        found.update(zip(positions, norms_of_mesh, strict=True))
    return [found[i] for i in range(len(tensors))]


def _norms_in_one_mesh(tensors: Sequence[ShardTensor], order: float) -> list[torch.Tensor]:
    locals_ = [
        tensor.to_local() if tensor.spec.counts else tensor.to_local()[:0] for tensor in tensors
    ]
    # In float64: squares of float32 values do not fit into float32.
    partial = torch.stack(_partial_norms(locals_, order)).to(
        tensors[0].spec.mesh.device, torch.float64
    )
    if order == float("inf"):
        reduced = reduce_partials(partial, tensors[0].spec, "max")
    else:
        reduced = reduce_partials(partial.pow(order), tensors[0].spec, "sum").pow(1.0 / order)
    return [
        norm.to(local.dtype.to_real())
        for norm, local in zip(reduced.unbind(), locals_, strict=True)
    ]


def _unscale(
    func: Any, gradients: Sequence[ShardTensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Divide gradients by the loss scale.

    ``found_inf`` becomes 1 on all ranks if any rank finds a gradient that is not finite.
    """
    world = gradients[0].spec.mesh.world
    locals_ = [gradient.to_local() for gradient in gradients]
    found = found_inf.to(locals_[0].device, copy=True)
    func(locals_, found, inv_scale.to(found.device))
    agreed = found.to(found_inf.device)
    world.all_reduce_(agreed, "max").wait()
    found_inf.copy_(agreed)
    for local in locals_:
        mark_written(local)


def reduce_partials(partial: torch.Tensor, spec: ShardSpec, kind: ReduceKind) -> torch.Tensor:
    """Reduce this rank's partial results with those of the other ranks; bitwise equal on all."""
    partial = partial.to(spec.mesh.device)
    # Compute allocates what the stream reads and fills, and waits for that before it reads: memory
    # that it frees afterwards is written again behind both.
    group, stream = spec.mesh.holders, spec.mesh.reduce_stream
    if kind == "sum":
        stream.issue(lambda: group.all_reduce_(partial, "sum")).wait()
        return partial
    # Not the backends' maximum, which may lose a NaN.
    every = torch.stack([partial] * group.size)  # (ranks, *partial.shape)

    def action() -> CollectiveHandle:
        return group.all_gather_(every.view(-1))

    stream.issue(action).wait()
    return every.amax(0) if kind == "max" else every.amin(0)


def _is_pointwise(func: Any) -> bool:
    # A random number depends on how many were drawn before it; torch.equal is tagged point-wise as
    # well.
    no = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
    return torch.Tag.pointwise in func.tags and no.isdisjoint(func.tags)


def _common_spec(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardSpec | None:
    """Return the spec in which an element-wise operation can work on shards.

    None if its result is not sharded like its operands.
    """
    targets = written(func, args, kwargs)
    outputs = {
        id(target) for target in targets if any(target is value for value in kwargs.values())
    }
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return _spec_of([leaf for leaf in leaves if id(leaf) not in outputs], targets)


def _spec_of(inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> ShardSpec | None:
    # The target of a write decides; the other operands are cut to its interval. Without one, a
    # plain tensor may be this rank's own (an activation, a gradient), and then the result is this
    # rank's own too: whole.
    if not targets and any(
        tensor.dim() and not isinstance(tensor, ShardTensor) for tensor in inputs
    ):
        return None
    deciding = targets or [tensor for tensor in inputs if isinstance(tensor, ShardTensor)]
    specs = {tensor.spec if isinstance(tensor, ShardTensor) else None for tensor in deciding}
    spec = specs.pop() if len(specs) == 1 else None
    if spec is None or torch.broadcast_shapes(*(tensor.shape for tensor in inputs)) != spec.shape:
        return None
    return spec


def _run_local(func: Any, spec: ShardSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    targets = written(func, args, kwargs)
    for target in targets:
        _note_write(func, target, pytree.tree_leaves((args, kwargs)))
    device = _device_of((targets, args, kwargs))
    local_args, local_kwargs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: _operand(tensor, spec, device), (args, dict(kwargs))
    )
    local_kwargs.pop("memory_format", None)  # a shard is 1D: it has one memory format
    result = func(*local_args, **local_kwargs)
    end_writes(*targets)
    if targets:
        return targets[0] if len(targets) == 1 else tuple(targets)
    return pytree.tree_map_only(torch.Tensor, lambda local: ShardTensor(local, spec), result)


def _note_write(func: Any, target: Any, operands: Sequence[Any]) -> None:
    target.note_write(func.__name__)
    for operand in operands:
        if isinstance(operand, torch.Tensor) and not isinstance(operand, ShardTensor):
            is_of_backward = operand.dim() and running_backward() is not None
            if is_of_backward and not target.is_of_a_unit and target.spec.mesh.data.size > 1:
                raise RuntimeError(
                    f"{func.__name__} in a backward writes this rank's own values to a sharded "
                    f"tensor of {target.spec.fqn}, its gradient so far for example, which has one "
                    f"value for all ranks. Assign a gradient, and it is averaged with those of "
                    f"other ranks: p.grad = p.grad + gradient"
                )
            target.note_write("of", operand)
        elif isinstance(operand, (bool, int, float, complex)):
            target.note_write(repr(operand))


def _device_of(arguments: Any) -> torch.device:
    """Return the device of the first sharded argument's elements: the host if offloaded."""
    return (
        next(leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, ShardTensor))
        .to_local()
        .device
    )


def _operand(tensor: torch.Tensor, spec: ShardSpec, device: torch.device) -> torch.Tensor:
    """Return this rank's part of an operand of an element-wise operation, on ``device``."""
    if isinstance(tensor, ShardTensor):
        if tensor.spec is spec:
            return tensor.to_local().to(device)
        tensor = gather(tensor)
    # A 0D operand gives way to others in the choice of dtype, unless all of them are 0D.
    part = tensor if tensor.dim() == 0 and spec.shape else spec.localize(tensor.expand(spec.shape))
    return part.to(device)


def _run_foreach(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args else ()
    if func is aten._foreach_norm.Scalar and not (kwargs.get("dtype") or len(args) > 2):
        return _foreach_norm(tensors, float(args[1] if len(args) > 1 else kwargs.get("ord", 2)))
    if name == "_foreach_max":
        return [tensor.max() for tensor in tensors]
    if name in ("_foreach_norm", "_foreach_powsum", "_foreach_mm"):
        return _run_gathered(func, args, kwargs)
    lists = [argument for argument in (*args, *kwargs.values()) if _holds_tensors(argument)]
    targets = written(func, args, kwargs)
    refuse_overlapping(
        func, views_among(targets), {it for it in targets if isinstance(it, ShardTensor)}
    )
    specs = [
        _spec_of(operands, targets[i : i + 1])
        for i, operands in enumerate(zip(*lists, strict=True))
    ]
    rows = zip(specs, zip(*lists, strict=True), strict=True)
    devices = [_device_of(operands) if spec else None for spec, operands in rows]

    def localize(argument: Any) -> Any:
        if not _holds_tensors(argument):
            return gather(argument) if isinstance(argument, ShardTensor) else argument
        return [
            _operand(item, spec, device)
            if spec and device
            else gather(item)
            if isinstance(item, ShardTensor)
            else item
            for item, spec, device in zip(argument, specs, devices, strict=True)
        ]

    for target, operands in zip(targets, zip(*lists, strict=True), strict=False):
        if isinstance(target, ShardTensor):
            _note_write(func, target, operands)
    results = func(*map(localize, args), **{key: localize(value) for key, value in kwargs.items()})
    # Below autograd nothing counts versions, also not those of plain targets in the same list.
    end_writes(*targets)
    if targets:
        return None
    return [
        ShardTensor(result, spec) if spec else result
        for result, spec in zip(results, specs, strict=True)
    ]


def _holds_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and any(
        isinstance(item, torch.Tensor) for item in argument
    )


def _foreach_norm(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    held = [tensor for tensor in tensors if isinstance(tensor, ShardTensor)]
    for mesh in dict.fromkeys(tensor.spec.mesh for tensor in held):
        mesh.fingerprints.call(f"norms of {held[0].spec.fqn} and {len(held) - 1} more")
    sharded = iter(norms(held, order))
    return [
        next(sharded)
        if isinstance(tensor, ShardTensor)
        else torch.linalg.vector_norm(tensor, order)
        for tensor in tensors
    ]


def _reduce(func: Any, sharded: ShardTensor, kwargs: dict[str, Any]) -> torch.Tensor:
    local, spec = sharded.to_local(), sharded.spec
    spec.mesh.fingerprints.call(f"{func.overloadpacket.__name__} of {spec.fqn}")
    dtype = func(local.new_zeros(1), **kwargs).dtype  # raises the errors of the whole tensor
    partial, kind = _REDUCTIONS[func]
    part = partial(local if spec.counts else local[:0], dtype)
    reduced = reduce_partials(part, spec, kind)
    if func is aten.mean.default:
        reduced = reduced / spec.numel
    return reduced.to(dtype)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    if not (
        isinstance(first, ShardTensor)
        and isinstance(second, ShardTensor)
        and first.spec.lies_like(second.spec)
    ):
        return torch.equal(
            *(
                gather(tensor) if isinstance(tensor, ShardTensor) else tensor
                for tensor in (first, second)
            )
        )
    first.spec.mesh.fingerprints.call(f"equal of {first.spec.fqn}")
    own = first.to_local()
    differs = torch.tensor(not torch.equal(own, second.to_local().to(own)), device=own.device)
    return not reduce_partials(differs, first.spec, "max")


def _norm_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return the order of a vector norm over all elements; None for any other operation."""
    if func is aten.linalg_vector_norm.default:
        order, rest = (args[1] if len(args) > 1 else kwargs.get("ord", 2)), args[2:]
        plain = all(item in (None, False) for item in rest) and not any(
            kwargs.get(key) for key in ("dim", "keepdim", "dtype")
        )
    elif func is aten.norm.Scalar:
        order, plain = (args[1] if len(args) > 1 else kwargs.get("p", 2)), True
    else:
        return None
    return float(order) if plain else None


def _run_gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse_unmet(func, args, kwargs)
    found: dict[int, Gathered] = {}
    operation = f"{func.overloadpacket.__name__} of"

    def to_full(sharded: ShardTensor) -> torch.Tensor:
        return found.setdefault(
            id(sharded), found.get(id(sharded)) or Gathered(sharded, operation=operation)
        ).full

    full_args, full_kwargs = pytree.tree_map_only(ShardTensor, to_full, (args, kwargs))
    known = written(func, args, kwargs)
    targets = [
        *{
            id(target): found[id(target)] for target in known if isinstance(target, ShardTensor)
        }.values()
    ]
    refuse_overlapping(func, [*views_among(known), *targets])
    result = run_on_whole(func, full_args, full_kwargs, [*found.values()], targets)
    return wrap_results(result, found.values(), {id(it.full): it.sharded for it in found.values()})


def _reshape_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.resize_as_.default and not isinstance(args[0], ShardTensor):
        return args[0].resize_(args[1].shape)
    if func is aten.detach_.default or not reshapes(func, args, kwargs):
        return args[0]
    sharded = next(
        leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardTensor)
    )
    raise NotImplementedError(
        f"{func} would change the shape or the memory of {sharded.spec.fqn}, which is sharded, or "
        f"lend it: expected operations that do not. Use the one that returns a new tensor, or "
        f"change it before the model is sharded"
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype of partial results, as in torch's own kernels."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _partial_norms(locals_: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of every local tensor; 0 if this rank holds no element."""
    found = [local.new_zeros((), dtype=_wide(local.dtype.to_real())) for local in locals_]
    for dtype in {local.dtype for local in locals_}:
        held = [i for i, local in enumerate(locals_) if local.dtype is dtype and local.numel()]
        if held:
            norms_held = aten._foreach_norm.Scalar(
                [locals_[i] for i in held], order, dtype=_wide(dtype)
            )
            for i, norm in zip(held, norms_held, strict=True):
                found[i] = norm
    return found


def _or_limit(local: torch.Tensor, end: int) -> torch.Tensor:
    return local if local.numel() else local.new_full((1,), _limits(local.dtype)[end])


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the neutral elements of a maximum and a minimum."""
    if dtype.is_floating_point:
        return -float("inf"), float("inf")
    return (
        (False, True) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    )
