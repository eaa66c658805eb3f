"""An optimizer that gives each rank other parameters to step on is told what to be instead."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from shardeddp import ShardedDP
from support.fidelity import STRATEGIES, BesideDdp, OfUnits, case, ranks_of
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(300)


class Muon(optim.Optimizer):
    """Keller Jordan's, of one device."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(sorted(parameters, key=lambda p: p.size(), reverse=True), {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_all(self.param_groups[0]["params"])
        return loss

    def step_all(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            self.step_one(parameter)

    def step_one(self, parameter: Tensor) -> None:
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 0.1)
        x = average / (average.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        parameter.add_(x, alpha=-0.02)


class DividedMuon(Muon):
    """Keller Jordan's: ranks step on parameters in turn and hand them round."""

    def step_all(self, parameters: list[Tensor]) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        padded = parameters + [torch.empty_like(parameters[-1])] * (-len(parameters) % size)
        for first in range(0, len(parameters), size):
            if first + rank < len(parameters):
                self.step_one(parameters[first + rank])
            dist.all_gather(padded[first : first + size], padded[first + rank])


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class SteppedByMuon(OfUnits):
    unit = Square
    kind: type[Muon] = Muon

    def configure_optimizers(self) -> Any:
        return self.kind(it for it in self.blocks.parameters() if it.ndim == 2)


class SteppedByDividedMuon(SteppedByMuon):
    kind = DividedMuon


ADVICE = r"blocks\..*weight.*use its form for one device, with ShardedDP\(optimizer_scope="


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_that_divides_its_work_is_refused_with_the_way_out(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    refused = "" if strategy == "no_shard" else ADVICE  # there every rank has all parameters
    beside_ddp([case(SteppedByMuon), case(SteppedByDividedMuon, refused=refused)], strategy)


def train_with_a_wrong_scope(name: str) -> None:
    arguments = {**STRATEGIES[name], "optimizer_scope": {"DividedMuon": "parameter"}}
    made = case(SteppedByDividedMuon)
    trainer = make_trainer(ShardedDP(name, **arguments), max_steps=2)
    with pytest.raises(Exception, match=r"DividedMuon communicates in its step"):
        trainer.fit(made.model(), made.loader(16))


@pytest.mark.parametrize("name", ["full_shard", "shard_optimizer", "hybrid_shard"])
def test_it_is_refused_where_its_scope_is_said_to_be_one_parameter(
    world: Worlds, name: str
) -> None:
    world(ranks_of(name)).run(train_with_a_wrong_scope, name)
