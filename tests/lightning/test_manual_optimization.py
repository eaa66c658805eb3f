"""Manual optimization and the user's own clipping: two optimizers in turn, direct backward, closures, own hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.parity import Run, assert_same_training
from support.tasks import Block, Recorded, TinyGpt, token_loader
from world import Worlds

pytestmark = pytest.mark.timeout(60)

# In a single unit, what follows the first backward of a step gathers parameter by parameter, and says so.
OUTSIDE = "parameter .* is used outside the forward of the unit that holds it"


class Gan(Recorded):
    """Generator and discriminator step in turn, each with the other frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def judge(self, samples: Tensor, truth: float) -> Tensor:
        verdict = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, truth))

    def run_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        real = batch.float() / 10
        noise = real[:, :3].flip(0)
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            frozen = [p.requires_grad for p in self.parameters()].count(False)
            if optimizer is self.optimizers()[0]:
                loss = self.judge(self.generator(noise), 1.0)
            else:
                loss = self.judge(real, 1.0) + self.judge(self.generator(noise).detach(), 0.0)
            optimizer.zero_grad()
            self.run_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses += [loss.item(), float(frozen)]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-2),
        ]


class GanWithDirectBackward(Gan):
    def run_backward(self, loss: Tensor) -> None:
        loss.backward()


# Each of the two optimizers counts its steps.
GAN = Run(model=Gan, loader=token_loader, steps=10, ddp={"find_unused_parameters": True})


@pytest.mark.loop(1)
@pytest.mark.parametrize("units", [{nn.Linear}, None])
@pytest.mark.parametrize("model", [Gan, GanWithDirectBackward])
def test_a_gan_with_toggled_optimizers_equals_ddp(
    world: Worlds, reference: Callable[..., list[Any]], model: type[Gan], units: Any
) -> None:
    run = Run(model=model, loader=token_loader, steps=GAN.steps, warns=OUTSIDE)
    found = world(2).run(run.sharded_by, {"auto_wrap_policy": units})
    assert_same_training(found, reference(2, GAN.under_ddp))


def test_a_toggled_optimizer_freezes_the_parameters_of_the_other(world: Worlds) -> None:
    trained = world(2).run(GAN.sharded_by, {"auto_wrap_policy": {nn.Linear}})
    assert set(trained[0].losses[1::2]) == {4.0}


class ClipsThroughLightning(TinyGpt):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


class ClipsWithTorch(TinyGpt):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)


class ClipsValuesWithTorch(TinyGpt):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.02)


@pytest.mark.loop(1)
@pytest.mark.parametrize("model", [ClipsThroughLightning, ClipsWithTorch, ClipsValuesWithTorch])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_clipping_in_an_overridden_hook_is_global(
    world: Worlds, reference: Callable[..., list[Any]], model: type[TinyGpt], strategy: str
) -> None:
    run = Run(model=model, loader=token_loader)
    arguments = {"sharding_strategy": strategy, "auto_wrap_policy": {Block}}
    assert_same_training(world(2).run(run.sharded_by, arguments), reference(2, run.under_ddp))


class StepsWithAClosure(TinyGpt):
    """LBFGS evaluates its closure several times per step, and its step mixes all elements of all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure=closure)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class StepsWithLbfgs(StepsWithAClosure):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)


@pytest.mark.slow
@pytest.mark.parametrize("model", [StepsWithAClosure, StepsWithLbfgs])
def test_an_optimizer_that_is_given_a_closure_equals_ddp(
    world: Worlds, model: type[TinyGpt]
) -> None:
    run = Run(model=model, loader=token_loader)
    found = world(2).run(run.sharded_by, {"auto_wrap_policy": {Block}})
    assert_same_training(
        found, world(2).run(run.under_ddp), rtol=1e-4 if model is StepsWithLbfgs else 1e-5
    )


# -- parameters that the user writes to


class Momentum(TinyGpt):
    """A key encoder that follows the query encoder, written to at the start of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.key.requires_grad_(False)

    def follow(self, key: nn.Parameter, query: nn.Parameter) -> None:
        key.mul_(0.5).add_(query, alpha=0.5)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        with torch.no_grad():
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                self.follow(key, query)
        return super().training_step(batch, batch_index)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        return super().loss(batch) + (self.query(x) - self.key(x)).square().mean()


class MomentumByData(Momentum):
    def follow(self, key: nn.Parameter, query: nn.Parameter) -> None:
        key.data.mul_(0.5).add_(query.data, alpha=0.5)


class MomentumByAssignment(Momentum):
    def follow(self, key: nn.Parameter, query: nn.Parameter) -> None:
        key.data = key.data * 0.5 + query.data * 0.5


class ClampsWeights(TinyGpt):
    """Keeps every weight small, as a critic of a Wasserstein GAN does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)
        self.losses.append(loss.item())


@pytest.mark.slow
@pytest.mark.parametrize("units", [{Block}, None])
@pytest.mark.parametrize("model", [Momentum, MomentumByData, MomentumByAssignment, ClampsWeights])
def test_what_a_step_writes_to_parameters_stays(
    world: Worlds, reference: Callable[..., list[Any]], model: type[TinyGpt], units: Any
) -> None:
    run = Run(model=model, loader=token_loader)
    assert_same_training(
        world(2).run(run.sharded_by, {"auto_wrap_policy": units}), reference(2, run.under_ddp)
    )
