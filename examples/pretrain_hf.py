"""Pretrain a causal language model of Hugging Face transformers: its sizes are numbers in a YAML file.

    python examples/pretrain_hf.py fit --config configs/llama_70b.yaml
    python examples/pretrain_hf.py fit --config configs/llama_70b.yaml \
        --trainer.strategy.init_args.plan_only=H100-80      # on any machine: plans the run, and starts nothing

The model is built on the meta device, where it takes no memory; each rank draws the values of its own shards.
The text of `gpt/data.py` stands for yours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import shardeddp  # noqa: F401  (its strategies become known to the Trainer by name)
from gpt.data import PydocText
from gpt.model import ADAM_BETAS, decay_groups, warmup_then_cosine


class CausalLM(L.LightningModule):
    """Causal language model of transformers.

    Args:
        config: Fields of the model's config, `model_type` among them.
        learning_rate: Peak of the schedule.
        warmup_steps: Optimizer steps before the cosine begins.
    """

    def __init__(
        self, config: dict[str, Any], learning_rate: float = 3e-4, warmup_steps: int = 2000
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config, self.learning_rate, self.warmup_steps = config, learning_rate, warmup_steps
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:  # Lightning asks before each fit and each evaluation
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, _ = batch  # transformers shifts the labels, and adds the loss of a router
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        groups = decay_groups(self, weight_decay=0.1)
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=ADAM_BETAS)
        steps = int(self.trainer.estimated_stepping_batches)
        factor = partial(warmup_then_cosine, warmup_steps=self.warmup_steps, total_steps=steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


if __name__ == "__main__":
    LightningCLI(CausalLM, PydocText, auto_configure_optimizers=False)
