"""What a unit returns may be changed in place, be no tensor, or come later, and trains as under DDP."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.fidelity import UNITS_TOO, BesideDdp, OfUnits, ScaledBlock, case, in_bf16

pytestmark = pytest.mark.timeout(300)


class AddsToItsInput(ScaledBlock):
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


class ReturnsAView(ScaledBlock):
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


class OpaqueUnit(ScaledBlock):
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


class DictUnit(ScaledBlock):
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


class GeneratorUnit(ScaledBlock):
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


class LazyUnit(ScaledBlock):
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


class RemembersInACache(ScaledBlock):
    """Returns nothing of what it computes."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        (cache,) = args
        cache["state"] = super().forward(cache.get("state", x))
        return torch.zeros_like(x)


class SideDictionary(OfUnits):
    """A cache that modules share: what one unit puts there is all that the next one uses of it."""

    unit = RemembersInACache

    def run(self, x: Tensor) -> Tensor:
        cache = dict[str, Tensor]()
        for block in self.blocks:
            x = block(x, cache) + x * 0
        return cache["state"]


CASES = [
    case(InPlaceOnInputs),
    case(InPlaceOnOutputs),
    case(InPlaceOnPartsOfOutputs),
    case(OpaqueOutputs),
    case(OpaqueOutputsAlone),
    case(DictsThatAreChanged),
    case(GeneratorOutputs),
    case(FunctionsAsOutputs),
    case(SideDictionary),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_outputs_of_every_kind_train_as_under_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)


IN_BF16 = [in_bf16(case(model)) for model in (InPlaceOnOutputs, OpaqueOutputs)]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard in one unit"])
def test_outputs_of_every_kind_train_as_under_ddp_in_bf16(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp(IN_BF16, strategy)
