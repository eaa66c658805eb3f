"""Copies of parameters that a step trains by themselves: each rank's own, or averaged with a warning."""

import contextlib
import copy
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn, optim

from shardeddp import ShardedDP, ShardTensor
from support.fidelity import STRATEGIES, BesideDdp, OfUnits, case

pytestmark = pytest.mark.timeout(300)


class Learner(OfUnits):
    """Trains a copy for two steps before its own."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        x = self.inputs(self.embed(batch).detach())
        self.learn(x)
        loss, optimizer = self.loss(batch), self.optimizers()
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def learn(self, x: Tensor) -> None:
        learner = self.copied()
        optimizer = optim.SGD(learner.parameters(), lr=0.1)
        for _ in range(2):
            loss = learner(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())

    def copied(self) -> nn.Module:
        return copy.deepcopy(self.blocks[0])


class LearnsWeights(Learner):
    def learn(self, x: Tensor) -> None:
        weight = self.weight().requires_grad_()
        optimizer = optim.SGD([weight], lr=0.1)
        for _ in range(2):
            loss = F.linear(x, weight).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())

    def weight(self) -> Tensor:
        return self.blocks[1].block.up.weight.detach().clone()


class CopiesWhole(Learner):
    def copied(self) -> nn.Module:
        strategy = self.trainer.strategy
        with (
            strategy.summon_full_params()
            if isinstance(strategy, ShardedDP)
            else contextlib.nullcontext()
        ):
            return super().copied()


class LearnsWholeWeights(LearnsWeights):
    def weight(self) -> Tensor:
        weight: Any = self.blocks[1].block.up.weight
        return weight.full_tensor() if isinstance(weight, ShardTensor) else super().weight()


class OfTheSameData(Learner):
    """What is averaged is the same on all ranks."""

    def inputs(self, x: Tensor) -> Tensor:
        return F.one_hot(Tensor([1, 2, 3]).long(), 8).float()


CASES = [
    case(Learner, refused=r"a copy of parameter blocks\.0\..* is sharded as that is"),
    case(LearnsWeights, refused=r"a copy of parameter blocks\.1\.block\.up\.weight"),
    case(CopiesWhole),
    case(LearnsWholeWeights),
    case(OfTheSameData),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_train_as_under_ddp_or_are_told_by_name(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)
