"""Operations on sharded tensors without gradients: local, reduced or gathered, and equal to those on plain tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardeddp.sharding.dispatch import norms
from shardeddp.sharding.shard_tensor import ShardTensor
from shards import SIZES, Pair, check_same, counted, make_mesh, make_pairs, shard, whole
from world import Worlds

pytestmark = pytest.mark.timeout(60)
on_all_sizes = pytest.mark.parametrize("size", SIZES)

Case = Callable[[torch.Tensor, torch.Tensor], Any]

# By name: a function of a (sharded) tensor `p` and a plain tensor `x` of its shape; its result is sharded like `p`, and
# no rank talks to another.
ELEMENTWISE: dict[str, Case] = {
    "negation": lambda p, x: -p,
    "scalar operand": lambda p, x: 2.5 * p + 1,
    "scalar on the left": lambda p, x: 1 / (p + 10),
    "0-dim operand": lambda p, x: p * torch.tensor(0.5),
    "0-dim operand of a wider dtype": lambda p, x: p + torch.tensor(0.5, dtype=torch.float64),
    "full operand": lambda p, x: p + x,
    "full operand on the left": lambda p, x: x - p,
    "full operand of a wider dtype": lambda p, x: p * x.double(),
    "full operand that is not contiguous": lambda p, x: p + x.mT.contiguous().mT if x.ndim > 1 else -p,
    "operand of one element": lambda p, x: p * torch.full((1,), 3.0) if p.ndim else -p,
    "operand that is broadcast": lambda p, x: p + x[..., :1] if p.ndim else -p,
    "itself": lambda p, x: p * p,
    "result of an operation": lambda p, x: p.exp() / (p.abs() + 1),
    "comparison": lambda p, x: p > x,
    "where": lambda p, x: torch.where(p > 0, p, x),
    "where in both branches": lambda p, x: torch.where(x > 0, p, -p),
    "clamp": lambda p, x: p.clamp(-1, 1),
    "clamp by tensors": lambda p, x: p.clamp(x - 1, x + 1),
    "addcmul": lambda p, x: torch.addcmul(p, x, p, value=0.1),
    "lerp": lambda p, x: p.lerp(x, 0.3),
    "power": lambda p, x: p.abs() ** 1.5,
    "isfinite": lambda p, x: torch.isfinite(p),
    "masked_fill": lambda p, x: p.masked_fill(x > 0, 7.0),
    "clone": lambda p, x: p.clone(),
    "detach": lambda p, x: p.detach(),
    "to": lambda p, x: p.to(torch.bfloat16),
    "double": lambda p, x: p.double(),
    "zeros_like": lambda p, x: torch.zeros_like(p),
    "ones_like of another dtype": lambda p, x: torch.ones_like(p, dtype=torch.int64),
    "full_like": lambda p, x: torch.full_like(p, 3.0),
    "channels": lambda p, x: p.clone(memory_format=torch.contiguous_format),
}

# The same for functions that write to `p`; whatever they return is compared as well.
IN_PLACE: dict[str, Case] = {
    "mul_": lambda p, x: p.mul_(2),
    "add_ a full operand": lambda p, x: p.add_(x, alpha=0.5),
    "sub_ a 0-dim operand": lambda p, x: p.sub_(torch.tensor(0.25)),
    "mul_ an operand that is broadcast": lambda p, x: p.mul_(x[..., :1]) if p.ndim else p.mul_(2),
    "div_ by an operand of a wider dtype": lambda p, x: p.div_(x.double().abs() + 1),
    "operator": lambda p, x: p.__imul__(3),
    "addcdiv_": lambda p, x: p.addcdiv_(x, x.abs() + 1, value=-0.1),
    "lerp_": lambda p, x: p.lerp_(x, 0.9),
    "clamp_": lambda p, x: p.clamp_(-0.5, 0.5),
    "copy_": lambda p, x: p.copy_(x),
    "copy_ of another dtype": lambda p, x: p.copy_(x.to(torch.float64)),
    "copy_ of itself": lambda p, x: p.copy_(p * 2),
    "copy_ of what is broadcast": lambda p, x: p.copy_(x[..., :1]) if p.ndim else p.copy_(x),
    "zero_": lambda p, x: p.zero_(),
    "fill_": lambda p, x: p.fill_(4),
    "fill_ with a tensor": lambda p, x: p.fill_(torch.tensor(4.0)),
    "out=": lambda p, x: torch.add(p, x, out=p),
    "out= of plain operands": lambda p, x: torch.mul(x, x, out=p),
    "data": lambda p, x: p.data.mul_(2),
    "detached": lambda p, x: p.detach().add_(1),
}

# Functions of `p` whose answer is about all elements and costs one small collective.
REDUCTIONS: dict[str, Case] = {
    "sum": lambda p, x: p.sum(),
    "sum in another dtype": lambda p, x: p.sum(dtype=torch.float64),
    "mean": lambda p, x: p.mean(),
    "mean in another dtype": lambda p, x: torch.mean(p, dtype=torch.float64),
    "any": lambda p, x: (p > 2).any(),
    "all": lambda p, x: (p > -1).all(),
    "norm": lambda p, x: p.norm(),
    "norm of order 1": lambda p, x: p.norm(1),
    "norm of order 3": lambda p, x: torch.linalg.vector_norm(p, 3),
}
# The same, where there is at least one element.
EXTREMES: dict[str, Case] = {
    "max": lambda p, x: p.max(),
    "min": lambda p, x: torch.min(p),
    "largest": lambda p, x: p.norm(float("inf")),
    "largest by amax": lambda p, x: p.abs().max(),
    "max of booleans": lambda p, x: (p > 0).max(),
    "min of integers": lambda p, x: p.int().min(),
}

# Everything else gathers; the result is plain.
GATHERED: dict[str, Case] = {
    "sum of a dim": lambda p, x: p.sum(0),
    "mean that keeps dims": lambda p, x: p.mean(-1, keepdim=True),
    "norm of a dim": lambda p, x: torch.linalg.vector_norm(p, 2, dim=-1),
    "norm in another dtype": lambda p, x: torch.linalg.vector_norm(p, 2, dtype=torch.float64),
    "norm of order 0": lambda p, x: torch.linalg.vector_norm(p, 0),
    "standard deviation": lambda p, x: p.flatten().std(correction=0) if p.numel() else p.flatten(),
    "median": lambda p, x: p.median(),
    "cumsum": lambda p, x: p.flatten().cumsum(0),
    "sort": lambda p, x: p.flatten().sort(),
    "matrix product": lambda p, x: p.flatten() @ x.flatten(),
    "operand of more dims": lambda p, x: p + torch.ones(2, *p.shape),
    "flatten": lambda p, x: p.flatten(),
    "view": lambda p, x: p.view(-1),
    "reshape": lambda p, x: p.reshape(1, -1),
    "transpose": lambda p, x: p.mT if p.ndim > 1 else p[None],
    "index": lambda p, x: p.view(-1)[-1:],
    "mask": lambda p, x: p[x > 0],
    "cat": lambda p, x: torch.cat([p.view(-1), x.view(-1)]),
    "stack": lambda p, x: torch.stack([p, p]),
    "chunk": lambda p, x: p.view(-1).chunk(2),
    "equal": lambda p, x: (torch.equal(p, p.clone()), torch.equal(p, x)),
    "allclose": lambda p, x: torch.allclose(p, p + 1e-9),
    "tolist": lambda p, x: p.tolist(),
    "argmax": lambda p, x: p.flatten().argmax() if p.numel() else p.flatten(),
    "frexp": lambda p, x: torch.frexp(p),
    "write to a plain tensor": lambda p, x: torch.mul(p, 2, out=torch.empty(p.shape)),
    "plain tensor in place": lambda p, x: x.clone().add_(p),
}


# Functions of a list of parameters and a list of plain tensors of their shapes.
FOREACH: dict[str, Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]] = {
    "mul by a number": lambda ps, xs: torch._foreach_mul(ps, 2.0),
    "mul by numbers": lambda ps, xs: torch._foreach_mul(ps, [float(i) for i in range(len(ps))]),
    "mul by a tensor": lambda ps, xs: torch._foreach_mul(ps, torch.tensor(0.5)),
    "mul by plain tensors": lambda ps, xs: torch._foreach_mul(ps, xs),
    "mul of plain tensors": lambda ps, xs: torch._foreach_mul(xs, ps),
    "mul by 0-dim tensors": lambda ps, xs: torch._foreach_mul(ps, [torch.tensor(2.0)] * len(ps)),
    "mul by what is broadcast": lambda ps, xs: torch._foreach_mul(ps, [x[..., :1] if x.ndim else x for x in xs]),
    "mul by tensors of more dims": lambda ps, xs: torch._foreach_mul(ps, [x[None] for x in xs]),
    "mul by a sharded tensor": lambda ps, xs: torch._foreach_mul(xs, ps[SCALAR]),
    "power of a number": lambda ps, xs: torch._foreach_pow(2.0, ps),
    "addcmul": lambda ps, xs: torch._foreach_addcmul(ps, ps, xs, 0.5),
    "addcdiv": lambda ps, xs: torch._foreach_addcdiv(ps, xs, torch._foreach_add(torch._foreach_abs(ps), 1.0), 0.5),
    "lerp": lambda ps, xs: torch._foreach_lerp(ps, xs, 0.25),
    "sqrt of abs": lambda ps, xs: torch._foreach_sqrt(torch._foreach_abs(ps)),
    "sharded and plain": lambda ps, xs: torch._foreach_add([ps[0], xs[1]], [xs[0], ps[1]]),
    "norm": lambda ps, xs: torch._foreach_norm(ps),
    "norm of order 1": lambda ps, xs: torch._foreach_norm(ps, 1),
    "norm in another dtype": lambda ps, xs: torch._foreach_norm(ps, 2, dtype=torch.float64),
    "norm of sharded and plain": lambda ps, xs: torch._foreach_norm([ps[0], xs[1], ps[1]]),
    "max": lambda ps, xs: torch._foreach_max([p for p in ps if p.numel()]),
}
FOREACH_IN_PLACE: dict[str, Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]] = {
    "mul by a number": lambda ps, xs: torch._foreach_mul_(ps, 2.0),
    "mul by a tensor": lambda ps, xs: torch._foreach_mul_(ps, torch.tensor(0.5)),
    "add of plain tensors": lambda ps, xs: torch._foreach_add_(ps, xs, alpha=2),
    "add of sharded tensors": lambda ps, xs: torch._foreach_add_(ps, torch._foreach_mul(ps, 3.0)),
    "add to plain tensors": lambda ps, xs: torch._foreach_add_(xs, ps),
    "copy": lambda ps, xs: torch._foreach_copy_(ps, xs),
    "zero": lambda ps, xs: torch._foreach_zero_(ps),
    "lerp": lambda ps, xs: torch._foreach_lerp_(ps, xs, [0.1] * len(ps)),
    "addcdiv": lambda ps, xs: torch._foreach_addcdiv_(ps, xs, [x.abs() + 1 for x in xs], [0.5] * len(ps)),
    "clamp": lambda ps, xs: torch._foreach_clamp_min_(ps, 0.0),
}
SCALAR = 2  # the place of the scalar in both lists

# Functions that draw random numbers: with equal seeds on all ranks, the numbers of one process.
RANDOM: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": lambda p: p.normal_(),
    "uniform_": lambda p: p.data.uniform_(-1, 1),
    "bernoulli_": lambda p: p.bernoulli_(0.5),
    "rrelu": lambda p: torch.rrelu(p, training=True),
    "dropout": lambda p: torch.dropout(p, 0.5, True),
    "rand_like": lambda p: torch.rand_like(p),
    "kaiming": lambda p: nn.init.kaiming_uniform_(p) if p.ndim > 1 and p.numel() else p,
    "xavier": lambda p: nn.init.xavier_normal_(p) if p.ndim > 1 and p.numel() else p,
    "orthogonal": lambda p: nn.init.orthogonal_(p) if p.ndim > 1 and p.numel() else p,
    "truncated": lambda p: nn.init.trunc_normal_(p),
    "sparse": lambda p: nn.init.sparse_(p, 0.5) if p.ndim == 2 and p.numel() else p,
    "eye": lambda p: nn.init.eye_(p) if p.ndim == 2 else p,
}

TABLES: dict[str, dict[str, Any]] = {
    "elementwise": ELEMENTWISE,
    "in place": IN_PLACE,
    "reductions": REDUCTIONS,
    "extremes": EXTREMES,
    "gathered": GATHERED,
    "foreach": FOREACH,
    "foreach in place": FOREACH_IN_PLACE,
}


def plain_operand(pair: Pair) -> torch.Tensor:
    return torch.randn(pair.plain.shape, generator=torch.Generator().manual_seed(2))


def run_table(table: str, sharded_result: bool | None, calls: str | None, empty: bool = True) -> None:
    """Compare every case on every shape; ``calls`` are the kinds of collectives that a case may issue."""
    mesh = make_mesh()
    with torch.no_grad():
        for case, function in TABLES[table].items():
            for name, pair in make_pairs(mesh).items():
                if not (pair.plain.numel() or empty):
                    continue
                about = f"{case} of {name}"
                with counted(mesh) as issued:
                    found = function(pair.sharded, plain_operand(pair))
                if mesh.topology.shard_size > 1 and calls is not None:
                    assert [*issued.elements()] == calls.split(), f"{about} issued {dict(issued)}"
                if sharded_result is not None:
                    assert isinstance(found, ShardTensor) == sharded_result, f"{about} is a {type(found).__name__}"
                check_same(found, function(pair.plain, plain_operand(pair)), about)
                check_same(pair.sharded, pair.plain, f"{name} after {case}")


def run_foreach_table(table: str) -> None:
    mesh = make_mesh()
    with torch.no_grad():
        for case, function in TABLES[table].items():
            pairs = [*make_pairs(mesh).values()]
            mine, twins = [plain_operand(pair) for pair in pairs], [plain_operand(pair) for pair in pairs]
            found = function([pair.sharded for pair in pairs], mine)
            expected = function([pair.plain for pair in pairs], twins)
            check_same(list(found or ()), list(expected or ()), case)
            check_same([pair.sharded for pair in pairs], [pair.plain for pair in pairs], f"targets of {case}")
            check_same(mine, twins, f"plain tensors of {case}")


@on_all_sizes
def test_elementwise_operations_equal_plain_ones_and_talk_to_nobody(world: Worlds, size: int) -> None:
    world(size).run(run_table, "elementwise", True, "")


@on_all_sizes
def test_elementwise_operations_in_place_equal_plain_ones_and_talk_to_nobody(world: Worlds, size: int) -> None:
    world(size).run(run_table, "in place", True, "")


@on_all_sizes
def test_reductions_over_all_elements_are_global(world: Worlds, size: int) -> None:
    world(size).run(run_table, "reductions", False, None)


@on_all_sizes
def test_extremes_are_global_where_some_rank_has_no_element(world: Worlds, size: int) -> None:
    world(size).run(run_table, "extremes", False, "all_gather", False)


@on_all_sizes
def test_everything_else_gathers_and_equals_plain_operations(world: Worlds, size: int) -> None:
    world(size).run(run_table, "gathered", None, None)


@on_all_sizes
def test_foreach_operations_equal_plain_ones(world: Worlds, size: int) -> None:
    world(size).run(run_foreach_table, "foreach")
    world(size).run(run_foreach_table, "foreach in place")


def run_random_table() -> None:
    mesh = make_mesh()
    with torch.no_grad():
        for case, function in RANDOM.items():
            for name, pair in make_pairs(mesh).items():
                torch.manual_seed(7)
                found = function(pair.sharded)
                torch.manual_seed(7)
                check_same(found, function(pair.plain), f"{case} of {name}")
                check_same(pair.sharded, pair.plain, f"{name} after {case}")


@on_all_sizes
def test_random_numbers_are_those_of_one_process(world: Worlds, size: int) -> None:
    world(size).run(run_random_table)


def compare_with_one_rank_alone() -> None:
    pairs = make_pairs(make_mesh())
    if torch.distributed.get_rank() == 1:
        pairs["matrix"].sharded.detach().mul_(2).add_(torch.ones(3, 5)).sqrt()


def test_one_rank_alone_may_work_elementwise(world: Worlds) -> None:
    world(2).run(compare_with_one_rank_alone, timeout_s=10)


def run_mixed_specs() -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh)
    cube, bias, matrix, scalar = (pairs[name] for name in ("cube", "bias", "matrix", "scalar"))
    twin = make_pairs(mesh)["matrix"]
    with torch.no_grad():
        check_same(matrix.sharded + bias.sharded, matrix.plain + bias.plain, "broadcast of a sharded tensor")
        check_same(matrix.sharded * scalar.sharded, matrix.plain * scalar.plain, "sharded 0-dim operand")
        check_same(matrix.sharded - twin.sharded, matrix.plain - twin.plain, "equal shapes, different specs")
        wide = scalar.sharded.double() * scalar.sharded
        check_same(wide, scalar.plain.double() * scalar.plain, "0-dim operands of two dtypes")
        for target, twin_ in ((matrix.sharded, matrix.plain),):
            target.add_(bias.sharded if target is matrix.sharded else bias.plain)
            twin_.add_(bias.plain)
            check_same(target, twin_, "broadcast of a sharded tensor in place")
        matrix.sharded.mul_(scalar.sharded), matrix.plain.mul_(scalar.plain)
        check_same(matrix.sharded, matrix.plain, "sharded 0-dim operand in place")
        matrix.sharded.copy_(twin.sharded), matrix.plain.copy_(twin.plain)
        check_same(matrix.sharded, matrix.plain, "copy of a tensor with another spec")
        matrix.sharded.fill_(scalar.sharded), matrix.plain.fill_(scalar.plain)
        check_same(matrix.sharded, matrix.plain, "fill with a sharded 0-dim tensor")
        found = torch.einsum("ij,klm,j->ikm", matrix.sharded, cube.sharded, bias.sharded)
        check_same(found, torch.einsum("ij,klm,j->ikm", matrix.plain, cube.plain, bias.plain), "three of them")
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            bias.sharded.add_(matrix.sharded)
        check_same(bias.sharded, bias.plain, "target of an operation that failed")


@on_all_sizes
def test_tensors_that_are_cut_differently_meet_as_full_ones(world: Worlds, size: int) -> None:
    world(size).run(run_mixed_specs)


def run_dtype(dtype: torch.dtype) -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh, dtype, requires_grad=dtype.is_floating_point or dtype.is_complex)
    with torch.no_grad():
        for name, pair in pairs.items():
            check_same(pair.sharded, pair.plain, f"{name} as {dtype}")
            check_same(pair.sharded.sum(), pair.plain.sum(), f"sum of {name} as {dtype}")
            check_same(pair.sharded == pair.plain, pair.plain == pair.plain, f"comparison of {name} as {dtype}")
            check_same(pair.sharded.any(), pair.plain.any(), f"any of {name} as {dtype}")
            if dtype.is_floating_point or dtype.is_complex:
                check_same(pair.sharded.mean(), pair.plain.mean(), f"mean of {name} as {dtype}")
                check_same(pair.sharded.norm(), pair.plain.norm(), f"norm of {name} as {dtype}")
            else:
                with pytest.raises(RuntimeError, match="could not infer output dtype"):
                    pair.sharded.mean()
            if pair.plain.numel() and not dtype.is_complex:
                check_same(pair.sharded.max(), pair.plain.max(), f"max of {name} as {dtype}")
            elif not dtype.is_complex:
                with pytest.raises(RuntimeError, match="input.numel"):
                    pair.sharded.max()


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64],
    ids=str,
)
def test_other_dtypes_give_the_dtypes_and_values_of_plain_tensors(world: Worlds, dtype: torch.dtype) -> None:
    world(3).run(run_dtype, dtype)


def run_extraordinary_values() -> None:
    mesh = make_mesh()
    nan, inf = float("nan"), float("inf")
    values = {
        "nan at the end": torch.tensor([1.0] * 11 + [nan]),
        "nan at the start": torch.tensor([nan] + [1.0] * 11),
        "all infinite": torch.full((3,), -inf),
        "huge": torch.full((12,), 8e18),  # four squares fit into float32, twelve do not
    }
    with torch.no_grad():
        for name, value in values.items():
            pair = shard(mesh, {name: value})[name]
            for reduction in ("max", "min", "sum"):
                found, expected = (getattr(tensor, reduction)() for tensor in (pair.sharded, pair.plain))
                check_same(found, expected, f"{reduction} of {name}")
            for order in (2.0, inf, -inf, 0.0):
                expected = torch.linalg.vector_norm(pair.plain.double(), order).float()
                check_same(norms([pair.sharded], order)[0], expected, f"norm of order {order} of {name}")
        half = shard(mesh, {"half": torch.full((8,), 300.0, dtype=torch.float16)})["half"]
        check_same(half.sharded.norm(), half.plain.norm(), "norm whose square does not fit")
        half.sharded.fill_(60000.0), half.plain.fill_(60000.0)
        check_same(half.sharded.mean(), half.plain.mean(), "mean whose sum does not fit")


def test_nan_infinity_and_values_with_huge_squares_are_reduced_as_in_plain_tensors(world: Worlds) -> None:
    world(3).run(run_extraordinary_values)


def count_reductions() -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh)
    sharded = [pair.sharded.detach() for pair in pairs.values()]
    with counted(mesh) as calls:
        torch._foreach_norm(sharded)
    assert calls == {"all_reduce": 1}
    with counted(mesh) as calls:
        for tensor in sharded:
            assert tensor.new_zeros(2, 3).shape == (2, 3)
            assert tensor.new_tensor([1.0]).dtype == tensor.dtype
            assert torch.empty_like(tensor).shape == tensor.shape
    assert calls == {}


def test_norms_of_many_tensors_share_one_reduction_and_new_tensors_need_none(world: Worlds) -> None:
    world(2).run(count_reductions)


def reduce_on_replicas() -> None:
    mesh = make_mesh(shard_size=2)
    with torch.no_grad():
        for name, pair in make_pairs(mesh).items():
            check_same(pair.sharded, pair.plain, name)
            for reduction in (torch.sum, torch.mean, torch.linalg.vector_norm):
                check_same(reduction(pair.sharded), reduction(pair.plain), f"{reduction} of {name}")


def test_replicas_are_not_reduced_over(world: Worlds) -> None:
    world(4).run(reduce_on_replicas)


def versions() -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh)
    p = pairs["matrix"].sharded
    x = torch.ones(3, 5)
    writes: dict[str, Callable[[], Any]] = {
        "element-wise": lambda: p.mul_(2),
        "foreach": lambda: torch._foreach_add_([p], [x]),
        "gathered": lambda: p.index_fill_(0, torch.tensor([1]), 3.0),
        "detached": lambda: p.detach().zero_(),
        "data": lambda: p.data.add_(1),
        "out": lambda: torch.add(x, x, out=p),
        "view": lambda: p[0].fill_(1),
        "random": lambda: p.normal_(),
    }
    reads: dict[str, Callable[[], Any]] = {
        "gather": lambda: p.full_tensor(),
        "sum": lambda: p.sum(),
        "matrix product": lambda: torch.mm(x, p.t(), out=torch.empty(3, 3)),
        "plain target": lambda: x.clone().mul_(p),
    }
    with torch.no_grad():
        for changes, operations in ((True, writes), (False, reads)):
            for name, operation in operations.items():
                # All of a flat buffer's parameters are views of one shard; its version tells the engine to gather anew.
                before = pairs["bias"].sharded.to_local()._version
                operation()
                assert (pairs["bias"].sharded.to_local()._version > before) == changes, name


def test_every_write_and_no_read_is_counted_in_the_version_of_the_shard(world: Worlds) -> None:
    for size in (1, 2, 3):
        world(size).run(versions)


def infer() -> None:
    pairs = make_pairs(make_mesh())
    with torch.inference_mode():
        for name, pair in pairs.items():
            doubled = pair.sharded * 2
            doubled.add_(1)
            doubled.view(-1)[:1] = 9.0
            expected = pair.plain * 2 + 1
            expected.view(-1)[:1] = 9.0
            check_same(doubled, expected, name)
            check_same(doubled.view(-1), expected.view(-1), f"view of {name}")
            pair.sharded.mul_(2), pair.plain.mul_(2)
    for name, pair in pairs.items():
        check_same(pair.sharded, pair.plain, name)


def test_inference_mode_changes_nothing(world: Worlds) -> None:
    world(2).run(infer)


def reshape_in_place() -> None:
    pairs = make_pairs(make_mesh())
    p = pairs["matrix"].sharded.detach()
    for change in (p.t_, p.squeeze_, lambda: p.unsqueeze_(0), lambda: p.resize_(2), lambda: p.set_(torch.zeros(3, 5))):
        with pytest.raises(NotImplementedError, match="shape or the memory of matrix, which is sharded"):
            change()
    assert p.shape == (3, 5)
    check_same(p, pairs["matrix"].plain, "after all")


def test_reshaping_in_place_is_refused_with_a_way_out(world: Worlds) -> None:
    world(2).run(reshape_in_place)


# -- torch's own clipping

NORM_ORDERS = (1.0, 2.0, 3.0, float("inf"))


def set_gradients(pairs: Sequence[Pair], scale: float = 1.0) -> None:
    for pair in pairs:
        gradient = plain_operand(pair) * scale
        pair.plain.grad = gradient.clone()
        pair.sharded.grad = ShardTensor(pair.sharded.spec.localize(gradient).clone(), pair.sharded.spec)


def clip_by_norm(foreach: bool | None) -> None:
    mesh = make_mesh()
    for order in NORM_ORDERS:
        for max_norm in (0.1, 1e3):
            pairs = [pair for pair in make_pairs(mesh).values() if pair.plain.numel() or order < float("inf")]
            set_gradients(pairs)
            found, expected = (
                nn.utils.clip_grad_norm_(parameters, max_norm, order, foreach=foreach)
                for parameters in ([pair.sharded for pair in pairs], [pair.plain for pair in pairs])
            )
            check_same(found, expected, f"norm of order {order}")
            for pair in pairs:
                check_same(pair.sharded.grad, pair.plain.grad, f"gradient of {pair.name} for order {order}")


@on_all_sizes
@pytest.mark.parametrize("foreach", [None, True, False])
def test_torchs_clipping_by_norm_equals_one_process(world: Worlds, size: int, foreach: bool | None) -> None:
    world(size).run(clip_by_norm, foreach)


def clip_by_value(foreach: bool | None) -> None:
    pairs = [*make_pairs(make_mesh()).values()]
    set_gradients(pairs)
    for parameters in ([pair.sharded for pair in pairs], [pair.plain for pair in pairs]):
        nn.utils.clip_grad_value_(parameters, 0.3, foreach=foreach)
    for pair in pairs:
        check_same(pair.sharded.grad, pair.plain.grad, f"gradient of {pair.name}")


@pytest.mark.parametrize("foreach", [None, True, False])
def test_torchs_clipping_by_value_equals_one_process(world: Worlds, foreach: bool | None) -> None:
    for size in (1, 3):
        world(size).run(clip_by_value, foreach)


def clip_what_is_not_finite(foreach: bool | None, order: float, bad: float) -> None:
    pairs = [pair for pair in make_pairs(make_mesh()).values() if pair.plain.numel()]
    for place in (0, -1):
        set_gradients(pairs)
        with torch.no_grad():
            pairs[0].sharded.grad.view(-1)[place] = bad  # one rank of all has it
        before = [whole(pair.sharded.grad) for pair in pairs]
        with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
            parameters = [pair.sharded for pair in pairs]
            nn.utils.clip_grad_norm_(parameters, 1.0, order, error_if_nonfinite=True, foreach=foreach)
        check_same([pair.sharded.grad for pair in pairs], before, "gradients after the error")


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all(
    world: Worlds, foreach: bool | None, order: float, bad: float
) -> None:
    world(3).run(clip_what_is_not_finite, foreach, order, bad)
