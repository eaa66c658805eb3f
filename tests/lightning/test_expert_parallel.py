"""Experts that ranks divide among them train as in one process, under every strategy; the rest is refused."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shardeddp import ShardedDP, ShardTensor, TokenDispatch
from shardeddp.checkpoint.find import read_manifest
from shardeddp.checkpoint.verify import tensor_rows
from shardeddp.errors import ConfigurationError
from shardeddp_cli import main
from support.experts import StackedExperts
from support.trainers import make_trainer, precision_options
from support.whole_batches import (
    BATCH,
    FEWER_STEPS,
    STEPS,
    STRATEGIES,
    Overflow,
    Regression,
    check_precision,
    descent_of,
    distance,
    load_run,
    same_bits,
    train_whole,
    whole_state,
)
from world import Worlds

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

_REST = pytest.mark.torture
EXPERTS, CHOSEN = 4, 2


class Router(nn.Module):
    """Experts and weights of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = self.gate(x).softmax(-1).topk(CHOSEN)
        return index, weights


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class ListBlock(nn.Module):
    """Experts in a list, to which the model sends tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), Router()
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, -2)
        index, weights = self.router(flat)
        routed = TokenDispatch(index, self.experts)
        parts = routed.dispatch(flat).split(routed.counts)
        rows = torch.cat(
            [self.experts[it](part) for it, part in zip(routed.experts, parts, strict=True)]
        )
        return x + (routed.combine(rows) * weights.unsqueeze(-1)).sum(1).view_as(x)


class StackedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = (
            nn.LayerNorm(8),
            Router(),
            StackedExperts(EXPERTS, 8, 12),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, -2)
        index, weights = self.router(flat)
        return x + self.experts(flat, index, weights).view_as(x)


class Mixture(Regression):
    block: type[nn.Module] = ListBlock

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(self.block() for _ in range(2)))


class Stacked(Mixture):
    block = StackedBlock


def train(
    name: str,
    size: int,
    kind: type[Mixture] = Mixture,
    clips: str = "norm",
    path: str = "",
    steps: int = STEPS,
    trainer_options: dict[str, Any] | None = None,
    empty_init: bool = False,
    **more: Any,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The parameters that ranks have trained together, and logged means."""
    if name == "hybrid_shard":
        more["shard_size"] = max(1, dist.get_world_size() // 2)
    more = {
        "expert_parallel_size": size,
        "experts": None if kind is Stacked else Expert,
        "auto_wrap_policy": {kind.block},
        **more,
    }
    strategy = ShardedDP(name, **more)
    trainer_options = {
        "max_steps": steps,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5 if clips == "norm" else 0.05,
        "gradient_clip_algorithm": clips,
        **(trainer_options or {}),
    }
    trainer = make_trainer(strategy, use_distributed_sampler=False, **trainer_options)
    warnings.simplefilter("ignore")
    with trainer.init_module(empty_init=True) if empty_init else nullcontext():
        module = kind()
    trainer.fit(module)
    if path:
        trainer.save_checkpoint(path)
    assert all(isinstance(it, ShardTensor) for it in module.parameters())
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
    return saved, module.seen


def train_all(
    size: int, kind: type[Mixture], names: tuple[str, ...], *how: Any, **options: Any
) -> list[Any]:
    return [train(it, size, kind, *how, **options) for it in names]


@pytest.mark.long
@pytest.mark.parametrize("kind", [Mixture, Stacked], ids=["list", "stacked"])
@pytest.mark.parametrize(
    ("ranks", "size"), [(4, 2), pytest.param(2, 2, marks=_REST), pytest.param(4, 4, marks=_REST)]
)
def test_experts_train_as_in_one_process_under_every_strategy(
    world: Worlds, ranks: int, size: int, kind: type[Mixture]
) -> None:
    expected, losses = train_whole(kind)
    for answers in world(ranks).run(train_all, size, kind, STRATEGIES):
        for found, seen in answers:
            assert distance(found, expected) < 1e-5
            assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("kind", [Mixture, Stacked], ids=["list", "stacked"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_repeat_a_training_to_the_bit(world: Worlds, size: int, kind: type[Mixture]) -> None:
    run = partial(train_all, size, kind, STRATEGIES, "value", steps=FEWER_STEPS)
    expected, _ = train_whole(kind, "value", steps=FEWER_STEPS)
    first, *_ = world(4).run(run)
    for answers in world(4).run(run):
        for (found, seen), (former, losses) in zip(answers, first, strict=True):
            assert distance(found, expected) < 1e-5
            assert same_bits(found, former) and seen == losses


def test_activation_checkpointing_computes_the_same(world: Worlds) -> None:
    expected, _ = train_whole(Mixture, steps=FEWER_STEPS)
    options = {"activation_checkpointing": {ListBlock}}
    for found, _ in world(2).run(partial(train, "full_shard", 2, steps=FEWER_STEPS, **options)):
        assert distance(found, expected) < 1e-5


class Apart(Mixture):
    """Draws other values on each rank, of which those of rank 0 count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        for it in self.modules():
            if isinstance(it, nn.Linear):
                it.reset_parameters()


@pytest.mark.long
@pytest.mark.parametrize("kind", [Mixture, Stacked, Apart])
@pytest.mark.parametrize("name", ["full_shard", "no_shard"])
def test_experts_on_the_meta_device_get_the_values_of_one_process(
    world: Worlds, name: str, kind: type[Mixture]
) -> None:
    expected, _ = train_whole(kind, steps=FEWER_STEPS)
    run = partial(train, name, 2, kind, steps=FEWER_STEPS, empty_init=True)
    for found, _ in world(4).run(run):
        assert distance(found, expected) < 1e-5


class Lazy(Mixture):
    """Sends every token to the first two experts, so that some ranks' have none at all."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for block in self.blocks:
                block.router.gate.bias.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0]))
        return super().loss(x)


