"""Several backwards of one graph, and backwards inside of a forward, train as under DDP."""

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.fidelity import UNITS_TOO, BesideDdp, ScaledBlock, SmallGpt, case, in_bf16
from support.tasks import Block

pytestmark = pytest.mark.timeout(300)


class ByHand(SmallGpt):
    """Manual optimization; `step` is given the batch, `note` takes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        self.step(batch)

    def step(self, batch: Tensor) -> None:
        raise NotImplementedError

    def descend(self, *losses: Tensor, retain: bool = False) -> None:
        """One backward per loss, and a step."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for index, loss in enumerate(losses):
            self.manual_backward(loss, retain_graph=retain or index + 1 < len(losses))
            self.losses.append(loss.item())
        optimizer.step()

    def features(self, tokens: Tensor) -> Tensor:
        """Submodules called directly."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class ActorAndCritic(ByHand):
    """As the textbook has it: two losses of one graph, one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(8, 11), nn.Linear(8, 1)

    def step(self, batch: Tensor) -> None:
        x = self.features(batch[:, :-1])
        advantage = (batch[:, 1:] - 5.0) / 5 - self.critic(x).squeeze(-1)
        chosen = -F.cross_entropy(
            self.actor(x).flatten(0, 1), batch[:, 1:].flatten(), reduction="none"
        )
        policy = -(chosen.view_as(advantage) * advantage.detach()).mean()
        self.descend(policy, advantage.square().mean())


class OneLossTwice(ByHand):
    """The same graph, again and again."""

    def step(self, batch: Tensor) -> None:
        loss = self.loss(batch)
        self.descend(loss, loss, loss * 0.5)


class EndsWithAScale(Block):
    """A graph saves the unit's last parameter itself, and no view of it."""

    def __init__(self) -> None:
        super().__init__(8)
        self.last = nn.ParameterList([torch.linspace(0.5, 1.5, 8)])

    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x) * self.last[0]
        return self.seen.tanh()


class LossOfWhatUnitsHaveSeen(ByHand):
    """The second backward enters units behind their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EndsWithAScale() for _ in range(2))

    def step(self, batch: Tensor) -> None:
        self.descend(self.loss(batch), sum(block.seen.square().mean() for block in self.blocks))


class ClipsInBetween(ByHand):
    """The first loss's gradients are clipped, then the second's are added."""

    def step(self, batch: Tensor) -> None:
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.manual_backward(loss.sin())
        self.losses += [loss.item(), float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5))]
        optimizer.step()


class ZeroesInBetween(ByHand):
    """The first backward is only looked at."""

    def step(self, batch: Tensor) -> None:
        optimizer, x = self.optimizers(), self.features(batch[:, :-1])
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        self.manual_backward(loss, retain_graph=True)
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        optimizer.zero_grad()
        self.descend(loss / norm + x.square().mean())


class AccumulatesByHand(ByHand):
    """Two graphs at a time, of which the older is differentiated last."""

    def step(self, batch: Tensor) -> None:
        first, second = (self.loss(part) for part in batch.chunk(2))
        self.descend(second, first)


class LossPerBlock(ByHand):
    """Deep supervision: one backward for each block's features, the last one first."""

    def step(self, batch: Tensor) -> None:
        x, losses = self.embed(batch[:, :-1]), []
        for block in self.blocks:
            x = block(x)
            losses.append(F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten()))
        self.descend(*reversed(losses))


