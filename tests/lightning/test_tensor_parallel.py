"""Layers split over tensor-parallel ranks train as one process does, under every strategy; the rest is refused."""

import io
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import SumMetric

from shardeddp import ReshardSchedule, ShardedDP, ShardTensor
from shardeddp.errors import ConfigurationError
from shardeddp.lightning import tensor_parallel
from shardeddp.wrap.tensor_plan import find_layers, with_heads_of_configs
from shardeddp_cli import main
from support.tasks import NormalizedDescent
from support.trainers import make_trainer, precision_options
from support.whole_batches import (
    BATCH,
    FEWER_STEPS,
    STEPS,
    STRATEGIES,
    Overflow,
    Regression,
    check_precision,
    data,
    descent_of,
    distance,
    load_run,
    same_bits,
    train_whole,
    whole_state,
)
from world import Worlds, on_ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
SEQUENCE_PLAN = {
    "blocks": ["split_sequence_input", "gather_sequence_output"],
    "blocks.*.norm": "sequence_parallel",
    "blocks.*.up": ["gather_sequence", "colwise"],
    "blocks.*.down": "rowwise_sequence",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Split(Regression):
    """Blocks whose first layer is split by columns and whose second is split by rows."""

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # noqa: RUF012

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(Block() for _ in range(3)))
        self.is_split = False

    def configure_model(self) -> None:
        if self.device_mesh is not None and not self.is_split:
            self.is_split = True
            for block in self.blocks:
                parallelize_module(block, self.device_mesh["tensor_parallel"], self.plan)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.log("count", torch.ones(()), sync_dist=True, reduce_fx="sum")
        return super().training_step(batch)


class Planned(Split):
    """Blocks that the strategy's plan splits."""

    def configure_model(self) -> None:
        pass


class Late(Planned):
    """The same, built when the strategy says so."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks, self.head

    def configure_model(self) -> None:
        if not self.is_split:
            self.is_split = True
            torch.manual_seed(0)
            self.blocks = nn.Sequential(*(Block() for _ in range(3)))
            self.head = nn.Linear(8, 1)


class CompiledBlocks(Planned):
    def configure_model(self) -> None:
        if not self.is_split:
            self.is_split = True
            for block in self.blocks:
                block.compile(backend="aot_eager", fullgraph=True)


class Orthogonal(Planned):
    """Muon on matrices, which it has to see whole, and momentum on the rest."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return orthogonal_optimizers(self)

    def training_step(self, batch: list[torch.Tensor]) -> None:  # type: ignore[override]
        loss = self.loss(batch[0])
        self.log("mean", loss, sync_dist=True)
        self.log("count", torch.ones(()), sync_dist=True, reduce_fx="sum")
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


def orthogonal_optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    every = list(module.parameters())
    return [
        torch.optim.Muon([it for it in every if it.ndim > 1], lr=1e-2),
        torch.optim.SGD([it for it in every if it.ndim <= 1], lr=1e-2, momentum=0.9),
    ]


class SequenceSplit(Split):
    """The same, with activations between blocks split along the sequence."""

    def configure_model(self) -> None:
        if self.device_mesh is None or self.is_split:
            return
        self.is_split = True
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput

        mesh = self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
            parallelize_module(block, mesh, plan)
        whole = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),)}
        parallelize_module(self.blocks, mesh, PrepareModuleInput(**whole, use_local_output=False))
        parallelize_module(
            self.blocks,
            mesh,
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        )


class FusedAttention(nn.Module):
    """Views features as heads by their number, as much code does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


ATTENTION_PLAN = {"attention.qkv": "packed_colwise:3", "attention.out": "rowwise"}


class Attending(Planned):
    """Counts its steps by a metric, as well."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FusedAttention()
        self.steps = SumMetric()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x + self.attention(x))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.steps.update(1.0)
        return super().training_step(batch)


def train(
    name: str,
    size: int,
    clips: str = "norm",
    kind: type[Split] = Split,
    path: str = "",
    trainer_options: dict[str, Any] | None = None,
    empty_init: bool = False,
    steps: int = STEPS,
    **more: Any,
) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """The parameters that ranks have trained together, logged means, and a logged sum."""
    if name == "hybrid_shard":
        more["shard_size"] = max(1, dist.get_world_size() // size // 2)
    more = {"auto_wrap_policy": {Block}, **more}
    strategy = ShardedDP(name, tensor_parallel_size=size, **more)
    trainer = make_trainer(
        strategy,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5 if clips == "norm" else 0.05,
        gradient_clip_algorithm=clips,
        use_distributed_sampler=False,
        **trainer_options or {},
    )
    # Lightning's callback doubts `configure_model`; torch's compiler imports scripted code.
    warnings.simplefilter("ignore")
    with trainer.init_module(empty_init=True) if empty_init else nullcontext():
        module = kind()
    trainer.fit(module)
    count = float(trainer.callback_metrics["count"])
    if path:
        trainer.save_checkpoint(path)
    assert all(isinstance(it, ShardTensor) for it in module.parameters())
    assert module.blocks[0].up.weight.shape == (12, 8)
    # A state dict and a summoned model are whole, and what rank 0 writes to it reaches all ranks.
    state = {key: value.full_tensor() for key, value in module.state_dict().items()}
    saved = whole_state(module, *trainer.optimizers) if path else state
    with strategy.summon_full_params(module):
        for key, whole in module.named_parameters():
            assert torch.equal(whole, state[key])
            if dist.get_rank() == 0:
                whole.data.add_(1)
    for key, value in module.state_dict().items():
        assert torch.equal(value.full_tensor(), state[key] + 1)
    return saved, module.seen, count


def check_as_whole(answers: list[Any], count: float) -> None:
    """Weights, losses and the number of data ranks are those of one process on whole batches.

    Ranks that split layers are counted once.
    """
    expected, losses = train_whole(Split, "norm")
    for found, seen, counted in answers:
        assert distance(found, expected) < 1e-5
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-5
        assert counted == count


def train_all(
    size: int, plan: dict[str, Any] | type[Split], names: tuple[str, ...], steps: int = STEPS
) -> list[Any]:
    """Under each strategy, layers that a plan splits, or a module itself."""
    kind, given = (Planned, plan) if isinstance(plan, dict) else (plan, None)
    return [train(it, size, kind=kind, tensor_parallel_plan=given, steps=steps) for it in names]


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "plan", "names"),
    [
        pytest.param(2, PLAN, STRATEGIES, id="whole sequences"),
        pytest.param(2, SEQUENCE_PLAN, STRATEGIES[:2], id="parts of sequences"),
        pytest.param(2, Split, STRATEGIES, id="by parallelize_module"),
        pytest.param(2, SEQUENCE_PLAN, STRATEGIES[2:], id="the rest", marks=pytest.mark.torture),
        pytest.param(2, SequenceSplit, STRATEGIES, id="parts by it", marks=pytest.mark.torture),
        pytest.param(4, Split, STRATEGIES, id="by it by four", marks=pytest.mark.torture),
        pytest.param(4, PLAN, STRATEGIES, id="whole by four", marks=pytest.mark.torture),
        pytest.param(4, SEQUENCE_PLAN, STRATEGIES, id="parts by four", marks=pytest.mark.torture),
    ],
)
def test_split_layers_train_as_one_process_does_under_every_strategy(
    world: Worlds, size: int, plan: dict[str, Any] | type[Split], names: tuple[str, ...]
) -> None:
    for answers in world(4).run(train_all, size, plan, names):
        check_as_whole(answers, count=4 / size)


