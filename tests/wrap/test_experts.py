"""Which modules hold experts, and what each rank keeps of them."""

import pytest
import torch
from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.tensor.parallel_styles import TensorAxis
from shardeddp.wrap import ClassPolicy, NamePolicy
from shardeddp.wrap.experts import ChosenUnits, find_experts, keep_own


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.arange(24.0).view(4, 3, 2))
        self.bias = nn.Parameter(torch.arange(8.0).view(4, 2))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        return hidden_states


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.stack = nn.Linear(2, 2), Stacked()
        self.listed = nn.ModuleList([nn.Bilinear(2, 2, 2) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def axis(rank: int, size: int = 2) -> TensorAxis:
    return TensorAxis("", rank, size)


def test_experts_of_transformers_are_found_by_themselves() -> None:
    (found,) = find_experts(nn.Sequential(Block()), None, 2)
    assert (found.name, found.count, found.stacked) == ("0.stack", 4, True)
    with pytest.raises(ConfigurationError, match="none was found"):
        find_experts(nn.Sequential(nn.Linear(2, 2)), None, 2)


@pytest.mark.parametrize("policy", [ClassPolicy([nn.Bilinear]), NamePolicy(["*.listed.*"])])
def test_members_of_a_list_stand_for_the_list(policy: ClassPolicy | NamePolicy) -> None:
    (found,) = find_experts(nn.Sequential(Block()), policy, 2)
    assert (found.name, found.count, found.stacked) == ("0.listed", 4, False)


def test_a_rank_keeps_rows_of_stacked_experts() -> None:
    root = nn.Sequential(Block())
    split = keep_own(root, find_experts(root, None, 2), axis(1))
    stack = root[0].stack
    assert stack.num_experts == 4  # in its forward 2
    assert torch.equal(stack.weight, torch.arange(12.0, 24.0).view(2, 3, 2))
    assert torch.equal(stack.bias, torch.arange(4.0, 8.0).view(2, 2))
    assert split[stack.weight].shape == (4, 3, 2)
    with pytest.raises(ConfigurationError, match="earlier run"):
        find_experts(root, None, 2)


def test_experts_of_others_have_no_elements_in_a_list_and_are_no_units() -> None:
    root = nn.Sequential(Block())
    experts = find_experts(root, ClassPolicy([nn.Bilinear]), 2)
    units = ChosenUnits(ClassPolicy([nn.Bilinear, nn.Linear]), root, experts)
    split = keep_own(root, experts, axis(0))
    assert [it.weight.numel() for it in root[0].listed] == [8, 8, 0, 0]  # which look stacked
    assert split[root[0].listed[3].weight].boxes[0] == ()
    assert split[root[0].listed[3].weight].boxes[1][0].sizes == (2, 2, 2)
    assert units.select(root) == ["0.attention"]


def test_numbers_of_experts_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="has 4 experts, which expert_parallel_size=3"):
        find_experts(nn.Sequential(Block()), None, 3)
