"""Plans of split layers list what the engine's ranks exchange, in calls and bytes, and say what cannot be planned."""

import json
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from shardeddp import ActivationCheckpointing, ShardedDP
from shardeddp.errors import UsageError
from shardeddp.planner.plan import Plan, make_plan
from shardeddp.planner.transformer import Dimensions
from support.planned_traffic import LENGTH, check, counted_and_planned
from world import Worlds

pytestmark = pytest.mark.timeout(300)

WIDTH, HEADS, VOCABULARY = 8, 4, 24


class Attention(nn.Module):
    """Queries, keys and values in one weight, viewed as heads by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, WIDTH) to the same."""
        parts = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two layers, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, WIDTH) to the same."""
        x = x + self.attention(self.first(x))
        return x + self.down(self.up(self.second(x)).relu())


class Model(LightningModule):
    """Three blocks between an embedding and a head, and what a step of the last micro-batches has sent."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token by itself."""
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


WHOLE = {
    "embedding": "embedding_rowwise",
    "blocks.*.attention.qkv": "packed_colwise:3",
    "blocks.*.attention.num_heads": "divide",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
PARTS = {
    "blocks": ["split_sequence_input", "gather_sequence_output"],
    "blocks.*.first": "sequence_parallel",
    "blocks.*.second": "sequence_parallel",
    "blocks.*.attention": "gather_sequence",
    "blocks.*.attention.qkv": "packed_colwise:3",
    "blocks.*.attention.num_heads": "divide",
    "blocks.*.attention.out": "rowwise_sequence",
    "blocks.*.up": ["gather_sequence", "colwise"],
    "blocks.*.down": "rowwise_sequence",
}


def run_split(name: str, size: int, plan: Any, precision: str = "32-true", **more: Any) -> Any:
    """What a step sends and is planned to."""
    if name == "hybrid_shard":
        more["shard_size"] = 1
    strategy = ShardedDP(
        name,
        auto_wrap_policy={Block},
        tensor_parallel_size=size,
        tensor_parallel_plan=plan,
        **more,
    )
    return counted_and_planned(Model, strategy, precision)[0]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [WHOLE, PARTS], ids=["whole sequences", "parts of sequences"])
@pytest.mark.parametrize("name", ["full_shard", "no_shard"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_the_plan_lists_what_ranks_of_split_layers_send(
    world: Worlds, ranks: int, size: int, name: str, plan: Any
) -> None:
    check(world, ranks, partial(run_split, name, size, plan))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("hybrid_shard", {}),
        ("shard_grad_op", {"precision": "bf16-mixed"}),
        ("full_shard", {"mixed_precision": "bfloat16"}),
        ("full_shard", {"activation_checkpointing": "auto"}),
        (
            "no_shard",
            {"activation_checkpointing": ActivationCheckpointing(save_ops=["matmul", "attention"])},
        ),
    ],
    ids=["replicas of shards", "autocast", "bfloat16", "recomputation", "selective recomputation"],
)
@pytest.mark.parametrize("plan", [WHOLE, PARTS], ids=["whole sequences", "parts of sequences"])
def test_so_it_does_in_other_precisions_and_where_units_are_recomputed(
    world: Worlds, name: str, more: dict[str, Any], plan: Any
) -> None:
    check(world, 4, partial(run_split, name, 2, plan, **more))


# -- What plans say

DIMENSIONS = Dimensions(layers=3, width=64, heads=4, kv_heads=2, vocabulary=128)


def planned(*sizes: int, **options: Any) -> Plan:
    given = {"length": 32, "micro_batches": (2,), "recomputes": ("none",), **options}
    return make_plan(DIMENSIONS, gpu="A100-80", tensor_parallel_sizes=sizes, **given)


