"""The example scripts that need transformers and peft, run as their docstrings say, and what they export."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig

from support.example_scripts import EXAMPLES, run
from support.real_models import DEPRECATED

pytestmark = [
    pytest.mark.timeout(380),
    pytest.mark.filterwarnings(f"ignore:{DEPRECATED}:FutureWarning"),
]

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
)


def test_a_language_model_is_tuned_generates_and_is_exported_for_transformers(
    tmp_path: Path,
) -> None:
    script = str(EXAMPLES / "finetune_hf.py")
    out = run(tmp_path, script, "--steps", "3", "--export", "first")
    assert "sample: 'The " in out
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "first").state_dict()
    run(tmp_path, script, "--steps", "3", "--pretrained", "first", "--export", "second")
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "second").state_dict()
    changes = [(second[name] - first[name]).abs().max().item() for name in first]
    assert max(changes) > 0, "nothing was trained"
    assert max(changes) < 0.02, "three steps of 1e-3: it did not begin with the first export"


@pytest.mark.parametrize("options", [(), ("--quantized",)], ids=["float32", "uint8"])
def test_adapters_are_exported_as_peft_reads_them(tmp_path: Path, options: tuple[str, ...]) -> None:
    run(tmp_path, str(EXAMPLES / "lora.py"), "--steps", "3", *options)
    tuned = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_config(SMALL), tmp_path / "adapters"
    )
    adapters = {name: value for name, value in tuned.state_dict().items() if "lora_" in name}
    assert len(adapters) == 2 * 2 * SMALL.num_hidden_layers
    ups = [value for name, value in adapters.items() if "lora_B" in name]
    assert all(torch.count_nonzero(up) > 0 for up in ups), "an adapter has learnt nothing"
