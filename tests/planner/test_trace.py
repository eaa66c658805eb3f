"""What a step computes and keeps is counted as GPUs do it."""

import pytest
import torch
from torch import nn

from shardeddp.planner.trace import ModelProfile, profile
from shardeddp.wrap import resolve_policy

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
