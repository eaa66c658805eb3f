"""Loops of Fabric as people write them: pretraining with accumulation, and finetuning of loaded weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shardeddp import ShardedDP
from support.trainers import EXPECTED_WARNINGS, PoolEnvironment, make_trainer

VOCABULARY, WIDTH = 13, 16


class Block(nn.Module):
    """Attention over the past, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class GPT(nn.Module):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


class GPTModule(GPT, LightningModule):
    """The same for the Trainer, under the same names."""

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return next_token_loss(self(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches() -> DataLoader[Any]:
    """Sequences that count upwards, so that there is something to learn."""
    starts = torch.randint(0, VOCABULARY, (48, 1), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset((starts + torch.arange(8)) % VOCABULARY), batch_size=2)


@contextmanager
def launched(strategy: Any, **options: Any) -> Iterator[Fabric]:
    """A Fabric over all ranks of the pool's world."""
    for message, category in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    devices = dist.get_world_size()
    plugins = [PoolEnvironment(devices)]
    fabric = Fabric(
        accelerator="cpu", devices=devices, strategy=strategy, plugins=plugins, **options
    )
    fabric.launch()
    yield fabric


def pretrain(fabric: Fabric, folder: Path) -> list[float]:
    """Losses of a pretraining: built empty, two micro-batches a step, clipped, saved and resumed."""
    torch.manual_seed(1)
    with fabric.init_module(empty_init=False):
        model = GPT()
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    )
    loader = fabric.setup_dataloaders(batches())
    state = {"model": model, "optimizer": optimizer, "iter_num": 0}
    losses: list[float] = []
    for _ in range(2):
        for (tokens,) in loader:
            state["iter_num"] += 1
            accumulates = state["iter_num"] % 2 != 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = next_token_loss(model(tokens), tokens)
                fabric.backward(loss / 2)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
        fabric.save(folder / "pretrained.ckpt", state)
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.zero_()
        fabric.load(folder / "pretrained.ckpt", state)
    model.eval()
    with torch.no_grad():
        tokens = next(iter(loader))[0]
        losses.append(float(fabric.all_reduce(next_token_loss(model(tokens), tokens))))
    return losses


def finetune(fabric: Fabric, folder: Path) -> list[float]:
    """Losses of a finetuning: raw weights, frozen embeddings, and only the head and norms are trained."""
    torch.manual_seed(2)
    weights = folder / "weights.pth"
    if fabric.global_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(GPT().state_dict(), weights)
    fabric.barrier()
    torch.manual_seed(3)
    model = GPT()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "lm_head" in name)
    model = fabric.setup_module(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(trained, lr=0.05))
    fabric.load_raw(weights, model)
    loader = fabric.setup_dataloaders(batches())
    losses: list[float] = []
    for (tokens,) in loader:
        loss = next_token_loss(model(tokens), tokens)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    return losses


def together(fabric: Fabric) -> list[float]:
    """Losses of steps in which two forwards share one backward, as contrastive losses have it."""
    torch.manual_seed(4)
    model = GPT()
    model.blocks.append(nn.BatchNorm1d(8))  # all ranks have rank 0's statistics in each forward
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses: list[float] = []
    for step in range(3):
        tokens = (torch.arange(8)[None] + step + fabric.global_rank) % VOCABULARY
        loss = (model(tokens) - model(tokens.flip(1))).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
    return losses


def train_with_the_trainer(
    path: str, module: GPTModule | None = None, ckpt_path: str | None = None
) -> None:
    """Two steps of the Trainer's strategy, saved as a directory where there is a path."""
    trainer = make_trainer(ShardedDP(state_dict_type="sharded"), max_steps=2)
    trainer.fit(module or GPTModule(), batches(), ckpt_path=ckpt_path)
    if path:
        trainer.save_checkpoint(path)
