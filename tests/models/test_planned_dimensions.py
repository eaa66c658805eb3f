"""Dimensions that the planner reads from a config.json are those of the model that transformers builds from it."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardeddp.planner.transformer import MODEL_TYPES, Decoder, Dimensions

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "pad_token_id": 0,
}
GPT2 = {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_inner": 512, "vocab_size": 1000}


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_decoder_of_a_config_has_the_parameters_of_its_model(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    for name, size in (GPT2 if kind == "gpt2" else SIZES).items():
        # Some compute the width of a head themselves, and have one head of keys for each of queries.
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:4]
    length = getattr(config, "max_position_embeddings", 64)
    with torch.device("meta"):
        models = (
            AutoModelForCausalLM.from_config(config),
            Decoder(Dimensions.of_config(config.to_dict()), length),
        )
    real, planned = (sum(it.numel() for it in model.parameters()) for model in models)
    assert planned == pytest.approx(real, rel=0.002)
