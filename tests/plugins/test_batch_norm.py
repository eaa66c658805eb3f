"""SyncBatchNorm on the host: what one process computes on the batches of all ranks, which torch has on devices only."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from shardeddp.plugins.batch_norm import HostSyncBatchNorm, synchronize_on_host
from support.parity import Run
from support.tasks import ConvBlock, TinyConvNet, image_loader
from support.trainers import assert_same_weights
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)

CASES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, ()),
    ({}, (5,)),
    ({"momentum": None}, (4, 3)),
    ({"affine": False}, (2, 3, 2)),
    ({"track_running_stats": False}, (4, 3)),
]


def synchronized(channels: int, **options: Any) -> nn.Module:
    model = nn.Sequential(nn.SyncBatchNorm(channels, **options))
    synchronize_on_host(model)
    return model[0]


def batches(step: int, sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[Tensor]:
    """One per rank; far from zero, where squares say little of the variance."""
    generator = torch.Generator().manual_seed(step)
    return [50 + torch.randn(size, 3, *shape, generator=generator) for size in sizes]


@pytest.mark.parametrize("sizes", [(4, 4), (3, 6), (0, 5)])
@on_ranks(2)
def test_values_gradients_and_running_statistics_are_those_of_one_process(sizes: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    for options, shape in CASES:
        ours, whole = synchronized(3, **options), nn.BatchNorm2d(3, **options)
        whole._check_input_dim = lambda input: None  # type: ignore[method-assign]  # of any dimension
        assert isinstance(ours, HostSyncBatchNorm)
        ours.load_state_dict(whole.state_dict())
        for step in range(3):
            inputs = batches(step, sizes, shape)
            mine, everybodys = inputs[rank].requires_grad_(), torch.cat([each.detach() for each in inputs])
            everybodys.requires_grad_()
            found, expected = ours(mine), whole(everybodys)
            torch.testing.assert_close(found, expected.split(sizes)[rank], rtol=1e-4, atol=1e-4)
            weights = torch.linspace(0, 1, expected.numel()).view_as(expected).square()
            (found * weights.split(sizes)[rank]).sum().backward()
            (expected * weights).sum().backward()
            torch.testing.assert_close(mine.grad, everybodys.grad.split(sizes)[rank], rtol=1e-3, atol=1e-4)
        for buffer, reference in zip(ours.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(buffer, reference, rtol=1e-5, atol=1e-5)
        for parameter, reference in zip(ours.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-3, atol=1e-3)


@on_ranks(2)
def test_evaluation_takes_the_running_statistics_and_no_other_rank() -> None:
    layer = synchronized(3).eval()
    if dist.get_rank() == 0:
        torch.testing.assert_close(layer(torch.ones(2, 3)), torch.ones(2, 3), rtol=1e-4, atol=0)


@on_ranks(2)
def test_a_single_value_per_channel_is_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match=r"found 1, with an input of \(., 3\)"):
        synchronized(3)(torch.ones(dist.get_rank(), 3))


def images_in_order(num_samples: int, batch_size: int = 4) -> DataLoader[Any]:
    """Not shuffled: a step's samples are the same over any number of ranks."""
    images = image_loader(num_samples).dataset
    return DataLoader(images, batch_size, sampler=DistributedSampler(images, shuffle=False))


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_training_with_sync_batchnorm_is_that_of_one_process(world: Worlds, strategy: str) -> None:
    run = Run(model=TinyConvNet, loader=images_in_order, batches=6, options={"sync_batchnorm": True})
    found = world(2).run(run.sharded_by, {"sharding_strategy": strategy, "auto_wrap_policy": {ConvBlock}})
    alone = world(1).run(run.alone, 2)[0]
    means = [sum(losses) / 2 for losses in zip(*(trained.losses for trained in found), strict=True)]
    torch.testing.assert_close(means, alone.losses, rtol=1e-5, atol=0)
    for trained in found:
        assert_same_weights(trained.weights, alone.weights, rtol=1e-5)