class LossPerTiedBlock(LossPerBlock):
    """Units compute with a parameter of the root's; their graphs save it itself, and need it after it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(2))
        self.blocks[1].scale = self.blocks[0].scale


class GanWithOneFake(ByHand):
    """The fake is computed once: the critic's backward stops at it or goes through it, then comes the generator's."""

    through = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Block(6), Block(6))
        self.discriminator = nn.Sequential(Block(6), Block(6), nn.Linear(6, 1))

    def judge(self, samples: Tensor, truth: float) -> Tensor:
        verdict = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, truth))

    def step(self, batch: Tensor) -> None:
        first, second = self.optimizers()
        fake = self.generator(batch.flip(1) / 10)
        loss = self.judge(batch / 10, 1.0) + self.judge(
            fake if self.through else fake.detach(), 0.0
        )
        second.zero_grad()
        self.manual_backward(loss, retain_graph=self.through)
        second.step()
        self.losses.append(loss.item())
        first.zero_grad()
        loss = self.judge(fake, 1.0)
        self.manual_backward(loss)
        first.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        parts = self.generator, self.discriminator
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.5) for part in parts]


class GanThroughOneFake(GanWithOneFake):
    through = True


class WassersteinGan(GanWithOneFake):
    """With a gradient penalty, which differentiates inside of the step."""

    def step(self, batch: Tensor) -> None:
        first, second = self.optimizers()
        real, fake = batch / 10, self.generator(batch.flip(1) / 10)
        mixed = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(mixed).sum(), mixed, create_graph=True)
        loss = self.discriminator(fake.detach()).mean() - self.discriminator(real).mean()
        loss = loss + 0.1 * (slope.norm(2, dim=1) - 1).square().mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        first.zero_grad()
        generated = -self.discriminator(fake).mean()
        self.manual_backward(generated)
        first.step()
        self.losses += [loss.item(), generated.item()]

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(part.parameters(), lr=0.01)
            for part in (self.generator, self.discriminator)
        ]


class TwoOptimizersInTurn(ByHand):
    """One graph: the first optimizer steps before the second loss is differentiated."""

    def step(self, batch: Tensor) -> None:
        blocks, rest = self.optimizers()
        x = self.embed(batch[:, :-1])
        target = batch[:, 1:].flatten()
        inner = F.cross_entropy(
            F.linear(self.blocks[0](x.detach()), self.table).flatten(0, 1), target
        )
        outer = F.cross_entropy(self.head(x).flatten(0, 1), target)
        for optimizer, loss in ((blocks, inner), (rest, outer)):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(11, 8))

    def configure_optimizers(self) -> Any:
        rest = [self.embed.weight]
        return [torch.optim.SGD(self.blocks.parameters(), lr=0.1), torch.optim.SGD(rest, lr=0.1)]


# -- automatic optimization


class TwoOptimizersOfOneBlock(ByHand):
    """States of a weight that both have are looked at between their steps; one steps more often."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(2))

    def configure_optimizers(self) -> Any:
        blocks = [*self.blocks.parameters()]
        several = [*self.embed.parameters(), *self.blocks[0].parameters()]
        return torch.optim.AdamW(blocks, lr=1e-2), torch.optim.SGD(several, lr=0.05, momentum=0.9)

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        first, second = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        self.losses.append(len(second.state.get(self.blocks[0].scale, {})))
        first.step()
        if batch_index == 0:
            second.step()
        self.zero_grad()


class BackwardPerPart(SmallGpt):
    """An overridden `backward` that differentiates by parts, each with parameters of its own."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        self.cut = x.detach().requires_grad_()
        y = self.cut
        for block in self.blocks:
            y = block(y)
        self.outer = x
        return (y * torch.arange(8.0)).tanh().mean() + y.square().mean()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        self.outer.backward(self.cut.grad)


class BackwardPerBlock(SmallGpt):
    """Greedy layer-wise training: a loss and a backward for each block."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        self.parts = [x.square().mean()]
        for block in self.blocks:
            x = block(x.detach())
            self.parts.append((x - 1).square().mean())
        return sum(self.parts)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for part in self.parts:
            part.backward()


class LooksBeforeItsBackward(SmallGpt):
    """`autograd.grad` with respect to activations and parameters, before the backward of the same graph."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        weight = self.blocks[0].up.weight
        of_weight, of_features = torch.autograd.grad(loss, (weight, self.seen), retain_graph=True)
        self.losses += [float(of_weight.norm()), float(of_features.norm())]
        (loss * (1 + of_features.norm().detach())).backward()

    def loss(self, batch: Tensor) -> Tensor:
        self.seen = self.blocks[0](self.embed(batch))
        return super().loss(batch) + self.seen.square().mean()


class GradientPenalty(SmallGpt):
    """The gradient with respect to embedded tokens is part of the loss."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        y = x
        for block in self.blocks:
            y = block(y)
        loss = F.cross_entropy(self.head(y).flatten(0, 1), batch[:, 1:].flatten())
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.norm() ** 2


class Energy(Block):
    """A unit that differentiates itself: a force from an energy, as models of molecules have it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            energy = super().forward(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.05 * force


class ForcesOfUnits(SmallGpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Energy(8) for _ in range(2))


class AscendsInsideOfItsStep(SmallGpt):
    """Adversarial training: some steps of ascent on a perturbation, by `backward` inside of the step."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        delta = torch.zeros(1, 5, 8, requires_grad=True)
        for _ in range(2):
            self.of(x.detach() + delta, batch).backward(inputs=[delta])
            with torch.no_grad():
                delta.add_(0.1 * delta.grad)
            delta.grad = None
        return self.of(x + delta.detach(), batch)

    def of(self, x: Tensor, batch: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())


