"""Parameters that share memory train as under DDP, or are refused by both names."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.fidelity import STRATEGIES, BesideDdp, SmallGpt, case
from support.tasks import Block

pytestmark = pytest.mark.timeout(300)


class UntiedGpt(SmallGpt):
    """A head of its own, for `tie` to tie."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.tie()

    def tie(self) -> None:
        raise NotImplementedError


class HeadTiedByData(UntiedGpt):
    """As many language models tie their embedding."""

    def tie(self) -> None:
        self.head.weight.data = self.embed.weight.data


class HeadTiedByDataUnderAdam(HeadTiedByData):
    """Two states for one memory."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class HeadTiedBySet(UntiedGpt):
    def tie(self) -> None:
        with torch.no_grad():
            self.head.weight.set_(self.embed.weight)


class HeadTiedByANewParameter(UntiedGpt):
    def tie(self) -> None:
        self.head.weight = nn.Parameter(self.embed.weight.data)


class HeadTiedByDetach(UntiedGpt):
    def tie(self) -> None:
        self.head.weight = nn.Parameter(self.embed.weight.detach())


class BlocksTiedByData(UntiedGpt):
    """Two units share one weight."""

    def tie(self) -> None:
        self.blocks[1].up.weight.data = self.blocks[0].up.weight.data


class ThreeTiedByData(UntiedGpt):
    """Of two units and the root."""

    def tie(self) -> None:
        self.third = nn.Parameter(self.blocks[0].norm.weight.data)
        self.blocks[1].norm.weight.data = self.third.data

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (self.embed(batch) * self.third).square().mean()


class FrozenTeacherOfTheSameMemory(UntiedGpt):
    """The teacher does not train, but follows, because it is the student."""

    def tie(self) -> None:
        self.teacher = nn.Linear(8, 11, bias=False).requires_grad_(False)
        self.teacher.weight.data = self.head.weight.data

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        return super().loss(batch) + F.mse_loss(self.head(x + 0.1), self.teacher(x))


class BufferOfAParametersMemory(UntiedGpt):
    """A buffer that reads as the parameter does."""

    def tie(self) -> None:
        self.register_buffer("table", self.head.weight.data)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (self.embed(batch) @ self.table.t()).square().mean()


class TransposedHead(UntiedGpt):
    """The same memory in another shape."""

    def tie(self) -> None:
        self.back = nn.Parameter(self.head.weight.data.t())

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (F.one_hot(batch, 11).float() @ self.back.t()).square().mean()


class OverlappingTables(UntiedGpt):
    """Rows that two parameters have in common."""

    def tie(self) -> None:
        rows = torch.randn(12, 8)
        self.first, self.second = nn.Parameter(rows[:8]), nn.Parameter(rows[4:])

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (self.first * 0.5 - self.second).square().mean()


class RowsOfAWhole(UntiedGpt):
    """A parameter and a part of it."""

    def tie(self) -> None:
        self.prompt = nn.Parameter(self.embed.weight.data[:3])

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.prompt.square().mean()


class PartsOfOneBuffer(UntiedGpt):
    """Neighbours in one storage that have no element in common: no reason to refuse."""

    def tie(self) -> None:
        flat = torch.randn(32)
        self.scale, self.shift = nn.Parameter(flat[:8]), nn.Parameter(flat[8:16])
        self.blocks[0].norm.bias.data = flat[16:24]

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (self.embed(batch) * self.scale + self.shift).square().mean()


class InterleavedRows(UntiedGpt):
    """Even and odd rows, which have no element in common, but lie between each other."""

    def tie(self) -> None:
        rows = torch.randn(8, 8)
        self.even, self.odd = nn.Parameter(rows[::2]), nn.Parameter(rows[1::2])

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (self.even * 0.5 - self.odd).square().mean()


class WritesToEither(UntiedGpt):
    """What is written to the one is read from the other, in a step, after it, and where all are whole."""

    def tie(self) -> None:
        self.blocks[1].up.weight.data = self.blocks[0].up.weight.data
        self.blocks[1].norm.bias = nn.Parameter(self.blocks[0].norm.bias.data)

    @torch.no_grad()
    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        one, other = self.blocks[0], self.blocks[1]
        one.up.weight.mul_(0.9)
        self.losses.append(float(other.up.weight.norm()))
        other.up.weight.data.mul_(0.9)
        self.losses.append(float(one.up.weight.norm()))
        with torch.enable_grad():
            return super().training_step(batch, batch_index)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        whole = getattr(strategy, "summon_full_params", nullcontext)
        with whole():
            for block in self.blocks:
                block.up.weight.mul_(0.9)
                block.norm.bias.add_(0.1)
                self.losses += [
                    float(self.blocks[0].up.weight.norm()),
                    float(self.blocks[1].norm.bias.norm()),
                ]
        self.blocks[1].up.weight[0].mul_(0.5)
        self.losses.append(float(self.blocks[0].up.weight.norm()))


class PartsByData(BlocksTiedByData):
    """One of two gets memory of its own, as torch does it, outside of a unit's forward."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.blocks[1].up.weight.data = self.blocks[1].up.weight.data * 0.9


