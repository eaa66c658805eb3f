"""Parameters of the user's own class, or with attributes of the user's own, train as under DDP."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from support.fidelity import STRATEGIES, BesideDdp, SmallGpt, case
from support.tasks import Block

pytestmark = pytest.mark.timeout(300)


class Sphere:
    """Points of length one, as geoopt's manifolds are written."""

    def tangent(self, point: Tensor, vector: Tensor) -> Tensor:
        return vector - (point * vector).sum(-1, keepdim=True) * point

    def retract(self, point: Tensor) -> Tensor:
        return F.normalize(point, dim=-1)


class ManifoldParameter(nn.Parameter):
    """Carries its manifold."""

    manifold: Sphere

    def __new__(
        cls, data: Tensor, manifold: Sphere | None = None, requires_grad: bool = True
    ) -> "ManifoldParameter":
        instance = super().__new__(cls, data, requires_grad)
        instance.manifold = manifold or Sphere()
        return instance

    def __deepcopy__(self, memo: dict[int, Any]) -> "ManifoldParameter":
        return type(self)(self.detach().clone(), self.manifold, self.requires_grad)

    def proj_(self) -> None:
        with torch.no_grad():
            self.copy_(self.manifold.retract(self))


class RiemannianDescent(optim.Optimizer):
    """Steps along the sphere for points of it, straight for other parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for point in group["params"]:
                if isinstance(point, ManifoldParameter):
                    point.copy_(
                        point.manifold.retract(
                            point - group["lr"] * point.manifold.tangent(point, point.grad)
                        )
                    )
                else:
                    point.sub_(point.grad, alpha=group["lr"])
        return loss


class Directions(SmallGpt):
    """Points of a sphere in the module itself, seen by the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.directions = ManifoldParameter(F.normalize(torch.randn(4, 8), dim=-1))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (self.embed(batch) @ self.directions.t()).square().mean()

    def configure_optimizers(self) -> optim.Optimizer:
        return RiemannianDescent(self.parameters(), {"lr": 0.1})


class DirectionsInAUnit(nn.Module):
    """A block whose parameter is on the sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(8)
        self.directions = nn.ParameterList(
            [ManifoldParameter(F.normalize(torch.randn(8, 8), dim=-1))]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.directions[0].t()


class DirectionsInUnits(Directions):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DirectionsInAUnit() for _ in range(2))


class DirectionsProjectedByTheModule(DirectionsInUnits):
    """An ordinary optimizer, and a method of the class at the end of each step."""

    def configure_optimizers(self) -> Any:
        return optim.Adam(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            if isinstance(parameter, ManifoldParameter):
                parameter.proj_()
                self.losses.append(float(parameter.detach().norm()))


class DirectionsProjectedInForward(DirectionsInAUnit):
    """The module asks for the class of its own parameter while it computes."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.directions[0]
        if isinstance(weight, ManifoldParameter):
            x = x + x @ weight.manifold.retract(weight).t()
        return self.inner(x)


class DirectionsAskedForInForward(SmallGpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DirectionsProjectedInForward() for _ in range(2))


class GroupsByClass(Directions):
    """Parameter groups by class; `type(p) is ManifoldParameter` holds for no sharded parameter."""

    def configure_optimizers(self) -> optim.Optimizer:
        points = [p for p in self.parameters() if isinstance(p, ManifoldParameter)]
        others = [
            p
            for p in self.parameters()
            if isinstance(p, nn.Parameter) and not isinstance(p, ManifoldParameter)
        ]
        self.losses += [len(points), len(others)]
        return optim.SGD([{"params": points, "lr": 0.3}, {"params": others}], lr=0.05)


class FrozenDirections(Directions):
    def __init__(self) -> None:
        super().__init__()
        self.directions.requires_grad_(False)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * (
            1.0 if isinstance(self.directions, ManifoldParameter) else 2.0
        )

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Masked(nn.Parameter):
    """A pruned parameter, which knows its mask: a tensor of its own shape."""

    mask: Tensor

    @property
    def density(self) -> float:
        return float(self.mask.mean())

    def prune_(self) -> None:
        with torch.no_grad():
            self.mul_(self.mask)


