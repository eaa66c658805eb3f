"""Plans of divided experts list what the engine's ranks send and hold; routers are taken to choose evenly."""

import json
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from gpt.mixture import MixtureGPTModule
from shardeddp import ActivationCheckpointing, ShardedDP, StepMonitor, TokenDispatch
from shardeddp.errors import ConfigurationError, UsageError
from shardeddp.lightning.planning import plan_as_set
from shardeddp.plan.hardware import Cluster, find_gpu
from shardeddp.planner.collectives import Collective
from shardeddp.planner.cost import FITTED, time_collective
from shardeddp.planner.plan import Plan, make_plan
from shardeddp.planner.transformer import Dimensions
from support.allocations import RecordsPeak
from support.experts import StackedExperts
from support.planned_traffic import LENGTH, check, counted_and_planned
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(300)

VOCABULARY, EXPERTS, CHOSEN = 24, 4, 2


class Expert(nn.Module):
    """Two layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, width) to the same."""
        return self.down(self.up(x).relu())


class Router(nn.Module):
    """Scores by which tokens get the experts in turn, whatever they are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights of tokens, (rows, CHOSEN) both."""
        turns = torch.arange(x.shape[0] * CHOSEN, device=x.device) % EXPERTS
        turns = F.one_hot(turns.view(-1, CHOSEN), EXPERTS).sum(1)
        weights, index = (self.gate(x).softmax(-1) + turns).topk(CHOSEN)
        return index, weights


