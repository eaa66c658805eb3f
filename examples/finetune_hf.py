"""Fine-tune a causal language model of Hugging Face transformers, generate text, export it again.

    pip install transformers
    python examples/finetune_hf.py                          # a small Llama from a config, no download
    python examples/finetune_hf.py --pretrained DIRECTORY   # from_pretrained: a directory or a name

The text is read byte by byte, so that no tokenizer is needed; bring the tokenizer of your model.
"""

import argparse
from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from shardeddp import ShardedDP

BLOCK = 64
SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
)


class CausalLM(L.LightningModule):
    def __init__(self, pretrained: str | None) -> None:
        super().__init__()
        self.model = (
            AutoModelForCausalLM.from_pretrained(pretrained)
            if pretrained
            else AutoModelForCausalLM.from_config(SMALL)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss  # transformers shifts the labels
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_end(self) -> None:
        # On all ranks: each holds a part of the weights.
        prompt = torch.tensor([list(b"The ")], device=self.device)
        tokens = self.model.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0)
        self.print("sample:", repr(bytes(tokens[0].tolist()).decode(errors="replace")))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrained")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--export", default="finetuned", help="directory for from_pretrained")
    arguments = parser.parse_args()
    L.seed_everything(0, verbose=False)
    text = torch.tensor(list("".join(topics.values()).encode()))
    blocks = list(text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK))
    module = CausalLM(arguments.pretrained)
    trainer = L.Trainer(
        devices=2, strategy=ShardedDP(), max_steps=arguments.steps, gradient_clip_val=1.0
    )
    trainer.fit(module, DataLoader(blocks, batch_size=8, shuffle=True))
    # Rank 0 gets the whole model for a moment. If that is too much: save_checkpoint to a directory,
    # then `shardeddp consolidate DIRECTORY -o model.safetensors --strip-prefix model.`
    with trainer.strategy.summon_full_params(rank0_only=True, offload_to_cpu=True):
        if trainer.is_global_zero:
            module.model.save_pretrained(arguments.export)