class PrunedBlocks(SmallGpt):
    """Masks are applied to gradients and to values."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight = Masked(block.up.weight.data)
            block.up.weight.mask = (block.up.weight.data > 0).float()
            block.up.weight.prune_()

    def pruned(self) -> list[Masked]:
        return [p for p in self.parameters() if isinstance(p, Masked)]

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        for parameter in self.pruned():
            parameter.grad.mul_(parameter.mask)

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.pruned():
            parameter.prune_()
            self.losses += [parameter.density, float((parameter == 0).sum())]


class Equalized(nn.Parameter):
    """Answers `__torch_function__` itself: in a linear map it counts half."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                args = (args[0], args[1] * 0.5, *args[2:])
            return func(*args, **(kwargs or {}))


class EqualizedBlocks(SmallGpt):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down.weight = Equalized(block.down.weight.data)
        self.query = nn.Linear(8, 8)
        self.query.weight = Equalized(self.query.weight.data)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.query(self.embed(batch)).square().mean()


class MarkedParameters(SmallGpt):
    """Attributes on ordinary parameters, read where optimizers and hooks look for them."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.lr_scale = 0.5 if "blocks" in name else 1.0  # type: ignore[attr-defined]
            parameter._no_weight_decay = parameter.ndim < 2  # type: ignore[attr-defined]
        self.blocks[0].down.weight.center = torch.full((8, 16), 0.01)  # type: ignore[attr-defined]

    def loss(self, batch: Tensor) -> Tensor:
        scales = [getattr(parameter, "lr_scale", 7.0) for parameter in self.blocks[1].parameters()]
        return super().loss(batch) * sum(scales)

    def configure_optimizers(self) -> optim.Optimizer:
        groups = [
            {
                "params": [p],
                "lr": 0.1 * p.lr_scale,
                "weight_decay": 0.0 if p._no_weight_decay else 0.1,
            }
            for p in self.parameters()
        ]
        return optim.SGD(groups, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        for parameter in self.parameters():
            if hasattr(parameter, "center"):
                parameter.grad.add_(parameter.center)
            parameter.grad.mul_(parameter.lr_scale)


class MarkedAfterSetup(SmallGpt):
    """Attributes that are set while it trains, in a forward and after a backward, and are read in the other."""

    def loss(self, batch: Tensor) -> Tensor:
        seen = [getattr(p, "steps", 0) for p in self.parameters()]
        self.losses.append(float(sum(seen)))
        return super().loss(batch) * (1 + 0.1 * max(seen))

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.steps = getattr(parameter, "steps", 0) + 1  # type: ignore[attr-defined]


class LazyLayer(SmallGpt):
    """`nn.LazyLinear`, whose parameter changes its class when it is first used, which is before training."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(8)
        self.lazy(torch.zeros(1, 8))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.lazy(self.embed(batch)).square().mean()


class BesideNestedTensors(SmallGpt):
    """A nested tensor meets a weight outside of its unit: its own class runs the operation, and ours is not asked."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        rows = torch.nested.nested_tensor([*x.detach()], layout=torch.jagged)
        for block in self.blocks:
            rows = F.linear(rows, block.up.weight)
            rows = rows @ block.down.weight.t()
        return super().loss(batch) + rows.values().square().mean()


class Tagged(Tensor):
    """A class of the user's, whose operations know nothing of ours."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found.as_subclass(cls) if isinstance(found, Tensor) and found.dim() else found


class BesideTaggedTensors(SmallGpt):
    """The same with a class that has no dispatch of its own."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch).detach().as_subclass(Tagged)
        for block in self.blocks:
            x = (
                x @ block.up.weight.t() * block.up.weight.square().mean() @ block.down.weight.t()
                + block.norm.bias
            )
        return super().loss(batch) + x.square().mean().as_subclass(Tensor)


CASES = [
    case(BesideNestedTensors),
    case(BesideTaggedTensors),
    case(Directions),
    case(DirectionsInUnits),
    case(DirectionsProjectedByTheModule, options={"gradient_clip_val": 0.5}),
    case(DirectionsAskedForInForward),
    case(GroupsByClass, options={"accumulate_grad_batches": 2}),
    case(FrozenDirections),
    case(PrunedBlocks),
    case(EqualizedBlocks),
    case(MarkedParameters),
    case(MarkedAfterSetup),
    case(LazyLayer),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_keep_their_class_and_attributes(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)
