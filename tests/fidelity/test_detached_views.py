"""A detached view of a parameter that somebody keeps is up to date, as under DDP, or its use an error by name."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.fidelity import UNITS_TOO, BesideDdp, SmallGpt, case
from support.tasks import Block

pytestmark = pytest.mark.timeout(300)


class DetachedInTheStepsOutput(SmallGpt):
    """The step's dict has views, which a later hook reads: after the optimizer's step, so the new values."""

    def views(self) -> dict[str, Any]:
        return {"weight": self.embed.weight.detach()}

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        return {"loss": super().training_step(batch, batch_index), **self.views()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        self.losses += [float(outputs[name].sum()) for name in sorted(outputs) if name != "loss"]


class DetachedPartsInTheStepsOutput(DetachedInTheStepsOutput):
    def views(self) -> dict[str, Any]:
        return {"row": self.embed.weight.data[2], "column": self.head.weight.detach().t()[1]}


class ArraysInTheStepsOutput(DetachedInTheStepsOutput):
    """Arrays that share the memory."""

    def views(self) -> dict[str, Any]:
        return {
            "array": self.embed.weight.detach().numpy(),
            "row": self.embed.weight.detach()[3].numpy(),
        }


class DetachedOfABlock(DetachedInTheStepsOutput):
    """Of a unit that has been released."""

    def views(self) -> dict[str, Any]:
        return {
            "up": self.blocks[0].up.weight.detach()[:3],
            "down": self.blocks[1].down.bias.detach(),
        }


class RemembersItself(Block):
    """Keeps a detached view of its own weight in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.remembered = self.up.weight.detach()[:2]
        return super().forward(x)


class DetachedByTheUnit(SmallGpt):
    """Read in the step, after the backward and before the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RemembersItself(8) for _ in range(2))

    def look(self) -> None:
        self.losses += [
            float(block.remembered.sum()) for block in self.blocks if hasattr(block, "remembered")
        ]

    def loss(self, batch: Tensor) -> Tensor:
        self.look()
        loss = super().loss(batch)
        self.look()
        return loss

    def on_after_backward(self) -> None:
        self.look()

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()


class KeptToTheNextStep(SmallGpt):
    """A detached view of the last step, which under DDP is always up to date."""

    last: Tensor | None = None

    def loss(self, batch: Tensor) -> Tensor:
        if self.last is not None:
            self.losses.append(float((self.last - self.embed.weight.detach()[:4]).abs().sum()))
        self.last = self.embed.weight.detach()[:4]
        return super().loss(batch)


class WrittenBetweenSteps(KeptToTheNextStep):
    """A detached view of the last step, of parameters that are written to between steps."""

    rows: tuple[Tensor, ...] = ()

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        for parameter in (self.embed.weight, self.blocks[0].up.weight):
            parameter.data.mul_(0.98)

    def loss(self, batch: Tensor) -> Tensor:
        self.losses += [float(row.norm()) for row in self.rows]
        self.rows = self.embed.weight.detach()[0], self.blocks[0].up.weight.detach()[0]
        return super().loss(batch)


class DetachedBeforeTraining(SmallGpt):
    """A view that was taken when the model was built."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.embed.weight.detach()[:4]

    def loss(self, batch: Tensor) -> Tensor:
        self.losses.append(float(self.rows.sum()))
        return super().loss(batch) + (self.rows.mean() - self.head.weight).square().mean()


class DetachedBeforeAnAssignment(SmallGpt):
    """Assigning to `.data` gives a parameter other memory: what was detached before keeps the former values."""

    kept: tuple[Tensor, ...] = ()

    def detached(self) -> Iterator[Tensor]:
        weight = self.blocks[0].up.weight
        yield from (
            weight.detach(),
            weight.detach().view(-1)[:3],
            weight.data.detach(),
            copy.copy(weight).detach(),
        )

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        self.losses += [float(each.norm()) for each in self.kept]
        if batch_index % 2 == 0:
            self.kept = tuple(self.detached())

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.98
        if self.kept:
            self.kept[0].mul_(0.5)


class WrittenInTheStepAndBetween(SmallGpt):
    """Views of an earlier step, read as soon as something has written to the parameter, wherever that was."""

    rows: tuple[Tensor, ...] = ()

    def written(self) -> Iterator[Tensor]:
        yield self.embed.weight
        yield self.head.weight
        yield self.blocks[0].up.weight
        yield self.blocks[1].down.bias

    def look(self) -> None:
        self.losses += [float(row.norm()) for row in self.rows]

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        with torch.no_grad():
            for parameter in self.written():
                parameter.mul_(0.98)
        self.look()

    def loss(self, batch: Tensor) -> Tensor:
        self.look()
        with torch.no_grad():
            for parameter in self.written():
                parameter.mul_(0.98)
        self.look()
        if not self.rows:
            self.rows = tuple(parameter.detach()[:2] for parameter in self.written())
        loss = super().loss(batch)
        self.look()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()
        for parameter in self.written():
            parameter.data.mul_(0.98)
        self.look()


