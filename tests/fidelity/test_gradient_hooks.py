"""Hooks of parameters are called for the backwards for which DDP calls them, as often, and what they change counts."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from support.fidelity import EVERY_BACKWARD, STRATEGIES, BesideDdp, SmallGpt, case

pytestmark = pytest.mark.timeout(300)


class Hooked(SmallGpt):
    """Half of the parameters have hooks from the start, the others since the optimizer was made; all are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()
        self.names = [name for name, _ in self.named_parameters()]
        self.set_hooks(self.names[::2])

    def configure_optimizers(self) -> Any:
        self.set_hooks(self.names[1::2])
        return super().configure_optimizers()

    def set_hooks(self, names: list[str]) -> None:
        for name in names:
            parameter = self.get_parameter(name)
            parameter.register_hook(lambda gradient, name=name: self.on_gradient(name, gradient))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self.on_complete(name, p)
            )

    def on_gradient(self, name: str, gradient: Tensor) -> Tensor:
        self.calls[f"gradient of {name}"] += 1
        return gradient * 0.9

    def on_complete(self, name: str, parameter: Tensor) -> None:
        self.calls[f"{name} complete"] += 1
        with torch.no_grad():
            parameter.grad.mul_(0.8)

    def on_after_backward(self) -> None:
        for name in self.names:
            self.losses += [self.calls[f"gradient of {name}"], self.calls[f"{name} complete"]]


class BackwardPerLoss(Hooked):
    """The second backward is that of one parameter, the third that of one outside of its unit; then a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x = self.blocks[0](self.embed(batch[:, :-1]))
        parts = [
            self.loss(batch),
            (x.detach() * self.embed.weight[0]).mean(),
            self.blocks[1].up.bias.square().mean(),
        ]
        for part in [*parts, x.square().mean()]:
            self.manual_backward(part, retain_graph=True)
            self.losses.append(part.item())
            self.on_after_backward()
        optimizer.step()


class BackwardPerPart(Hooked):
    """Micro-batches in two parts: no parameter belongs to both."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        first, second = self.blocks
        self.parts = [first(x).square().mean(), second(x.detach()).sin().mean()]
        return sum(self.parts)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for part in self.parts:
            (part / self.trainer.accumulate_grad_batches).backward()
            super().on_after_backward()


class OneParameterApart(BackwardPerPart):
    """The second part is one parameter of a unit of which the first has the others."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        scale = self.scale
        self.parts = [x.square().mean(), (x.detach() * scale).mean()]
        return sum(self.parts)

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.names.append("scale")
        self.set_hooks(["scale"])


class UsesOneBlockInTurn(Hooked):
    """A batch reaches one of two blocks."""

    count = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        return self.head(self.blocks[self.count % 2](self.embed(tokens)))


class UsedOutside(Hooked):
    """Hooks see the sum of all uses at once, which they clamp."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + sum(
            parameter.square().sum() for parameter in self.blocks.parameters()
        )

    def on_gradient(self, name: str, gradient: Tensor) -> Tensor:
        return super().on_gradient(name, gradient).clamp(-0.01, 0.01)


class AsksFirst(Hooked):
    """`autograd.grad` calls hooks, too, but brings nothing."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        asked = torch.autograd.grad(
            loss, (self.blocks[0].up.weight, self.embed.weight), retain_graph=True
        )
        self.losses += [float(each.norm()) for each in asked]
        loss.backward()


class HookedInMicroBatches(Hooked):
    pass


class PartsInMicroBatches(BackwardPerPart):
    pass


class OneParameterApartInMicroBatches(OneParameterApart):
    pass


class UsesOneBlockInMicroBatches(UsesOneBlockInTurn):
    pass


ACCUMULATED = {"options": {"accumulate_grad_batches": 2}, "batches": 6, "steps": 4}
CASES = [
    case(Hooked),
    case(BackwardPerLoss),
    case(BackwardPerPart),
    case(OneParameterApart),
    case(UsesOneBlockInTurn),
    case(UsedOutside),
    case(AsksFirst),
    case(HookedInMicroBatches, **ACCUMULATED),
    case(PartsInMicroBatches, **ACCUMULATED),
    case(OneParameterApartInMicroBatches, **ACCUMULATED),
    case(UsesOneBlockInMicroBatches, **ACCUMULATED),
]


@pytest.mark.parametrize("strategy", {**STRATEGIES, **EVERY_BACKWARD})
def test_hooks_are_called_as_often_as_under_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)
