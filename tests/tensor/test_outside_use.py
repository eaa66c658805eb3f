"""Uses of a parameter outside its unit, recorded by autograd: they work on the gathered one, with right gradients."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardeddp.tensor.shard_tensor import ShardTensor
from shards import check_same, make_mesh, make_pairs, shard, warned
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)

Loss = Callable[[dict[str, torch.Tensor], int], torch.Tensor]


def rank_input(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 + rank))


LOSSES: dict[str, Loss] = {
    "functional": lambda p, rank: (
        F.linear(rank_input(rank), p["matrix"].t(), p["bias"]).square().mean()
    ),
    "matrix product": lambda p, rank: (rank_input(rank) @ p["matrix"]).tanh().sum(),
    "transposed": lambda p, rank: (p["matrix"].T @ rank_input(rank).T).exp().mean(),
    "indexed": lambda p, rank: (
        p["cube"][rank % 2, 1:].sum() * p["matrix"][torch.tensor([0, 2])].prod()
    ),
    "viewed": lambda p, rank: (
        p["cube"].view(-1)[::2].mul(rank + 1).sum() + p["matrix"].flatten().unbind()[3]
    ),
    "norms": lambda p, rank: p["cube"].norm() + p["matrix"].norm(1) * rank + p["bias"].abs().max(),
    "decay": lambda p, rank: sum((q**2).sum() for q in p.values()) * 0.1,  # type: ignore[return-value]
    "scalar": lambda p, rank: (rank_input(rank) * p["scalar"]).sum() + p["single"].squeeze() ** 3,
    "twice": lambda p, rank: (
        (p["matrix"] * p["matrix"]).sum() + (p["matrix"].t() @ p["matrix"]).trace()
    ),
    "some": lambda p, rank: (p["matrix"] * (rank == 0)).sum(),
    "in place on a copy": lambda p, rank: p["matrix"].clone().mul_(rank + 2).sum(),
    "stacked": lambda p, rank: (
        torch.stack([p["bias"], p["matrix"][1]]).var() + torch.cat([*p["cube"]]).mean()
    ),
    "with what is frozen": lambda p, rank: (
        (p["matrix"] @ p["bias"].detach()).sum() * p["cube"].detach().sum()
    ),
    "empty": lambda p, rank: p["empty"].sum() + p["single"].sum(),
}


def compare_gradients(shard_size: int | None) -> None:
    mesh = make_mesh(shard_size)
    for name, loss in LOSSES.items():
        pairs = make_pairs(mesh)
        with warned():
            mine = loss({key: pair.sharded for key, pair in pairs.items()}, dist.get_rank())
            mine.backward()
        plain = {key: pair.plain for key, pair in pairs.items()}
        losses = [loss(plain, rank) for rank in range(dist.get_world_size())]
        torch.stack(losses).mean().backward()
        check_same(mine, losses[dist.get_rank()], name)
        for key, pair in pairs.items():
            assert pair.sharded.grad is None or isinstance(pair.sharded.grad, ShardTensor)
            check_same(
                pair.sharded.grad,
                pair.plain.grad,
                f"gradient of {key} after {name}",
                rtol=1e-5,
                atol=1e-6,
            )


@pytest.mark.slow
@pytest.mark.parametrize(("size", "shard_size"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (2, 1)])
def test_gradients_of_uses_outside_a_unit_are_the_mean_over_all_ranks(
    world: Worlds, size: int, shard_size: int
) -> None:
    world(size).run(compare_gradients, shard_size)


@on_ranks(2)
def test_gradients_of_several_backwards_add_up() -> None:
    pairs = make_pairs(make_mesh())
    for factor in (1.0, 2.0):
        with warned():
            (pairs["matrix"].sharded.square().sum() * factor).backward()
        (pairs["matrix"].plain.square().sum() * factor).backward()
    check_same(pairs["matrix"].sharded.grad, pairs["matrix"].plain.grad, "after two backwards")


@on_ranks(2)
def test_functional_call_computes_with_sharded_parameters() -> None:
    mesh = make_mesh()
    linear = nn.Linear(5, 3)
    values = {"weight": linear.weight.detach() * 2, "bias": linear.bias.detach() + 1}
    pairs = shard(mesh, values)
    x = torch.ones(2, 5)
    with warned(times=2):
        found = torch.func.functional_call(
            linear, {name: pair.sharded for name, pair in pairs.items()}, (x,)
        )
        found.square().sum().backward()
    expected = torch.func.functional_call(
        linear, {name: pair.plain for name, pair in pairs.items()}, (x,)
    )
    expected.square().sum().backward()
    check_same(found, expected, "result")
    for name, pair in pairs.items():
        check_same(pair.sharded.grad, pair.plain.grad, f"gradient of {name}")
    assert linear.weight.grad is None


@on_ranks(2)
def test_a_use_is_warned_about_once_per_parameter_and_where_it_is() -> None:
    pairs = make_pairs(make_mesh())
    matrix, cube = pairs["matrix"].sharded, pairs["cube"].sharded
    with warned(times=2) as caught:
        for _ in range(3):
            matrix * 2
        line = sys._getframe().f_lineno - 1
        torch.sum(cube)
    assert "parameter matrix is used outside" in str(caught[0].message) and "60 bytes" in str(
        caught[0].message
    )
    assert "parameter cube" in str(caught[1].message)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)
    assert caught[1].filename == __file__


@on_ranks(2)
def test_what_is_frozen_or_not_recorded_is_not_warned_about() -> None:
    pairs = make_pairs(make_mesh(), requires_grad=False)
    x = torch.ones(2, 3, requires_grad=True)
    with warned(times=0):
        (x @ pairs["matrix"].sharded).sum().backward()
        (pairs["matrix"].sharded * 2).sum()
    (torch.ones(2, 3).requires_grad_() @ pairs["matrix"].plain).sum().backward()
    check_same(x.grad, (torch.ones(2, 5) @ pairs["matrix"].plain.t()), "gradient of the input")
    assert pairs["matrix"].sharded.grad is None


@on_ranks(2)
def test_gradients_that_are_asked_for_are_the_ranks_own_and_are_not_kept() -> None:
    pair = make_pairs(make_mesh())["matrix"]
    factor = 1.0 + dist.get_rank()
    with warned():
        found = torch.autograd.grad(pair.sharded.pow(3).sum() * factor, pair.sharded)
    assert type(found[0]) is torch.Tensor and pair.sharded.grad is None
    check_same(found, torch.autograd.grad(pair.plain.pow(3).sum() * factor, pair.plain), "gradient")


@on_ranks(2)
def test_second_derivatives_are_the_mean_over_all_ranks() -> None:
    pair = make_pairs(make_mesh())["matrix"]
    for p, factor in ((pair.sharded, 1.0 + dist.get_rank()), (pair.plain, 1.5)):
        with warned():
            (gradient,) = torch.autograd.grad(p.pow(3).sum() * factor, p, create_graph=True)
            gradient.sum().backward()
    check_same(pair.sharded.grad, pair.plain.grad, "second derivative")
    for p, factor in ((pair.sharded, 1.0 + dist.get_rank()), (pair.plain, 1.5)):
        p.grad = None
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Using backward.. with create_graph|.* is used outside"
            )
            (p.pow(3).sum() * factor).backward(create_graph=True)
            (averaged,) = (p.grad,)
            p.grad = None
            averaged.square().sum().backward()
    check_same(
        pair.sharded.grad, pair.plain.grad, "derivative of a function of the averaged gradient"
    )


@on_ranks(2)
def test_writing_while_gradients_are_recorded_is_an_error_as_it_is_for_plain_parameters() -> None:
    pairs = make_pairs(make_mesh())
    x = torch.ones(3, 5)

    def assign(p: torch.Tensor) -> None:
        p[0] = 1.0

    writes: dict[str, Callable[[torch.Tensor], Any]] = {
        "element-wise": lambda p: p.mul_(2),
        "operator": lambda p: p.__iadd__(x),
        "copy": lambda p: p.copy_(x),
        "assignment": assign,
        "random": lambda p: p.normal_(),
        "out": lambda p: torch.add(x, x, out=p),
        "view": lambda p: p.view(-1).mul_(2),
        "row": lambda p: p[0].zero_(),
        "diagonal": lambda p: p.fill_diagonal_(1.0),
        "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    }
    for name, write in writes.items():
        with pytest.raises(RuntimeError):
            write(pairs["matrix"].plain)
        with (
            warned(),
            pytest.raises(
                RuntimeError, match=r"matrix is sharded and cannot be written to|out=... arg"
            ),
        ):
            write(pairs["matrix"].sharded)
        check_same(pairs["matrix"].sharded, pairs["matrix"].plain, f"after {name}")


@on_ranks(2)
def test_truths_about_parameters_have_no_gradient_and_no_warning() -> None:
    mesh = make_mesh()
    first, second = make_pairs(mesh), make_pairs(mesh)
    for name, pair in first.items():
        mine, plain = pair.sharded, pair.plain
        mesh.traffic.reset()
        others = [other.sharded for other in first.values() if other.plain.shape != plain.shape]
        assert not any(torch.equal(mine, other) for other in others)
        assert not mesh.traffic.calls, "shapes say enough"
        assert (
            torch.equal(mine, mine)
            and torch.equal(mine, second[name].sharded)
            and torch.equal(plain, mine)
        ), name
        with torch.no_grad():
            last = torch.arange(plain.numel()).view(plain.shape) == plain.numel() - 1
            second[name].sharded.add_(last)
        assert torch.equal(mine, second[name].sharded) == (plain.numel() == 0), (
            "one element of one rank"
        )
        assert (
            not torch.isnan(mine).any()
            and torch.isfinite(mine).all()
            and torch.allclose(mine, plain)
        )
        check_same((mine > 0).full_tensor(), plain > 0, name)