class PartsBySet(BlocksTiedByData):
    @torch.no_grad()
    def on_train_batch_start(self, *_: Any) -> None:
        self.blocks[0].up.weight.set_(self.blocks[0].up.weight * 0.9)


class PartsInsideOfItsUnit(BlocksTiedByData):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(self.part)

    def part(self, block: Block, args: Any) -> None:
        block.up.weight.data = block.up.weight.data * 0.9


class TiesAgain(BlocksTiedByData):
    """It has that memory already."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.tie()


class OneModuleInTwoPlaces(UntiedGpt):
    """Tied as torch means it, by the object: of two units, and under two names."""

    def tie(self) -> None:
        self.blocks[1].up = self.blocks[0].up
        self.again = self.head


def names(first: str, second: str) -> str:
    """Both fqns, in either order."""
    first, second = (name.replace(".", r"\.") for name in (first, second))
    return rf"{first}\b.*{second}\b|{second}\b.*{first}\b"


CASES = [
    case(HeadTiedByData, refused=names("embed.weight", "head.weight")),
    case(HeadTiedByDataUnderAdam, refused=names("embed.weight", "head.weight")),
    case(HeadTiedBySet, refused=names("embed.weight", "head.weight")),
    case(HeadTiedByANewParameter, refused=names("embed.weight", "head.weight")),
    case(
        HeadTiedByDetach,
        refused=names("embed.weight", "head.weight"),
        options={"accumulate_grad_batches": 2},
    ),
    case(BlocksTiedByData, refused=names("blocks.0.up.weight", "blocks.1.up.weight")),
    case(ThreeTiedByData, refused=names("third", "blocks.0.norm.weight")),
    case(FrozenTeacherOfTheSameMemory, refused=names("head.weight", "teacher.weight")),
    case(BufferOfAParametersMemory, refused=names("head.weight", "table")),
    case(TransposedHead, refused=names("head.weight", "back")),
    case(OverlappingTables, refused=names("first", "second")),
    case(RowsOfAWhole, refused=names("embed.weight", "prompt")),
    case(PartsOfOneBuffer),
    case(InterleavedRows, refused=names("even", "odd")),
    case(OneModuleInTwoPlaces),
    case(WritesToEither),
    case(PartsByData, refused=names("blocks.0.up.weight", "blocks.1.up.weight")),
    case(PartsBySet, refused=names("blocks.0.up.weight", "blocks.1.up.weight")),
    case(PartsInsideOfItsUnit, refused=names("blocks.0.up.weight", "blocks.1.up.weight")),
    case(TiesAgain),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shared_memory_stays_shared_or_is_refused_by_name(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)