@pytest.mark.long
def test_ranks_whose_experts_get_no_tokens_do_not_hold_up_the_others(world: Worlds) -> None:
    expected, _ = train_whole(Lazy, steps=FEWER_STEPS)
    run = partial(train, "full_shard", 4, Lazy, steps=FEWER_STEPS)
    for found, _ in world(4).run(run):
        assert distance(found, expected) < 1e-5


class Descends(Mixture):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return descent_of(self)


def descend(precision: str, size: int, clips: str) -> dict[str, torch.Tensor]:
    experts = {"experts": None} if size == 1 else {}
    options = {"trainer_options": precision_options(precision), "steps": FEWER_STEPS}
    found, _ = train("full_shard", size, Descends, clips, **options, **experts)
    return {name: it.double() for name, it in found.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "clips"),
    [
        ("bf16-mixed", "norm"),
        ("16-mixed", "value"),
        ("bf16-true", "value"),
        pytest.param("16-true", "norm", marks=pytest.mark.torture),
        pytest.param("64-true", "value", marks=pytest.mark.torture),
    ],
)
def test_every_precision_trains_as_it_does_with_all_experts_on_all_ranks(
    world: Worlds, precision: str, clips: str
) -> None:
    check_precision(world, descend, precision, clips)


class Overflows(Descends):
    """Has one infinite gradient, on the rank that has the first expert; keeps loss scales."""

    def on_train_start(self) -> None:
        if dist.get_rank() == 0:
            self.blocks[0].experts[0].up.weight.register_hook(Overflow())

    def on_train_batch_end(self, *args: Any) -> None:
        scaler: Any = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.seen.append(scaler.get_scale())


def overflow(size: int) -> Any:
    experts = {"experts": None} if size == 1 else {}
    options = {"trainer_options": precision_options("16-mixed"), "steps": FEWER_STEPS}
    return train("full_shard", size, Overflows, **options, **experts)


@pytest.mark.long
def test_all_ranks_skip_a_step_in_which_an_expert_of_one_overflows(world: Worlds) -> None:
    (expected, scales), *_ = world(4).run(overflow, 1)
    assert scales[-1] == 128
    for found, seen in world(4).run(overflow, 2):
        assert seen == scales
        assert distance(found, expected) < 1e-3


