"""Tokens reach the ranks of their experts, and what experts make of them comes back to the tokens' places."""

import pytest
import torch

from shardeddp import TokenDispatch
from shardeddp.comm.activations import name_group
from shardeddp.tensor.parallel_styles import TensorAxis
from shards import make_mesh
from world import on_ranks

TOKENS, CHOSEN, EXPERTS, FEATURES = 6, 2, 4, 3


def drawn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a rank, and their experts."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS, FEATURES, generator=generator, dtype=torch.float64)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    return tokens, scores.topk(CHOSEN).indices


def test_one_rank_has_all_experts() -> None:
    tokens, index = drawn(0)
    tokens.requires_grad_()
    routed = TokenDispatch(index, EXPERTS)
    arrived = routed.dispatch(tokens)
    assert routed.experts == range(EXPERTS)
    assert routed.counts == torch.bincount(index.view(-1), minlength=EXPERTS).tolist()
    assert torch.equal(routed.index, index.view(-1).sort().values)
    back = routed.combine(arrived * (1 + routed.index.unsqueeze(1)))
    assert torch.equal(back, tokens.unsqueeze(1) * (1 + index.unsqueeze(-1)))
    back.sum().backward()
    assert torch.equal(tokens.grad, (1 + index).sum(1, keepdim=True).expand(-1, FEATURES))


def test_numbers_that_are_no_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="0 to 3, found 4 to 4"):
        TokenDispatch(torch.tensor([[4]]), EXPERTS)
    with pytest.raises(ValueError, match=r"0 to 3, found -1 to 2.* has the weight 0"):
        TokenDispatch(torch.tensor([[-1, 2]]), EXPERTS)
    with pytest.raises(ValueError, match=r"whole numbers of experts.*float32"):
        TokenDispatch(torch.tensor([[1.0]]), EXPERTS)
    routed = TokenDispatch(torch.tensor([[1]]), EXPERTS)
    routed.dispatch(torch.zeros(1, 1))
    with pytest.raises(ValueError, match="rows that dispatch\\(\\) has returned"):
        routed.combine(torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"\(tokens, k\)"):
        TokenDispatch(torch.tensor([1]), EXPERTS)
    with pytest.raises(RuntimeError, match=r"combine\(\) before dispatch"):
        TokenDispatch(torch.tensor([[1]]), EXPERTS).combine(torch.zeros(1, 1))


@on_ranks(2)
def test_experts_of_both_ranks_see_the_tokens_of_both() -> None:
    mesh = make_mesh()
    axis = TensorAxis(name_group(mesh.world), mesh.rank, 2)
    tokens, index = drawn(mesh.rank)
    _, others = drawn(1 - mesh.rank)
    tokens.requires_grad_()
    routed = TokenDispatch(index, EXPERTS, axis)
    assert routed.experts == range(2 * mesh.rank, 2 * mesh.rank + 2)
    chosen = torch.cat([index, others])
    assert routed.counts == [int((chosen == expert).sum()) for expert in routed.experts]
    arrived = routed.dispatch(tokens)
    numbers = routed.index.unsqueeze(1) + routed.experts.start
    back = routed.combine(arrived * (1 + numbers))
    assert torch.equal(back, tokens.unsqueeze(1) * (1 + index.unsqueeze(-1)))
    back.sum().backward()
    assert torch.equal(tokens.grad, (1 + index).sum(1, keepdim=True).expand(-1, FEATURES))


@on_ranks(2)
def test_a_rank_without_tokens_takes_part_in_the_backward_of_the_others() -> None:
    mesh = make_mesh()
    axis = TensorAxis(name_group(mesh.world), mesh.rank, 2)
    weight = torch.ones(FEATURES, requires_grad=True)
    tokens = torch.ones(TOKENS, FEATURES)  # which require no gradient
    routed = TokenDispatch(torch.zeros(TOKENS, 1, dtype=torch.int64), EXPERTS, axis)
    arrived = routed.dispatch(tokens)
    assert len(arrived) == (0 if mesh.rank else 2 * TOKENS)
    out = torch.zeros_like(arrived.detach()) if mesh.rank else arrived * weight
    routed.combine(out).sum().backward()
    expected = None if mesh.rank else torch.full((FEATURES,), 2.0 * TOKENS)
    assert weight.grad is expected or torch.equal(weight.grad, expected)
