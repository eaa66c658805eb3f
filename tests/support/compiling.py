"""A model of equal blocks, the ways to compile them, and a compiler that counts its graphs."""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from shardeddp.engine.runtime import Runtime
from training import WIDTH, Sharding, Trial


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Equal blocks between two layers of the root unit."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


# -- the ways to compile a block


def in_place(model: Stack, backend: CompileCounterWithBackend, fullgraph: bool = True) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=fullgraph)


def wrapped(model: Stack, backend: CompileCounterWithBackend, fullgraph: bool = True) -> None:
    for index, block in enumerate(model.blocks):
        compiled: Any = torch.compile(block, backend=backend, fullgraph=fullgraph)
        model.blocks[index] = compiled


def not_at_all(model: Stack, backend: CompileCounterWithBackend) -> None:
    pass


WAYS = {"in place": in_place, "wrapped": wrapped}
Compile = Callable[[Stack, CompileCounterWithBackend], None]


@dataclass(frozen=True, kw_only=True)
class CompiledSharding(Sharding):
    """Compiles the blocks of what it shards, and not those of the reference."""

    backend: CompileCounterWithBackend
    before: Compile = not_at_all
    after: Compile = not_at_all

    def apply(
        self, model: nn.Module, autocast: torch.dtype | None = None, options: Any = None
    ) -> Runtime:
        assert isinstance(model, Stack)
        self.before(model, self.backend)
        runtime = super().apply(model, autocast, options)
        self.after(model, self.backend)
        return runtime


@contextmanager
def fresh_compiler(backend: str = "aot_eager") -> Generator[CompileCounterWithBackend]:
    """A compiler that counts its graphs, and nothing compiled before."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # What torch says of itself; it raises where warnings are errors.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
        yield CompileCounterWithBackend(backend)


def trial(
    backend: CompileCounterWithBackend,
    *,
    strategy: str = "full_shard",
    before: Compile = not_at_all,
    after: Compile = not_at_all,
    model: Stack | None = None,
) -> Trial:
    """A stack whose blocks are units."""
    sharding = CompiledSharding(
        strategy=strategy, units=("blocks.*",), backend=backend, before=before, after=after
    )
    return Trial(model or Stack(), sharding)