class EvenRouter(Router):
    """Experts in turn, whatever tokens are."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, weights = super().forward(x)
        return torch.arange(x.shape[0] * CHOSEN).view(-1, CHOSEN) % EXPERTS, weights


class EvenBlock(ListBlock):
    def __init__(self) -> None:
        super().__init__()
        self.router = EvenRouter()


class Counted(Mixture):
    """Counts what a micro-batch sends, and keeps which experts its routers choose."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[torch.Tensor] = []
        for block in self.blocks:
            block.router.register_forward_hook(self.keep)

    def keep(self, router: nn.Module, args: Any, output: Any) -> None:
        self.chosen.append(output[0])

    def on_train_batch_start(self, *args: Any) -> None:
        self.chosen.clear()
        self.trainer.strategy.traffic.reset()
        self.trainer.strategy.mesh.activation_traffic.reset()

    def on_before_optimizer_step(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        self.sent = dict(strategy.mesh.activation_traffic.nbytes), dict(strategy.traffic.nbytes)


class CountedEven(Counted):
    block = EvenBlock


def count(name: str, size: int, kind: type[Counted]) -> Any:
    """Bytes of activations and of parameters; choices of each block; elements of groups."""
    strategy = ShardedDP(
        name, expert_parallel_size=size, experts=Expert, auto_wrap_policy={kind.block}
    )
    trainer = make_trainer(strategy, max_steps=2, use_distributed_sampler=False)
    module = kind()
    trainer.fit(module)
    numel = {"experts": [0, 0], "rest": [0, 0]}
    for at, progress in enumerate(progresses := strategy.runtime.progresses):
        for group in progress.unit.groups:
            every = numel["experts" if group.sharded[0].spec.boxes else "rest"]
            every[0] += group.layout.padded_numel
            if at in (0, len(progresses) - 1):  # gathered once: root and last block
                every[1] += group.layout.padded_numel
    return *module.sent, torch.stack(module.chosen), numel


@pytest.mark.parametrize("kind", [CountedEven, Counted], ids=["even", "routed"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
def test_each_axis_sends_what_textbooks_say(
    world: Worlds, name: str, size: int, kind: type[Counted]
) -> None:
    ranks, rows = 4, BATCH // 4 * 4 * CHOSEN
    answers = world(ranks).run(count, name, size, kind)
    # Of each block and rank, the rows that it sends to each other one of its group, and to itself.
    sent = torch.zeros(2, ranks, size)
    for rank, (_, _, chosen, _) in enumerate(answers):
        for to in range(size):
            sent[:, rank, to] = (chosen * size // EXPERTS == to).flatten(1).sum(1)
    for rank, (activations, parameters, _, numel) in enumerate(answers):
        own, group = rank % size, slice(rank - rank % size, rank - rank % size + size)
        leaving = int(sent[:, rank].sum() - sent[:, rank, own].sum())
        arriving = int(sent[:, group, own].sum() - sent[:, rank, own].sum())
        if kind is CountedEven:
            assert leaving == arriving == 2 * rows * (size - 1) // size
        # Rows of 8 float32 go there and back, and again in backward. In each block ranks tell how many
        # rows come for each expert, and the layer, in int64; and once the end of the forward.
        told = (2 + 1) * (size - 1) * (EXPERTS // size + 1) * 8
        assert activations["all_to_all"] == 2 * (leaving + arriving) * 8 * 4 + told
        gathered = reduced = 0
        for each, among in (("experts", ranks // size), ("rest", ranks)):
            whole, once = numel[each]
            gathers = 2 * whole - once if name == "full_shard" else whole
            gathered += gathers * 4 * (among - 1) // among
            reduced += whole * 4 * (among - 1) // among
        # An all-reduce is a reduce-scatter and an all-gather; one is of the logged loss.
        logged = 2 * 4 * (ranks - 1) // ranks
        if name == "no_shard":
            assert parameters == {"all_reduce": logged + 2 * reduced}
        else:
            sent_by_kind = {"all_gather": gathered, "reduce_scatter": reduced}
            assert parameters == {"all_reduce": logged, **sent_by_kind}


LAYERS = {
    "blocks.*.router.gate": "colwise_gather_output",
    "blocks.*.experts.*.up": "colwise",
    "blocks.*.experts.*.down": "rowwise",
}
AXES: dict[str, dict[str, Any]] = {
    "experts by 2": {"expert_parallel_size": 2, "experts": Expert},
    "experts by 4": {"expert_parallel_size": 4, "experts": Expert},
    "layers by 2": {"tensor_parallel_size": 2, "tensor_parallel_plan": LAYERS},
    "layers by 4": {"tensor_parallel_size": 4, "tensor_parallel_plan": LAYERS},
    "shards": {},
}


def load_all(path: str) -> list[dict[str, torch.Tensor]]:
    policy = {"auto_wrap_policy": {ListBlock}}
    return [load_run(path, Mixture, policy | it) for it in AXES.values()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("axis", "kind", "name"),
    [
        ("experts by 2", "sharded", "full_shard"),
        ("experts by 2", "full", "no_shard"),
        ("experts by 4", "sharded", "no_shard"),
        ("experts by 4", "full", "full_shard"),
        ("layers by 2", "full", "full_shard"),
        ("layers by 4", "sharded", "shard_grad_op"),
    ],
)
def test_a_checkpoint_of_one_axis_is_loaded_with_any_other_and_by_ddp(
    world: Worlds,
    tmp_path: Path,
    axis: str,
    kind: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = content = str(tmp_path / "a.ckpt")
    options = {"expert_parallel_size": 1, "experts": None, **AXES[axis], "state_dict_type": kind}
    run = partial(train, name, 0, path=path, steps=FEWER_STEPS, **options)
    (saved, _), *_ = world(4).run(run)
    expected, _ = train_whole(Mixture, steps=FEWER_STEPS)
    assert distance({it: saved[it] for it in expected}, expected) < 1e-5
    if kind == "sharded":
        rows = {it.name: it for it in tensor_rows(read_manifest(Path(path)))}
        assert rows["model.blocks.0.experts.3.up.weight"].shape == (12, 8)
        assert main(["verify", path]) == main(["inspect", path]) == 0
        said = " ".join(capsys.readouterr().out.split())
        over = axis.replace(" by ", " over ")
        assert re.search(rf"by 4 ranks, {name}, (shards over \d, )?{over} ", said)
        content = str(tmp_path / "whole.ckpt")
        assert main(["consolidate", path, "-o", content]) == 0
    for answers in world(4).run(load_all, path):
        for found in answers:
            assert same_bits(found, saved)
    for given, at in (({}, path), (None, content)):
        for found in world(2).run(load_run, at, Mixture, given):
            assert same_bits(found, saved)


class Hooked(Mixture):
    """Halves gradients of experts, by hooks set before there are shards."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            for each in block.experts.parameters():
                each.register_hook(lambda gradient: gradient / 2)


def test_hooks_of_experts_see_their_gradients(world: Worlds) -> None:
    expected, _ = train_whole(Hooked, steps=FEWER_STEPS)
    for found, _ in world(2).run(partial(train, "full_shard", 2, Hooked, steps=FEWER_STEPS)):
        assert distance(found, expected) < 1e-5


class RoutedInside(nn.Module):
    """A layer with stacked experts and their router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        routed = TokenDispatch(self.gate(flat).topk(1)[1], self)
        parts = routed.dispatch(flat).split(routed.counts)
        rows = torch.cat([part @ each for part, each in zip(parts, self.up, strict=True)])
        return routed.combine(rows).sum(1).view_as(x)


class Rows(nn.Module):
    """Stacked experts with a forward of their own, for rows in the order of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)

    def forward(self, parts: Any) -> torch.Tensor:
        return torch.cat([part @ each for part, each in zip(parts, self.up, strict=False)])


class Pairs(nn.Module):
    """The same experts, which send the tokens themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)

    def forward(self, flat: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        routed = TokenDispatch(index, self)
        parts = routed.dispatch(flat).split(routed.counts)
        rows = [part @ each for part, each in zip(parts, self.up, strict=True)]
        return routed.combine(torch.cat(rows))


class RowsBlock(nn.Module):
    """A layer that calls its experts' module."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Rows()

    def rows(self, parts: Any) -> torch.Tensor:
        return self.experts(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        index, weights = self.router(flat)
        routed = TokenDispatch(index, self.experts)
        rows = self.rows(routed.dispatch(flat).split(routed.counts))
        return x + (routed.combine(rows) * weights.unsqueeze(-1)).sum(1).view_as(x)


class PastRowsBlock(RowsBlock):
    """A layer that computes with its experts' parameters and does not call their module."""

    def rows(self, parts: Any) -> torch.Tensor:
        return self.experts.forward(parts)


class PairsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Pairs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        index, weights = self.router(flat)
        each = self.experts(flat, index)
        return x + (each * weights.unsqueeze(-1)).sum(1).view_as(x)


class Raw(nn.Module):
    """An expert of a list with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.up


def see_norm(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return output * next(module.parameters()).norm()


class ReadingExpert(Expert):
    """An expert that reads the weight of a layer in it, and that has a hook which does so as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(see_norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * nn.functional.linear(x, self.up.weight).sum(
            -1, keepdim=True
        )


class ReadingBlock(ListBlock):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([ReadingExpert() for _ in range(EXPERTS)])


class RawBlock(ListBlock):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Raw() for _ in range(EXPERTS)])


class Watching(Mixture):
    """Adds norms of an expert's parameters to its loss, before and after the forward, without gradients."""

    def watched(self) -> torch.Tensor:
        experts: Any = self.blocks[1].experts
        last = experts[EXPERTS - 1] if isinstance(experts, nn.ModuleList) else experts
        with torch.no_grad():
            return next(last.parameters()).norm()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        before = self.watched()
        return super().loss(x) + before + 2 * self.watched()


class SendingBlock(RowsBlock):
    """Sends tokens itself, over the group of expert ranks."""

    mesh: DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        index, weights = self.router(flat)
        order = index.flatten().argsort(stable=True)
        rows = flat[order // CHOSEN]
        leaving = index.flatten().bincount(minlength=EXPERTS)
        if self.mesh is None:
            rows = self.experts(rows.split(leaving.tolist()))
        else:
            group, size = self.mesh.get_group(), self.mesh.size()
            arriving = torch.empty_like(leaving)
            dist.all_to_all_single(arriving, leaving, group=group)
            there, here = (it.view(size, -1).sum(1).tolist() for it in (leaving, arriving))
            rows = all_to_all_single_autograd(rows, here, there, group)
            experts = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(arriving)
            by_expert = experts.argsort(stable=True)
            parts = rows[by_expert].split(experts.bincount(minlength=EXPERTS // size).tolist())
            made = self.experts(parts)
            rows = torch.empty_like(made).index_copy(0, by_expert, made)
            rows = all_to_all_single_autograd(rows, there, here, group)
        each = torch.empty_like(rows).index_copy(0, order, rows).view(*index.shape, -1)
        return x + (each * weights.unsqueeze(-1)).sum(1).view_as(x)


class NumberedBlock(SendingBlock):
    """Sends tokens by a dispatch that knows the number of experts, and not their module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        index, weights = self.router(flat)
        routed = TokenDispatch(index, EXPERTS, self.mesh)
        rows = self.experts(routed.dispatch(flat).split(routed.counts))
        return x + (routed.combine(rows) * weights.unsqueeze(-1)).sum(1).view_as(x)


class Sending(Mixture):
    block = SendingBlock

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for block in self.blocks:
                block.mesh = self.device_mesh["expert_parallel"]


class Numbered(Sending):
    block = NumberedBlock


@pytest.mark.long
@pytest.mark.parametrize("kind", [Sending, Numbered])
def test_a_model_may_send_tokens_by_itself(world: Worlds, kind: type[Sending]) -> None:
    expected, losses = train_whole(kind, steps=FEWER_STEPS)
    run = partial(train_all, 2, kind, STRATEGIES, steps=FEWER_STEPS, experts=Rows)
    for answers in world(4).run(run):
        for found, seen in answers:
            assert distance(found, expected) < 1e-5
            assert max(abs(a - b) for a, b in zip(seen, losses, strict=True)) < 1e-5


class WithRows(Watching):
    block = RowsBlock


class WithPairs(Watching):
    block = PairsBlock


class WithRaw(Watching):
    block = RawBlock


class WithReading(Watching):
    block = ReadingBlock


class WithStacked(Watching):
    block = StackedBlock


def watch(kind: type[Watching]) -> list[Any]:
    experts = {WithRaw: Raw, WithReading: ReadingExpert}.get(kind, "blocks.*.experts")
    run = partial(train, size=2, kind=kind, steps=FEWER_STEPS, experts=experts)
    return [*(run(it) for it in STRATEGIES), run("full_shard", auto_wrap_policy=None)]


@pytest.mark.long
@pytest.mark.parametrize("kind", [WithRows, WithPairs, WithRaw, WithReading, WithStacked])
def test_code_outside_of_experts_sees_whole_parameters(world: Worlds, kind: type[Watching]) -> None:
    expected, losses = train_whole(kind, steps=FEWER_STEPS)
    for answers in world(2).run(watch, kind):
        for found, seen in answers:
            assert distance(found, expected) < 1e-5
            assert max(abs(a - b) for a, b in zip(seen, losses, strict=False)) < 1e-5


def copies_of(module: nn.Module) -> list[nn.Module]:
    """Its deep copy, and what is unpickled of it."""
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    return [deepcopy(module), torch.load(stored, weights_only=False)]


def train_copied(kind: type[Mixture], compiled: bool = False) -> list[float]:
    """Differences of what copies of the blocks compute from what an undivided model does."""
    differences: list[float] = []

    def compare(module: Any, *_: Any) -> None:
        x = torch.linspace(-1, 1, 32).view(4, 8)
        undivided = kind()
        undivided.load_state_dict(
            {name: it.full_tensor() for name, it in module.state_dict().items()}
        )
        for copied in copies_of(module.blocks):
            assert all(
                it.shape == undivided.state_dict()[f"blocks.{name}"].shape
                for name, it in copied.named_parameters()
            )
            for block in copied.children() if compiled else ():
                block.compile(backend="aot_eager")
            made, expected = copied(x), undivided.blocks(x)
            differences.append(float((made - expected).detach().abs().max()))
            made.sum().backward()
            assert any(it.grad is not None for it in copied.parameters())

    copying = type(
        f"Copied{kind.__name__}",
        (kind,),
        {"on_train_start": compare, "on_train_batch_end": compare},
    )
    experts = {WithRaw: Raw, Stacked: None, Mixture: Expert}.get(kind, "blocks.*.experts")
    train("full_shard", 2, copying, steps=1, experts=experts)
    return differences


@pytest.mark.parametrize("kind", [WithRows, WithPairs, WithRaw, Stacked])
def test_copies_of_a_model_have_all_experts(world: Worlds, kind: type[Mixture]) -> None:
    for differences in world(2).run(train_copied, kind):
        assert len(differences) == 6 and max(differences) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("kind", [Mixture, WithRows, Stacked])
def test_compiled_copies_of_a_model_have_all_experts(world: Worlds, kind: type[Mixture]) -> None:
    for differences in world(2).run(train_copied, kind, True):
        assert len(differences) == 6 and max(differences) < 1e-6


class BalancedBlock(StackedBlock):
    """Computes with the number of its experts, as losses for their balance do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.experts.num_experts * self.router.gate.bias.pow(2))[0]


class Balanced(Mixture):
    block = BalancedBlock


def train_compiled(kind: type[Mixture], **options: Any) -> Any:
    """Train and evaluate with compiled blocks."""

    def compile_blocks(module: Any) -> None:
        for block in module.blocks:
            block.compile(backend="aot_eager")

    undivided = kind()

    def copy_weights(module: Any) -> None:
        undivided.load_state_dict(
            {key: it.full_tensor() for key, it in module.state_dict().items()}
        )

    def evaluate(module: Any, batch: list[torch.Tensor]) -> None:
        difference = float(module.loss(batch[0]) - undivided.loss(batch[0]))
        assert abs(difference) < 1e-5

    methods = {
        "on_fit_start": compile_blocks,
        "on_validation_start": copy_weights,
        "validation_step": evaluate,
        "val_dataloader": kind.train_dataloader,
    }
    compiled = type(f"Compiled{kind.__name__}", (kind,), methods)
    evaluates = {"limit_val_batches": 1, "num_sanity_val_steps": 1, "val_check_interval": 2}
    options = {"experts": None if issubclass(kind, Stacked | Balanced) else Expert, **options}
    return train("full_shard", 2, compiled, steps=FEWER_STEPS, trainer_options=evaluates, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Mixture, {}),
        (Stacked, {}),
        (Balanced, {}),
        (WithRows, {"experts": Rows}),
        (Mixture, {"activation_checkpointing": {ListBlock}}),
        (Stacked, {"activation_checkpointing": {StackedBlock}}),
    ],
)
def test_compiled_layers_of_experts_train_and_evaluate_as_in_one_process(
    world: Worlds, kind: type[Mixture], options: dict[str, Any]
) -> None:
    expected, losses = train_whole(kind, steps=FEWER_STEPS)
    for found, seen in world(2).run(partial(train_compiled, kind, **options)):
        assert distance(found, expected) < 1e-5
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=False)) < 1e-5


class Recomputing(Rows):
    """Recomputes a part of its own forward."""

    def forward(self, parts: Any) -> Any:
        return checkpoint(super().forward, parts, use_reentrant=False)


class RecomputingBlock(RowsBlock):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Recomputing()


class RecomputesInside(Mixture):
    block = RecomputingBlock


class Overlapping(RowsBlock):
    """Has tokens of two halves under way at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = x.flatten(0, -2).chunk(2)
        chosen = [self.router(it) for it in halves]
        routed = [TokenDispatch(index, self.experts) for index, _ in chosen]
        first = self.experts(routed[0].dispatch(halves[0]).split(routed[0].counts))
        arrived = routed[1].dispatch(halves[1]).split(routed[1].counts)
        made = [routed[0].combine(first), routed[1].combine(self.experts(arrived))]
        out = [(it * w.unsqueeze(-1)).sum(1) for it, (_, w) in zip(made, chosen, strict=True)]
        return x + torch.cat(out).view_as(x)


class Overlapped(Mixture):
    block = Overlapping


class Outer(nn.Module):
    """Stacked experts in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rows()

    def forward(self, parts: Any) -> torch.Tensor:
        return self.inner(parts)


class NestedBlock(RowsBlock):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Outer()  # type: ignore[assignment]


class Nested(Mixture):
    block = NestedBlock


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WithRaw, {"activation_checkpointing": {Raw}}),
        (WithReading, {"activation_checkpointing": {ReadingExpert}}),
        (WithStacked, {"activation_checkpointing": {StackedExperts}}),
        (WithRows, {"activation_checkpointing": {Rows}}),
        (WithPairs, {"activation_checkpointing": {Pairs}}),
        (Overlapped, {}),
        (Nested, {"auto_wrap_policy": {Rows, NestedBlock}}),
    ],
)
def test_experts_compute_with_their_own_part_alone(
    world: Worlds, kind: type[Mixture], options: dict[str, Any]
) -> None:
    experts = {WithRaw: Raw, WithReading: ReadingExpert}.get(kind, "blocks.*.experts")
    expected, losses = train_whole(kind, steps=FEWER_STEPS)
    run = partial(train, "full_shard", 2, kind, steps=FEWER_STEPS, experts=experts, **options)
    for found, seen in world(2).run(run):
        assert distance(found, expected) < 1e-5
        assert max(abs(a - b) for a, b in zip(seen, losses, strict=False)) < 1e-5


class Penalized(WithRows):
    """Has a penalty on stacked parameters of a module of its own."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x) + self.blocks[1].experts.up.pow(2).sum()


class PastRows(Mixture):
    block = PastRowsBlock


class CompiledPastRows(PastRows):
    """The same in compiled code, with frozen experts."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.experts.requires_grad_(False)
            block.compile(backend="aot_eager")


class Skipping(Mixture):
    """Skips another layer on each rank."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        own: Any = self.blocks[dist.get_rank()]
        return self.head(own(x)).pow(2).mean()


class SkippingStacked(Skipping):
    block = StackedBlock


class SkippingLast(Mixture):
    """Skips layers on one rank."""

    left, skipped_from = 1, 1
    """Layers that are left, from which batch on."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        skips = dist.get_rank() == 1 and batch_idx >= self.skipped_from
        x = batch[0]
        for block in self.blocks[: self.left if skips else None]:
            x = block(x)
        return self.head(x).pow(2).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class SkippingAtOnce(SkippingLast):
    skipped_from = 0


class SkippingAll(SkippingLast):
    left = 0


class SkippingOther(SkippingLast):
    """Its last layer has fewer experts."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[1].experts[2:]
        self.blocks[1].router.gate = nn.Linear(8, 2)


MANUAL = {
    "max_steps": 2,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
}


class SkippingManual(SkippingLast):
    """Its backward runs within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.optimizers().zero_grad()


class CalledBetween(WithRows):
    """Calls its experts between steps, where their unit is the root's."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.blocks[0](torch.ones(2, 3, 8))


class Named(Mixture):
    """Names a whole layer as its experts."""

    block = RoutedInside


class Lonely(nn.Module):
    """Stacked experts to which no token is sent: each rank uses those that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(x @ each for each in self.up)


class Unsent(Mixture):
    block = Lonely


class Predicting(Mixture):
    """Has one batch more on the second rank."""

    def predict_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(2 + dist.get_rank(), 4, 8)))

    def predict_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.blocks(batch[0])