class Block(nn.Module):
    """Experts in a list, to which the model sends tokens."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), Router(width)
        self.experts = self.make_experts(width, hidden)

    def make_experts(self, width: int, hidden: int) -> nn.Module:
        """A list."""
        return nn.ModuleList([Expert(width, hidden) for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, width) to the same."""
        flat = self.norm(x).flatten(0, 1)
        index, weights = self.router(flat)
        return x + self.mix(flat, index, weights).view_as(x)

    def mix(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what experts make of each token."""
        routed = TokenDispatch(index, self.experts)
        parts = routed.dispatch(x).split(routed.counts)
        experts: Any = self.experts
        rows = [experts[it](part) for it, part in zip(routed.experts, parts, strict=True)]
        return (routed.combine(torch.cat(rows)) * weights.unsqueeze(-1)).sum(1)


class StackedBlock(Block):
    """The same with stacked experts."""

    def make_experts(self, width: int, hidden: int) -> nn.Module:
        """Stacked ones."""
        return StackedExperts(EXPERTS, width, hidden)

    def mix(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As their module does it."""
        return self.experts(x, index, weights)


class Model(LightningModule):
    """Three blocks between an embedding and a head."""

    block: type[Block] = Block

    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(self.block(width, hidden) for _ in range(3)))
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token by itself."""
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Stacked(Model):
    """The same with stacked experts."""

    block = StackedBlock


def strategy_of(name: str, size: int, kind: type[Model], **more: Any) -> ShardedDP:
    """Whose experts some ranks divide."""
    if name == "hybrid_shard":
        more["shard_size"] = 2
    experts = Expert if kind is Model else None
    policy = {kind.block}
    return ShardedDP(
        name, auto_wrap_policy=policy, expert_parallel_size=size, experts=experts, **more
    )


def run(name: str, size: int, kind: type[Model], precision: str = "32-true", **more: Any) -> Any:
    """What a step sends and is planned to, after a look at what is held."""
    strategy = strategy_of(name, size, kind, **more)
    counts, planned, trainer = counted_and_planned(kind, strategy, precision)
    groups = [it for each in strategy.runtime.progresses for it in each.unit.groups]
    held = sum(it.main_shard.nbytes for it in groups)
    if name in ("full_shard", "hybrid_shard"):  # others keep gathered parameters as well
        assert planned.memory.parameters == held
    assert planned.memory.gradients == held
    (optimizer,) = trainer.optimizers
    states = sum(
        it.to_local().nbytes
        for state in optimizer.state.values()
        for key, it in state.items()
        if key != "step"
    )
    padding = sum(it.layout.padding_numel for it in groups) * 4  # nothing is stepped there
    assert planned.memory.optimizer - 2 * padding <= states <= planned.memory.optimizer
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Model, Stacked], ids=["list", "stacked"])
@pytest.mark.parametrize("name", ["full_shard", "hybrid_shard", "no_shard"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_the_plan_lists_what_ranks_with_different_experts_send_and_hold(
    world: Worlds, ranks: int, size: int, name: str, kind: type[Model]
) -> None:
    check(world, ranks, partial(run, name, size, kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("shard_optimizer", {}),
        ("shard_grad_op", {"precision": "bf16-mixed"}),
        ("full_shard", {"mixed_precision": "bfloat16"}),
        ("full_shard", {"activation_checkpointing": "auto"}),
        (
            "no_shard",
            {"activation_checkpointing": ActivationCheckpointing(save_ops=["matmul", "attention"])},
        ),
    ],
    ids=["float32", "autocast", "bfloat16", "recomputation", "selective recomputation"],
)
@pytest.mark.parametrize("kind", [Model, Stacked], ids=["list", "stacked"])
def test_so_it_does_in_other_precisions_and_where_units_are_recomputed(
    world: Worlds, name: str, more: dict[str, Any], kind: type[Model]
) -> None:
    check(world, 4, partial(run, name, 2, kind, **more))


def peaks(kind: type[Model], hidden: int, recomputation: str | None) -> tuple[int, int, int]:
    """Bytes between steps as planned; the most that a step adds, and as planned."""
    strategy = strategy_of("full_shard", 2, kind, activation_checkpointing=recomputation)
    records = RecordsPeak()
    trainer = make_trainer(
        strategy, max_steps=3, callbacks=[records], use_distributed_sampler=False
    )
    batch = torch.ones(4, 128, dtype=torch.long)
    trainer.fit(kind(64, hidden), DataLoader(batch[0].expand(100, -1), batch_size=4))  # type: ignore[arg-type]
    planned = plan_as_set(
        kind(64, hidden),
        batch,
        (("full_shard", strategy.options.sharding),),
        strategy.setting(trainer),
        "A100-80",
    ).best.memory
    resting = planned.parameters + planned.gradients + planned.optimizer
    added = max(accumulate(records.sizes))
    return resting, added, planned.in_flight + planned.activations + planned.logits


@pytest.mark.slow
@pytest.mark.parametrize("recomputation", [None, "auto"])
@pytest.mark.parametrize("hidden", [256, 16])
@pytest.mark.parametrize("kind", [Model, Stacked], ids=["list", "stacked"])
def test_the_planned_peak_is_what_ranks_allocate(
    world: Worlds, kind: type[Model], hidden: int, recomputation: str | None
) -> None:
    for resting, added, planned in world(2).run(peaks, kind, hidden, recomputation):
        error = (resting + planned) / (resting + added) - 1
        assert -0.01 < error < 0.07, f"{error:+.2%}: {added:,} bytes, {planned:,} planned"


def forward_flops(tokens: int, width: int = 8, hidden: int = 12) -> int:
    """Of experts, routers and head, counted by hand."""
    experts = tokens * CHOSEN * 2 * width * hidden
    return 2 * (3 * (experts + tokens * width * EXPERTS) + tokens * width * VOCABULARY)


def monitored() -> tuple[str, float]:
    """Why a monitor has no plan, and the FLOPs of its model in a step."""
    monitor = StepMonitor()
    trainer = make_trainer(
        strategy_of("full_shard", 2, Model),
        max_steps=3,
        callbacks=[monitor],
        use_distributed_sampler=False,
    )
    trainer.fit(Model(), DataLoader(torch.ones(100, LENGTH, dtype=torch.long), batch_size=2))  # type: ignore[arg-type]
    report = monitor.report
    assert report is not None
    return report.note, (report.model_flops_per_s or 0.0) * report.seconds


@pytest.mark.slow
def test_a_monitor_knows_the_flops_of_divided_experts(world: Worlds) -> None:
    (note, flops), _ = world(2).run(monitored)
    assert "no dense peak of this device" in note
    assert flops == pytest.approx(3 * forward_flops(2 * LENGTH))


# -- What plans say


def planned(kind: type[nn.Module] = Model, **options: Any) -> Plan:
    given = {"length": LENGTH, "inputs": ["int64:B,S"], "micro_batches": (2,), **options}
    given = {"recomputes": ("none",), "precisions": ["32-true"], "gpu": "A100-80", **given}
    return make_plan(kind, auto_wrap_policy=[Block, StackedBlock][kind is Stacked], **given)


OF_LIST: dict[str, Any] = {"experts": "blocks.*.experts.*"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Model, Stacked], ids=["list", "stacked"])
def test_all_tokens_are_computed_wherever_their_experts_are(kind: type[Model]) -> None:
    more = {"expert_parallel_sizes": (1, 2, 4)} | (OF_LIST if kind is Model else {})
    plans = {
        it.choice.expert_parallel_size: it
        for it in planned(kind, strategies=["no_shard"], **more).plans
    }
    whole, half, quarter = plans[1], plans[2], plans[4]
    for it in (half, quarter):
        assert it.tokens == whole.tokens and it.model_flops == whole.model_flops
        assert it.task.work.matmul_flops == whole.task.work.matmul_flops
    assert quarter.memory.parameters < half.memory.parameters < whole.memory.parameters
    assert quarter.step.exchanges > half.step.exchanges > whole.step.exchanges == 0
    assert whole.task.work.matmul_flops == forward_flops(2 * LENGTH)


@pytest.mark.slow
def test_few_tokens_are_traced_as_they_are() -> None:
    # Eight rows over four experts are even, and so are sixteen; of samples of one token they are not.
    options: dict[str, Any] = {"strategies": ["no_shard"], "expert_parallel_sizes": (4,), **OF_LIST}
    many = planned(length=16, micro_batches=(1,), **options).best
    few = planned(length=1, micro_batches=(16,), **options).best
    assert few.task.work.matmul_flops == many.task.work.matmul_flops
    assert few.step.exchanges == many.step.exchanges


@pytest.mark.slow
def test_plans_say_which_ranks_have_experts_and_what_is_assumed() -> None:
    plain, divided = planned(), planned(expert_parallel_sizes=(2,), **OF_LIST)
    written = (plain.yaml + plain.html()).replace(__name__, "")  # of the wrap policy's class
    assert "EP" not in str(plain) and "expert" not in written
    text = " ".join(str(divided).split())
    assert " EP " in text and "EP: neighbouring ranks that have different experts." in text
    assert "Tokens are taken to be spread evenly over experts." in text
    assert "Every 2 neighbouring ranks divide the experts among them, and send " in text
    assert "experts divided among 2 ranks" in divided.html()
    assert json.loads(divided.as_json())[0]["expert_parallel_size"] == 2
    strategy = yaml.safe_load(divided.yaml)["trainer"]["strategy"]["init_args"]
    assert strategy["expert_parallel_size"] == 2 and strategy["experts"] == OF_LIST["experts"]
    compared = planned(expert_parallel_sizes=(1, 2), strategies=["no_shard"], **OF_LIST)
    assert any(it.startswith("expert_parallel_size ") for it in compared.why()), compared.why()
    stacked = planned(Stacked, expert_parallel_sizes=(2,))
    assert "experts:" not in stacked.yaml


def test_an_all_to_all_between_nodes_has_its_ranks_share_of_the_network() -> None:
    cluster = Cluster(gpu=find_gpu("H100-80"), count=16, per_node=8, network_gbits=400)
    near, far = (
        time_collective(
            Collective(kind="all_to_all", phase="layer", unit=0, nbytes=10**9, ranks=ranks),
            cluster,
            FITTED,
        )
        for ranks in (8, 16)
    )
    latency = (FITTED.latency_us + 15 * FITTED.hop_us) * 1e-6
    assert far - latency == pytest.approx(0.5e9 / (400 / 8 * FITTED.network * 1e9))
    assert near < far / 3


class NeedsValues(Model):
    """Reads how many tokens are what."""

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Depends on values."""
        assert int(tokens.max()) < VOCABULARY
        return super().training_step(tokens)


