"""Models of transformers, split over ranks by the plans that they bring along, lose what one process does."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt2"])
def test_losses_of_twenty_steps_are_those_of_one_process(world: Worlds, kind: str) -> None:
    expected = train_alone(kind, {}, 20)
    for found in world(2).run(train_split, kind, {}, 20, 2):
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5


Step = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""The loss of a step, the weights behind it and its gradients."""


def one_step_of_each(kinds: tuple[str, ...]) -> dict[str, Step]:
    found: dict[str, Step] = {}
    for kind in kinds:
        weights, gradients = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        losses = train_split(kind, {}, 1, 2, weights=weights, gradients=gradients)
        found[kind] = losses, weights, gradients
    return found


@pytest.mark.parametrize("kinds", TRIED, ids=lambda kinds: kinds[0])
def test_families_take_a_step_as_one_process_does(world: Worlds, kinds: tuple[str, ...]) -> None:
    answers = world(2).run(one_step_of_each, kinds)
    for kind in kinds:
        weights, gradients = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        losses = train_alone(kind, {}, 1, weights=weights, gradients=gradients)
        for found in (answer[kind] for answer in answers):
            assert difference(found[0], losses) < 1e-5, kind
            for whole, expected in ((found[1], weights), (found[2], gradients)):
                assert whole.keys() == expected.keys()
                for name, it in expected.items():
                    torch.testing.assert_close(
                        whole[name], it, rtol=1e-5, atol=1e-5, msg=f"{kind}: {name}"
                    )


def test_embeddings_are_split_with_the_head_that_they_are_tied_to(world: Worlds) -> None:
    tied = {"tie_word_embeddings": True}
    for found in world(2).run(train_split, "llama", tied, 3, 2):
        assert difference(found, train_alone("llama", tied, 3)) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_ranks_do_not_divide_stays_whole(world: Worlds, tied: bool) -> None:
    odd = {"tie_word_embeddings": tied, "vocab_size": 101}
    for found in world(2).run(warn_of_uneven, odd):
        assert difference(found, train_alone("llama", odd, 3)) < 1e-5


def warn_of_uneven(options: dict[str, Any]) -> list[float]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train_split("llama", options, 3, 2)
    said = [str(it.message) for it in caught if "does not divide the vocabulary" in str(it.message)]
    assert len(said) == (dist.get_rank() == 0)
    assert all("model.lm_head" in it for it in said)
    return found


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
        ("bloom", 2, "found BloomForCausalLM, BloomModel, without one"),
        ("llama", 4, "'model.model.layers.0.self_attn.k_proj' has 2 attention heads, which"),
    ],
)
def test_what_a_plan_cannot_split_is_refused_by_name(
    world: Worlds, kind: str, size: int, what: str
) -> None:
    for message in world(4).run(refuse, kind, size):
        assert what in message


# -- GPT-2, whose weights are transposed, and three of them are one


DIVIDED = {"model.transformer.h.*.attn.split_size": "divide"}
ATTENTION = {
    "model.transformer.h.*.attn.c_attn": "packed_colwise:3",
    "model.transformer.h.*.attn.c_proj": "rowwise",
    "model.transformer.h.*.attn.num_heads": "keep",  # its forward does not look at it
}


def refuse_plan(plan: dict[str, str]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        train_split("gpt2", {}, 1, 2, plan)
    return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (ATTENTION, "'model.transformer.h.0.attn' has split_size=64"),
        (
            {**ATTENTION, "model.transformer.h.*.attn.c_attn": "colwise"} | DIVIDED,
            "'model.transformer.h.0.attn.c_attn' has 192 output features",
        ),
    ],
)
def test_its_attention_is_not_split_wrongly(world: Worlds, plan: dict[str, str], what: str) -> None:
    for message in world(2).run(refuse_plan, plan):
        assert what in message


class Crossed(Family):
    """Looks at an encoder's states as well, with frozen layers in between."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.transformer.h[0].attn.requires_grad_(False)
        self.model.transformer.h[1].mlp.requires_grad_(False)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        states = torch.sin(torch.arange(batch.numel() * 64.0)).view(*batch.shape, 64)
        found = self.model(
            input_ids=batch, labels=batch, encoder_hidden_states=states, use_cache=False
        )
        return found.loss


CROSSED = {"add_cross_attention": True}


def weights_of_ranks(path: str, name: str, precision: str) -> dict[str, torch.Tensor] | None:
    strategy = ShardedDP(name, tensor_parallel_size=2, tensor_parallel_plan="auto")
    trainer = make_trainer(
        strategy,
        max_steps=3,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        precision=precision,
    )
    trainer.fit(Crossed("gpt2", CROSSED, 3))
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize(
    ("name", "precision"),
    [("full_shard", "32-true"), ("no_shard", "32-true"), ("full_shard", "bf16-mixed")],
)
def test_its_weights_are_those_of_one_process(
    world: Worlds, tmp_path: Path, name: str, precision: str
) -> None:
    expected = dict[str, torch.Tensor]()
    train_alone("gpt2", CROSSED, 3, Crossed, expected)
    tolerance = 2e-3 if precision == "bf16-mixed" else 1e-5
    for found in world(2).run(weights_of_ranks, str(tmp_path / "x.ckpt"), name, precision):
        assert found.keys() == expected.keys()
        for it, weight in expected.items():
            torch.testing.assert_close(found[it], weight, rtol=0, atol=tolerance)
