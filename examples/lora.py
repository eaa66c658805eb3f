"""LoRA with peft: adapters are trained, the base is frozen, and optionally stored in 8 bits.

    pip install transformers peft
    python examples/lora.py
    python examples/lora.py --quantized    # base weights as uint8, as in QLoRA, and sharded

The adapters are exported in peft's own format: `PeftModel.from_pretrained(base, "adapters")`.
"""

import argparse
from pydoc_data.topics import topics

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from shardeddp import ShardedDP

BLOCK, TARGETS = 64, ["q_proj", "v_proj"]
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
SMALL = LlamaConfig(**SIZES, num_hidden_layers=4, num_attention_heads=4)


class UInt8Linear(nn.Linear):
    """A frozen linear layer with one scale and one zero point per row; the weight is uint8."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        low, high = plain.weight.detach().aminmax(dim=1, keepdim=True)
        scale = (high - low) / 255
        quantized = ((plain.weight.detach() - low) / scale).round().to(torch.uint8)
        self.weight = nn.Parameter(quantized, requires_grad=False)
        self.scale, self.low = nn.Parameter(scale, False), nn.Parameter(low, False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.scale + self.low)


class LoRA(L.LightningModule):
    def __init__(self, quantized: bool) -> None:
        super().__init__()
        base = AutoModelForCausalLM.from_config(SMALL)  # or from_pretrained
        for name, layer in list(base.named_modules()) if quantized else []:
            if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in TARGETS:
                base.set_submodule(name, UInt8Linear(layer))
        self.model = get_peft_model(base, LoraConfig(r=8, target_modules=TARGETS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    L.seed_everything(0, verbose=False)
    blocks = list(torch.tensor(list("".join(topics.values()).encode())).split(BLOCK)[:-1])
    module = LoRA(arguments.quantized)
    trainer = L.Trainer(devices=2, strategy=ShardedDP(), max_steps=arguments.steps)
    trainer.fit(module, DataLoader(blocks, batch_size=8, shuffle=True))
    # On all ranks: each holds a part of each adapter. The base is not gathered.
    state = module.model.state_dict()
    adapters = {name: state[name].full_tensor() for name in state if "lora_" in name}
    if trainer.is_global_zero:
        module.model.save_pretrained("adapters", state_dict=adapters)