class VirtualAdversary(AscendsInsideOfItsStep):
    """The same by `autograd.grad` on a graph that goes on being used."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        clean = self.of(x, batch)
        (slope,) = torch.autograd.grad(clean, x, retain_graph=True)
        return clean + self.of(x + 0.1 * slope.sign(), batch)


class ThroughFrozenUnits(SmallGpt):
    """Some weights of each unit are frozen, others for a while, and inputs that are leaves are asked for."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)

    def of(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        start = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.of(start), start)
        norms = [block.norm.requires_grad_(False) for block in self.blocks]
        start = (start + 0.1 * slope.sign()).detach().requires_grad_()
        self.of(start).backward(inputs=[start])
        assert start.grad is not None
        for norm in norms:
            norm.requires_grad_(True)
        return self.of(x + 0.1 * start.grad.sign()) + super().loss(batch)


class InnerLoop(SmallGpt):
    """MAML: a step on the blocks' weights inside of the step, through which the outer loss is differentiated."""

    def loss(self, batch: Tensor) -> Tensor:
        block, x = self.blocks[0], self.embed(batch[:, :-1])
        named = dict(block.named_parameters())
        slopes = torch.autograd.grad(block(x).square().mean(), named.values(), create_graph=True)
        adapted = {
            name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)
        }
        return (
            super().loss(batch) + torch.func.functional_call(block, adapted, (x,)).square().mean()
        )


class GaveUp(Exception):
    """What a hook raises in a backward."""


def give_up(gradient: Tensor) -> None:
    raise GaveUp


class GoesOnAfterAFailure(ByHand):
    """A backward fails in the middle, is caught, and the step goes on with what it has."""

    def step(self, batch: Tensor) -> None:
        self.optimizers().zero_grad()
        loss = self.loss(batch)
        self.fail(batch)
        self.manual_backward(loss)
        self.losses.append(loss.item())
        self.optimizers().step()

    def fail(self, batch: Tensor) -> None:
        x = self.blocks[0](self.embed(batch))
        x.register_hook(give_up)
        with suppress(GaveUp):
            torch.autograd.grad(self.blocks[1](x).sum(), [*self.parameters()], allow_unused=True)


class GoesOnWithAnotherForward(GoesOnAfterAFailure):
    """As where a batch was too large for the memory: drop what it has left, and take a part."""

    def step(self, batch: Tensor) -> None:
        loss = self.loss(batch)
        loss.register_hook(give_up)
        with suppress(GaveUp):
            self.manual_backward(loss)
        super().step(batch[:2])


class GoesOnWithAMicroBatch(GoesOnAfterAFailure):
    """What was accumulated before is part of the step."""

    def step(self, batch: Tensor) -> None:
        self.optimizers().zero_grad()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        self.fail(batch)
        loss = self.features(batch).square().mean()
        self.manual_backward(loss)
        self.losses.append(loss.item())
        self.optimizers().step()


CASES = [
    case(GoesOnAfterAFailure),
    case(GoesOnWithAnotherForward),
    case(GoesOnWithAMicroBatch),
    case(ActorAndCritic),
    case(OneLossTwice),
    case(LossOfWhatUnitsHaveSeen),
    case(ClipsInBetween),
    case(ZeroesInBetween),
    case(AccumulatesByHand),
    case(LossPerBlock),
    case(LossPerTiedBlock),
    case(GanWithOneFake, steps=8),
    case(GanThroughOneFake, steps=8),
    case(WassersteinGan, steps=8),
    case(TwoOptimizersInTurn, steps=8),
    case(TwoOptimizersOfOneBlock, steps=4),
    case(BackwardPerPart, ddp={}),
    case(BackwardPerBlock),
    case(LooksBeforeItsBackward),
    case(GradientPenalty, options={"accumulate_grad_batches": 2}),
    case(ForcesOfUnits),
    case(AscendsInsideOfItsStep),
    case(VirtualAdversary),
    case(InnerLoop),
    case(ThroughFrozenUnits),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_several_backwards_train_as_under_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)


IN_BF16 = [
    in_bf16(each)
    for each in CASES
    if each.model in (ActorAndCritic, GanThroughOneFake, GradientPenalty)
]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard in one unit"])
def test_several_backwards_train_as_under_ddp_in_bf16(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(IN_BF16, strategy)
