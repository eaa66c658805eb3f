"""Small LightningModules that train in milliseconds, and their data; they know nothing about sharding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY = 11


class Block(nn.Module):
    """A residual MLP of width ``dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., dim) to the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Recorded(LightningModule):
    """Keeps the loss of every training step of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """One loss."""
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        raise NotImplementedError


class TinyGpt(Recorded):
    """Tied embeddings around residual blocks; two decay groups picked by ``ndim``, and a schedule per step.

    Args:
        dim: Width.
        num_blocks: Blocks, each of which can be a unit.
    """

    def __init__(self, dim: int = 8, num_blocks: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, VOCABULARY) of tokens (batch, length)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Tensor) -> Tensor:
        """Cross-entropy of every next token."""
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, Any]]]:
        """AdamW, decaying matrices only, and a learning rate that changes with every step."""
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 / (1 + 0.1 * step)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class EvaluatedGpt(TinyGpt):
    """The same with the steps of validation, test and prediction."""

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        """Log ``val``."""
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_index: int) -> None:
        """Log ``test``."""
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """Logits."""
        return self(batch)


class NormalizedDescent(torch.optim.Optimizer):
    """Steps of one length per parameter, with momentum."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As any optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.mul_(0.5).add_(parameter.grad)
                parameter.add_(average / (average.norm() + 1e-6), alpha=-group["lr"])
        return loss


class HasAnOptimizerOfItsOwn(TinyGpt):
    """An optimizer class that nobody knows to be element-wise; in fact it is not."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One group."""
        return NormalizedDescent(self.parameters(), {"lr": 0.05})


class ConvBlock(nn.Module):
    """Convolution and BatchNorm on 4 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 4, height, width) to the same."""
        return F.relu(self.norm(self.conv(x)))


class TinyConvNet(Recorded):
    """BatchNorm, so buffers that training changes; SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.blocks = nn.Sequential(ConvBlock(), ConvBlock())
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, 3) of images (batch, 1, 6, 6)."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Momentum is state of the parameter's shape."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def token_loader(num_samples: int, batch_size: int = 4) -> DataLoader[Tensor]:
    """Sequences of 6 tokens that mostly count up, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
    noise = torch.randint(2, (num_samples, 6), generator=generator)
    tokens = (start + torch.arange(6) + noise) % VOCABULARY
    return DataLoader(tokens, batch_size=batch_size)  # type: ignore[arg-type]  # a tensor is a sequence of samples


def tokens_in_order(num_samples: int, batch_size: int = 4) -> DataLoader[Tensor]:
    """The same, where batches of all ranks are one batch of one process."""
    tokens = token_loader(num_samples).dataset
    return DataLoader(tokens, batch_size, sampler=DistributedSampler(tokens, shuffle=False))


def image_loader(num_samples: int, batch_size: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    """Noise (1, 6, 6) around a mean of three times the label, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (num_samples,), generator=generator)
    images = 3 * labels.view(-1, 1, 1, 1) + torch.randn(num_samples, 1, 6, 6, generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size)
