"""A gradient that somebody keeps over `zero_grad()` without a copy has the values that it has under DDP."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from support.fidelity import ELEMENT_WISE, STRATEGIES, BesideDdp, SmallGpt, case

pytestmark = pytest.mark.timeout(300)


class Descent(optim.Optimizer):
    """Descends by what `change` makes of a gradient and of the parameter's state."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(
                        self.change(parameter.grad, self.state[parameter]), alpha=group["lr"]
                    )
        return loss

    def change(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class ByDifferences(Descent):
    """Element-wise: looks ahead along the difference to the previous gradient, as Adan does."""

    def change(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        previous = state.get("previous_grad", gradient)
        state["previous_grad"] = gradient
        return gradient + 0.9 * (gradient - previous)


class BySigns(Descent):
    """Element-wise, as Rprop (with a softer sign): a length per element that grows while the sign stays."""

    def change(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if "previous" not in state:
            state["previous"], state["length"] = (
                torch.zeros_like(gradient),
                torch.full_like(gradient, 0.02),
            )
        state["length"].mul_(1 + 0.3 * (1e4 * gradient * state["previous"]).tanh())
        state["previous"] = gradient.detach()
        return (100 * gradient).tanh() * state["length"]


class ByAngles(Descent):
    """Not element-wise: as long as the cosine to the previous gradient allows."""

    def change(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        previous, state["previous"] = state.get("previous", gradient), gradient.data
        cosine = (gradient * previous).sum() / (gradient.norm() * previous.norm() + 1e-12)
        return gradient * (1.2 + cosine)


class ByHistory(Descent):
    """The mean of the last three gradients, all of them kept."""

    def change(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        history = state.setdefault("history", [])
        history.append(gradient)
        del history[:-3]
        return torch.stack(history).mean(0)


class BarzilaiBorwein(Descent):
    """A step length from the last change of the parameter and that of its gradient."""

    def change(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        length = torch.tensor(1.0)
        if "change" in state:
            slope = gradient - state["gradient"]
            length = (
                ((state["change"] * slope).sum() / (slope.square().sum() + 1e-8))
                .abs()
                .clamp(0.5, 2.0)
            )
        state["gradient"], state["change"] = gradient, gradient * length
        return gradient * length


class StepsByDifferences(SmallGpt):
    optimizer: type[Descent] = ByDifferences

    def configure_optimizers(self) -> optim.Optimizer:
        return self.optimizer(self.parameters())


class StepsBySigns(StepsByDifferences):
    optimizer = BySigns


class StepsByAngles(StepsByDifferences):
    optimizer = ByAngles


class StepsByHistory(StepsByDifferences):
    optimizer = ByHistory


class StepsByBarzilaiBorwein(StepsByDifferences):
    optimizer = BarzilaiBorwein


class KeepsGradientsInAHook(SmallGpt):
    """Scales every step's gradients by their cosine to the last step's; `keep` says what is kept of one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = dict[str, Tensor]()

    def keep(self, gradient: Tensor) -> Tensor:
        return gradient

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        now = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        if self.last:
            cosine = sum(
                float((self.last[name] * self.keep(grad)).sum()) for name, grad in now.items()
            )
            length = sum(float(grad.square().sum()) for grad in self.last.values())
            self.losses.append(cosine)
            for grad in now.values():
                grad.mul_(1 + 0.5 * math.tanh(cosine / length))
        self.last = {name: self.keep(grad) for name, grad in now.items()}


class KeepsDetachedGradients(KeepsGradientsInAHook):
    def keep(self, gradient: Tensor) -> Tensor:
        return gradient.detach()


class KeepsDataOfGradients(KeepsGradientsInAHook):
    def keep(self, gradient: Tensor) -> Tensor:
        return gradient.data


class KeepsFlatViewsOfGradients(KeepsGradientsInAHook):
    def keep(self, gradient: Tensor) -> Tensor:
        return gradient.view(-1)


class KeepsPartsOfGradients(KeepsGradientsInAHook):
    def keep(self, gradient: Tensor) -> Tensor:
        return gradient[:2]


class KeepsGradientsAfterBackward(KeepsGradientsInAHook):
    """The same from the earlier hook; clipping comes in between and is seen in what is kept."""

    def on_after_backward(self) -> None:
        super().on_before_optimizer_step(self.optimizers())

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        self.losses += [float(grad.norm()) for grad in self.last.values()]


class ZeroesInPlace(KeepsGradientsInAHook):
    """With `set_to_none=False` the kept gradient and the next one are the same tensor."""

    def optimizer_zero_grad(self, epoch: int, batch_index: int, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class ZeroesSomeInPlace(KeepsDetachedGradients):
    """Views of gradients to which the next backward adds, beside those of others that are over."""

    def optimizer_zero_grad(self, epoch: int, batch_index: int, optimizer: optim.Optimizer) -> None:
        for index, parameter in enumerate(self.parameters()):
            if index % 2:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.mul_(0.5)


class AddsToKeptGradients(StepsByDifferences):
    """Nothing is ever zeroed: the gradient in the optimizer's state is the one to which every backward adds."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


class AveragesGradientsSlowly(SmallGpt):
    """Grokfast, as it is published: an average of gradients that begins with the first one itself."""

    averages: dict[str, Tensor] | None = None

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        if self.averages is None:
            self.averages = {
                n: p.grad.data.detach() for n, p in self.named_parameters() if p.requires_grad
            }
        for name, p in self.named_parameters():
            self.averages[name] = self.averages[name] * 0.9 + p.grad.data.detach() * 0.1
            p.grad.data = p.grad.data + self.averages[name] * 2.0


class KeepsGradientsInParameterHooks(SmallGpt):
    """`register_post_accumulate_grad_hook` keeps; the next step's loss is weighted by what was kept."""

    def configure_optimizers(self) -> optim.Optimizer:
        self.kept = dict[str, Tensor]()
        for name, parameter in self.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self.kept.update({name: p.grad})
            )
        return super().configure_optimizers()

    def loss(self, batch: Tensor) -> Tensor:
        kept = [float(each.norm()) for _, each in sorted(self.kept.items())]
        self.losses += kept
        return super().loss(batch) * (1 + math.tanh(sum(kept)))


class ByHand(SmallGpt):
    """Manual optimization; `gradients_of` hands out what the last backward left and makes room for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def gradients_of(self, batch: Tensor) -> list[Tensor]:
        self.optimizers().zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.losses.append(loss.item())
        return [p.grad for p in self.parameters()]

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        self.step(batch)
        self.optimizers().step()

    def step(self, batch: Tensor) -> None:
        raise NotImplementedError


class ProjectsConflicts(ByHand):
    """PCGrad: of two tasks' gradients each loses what points against the other."""

    def step(self, batch: Tensor) -> None:
        first, second = self.gradients_of(batch), self.gradients_of(batch.flip(1))
        for parameter, a, b in zip(self.parameters(), first, second, strict=True):
            inner = (a * b).sum()
            parameter.grad = (
                a + b - (inner.clamp(max=0.1) * (a / (a * a).sum() + b / (b * b).sum()))
            )


class AccumulatesByHand(ByHand):
    def step(self, batch: Tensor) -> None:
        parts = [self.gradients_of(part) for part in batch.split(1)]
        for parameter, *grads in zip(self.parameters(), *parts, strict=True):
            parameter.grad = sum(grads[1:], start=grads[0]) / len(grads)


class TakesGradientsAway(ByHand):
    """`p.grad = None` by hand; what was taken away is put back."""

    def step(self, batch: Tensor) -> None:
        first = self.gradients_of(batch)
        for parameter in self.parameters():
            parameter.grad = None
        self.gradients_of(batch.flip(0, 1))
        for parameter, kept in zip(self.parameters(), first, strict=True):
            parameter.grad = kept


class SharpnessAware(ByHand):
    """SAM: the second gradient is taken uphill, and the way back is the first gradient that was kept."""

    def step(self, batch: Tensor) -> None:
        first = self.gradients_of(batch)
        norm = torch.stack([grad.norm() for grad in first]).norm()
        with torch.no_grad():
            for parameter, grad in zip(self.parameters(), first, strict=True):
                parameter.add_(grad, alpha=0.1 / float(norm))
        self.gradients_of(batch)
        with torch.no_grad():
            for parameter, grad in zip(self.parameters(), first, strict=True):
                parameter.sub_(grad, alpha=0.1 / float(norm))


class VarianceReduced(ByHand):
    """SVRG: a full gradient is kept for several steps."""

    anchor: tuple[Tensor, ...] = ()

    def step(self, batch: Tensor) -> None:
        now = self.gradients_of(batch)
        if len(self.losses) % 3 == 1:
            self.anchor = tuple(now)
        for parameter, grad, kept in zip(self.parameters(), now, self.anchor, strict=True):
            parameter.grad = 0.5 * grad + 0.5 * kept


class ZeroesWhatTwoOptimizersKeep(ByHand):
    """Each trains its own half of every unit; both keep their gradients, which are zeroed in place later."""

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())
        self.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [ByDifferences(parameters[::2]), ByDifferences(parameters[1::2])]


class ChangesWhatWasKept(ByHand):
    """What is done to `p.grad` in place is seen in the kept gradient, and the other way round."""

    def step(self, batch: Tensor) -> None:
        kept = self.gradients_of(batch)
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)
        self.losses += [float(each.norm()) for each in kept]
        for each in kept:
            each.add_(0.01)


class ScalesInHooksOfCompletion(SmallGpt):
    """Hooks that change `.grad` when a backward has added to it, of uses inside and outside of units."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.scale)

    @staticmethod
    def scale(parameter: Tensor) -> None:
        parameter.grad.mul_(0.7)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + 0.1 * self.blocks[0].up.weight.square().sum()


ACCUMULATED = {"accumulate_grad_batches": 3}
CLIPPED = {"gradient_clip_val": 0.3}

CASES = [
    case(StepsByDifferences, steps=6),
    case(StepsBySigns),
    case(StepsByAngles, options=ACCUMULATED, batches=6),
    case(StepsByHistory, steps=6, options=CLIPPED),
    case(StepsByBarzilaiBorwein),
    case(KeepsGradientsInAHook, options=CLIPPED),
    case(KeepsDetachedGradients, options=ACCUMULATED, batches=6),
    case(KeepsDataOfGradients),
    case(KeepsFlatViewsOfGradients),
    case(KeepsPartsOfGradients),
    case(KeepsGradientsAfterBackward, options=CLIPPED),
    case(ZeroesInPlace),
    case(ZeroesSomeInPlace),
    case(AddsToKeptGradients),
    case(ZeroesWhatTwoOptimizersKeep),
    case(AveragesGradientsSlowly),
    case(KeepsGradientsInParameterHooks),
    case(ProjectsConflicts),
    case(AccumulatesByHand),
    case(TakesGradientsAway),
    case(SharpnessAware),
    case(VarianceReduced, steps=6),
    case(ChangesWhatWasKept),
    case(ScalesInHooksOfCompletion, options=ACCUMULATED, batches=6),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kept_gradients_have_the_values_of_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)


BY_DIFFERENCES = [
    each
    for each in CASES
    if each.model in (StepsByDifferences, AddsToKeptGradients, ZeroesWhatTwoOptimizersKeep)
]


@pytest.mark.parametrize("strategy", ELEMENT_WISE)
def test_kept_local_gradients_have_the_values_of_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(BY_DIFFERENCES, strategy)