def predict(name: str, limit: int) -> int:
    strategy = ShardedDP(name, expert_parallel_size=2, experts=Expert)
    trainer = make_trainer(strategy, use_distributed_sampler=False, limit_predict_batches=limit)
    return len(trainer.predict(Predicting()) or ())


def predict_unevenly(name: str) -> None:
    assert predict(name, 2) == 2
    with pytest.raises(ConfigurationError, match=r"found \[2\] on rank 0, \[3\] on rank 1"):
        predict(name, 4)


@pytest.mark.parametrize("name", ["full_shard", "no_shard"])
def test_ranks_evaluate_equal_numbers_of_batches(world: Worlds, name: str) -> None:
    world(2).run(predict_unevenly, name)


class Stream(IterableDataset[torch.Tensor]):
    """One batch after the other, of which only its iterator knows how many there are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.zeros(self.count, 4, 8)


class Streaming(Mixture):
    """Evaluates streams, by rank of so many batches each."""

    def __init__(self, *counts: tuple[int, int]) -> None:
        super().__init__()
        self.counts, self.evaluated = counts, 0

    def streams(self) -> list[Any]:
        return [DataLoader(Stream(count[dist.get_rank()])) for count in self.counts]

    val_dataloader = predict_dataloader = streams

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), sync_dist=True)
        self.evaluated += 1

    def predict_step(
        self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> torch.Tensor:
        self.evaluated += 1
        return self.blocks(batch)


class StreamingItself(Streaming):
    """Takes its batches itself."""

    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        self.loss(next(dataloader_iter)[0])


def evaluate_streams(run: str) -> None:
    def evaluate(module: Streaming, **options: Any) -> int:
        strategy = ShardedDP("no_shard", expert_parallel_size=2, experts=Expert)
        trainer = make_trainer(
            strategy, max_steps=1, use_distributed_sampler=False, val_check_interval=1, **options
        )
        getattr(trainer, run)(module)
        return module.evaluated

    def refuse(*counts: tuple[int, int]) -> str:
        module = Streaming(*counts)
        with pytest.raises(ConfigurationError) as caught:
            evaluate(module)
        return f"{module.evaluated}: {caught.value}"

    hook = "predict" if run == "predict" else "val"
    assert evaluate(Streaming((2, 2), (3, 3))) == 5
    assert evaluate(Streaming((0, 0), (2, 2))) == 2
    assert evaluate(Streaming((2, 3)), **{f"limit_{hook}_batches": 2}) == 2
    found = refuse((2, 3))
    assert found.startswith("2: expert_parallel_size needs equal numbers of batches")
    assert f"loader 0 of {hook}_dataloader (of a Stream)" in found
    assert "rank 0 has 2, rank 1 has more than 2" in found
    assert f"Trainer(limit_{hook}_batches=2)" in found
    found = refuse((2, 2), (2, 1))
    assert found.startswith("3: ") and f"loader 1 of {hook}_dataloader" in found
    assert "rank 0 has more than 1, rank 1 has 1" in found
    # As many batches in all, of which the last of one loader meets the first of the next.
    assert "loader 0 of" in refuse((2, 1), (1, 2))
    assert refuse((0, 1)).startswith("0: ")
    if run == "validate":
        warnings.filterwarnings("ignore", ".*dataloader_iter")
        with pytest.raises(ConfigurationError, match="takes its batches itself"):
            evaluate(StreamingItself((2, 2)))


@pytest.mark.parametrize("run", ["validate", "fit", "predict"])
def test_ranks_evaluate_streams_as_long_as_all_have_batches(world: Worlds, run: str) -> None:
    world(2).run(evaluate_streams, run)


def warn_of_unsent() -> None:
    strategy = ShardedDP(expert_parallel_size=2, experts=Lonely)
    trainer = make_trainer(strategy, max_steps=2, use_distributed_sampler=False)
    expected = "no TokenDispatch" if dist.get_rank() == 0 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Unsent())
    found = [str(it.message) for it in caught if "no TokenDispatch" in str(it.message)]
    assert len(found) == (expected is not None)
    assert all("blocks.0, blocks.1" in it for it in found)


def test_stacked_experts_to_which_nothing_is_sent_are_told(world: Worlds) -> None:
    world(2).run(warn_of_unsent)


class Everyone(ListBlock):
    """Calls all experts, as in one process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(each(x) for each in self.experts)


