"""Checkpoints of a tied Llama and of LoRA adapters: the plain module's names, the values of training, a way back."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from peft import PeftModel

from shardeddp import ShardedDP, load_from_checkpoint
from shardeddp.wrap import AutoPolicy
from shardeddp_cli import main
from support import real_models as models
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings(f"ignore:{models.DEPRECATED}:FutureWarning"),
]

MODELS: dict[str, type[models.LanguageModel]] = {
    "tied Llama": models.TiedLlama,
    "LoRA": models.LoraLlama,
}


def train(
    name: str, options: dict[str, Any], epochs: int, save_to: str | None, resume: str | None
) -> dict[str, Any]:
    """Train, resume and save as said; the losses and the whole weights."""
    warnings.filterwarnings("ignore", models.DEPRECATED)
    seed_everything(1, verbose=False)
    module = MODELS[name]()
    trainer = make_trainer(
        ShardedDP(auto_wrap_policy=AutoPolicy(min_numel=1), **options), max_epochs=epochs
    )
    trainer.fit(module, models.sequence_loader(16), ckpt_path=resume)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {"losses": module.losses, "weights": full_weights(module)}


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_loads_into_the_plain_module_and_resumes(
    world: Worlds, tmp_path: Path, name: str, kind: str
) -> None:
    path = str(tmp_path / "model.ckpt")
    first = world(2).run(train, name, {"state_dict_type": kind}, 1, path, None)[0]
    plain = (
        load_from_checkpoint(MODELS[name], path)
        if kind == "sharded"
        else MODELS[name].load_from_checkpoint(path)
    )
    weights = plain.state_dict()
    assert list(weights) == list(MODELS[name]().state_dict()) == list(first["weights"])
    assert all(torch.equal(weights[key], first["weights"][key]) for key in weights)
    assert plain.model.get_input_embeddings().weight is plain.model.get_output_embeddings().weight
    prompts = models.sequences(2)[:, : models.PROMPT]
    assert plain.generate(prompts).shape == (2, models.PROMPT + 5)

    resumed = world(2).run(train, name, {"sharding_strategy": "shard_grad_op"}, 2, None, path)[0]
    whole = world(2).run(train, name, {}, 2, None, None)[0]
    assert first["losses"] + resumed["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert_same_weights(resumed["weights"], whole["weights"])


def test_an_adapter_is_exported_as_peft_reads_it(
    world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "model.ckpt", tmp_path / "adapter"
    folder.mkdir()
    trained = world(2).run(train, "LoRA", {"state_dict_type": "sharded"}, 1, str(path), None)[0]
    target = folder / "adapter_model.safetensors"
    assert main(["consolidate", str(path), "-o", str(target), "--adapter", "default"]) == 0
    assert "beside an adapter_config.json" in capsys.readouterr().err
    models.LoraLlama().model.peft_config["default"].save_pretrained(folder)
    base = models.LoraLlama().model.unload()
    read = PeftModel.from_pretrained(base, folder).state_dict()
    expected = {
        name.removeprefix("model."): it
        for name, it in trained["weights"].items()
        if ".default." in name
    }
    assert expected and all(torch.equal(read[name], it) for name, it in expected.items())
    again = ["consolidate", str(path), "-o", str(target), "--force", "--adapter"]
    assert main([*again, "default"]) == 0
    assert "adapter_config.json" not in capsys.readouterr().err  # it is there
    assert main([*again, "x"]) == 1
    assert re.search(r"no adapter 'x'.* one is '.*lora_A\.default\.weight", capsys.readouterr().err)
