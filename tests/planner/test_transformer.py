"""The planner's decoder computes what it says, and its work is that of the kernels that others run."""

from dataclasses import replace

import pytest
import torch

from shardeddp.errors import UsageError
from shardeddp.planner.trace import profile
from shardeddp.planner.transformer import Decoder, Dimensions
from shardeddp.planner.work import ModelProfile
from shardeddp.wrap import resolve_policy

LENGTH = 16
DIMENSIONS = Dimensions(layers=2, width=64, heads=4, vocabulary=96, rope=False)


def profile_of(dimensions: Dimensions, micro_batch: int = 2) -> ModelProfile:
    with torch.device("meta"):
        module = Decoder(dimensions, LENGTH)
    return profile(
        module,
        lambda model, samples: model(torch.empty(samples, LENGTH, dtype=torch.long)),
        policy=resolve_policy("auto"),
        precision="bf16-true",
        micro_batch=micro_batch,
        tokens=micro_batch * LENGTH,
    )


def test_a_fused_loss_has_the_value_and_the_gradients_of_cross_entropy() -> None:
    torch.manual_seed(0)
    plain = Decoder(DIMENSIONS, LENGTH).double()
    fused = Decoder(replace(DIMENSIONS, fused_loss=True), LENGTH).double()
    fused.load_state_dict(plain.state_dict())
    tokens = torch.randint(96, (3, LENGTH))
    losses = [model(tokens) for model in (plain, fused)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0, check_dtype=False)
    for loss in losses:
        loss.backward()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-9)


def test_a_fused_loss_reads_and_keeps_logits_of_the_compute_dtype_only() -> None:
    plain, fused = (
        profile_of(replace(DIMENSIONS, vocabulary=8192, fused_loss=each)) for each in (False, True)
    )
    logits_nbytes = 2 * LENGTH * 8192 * 2
    assert fused.inner == plain.inner
    saved = plain.total.moved_nbytes - fused.total.moved_nbytes
    # A copy in float32 is written and read, and so are its logarithms.
    assert 5 * logits_nbytes < saved < 7 * logits_nbytes


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("rope", [False, True])
def test_attention_without_a_fused_kernel_attends_to_values_of_its_own_head_and_sample(
    kv_heads: int | None, rope: bool
) -> None:
    torch.manual_seed(0)
    dimensions = replace(DIMENSIONS, fused_attention=False, kv_heads=kv_heads, rope=rope)
    attention = Decoder(dimensions, LENGTH).blocks[0].get_submodule("attention").eval()
    x = torch.randn(LENGTH, 3, 64, requires_grad=True)
    angles = torch.ones(LENGTH, 8, dtype=torch.complex64) if rope else None
    # All weights of attention are equal if queries are zero: every token gets the mean of the values.
    group = 4 // (kv_heads or 4)
    rows = attention.qkv.weight.data.view(-1, group + 2, 16, 64)
    rows[:, :group] = 0
    with torch.no_grad():
        attention.out.weight.copy_(torch.eye(64))
    values = torch.einsum("lbw,ghw->lbgh", x, rows[:, -1]).repeat_interleave(group, 2).flatten(2)
    # Dropout changes a mean of many calls by a few thousandths.
    found = torch.stack([attention(x, angles) for _ in range(400)]).mean(0)
    torch.testing.assert_close(found, values.mean(0).expand_as(found), rtol=0, atol=0.02)


def test_attention_without_a_fused_kernel_has_as_many_kernels_for_one_sample_as_for_several() -> (
    None
):
    unfused = replace(DIMENSIONS, fused_attention=False)
    one, four = (profile_of(unfused, micro_batch).inner for micro_batch in (1, 4))
    assert one.kernels == four.kernels
    assert 4 * one.moved_nbytes == pytest.approx(four.moved_nbytes, rel=0.02)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (4, None, 8), (6, 3, 10)])
def test_heads_may_have_another_width_than_the_width_divided_by_them(
    heads: int, kv_heads: int | None, head_dim: int, fused: bool
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "fused_attention": fused}
    for rope in (True, False):
        found = profile_of(replace(DIMENSIONS, **sizes, rope=rope))
        (qkv,) = {it.parameters[2].parameter.shape[0] for it in found.units[1:]}
        assert qkv == (heads + 2 * (kv_heads or heads)) * head_dim


@pytest.mark.parametrize("sizes", [{"width": 36}, {"head_dim": 7}])
def test_an_odd_width_of_a_head_is_refused_with_rotary_embeddings(sizes: dict[str, int]) -> None:
    replace(DIMENSIONS, **sizes)
    with pytest.raises(UsageError, match="features: rotary position embeddings turn pairs"):
        replace(DIMENSIONS, **sizes, rope=True)
