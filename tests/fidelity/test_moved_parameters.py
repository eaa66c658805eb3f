"""Parameters that go to another name, another group of the optimizer, or away, while a model trains."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn, optim
from torch.nn.utils import parametrize, prune

from support.fidelity import (
    EXPECTED,
    STRATEGIES,
    BesideDdp,
    OfUnits,
    ScaledBlock,
    case,
    in_bf16,
    ranks_of,
    train_in_turn,
)
from support.parity import assert_same_training
from world import Worlds

pytestmark = pytest.mark.timeout(300)

WARNS = f"{EXPECTED}|.*weight_norm|.*Overwriting|a copy of parameter"


class ChangesOnce(OfUnits):
    """Changes itself before the third step."""

    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        if batch_index == 2:
            self.change(self.blocks[0].block.up)

    def change(self, layer: nn.Linear) -> None:
        raise NotImplementedError


class Prunes(ChangesOnce):
    def change(self, layer: nn.Linear) -> None:
        prune.l1_unstructured(layer, "weight", 0.3)


class NormalizesSpectrally(ChangesOnce):
    def change(self, layer: nn.Linear) -> None:
        nn.utils.spectral_norm(layer)


class SplitsIntoLengthAndDirection(ChangesOnce):
    """Into new parameters, which no optimizer knows."""

    def change(self, layer: nn.Linear) -> None:
        nn.utils.weight_norm(layer)


def compute_from(layer: Any) -> None:
    """Take the weight to another name, from which the layer computes its own."""
    weight = layer.weight
    del layer.weight
    layer.register_parameter("raw", weight)
    layer.forward = lambda x: F.linear(x, 1.1 * layer.raw, layer.bias)


class ComputesFromAnotherName(ChangesOnce):
    def change(self, layer: nn.Linear) -> None:
        compute_from(layer)


class ComesBack(ComputesFromAnotherName):
    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        super().on_train_batch_start(batch, batch_index)
        if batch_index == 3:
            layer: Any = self.blocks[0].block.up
            weight = layer.raw
            del layer.raw, layer.forward
            layer.weight = weight


class MovesInItsStep(OfUnits):
    """Where parameters of the root are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11)

    def loss(self, batch: Tensor) -> Tensor:
        if len(self.losses) == 2:
            compute_from(self.head)
            compute_from(self.blocks[0].block.up)
        return super().loss(batch)


class SavesAfterwards(Prunes):
    """A checkpoint has the names of then."""

    def on_train_end(self) -> None:
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, 0)
        self.trainer.save_checkpoint(path := Path(folder[0]) / "saved.ckpt")
        saved: dict[str, Tensor] = torch.load(path, weights_only=False)["state_dict"]
        assert "blocks.0.block.up.weight_orig" in saved
        self.losses += [float(saved[name].double().sum()) for name in sorted(saved)]


class DropsABias(ChangesOnce):
    def change(self, layer: nn.Linear) -> None:
        layer.bias = None


class DropsALayer(ChangesOnce):
    def change(self, layer: nn.Linear) -> None:
        self.blocks[0].block = nn.Identity()


class DropsAUnit(ChangesOnce):
    def change(self, layer: nn.Linear) -> None:
        del self.blocks[0]