@pytest.mark.long
@pytest.mark.torture
@pytest.mark.timeout(360)
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE_PLAN, Split], ids=["whole", "sequences", "it"])
def test_layers_split_by_four_train_with_shards_under_every_strategy(
    world: Worlds, plan: dict[str, Any] | type[Split]
) -> None:
    for answers in world(8).run(train_all, 4, plan, STRATEGIES, timeout_s=300):
        check_as_whole(answers, count=2)


@pytest.mark.long
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE_PLAN], ids=["whole", "sequences"])
def test_replicas_of_shards_of_split_layers_train_alike_to_the_bit(
    world: Worlds, plan: dict[str, Any]
) -> None:
    run = partial(train, "hybrid_shard", 2, kind=Planned, tensor_parallel_plan=plan)
    (first, *_), *_ = world(8).run(run)
    answers = world(8).run(run)
    check_as_whole(answers, count=4)
    for found, *_ in answers:
        assert same_bits(found, first)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "size"), [(4, 2), (4, 4), pytest.param(8, 4, marks=pytest.mark.torture)]
)
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE_PLAN, Split], ids=["whole", "sequences", "module"])
def test_ranks_that_split_layers_repeat_a_training_to_the_bit(
    world: Worlds, ranks: int, size: int, plan: dict[str, Any] | type[Split]
) -> None:
    run = partial(train_all, size, plan, STRATEGIES, FEWER_STEPS)
    first, *_ = world(ranks).run(run)
    for answers in world(ranks).run(run):
        for (found, seen, _), (former, losses, _) in zip(answers, first, strict=True):
            assert same_bits(found, former) and seen == losses


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Documented(LightningModule):
    """The example of ``ModelParallelStrategy`` in Lightning's documentation ("2D parallelism"), smaller."""

    shards = True

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.model = FeedForward(8, 12)
        self.batches: list[torch.Tensor] = []

    def configure_model(self) -> None:
        tp_mesh = self.device_mesh["tensor_parallel"]
        dp_mesh = self.device_mesh["data_parallel"]
        if tp_mesh.size() > 1:
            plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
            parallelize_module(self.model, tp_mesh, plan)
        if dp_mesh.size() > 1 and self.shards:
            fully_shard(self.model.w1, mesh=dp_mesh)
            fully_shard(self.model.w2, mesh=dp_mesh)
            fully_shard(self.model.w3, mesh=dp_mesh)
            fully_shard(self.model, mesh=dp_mesh)

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.batches.append(batch)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).sum()

    def train_dataloader(self) -> Any:
        rows: Any = torch.randn(8 * STEPS, 8, generator=torch.Generator().manual_seed(5))
        return DataLoader(rows, batch_size=4)  # in the order of Lightning's own sampler

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)


class WithoutFullyShard(Documented):
    shards = False


def train_documented(kind: type[Documented]) -> Any:
    """Batches of this rank, and the weights that it ends with, by strategy; or why there are none."""
    found = []
    for name in STRATEGIES:
        trainer = make_trainer(ShardedDP(name, tensor_parallel_size=2), max_steps=STEPS)
        module = kind()
        try:
            trainer.fit(module)
        except ConfigurationError as error:
            return str(error)
        weights = {key: it.full_tensor() for key, it in module.state_dict().items()}
        found.append((module.batches, weights))
    return found


def test_the_documented_example_of_lightning_trains_without_its_fully_shard_lines(
    world: Worlds,
) -> None:
    answers = world(4).run(train_documented, WithoutFullyShard)
    module = Documented()
    optimizer = module.configure_optimizers()
    # Ranks 0 and 1 split layers, as ranks 2 and 3 do.
    for batches in zip(answers[0][0][0], answers[2][0][0], strict=True):
        (module.model(torch.cat(batches)).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: it.detach() for name, it in module.state_dict().items()}
    assert len(answers[0][0][0]) == STEPS
    for answer in answers:
        for _, found in answer:
            assert distance(found, expected) < 1e-5
    for message in world(4).run(train_documented, Documented):
        assert "fully_shard" in message


class Shuffled(Planned):
    """Rows in the order of Lightning's own sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def train_dataloader(self) -> Any:
        rows = torch.arange(32.0)[:, None, None].expand(-1, 4, 8)
        return DataLoader(TensorDataset(rows), batch_size=2, shuffle=True)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.rows += [int(it) for it in batch[0][:, 0, 0]]
        return super().training_step(batch)


def rows_seen() -> list[int]:
    seed_everything(7, verbose=False)
    strategy = ShardedDP(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    make_trainer(strategy, max_epochs=1, max_steps=-1).fit(module := Shuffled())
    return module.rows


def test_the_sampler_of_lightning_gives_equal_batches_to_ranks_that_split_layers(
    world: Worlds,
) -> None:
    first, again, other, too = world(4).run(rows_seen)
    assert first == again and other == too and sorted(first + other) == [*range(32)]
    assert first != sorted(first)


class Repeated(Planned):
    """Runs one block three times: it is registered at three places, and split once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.blocks[0] for _ in range(3)))


class PeekingBlock(Block):
    """Calls its first layer without gradients before it calls it with them, on one tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        with torch.no_grad():
            fixed = self.up(given)
        return x + self.down(torch.relu(self.up(given) + 0.1 * fixed))


class Peeking(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(PeekingBlock() for _ in range(3)))


class ListBlock(Block):
    """Has its layers in a list, too, which has no forward that could end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.up, self.down])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers[1](torch.relu(self.layers[0](self.norm(x))))


class Copied(Planned):
    """Copies its blocks in the middle of training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ListBlock() for _ in range(3)))

    def on_before_optimizer_step(self, *args: Any) -> None:
        assert len(deepcopy(self.blocks)) == 3


class Hooked(Planned):
    """Halves gradients of split layers, by hooks set before there are shards."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.blocks.parameters():
            each.register_hook(lambda gradient: gradient / 2)


class Frozen(Planned):
    """Has frozen layers, whose weights it uses without calling them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.table = nn.Embedding(4, 8).requires_grad_(False)
        for block in self.blocks:
            block.up.requires_grad_(False)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.anchor(x) + self.table(torch.arange(4)) + x @ self.anchor.weight.T
        x = x + (x @ self.table.weight.T).softmax(-1) @ self.table.weight
        return super().loss(x)


class FrozenBlocks(CompiledBlocks, Frozen):
    """The same, with compiled blocks."""


FROZEN = PLAN | {"anchor": "colwise_gather_output", "table": "embedding_rowwise"}


class Hooking(Planned):
    """Keeps shapes that hooks see, as their hooks are set before there are shards and after."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.blocks[0].up.weight.register_hook(self.note)

    def note(self, gradient: torch.Tensor) -> None:
        self.shapes.append(tuple(gradient.shape))

    def on_train_start(self) -> None:
        weight = self.blocks[0].up.weight
        weight.register_hook(self.note)
        weight.register_post_accumulate_grad_hook(lambda it: self.note(it.grad))