class Everywhere(Mixture):
    block = Everyone


class Dropping(ListBlock):
    """Gives dropped tokens no expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TokenDispatch(torch.full((x.shape[0], 1), -1), self.experts)
        return x


class Dropped(Mixture):
    block = Dropping


class WithBuffers(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].experts[1].register_buffer("seen", torch.zeros(1))


class Unlike(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].experts[1].up = nn.Linear(8, 12, bias=False)


class Odd(Mixture):
    def __init__(self) -> None:
        super().__init__()
        del self.blocks[0].experts[3]


class Tied(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].experts[1].up = self.blocks[0].experts[0].up


class Whole(Mixture):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([it for it in self.parameters() if it.ndim > 1])


class Averaged(Mixture):
    def configure_callbacks(self) -> Any:
        return EMAWeightAveraging()


class Regular(Mixture):
    """Uses experts outside of their unit."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x) + self.blocks[0].experts[0].up.weight.sum()


def refuse(kind: type[Mixture], what: str, options: dict[str, Any]) -> None:
    with pytest.raises((ConfigurationError, RuntimeError, ValueError), match=what):
        train("full_shard", 2, kind, steps=1, **options)


@pytest.mark.parametrize(
    ("kind", "what", "options"),
    [
        (WithBuffers, "experts with buffers", {}),
        (Unlike, "different parameters", {}),
        (Odd, "has 3 experts", {}),
        (Tied, "registered at several places", {}),
        (Whole, "element-wise optimizers", {}),
        (Regular, "used outside of its unit", {}),
        (Penalized, "used outside of its unit", {"experts": Rows}),
        (Skipping, "experts of different layers at a time", {"auto_wrap_policy": None}),
        (SkippingLast, "'blocks.1.experts', another rank's forward has ended", {}),
        (
            SkippingManual,
            "'blocks.1.experts', another rank's forward has ended",
            {"trainer_options": MANUAL},
        ),
        (SkippingAtOnce, "have reached blocks.1 and the end of the pass at a time", {}),
        (SkippingLast, "another rank's forward has ended", {"auto_wrap_policy": None}),
        (SkippingAll, "the end of the pass instead of blocks.0.*empty batch", {}),
        (SkippingOther, "'blocks.1.experts', another rank's forward has ended", {}),
        (
            SkippingStacked,
            "experts of different layers at a time",
            {"experts": None, "auto_wrap_policy": None},
        ),
        (
            CalledBetween,
            "'blocks.0.experts' was called where its unit is not gathered",
            {"experts": Rows, "auto_wrap_policy": None},
        ),
        (RecomputesInside, "a recomputation reads it", {"experts": Recomputing}),
        (PastRows, "was not called since dispatch", {"experts": Rows}),
        (CompiledPastRows, "was not called since dispatch", {"experts": Rows}),
        (Mixture, "none was found", {"experts": None}),
        (Mixture, "members of an nn.ModuleList", {"experts": Router}),
        (Averaged, "EMAWeightAveraging", {}),
        (Named, "looks like their router", {"experts": RoutedInside}),
        (Everywhere, "'blocks.0.experts.[02]' is an expert of another rank", {}),
        (Dropped, "keeps an expert, and has the weight 0", {}),
    ],
)
def test_models_that_are_not_supported_are_refused(
    world: Worlds, kind: type[Mixture], what: str, options: dict[str, Any]
) -> None:
    world(2).run(refuse, kind, what, options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"expert_parallel_size": 0}, "whole number of at least 1"),
        ({"expert_parallel_size": 2, "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"expert_parallel_size": 2, "cpu_offload": True}, "cpu_offload"),
        ({"expert_parallel_size": 2, "uneven_units": True}, "uneven_units"),
        ({"expert_parallel_size": 2, "uneven_batches": "join"}, "uneven_batches"),
        ({"expert_parallel_size": 2, "reshard_after_forward": 2}, "reshard_after_forward"),
        ({"expert_parallel_size": 2, "optimizer_shard": "world"}, "optimizer_shard"),
        ({"experts": Expert}, "expert_parallel_size=2 or more"),
        ({"expert_parallel_size": 2, "experts": 3}, "classes of modules with experts"),
    ],
)
def test_options_that_were_not_tried_with_it_are_refused(
    options: dict[str, Any], what: str
) -> None:
    sharding = "hybrid_shard" if "optimizer_shard" in options else "full_shard"
    with pytest.raises(ConfigurationError, match=what):
        ShardedDP(sharding, **options)
