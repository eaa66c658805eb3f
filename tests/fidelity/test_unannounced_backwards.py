"""A loss of what a unit does not return (attributes, arguments, what hooks record) trains as under DDP."""

from typing import Any

import pytest
from torch import Tensor

from support.fidelity import UNITS_TOO, BesideDdp, OfUnits, ScaledBlock, case, in_bf16

pytestmark = pytest.mark.timeout(300)


class BalancedUnit(ScaledBlock):
    """A mixture of experts keeps its balancing loss."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.auxiliary = (x * self.scale).logsumexp(
            -1
        ).mean() + self.block.up.weight.square().mean()
        return super().forward(x)


class AuxiliaryLosses(OfUnits):
    unit = BalancedUnit

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + sum(block.auxiliary for block in self.blocks)


class AuxiliaryLossesAlone(OfUnits):
    """What the units return has no part in the loss."""

    unit = BalancedUnit

    def loss(self, batch: Tensor) -> Tensor:
        self(batch)
        return sum(block.auxiliary for block in self.blocks)


class AuxiliaryLossesEveryOtherStep(AuxiliaryLosses):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        return sum(block.auxiliary for block in self.blocks) if len(self.losses) % 2 else loss


class DetachedOutputs(OfUnits):
    """Layer-wise training: units pass on what is detached, so each learns from its auxiliary loss."""

    unit = BalancedUnit

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).detach()
        return x

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + sum(block.auxiliary for block in self.blocks)


class DetachingUnit(BalancedUnit):
    """The unit itself detaches what it returns."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x).detach()


class UnitsThatDetach(AuxiliaryLosses):
    unit = DetachingUnit


class LossesInAnArgument(ScaledBlock):
    """Appends to a list that the caller gave, and writes to its dict."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        losses, named = args
        losses.append((self.block.norm(x) * self.scale).std())
        named[id(self)] = (x * self.scale).square().mean()
        return super().forward(x)


class LossesByAnArgument(OfUnits):
    unit = LossesInAnArgument
    alone = False

    def run(self, x: Tensor) -> Tensor:
        self.aside, self.named = [], {}
        for block in self.blocks:
            x = block(x, self.aside, self.named)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        return (0.0 if self.alone else loss) + sum(self.aside) + sum(self.named.values())


class LossesByAnArgumentAlone(LossesByAnArgument):
    alone = True


# -- features that hooks record


class RecordsFeatures(OfUnits):
    """Distillation: forward hooks keep the features of units and of modules inside; the loss is of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.features = list[Tensor]()
        for module in (self.blocks[0].block.up, self.blocks[1].block.norm, self.blocks[1]):
            module.register_forward_hook(lambda module, args, out: self.features.append(out))

    def loss(self, batch: Tensor) -> Tensor:
        self.features.clear()
        super().loss(batch)
        return sum((feature - 0.1).square().mean() for feature in self.features)


class RecordsInnerFeatures(RecordsFeatures):
    """A perceptual loss: of a frozen network's inner features and of one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def loss(self, batch: Tensor) -> Tensor:
        self.features.clear()
        self.run(self.embed(batch))
        return (self.features[0].mean(-1) - self.features[1].mean(-1)).square().mean()


class RecordsInputs(OfUnits):
    """Pre-hooks keep what units are given."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = list[Tensor]()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: self.inputs.append(args[0]))

    def loss(self, batch: Tensor) -> Tensor:
        self.inputs.clear()
        self.run(self.embed(batch))
        return self.inputs[1].square().mean() + self.inputs[0].mean()


class HooksOnActivations(OfUnits):
    """A hook on an activation's gradient computes with a weight; another adds to the gradient."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            weight = block.scale
            x.register_hook(lambda slope, weight=weight: slope * weight.detach().mean())
        x.register_hook(lambda slope: slope + 0.01)
        return x


CASES = [
    case(AuxiliaryLosses),
    case(AuxiliaryLossesAlone),
    case(AuxiliaryLossesEveryOtherStep),
    case(DetachedOutputs),
    case(UnitsThatDetach),
    case(LossesByAnArgument),
    case(LossesByAnArgumentAlone),
    case(RecordsFeatures),
    case(RecordsInnerFeatures),
    case(RecordsInputs),
    case(HooksOnActivations),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_losses_of_what_units_do_not_return_train_as_under_ddp(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(CASES, strategy)


IN_BF16 = [in_bf16(case(model)) for model in (AuxiliaryLossesAlone, RecordsFeatures)]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard in one unit"])
def test_losses_of_what_units_do_not_return_train_as_under_ddp_in_bf16(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(IN_BF16, strategy)
