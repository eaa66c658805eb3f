"""Models of the shapes that people train, small in code and of any size: transformers, experts, stages, a ResNet."""

from collections.abc import Iterable

import torch
from torch import nn


def numbered(prefix: str, count: int) -> list[str]:
    """The names of the members of a list."""
    return [f"{prefix}.{index}" for index in range(count)]


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.qkv(x)[..., : x.shape[-1]])


class Block(nn.Module):
    def __init__(self, dim: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.mlp = mlp or Mlp(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(self.norm(x)))


class DecoderBlock(Block):
    pass


class Experts(nn.Module):
    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(Mlp(dim) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) for expert in self.experts)


class Gpt(nn.Module):
    def __init__(self, dim: int, blocks: Iterable[nn.Module], vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(dim, vocabulary, bias=False)


class Stage(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.downsample = nn.Linear(4 * dim, 2 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Tower(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OtherTower(Tower):
    pass


class BasicBlock(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3)
        self.conv2 = nn.Conv2d(cout, cout, 3)
        self.downsample = (
            nn.Sequential(nn.Conv2d(cin, cout, 1), nn.BatchNorm2d(cout)) if cin != cout else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(self.conv1(x))


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7)
        for number, (cin, cout) in enumerate(
            [(64, 64), (64, 128), (128, 256), (256, 512)], start=1
        ):
            setattr(
                self, f"layer{number}", nn.Sequential(BasicBlock(cin, cout), BasicBlock(cout, cout))
            )
        self.fc = nn.Linear(512, 1000)
