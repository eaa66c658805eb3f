"""Programs of many fields, each in the few lines that its users write, train as under DDP."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from support.fidelity import EXPECTED, STRATEGIES, BesideDdp, OfUnits, ScaledBlock, case
from support.tasks import Block

pytestmark = pytest.mark.timeout(300)


class ByHand(OfUnits):
    """Manual optimization; `step` is what differs."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        self.step(batch, self.optimizers())

    def step(self, batch: Tensor, optimizer: Any) -> None:
        raise NotImplementedError

    def apply_loss(self, loss: Tensor, optimizer: Any, **options: Any) -> None:
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss, **options)
        optimizer.step()


def features(model: OfUnits, batch: Tensor) -> Tensor:
    """What goes into the units."""
    return model.embed(batch[:, :-1])


# Learning by rewards, and learning to learn


class Reptile(ByHand):
    """Weights go a few steps, and a part of the way back."""

    def step(self, batch: Tensor, optimizer: Any) -> None:
        before = copy.deepcopy(self.state_dict())
        for _ in range(2):
            self.apply_loss(self.loss(batch), optimizer)
        after = self.state_dict()
        self.load_state_dict({k: before[k] + 0.5 * (after[k] - before[k]) for k in before})


class InnerLearner(ScaledBlock):
    """A layer whose weight takes a gradient step in its own forward, as in test-time training."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.block.up.weight
        (slope,) = torch.autograd.grad(
            ((x @ w.t()) ** 2).mean(), w, create_graph=self.training, retain_graph=True
        )
        return x + F.linear(F.linear(x, w - 0.1 * slope), self.block.down.weight) * self.scale


class TrainsAtTestTime(OfUnits):
    unit = InnerLearner


# Derivatives by inputs, of higher order, forward, batched


class Laplacian(OfUnits):
    """Second derivatives by the input, in the loss."""

    def loss(self, batch: Tensor) -> Tensor:
        x = features(self, batch).detach().requires_grad_()
        y = self.run(x).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        (dxx,) = torch.autograd.grad(dx[..., 0].sum(), x, create_graph=True)
        return (dxx[..., 0] - dx[..., 1]).square().mean() + 0.01 * y


class Langevin(OfUnits):
    """Samples by gradients of the input while parameters are frozen."""

    def loss(self, batch: Tensor) -> Tensor:
        real = features(self, batch).detach()
        x = torch.zeros_like(real).requires_grad_()
        self.requires_grad_(False)
        for _ in range(3):
            (slope,) = torch.autograd.grad(self.run(x).square().sum(), x)
            x = (x - 0.1 * slope).detach().requires_grad_()
        self.requires_grad_(True)
        return self.run(real).square().mean() - 0.1 * self.run(x.detach()).square().mean()


class DualNumbers(OfUnits):
    def loss(self, batch: Tensor) -> Tensor:
        x = features(self, batch)
        with forward_ad.dual_level():
            y = self.run(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(y).tangent
        return super().loss(batch) + tangent.square().mean()


class BatchedJacobian(OfUnits):
    """One backward vectorised over its outputs."""

    def loss(self, batch: Tensor) -> Tensor:
        x = features(self, batch)
        y = self.run(x).mean((0, 1))
        (j,) = torch.autograd.grad(y, x, torch.eye(8), create_graph=True, is_grads_batched=True)
        return super().loss(batch) + 100 * j.square().mean()


class VectorizedHessian(OfUnits):
    def loss(self, batch: Tensor) -> Tensor:
        x = features(self, batch)[0, 0].detach()
        h = torch.autograd.functional.hessian(
            lambda z: self.run(z).square().sum(), x, create_graph=True, vectorize=True
        )
        return super().loss(batch) + 0.01 * h.square().mean()


class PullsBack(OfUnits):
    """`vjp` by the parameters of a unit."""

    def loss(self, batch: Tensor) -> Tensor:
        block, x = self.blocks[0], features(self, batch)
        y, back = vjp(lambda w: functional_call(block, w, (x,)), dict(block.named_parameters()))
        return super().loss(batch) + 0.01 * sum(
            g.square().mean() for g in back(y.cos())[0].values()
        )


class TextualInversion(OfUnits):
    """All frozen but one embedding row, given as a leaf input to frozen units."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.token = nn.Parameter(torch.randn(8))

    def run(self, x: Tensor) -> Tensor:
        return super().run(torch.cat([x, self.token.expand(x.shape[0], 1, -1)], 1))[:, :-1]