MODELS = [
    *(Prunes, NormalizesSpectrally, SplitsIntoLengthAndDirection, ComputesFromAnotherName),
    *(ComesBack, MovesInItsStep, SavesAfterwards, DropsABias, DropsALayer, DropsAUnit),
]
CASES = [case(of, warns=WARNS) for of in MODELS]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_move_or_go_train_as_under_ddp(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_move_or_go_train_as_under_ddp_in_bf16(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp([in_bf16(each) for each in CASES if each.model is not SavesAfterwards], strategy)


class ReplacesAParameter(ChangesOnce):
    def change(self, layer: nn.Linear) -> None:
        layer.bias = nn.Parameter(torch.zeros(16))


def test_a_new_parameter_in_the_place_of_one_is_refused_by_name(beside_ddp: BesideDdp) -> None:
    refused = r"blocks\.0\.block\.up\.bias .* was replaced after sharding"
    beside_ddp([case(ReplacesAParameter, warns=WARNS, refused=refused)], "full_shard")


class KeepsItsWeight(ScaledBlock):
    """In a list."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.block.up.weight]
        return super().forward(x)


class ReadsKeptWeights(OfUnits):
    """Between a step and the next gather."""

    unit = KeepsItsWeight

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses += [float(block.kept[0].detach().double().sum()) for block in self.blocks]  # type: ignore[index]


class NamesItsWeightAgain(ScaledBlock):
    def forward(self, x: Tensor) -> Tensor:
        self.again = self.block.up.weight
        return super().forward(x)


class SavesSecondNames(OfUnits):
    """A parameter that is set as an attribute is registered, and saved, by that name, too."""

    unit = NamesItsWeightAgain

    def loss(self, batch: Tensor) -> Tensor:
        self.table = self.embed.weight
        return super().loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        saved = self.state_dict()
        assert {"table", "blocks.0.again"} < saved.keys()
        self.losses += [float(value.double().sum()) for value in saved.values()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_a_forward_keeps_are_up_to_date_between_steps(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    cases = [case(of, warns=WARNS) for of in (ReadsKeptWeights, SavesSecondNames)]
    beside_ddp([*cases, *map(in_bf16, cases)], strategy)


# Where replicas drift apart under DDP: it averages what its parameters were when it was made, and after hooks of users.


class Tanh(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 1.5 * weight.tanh()


class Parametrizes(ChangesOnce):
    def change(self, layer: nn.Linear) -> None:
        parametrize.register_parametrization(layer, "weight", Tanh())


class ParametrizesByHand(ChangesOnce):
    def change(self, layer: nn.Linear) -> None:
        layer.forward = lambda input: F.linear(input, 1.5 * layer.weight.tanh(), layer.bias)


class StepsInTheBackward(OfUnits):
    """An optimizer for each parameter, which steps as soon as there is a gradient."""

    automatic_optimization = False

    def on_train_start(self) -> None:
        self.each = {p: optim.SGD([p], lr=0.1) for p in self.parameters()}
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: Tensor) -> None:
        self.each[parameter].step()  # type: ignore[index]
        self.each[parameter].zero_grad()  # type: ignore[index]

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        self.optimizers().step()


class StepsAfterTheBackward(OfUnits):
    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


class Thaws(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer)


class ThawsByCallback(OfUnits):
    def configure_callbacks(self) -> list[Callback]:
        return [Thaws()]

    def configure_optimizers(self) -> Any:
        return optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class ThawsByHand(OfUnits):
    """Frozen once DDP has seen that it trains."""

    def configure_optimizers(self) -> Any:
        trained = [p for name, p in self.named_parameters() if not name.startswith("blocks.0.")]
        return optim.SGD(trained, lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        self.blocks[0].requires_grad_(self.current_epoch > 0)
        if self.current_epoch == 1:
            parameters = [*self.blocks[0].parameters()]
            self.optimizers().add_param_group({"params": parameters, "lr": 0.01})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_lets_replicas_of_ddp_drift_apart_trains_as_its_plain_form(
    world: Worlds, strategy: str
) -> None:
    pairs = [
        (Parametrizes, ParametrizesByHand),
        (StepsInTheBackward, StepsAfterTheBackward),
        (ThawsByCallback, ThawsByHand),
    ]
    ours, theirs = (
        [case(of, warns=WARNS, steps=5, batches=2 if "Thaws" in of.__name__ else 5) for of in side]
        for side in zip(*pairs, strict=True)
    )
    ranks = world(ranks_of(strategy))
    expected = ranks.run(train_in_turn, theirs, None)
    found = ranks.run(train_in_turn, ours, strategy)
    for rank, of_ddp in zip(found, expected, strict=True):
        for one, other in zip(rank, of_ddp, strict=True):  # whose weights have other names
            shared = one.weights.keys() & other.weights.keys()
            assert len(shared) >= len(other.weights) - 1
            same = (replace(it, weights={n: it.weights[n] for n in shared}) for it in (one, other))
            assert_same_training(*([each] for each in same))
