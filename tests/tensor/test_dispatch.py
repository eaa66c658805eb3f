"""Operations on sharded tensors without gradients: local, reduced or gathered, and equal to those on plain tensors."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from shardeddp.tensor.collectives import patch_collectives
from shards import SIZES, Case, check_same, compare, make_mesh, make_pairs
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)
on_all_sizes = pytest.mark.parametrize("size", SIZES)
on_long_tables = pytest.mark.parametrize(
    "size", [size if size > 2 else pytest.param(size, marks=pytest.mark.torture) for size in SIZES]
)
"""Three ranks cut unevenly, and of four some have nothing of a small tensor."""

# By name: a function of a (sharded) tensor `p` and a plain tensor `x` of its shape; its result is sharded like `p`, and
# no rank talks to another.
ELEMENTWISE: dict[str, Case] = {
    "negation": lambda p, x: -p,
    "scalar operand": lambda p, x: 2.5 * p + 1,
    "scalar on the left": lambda p, x: 1 / (p + 10),
    "0-dim operand": lambda p, x: p * torch.tensor(0.5),
    "0-dim operand of a wider dtype": lambda p, x: p + torch.tensor(0.5, dtype=torch.float64),
    "itself": lambda p, x: p * p,
    "result of an operation": lambda p, x: p.exp() / (p.abs() + 1),
    "clamp": lambda p, x: p.clamp(-1, 1),
    "power": lambda p, x: p.abs() ** 1.5,
    "isfinite": lambda p, x: torch.isfinite(p),
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

# Everything else gathers; the result is plain.
GATHERED: dict[str, Case] = {
    "comparison": lambda p, x: p > x,
    "where": lambda p, x: torch.where(p > 0, p, x),
    "where in both branches": lambda p, x: torch.where(x > 0, p, -p),
    "clamp by tensors": lambda p, x: p.clamp(x - 1, x + 1),
    "addcmul": lambda p, x: torch.addcmul(p, x, p, value=0.1),
    "lerp": lambda p, x: p.lerp(x, 0.3),
    "masked_fill": lambda p, x: p.masked_fill(x > 0, 7.0),
    "full operand": lambda p, x: p + x,
    "full operand on the left": lambda p, x: x - p,
    "full operand of a wider dtype": lambda p, x: p * x.double(),
    "full operand that is not contiguous": lambda p, x: (
        p + x.mT.contiguous().mT if x.ndim > 1 else -p
    ),
    "operand of one element": lambda p, x: p * torch.full((1,), 3.0) if p.ndim else -p,
    "operand that is broadcast": lambda p, x: p + x[..., :1] if p.ndim else -p,
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


def compare_elementwise() -> None:
    compare(ELEMENTWISE, sharded=True, calls="")


@pytest.mark.slow
@on_long_tables
def test_elementwise_operations_equal_plain_ones_and_talk_to_nobody(
    world: Worlds, size: int
) -> None:
    world(size).run(compare_elementwise)


def compare_in_place() -> None:
    compare(IN_PLACE, sharded=True, calls="")


@pytest.mark.slow
@on_long_tables
def test_elementwise_operations_in_place_equal_plain_ones_and_talk_to_nobody(
    world: Worlds, size: int
) -> None:
    world(size).run(compare_in_place)


def compare_gathered() -> None:
    compare(GATHERED, sharded=None)


@pytest.mark.slow
@on_long_tables
def test_everything_else_gathers_and_equals_plain_operations(world: Worlds, size: int) -> None:
    world(size).run(compare_gathered)


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


@pytest.mark.slow
@on_long_tables
def test_random_numbers_are_those_of_one_process(world: Worlds, size: int) -> None:
    world(size).run(run_random_table)


@on_ranks(2)
def test_one_rank_alone_may_work_elementwise() -> None:
    pairs = make_pairs(make_mesh())
    if torch.distributed.get_rank() == 1:
        pairs["matrix"].sharded.detach().mul_(2).add_(torch.ones(3, 5)).sqrt()


def run_mixed_specs() -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh)
    cube, bias, matrix, scalar = (pairs[name] for name in ("cube", "bias", "matrix", "scalar"))
    twin = make_pairs(mesh)["matrix"]
    with torch.no_grad():
        check_same(
            matrix.sharded + bias.sharded,
            matrix.plain + bias.plain,
            "broadcast of a sharded tensor",
        )
        check_same(
            matrix.sharded * scalar.sharded, matrix.plain * scalar.plain, "sharded 0-dim operand"
        )
        check_same(
            matrix.sharded - twin.sharded,
            matrix.plain - twin.plain,
            "equal shapes, different specs",
        )
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
        check_same(
            found,
            torch.einsum("ij,klm,j->ikm", matrix.plain, cube.plain, bias.plain),
            "three of them",
        )
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            bias.sharded.add_(matrix.sharded)
        check_same(bias.sharded, bias.plain, "target of an operation that failed")


@on_all_sizes
def test_tensors_that_are_cut_differently_meet_as_full_ones(world: Worlds, size: int) -> None:
    world(size).run(run_mixed_specs)


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
    untouched = pairs["bias"].sharded.to_local()._version
    with torch.no_grad():
        for changes, operations in ((True, writes), (False, reads)):
            for name, operation in operations.items():
                before = p.to_local()._version  # it tells the engine to gather anew
                operation()
                assert (p.to_local()._version > before) == changes, name
                assert pairs["bias"].sharded.to_local()._version == untouched


def test_every_write_and_no_read_is_counted_in_the_version_of_the_shard(world: Worlds) -> None:
    for size in (1, 2, 3):
        world(size).run(versions)


@on_ranks(2)
def test_inference_mode_changes_nothing() -> None:
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


@on_ranks(2)
def test_a_result_of_another_shape_is_not_written() -> None:
    pairs = make_pairs(make_mesh())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="An output with one or more elements was resized")
        with pytest.raises(
            RuntimeError,
            match=r"expected a result of shape \(3, 5\) to write to matrix, found \(\)",
        ):
            torch.mul(torch.tensor(2.0), torch.tensor(3.0), out=pairs["matrix"].sharded)
    check_same(pairs["matrix"].sharded, pairs["matrix"].plain, "after the error")


@on_ranks(2)
def test_reshaping_in_place_is_refused_with_a_way_out() -> None:
    pairs = make_pairs(make_mesh())
    p = pairs["matrix"].sharded.detach()
    for change in (
        p.t_,
        lambda: p.unsqueeze_(0),
        lambda: p.resize_(2),
        lambda: p.set_(torch.zeros(15)),
    ):
        with pytest.raises(
            NotImplementedError, match="shape or the memory of matrix, which is sharded"
        ):
            change()
    assert p.shape == (3, 5)
    check_same(p, pairs["matrix"].plain, "after all")


@on_ranks(2)
def test_collectives_run_under_the_dispatcher_of_compilers() -> None:
    patch_collectives()
    tensor = torch.ones(3)
    with enable_python_dispatcher():
        dist.all_reduce(tensor)
        with FakeTensorMode():
            dist.all_reduce(torch.ones(3))
    assert tensor.tolist() == [2.0] * 3
