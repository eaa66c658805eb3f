"""A backward that does not come through a unit's outputs trains as under DDP."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.fidelity import UNITS_TOO, BesideDdp, SmallGpt, case, in_bf16
from support.tasks import Block

pytestmark = pytest.mark.timeout(120)


class Unit(nn.Module):
    """A block with an element-wise weight; `forward` differs."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Any, *args: Any) -> Any:
        return self.block(x) * self.scale


class OfUnits(SmallGpt):
    """Two units; `run` gets the embedded tokens to the head."""

    unit: type[nn.Module] = Unit

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.unit() for _ in range(2))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run(self.embed(tokens)))


# -- losses that are kept aside


class BalancedUnit(Unit):
    """A mixture of experts keeps its balancing loss."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.auxiliary = (x * self.scale).logsumexp(-1).mean() + self.block.up.weight.square().mean()
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


class LossesInAnArgument(Unit):
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


# -- memory that is changed in place


class AddsToItsInput(Unit):
    """Changes the caller's tensor and returns something else."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x += self.block(x.clone()) * self.scale
        return x.mean(-1)


class InPlaceOnInputs(OfUnits):
    unit = AddsToItsInput

    def run(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            block(x)
        return x


class ReturnsAView(Unit):
    """A patch embedding returns a transposed view."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return (self.block(x) * self.scale).flatten(1).unflatten(1, (-1, 8))[:, :, :]


class InPlaceOnOutputs(OfUnits):
    """The caller adds positions in place to what a unit has returned."""

    unit = ReturnsAView

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.1
            x[:, 0] *= 2
        return x


class InPlaceOnPartsOfOutputs(OfUnits):
    """In place on a view of the output, and the loss on a view alone."""

    unit = ReturnsAView

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x[:, 1:].add_(x[:, :-1].detach())
            x.view(-1).mul_(0.9)
        return x


# -- outputs that are no tensors


@dataclass
class Output:
    """What torch's tree functions do not look into."""

    features: Tensor
    extra: Any = None


class Box:
    """An object with slots, which has not even a dictionary."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class OpaqueUnit(Unit):
    def forward(self, x: Any, *args: Any) -> Any:
        features = super().forward(x.features if isinstance(x, Output) else x)
        return Output(features, Box([features * self.scale]))


class OpaqueOutputs(OfUnits):
    unit = OpaqueUnit

    def run(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.features + x.extra.content[0]


class OpaqueOutputsAlone(OpaqueOutputs):
    """The box is used, the features are not."""

    def run(self, x: Any) -> Tensor:
        first = self.blocks[0](x).extra.content[0]
        return self.blocks[1](first).extra.content[0]


class DictUnit(Unit):
    def forward(self, x: Any, *args: Any) -> Any:
        return {"x": super().forward(x), "scaled": x * self.scale}


class DictsThatAreChanged(OfUnits):
    """The caller takes out of the dict what a unit has returned, and puts other things in."""

    unit = DictUnit

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x)
            out["y"] = out.pop("x") * 0.5
            x = out["y"] + out.pop("scaled")
        return x


class GeneratorUnit(Unit):
    def forward(self, x: Any, *args: Any) -> Iterator[Tensor]:
        yield self.block(x)
        yield x * self.scale


class GeneratorOutputs(OfUnits):
    """The unit computes when the caller asks, after its forward has returned."""

    unit = GeneratorUnit

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = sum(block(x))
        return x


class LazyUnit(Unit):
    """Returns a function that computes with its parameters."""

    def forward(self, x: Any, *args: Any) -> Any:
        weight, scale = self.block.up.weight, self.scale
        return lambda: F.linear(x * scale, weight)[..., :8]


class FunctionsAsOutputs(OfUnits):
    unit = LazyUnit

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)()
        return x


class SideDictionary(OfUnits):
    """A cache that modules share: what one unit puts there is all that the next one uses of it."""

    class Remembering(Unit):
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            (cache,) = args
            before = cache.get("state", x)
            cache["state"] = super().forward(before)
            return torch.zeros_like(x)

    unit = Remembering

    def run(self, x: Tensor) -> Tensor:
        cache = dict[str, Tensor]()
        for block in self.blocks:
            x = block(x, cache) + x * 0
        return cache["state"]


# -- recomputation


class CheckpointsInside(Unit):
    reentrant = False

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.auxiliary = (x * self.scale).square().mean()
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointInUnits(AuxiliaryLosses):
    unit = CheckpointsInside


class ReentrantCheckpointsInside(CheckpointsInside):
    reentrant = True


class ReentrantCheckpointInUnits(AuxiliaryLosses):
    unit = ReentrantCheckpointsInside


class UnusedCheckpointInUnits(OfUnits):
    """What is recomputed is not used: the loss is of the auxiliary loss alone."""

    unit = CheckpointsInside

    def loss(self, batch: Tensor) -> Tensor:
        self(batch)
        return sum(block.auxiliary for block in self.blocks)


class CheckpointAroundUnits(OfUnits):
    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        def all_of_them(y: Tensor) -> Tensor:
            for block in self.blocks:
                y = block(y)
            return y

        return checkpoint(all_of_them, x, use_reentrant=self.reentrant)


class ReentrantCheckpointAroundUnits(CheckpointAroundUnits):
    reentrant = True


class RecordsFeaturesUnderCheckpoints(RecordsFeatures):
    """Recorded in the first forward, so the loss's backward comes to it and not to the recomputation."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        self.features.clear()
        loss = self.head(self.run(self.embed(batch))).square().mean()
        return 0.1 * loss + 0.1 * sum((feature - 0.1).square().mean() for feature in self.features[:3])


UNANNOUNCED = (
    AuxiliaryLosses,
    AuxiliaryLossesAlone,
    AuxiliaryLossesEveryOtherStep,
    DetachedOutputs,
    UnitsThatDetach,
    LossesByAnArgument,
    LossesByAnArgumentAlone,
    RecordsFeatures,
    RecordsInnerFeatures,
    RecordsInputs,
    HooksOnActivations,
    InPlaceOnInputs,
    InPlaceOnOutputs,
    InPlaceOnPartsOfOutputs,
    OpaqueOutputs,
    OpaqueOutputsAlone,
    DictsThatAreChanged,
    GeneratorOutputs,
    FunctionsAsOutputs,
    SideDictionary,
    CheckpointInUnits,
    UnusedCheckpointInUnits,
    CheckpointAroundUnits,
    RecordsFeaturesUnderCheckpoints,
)
# DDP does not look for unused parameters through reentrant checkpoints.
CASES = [case(model) for model in UNANNOUNCED] + [
    case(ReentrantCheckpointInUnits, ddp={"static_graph": True}),
    case(ReentrantCheckpointAroundUnits, ddp={}),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_backwards_that_outputs_do_not_announce_train_as_under_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)


IN_BF16 = [in_bf16(case(model)) for model in (AuxiliaryLossesAlone, RecordsFeatures, InPlaceOnOutputs)]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard in one unit"])
def test_backwards_that_outputs_do_not_announce_train_as_under_ddp_in_bf16(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(IN_BF16, strategy)