def see_shapes() -> list[tuple[int, ...]]:
    strategy = ShardedDP(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    module = Hooking()
    make_trainer(strategy, max_steps=1, use_distributed_sampler=False).fit(module)
    return module.shapes


def test_hooks_see_this_rank_s_part_of_a_gradient_and_the_whole_parameter(world: Worlds) -> None:
    assert world(4).run(see_shapes) == [[(6, 8), (6, 8), (12, 8)]] * 4


LISTED = {"blocks.*.layers.0": "colwise", "blocks.*.layers.1": "rowwise"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (Repeated, PLAN),
        (Peeking, PLAN),
        (Copied, PLAN | LISTED),
        (Hooked, PLAN),
        (Frozen, FROZEN),
        (FrozenBlocks, FROZEN),
    ],
)
def test_layers_are_split_once_whatever_calls_them(
    world: Worlds, kind: type[Planned], plan: dict[str, Any]
) -> None:
    expected, _ = train_whole(kind, "norm", steps=FEWER_STEPS)
    run = partial(train, "full_shard", 2, kind=kind, tensor_parallel_plan=plan, steps=FEWER_STEPS)
    for found, *_ in world(4).run(run):
        assert distance({name: found[name] for name in expected}, expected) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Planned, {"activation_checkpointing": {Block}, "empty_init": True}),
        (Late, {"empty_init": True}),
        (CompiledBlocks, {}),
        (Split, {"activation_checkpointing": {Block}}),
    ],
    ids=[
        "recomputed and deferred",
        "deferred in configure_model",
        "compiled",
        "DTensors recomputed",
    ],
)
def test_options_change_nothing_about_it(
    world: Worlds, kind: type[Split], options: dict[str, Any]
) -> None:
    expected, _ = train_whole(Split, "norm", steps=FEWER_STEPS)
    options = {**options, "tensor_parallel_plan": None if kind is Split else PLAN}
    run = partial(train, "full_shard", 2, kind=kind, steps=FEWER_STEPS, **options)
    for found, *_ in world(4).run(run):
        assert distance(found, expected) < 1e-5


class Penalised(Planned):
    """Its loss reads every parameter, and hooks change what whole layers return."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down.register_forward_hook(lambda _, __, y: torch.tanh(y))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(it.pow(2).sum() for it in self.parameters())
        return super().loss(x) + 0.05 * penalty + 0.1 * self.blocks[-1].up.weight.norm()  # type: ignore[operator]


class OwnLinear(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class OwnNorm(nn.Module):
    """A norm as models have it: of a class of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


def squash(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return torch.tanh(output)


class PenalisedOwn(Penalised):
    """The same, with layers of classes of its own."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = OwnNorm()
            block.up, block.down = OwnLinear(8, 12), OwnLinear(12, 8)
            block.down.register_forward_hook(squash)


class CompiledRoot(PenalisedOwn):
    """The same, compiled as a whole: its step is not."""

    def on_fit_start(self) -> None:
        self.compile(backend="aot_eager")


@pytest.mark.parametrize(
    "kind", [Penalised, PenalisedOwn, CompiledRoot], ids=["torch", "own", "compiled"]
)
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE_PLAN], ids=["whole", "sequences"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loss_and_hooks_see_whole_parameters_and_layers(
    world: Worlds, name: str, plan: dict[str, Any], kind: type[Penalised]
) -> None:
    expected, losses = train_whole(kind, steps=FEWER_STEPS)
    run = partial(train, name, 2, kind=kind, tensor_parallel_plan=plan, steps=FEWER_STEPS)
    for found, seen, _ in world(4).run(run):
        assert distance(found, expected) < 1e-5
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-4


def check_own_layers(world: Worlds, kind: type[Penalised], **options: Any) -> None:
    """Train layers of own classes on two ranks as in one process."""
    expected, losses = train_whole(PenalisedOwn, steps=FEWER_STEPS)
    run = partial(train, "full_shard", 2, kind=kind, steps=FEWER_STEPS, **options)
    for found, seen, _ in world(2).run(run):
        assert distance(found, expected) < 1e-5
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-4


def test_layers_of_a_compiled_model_may_be_called_past_its_forward(world: Worlds) -> None:
    check_own_layers(world, CompiledRoot, tensor_parallel_plan=PLAN, auto_wrap_policy=None)


class CompiledOwn(PenalisedOwn):
    """The same, with compiled blocks."""

    def on_fit_start(self) -> None:
        for block in self.blocks:
            block.compile(backend="aot_eager")


@pytest.mark.parametrize(
    ("kind", "recomputed"),
    [(PenalisedOwn, {OwnLinear, OwnNorm}), (CompiledOwn, {Block})],
    ids=["layers", "compiled blocks"],
)
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE_PLAN], ids=["whole", "sequences"])
def test_split_layers_of_own_classes_are_recomputed(
    world: Worlds, plan: dict[str, Any], kind: type[Penalised], recomputed: set[type[nn.Module]]
) -> None:
    check_own_layers(world, kind, tensor_parallel_plan=plan, activation_checkpointing=recomputed)


class Twice(Planned):
    """Two micro-batches in one step of manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor]) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for half in batch[0].chunk(2):
            self.manual_backward(self.loss(half) / 2)
        optimizer.step()

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def train_twice(size: int) -> dict[str, torch.Tensor]:
    strategy = ShardedDP(
        auto_wrap_policy=None,
        tensor_parallel_size=size,
        tensor_parallel_plan=PLAN if size > 1 else None,
    )
    module = Twice()
    warnings.simplefilter("ignore")  # whole parameters are used outside of the root's forward
    make_trainer(strategy, max_steps=4, use_distributed_sampler=False).fit(module)
    return {key: value.full_tensor() for key, value in module.state_dict().items()}


def test_a_step_may_run_split_layers_again_after_a_backward(world: Worlds) -> None:
    (expected, *_), found = world(4).run(train_twice, 1), world(4).run(train_twice, 2)
    for each in found:
        assert distance(each, expected) < 1e-5


class Watching(Planned):
    """Counts the inputs of layers that are still there when a step is over."""

    alive = -1

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Any] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda _, args, out: self.inputs.append(ref(args[0])))

    def on_train_batch_end(self, *args: Any) -> None:
        assert len(self.inputs) == 2 * len(self.blocks)
        self.alive = sum(it() is not None for it in self.inputs)
        self.inputs.clear()


def count_alive() -> int:
    strategy = ShardedDP(
        auto_wrap_policy={Block},
        tensor_parallel_size=2,
        tensor_parallel_plan=PLAN,
        activation_checkpointing={Block},
    )
    module = Watching()
    make_trainer(strategy, max_steps=2, use_distributed_sampler=False).fit(module)
    return module.alive


def test_no_recomputed_activation_outlives_its_backward(world: Worlds) -> None:
    assert world(2).run(count_alive) == [0, 0]