class DeepDream(OfUnits):
    def loss(self, batch: Tensor) -> Tensor:
        img = features(self, batch).detach().requires_grad_()
        inner = optim.Adam([img], 0.1)
        self.blocks.requires_grad_(False)
        for _ in range(2):
            inner.zero_grad()
            self.run(img).square().mean().backward()
            inner.step()
        self.blocks.requires_grad_(True)
        return self.run(img.detach()).square().mean() + super().loss(batch)


class TwoInputs(ScaledBlock):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.block(x) * self.scale + y.sin()


class LeafAndNot(OfUnits):
    unit = TwoInputs

    def __init__(self) -> None:
        super().__init__()
        for b in self.blocks:
            b.block.up.requires_grad_(False)

    def run(self, x: Tensor) -> Tensor:
        a = torch.full_like(x, 0.1).requires_grad_()
        y = x
        for b in self.blocks:
            y = b(y, a)
        gs = torch.autograd.grad(
            y.square().sum(),
            [a, x] if x.requires_grad else [a],
            create_graph=True,
            allow_unused=True,
        )
        return y + 0.01 * gs[0]


class Vmapped(OfUnits):
    def run(self, x: Tensor) -> Tensor:
        return vmap(vmap(self.blocks[0]))(x) + vmap(self.blocks[1])(x)


class ModelEnsemble(OfUnits):
    def loss(self, batch: Tensor) -> Tensor:
        params, buffers = stack_module_state(list(self.blocks))
        base = self.blocks[0]
        x = features(self, batch)
        out = vmap(lambda p, b: functional_call(base, (p, b), (x,)), (0, 0))(params, buffers)
        return super().loss(batch) + out.square().mean()


# Graphs of modules


class Equilibrium(OfUnits):
    """A fixed point without a graph; its gradient is solved in a hook inside of the backward."""

    def run(self, x: Tensor) -> Tensor:
        cell = self.blocks[0]
        with torch.no_grad():
            z = x
            for _ in range(3):
                z = 0.5 * cell(z) * 0.1 + x
        z = 0.05 * cell(z) + x
        again = z.detach().requires_grad_()
        f = 0.05 * cell(again) + x.detach()

        def solve(g: Tensor) -> Tensor:
            v = g
            for _ in range(3):
                v = torch.autograd.grad(f, again, v, retain_graph=True)[0] + g
            return v

        if z.requires_grad:
            z.register_hook(solve)
        return self.blocks[1](z)


class ProgressiveGrowing(OfUnits):
    """A unit fades in after the first step; before, it does not run."""

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        alpha = min(1.0, 0.4 * self.global_step)
        return x if alpha == 0 else (1 - alpha) * x + alpha * self.blocks[1](x)


