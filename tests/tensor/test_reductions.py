"""Reductions over sharded tensors: global on every rank, in the dtype and with the value that plain tensors give."""

import pytest
import torch

from shardeddp.tensor.dispatch import norms
from shards import SIZES, Case, check_same, compare, counted, make_mesh, make_pairs, shard
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)
on_all_sizes = pytest.mark.parametrize("size", SIZES)

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


def compare_reductions() -> None:
    compare(REDUCTIONS, sharded=False, calls=None)


@pytest.mark.slow
@on_all_sizes
def test_reductions_over_all_elements_are_global(world: Worlds, size: int) -> None:
    world(size).run(compare_reductions)


def compare_extremes() -> None:
    compare(EXTREMES, sharded=False, calls="all_gather", empty=False)


@pytest.mark.slow
@on_all_sizes
def test_extremes_are_global_where_some_rank_has_no_element(world: Worlds, size: int) -> None:
    world(size).run(compare_extremes)


@pytest.mark.loop(1)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
@on_ranks(3)
def test_other_dtypes_give_the_dtypes_and_values_of_plain_tensors(dtype: torch.dtype) -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh, dtype, requires_grad=dtype.is_floating_point or dtype.is_complex)
    with torch.no_grad():
        for name, pair in pairs.items():
            check_same(pair.sharded, pair.plain, f"{name} as {dtype}")
            check_same(pair.sharded.sum(), pair.plain.sum(), f"sum of {name} as {dtype}")
            check_same(
                pair.sharded == pair.plain,
                pair.plain == pair.plain,
                f"comparison of {name} as {dtype}",
            )
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
                with pytest.raises(RuntimeError, match=r"input\.numel"):
                    pair.sharded.max()


@on_ranks(3)
def test_nan_infinity_and_values_with_huge_squares_are_reduced_as_in_plain_tensors() -> None:
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
                found, expected = (
                    getattr(tensor, reduction)() for tensor in (pair.sharded, pair.plain)
                )
                check_same(found, expected, f"{reduction} of {name}")
            for order in (2.0, inf, -inf, 0.0):
                expected = torch.linalg.vector_norm(pair.plain.double(), order).float()
                check_same(
                    norms([pair.sharded], order)[0], expected, f"norm of order {order} of {name}"
                )
        half = shard(mesh, {"half": torch.full((8,), 300.0, dtype=torch.float16)})["half"]
        check_same(half.sharded.norm(), half.plain.norm(), "norm whose square does not fit")
        half.sharded.fill_(60000.0), half.plain.fill_(60000.0)
        check_same(half.sharded.mean(), half.plain.mean(), "mean whose sum does not fit")


@on_ranks(2)
def test_norms_of_many_tensors_share_one_reduction_and_new_tensors_need_none() -> None:
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


@on_ranks(4)
def test_replicas_are_not_reduced_over() -> None:
    mesh = make_mesh(shard_size=2)
    with torch.no_grad():
        for name, pair in make_pairs(mesh).items():
            check_same(pair.sharded, pair.plain, name)
            for reduction in (torch.sum, torch.mean, torch.linalg.vector_norm):
                check_same(reduction(pair.sharded), reduction(pair.plain), f"{reduction} of {name}")
