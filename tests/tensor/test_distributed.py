"""A rank's part of a parameter has the shape that its distribution says."""

import pytest
import torch
from torch import nn

from shardeddp.plan.layout import whole_of
from shardeddp.tensor.distributed import Distribution, local_part


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_the_expert_s_rank_has_all_of_a_parameter_and_others_have_nothing(
    shape: tuple[int, ...],
) -> None:
    parameter = nn.Parameter(torch.rand(shape))
    boxes = ((whole_of(shape),), ())
    for rank, part in enumerate((torch.Size(shape), torch.Size((0,)))):
        distribution = Distribution(
            shape=parameter.shape, boxes=boxes, part=part, of_experts=True, layer=None
        )
        local = local_part(parameter, distribution, rank)
        assert local.shape == part
        assert torch.equal(local, parameter if rank == 0 else torch.empty(0))