class CallingBlock(Block):
    """Calls all experts on every rank."""

    def mix(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Their sum."""
        experts: Any = self.experts
        return torch.stack([it(x) for it in experts]).sum(0)


class CallsAll(Model):
    """Sends no tokens."""

    block = CallingBlock


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            Model,
            {"expert_parallel_sizes": (3,)},
            "expert_parallel_size=3 does not divide the 8 ranks",
        ),
        (
            Model,
            {"expert_parallel_sizes": (8,)},
            "4 experts, which expert_parallel_size=8 does not",
        ),
        (Model, {"expert_parallel_sizes": (2,), "experts": None}, "none was found that has them"),
        (Model, {"expert_parallel_sizes": (2,), "experts": 3}, "classes of modules with experts"),
        (Model, {}, "experts needs expert_parallel_size=2 or more"),
        (
            Model,
            {"expert_parallel_sizes": (2,), "tensor_parallel_sizes": (2,)},
            "do not work together yet",
        ),
        (
            Model,
            {"expert_parallel_sizes": (2,), "offloads": ("params",)},
            "params do not go with expert_parallel_size=2 yet",
        ),
        (CallsAll, {"expert_parallel_sizes": (2,)}, "'blocks.0.experts.2' is an expert of another"),
        (NeedsValues, {"expert_parallel_sizes": (2,)}, "3,012 parameters, their gradients"),
    ],
)
def test_what_cannot_be_divided_is_said(
    kind: type[Model], options: dict[str, Any], said: str
) -> None:
    expected = ConfigurationError if kind is NeedsValues else UsageError
    with pytest.raises(expected) as caught:
        planned(kind, **{**OF_LIST, **options})
    assert said in str(caught.value)


def test_a_transformer_of_dimensions_has_no_experts() -> None:
    dims = Dimensions(layers=2, width=16, heads=2, vocabulary=32)
    with pytest.raises(UsageError, match="none was found"):
        make_plan(dims, length=8, micro_batches=(1,), expert_parallel_sizes=(2,))


@pytest.mark.long
@pytest.mark.slow
def test_the_example_with_a_mixture_of_experts_is_planned() -> None:
    found = make_plan(
        MixtureGPTModule,
        arguments={"dim": 32, "num_layers": 2, "num_heads": 2},
        inputs=["int64:B,S", "int64:B,S"],
        length=16,
        micro_batches=(4,),
        recomputes=("none",),
        expert_parallel_sizes=(1, 4),
        experts="gpt.blocks.*.mlp.experts.*",
    )
    assert {it.choice.expert_parallel_size for it in found.plans} == {1, 4}
    assert "spread evenly" in str(found)
