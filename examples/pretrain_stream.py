"""Pretraining on a stream of text, stopped at any step and continued with the same losses.

    python examples/pretrain_stream.py --steps 20
    python examples/pretrain_stream.py --steps 40    # goes on at step 20

A loader with `state_dict` and `load_state_dict` is saved with every checkpoint: each rank's own place.
"""

import argparse
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from shardeddp import ShardedDP

BLOCK, BATCH, DIM = 64, 8, 64


class Stream:
    """Batches (BATCH, BLOCK + 1) of bytes, each rank's from its own part of the text, for ever."""

    def __init__(self, rank: int, world_size: int) -> None:
        text = "".join(topics.values()).encode()
        share = len(text) // world_size
        self.text = torch.tensor(list(text[rank * share : (rank + 1) * share]))
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            block = self.text[self.position : self.position + BATCH * BLOCK + 1]
            self.position = (self.position + BATCH * BLOCK) % (len(self.text) - BATCH * BLOCK - 1)
            yield block.unfold(0, BLOCK + 1, BLOCK)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class ByteModel(L.LightningModule):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, batch_first=True) for _ in range(num_layers)
        )
        self.head = nn.Linear(DIM, 256)

    def train_dataloader(self) -> Stream:
        return Stream(self.trainer.global_rank, self.trainer.world_size)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, mask = self.embed(batch[:, :-1]), nn.Transformer.generate_square_subsequent_mask(BLOCK)
        for layer in self.layers:
            x = layer(x, src_mask=mask.to(self.device), is_causal=True)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        self.print(f"step {self.global_step}: loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    L.seed_everything(0, workers=True, verbose=False)
    saves = ModelCheckpoint("checkpoints", every_n_train_steps=10, save_last=True)
    trainer = L.Trainer(devices=2, strategy=ShardedDP(), max_steps=steps, callbacks=[saves])
    trainer.fit(
        ByteModel(), ckpt_path="last"
    )  # the highest step, or the beginning if there is none
