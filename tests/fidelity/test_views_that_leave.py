"""A view of a parameter that leaves its unit has the values and gradients that it has under DDP."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.fidelity import UNITS_TOO, BesideDdp, SmallGpt, case, in_bf16
from support.tasks import Block

pytestmark = pytest.mark.timeout(300)


class Table(nn.Module):
    """A unit that computes nothing: it hands out its parameter."""

    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, 8) * 0.3)

    def forward(self, length: int) -> Any:
        return self.table[:length]


class WithATable(SmallGpt):
    """Positions from a table, as `add` adds them."""

    table_class: type[nn.Module] = Table

    def __init__(self) -> None:
        super().__init__()
        self.positions = self.table_class()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.add(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def add(self, x: Tensor) -> Tensor:
        return x + self.positions(x.shape[1])


class WholeTable(Table):
    """The parameter itself."""

    def forward(self, length: int) -> Tensor:
        return self.table


class ReturnsItsParameter(WithATable):
    table_class = WholeTable

    def add(self, x: Tensor) -> Tensor:
        return x + self.positions(5)[:5] * self.positions(6)[-1]


class ExpandedPrompt(Table):
    """Prompt tuning, as peft and everybody writes it."""

    def forward(self, length: int) -> Tensor:
        return self.table.expand(length, -1, -1)


class PromptTuning(WithATable):
    """The model is frozen, the prompt is all that trains."""

    table_class = ExpandedPrompt

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.positions.requires_grad_(True)

    def add(self, x: Tensor) -> Tensor:
        prompt = self.positions(len(x))
        return torch.cat([prompt, x], 1)[:, -x.shape[1] :] + prompt.mean(1, keepdim=True)


class PromptsOfAllLayers(Table):
    """Prefix tuning: one prefix per layer, unbound."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes = nn.Parameter(torch.randn(2, 3, 8))

    def forward(self, length: int) -> Any:
        return self.prefixes.unbind(0)


class PrefixTuning(WithATable):
    table_class = PromptsOfAllLayers

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block, prefix in zip(self.blocks, self.positions(0), strict=True):
            x = block(torch.cat([prefix.expand(len(x), -1, -1), x], 1))[:, 3:]
        return self.head(x)


class KeptList(Table):
    """Views in a list, an attribute and a dict; nothing is returned."""

    def forward(self, length: int) -> None:
        self.parts = [part.t() for part in self.table.chunk(2)]
        self.named = {"first": self.table.select(0, 0), "rest": self.table.narrow(0, 1, 3).view(-1)}


class TakesViewsFromTheUnit(WithATable):
    table_class = KeptList

    def add(self, x: Tensor) -> Tensor:
        self.positions(5)
        scale = (self.positions.parts[0].t() * self.positions.parts[1].t()).mean(0)
        return (
            x * (1 + scale)
            + self.positions.named["first"]
            + self.positions.named["rest"].view(3, 8).sum(0)
        )


class Yielded(Table):
    """A generator of views."""

    def forward(self, length: int) -> Iterator[Tensor]:
        for index in range(length):
            yield self.table[index]


class TakesViewsOneByOne(WithATable):
    table_class = Yielded

    def add(self, x: Tensor) -> Tensor:
        return torch.stack(
            [part + row for part, row in zip(x.unbind(1), self.positions(5), strict=True)], 1
        )


class Rotary(Table):
    """A complex view of pairs."""

    def forward(self, length: int) -> Tensor:
        return torch.view_as_complex(self.table.view(-1, 4, 2))[:length]


class RotatesByAComplexView(WithATable):
    table_class = Rotary

    def add(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2)) * self.positions(x.shape[1])
        return torch.view_as_real(turned).flatten(-2)


class Codebook(nn.Module):
    """Vector quantisation; codes and the book that they are of."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cdist(x.flatten(0, 1), self.book.weight).argmin(-1).view(
            x.shape[:-1]
        ), self.book.weight


class Quantizes(WithATable):
    """The caller looks up in the book that the unit has returned."""

    table_class = Codebook

    def add(self, x: Tensor) -> Tensor:
        codes, book = self.positions(x)
        found = book[codes]
        self.commitment = F.mse_loss(found, x.detach()) + F.mse_loss(found.detach(), x)
        return x + (found - x).detach()

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.commitment


class HandsOutAWeight(Block):
    """A hypernetwork: the caller computes with the weight that a unit returns beside its output."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), {"weight": self.down.weight.t(), "bias": self.norm.bias[:]}


