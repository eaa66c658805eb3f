"""Compiled units compute what eager ones do, in one graph per kind of unit."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from support.compiling import (
    WAYS,
    Block,
    CompiledSharding,
    Stack,
    fresh_compiler,
    in_place,
    not_at_all,
    trial,
)
from training import RUNTIMES, WIDTH, Trial, another_order, batch, close, square
from world import on_ranks

pytestmark = pytest.mark.timeout(120)


class CheckpointedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.mlp, x, use_reentrant=False)


# -- one graph per block


@pytest.mark.slow
@pytest.mark.parametrize("strategy", RUNTIMES)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_compiled_blocks_train_as_eager_ones_and_share_one_graph(way: str, strategy: str) -> None:
    with fresh_compiler() as backend:
        trial(backend, strategy=strategy, before=WAYS[way]).train(square, steps=4)
    assert backend.frame_count == 1, (
        "one whole graph (fullgraph) for three equal blocks and four steps"
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("way", "strategy"), [("in place", "full_shard"), ("wrapped", "no_shard")])
@on_ranks(2)
def test_blocks_train_with_inductor(way: str, strategy: str) -> None:
    with fresh_compiler("inductor") as backend:
        trial(backend, strategy=strategy, before=WAYS[way]).train(square)
    assert backend.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@on_ranks(4)
def test_compiled_blocks_train_in_replicas(way: str) -> None:
    with fresh_compiler() as backend:
        sharding = CompiledSharding(
            strategy="hybrid_shard",
            shard_size=2,
            units=("blocks.*",),
            backend=backend,
            before=WAYS[way],
        )
        Trial(Stack(), sharding).train(square)
    assert backend.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_blocks_may_be_compiled_after_sharding(way: str) -> None:
    with fresh_compiler() as backend:
        trial(backend, after=WAYS[way]).train(square)
    assert backend.frame_count == 1


@pytest.mark.slow
@on_ranks(2)
def test_a_block_may_be_compiled_anew_or_no_more_between_steps() -> None:
    with fresh_compiler() as backend:
        model = Stack()
        run = trial(backend, before=in_place, model=model)
        run.train(square, steps=1)
        another = CompileCounterWithBackend("aot_eager")
        in_place(model, another)
        run.train(square, steps=1)
        for block in model.blocks:
            block._compiled_call_impl = None
        run.train(square, steps=1)
    assert (backend.frame_count, another.frame_count) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("block", [nn.TransformerEncoderLayer, nn.Sequential])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_blocks_of_torchs_own_classes_are_compiled(way: str, block: type[nn.Module]) -> None:
    def make() -> nn.Module:
        if block is nn.Sequential:
            return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0)

    with fresh_compiler() as backend:
        trial(backend, before=WAYS[way], model=Stack(make)).train(square)
    assert backend.frame_count == 1


# -- what a compiled unit meets


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_evaluation_and_other_batch_sizes_compile_once_each(way: str) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, (4, 4, 3, 5, 6)[step], WIDTH)).pow(2).mean()

    with fresh_compiler() as backend:
        run = trial(backend, before=WAYS[way])
        run.train(loss, steps=5)
        assert backend.frame_count == 2, "one graph for the first size and one for all others"
        for step in range(5):
            with torch.no_grad():
                close(run.forward(loss, step), run.forward(loss, step), "evaluation")
        graphs = backend.frame_count
        run.train(loss, steps=5)
        run.check_rest()
    assert backend.frame_count == graphs <= 4


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_activations_may_be_recomputed_inside_of_a_compiled_unit(way: str) -> None:
    with fresh_compiler() as backend:
        trial(backend, before=WAYS[way], model=Stack(CheckpointedBlock)).train(square)
    assert backend.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_compiled_units_may_be_recomputed(way: str, use_reentrant: bool) -> None:
    model = Stack()

    def recomputed(block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=use_reentrant)

    model.call = recomputed
    with fresh_compiler() as backend:
        trial(backend, before=WAYS[way], model=model).train(square)
    assert backend.frame_count <= 2  # reentrant checkpointing runs it without gradients first


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_frozen_parameters_in_compiled_units(way: str) -> None:
    model = Stack()
    for block in model.blocks:
        block.up.requires_grad_(False)
    with fresh_compiler() as backend:
        trial(backend, before=WAYS[way], model=model).train(square)
    assert backend.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_compiled_unit_may_run_twice_in_a_forward(way: str) -> None:
    model = Stack()
    model.call = lambda block, x: block(block(x))
    with fresh_compiler() as backend:
        trial(backend, before=WAYS[way], model=model).train(square)
    assert backend.frame_count == 1


@pytest.mark.loop(1)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_compiled_unit_under_autocast_equals_an_eager_one(way: str) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch(rank, step, 4, WIDTH)).float().pow(2).mean()

    with fresh_compiler() as backend:
        runs = [trial(backend, before=before) for before in (WAYS[way], not_at_all)]
        for step in range(3):
            compiled, eager = (run.forward(loss, step) for run in runs)
            # bf16 keeps 8 bits; the compiler may leave out a rounding to it between two operations.
            torch.testing.assert_close(compiled, eager, rtol=2**-7, atol=0)
            for run, result in zip(runs, (compiled, eager), strict=True):
                result.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
    assert backend.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_forward_that_fails_inside_of_compiled_code_leaves_no_unit_behind(way: str) -> None:
    def too_wide(model: Any, rank: int, step: int) -> torch.Tensor:
        return model.blocks[0](batch(rank, step, 4, WIDTH + 1)).sum()

    with fresh_compiler() as backend:
        run = trial(backend, before=WAYS[way])
        with pytest.raises(Exception, match=r"shape|size|normalized"):
            run.forward(too_wide)
        run.check_rest()
        with another_order():  # the failed forward was the first
            run.train(square)
