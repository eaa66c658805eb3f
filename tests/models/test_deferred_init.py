"""Models of transformers that are built on the meta device have, sharded, the weights and buffers of eager ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from support.deferred import check_equal, recorded, values
from support.real_models import llama
from training import Sharding
from world import Worlds

pytestmark = pytest.mark.timeout(120)

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def vit() -> nn.Module:
    options = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=8, **options))


def swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    return hf.SwinForImageClassification(config)


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    )


def t5() -> nn.Module:
    config = hf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return hf.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL))


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=2)
    )


def wav2vec2() -> nn.Module:
    config = hf.Wav2Vec2Config(
        **SMALL, conv_dim=[8, 8], conv_stride=[2, 2], conv_kernel=[3, 3], num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, codevector_dim=8, proj_codevector_dim=8,
        num_codevectors_per_group=4,
    )  # fmt: skip
    return hf.Wav2Vec2ForPreTraining(config)


BUILDS: list[Callable[[], Any]] = [llama, gpt2, bert, t5, mixtral, vit, swin, wav2vec2]


def check(build: Callable[[], nn.Module], inside: bool) -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):  # as in `configure_model`
            return build()

    torch.manual_seed(5)
    expected = values(build())
    moved = torch.get_rng_state()
    torch.manual_seed(5)
    model, recording = recorded(on_meta if inside else build)
    assert any(parameter.is_meta for parameter in model.parameters())
    Sharding().apply(model, recording=recording)
    check_equal(values(model), expected)
    assert torch.equal(torch.get_rng_state(), moved)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("build", BUILDS)
def test_weights_and_buffers_are_those_of_the_eager_model(
    world: Worlds, build: Callable[[], nn.Module], inside: bool
) -> None:
    world(2).run(check, build, inside)
