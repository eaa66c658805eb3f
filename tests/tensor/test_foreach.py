"""Operations on lists of sharded tensors, and torch's own gradient clipping, which is made of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardeddp.tensor.shard_tensor import ShardTensor
from shards import SIZES, Pair, check_same, make_mesh, make_pairs, plain_operand, whole
from world import Worlds

pytestmark = pytest.mark.timeout(60)
on_all_sizes = pytest.mark.parametrize("size", SIZES)

ForeachCase = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]

# Functions of a list of parameters and a list of plain tensors of their shapes.
FOREACH: dict[str, ForeachCase] = {
    "mul by a number": lambda ps, xs: torch._foreach_mul(ps, 2.0),
    "mul by numbers": lambda ps, xs: torch._foreach_mul(ps, [float(i) for i in range(len(ps))]),
    "mul by a tensor": lambda ps, xs: torch._foreach_mul(ps, torch.tensor(0.5)),
    "mul by plain tensors": lambda ps, xs: torch._foreach_mul(ps, xs),
    "mul of plain tensors": lambda ps, xs: torch._foreach_mul(xs, ps),
    "mul by 0-dim tensors": lambda ps, xs: torch._foreach_mul(ps, [torch.tensor(2.0)] * len(ps)),
    "mul by what is broadcast": lambda ps, xs: torch._foreach_mul(
        ps, [x[..., :1] if x.ndim else x for x in xs]
    ),
    "mul by tensors of more dims": lambda ps, xs: torch._foreach_mul(ps, [x[None] for x in xs]),
    "mul by a sharded tensor": lambda ps, xs: torch._foreach_mul(xs, ps[SCALAR]),
    "power of a number": lambda ps, xs: torch._foreach_pow(2.0, ps),
    "addcmul": lambda ps, xs: torch._foreach_addcmul(ps, ps, xs, 0.5),
    "addcdiv": lambda ps, xs: torch._foreach_addcdiv(
        ps, xs, torch._foreach_add(torch._foreach_abs(ps), 1.0), 0.5
    ),
    "lerp": lambda ps, xs: torch._foreach_lerp(ps, xs, 0.25),
    "sqrt of abs": lambda ps, xs: torch._foreach_sqrt(torch._foreach_abs(ps)),
    "sharded and plain": lambda ps, xs: torch._foreach_add([ps[0], xs[1]], [xs[0], ps[1]]),
    "norm": lambda ps, xs: torch._foreach_norm(ps),
    "norm of order 1": lambda ps, xs: torch._foreach_norm(ps, 1),
    "norm in another dtype": lambda ps, xs: torch._foreach_norm(ps, 2, dtype=torch.float64),
    "norm of sharded and plain": lambda ps, xs: torch._foreach_norm([ps[0], xs[1], ps[1]]),
    "max": lambda ps, xs: torch._foreach_max([p for p in ps if p.numel()]),
}
FOREACH_IN_PLACE: dict[str, ForeachCase] = {
    "mul by a number": lambda ps, xs: torch._foreach_mul_(ps, 2.0),
    "mul by a tensor": lambda ps, xs: torch._foreach_mul_(ps, torch.tensor(0.5)),
    "add of plain tensors": lambda ps, xs: torch._foreach_add_(ps, xs, alpha=2),
    "add of sharded tensors": lambda ps, xs: torch._foreach_add_(ps, torch._foreach_mul(ps, 3.0)),
    "add to plain tensors": lambda ps, xs: torch._foreach_add_(xs, ps),
    "copy": lambda ps, xs: torch._foreach_copy_(ps, xs),
    "zero": lambda ps, xs: torch._foreach_zero_(ps),
    "lerp": lambda ps, xs: torch._foreach_lerp_(ps, xs, [0.1] * len(ps)),
    "addcdiv": lambda ps, xs: torch._foreach_addcdiv_(
        ps, xs, [x.abs() + 1 for x in xs], [0.5] * len(ps)
    ),
    "clamp": lambda ps, xs: torch._foreach_clamp_min_(ps, 0.0),
}
SCALAR = 2  # the place of the scalar in both lists


@torch.no_grad()
def compare_foreach() -> None:
    mesh = make_mesh()
    for case, function in [*FOREACH.items(), *FOREACH_IN_PLACE.items()]:
        pairs = [*make_pairs(mesh).values()]
        mine, twins = ([plain_operand(pair) for pair in pairs] for _ in range(2))
        found = function([pair.sharded for pair in pairs], mine)
        expected = function([pair.plain for pair in pairs], twins)
        check_same(list(found or ()), list(expected or ()), case)
        check_same(
            [pair.sharded for pair in pairs], [pair.plain for pair in pairs], f"targets of {case}"
        )
        check_same(mine, twins, f"plain tensors of {case}")


@pytest.mark.slow
@on_all_sizes
def test_operations_on_lists_equal_plain_ones(world: Worlds, size: int) -> None:
    world(size).run(compare_foreach)


# -- torch's own clipping

NORM_ORDERS = (1.0, 2.0, 3.0, float("inf"))


def set_gradients(pairs: Sequence[Pair], scale: float = 1.0) -> None:
    for pair in pairs:
        gradient = plain_operand(pair) * scale
        pair.plain.grad = gradient.clone()
        pair.sharded.grad = ShardTensor(
            pair.sharded.spec.localize(gradient).clone(), pair.sharded.spec
        )


def clip_by_norm(foreach: bool | None) -> None:
    mesh = make_mesh()
    for order in NORM_ORDERS:
        for max_norm in (0.1, 1e3):
            pairs = [
                pair
                for pair in make_pairs(mesh).values()
                if pair.plain.numel() or order < float("inf")
            ]
            set_gradients(pairs)
            found, expected = (
                nn.utils.clip_grad_norm_(parameters, max_norm, order, foreach=foreach)
                for parameters in ([pair.sharded for pair in pairs], [pair.plain for pair in pairs])
            )
            check_same(found, expected, f"norm of order {order}")
            for pair in pairs:
                check_same(
                    pair.sharded.grad, pair.plain.grad, f"gradient of {pair.name} for order {order}"
                )


@pytest.mark.slow
@on_all_sizes
@pytest.mark.parametrize("foreach", [None, True, False])
def test_torchs_clipping_by_norm_equals_one_process(
    world: Worlds, size: int, foreach: bool | None
) -> None:
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
            nn.utils.clip_grad_norm_(
                parameters, 1.0, order, error_if_nonfinite=True, foreach=foreach
            )
        check_same([pair.sharded.grad for pair in pairs], before, "gradients after the error")


@pytest.mark.loop(1)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all(
    world: Worlds, foreach: bool | None, order: float, bad: float
) -> None:
    world(3).run(clip_what_is_not_finite, foreach, order, bad)