@pytest.mark.slow
def test_ranks_share_what_is_left_of_the_ranks_and_have_a_part_of_the_layers() -> None:
    plans = {
        it.choice.tensor_parallel_size: it for it in planned(1, 2, strategies=["no_shard"]).plans
    }
    whole, split = plans[1], plans[2]
    assert (whole.tokens, split.tokens) == (8 * 2 * 32, 4 * 2 * 32)
    assert split.model_flops == whole.model_flops / 2
    assert 0.5 < split.memory.parameters / whole.memory.parameters < 0.75
    assert split.memory.activations < whole.memory.activations
    assert split.task.work.matmul_flops == pytest.approx(whole.task.work.matmul_flops / 2)
    assert whole.step.exchanges == 0 < split.step.exchanges
    sharded = planned(2, strategies=["hybrid_shard"]).plans
    assert {it.choice.shard_size for it in sharded} == {2, 4}
    assert {it.stride for it in sharded[0].task.collectives if it.phase == "forward"} == {2}


@pytest.mark.slow
def test_only_plans_that_split_layers_speak_of_it() -> None:
    plain, split = planned(1), planned(2)
    for text in (str(plain), plain.html()):
        assert not any(it in text for it in ("TP", "split", "tensor_parallel"))
    lines = str(split)
    assert " TP " in lines
    assert "tensor_parallel_size: 2\n      tensor_parallel_plan: auto" in lines
    assert "queries, keys, values, up and gate by columns" in " ".join(lines.split())
    assert "Each layer is split over 2 neighbouring ranks" in lines
    assert "layers split over 2 ranks" in split.html() and "exchanges" in split.html()
    first = json.loads(split.as_json())[0]
    assert first["tensor_parallel_size"] == 2 and first["step_seconds"]["exchanges"] > 0
    compared = planned(1, 2, strategies=["full_shard"])
    assert any("tensor_parallel_size 2 4: " in it for it in compared.why()), compared.why()


@pytest.mark.slow
def test_a_plan_of_names_is_written_out_to_copy() -> None:
    found = ShardedDP.plan(
        Model,
        inputs=["int64:B,S"],
        length=LENGTH,
        tensor_parallel_sizes=(2,),
        tensor_parallel_plan=PARTS,
    )
    strategy = yaml.safe_load(found.yaml)["trainer"]["strategy"]["init_args"]
    assert strategy["tensor_parallel_plan"] == PARTS


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ((3,), {}, "tensor_parallel_size=3 does not divide the 8 ranks of a node"),
        ((16,), {"gpus": 16}, "have to be on one node"),
        ((4,), {}, "num_key_value_heads', which is 2, by tensor_parallel_size=4"),
        (
            (2,),
            {"tensor_parallel_plan": {"blocks.*.no": "colwise"}},
            "'blocks.*.no', which is none",
        ),
        ((2,), {"tensor_parallel_plan": {}}, "no layer of the module is in it"),
        ((2,), {"tensor_parallel_plan": {"output": ColwiseParallel()}}, "DTensors are not planned"),
        (
            (2,),
            {"tensor_parallel_plan": {"blocks.*.up": "colwise"}},
            "a rank's 1/2 of its features",
        ),
        ((1,), {"tensor_parallel_plan": {"output": "colwise"}}, "tensor_parallel_size=2 or more"),
        ((2,), {"offloads": ("params",)}, "params do not go with tensor_parallel_size=2"),
    ],
)
def test_what_cannot_be_split_is_said(sizes: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(*sizes, **options)
    assert said in str(caught.value)


def test_a_module_without_a_plan_of_names_is_told_what_is_planned() -> None:
    with pytest.raises(
        UsageError, match="what configure_model splits by parallelize_module is not"
    ):
        make_plan(Model, inputs=["int64:B,S"], length=LENGTH, tensor_parallel_sizes=(2,))


@pytest.mark.slow
def test_ranks_keep_part_of_the_activations_where_sequences_are_split() -> None:
    options: dict[str, Any] = {"inputs": ["int64:B,S"], "length": 64, "strategies": ["no_shard"]}
    options |= {"tensor_parallel_sizes": (4,), "recomputes": ("none",), "precisions": ["32-true"]}
    whole, parts = (
        make_plan(Model, tensor_parallel_plan=it, micro_batches=(8,), **options).best
        for it in ({k: v for k, v in WHOLE.items() if k.startswith("blocks")}, PARTS)
    )
    assert parts.memory.activations < 0.8 * whole.memory.activations
