"""Compiled code around units keeps their hooks, and compiled code of units keeps no gathered memory."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from support.compiling import (
    WAYS,
    Block,
    Stack,
    fresh_compiler,
    in_place,
    not_at_all,
    trial,
    wrapped,
)
from training import WIDTH, Sharding, Trial, batch, close, square
from world import on_ranks

pytestmark = pytest.mark.timeout(120)


# -- compiled code around units


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("inner", ["not at all", *WAYS])
@on_ranks(2)
def test_code_that_is_compiled_around_units_leaves_them_their_hooks(
    inner: str, strategy: str
) -> None:
    # A unit that was left out would be used sharded: a warning, which is an error here, or a crash of the compiler.
    with fresh_compiler() as backend:
        run = trial(backend, strategy=strategy, before={"not at all": not_at_all, **WAYS}[inner])
        compiled = torch.compile(square_of, backend=backend)

        def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            return (compiled if model is run.model else square_of)(
                model, batch(rank, step, 4, WIDTH)
            )

        run.train(loss, steps=4)
        graphs = backend.frame_count
        run.train(loss, steps=2)
    assert 1 <= graphs == backend.frame_count


def square_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


@pytest.mark.slow
@on_ranks(2)
def test_a_unit_between_plain_layers_in_compiled_code_splits_it_in_two() -> None:
    with fresh_compiler() as backend:
        run = trial(backend, model=Stack(count=1))

        def straight(model: Any, x: torch.Tensor) -> torch.Tensor:
            return model.head(model.blocks[0](model.stem(x))).pow(2).mean()

        compiled = torch.compile(straight, backend=backend)

        def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            return (compiled if model is run.model else straight)(
                model, batch(rank, step, 4, WIDTH)
            )

        run.train(loss)
    assert backend.frame_count == 3, "before the unit, the unit, and behind it"


@pytest.mark.loop(1)
@pytest.mark.parametrize("inner", ["not at all", *WAYS])
@on_ranks(2)
def test_a_unit_inside_of_a_whole_graph_is_refused_with_the_reason(inner: str) -> None:
    def first_block(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.blocks[0](x).pow(2).mean()

    with fresh_compiler() as backend:
        run = trial(backend, before={"not at all": not_at_all, **WAYS}[inner])
        compiled = torch.compile(first_block, backend=backend, fullgraph=True)

        def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            return compiled(model, batch(rank, step, 4, WIDTH))

        # Not that a sharded parameter is in the way: its unit has been asked.
        reason = (
            "Optimized `nn.Module` is wrapped with"
            if inner == "wrapped"
            else "a unit of ShardedDP begins or ends"
        )
        with pytest.raises(Exception, match=re.escape(reason)):
            run.forward(loss)
        run.train(square, steps=1)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_code_that_reads_a_sharded_parameter_leaves_the_gather_to_eager_code() -> None:
    def penalized(model: Any, x: torch.Tensor) -> torch.Tensor:
        weight = model.blocks[0].up.weight
        return square_of(model, x) + weight.pow(2).sum() / weight.shape[0]

    with fresh_compiler() as backend:
        warnings.filterwarnings("ignore", "parameter .* is used outside the forward")
        run = trial(backend)
        compiled = torch.compile(penalized, backend=backend)

        def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            return (compiled if model is run.model else penalized)(
                model, batch(rank, step, 4, WIDTH)
            )

        def eager_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            return penalized(model, batch(rank, step, 4, WIDTH))

        run.train(loss)
        with torch.no_grad():
            close(run.forward(loss, 3), run.forward(eager_loss, 3), "loss")


@pytest.mark.slow
@on_ranks(2)
def test_a_model_of_one_unit_is_one_graph() -> None:
    with fresh_compiler() as backend:
        model = Stack()
        run = Trial(model, Sharding())
        model.compile(backend=backend, fullgraph=True)
        run.train(square)
    assert backend.frame_count == 1


# -- memory


def gathered_bytes(run: Trial) -> list[int]:
    flats = [
        [group.buffer.flat for group in progress.unit.groups] for progress in run.runtime.progresses
    ]
    return [sum(0 if flat is None else flat.nbytes for flat in each) for each in flats]


def saved_bytes(loss: torch.Tensor) -> int:
    """Bytes that the graph of a loss keeps alive for its backward."""
    storages: dict[int, int] = {}
    pending, seen = [loss.grad_fn], set[object]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved += getattr(node, "saved_tensors", ())
        for tensor in saved:
            if isinstance(tensor, torch.Tensor):
                with torch._C.DisableTorchFunctionSubclass():
                    storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("way", "backend"), [("in place", "inductor"), ("wrapped", "aot_eager")])
@on_ranks(2)
def test_nothing_of_a_gathered_buffer_lives_between_forward_and_backward(
    way: str, backend: str
) -> None:
    with fresh_compiler(backend) as compiler:
        compiled, eager = (trial(compiler, before=before) for before in (WAYS[way], not_at_all))
        for run in (compiled, eager):
            run.train(square, steps=1)  # learns the order of units
        loss, eager_loss = (run.forward(square) for run in (compiled, eager))
        assert gathered_bytes(compiled)[1:-1] == [0, 0]  # the last unit begins the backward
        assert gathered_bytes(compiled) == gathered_bytes(eager)
        assert 0 < saved_bytes(loss) <= saved_bytes(eager_loss)
        loss.backward()
        eager_loss.backward()
        assert gathered_bytes(compiled) == [0, 0, 0, 0]


@pytest.mark.loop(1)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_parameter_that_was_kept_from_a_compiled_forward_raises(way: str) -> None:
    kept: list[torch.Tensor] = []

    def append(parameter: torch.Tensor) -> None:
        kept.append(parameter)

    keep: Any = torch.compiler.disable(append)

    class Keeping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep(self.up.weight)
            return super().forward(x)

    def unbroken(model: Stack, backend: CompileCounterWithBackend) -> None:
        (in_place if way == "in place" else wrapped)(model, backend, fullgraph=False)

    with fresh_compiler() as backend:
        run = trial(backend, before=unbroken, model=Stack(Keeping, count=2))
        run.forward(square).backward()
        assert len(kept) == 2
        with torch.no_grad():
            close(
                kept[0].sum(),
                run.reference.get_parameter("blocks.0.up.weight").sum(),
                "what was kept",
            )


@pytest.mark.slow
@on_ranks(2)
def test_a_deep_copy_of_a_model_with_compiled_units_computes_for_itself() -> None:
    with fresh_compiler() as backend:
        run = trial(backend, before=in_place)
        expected = run.forward(square)
        duplicate = copy.deepcopy(run.model)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its parameters are sharded, and gathered one by one
            close(square(duplicate, dist.get_rank(), 0), expected, "copy")
        expected.backward()
        run.check_rest()
        run.model.zero_grad()
        run.train(square)
