"""Train a GPT with a mixture of experts in each block; ranks divide the experts among them.

    python examples/pretrain_moe.py fit --config configs/experts.yaml

The model is `gpt/mixture.py`, and the rest of the program that of `train_gpt.py`.
"""

from __future__ import annotations

from gpt.mixture import MixtureGPTModule
from train_gpt import main

if __name__ == "__main__":
    main(MixtureGPTModule)
