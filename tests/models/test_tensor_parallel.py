"""Models of transformers, split over ranks by the plans that they bring along, lose what one process does."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

from shardeddp import ShardedDP
from shardeddp.errors import ConfigurationError
from support.tensor_parallel import (
    Family,
    difference,
    make_model,
    tokens,
    train_alone,
    train_split,
)
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)

TRIED = (
    ("gemma2", "qwen2", "phi3", "cohere2", "olmo2", "glm", "starcoder2"),
    ("granite", "gpt_neox", "nemotron", "helium", "smollm3", "exaone4", "seed_oss"),
    ("qwen3_moe", "olmoe", "deepseek_v3", "longcat_flash", "llama4_text", "jamba", "glm4_moe"),
)
"""Families for one step each: dense ones, and experts, latent attention and state spaces."""


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_losses_of_twenty_steps_are_those_of_one_process(world: Worlds, kind: str) -> None:
    expected = train_alone(kind, {}, 20)
    for found in world(2).run(train_split, kind, {}, 20, 2):
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5


def one_step_of_each(kinds: tuple[str, ...]) -> dict[str, list[float]]:
    return {kind: train_split(kind, {}, 1, 2) for kind in kinds}


@pytest.mark.parametrize("kinds", TRIED, ids=lambda kinds: kinds[0])
def test_families_take_a_step_as_one_process_does(world: Worlds, kinds: tuple[str, ...]) -> None:
    for found in world(2).run(one_step_of_each, kinds):
        for kind in kinds:
            assert difference(found[kind], train_alone(kind, {}, 1)) < 1e-5, kind


def test_embeddings_are_split_with_the_head_that_they_are_tied_to(world: Worlds) -> None:
    tied = {"tie_word_embeddings": True}
    for found in world(2).run(train_split, "llama", tied, 3, 2):
        assert difference(found, train_alone("llama", tied, 3)) < 1e-5


class Generating(Family):
    def predict_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return generated(self.model, batch[0])


def generate() -> tuple[list[list[int]], int]:
    strategy = ShardedDP(tensor_parallel_size=2, tensor_parallel_plan="auto")
    trainer = make_trainer(strategy, use_distributed_sampler=False)
    module = Generating("llama", {}, 1)
    (found,) = trainer.predict(module, DataLoader(TensorDataset(tokens(2)), batch_size=2))
    return found.tolist(), module.model.model.layers[0].self_attn.q_proj.weight.to_local().numel()


def generated(model: Any, prompts: torch.Tensor) -> torch.Tensor:
    return model.generate(
        prompts[:, :4], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def test_text_is_generated_as_by_one_process(world: Worlds) -> None:
    expected = generated(make_model("llama").eval(), tokens(2)).tolist()
    for found, numel in world(2).run(generate):
        assert found == expected
        assert numel == 64 * 64 // 2  # the other rank has the other heads


def refuse(kind: str, size: int) -> str:
    transformers.logging.set_verbosity_error()
    with pytest.raises(ConfigurationError) as caught:
        train_split(kind, {}, 1, size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "size", "what"),
    [
        ("gpt2", 2, "found GPT2LMHeadModel, GPT2Model, without one"),
        ("llama", 4, "'model.model.layers.0.self_attn.k_proj' has 2 attention heads, which"),
    ],
)
def test_what_a_plan_cannot_split_is_refused_by_name(
    world: Worlds, kind: str, size: int, what: str
) -> None:
    for message in world(4).run(refuse, kind, size):
        assert what in message


def refuse_convolution() -> str:
    with pytest.raises(ConfigurationError) as caught:
        train_split("gpt2", {}, 1, 2, {"model.transformer.h.*.mlp.c_fc": "colwise"})
    return str(caught.value)


def test_layers_of_gpt2_are_refused_by_name(world: Worlds) -> None:
    for message in world(2).run(refuse_convolution):
        assert "found 'model.transformer.h.0.mlp.c_fc', a Conv1D" in message