def train_orthogonal() -> dict[str, torch.Tensor]:
    strategy = ShardedDP(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    trainer = make_trainer(strategy, max_steps=8, use_distributed_sampler=False)
    module = Orthogonal()
    trainer.fit(module)
    return {key: value.full_tensor() for key, value in module.state_dict().items()}


def test_muon_steps_on_whole_matrices(world: Worlds) -> None:
    module = Orthogonal()
    optimizers = orthogonal_optimizers(module)
    for batch in data().split(BATCH)[:4]:
        module.loss(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: it.detach() for name, it in module.named_parameters()}
    # Its products are of bfloat16, where a last bit of a step of 1e-2 is 4e-5; halves of matrices
    # would be off by the step.
    for found in world(4).run(train_orthogonal):
        assert distance(found, expected) < 5e-4


class ByAdafactor(Planned):
    """Its steps depend on norms of whole parameters, and of rows and columns of matrices."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2, weight_decay=0.1)


class ByNorms(Planned):
    """An optimizer of which only its user knows that it needs no more than one parameter at a time."""

    def configure_optimizers(self) -> Any:
        return NormalizedDescent(self.parameters(), {"lr": 2e-2})


@pytest.mark.parametrize(
    ("kind", "options"),
    [(ByAdafactor, {}), (ByNorms, {"optimizer_scope": {"NormalizedDescent": "parameter"}})],
)
def test_optimizers_that_need_whole_parameters_step_as_in_one_process(
    world: Worlds, kind: type[Planned], options: dict[str, Any]
) -> None:
    expected, _ = train_whole(kind, steps=FEWER_STEPS)
    run = partial(train, "full_shard", 2, kind=kind, tensor_parallel_plan=PLAN, steps=FEWER_STEPS)
    for found, *_ in world(4).run(partial(run, **options)):
        assert distance(found, expected) < 1e-5


class DroppingBlock(Block):
    """Drops activations that ranks which split layers all have."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.relu(self.up(self.dropout(self.norm(x))))
        return x + self.dropout(self.down(up))


class Dropping(Planned):
    """Its ranks draw as their batches are, each as the others that have the same."""

    axis = "data_parallel"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(DroppingBlock() for _ in range(3)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            torch.manual_seed(20 + self.device_mesh[self.axis].get_local_rank())


class DrawingApart(Dropping):
    """Its ranks draw different numbers, as processes without a seed do."""

    axis = "tensor_parallel"


def drop_in_one_process(ranks: int) -> dict[str, torch.Tensor]:
    """The weights after steps on each rank's part of batches, one after the other, with its random numbers."""
    module = Dropping()
    optimizer = module.configure_optimizers()
    states = []
    for rank in range(ranks):
        torch.manual_seed(20 + rank)
        states.append(torch.get_rng_state())
    for number, batch in enumerate(data().split(BATCH)[: 2 * FEWER_STEPS]):
        for rank in range(ranks):
            torch.set_rng_state(states[rank])
            (module.loss(batch[rank::ranks]) / ranks / 2).backward()
            states[rank] = torch.get_rng_state()
        if number % 2:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {name: it.detach() for name, it in module.named_parameters()}


@pytest.mark.parametrize("recomputed", [None, {DroppingBlock}], ids=["kept", "recomputed"])
def test_ranks_that_split_layers_drop_the_same_and_others_as_they_draw(
    world: Worlds, recomputed: Any
) -> None:
    run = partial(train, "full_shard", 2, kind=Dropping, tensor_parallel_plan=PLAN)
    run = partial(run, steps=FEWER_STEPS, activation_checkpointing=recomputed)
    expected = drop_in_one_process(2)
    for found, *_ in world(4).run(run):
        assert distance(found, expected) < 1e-5


def draw_apart() -> None:
    with pytest.raises(RuntimeError, match=r"different random numbers \(seed_everything\)"):
        train("full_shard", 2, kind=DrawingApart, tensor_parallel_plan=PLAN, steps=1)


def test_ranks_that_split_layers_and_draw_different_numbers_hear_of_it(world: Worlds) -> None:
    world(2).run(draw_apart)


def average() -> dict[str, torch.Tensor]:
    averages = [EMAWeightAveraging(decay=0.9)]
    found, *_ = train(
        "full_shard",
        2,
        kind=Planned,
        tensor_parallel_plan=PLAN,
        trainer_options={"callbacks": averages},
        steps=FEWER_STEPS,
    )
    return found


def test_weights_are_averaged_as_in_one_process(world: Worlds) -> None:
    expected, _ = train_whole(Split, "norm", 0.9, steps=FEWER_STEPS)
    for found in world(4).run(average):
        assert distance(found, expected) < 1e-5


@pytest.mark.long
def test_bfloat16_is_as_far_off_as_in_one_process(world: Worlds) -> None:
    expected, _ = train_whole(Split, "norm")
    rounded, _ = train_whole(Split, "norm", 0.0, torch.bfloat16)
    options = {"precision": "bf16-mixed"}
    run = partial(train, "full_shard", 2, kind=Planned, tensor_parallel_plan=PLAN)
    for found, *_ in world(4).run(partial(run, trainer_options=options)):
        assert 0 < distance(found, rounded) < 2 * distance(rounded, expected)


class Unrounded(Planned):
    """Computes without autocast, where another precision has it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return (self.head(self.blocks(x)).logsumexp(-1) - x.sum(-1)).pow(2).mean()


@pytest.mark.long
def test_layers_without_autocast_compute_with_their_parts_in_full_precision(world: Worlds) -> None:
    expected, _ = train_whole(Unrounded, "norm", steps=FEWER_STEPS)
    plan = PLAN | {"head": "colwise_gather_output"}
    options = {"precision": "bf16-mixed"}
    run = partial(train, "full_shard", 2, kind=Unrounded, tensor_parallel_plan=plan)
    for found, *_ in world(4).run(partial(run, trainer_options=options, steps=FEWER_STEPS)):
        assert distance(found, expected) < 1e-5


class Descends(Planned):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return descent_of(self)


def descend(precision: str, size: int, clips: str) -> dict[str, torch.Tensor]:
    plan = {} if size == 1 else {"tensor_parallel_plan": PLAN}
    options = {"trainer_options": precision_options(precision), "steps": FEWER_STEPS}
    found, *_ = train("full_shard", size, clips, Descends, **options, **plan)
    return {name: it.double() for name, it in found.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "clips"),
    [
        ("bf16-mixed", "value"),
        ("16-mixed", "norm"),
        pytest.param("16-mixed", "value", marks=pytest.mark.torture),
        ("bf16-true", "norm"),
        pytest.param("16-true", "value", marks=pytest.mark.torture),
        pytest.param("64-true", "norm", marks=pytest.mark.torture),
    ],
)
def test_every_precision_trains_as_it_does_with_whole_layers(
    world: Worlds, precision: str, clips: str
) -> None:
    check_precision(world, descend, precision, clips)


class Overflows(Descends):
    """Has one infinite gradient, on one rank; keeps loss scales."""

    def on_train_start(self) -> None:
        if dist.get_rank() == 1:
            self.blocks[0].up.weight.register_hook(Overflow())

    def on_train_batch_end(self, *args: Any) -> None:
        scaler: Any = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.seen.append(scaler.get_scale())


def overflow(size: int) -> Any:
    plan = {} if size == 1 else {"tensor_parallel_plan": PLAN}
    options = {"trainer_options": precision_options("16-mixed"), "steps": FEWER_STEPS}
    return train("full_shard", size, kind=Overflows, **options, **plan)[:2]


@pytest.mark.long
def test_all_ranks_skip_a_step_in_which_a_part_of_one_overflows(world: Worlds) -> None:
    (expected, scales), *_ = world(4).run(overflow, 1)
    assert scales[-1] == 128
    for found, seen in world(4).run(overflow, 2):
        assert seen == scales
        assert distance(found, expected) < 1e-3


class Counted(Planned):
    """Counts what is sent in the forward and backward of each micro-batch."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.trainer.strategy.traffic.reset()
        self.trainer.strategy.mesh.activation_traffic.reset()

    def on_before_optimizer_step(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        self.sent = strategy.traffic.nbytes, strategy.mesh.activation_traffic.nbytes


def count(plan: dict[str, Any]) -> Any:
    strategy = ShardedDP(
        tensor_parallel_size=2, tensor_parallel_plan=plan, auto_wrap_policy={Block}
    )
    trainer = make_trainer(strategy, max_steps=2, use_distributed_sampler=False)
    module = Counted()
    trainer.fit(module)
    numel = sum(
        group.layout.padded_numel
        for progress in strategy.runtime.progresses
        for group in progress.unit.groups
    )
    root = sum(it.layout.padded_numel for it in strategy.runtime.progresses[0].unit.groups)
    data, activations = module.sent
    last = strategy.runtime.progresses[-1].unit.groups
    kept = root + sum(it.layout.padded_numel for it in last)
    return dict(data), dict(activations), numel, kept


def test_each_axis_sends_what_textbooks_say(world: Worlds) -> None:
    blocks, activation = (
        3,
        BATCH // 2 * 4 * 8 * 4,
    )  # bytes of one rank's (batch, sequence, features)
    for sent, activations, numel, kept in world(4).run(count, PLAN):
        # Ranks with different batches gather twice (root and last block once), and reduce once.
        assert sent["all_gather"] == (2 * numel - kept) * 4 // 2
        assert sent["reduce_scatter"] == numel * 4 // 2
        # Megatron-LM: one all-reduce per pair of layers in forward, one in backward.
        assert activations == {"all_reduce": blocks * 2 * activation}
    for _, activations, *_ in world(4).run(count, SEQUENCE_PLAN):
        # A gather and a reduction in either direction, and a gather where parts end.
        assert activations["reduce_scatter"] == blocks * 2 * activation // 2
        assert activations["all_gather"] == (blocks * 2 + 1) * activation // 2
        assert activations["all_reduce"] == blocks * 2 * 8 * 4  # gradients of the norms


@pytest.mark.parametrize("size", [2, 4])
def test_some_or_all_ranks_split_layers_and_clip_by_value(world: Worlds, size: int) -> None:
    expected, _ = train_whole(Split, "value", steps=FEWER_STEPS)
    for found, *_ in world(4).run(partial(train, "full_shard", size, "value", steps=FEWER_STEPS)):
        assert distance(found, expected) < 1e-5


def test_sequences_may_be_split_as_well(world: Worlds) -> None:
    expected, _ = train_whole(Split, "norm", steps=FEWER_STEPS)
    run = partial(train, "full_shard", 2, kind=SequenceSplit, steps=FEWER_STEPS)
    for found, *_ in world(4).run(run):
        assert distance(found, expected) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_is_loaded_with_other_numbers_of_tensor_ranks_and_by_ddp(
    world: Worlds, tmp_path: Path, kind: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.ckpt")
    # DTensors in one, and fused weights, of which each rank has several boxes, in the other.
    module = Split if kind == "full" else Attending
    plan = None if kind == "full" else PLAN | ATTENTION_PLAN | {"**.num_heads": "divide"}
    run = partial(train, "full_shard", size, "norm", module, path, tensor_parallel_plan=plan)
    run = partial(run, state_dict_type=kind, steps=FEWER_STEPS)
    (saved, *_), *_ = world(4).run(run)
    options = {"auto_wrap_policy": {Block}}
    split = {**options, "tensor_parallel_plan": plan}
    content = path
    if kind == "sharded":
        assert main(["verify", path]) == main(["inspect", path]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"4 ranks, full_shard, shards over {4 // size}, layers over {size}" in said
        content = str(tmp_path / "whole.ckpt")
        assert main(["consolidate", path, "-o", content]) == 0
    for ranks, given in (
        (4, {**split, "tensor_parallel_size": 4}),
        (4, {**split, "tensor_parallel_size": 2}),
        (2, {**split, "tensor_parallel_size": 2}),
        (2, options),
    ):
        for found in world(ranks).run(load_run, path, module, given):
            assert same_bits(found, saved)
    for found in world(2).run(load_run, content, module, None):
        assert same_bits(found, saved)


def refuse(size: int, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        ShardedDP(tensor_parallel_size=size, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "options", "what"),
    [
        (0, {}, "whole number of at least 1"),
        (2, {"cpu_offload": True}, "cpu_offload"),
        (2, {"tensor_parallel_plan": "all"}, "expected 'auto' or a mapping"),
        (1, {"tensor_parallel_plan": PLAN}, "tensor_parallel_size=2 or more"),
        (2, {"tensor_parallel_plan": {"blocks": "colwize"}}, "did you mean 'colwise'"),
        (2, {"tensor_parallel_plan": {"up": ["colwise", "colwise"]}}, "each occurs once"),
        (2, {"tensor_parallel_plan": {"up": ["colwise", "rowwise"]}}, "at most one splits"),
        (2, {"tensor_parallel_plan": {"up": ["divide", "colwise"]}}, "'divide' or 'keep' alone"),
        (2, {"uneven_units": True}, "uneven_units"),
        (2, {"uneven_batches": "join"}, "uneven_batches"),
        (2, {"reshard_after_forward": 2}, "reshard_after_forward"),
        (2, {"sharding_strategy": "auto"}, "name a sharding_strategy"),
        (2, {"plan_only": True}, "Name the layers"),
    ],
)
def test_options_that_were_not_tried_with_it_are_refused(
    size: int, options: dict[str, Any], what: str
) -> None:
    assert what in refuse(size, options)


class Odd(Planned):
    """Has three positions of its sequences, on the first of the ranks with different batches alone."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x[:, :3] if dist.get_rank() < 2 else x)


class OddSplit(SequenceSplit):
    """Has three positions of its sequences, in DTensors."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x[:, :3])


def train_odd() -> tuple[str, float]:
    strategy = ShardedDP(tensor_parallel_size=2, tensor_parallel_plan=SEQUENCE_PLAN)
    trainer = make_trainer(strategy, max_steps=1, use_distributed_sampler=False)
    start = perf_counter()
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(Odd())
    return str(caught.value), perf_counter() - start


def test_sequences_that_ranks_do_not_divide_are_an_error_on_all_ranks(world: Worlds) -> None:
    for message, took in world(4).run(train_odd):
        assert "a sequence of 3 positions" in message
        assert "a multiple of tensor_parallel_size=2" in message
        assert took < 20


@pytest.mark.long
def test_torch_splits_sequences_of_any_length(world: Worlds) -> None:
    expected, _ = train_whole(OddSplit, "norm", steps=FEWER_STEPS)
    run = partial(train, "full_shard", 2, kind=OddSplit, steps=FEWER_STEPS)
    for found, *_ in world(4).run(run):
        assert distance(found, expected) < 1e-5


class Uneven(Split):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up, self.blocks[0].down = nn.Linear(8, 13), nn.Linear(13, 8)


class UnevenPlanned(Uneven):
    configure_model = Planned.configure_model


class Descending(Split):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Compiled(Split):
    def configure_model(self) -> None:
        super().configure_model()
        self.head.compile()


class Tied(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


class Attention(nn.Module):
    head_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12)


class Heads(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()


class Gated(nn.Module):
    """Gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 24), nn.Linear(12, 8)


class FewerKeys(nn.Module):
    """Queries of four heads, keys and values of two."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 48), nn.Linear(24, 8)


class Piled(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.gated, self.attention = Gated(), FewerKeys()


class OnlyRows(Planned):
    """Gives a layer that is split by rows all features."""


class HalfOutput(Planned):
    """Takes one of two outputs for both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)


class BorrowingBlock(Block):
    """Uses the weight of a split layer without calling it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = nn.functional.linear(self.norm(x), self.up.weight, self.up.bias)
        return x + self.down(up.relu())


class Borrowing(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(BorrowingBlock() for _ in range(2)))


class BorrowingHead(HalfOutput):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        made = nn.functional.linear(self.blocks(x), self.head.weight, self.head.bias)
        return (made - x.sum(-1, keepdim=True)).pow(2).mean()


def borrow() -> tuple[dict[str, torch.Tensor], list[float]]:
    warnings.simplefilter("ignore")
    found, losses, _ = train(
        "full_shard",
        2,
        kind=BorrowingHead,
        steps=FEWER_STEPS,
        tensor_parallel_plan={**PLAN, "head": "colwise_gather_output"},
    )
    return found, losses


def test_a_weight_that_is_used_without_its_layer_is_whole(world: Worlds) -> None:
    expected, losses = train_whole(BorrowingHead, steps=FEWER_STEPS)
    for found, seen in world(2).run(borrow):
        assert distance(found, expected) < 1e-5
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-5


class OwnHead(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class TiedToOwn(Planned):
    """Ties its table to a head of a class of its own, logs the norm of it, and has names for a block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.words = OwnHead(8, 8, bias=False)
        self.words.weight = self.table.weight
        self.first = self.blocks[0]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        words = (x > 0).sum(-1) % 8
        norm = self.table.weight.norm()
        return super().loss(x) + self.words(self.table(words)).pow(2).mean() + 1e-3 * norm


def train_tied() -> Any:
    warnings.simplefilter("ignore")
    ends = {"table": "embedding_rowwise", "words": "colwise_gather_output"}
    plan = {**PLAN, **ends}
    return train("full_shard", 2, kind=TiedToOwn, steps=FEWER_STEPS, tensor_parallel_plan=plan)


def test_a_tied_weight_of_a_layer_of_its_own_class_is_whole_elsewhere(world: Worlds) -> None:
    expected, losses = train_whole(TiedToOwn, steps=FEWER_STEPS)
    expected = {name: it for name, it in expected.items() if not name.startswith("first.")}
    for found, seen, _ in world(2).run(train_tied):
        assert distance({name: found[name] for name in expected}, expected) < 1e-5
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-5


class TiedByStyles(Planned):
    """Ties its table to its head, and splits them itself if it is to."""

    splits_itself = False

    def __init__(self) -> None:
        super().__init__()
        self.table, self.words = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.words.weight = self.table.weight

    def configure_model(self) -> None:
        if self.splits_itself:
            mesh = self.device_mesh["tensor_parallel"]  # type: ignore[index]
            parallelize_module(self, mesh, ENDS)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        words = (x > 0).sum(-1) % 8
        return super().loss(x) + self.words(self.table(words)).pow(2).mean()


class TiedAndSplit(TiedByStyles):
    splits_itself = True


class BuiltAndSplit(Planned):
    """Builds the tied layers where it splits one of them."""

    def configure_model(self) -> None:
        if not hasattr(self, "inner"):
            self.inner = TiedByStyles()
            mesh = self.device_mesh["tensor_parallel"]  # type: ignore[index]
            parallelize_module(self.inner, mesh, {"table": ENDS["table"]})

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.loss(x)


class BuiltAndTiedAgain(BuiltAndSplit):
    """Splits both layers, and ties them again."""

    def configure_model(self) -> None:
        if not hasattr(self, "inner"):
            self.inner = TiedByStyles()
            parallelize_module(self.inner, self.device_mesh["tensor_parallel"], ENDS)  # type: ignore[index]
            self.inner.words.weight = self.inner.table.weight


class TiedByData(TiedByStyles):
    """Has two parameters with one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words.weight = nn.Parameter(self.table.weight.data)


ENDS: Any = {
    "table": RowwiseParallel(input_layouts=Replicate()),
    "words": ColwiseParallel(output_layouts=Replicate()),
}


def train_tied_styles(kind: Any, plan: Any) -> Any:
    told: list[str] = []
    with mock.patch.object(tensor_parallel, "rank_zero_warn", told.append):
        found = train("full_shard", 2, kind=kind, steps=FEWER_STEPS, tensor_parallel_plan=plan)
    return found, told


def test_weights_that_torch_styles_split_alike_stay_tied(world: Worlds) -> None:
    expected, losses = train_whole(TiedByStyles, steps=FEWER_STEPS)
    for (found, seen, _), told in world(2).run(train_tied_styles, TiedByStyles, ENDS):
        assert distance({name: found[name] for name in expected}, expected) < 1e-5 and not told
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-5


def test_weights_that_torch_styles_untie_are_named(world: Worlds) -> None:
    told = [lines for _, lines in world(2).run(train_tied_styles, TiedAndSplit, None)]
    assert "table.weight and words.weight were one parameter" in told[0][0]
    told = [lines for _, lines in world(2).run(train_tied_styles, BuiltAndSplit, None)]
    assert len(told[0]) == 1
    assert "inner.table.weight and inner.words.weight were one parameter" in told[0][0]
    told = [lines for _, lines in world(2).run(train_tied_styles, BuiltAndTiedAgain, None)]
    assert not told[0]
    with pytest.raises(Exception, match="in different ways") as error:
        world(2).run(train_tied_styles, TiedByStyles, {"words": ENDS["words"]})
    assert "table.weight and words.weight are one parameter" in str(error.value)


def test_split_parameters_with_one_memory_are_refused(world: Worlds) -> None:
    by_names = {"table": "embedding_rowwise", "words": "colwise_gather_output"}
    for plan in (ENDS, by_names):
        with pytest.raises(Exception, match="several parameters with the same memory") as error:
            world(2).run(train_tied_styles, TiedByData, plan)
        assert "words.weight = table.weight in the model" in str(error.value)


class BetweenBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))) * self.up.weight.norm())


class Between(Planned):
    """Multiplies features that ranks have parts of by a norm of a whole weight."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = BetweenBlock


class Factored(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 12)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class WithNumber(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up = Factored()


class Padded(HalfOutput):
    """Looks words up, and masks the padding by the number that the embedding has for it."""

    def __init__(self, beyond: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8, padding_idx=6)
        self.beyond = beyond

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        words = (torch.arange(x.shape[-2]) + 4) % 8
        mask = words.ne(self.table.padding_idx).unsqueeze(-1)
        return super().loss(x + mask * self.table(words + self.beyond) + self.table(words))


class BeyondTheTable(Padded):
    def __init__(self) -> None:
        super().__init__(4)


def look_up() -> Any:
    plan = {**PLAN, "table": "embedding_rowwise"}
    found = train("full_shard", 2, kind=Padded, steps=FEWER_STEPS, tensor_parallel_plan=plan)
    with pytest.raises(IndexError, match="out of range"):
        train("full_shard", 2, kind=BeyondTheTable, steps=1, tensor_parallel_plan=plan)
    return found


def test_a_split_embedding_pads_and_refuses_as_a_whole_one(world: Worlds) -> None:
    expected, losses = train_whole(Padded, steps=FEWER_STEPS)
    for found, seen, _ in world(2).run(look_up):
        assert distance(found, expected) < 1e-5
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-5


class ScaledBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.scale * torch.relu(self.up(self.norm(x))))


class Scaled(Planned):
    """Features that ranks have parts of are multiplied by a parameter that each has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        for block in self.blocks:
            block.__class__ = ScaledBlock
            object.__setattr__(block, "scale", self.scale)


class CalledOutside(HalfOutput):
    """Calls split layers outside of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.returned: list[torch.Tensor] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x + self.table(torch.arange(x.shape[-2]) % 8))

    def call(self) -> None:
        block: Any = self.blocks[0]
        x = torch.linspace(-1, 1, 16).view(2, 8)
        made = self.head(x), self.table(torch.arange(8)), block.down(block.up(x).relu())
        whole = (
            nn.functional.linear(x, self.head.weight, self.head.bias),
            self.table.weight,
            nn.functional.linear(x, block.up.weight, block.up.bias).relu() @ block.down.weight.T
            + block.down.bias,
        )
        for mine, expected in zip(made, whole, strict=True):
            torch.testing.assert_close(mine.detach(), torch.as_tensor(expected).detach())

    def on_train_start(self) -> None:
        self.call()

    def on_train_batch_end(self, *_: Any) -> None:
        self.call()


def call_outside() -> None:
    warnings.simplefilter("ignore")  # parameters are gathered for each call
    plan = {**PLAN, "head": "colwise_gather_output", "table": "embedding_rowwise"}
    strategy = ShardedDP(tensor_parallel_size=2, tensor_parallel_plan=plan)
    trainer = make_trainer(strategy, max_steps=2, use_distributed_sampler=False)
    trainer.fit(CalledOutside())


def test_split_layers_may_be_called_outside_of_a_step(world: Worlds) -> None:
    world(2).run(call_outside)


def train_copied(
    kind: type[Planned], plan: dict[str, Any], compiled: bool = False
) -> list[float | str]:
    """Differences of what copies of a model compute from what a whole model does, or their errors."""
    differences: list[float | str] = []

    def compare(module: Any, *_: Any) -> None:
        x = torch.linspace(-1, 1, 32).view(1, 4, 8)
        whole = kind()
        whole.load_state_dict({name: it.full_tensor() for name, it in module.state_dict().items()})
        stored = io.BytesIO()
        torch.save(module.blocks, stored)
        stored.seek(0)
        for copied in (deepcopy(module.blocks), torch.load(stored, weights_only=False)):
            for block in copied if compiled else ():
                block.compile(backend="aot_eager")
            try:
                differences.append(float((copied(x) - whole.blocks(x)).detach().abs().max()))
                copied(x).sum().backward()
                whole.blocks.zero_grad()
                whole.blocks(x).sum().backward()
                for own, other in zip(copied.parameters(), whole.blocks.parameters(), strict=True):
                    found = own.grad.full_tensor() if isinstance(own, ShardTensor) else own.grad
                    torch.testing.assert_close(found, other.grad)
            except RuntimeError as error:
                differences.append(str(error))

    copying = type("Copying", (kind,), {"on_train_start": compare, "on_train_batch_end": compare})
    warnings.simplefilter("ignore")
    strategy = ShardedDP(tensor_parallel_size=2, tensor_parallel_plan=plan)
    make_trainer(strategy, max_steps=1, use_distributed_sampler=False).fit(copying())
    return differences


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("kind", "plan"),
    [(Planned, PLAN), (Planned, SEQUENCE_PLAN), (PenalisedOwn, PLAN)],
    ids=["whole", "sequences", "own layers"],
)
def test_copies_of_split_layers_are_whole(
    world: Worlds, kind: type[Planned], plan: dict[str, Any], compiled: bool
) -> None:
    for differences in world(2).run(train_copied, kind, plan, compiled):
        assert len(differences) == 4 and max(differences) < 1e-6


class OfConfig(Planned):
    """Has attention with a number of heads in its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FusedAttention()
        self.attention.cfg = SimpleNamespace(n_head=2)  # type: ignore[assignment]
        del self.attention.num_heads


def find_heads(plan: dict[str, Any], **attributes: Any) -> list[str]:
    module = OfConfig()
    vars(module.attention).update(attributes)
    return with_heads_of_configs(module, find_layers(module, plan, 2))


def test_heads_of_configurations_are_found() -> None:
    plan = ATTENTION_PLAN
    assert find_heads(plan) == ["attention.cfg.n_head"]
    assert find_heads(plan, head_dim=4) == []
    assert find_heads({"attention.out": "rowwise"}) == []


class AttendingBlocks(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(FusedAttention())


def test_copies_of_layers_with_divided_numbers_are_refused(world: Worlds) -> None:
    plan = {
        "blocks.0.qkv": "packed_colwise:3",
        "blocks.0.out": "rowwise",
        "blocks.0.num_heads": "divide",
    }
    for messages in world(2).run(train_copied, AttendingBlocks, plan):
        assert len(messages) == 4
        assert all("a copy of 'blocks.0.num_heads' was called" in str(it) for it in messages)


class CalledEarly(HalfOutput):
    """Calls a split layer with a forward of its own before there is a step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = OwnLinear(8, 2)

    def on_train_start(self) -> None:
        self.head(torch.ones(8))


def train_attending() -> tuple[dict[str, torch.Tensor], float]:
    strategy = ShardedDP(
        tensor_parallel_size=2, tensor_parallel_plan=ATTENTION_PLAN | {"**.num_heads": "divide"}
    )
    trainer = make_trainer(
        strategy,
        max_steps=FEWER_STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
    )
    module = Attending()
    trainer.fit(module)
    state = {key: value.full_tensor() for key, value in module.state_dict().items()}
    return state, float(module.steps.compute())


class Classifying(Planned):
    """Cross-entropy on logits of which each rank has some classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        logits, classes = self.head(self.blocks(x)).flatten(0, 1), x.argmax(-1).flatten()
        if not isinstance(logits, DTensor):
            return nn.functional.cross_entropy(logits, classes)
        with loss_parallel():
            return nn.functional.cross_entropy(logits, classes).to_local()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            loss.backward()


def test_losses_are_computed_where_logits_are_split(world: Worlds) -> None:
    expected, _ = train_whole(Classifying, "norm", steps=FEWER_STEPS)
    plan = PLAN | {"head": ColwiseParallel(use_local_output=False)}
    run = partial(train, "full_shard", 2, kind=Classifying, tensor_parallel_plan=plan)
    for found, *_ in world(4).run(partial(run, steps=FEWER_STEPS)):
        assert distance(found, expected) < 1e-5


def test_fused_heads_are_split_and_metrics_count_batches_once(world: Worlds) -> None:
    expected, _ = train_whole(Attending, "norm", steps=FEWER_STEPS)
    for found, steps in world(4).run(train_attending):
        assert distance(found, expected) < 1e-5
        assert steps == 2 * 2 * FEWER_STEPS  # of two ranks with different batches


class Activated(nn.Linear):
    """A layer with an activation, which a sum over ranks may not follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


class OwnForwards(Planned):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down = Activated(12, 8)  # type: ignore[union-attr]


def warned_without_plan() -> list[str]:
    trainer = make_trainer(
        ShardedDP(tensor_parallel_size=2), max_steps=1, use_distributed_sampler=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Planned())
    return [str(it.message) for it in caught if "no layer is split" in str(it.message)]


def test_a_run_that_splits_nothing_says_so(world: Worlds) -> None:
    (said,), others = world(2).run(warned_without_plan)
    assert "groups of 2 ranks compute the same" in said
    assert others == []


def warned_of_forwards(kind: type[Split]) -> list[str]:
    strategy = ShardedDP(
        tensor_parallel_size=2, tensor_parallel_plan=PLAN, auto_wrap_policy={Block}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy, max_steps=1, use_distributed_sampler=False)
        expected = pytest.raises(RuntimeError, match="equal gradients on the 2 ranks")
        with expected if kind is OwnForwards else nullcontext():
            trainer.fit(kind())
    return [str(it.message) for it in caught if "forward of its own" in str(it.message)]


def test_layers_with_forwards_of_their_own_are_named(world: Worlds) -> None:
    (said,), _ = world(2).run(warned_of_forwards, OwnForwards)
    assert "blocks.0.down, blocks.1.down" in said
    assert world(2).run(warned_of_forwards, Planned) == [[], []]


class SharesItsKey(nn.Module):
    """Attention with two heads of queries, one for each rank, and one of keys and values for both."""

    def __init__(self) -> None:
        super().__init__()
        # Gradients of biases would tell as well.
        self.q, self.k, self.v, self.o = (nn.Linear(8, size, bias=False) for size in (8, 4, 4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (it(x).unflatten(-1, (-1, 4)).transpose(1, 2) for it in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class SharedKeys(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SharesItsKey() for _ in range(2)))


def train_shared_keys(style: str) -> None:
    styles = {"q": "colwise", "k": style, "v": style, "o": "rowwise"}
    strategy = ShardedDP(
        tensor_parallel_size=2,
        tensor_parallel_plan={f"blocks.*.{name}": it for name, it in styles.items()},
        auto_wrap_policy={SharesItsKey},
    )
    trainer = make_trainer(strategy, max_steps=1, use_distributed_sampler=False)
    said = r"equal gradients on the 2 ranks .* of what blocks\.0\.k, blocks\.0\.v, blocks\.1\.k and 1 more"
    with pytest.raises(RuntimeError, match=said):
        trainer.fit(SharedKeys())


@pytest.mark.parametrize("style", ["colwise_gather_output", "rowwise_split_input"])
def test_whole_outputs_that_ranks_use_with_parts_of_their_own_are_named(
    world: Worlds, style: str
) -> None:
    world(2).run(train_shared_keys, style)


class Normalized(Planned):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.blocks[0].up)


class OfTorch(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)


def refused(kind: type[Split], plan: Any = None, average: bool = False, **options: Any) -> str:
    # torch's compiler imports scripted code, Lightning's callback doubts `configure_model`.
    warnings.simplefilter("ignore")
    strategy = ShardedDP(
        tensor_parallel_size=2, tensor_parallel_plan=plan, auto_wrap_policy={Block}
    )
    if average:
        options["callbacks"] = [WeightAveraging()]
    trainer = make_trainer(strategy, max_steps=1, use_distributed_sampler=False, **options)
    with pytest.raises(Exception, match=r"tensor_parallel_(size|plan)") as caught:
        trainer.fit(kind())
    return str(caught.value)


class Stream(IterableDataset[Any]):
    """Batches of ones, by rank as many as it is said, of a value for each rank."""

    def __init__(self, counts: tuple[int, ...], by: float) -> None:
        self._counts, self._by = counts, by

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank()
        batch = torch.full((2, 8), 1 + self._by * rank)
        mask = torch.full((16, 16), -torch.inf).triu(1)
        return iter([[batch, mask, torch.tensor(torch.nan)]] * self._counts[rank])


class Evaluated(Planned):
    """Has loaders that do not take their rank from the strategy."""

    def __init__(self, counts: tuple[int, ...] = (2,) * 4, by: float = 0.0) -> None:
        super().__init__()
        self.stream, self.by, self.evaluated = Stream(counts, by), by, 0

    def val_dataloader(self) -> Any:
        return DataLoader(self.stream, batch_size=None)

    def test_dataloader(self) -> Any:
        return DataLoader([*self.stream], batch_size=None)  # of a known length

    def train_dataloader(self) -> Any:
        return DataLoader([*self.stream], batch_size=None)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.loss(batch[0])

    def on_train_batch_end(self, *args: Any) -> None:
        pass

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.evaluated += 1
        self.log("mean", self.loss(batch[0]), sync_dist=True)

    test_step = validation_step


def evaluate(run: str, *arguments: Any) -> str:
    warnings.simplefilter("ignore")
    strategy = ShardedDP(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    trainer = make_trainer(
        strategy, max_steps=2, use_distributed_sampler=False, limit_val_batches=9
    )
    module = Evaluated(*arguments)
    try:
        getattr(trainer, run)(module)
    except (ConfigurationError, RuntimeError) as error:
        return f"{module.evaluated}: {error}"
    return str(module.evaluated)


@pytest.mark.long
def test_ranks_that_split_layers_need_equal_batches(world: Worlds) -> None:
    def seen(*arguments: Any) -> list[str]:
        return world(4).run(evaluate, *arguments)

    for run in ("validate", "test"):
        # Ranks 0 and 1 have more batches than ranks 2 and 3, which is allowed.
        assert seen(run, (3, 3, 2, 2)) == ["3", "3", "2", "2"]
    for found in seen("validate", (2, 2, 1, 2))[2:]:
        assert found.startswith("1: tensor_parallel_size needs equal numbers of batches")
        assert "rank 2 has 1, rank 3 has more than 1" in found
    for found in seen("test", (2, 2, 1, 2)):
        assert found.startswith("0: tensor_parallel_size needs equal numbers of batches on ranks 2")
        assert "[1] on rank 2, [2] on rank 3" in found
    for run in ("validate", "test", "fit"):
        for found in seen(run, (2,) * 4, 1e-6):
            assert "found different ones in " in found


REFUSED = [
    ((Uneven,), "dims that tensor_parallel_size=2 divides"),
    ((UnevenPlanned, PLAN), "'blocks.0.up.weight' of shape (13, 8)"),
    ((Split, PLAN), "'blocks.0.up.weight' is a DTensor that parallelize_module has made"),
    ((Descending,), "LBFGS, whose scope"),
    ((ByNorms,), "say so with optimizer_scope={'NormalizedDescent': 'parameter'}"),
    ((Compiled,), "torch.compile"),
    ((Split, None, True), "WeightAveraging"),
    ((Planned, {"blocks.*.upp": "colwise"}), "'blocks.*.upp', which is none; did you mean 'blocks"),
    ((Planned, {"blocks.*.norm": "colwise"}), "found 'blocks.0.norm', a LayerNorm"),
    ((Planned, {"blocks.0.up": "embedding_rowwise"}), "expected an nn.Embedding"),
    ((Planned, "auto"), "found no such model"),
    ((Tied, {"blocks.0.up": "colwise"}), "blocks.0.up.weight and blocks.1.up.weight are one"),
    ((Heads, {"attention.q_proj": "colwise"}), "3 attention heads, which tensor_parallel_size=2"),
    ((Attending, ATTENTION_PLAN), "add 'attention.num_heads': 'divide'"),
    ((Attending, {"attention.num_heeds": "keep"}), "did you mean 'attention.num_heads'"),
    ((Planned, {"blocks.0": "gather_sequence"}), "'norm.weight'"),
    (
        (Planned, {**PLAN, "blocks.0.up": "colwise"}),
        "names 'blocks.0.up' by 'blocks.*.up' (colwise)",
    ),
    (
        (Planned, {**PLAN, "blocks.1.up": "rowwise"}),
        "names 'blocks.1.up' by 'blocks.*.up' (colwise)",
    ),
    ((Piled, {"gated.both": "colwise", "gated.down": "rowwise"}), "'packed_colwise:n'"),
    ((Piled, {"attention.qkv": "colwise", "attention.out": "rowwise"}), "'packed_colwise:n'"),
    ((Piled, {"attention.qkv": "packed_colwise:3", "attention.out": "rowwise"}), "fewer key-value"),
    (
        (Planned, {"blocks.*.up": "packed_colwise", "blocks.*.down": "rowwise"}),
        "12 output features, as many as a layer split by rows beside it takes",
    ),
    ((OfTorch, {"attention.out_proj": "rowwise"}), "belongs to an nn.MultiheadAttention"),
    ((OfTorch, {"attention.in_proj_weight": "packed_colwise:3"}), "nn.MultiheadAttention"),
    ((Normalized, PLAN), "'blocks.0.up', whose weight is computed of other parameters"),
    ((OnlyRows, {"blocks.*.down": "rowwise"}), "'blocks.0.down' is split by rows"),
    ((HalfOutput, {**PLAN, "head": "colwise"}), "expected one loss on the 2 ranks"),
    ((Planned, {"blocks.*.up": "colwise"}), "this rank's 1/2 of its features"),
    ((Borrowing, PLAN), "Split the layer before it with 'colwise' and call it as a module"),
    ((Between, PLAN), "different ones of blocks.0.up.weight, blocks.1.up.weight"),
    ((WithNumber, PLAN), "'blocks.0.up.factor', one number"),
    ((Scaled, PLAN), "different ones of scale, which every rank uses whole"),
    (
        (CalledEarly, {"head": "colwise_gather_output"}),
        "'head' was called where its unit is not gathered",
    ),
]


def refuse_all() -> list[str]:
    return [refused(*arguments) for arguments, _ in REFUSED]


@on_ranks(2)
def test_a_schedule_of_strategies_is_refused_before_training_with_split_layers() -> None:
    strategy = ShardedDP(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    trainer = make_trainer(strategy, max_steps=2, callbacks=[ReshardSchedule({1: "no_shard"})])
    with pytest.raises(ConfigurationError, match="split layers or divided experts"):
        trainer.fit(Planned())
    assert trainer.global_step == 0


@pytest.mark.long
def test_what_cannot_be_split_is_refused_by_name(world: Worlds) -> None:
    for messages in world(2).run(refuse_all):
        for message, (_, what) in zip(messages, REFUSED, strict=True):
            assert what in message