class WritesThroughViewsOfEarlierSteps(SmallGpt):
    """In hooks between steps, in the step, and in another unit's forward, where its unit may be on its way."""

    rows: tuple[Tensor, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(4, 3))
        for block in self.blocks:
            block.register_forward_hook(self.write)

    def write(self, *_: Any) -> None:
        with torch.no_grad():
            for row in self.rows[:2]:  # not of a block: its backward needs former values
                row.mul_(0.99)

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        with torch.no_grad():
            for row in self.rows:
                row.mul_(0.98)

    def loss(self, batch: Tensor) -> Tensor:
        self.losses += [float(row.norm()) for row in self.rows]
        with torch.no_grad():
            for row in self.rows:
                row.add_(0.01)
        if not self.rows:
            parameters = self.spare, self.spare, self.blocks[0].up.weight, self.blocks[1].down.bias
            self.rows = tuple(parameter.detach()[:2] for parameter in parameters)
        loss = super().loss(batch) + self.spare.sum()
        self.losses += [float(row.norm()) for row in self.rows]
        return loss


class ViewedWithSharedMemory(WrittenInTheStepAndBetween):
    """Two parameters have the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight.data = self.blocks[0].up.weight.data

    def written(self) -> Iterator[Tensor]:
        yield self.blocks[0].up.weight
        yield self.blocks[1].up.weight


class RemembersAllOfItself(Block):
    """Keeps its own weight, detached, in every other forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2:
            self.remembered = self.up.weight.detach()
        return super().forward(x)


class DetachedByTheUnitBeforeAnAssignment(DetachedByTheUnit):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RemembersAllOfItself(8) for _ in range(2))

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.98
        self.look()


class PartsTakenBeforeAnAssignment(DetachedBeforeAnAssignment):
    """Parts of the parameter itself, outside of its unit."""

    def detached(self) -> Iterator[Tensor]:
        weight = self.blocks[0].up.weight
        with torch.no_grad():
            yield from (weight[:2], weight.t(), weight.view(-1)[3:])

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        super().on_train_batch_start(batch, batch_index)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()


class PartsWithGradientsTakenBeforeAnAssignment(SmallGpt):
    """The parts keep their values, and the parameter gets their gradients."""

    parts: tuple[Tensor, ...] = ()

    def loss(self, batch: Tensor) -> Tensor:
        weight = self.blocks[0].norm.weight
        self.parts = self.parts or (weight[:4], weight.view(2, 4)[1])
        return super().loss(batch) + sum(part.square().sum() for part in self.parts)

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.blocks[0].norm.weight
        weight.data = weight.data * 0.9 + 0.1


class AssignedInItsUnit(Block):
    """Gets other memory in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.norm.weight.data = self.norm.weight.data * 0.9 + 0.1
        return super().forward(x)


class PartsTakenBeforeAnAssignmentInTheUnit(SmallGpt):
    """Parts from outside keep the former values."""

    parts: tuple[Tensor, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AssignedInItsUnit(8) for _ in range(2))

    def on_train_batch_start(self, *_: Any) -> None:
        weight = self.blocks[0].norm.weight
        self.losses += [float(part.sum()) for part in self.parts]
        self.parts = (weight.detach(), weight.detach()[:3])


class AssignedItsOwnMemory(DetachedBeforeAnAssignment):
    """`p.data = p.data.contiguous()` is no other memory: nothing parts."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.contiguous()
            parameter.data = parameter.data.view_as(parameter)
        with torch.no_grad():
            self.blocks[0].up.weight.mul_(0.98)
        self.losses += [float(each.norm()) for each in self.kept]


class SwappedByAssignment(SmallGpt):
    """Two blocks change places: shards without elements look as if they lay in one place."""

    def on_train_batch_end(self, *_: Any) -> None:
        pairs = zip(self.blocks[0].parameters(), self.blocks[1].parameters(), strict=True)
        for one, other in pairs:
            one.data, other.data = other.data, one.data


class AssignedBeforeTheBackwardOfAView(SmallGpt):
    """The view and its graph have the former values."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        weight, optimizer = self.blocks[0].up.weight, self.optimizers()
        view = weight[:4]
        penalty = (view.square() * view.exp()).sum()
        weight.data = weight.data * 0.9
        self.losses.append(float(view.detach().sum()))
        optimizer.zero_grad()
        self.manual_backward(penalty)
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        optimizer.step()


class WrittenBetweenTwoUsesOfAView(SmallGpt):
    """The first one's gradient would be of values that are gone."""

    def loss(self, batch: Tensor) -> Tensor:
        weight = self.blocks[0].up.weight
        view = weight[:4]
        penalty = view.square().sum()
        weight.data.clamp_(-0.3, 0.3)
        return super().loss(batch) + penalty + view.square().sum()


