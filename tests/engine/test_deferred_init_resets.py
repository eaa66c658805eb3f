"""Resets of layers after they were sharded: the values of one process with the same seed, the same on all ranks."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shards import check_same, make_mesh, shard, whole
from training import Sharding
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(90)

INITIALIZERS: dict[str, Callable[[Tensor], Any]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "truncated": nn.init.trunc_normal_,
    "constant": lambda p: nn.init.constant_(p, 0.3),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "eye": lambda p: nn.init.eye_(p) if p.ndim == 2 else p,
    "dirac": lambda p: nn.init.dirac_(p) if p.ndim > 2 else p,
    "xavier uniform": lambda p: nn.init.xavier_uniform_(p, gain=2.0) if p.ndim > 1 else p,
    "xavier normal": lambda p: nn.init.xavier_normal_(p) if p.ndim > 1 else p,
    "kaiming uniform": lambda p: nn.init.kaiming_uniform_(p, mode="fan_out") if p.ndim > 1 else p,
    "kaiming normal": lambda p: nn.init.kaiming_normal_(p) if p.ndim > 1 else p,
    "orthogonal": lambda p: nn.init.orthogonal_(p) if p.ndim > 1 else p,
    "sparse": lambda p: nn.init.sparse_(p, 0.4) if p.ndim == 2 else p,
    "with a generator": lambda p: nn.init.normal_(p, generator=torch.Generator().manual_seed(3)),
    "of a row": lambda p: nn.init.uniform_(p.data[0]) if p.ndim else p,
    "of columns": lambda p: nn.init.xavier_normal_(p.data[:, 1:3]) if p.ndim == 2 else p,
    "of blocks": lambda p: (
        [nn.init.orthogonal_(part) for part in p.data.chunk(2)] if p.ndim == 2 else p
    ),
}


def initialize(size: int) -> None:
    for name, function in INITIALIZERS.items():
        values = {
            "matrix": torch.zeros(6, 5),
            "bias": torch.zeros(5),
            "kernel": torch.zeros(3, 2, 3),
            "one": torch.ones(()),
        }
        for pair in shard(make_mesh(size), values).values():
            states: list[Tensor] = []
            for parameter in (pair.sharded, pair.plain):
                torch.manual_seed(5)
                function(parameter)
                states.append(torch.get_rng_state())
            check_same(pair.sharded, pair.plain, f"{name} of {pair.name}")
            assert torch.equal(*states), f"{name} of {pair.name} draws other numbers"
            assert pair.sharded.is_leaf
            assert pair.sharded.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (3, 3), (2, 1), (4, 2)])
def test_initializers_draw_what_they_draw_in_one_process(
    world: Worlds, ranks: int, size: int
) -> None:
    world(ranks).run(initialize, size)


def layers() -> Iterator[nn.Module]:
    yield nn.Linear(3, 4)
    yield nn.Bilinear(2, 3, 4)
    yield nn.Embedding(5, 3, padding_idx=1)
    yield nn.EmbeddingBag(5, 3, padding_idx=2)
    yield nn.Conv1d(2, 4, 3)
    yield nn.ConvTranspose2d(2, 4, 3)
    yield nn.BatchNorm2d(3)
    yield nn.LayerNorm(4)
    yield nn.GroupNorm(2, 4)
    yield nn.RMSNorm(4)
    yield nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    yield nn.PReLU(3)
    yield nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    yield nn.GRUCell(3, 4)
    yield nn.MultiheadAttention(4, 2, kdim=3, vdim=3)
    yield nn.Transformer(4, 2, 1, 1, 8, batch_first=True)
    yield nn.AdaptiveLogSoftmaxWithLoss(16, 10, [3, 6])


@torch.no_grad()
def reset(module: nn.Module) -> None:
    torch.manual_seed(5)
    for child in module.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            if hasattr(child, name):
                getattr(child, name)()


def reset_layers() -> None:
    for layer in layers():
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 7.0)
        plain = copy.deepcopy(layer)
        Sharding().apply(layer)
        reset(plain)
        reset(layer)
        for (name, found), expected in zip(
            layer.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            check_same(whole(found), expected, f"{name} of {layer}")


@pytest.mark.slow
def test_layers_reset_themselves_as_in_one_process(world: Worlds) -> None:
    world(2).run(reset_layers)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@on_ranks(2)
def test_where_the_generators_of_ranks_differ_all_have_what_rank_zero_draws(size: int) -> None:
    pair = shard(make_mesh(size), {"weight": torch.zeros(6, 5)})["weight"]
    draws: list[Callable[[Tensor], Any]] = [
        nn.init.normal_,
        nn.init.kaiming_uniform_,
        nn.init.trunc_normal_,
        lambda p: p.data[1:3].uniform_(),
        lambda p: p.data.view(-1).bernoulli_(0.5),
    ]
    for draw in draws:
        torch.manual_seed(0)
        draw(pair.plain)
        torch.manual_seed(dist.get_rank())
        draw(pair.sharded)
        check_same(pair.sharded, pair.plain, "drawn")
