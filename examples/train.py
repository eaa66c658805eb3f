"""The shortest script: an ordinary LightningModule, and one word about sharding.

python examples/train.py
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardeddp import ShardedDP


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, shuffle=True)
    trainer = L.Trainer(devices=2, strategy=ShardedDP(), max_epochs=2)
    trainer.fit(Regression(), loader)
    trainer.save_checkpoint("regression.ckpt")  # load it with Regression.load_from_checkpoint