class StochasticDepth(OfUnits):
    """Each rank leaves out other units."""

    def run(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(10 * self.global_step + self.global_rank)
        for block in self.blocks:
            if torch.rand((), generator=generator) < 0.6:
                x = block(x)
        return x


class Recursion(OfUnits):
    """Units run as often as the data of the rank say, in an order of its own."""

    def run(self, x: Tensor) -> Tensor:
        order = [0, 1, 0, 1][: 2 + self.global_rank] if self.global_step % 2 else [1, 0]
        for index in order:
            x = self.blocks[index](x)
        return x


class ReversesGradients(OfUnits):
    """Full backward hooks that change what goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_full_backward_hook(lambda m, gi, go: (-0.5 * gi[0],))
        self.blocks[1].register_full_backward_pre_hook(lambda m, go: (2 * go[0],))


class SavesOnHost(OfUnits):
    """Saved tensors on the host around everything, and packed around the units."""

    def run(self, x: Tensor) -> Tensor:
        with save_on_cpu(), saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return super().run(x)

    def loss(self, batch: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
            return super().loss(batch)


class Recomputes(OfUnits):
    """Segments of units, one in another, with dropout."""

    def run(self, x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            x = checkpoint(self.blocks[0], F.dropout(x, 0.5), use_reentrant=False)
            return self.blocks[1](x)

        x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        return checkpoint(outer, x, use_reentrant=False)


class Traced(OfUnits):
    """A graph module of torch.fx in the place of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = torch.fx.symbolic_trace(self.blocks[0])


class TiedByProperty(OfUnits):
    def forward(self, t: Tensor) -> Tensor:
        x = self.run(self.embed(t))
        return x @ self.embed.weight.t() + F.linear(x, self.embed.weight.detach()) * 0.1


class DataParallelLike(OfUnits):
    def run(self, x: Tensor) -> Tensor:
        return torch.cat([self.blocks[0](c) for c in x.chunk(4)]) + torch.stack(
            [self.blocks[1](s) for s in x.unbind()]
        )


class GradMode(OfUnits):
    def loss(self, batch: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.global_step % 2 == 0):
            aux = self.run(features(self, batch)).square().mean()
        return super().loss(batch) + aux


class NestedAutocast(OfUnits):
    def run(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.blocks[0](x)
        with torch.autocast("cpu", enabled=False):
            return self.blocks[1](y.float())


# Optimizers, and what happens around their steps


class Centralized(optim.SGD):
    """Gradients without their mean, before the step of the parent."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for p in itertools.chain(*(g["params"] for g in self.param_groups)):
            if p.ndim > 1:
                p.grad.data.sub_(p.grad.data.mean(tuple(range(1, p.ndim)), keepdim=True))
        super().step()
        return loss


class CentralizedGradients(OfUnits):
    def configure_optimizers(self) -> Any:
        return Centralized(self.parameters(), lr=0.1)


class LimitedMemory(OfUnits):
    def configure_optimizers(self) -> Any:
        return optim.LBFGS(self.parameters(), lr=0.05, max_iter=2, history_size=3)


class AdaptiveClipping(OfUnits):
    """Unit-wise norms of weights and gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            axes = tuple(range(1, p.ndim)) or (0,)
            limit = 0.02 * p.detach().norm(dim=axes, keepdim=True).clamp(min=1e-3)
            norm = p.grad.detach().norm(dim=axes, keepdim=True)
            p.grad.detach().copy_(torch.where(norm > limit, p.grad * (limit / norm), p.grad))


class NoisyGradients(OfUnits):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(self.global_step)
        for p in self.parameters():
            p.grad += 0.01 * torch.randn(p.shape, generator=generator)


class FreezesAndThaws(OfUnits):
    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        self.blocks[0].requires_grad_(self.global_step % 2 == 0)


class SkipsSteps(OfUnits):
    """An infinite gradient is thrown away; the others are clipped by the halves of `clip_grad_norm_`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 1:
            self.head.weight.grad.fill_(float("inf"))
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        if not norm.isfinite():
            optimizer.zero_grad()
        else:
            nn.utils.clip_grads_with_norm_(self.parameters(), 0.5, norm)


class PerLayerLr(OfUnits):
    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": 0.1 * 0.9**i} for i, p in enumerate(self.parameters())]
        o = optim.SGD(groups, momentum=0.9, nesterov=True)
        return [o], [
            {"scheduler": optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20), "interval": "step"}
        ]


class Swa(OfUnits):
    def on_train_start(self) -> None:
        self.swa = [optim.swa_utils.AveragedModel(self.blocks)]

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_index: int) -> None:
        self.swa[0].update_parameters(self.blocks)
        with torch.no_grad():
            self.losses.append(float(sum(p.sum() for p in self.swa[0].parameters())))


class AgentSwap(OfUnits):
    """EMA swapped in for an evaluation in the step with .data exchange, and back."""

    def on_train_start(self) -> None:
        self.ema = [p.detach().clone() for p in self.parameters()]

    def swap(self) -> None:
        for p, e in zip(self.parameters(), self.ema, strict=True):
            t = p.data.clone()
            p.data.copy_(e)
            e.copy_(t)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_index: int) -> None:
        for p, e in zip(self.parameters(), self.ema, strict=True):
            e.lerp_(p.detach(), 0.3)
        self.swap()
        with torch.no_grad():
            self.losses.append(self.loss(batch).item())
        self.swap()


class PointerSwap(AgentSwap):
    def swap(self) -> None:
        for i, p in enumerate(self.parameters()):
            p.data, self.ema[i] = self.ema[i], p.data


# Kinds of parameters and buffers


class OddParameters(nn.Module):
    """Complex, 0-d, empty, double, integer, transposed; lists and dicts of them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.log_scale = nn.Parameter(torch.tensor(0.1))
        self.nothing = nn.Parameter(torch.empty(0, 8))
        self.codes = nn.Parameter(torch.randint(0, 9, (8, 8), dtype=torch.uint8), False)
        self.turned = nn.Parameter(torch.randn(8, 3).t())
        self.several = nn.ParameterList([torch.ones(8), nn.Parameter(torch.ones(1))])
        self.named = nn.ParameterDict({"a": torch.ones(8), "b": nn.Parameter(torch.zeros(8))})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(x) * self.phase, n=8) * self.log_scale.exp()
        x = x + F.linear(x, self.nothing).sum() + 0.1 * F.linear(x, self.codes / 9.0 - 0.5)
        for p in (*self.several, *self.named.values()):
            x = x + 0.1 * p
        return self.block(x + F.linear(x, self.turned).mean(-1, keepdim=True))


class KindsOfParameters(OfUnits):
    unit = OddParameters


class Doubles(OfUnits):
    """Some parameters in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].double()

    def run(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x).double()).float()


class FlatWeights(nn.Module):
    """One flat parameter, cut into views by shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(0.1 * torch.randn(8 * 8 + 8 + 8 * 8))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.flat.split([64, 8, 64])
        return (
            x
            + torch.as_strided(c, (8, 8), (1, 8), 72)
            .matmul(F.linear(x, a.view(8, 8), b).tanh().mT)
            .mT
        )


class OneFlatParameter(OfUnits):
    unit = FlatWeights


class GrowsBuffers(ScaledBlock):
    """A cache that is registered in the first forward and replaced when it is too short."""

    def forward(self, x: Tensor) -> Tensor:
        n = int(x.sum().abs() * 10) % 3 + x.shape[1]
        if "cache" not in self._buffers or len(self.cache) < n:
            self.register_buffer("cache", torch.arange(n).float().cos(), persistent=False)
        return self.block(x) * self.scale + self.cache[: x.shape[1], None]


class BufferCaches(OfUnits):
    unit = GrowsBuffers


class FakeQuantized(OfUnits):
    """torch's learnable fake quantisation on a weight, as a parametrization."""

    def loss(self, batch: Tensor) -> Tensor:
        w = self.blocks[0].block.up.weight
        q = torch.fake_quantize_per_tensor_affine(w, 0.1, 0, -8, 7)
        return super().loss(batch) + (w - q).square().sum()


class NewTokensOnly(OfUnits):
    """A gradient hook keeps the rows of old tokens; noise comes by a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        mask = (torch.arange(11) > 6).float()[:, None]
        self.embed.weight.register_hook(lambda g: g * mask)
        self.embed.register_forward_hook(lambda m, args, y: y + 0.01 * y.detach().sin())


class BiasesOnly(OfUnits):
    def __init__(self) -> None:
        super().__init__()
        for name, p in self.named_parameters():
            p.requires_grad = name.endswith("bias")


class ChunkedLoss(OfUnits):
    """The head is recomputed for each chunk; the weight is an argument."""

    def loss(self, batch: Tensor) -> Tensor:
        x, y = self.run(features(self, batch)).flatten(0, 1), batch[:, 1:].flatten()

        def part(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(x, w), y, reduction="sum")

        w = self.head.weight
        parts = zip(x.split(7), y.split(7), strict=True)
        return sum(checkpoint(part, a, w, b, use_reentrant=False) for a, b in parts) / len(y)


class ComplexReal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)
        self.w = nn.Parameter(torch.randn(8, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.w.abs() + self.w.real * self.w.imag


class Complex(OfUnits):
    unit = ComplexReal

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for b in self.blocks:
                b.w.real.clamp_(min=-0.5)
                b.w.data.imag.mul_(0.9)
                torch.view_as_real(b.w)[:, 0].add_(0.1)
                b.w.real = b.w.real * 0.9


# Parameters that were listed in a step, before its forward and its backward

Act = Callable[[OfUnits, list[nn.Parameter]], object]


def swap_gradients(model: OfUnits, parameters: list[nn.Parameter]) -> None:
    for p, q in zip(model.blocks[0].parameters(), model.blocks[1].parameters(), strict=True):
        p.grad, q.grad = q.grad, p.grad


def keep_largest(model: OfUnits, parameters: list[nn.Parameter]) -> None:
    least = torch.cat([p.grad.abs().flatten() for p in parameters]).topk(30).values[-1]
    for p in parameters:
        p.grad = torch.where(p.grad.abs() >= least, p.grad, torch.zeros_like(p.grad))


def freeze_in_turn(model: OfUnits, parameters: list[nn.Parameter]) -> None:
    for number, p in enumerate(parameters[:4]):
        p.requires_grad = (model.global_step + number) % 2 == 0


ON_EACH: dict[str, Callable[[nn.Parameter], object]] = {
    "subtracts from data": lambda p: p.data.sub_(0.01 * p.grad),
    "assigns data": lambda p: setattr(p, "data", p.data - 0.01 * p.grad),
    "writes by out": lambda p: torch.add(p, p.grad, alpha=-0.01, out=p),
    "writes by out to data": lambda p: torch.add(p.data, p.grad.data, alpha=-0.01, out=p.data),
    "mixes data, itself and its gradient": lambda p: p.data.addcmul_(p, p.grad, value=-0.01),
    "moves an alias away": lambda p: p.data.set_(0.9 * p.data),
    "masks": lambda p: p.masked_fill_(p.abs() < 0.05, 0.0),
    "sorts": lambda p: p.copy_(p.sort(-1).values),
    "clamps": lambda p: p.clamp_(-0.5, 0.5),
    "writes to views": lambda p: (p[:1].fill_(0.5), p.data.view(-1)[-1:].mul_(0.3)),
    "fills by index": lambda p: p.data.index_fill_(0, torch.tensor([0]), 0.1),
}
ON_ALL: dict[str, Act] = {
    "swaps gradients": swap_gradients,
    "keeps the largest": keep_largest,
    "freezes in turn": freeze_in_turn,
    "adds to all at once": lambda m, ps: torch._foreach_add_(ps, [p.grad for p in ps], alpha=-0.01),
    "drops gradients": lambda m, ps: [delattr(p, "grad") for p in ps[::2]],
    **{
        name: lambda m, ps, act=act: [act(p) for p in ps]  # type: ignore[misc]
        for name, act in ON_EACH.items()
    },
}


class Listed(ByHand):
    """One action between the backward and the step, on parameters as the step met them first."""

    action: str

    def step(self, batch: Tensor, optimizer: Any) -> None:
        parameters = list(self.parameters())
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        with torch.no_grad():
            ON_ALL[self.action](self, parameters)
        optimizer.step()


def listed(action: str) -> type[Listed]:
    """A class, which ranks import by its name."""
    made = type("".join(action.title().split()), (Listed,), {"action": action})
    made.__module__ = __name__
    return globals().setdefault(made.__name__, made)


WARNS = f"{EXPECTED}|.* not contiguous|`torch.jit.script`|Casting complex|Using backward"
NO_CASES = (OfUnits, ByHand, Listed)
CASES = [
    case(of, warns=WARNS)
    for of in [*globals().values(), *map(listed, ON_ALL)]
    if isinstance(of, type) and issubclass(of, OfUnits) and of not in (*NO_CASES, Recursion)
]
CASES.append(case(Recursion, refused=r"set ShardedDP\(uneven_units=True\)"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_programs_of_many_fields_train_as_under_ddp(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)
