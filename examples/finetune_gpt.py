"""Finetune the GPT of `train_gpt.py` with low-rank adapters: 1 % of the parameters are trained, all are sharded.

    python examples/finetune_gpt.py fit --config configs/lora.yaml --model.pretrained path/to/checkpoint.ckpt

Frozen weights have neither gradients nor optimizer states, and are gathered like any other. The model is `gpt/lora.py`.
"""

from __future__ import annotations

from gpt.lora import LoRAGPTModule
from train_gpt import main

if __name__ == "__main__":
    main(LoRAGPTModule)
