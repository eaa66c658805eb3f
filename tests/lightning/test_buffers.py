"""Buffers of all kinds beside those of DDP, which has to be told not to broadcast what it cannot."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardeddp import ShardedDP
from support.parity import Run, assert_same_training
from support.tasks import TinyGpt, token_loader
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)


class Mixes(nn.Module):
    """Multiplies by what its buffer says."""

    def __init__(self, matrix: Tensor, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix, persistent)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        matrix = self.matrix
        if matrix.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
            return x + torch.sparse.mm(matrix, x.flatten(0, 1).T).T.view(x.shape)
        if matrix.is_nested:
            return x + torch.stack([row.sum() for row in matrix.unbind()])
        if matrix.is_quantized:
            matrix = matrix.dequantize()
        return x + x @ matrix.to(x)


def cycle() -> Tensor:
    return torch.eye(8).roll(1, 0)


MATRICES: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: cycle().to_sparse(),
    "csr": lambda: cycle().to_sparse_csr(),
    "expanded": lambda: torch.ones(8, 1).expand(8, 8),
    "transposed": lambda: cycle().t(),
    "quantized": lambda: torch.quantize_per_tensor(cycle(), 0.1, 0, torch.qint8),
    "eight bits": lambda: cycle().to(torch.float8_e4m3fn),
    "boolean": lambda: cycle().bool(),
    "empty": lambda: torch.zeros(0),
}


class HasABuffer(TinyGpt):
    """One more block with a buffer.

    Args:
        kind: Of the buffer.
        persistent: Whether it is saved.
    """

    def __init__(self, kind: str, persistent: bool = False) -> None:
        super().__init__()
        self.blocks.append(Mixes(cycle() if kind == "empty" else MATRICES[kind](), persistent))
        if kind == "empty":
            self.register_buffer("empty", MATRICES["empty"]())


class Saves(HasABuffer):
    """Has the buffer elsewhere in its checkpoints as well."""

    def __init__(self, buffer: str, persistent: bool) -> None:
        super().__init__(buffer, persistent)
        self.save_hyperparameters(ignore=["buffer", "persistent"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = [self.blocks[-1].matrix]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        [self.loaded] = checkpoint["own"]


def dense(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.to_dense().double() for name, tensor in state.items()}


def same(run: Run, world: Worlds, ranks: int, options: dict[str, Any]) -> None:
    assert_same_training(world(ranks).run(run.sharded_by, options), world(ranks).run(run.under_ddp))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *((kind, "full_shard") for kind in MATRICES),
        *(("coo", strategy) for strategy in ("shard_grad_op", "shard_optimizer", "no_shard")),
        ("coo", "hybrid_shard"),
    ],
)
def test_buffers_of_every_kind_train_as_under_ddp(world: Worlds, kind: str, strategy: str) -> None:
    run = Run(
        model=partial(HasABuffer, kind),
        loader=token_loader,
        ddp={"broadcast_buffers": False},
        warns="Sparse|.*torch.ao|.*quant|.*broadcast_buffers",
    )
    hybrid = strategy == "hybrid_shard"
    options = {"sharding_strategy": strategy, **({"shard_size": 2} if hybrid else {})}
    same(run, world, 4 if hybrid else 2, options)


def save_and_load(buffer: str, path: str, kind: str) -> None:
    warnings.filterwarnings("ignore", "Sparse CSR")
    trainer = make_trainer(ShardedDP(state_dict_type=kind), max_steps=2)
    first = Saves(buffer, persistent=True)
    trainer.fit(first, token_loader(16))
    trainer.save_checkpoint(path)
    again = Saves(buffer, persistent=True)
    make_trainer(ShardedDP(), max_steps=2).fit(again, token_loader(16), ckpt_path=path)
    assert_same_weights(dense(full_weights(again)), dense(full_weights(first)))
    assert torch.equal(again.loaded.to_dense(), first.blocks[-1].matrix.to_dense())
    twin = Saves.load_from_checkpoint(path, buffer=buffer, persistent=True)
    assert_same_weights(dense(twin.state_dict()), dense(full_weights(first)))


@pytest.mark.slow
@pytest.mark.parametrize("buffer", ["coo", "csr", "eight bits", "boolean", "empty"])
@pytest.mark.parametrize("kind", ["auto", "sharded"])
def test_buffers_of_every_kind_are_saved_and_loaded(
    world: Worlds, tmp_path: Path, buffer: str, kind: str
) -> None:
    world(2).run(save_and_load, buffer, str(tmp_path / "saved"), kind)
