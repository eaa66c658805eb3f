"""Parameters that are made after the model was sharded are trained as in one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES
from support.parity import Run
from support.tasks import Block, TinyGpt, tokens_in_order
from support.trainers import assert_same_weights
from world import Worlds

pytestmark = pytest.mark.timeout(60)

WARNS = "late.weight, late.bias: made after the model was sharded"
CLIPS = {"gradient_clip_val": 0.05}


class AddsALayer(TinyGpt):
    """Gets one more layer in its second epoch; only rank 0 has the values that all are to train."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.late = self.made()
            self.optimizers().optimizer.add_param_group({"params": self.late.parameters()})

    def made(self) -> nn.Linear:
        torch.manual_seed(3)
        late = nn.Linear(8, 8)
        if dist.is_initialized() and dist.get_rank():
            with torch.no_grad():
                late.weight.zero_()
        return late

    def uses(self) -> bool:
        return hasattr(self, "late")

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        features = self.embed(batch).mean(1)
        return loss + self.late(features).square().mean() if self.uses() else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class AddsALayerToItsOptimizer(AddsALayer):
    """Makes the layer where it makes its optimizer."""

    def on_train_epoch_start(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        self.late = self.made()
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class NormalizesItsWeight(AddsALayer):
    """Gives a layer's weight two parameters in its second epoch: an alias of it, and its lengths."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            layer = nn.utils.parametrizations.weight_norm(self.blocks[0].up)
            added = [*layer.parametrizations.weight.parameters()]
            self.optimizers().optimizer.add_param_group({"params": added})


class UsesItsLayerOnOneRank(AddsALayerToItsOptimizer):
    """Two backwards in a step: rank 1 needs the late layer in the first of them only."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.without_layer = dist.get_rank() == 1
        self.manual_backward(self.loss(batch))
        self.without_layer = False
        optimizer.step()

    def uses(self) -> bool:
        return not getattr(self, "without_layer", False)


def assert_as_alone(world: Worlds, run: Run, strategy: str) -> None:
    [alone] = world(1).run(partial(run.alone, 2))
    units = {"auto_wrap_policy": {Block}}
    for found in world(2).run(partial(run.sharded, strategy, **units)):
        assert_same_weights(found.weights, alone.weights, 1e-5)


@pytest.mark.loop(1)
@pytest.mark.parametrize("strategy", SHARDING_STRATEGIES)
@pytest.mark.parametrize("model", [AddsALayer, AddsALayerToItsOptimizer])
def test_a_late_layer_is_trained_as_in_one_process(
    world: Worlds, model: type[AddsALayer], strategy: str
) -> None:
    run = Run(model=model, loader=tokens_in_order, options=CLIPS, warns=WARNS, steps=7, batches=3)
    assert_as_alone(world, run, strategy)


def test_ranks_that_use_a_late_layer_in_other_backwards_average_together(world: Worlds) -> None:
    run = Run(model=UsesItsLayerOnOneRank, loader=tokens_in_order, warns=WARNS, steps=4)
    one, other = world(2).run(partial(run.sharded, "full_shard", auto_wrap_policy={Block}))
    assert_same_weights(one.weights, other.weights, 0.0)


def test_parameters_of_a_late_parametrization_have_states_of_their_own(world: Worlds) -> None:
    warns = (
        "blocks.0.up.parametrizations.*made after the model was sharded|a copy of parameter|"
        "parameter blocks.0.up.weight is used outside"
    )
    run = Run(
        model=NormalizesItsWeight, loader=tokens_in_order, warns=warns, steps=7, batches=3
    )  # the alias must not take over the momentum of the weight
    assert_as_alone(world, run, "full_shard")


def test_late_gradients_of_micro_batches_are_averaged_with_the_last(world: Worlds) -> None:
    options = {**CLIPS, "accumulate_grad_batches": 2}
    run = Run(model=AddsALayer, loader=tokens_in_order, options=options, warns=WARNS, steps=5)
    assert_as_alone(world, run, "full_shard")
