"""A small vision transformer on images that the script draws: accuracy, and the best checkpoint.

    python examples/vision.py --epochs 4

`nn.TransformerEncoderLayer` is repeated, so `auto_wrap_policy="auto"` makes each layer a unit.
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from shardeddp import ShardedDP

SIDE, PATCH, CLASSES = 16, 4, 10


def draw_images(count: int, seed: int) -> TensorDataset:
    """Noisy copies of ten patterns, shape (count, 1, SIDE, SIDE), and their classes."""
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=draw)
    return TensorDataset(
        patterns[classes] + torch.randn(count, 1, SIDE, SIDE, generator=draw), classes
    )


class VisionTransformer(L.LightningModule):
    def __init__(self, dim: int = 64, num_layers: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.patches = nn.Conv2d(1, dim, kernel_size=PATCH, stride=PATCH)
        self.position = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, dim) * 0.02)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True, norm_first=True)
                for _ in range(num_layers)
            )
        )
        self.head = nn.Linear(dim, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.layers(tokens).mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=2048)
    arguments = parser.parse_args()
    train = DataLoader(draw_images(arguments.images, seed=1), batch_size=32, shuffle=True)
    held_out = DataLoader(draw_images(512, seed=2), batch_size=32)
    best = ModelCheckpoint("checkpoints", monitor="accuracy", mode="max")
    trainer = L.Trainer(
        devices=2,
        strategy=ShardedDP(),
        max_epochs=arguments.epochs,
        callbacks=[best, EarlyStopping("accuracy", mode="max", patience=3)],
    )
    trainer.fit(VisionTransformer(), train, held_out)
    trainer.print(f"best accuracy {best.best_model_score:.3f} in {best.best_model_path}")
