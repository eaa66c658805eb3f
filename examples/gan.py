"""A GAN with manual optimization: two networks, two optimizers, one of them at rest at a time.

    python examples/gan.py --steps 400

The generator learns points on a circle.
"""

import argparse

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardeddp import ShardedDP

NOISE = 8


def network(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2)]
    layers += [nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(64, outputs))


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = network(NOISE, 2)
        self.discriminator = network(2, 1)

    def forward(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, NOISE, device=self.device))

    def judge(self, points: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(points)
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (points,) = batch
        for_generator, for_discriminator = self.optimizers()

        self.toggle_optimizer(for_discriminator)
        fakes = self(len(points)).detach()
        loss = self.judge(points, real=True) + self.judge(fakes, real=False)
        for_discriminator.zero_grad()
        self.manual_backward(loss)
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)

        self.toggle_optimizer(for_generator)
        fakes = self(len(points))
        for_generator.zero_grad()
        self.manual_backward(self.judge(fakes, real=True))
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.log_dict({"discriminator": loss, "radius": fakes.norm(dim=1).mean()}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(each.parameters(), lr=1e-3, betas=(0.5, 0.9)) for each in networks]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400, help="of the discriminator")
    arguments = parser.parse_args()
    angles = torch.rand(2**15, 1, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
    circle = TensorDataset(torch.cat((angles.cos(), angles.sin()), dim=1))
    # Each network is one unit: it has no repeated blocks that could be gathered one after the other.
    strategy = ShardedDP(auto_wrap_policy=[nn.Sequential])
    # Lightning counts the steps of both optimizers.
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=2 * arguments.steps)
    trainer.fit(GAN(), DataLoader(circle, batch_size=128, shuffle=True, drop_last=True))
    trainer.print(f"mean radius {trainer.callback_metrics['radius']:.2f}, expected 1")
