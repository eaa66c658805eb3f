"""What a step computes and keeps is counted as GPUs do it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch.nn.attention.flex_attention import flex_attention

from shardeddp.plan.topology import Topology
from shardeddp.planner.trace import ModelProfile, Work, profile
from shardeddp.wrap import resolve_policy
from shardeddp.wrap.flat_buffers import costs_of

WIDTH, LENGTH = 16, 8


class Normed(nn.Module):
    """A layer between two norms."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), norm(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def counted(norm: type[nn.Module], precision: str) -> ModelProfile:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32

    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, LENGTH, WIDTH, dtype=dtype))

    policy = resolve_policy({nn.Linear})
    return profile(
        Normed(norm), step, policy=policy, micro_batch=2, tokens=LENGTH, precision=precision
    )


@pytest.mark.parametrize(("precision", "itemsize"), [("32-true", 4), ("bf16-true", 2)])
def test_an_rms_norm_keeps_its_input_and_one_number_of_each_vector(
    precision: str, itemsize: int
) -> None:
    vectors = 2 * LENGTH
    (root, linear) = counted(nn.RMSNorm, precision).work
    # What the first norm returns is the layer's input; the layer keeps it.
    assert linear.saved_nbytes == vectors * WIDTH * itemsize
    assert root.saved_nbytes == 2 * vectors * (WIDTH * itemsize + 4)


class Calling(nn.Module):
    """A layer, and what it is called by."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(WIDTH, WIDTH, bias=False), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


def in_a_branch(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    other: Any = lambda x: layer(layer(x))  # noqa: E731
    return torch.cond(x.sum() > 0, layer, other, (x,))


def in_a_loop(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    index = torch.zeros((), dtype=torch.int64)
    _, found = while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, layer(x)), (index, x))
    return found


def for_each_place(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def combine(carried: torch.Tensor, place: torch.Tensor) -> Any:
        made = layer(carried + place)
        return made, made.clone()

    return scan(combine, torch.zeros_like(x[:, 0]), x, dim=1)[1]


@pytest.mark.parametrize("call", [in_a_branch, in_a_loop, for_each_place])
def test_matmuls_in_operators_of_functions_count(call: Callable[..., torch.Tensor]) -> None:
    plain, found = (of_calls(it) for it in (lambda layer, x: layer(x), call))
    assert found.matmul_flops == plain.matmul_flops == 2 * 2 * LENGTH * WIDTH**2
    assert found.saved_nbytes >= plain.saved_nbytes


def test_flex_attention_counts_as_the_attention_that_it_is() -> None:
    def flexible(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        heads = layer(x)[:, None]
        return torch.compile(flex_attention)(heads, heads, heads)[:, 0]  # type: ignore[index, return-value]

    def fused(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        heads = layer(x)[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads)[:, 0]

    found, expected = of_calls(flexible), of_calls(fused)
    assert found.attention_flops == expected.attention_flops > 0
    assert found.saved_nbytes == expected.saved_nbytes


def of_calls(call: Callable[..., torch.Tensor]) -> Work:
    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, LENGTH, WIDTH))

    policy = resolve_policy({Calling})
    counts = profile(
        Calling(call), step, policy=policy, micro_batch=2, tokens=LENGTH, precision="32-true"
    )
    return counts.work[0]


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "bf16"])
def test_memory_that_two_parameters_share_is_counted_once(precision: str, on_meta: bool) -> None:
    device = "meta" if on_meta else "cpu"
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(3)])
    model[2].weight.data = model[0].weight.data

    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, WIDTH, dtype=model[0].weight.dtype))

    policy = resolve_policy("auto")
    traced = profile(model, step, policy=policy, micro_batch=2, tokens=2, precision=precision)
    costs = costs_of(traced.units[0], Topology(world_size=2, shard_size=2))
    assert [cost.plan.borrows for cost in costs if cost.layout.numel] == [False, True, False]
    itemsize = 2 if precision == "bf16-true" else 4
    assert sum(cost.main_nbytes for cost in costs) == 2 * WIDTH * WIDTH * itemsize // 2
