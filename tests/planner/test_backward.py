"""Memory of a backward is known from running it on tensors without memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from shardeddp.planner.backward import MemoryRecord, UnitMemory
from shardeddp.planner.trace import profile
from shardeddp.planner.work import ModelProfile
from shardeddp.wrap import resolve_policy

WIDTH, VECTORS = 16, 8
RESULT = VECTORS * WIDTH * 4
WEIGHT = WIDTH * WIDTH * 4


class Unit(nn.Module):
    """Two layers, and what is between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


class Model(nn.Module):
    """Equal units behind each other; the result of one is changed in place."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(between) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
            x += 1
        return x.sum()


def planned(
    between: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
    precision: str = "32-true",
    micro_batch: int = VECTORS,
) -> ModelProfile:
    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, WIDTH, requires_grad=True))

    return profile(
        Model(between),
        step,
        policy=resolve_policy({Unit}),
        precision=precision,
        micro_batch=micro_batch,
        tokens=micro_batch,
    )


def test_a_backward_frees_what_was_saved_while_it_makes_gradients() -> None:
    found = planned()
    (unit,) = set(map(id, found.memory[1:]))
    backward = found.memory[1].backward
    assert found.memory[1].forward_nbytes == 2 * RESULT  # what a layer gets, and what it makes
    assert unit == id(found.memory[3])
    # Gradients of the result and of the second layer's input and weight, beside all that is saved.
    assert backward.activations[:2] == [4, RESULT + 4]  # the root of the backward, and its own
    assert backward.gradients[-1] == 2 * WEIGHT
    assert min(backward.activations) <= 0
    assert backward.peak == max(
        map(sum, zip(backward.activations, backward.gradients, strict=True))
    )
    assert backward.accumulating_peak < backward.peak


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * gradients[0].max().int().item()  # values that do not exist


def test_a_backward_that_needs_values_is_estimated() -> None:
    found = planned(_WithoutBackward.apply).memory[1].backward  # type: ignore[arg-type]
    assert found == MemoryRecord(activations=[2 * RESULT], gradients=[2 * WEIGHT])


class Aside(Unit):
    """Leaves a part of the loss with its module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = x.pow(2).mean()
        return super().forward(x)


class WithAside(nn.Module):
    """Sums what its units have left aside, too."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Aside(torch.tanh) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x * 2)
        return self.head(x).exp().sum() + sum(unit.aside for unit in self.units)  # type: ignore[misc]


class Chooser(nn.Module):
    """Returns places, on which shapes depend."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[0] // 2)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chooser, self.head = Chooser(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.chooser(x)
        return self.head(x[: int(places.max()) + 1]).sum()


def test_known_values_of_a_unit_s_result_are_known_outside_of_it() -> None:
    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, WIDTH))

    policy = resolve_policy({Chooser, nn.Linear})
    found = profile(
        Choosing(), step, policy=policy, precision="32-true", micro_batch=VECTORS, tokens=VECTORS
    )
    assert found.work[-1].matmul_flops == RESULT // 4  # of half of the vectors


def test_a_loss_of_results_that_units_have_not_returned_is_estimated() -> None:
    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, WIDTH, requires_grad=True))

    policy = resolve_policy({Aside})
    found = profile(
        WithAside(), step, policy=policy, precision="32-true", micro_batch=VECTORS, tokens=VECTORS
    )
    assert found.memory[0].backward.peak >= 2 * 64 * RESULT


def test_more_samples_are_extrapolated_at_every_moment() -> None:
    one, two, many = (planned(micro_batch=count).memory[1] for count in (1, 2, VECTORS))
    found = one.extrapolate(two, VECTORS)
    assert found == many


def test_other_operations_for_more_samples_are_extrapolated_by_their_peaks() -> None:
    one = UnitMemory(forward=[1], backward=MemoryRecord(activations=[3], gradients=[4]))
    two = UnitMemory(forward=[0, 2], backward=MemoryRecord(activations=[9, 6], gradients=[0, 4]))
    found = one.extrapolate(two, 4)
    assert (found.forward_nbytes, found.backward.peak) == (4, 7 + 3 * (10 - 7))


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.softmax(x, -1),
        lambda x: x.softmax(-1),
        torch.exp,
        lambda x: F.layer_norm(x, [WIDTH]),
    ],
)
def test_what_gpus_compute_in_float32_under_autocast_is_planned_so(
    between: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    plain, found = (planned(it, "bf16-mixed").work[1] for it in (torch.tanh, between))
    # The layers keep their inputs in bfloat16: one is kept by `tanh`, too. Float32 takes two more.
    assert found.saved_nbytes >= plain.saved_nbytes + RESULT