class ComputesWithReturnedWeights(SmallGpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HandsOutAWeight(8) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x, returned = block(x)
            x = x + x @ returned["weight"][:8] + returned["bias"]
        return self.head(x)


class ChangesAClone(WithATable):
    """In place on a clone of the view, and on a sum of it."""

    def add(self, x: Tensor) -> Tensor:
        positions = self.positions(x.shape[1])
        changed = positions.clone()
        changed[0] = 0
        changed.mul_(2)
        total = positions + 0
        total += x.mean(0)
        return x + changed + total


class SquaredLater(WithATable):
    """Saved for backward by operations of the caller, long after the unit has run."""

    def add(self, x: Tensor) -> Tensor:
        self.view = self.positions(5)
        return x + self.view

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (self.view**2 * self.view.exp()).mean()


class ViewIsThePenalty(SquaredLater):
    """The loss of a step is of the view alone, every other time."""

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        return (self.view.sin() ** 2).mean() if len(self.losses) % 2 else loss


class ViewByAHook(WithATable):
    """A forward hook takes the parameter's view and adds it to the output of another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(
            lambda module, args, out: out + module.norm.weight[:8] * self.kept[0]
        )
        self.blocks[1].register_forward_pre_hook(
            lambda module, args: (args[0] * module.norm.bias.view(-1).add(1),)
        )

    def add(self, x: Tensor) -> Tensor:
        self.kept = self.positions(5)
        return x + self.kept


class TakenOnce(SmallGpt):
    """A view of a block's weight, made outside of the block, is used in all later steps; before the block."""

    @property
    def view(self) -> Tensor:
        if "_view" not in vars(self):
            vars(self)["_view"] = self.blocks[0].norm.weight[:4]
        return vars(self)["_view"]

    def loss(self, batch: Tensor) -> Tensor:
        squared = (self.view * self.view).sum()
        return super().loss(batch) + squared + (self.view.exp() * self.view).sum() * 0.1


class TakenOnceAndReadBetweenSteps(TakenOnce):
    """After the block; and read after the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def loss(self, batch: Tensor) -> Tensor:
        return SmallGpt.loss(self, batch) + (self.view**3).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += self.view.detach() + self.view.tolist()[0]


class TakenBeforeTheFirstStep(TakenOnce):
    def on_fit_start(self) -> None:
        assert self.view.requires_grad


class TakenOnceAndUsedWithParameters(TakenOnce):
    """In a list with one, and with the weight whose view it is."""

    def loss(self, batch: Tensor) -> Tensor:
        weight, other = self.blocks[0].norm.weight, self.blocks[1].up.weight
        both = torch.stack([weight[4:], self.view]).pow(2).sum()
        return super().loss(batch) + both * 0.1 + (other * self.view.repeat(2)).sum() * 0.01


class GradientOfAView(SmallGpt):
    """The view itself is what is differentiated, by `autograd.grad` and in `backward`."""

    def loss(self, batch: Tensor) -> Tensor:
        weight = self.blocks[0].up.weight
        (gradient,) = torch.autograd.grad(weight[:2], weight, torch.ones(2, 8))
        return super().loss(batch) + gradient.sum()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        view = self.blocks[1].up.weight[:2]
        torch.autograd.backward([loss, view], [torch.ones(()), torch.full((2, 8), 0.1)])


class ViewIsTheFirstOperand(SmallGpt):
    """Of functions that are given parameters, too."""

    views: tuple[Tensor, ...] = ()

    def loss(self, batch: Tensor) -> Tensor:
        first, second = self.blocks[0].up.weight, self.blocks[1].up.weight
        self.views = self.views or (first[:8], first.detach()[0], first.detach()[:1])
        square, row, rows = self.views
        terms = [
            torch.cat([square, first, second]).square(),
            (row * second).square(),
            square[0] * first,
            torch.maximum(rows, second),
            F.linear(square, second).square(),
            torch.stack([row, self.blocks[0].norm.weight]).square(),
        ]
        (gradient,) = torch.autograd.grad((row * second * second).sum(), second, create_graph=True)
        return super().loss(batch) + sum(it.mean() for it in [*terms, gradient.square()])


class ViewIsTheFirstOperandWithHooks(ViewIsTheFirstOperand):
    """That see the gradients of all uses."""

    def on_fit_start(self) -> None:
        for block in self.blocks:
            block.up.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


class ConstantOfATransform(SmallGpt):
    """A view of an earlier step inside of `torch.func.grad` and `vmap`: score matching."""

    view: Tensor | None = None

    def loss(self, batch: Tensor) -> Tensor:
        view = self.view = self.blocks[0].up.weight.detach()[:8] if self.view is None else self.view
        x = self.embed(batch)
        score = torch.func.grad(lambda x: (x @ view).tanh().square().sum())(x)
        rows = torch.func.vmap(lambda row: (row * view[0]).sum())(x.flatten(0, 1))
        return super().loss(batch) + score.square().mean() + rows.mean()


CASES = [
    case(GradientOfAView),
    case(ViewIsTheFirstOperand),
    case(ViewIsTheFirstOperandWithHooks),
    case(ConstantOfATransform),
    case(TakenOnce),
    case(TakenOnceAndReadBetweenSteps),
    case(TakenBeforeTheFirstStep),
    case(TakenOnceAndUsedWithParameters),
    case(WithATable, units={Block, Table}),
    case(ReturnsItsParameter, units={Block, Table}),
    case(PromptTuning, units={Block, Table}, options={"gradient_clip_val": 0.5}),
    case(PrefixTuning, units={Block, Table}),
    case(TakesViewsFromTheUnit, units={Block, Table}),
    case(TakesViewsOneByOne, units={Block, Table}),
    case(RotatesByAComplexView, units={Block, Table}),
    case(Quantizes, units={Block, Codebook}, options={"accumulate_grad_batches": 2}),
    case(ComputesWithReturnedWeights, units={HandsOutAWeight}),
    case(ChangesAClone, units={Block, Table}),
    case(SquaredLater, units={Block, Table}),
    case(ViewIsThePenalty, units={Block, Table}),
    case(ViewByAHook, units={Block, Table}),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_views_that_leave_their_unit_train_as_under_ddp(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)


IN_BF16 = [
    in_bf16(each)
    for each in CASES
    if each.model in (TakenOnce, PrefixTuning, Quantizes, ComputesWithReturnedWeights)
]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard in one unit"])
def test_views_that_leave_their_unit_train_as_under_ddp_in_bf16(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(IN_BF16, strategy)
