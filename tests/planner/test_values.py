"""Shapes of a planned step may depend on known whole numbers, and on a router that is taken to choose evenly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.planner import values
from shardeddp.planner.trace import profile
from shardeddp.planner.work import ModelProfile
from shardeddp.wrap import resolve_policy

WIDTH, EXPERTS, CHOSEN, TOKENS = 8, 4, 2, 16
ROWS = TOKENS * CHOSEN // EXPERTS

pytestmark = pytest.mark.timeout(60)


class Step(nn.Module):
    """A layer, and whatever a test computes with it from tokens and their scores."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(WIDTH, WIDTH, bias=False), compute

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.compute(self.layer, x, scores)


def traced(compute: Callable[..., Any], tokens: int = TOKENS) -> ModelProfile:
    def step(module: nn.Module, samples: int) -> Any:
        return module(torch.empty(tokens, WIDTH), torch.empty(tokens, EXPERTS))

    options: dict[str, Any] = {"micro_batch": 1, "tokens": tokens, "precision": "32-true"}
    return profile(Step(compute), step, policy=resolve_policy(None), **options)


def by_mask(layer: nn.Module, x: torch.Tensor, index: torch.Tensor) -> Any:
    return layer(x[(index == 1).any(-1)])


def by_where(layer: nn.Module, x: torch.Tensor, index: torch.Tensor) -> Any:
    return layer(x[torch.where(index == 1)[0]])


def by_hits(layer: nn.Module, x: torch.Tensor, index: torch.Tensor) -> Any:
    hits = F.one_hot(index, EXPERTS).permute(2, 1, 0)
    for expert in (hits.sum((-1, -2)) > 0).nonzero()[:1, 0]:
        return layer(x[torch.where(hits[expert])[1]])


def by_counts(layer: nn.Module, x: torch.Tensor, index: torch.Tensor) -> Any:
    flat = index.flatten()
    rows = x[flat.argsort() // CHOSEN]
    return layer(rows.split(torch.bincount(flat, minlength=EXPERTS).tolist())[1])


def by_histogram(layer: nn.Module, x: torch.Tensor, index: torch.Tensor) -> Any:
    counts = torch.histc(index.float(), EXPERTS, 0, EXPERTS - 1).int()
    return layer(x[: int(counts.cumsum(0)[0])])


def by_scatter(layer: nn.Module, x: torch.Tensor, index: torch.Tensor) -> Any:
    table = torch.zeros(index.shape[0], EXPERTS, dtype=torch.bool).scatter_(1, index, True)
    return layer(x[table[:, 2].nonzero().squeeze(-1)])


def by_index(layer: nn.Module, x: torch.Tensor, index: torch.Tensor) -> Any:
    rows = torch.where(index == 1)[0]
    torch.zeros_like(x).index_add_(0, rows, x[rows])
    return layer(x[: int((rows >= 0).sum())])  # known as before


@pytest.mark.parametrize(
    "select", [by_mask, by_where, by_hits, by_counts, by_histogram, by_scatter, by_index]
)
def test_each_expert_has_as_many_tokens_however_a_model_finds_them(
    select: Callable[..., Any],
) -> None:
    found = traced(lambda layer, x, scores: select(layer, x, scores.topk(CHOSEN)[1]))
    assert found.total.matmul_flops == 2 * ROWS * WIDTH * WIDTH
    assert (found.is_routed, found.is_even) == (True, True)


def test_it_is_known_whether_tokens_can_be_spread_without_a_rest() -> None:
    found = traced(lambda layer, x, scores: by_where(layer, x, scores.topk(CHOSEN)[1]), tokens=5)
    assert (found.is_routed, found.is_even) == (True, False)


def test_scores_that_nobody_reads_choices_of_are_no_router() -> None:
    found = traced(lambda layer, x, scores: layer(x) + scores.argmax(-1, keepdim=True))
    assert not found.is_routed


def test_grouped_products_are_counted_as_the_products_of_all_rows() -> None:
    weights = torch.nn.Parameter(torch.empty(EXPERTS, WIDTH, 12))

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * ROWS
            return F.grouped_mm(x, self.weights, offs=ends)

    found = profile(
        Grouped(),
        lambda module, samples: module(torch.empty(EXPERTS * ROWS, WIDTH)),
        policy=resolve_policy(None),
        precision="32-true",
        micro_batch=1,
        tokens=1,
    )
    assert found.total.matmul_flops == 2 * EXPERTS * ROWS * WIDTH * 12


def above(layer: nn.Module, x: torch.Tensor, scores: torch.Tensor) -> Any:
    return layer(x[scores[:, 0] > 0.5])


def overwritten(layer: nn.Module, x: torch.Tensor, scores: torch.Tensor) -> Any:
    count = torch.zeros(2, dtype=torch.long)
    count[:1] += scores.long().sum()  # through a view
    return layer(x[: int(count[0])])


def drawn(layer: nn.Module, x: torch.Tensor, scores: torch.Tensor) -> Any:
    return layer(x[: int(torch.zeros(2, dtype=torch.long).random_(5)[0])])


@pytest.mark.parametrize("compute", [above, overwritten, drawn])
def test_shapes_that_depend_on_data_in_another_way_are_an_error(
    compute: Callable[..., Any],
) -> None:
    with pytest.raises(ConfigurationError, match="does not run without values"):
        traced(compute)


def until_found(layer: nn.Module, x: torch.Tensor, scores: torch.Tensor) -> Any:
    while not (scores > 0).all():
        scores = scores + 1
    return layer(x).sum()


def logged(layer: nn.Module, x: torch.Tensor, scores: torch.Tensor) -> Any:
    for _ in range(60):
        assert not scores.isnan().any()
        scores.mean().item()
    return layer(x).sum()


def test_a_loop_that_ends_by_unknown_values_is_an_error_that_names_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values, "MOST_READ", 60)
    line = until_found.__code__.co_firstlineno + 1
    with pytest.raises(ConfigurationError, match=rf"line {line} of .*test_values.py has read more"):
        traced(until_found)
    assert traced(logged).total.kernels > 60