class PartsTakenInAStepBeforeAnAssignment(DetachedByTheUnit):
    """The unit's memory is gathered into again: refused, or a warning."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.98
        self.look()


class WrittenInLists(WrittenInTheStepAndBetween):
    """A list has views from inside of a unit and from outside of others, or parameters as well."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            torch._foreach_add_([*self.rows], 0.01)  # pyright: ignore[reportPrivateImportUsage]
            self.look()
            torch._foreach_mul_([*self.rows, self.blocks[1].up.weight], 0.98)  # pyright: ignore[reportPrivateImportUsage]
        self.look()


class WrittenInTurnWithSharedMemory(ViewedWithSharedMemory):
    """Through views, and to the parameters, with no step between."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for row, parameter in zip(self.rows, self.written(), strict=True):
                row.mul_(0.99)
                self.losses.append(float(parameter.detach().norm()))
                parameter.mul_(0.99)
        self.look()


class WrittenWhereItIsUsed(SmallGpt):
    """Parameters that were taken before training are written to inside of their units, before these compute."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = [*self.parameters()]
        self.blocks[1].register_forward_pre_hook(self.write)

    def write(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.taken[-4:]:
                parameter.mul_(0.97)

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.taken[:4]:
                parameter.mul_(0.98)
        self.losses.append(float(self.embed.weight.detach().norm()))
        return super().loss(batch)


class WrittenByHandBetweenSteps(WrittenInTheStepAndBetween):
    """Two steps by hand in one, with writes to views before and after each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        optimizer: Any = self.optimizers()
        for part in batch.chunk(2):
            optimizer.zero_grad()
            loss = self.loss(part)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            self.write()
            optimizer.step()
            self.write()

    def write(self) -> None:
        with torch.no_grad():
            for row in self.rows:
                row.mul_(0.99)
        self.look()


class RemembersItselfOnOneRank(nn.Linear):
    """Keeps a view on one rank, which is another one in each forward."""

    calls = 0
    remembered: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        is_mine = dist.get_rank() == self.calls % 2
        self.remembered = self.weight.detach()[:2] if is_mine else None
        return super().forward(x)


class DetachedOnOneRank(SmallGpt):
    """Which alone reads it, after writes that all ranks make."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = RemembersItselfOnOneRank(8, 16)

    def views(self) -> list[Tensor]:
        remembering = [it for it in self.modules() if isinstance(it, RemembersItselfOnOneRank)]
        return [it.remembered for it in remembering if it.remembered is not None]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.blocks[0].up.weight.mul_(0.99)
        self.losses += [float(view.norm()) for view in self.views()]


class WrittenOnOneRank(DetachedOnOneRank):
    """Ranks would train different parameters: refused."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for view in self.views():
                view.mul_(0.9)


CASES = [
    case(WrittenInLists, steps=6),
    case(WrittenInTurnWithSharedMemory, steps=6),
    case(WrittenWhereItIsUsed),
    case(WrittenByHandBetweenSteps),
    case(DetachedOnOneRank, units={RemembersItselfOnOneRank}, steps=6),
    case(WrittenOnOneRank, units={RemembersItselfOnOneRank}, refused=r"blocks\.[01]\.up\.weight"),
    case(DetachedByTheUnitBeforeAnAssignment, units={RemembersAllOfItself}, steps=6),
    case(DetachedBeforeAnAssignment, steps=6),
    case(PartsTakenBeforeAnAssignment, steps=6),
    case(
        PartsWithGradientsTakenBeforeAnAssignment,
        steps=6,
        refused=r"blocks\.0\.norm\.weight gets other values",  # in one unit
    ),
    case(PartsTakenBeforeAnAssignmentInTheUnit, units={AssignedInItsUnit}, steps=6),
    case(
        PartsTakenInAStepBeforeAnAssignment,
        units={RemembersItself},
        refused=r"blocks\.[01]\.up\.weight gets other values",
    ),
    case(AssignedItsOwnMemory, steps=6),
    case(SwappedByAssignment, steps=6),
    case(
        AssignedBeforeTheBackwardOfAView,
        refused=r"parameter blocks\.0\.up\.weight was written to",  # in one unit
    ),
    case(WrittenBetweenTwoUsesOfAView, refused=r"parameter blocks\.0\.up\.weight"),
    case(DetachedInTheStepsOutput, refused=r"embed\.weight"),
    case(DetachedPartsInTheStepsOutput, refused=r"embed\.weight|head\.weight"),
    case(ArraysInTheStepsOutput, refused=r"embed\.weight"),
    case(DetachedOfABlock, refused=r"blocks\.0\.up\.weight|blocks\.1\.down\.bias"),
    case(DetachedByTheUnit, units={RemembersItself}, refused=r"blocks\.[01]\.up\.weight"),
    case(KeptToTheNextStep, refused=r"embed\.weight"),
    case(WrittenBetweenSteps, refused=r"embed\.weight|blocks\.0\.up\.weight"),
    case(WrittenInTheStepAndBetween, steps=6),
    case(WritesThroughViewsOfEarlierSteps, steps=6),
    case(ViewedWithSharedMemory, steps=6),
    case(DetachedBeforeTraining, refused=r"embed\.weight"),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_detached_views_are_up_to_date_or_refused_by_name(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)
