"""Under bf16-mixed, everything but autocast's own operations reads and writes weights in float32, as under DDP."""

import warnings
from copy import deepcopy
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from support.fidelity import EXPECTED, UNITS_TOO, BesideDdp, OfUnits, SmallGpt, case, in_bf16
from support.tasks import Block, Recorded, image_loader

pytestmark = pytest.mark.timeout(300)


class Pretraining(SmallGpt):
    """Features of tokens, and a head in the root unit; `target` is where a teacher comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def features(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class MomentumContrast(Pretraining):
    """MoCo: the key head follows by 0.999 inside of the step, and keys go into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.key = deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 8), dim=-1))

    @torch.no_grad()
    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = key.data * 0.999 + query.data * 0.001

    def loss(self, batch: Tensor) -> Tensor:
        self.follow()
        x = self.features(batch)
        query = F.normalize(self.query(x), dim=-1)
        with torch.no_grad():
            key = F.normalize(self.key(x), dim=-1)
        logits = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.t()], 1) / 0.2
        self.queue = torch.cat([key.float(), self.queue])[:8]
        return F.cross_entropy(logits.float(), torch.zeros(len(batch), dtype=torch.long))


class MomentumContrastInPlace(MomentumContrast):
    @torch.no_grad()
    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.mul_(0.999).add_(query, alpha=0.001)


class MomentumContrastByLerp(MomentumContrast):
    @torch.no_grad()
    def follow(self) -> None:
        torch._foreach_lerp_(list(self.key.parameters()), list(self.query.parameters()), 0.001)


class BootstrapYourOwnLatent(Pretraining):
    """BYOL: a target of blocks and head, which follows at the end of the step's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Linear(8, 8)
        self.target = nn.ModuleDict(
            {"block": deepcopy(self.blocks[0]), "head": deepcopy(self.query)}
        )
        self.target.requires_grad_(False)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch).mean(1)
        online = self.predictor(self.query(self.blocks[0](x)))
        with torch.no_grad():
            target = self.target["head"](self.target["block"](x))
            for mine, theirs in (
                (self.target["head"], self.query),
                (self.target["block"], self.blocks[0]),
            ):
                for slow, fast in zip(mine.parameters(), theirs.parameters(), strict=True):
                    slow.lerp_(fast, 0.004)
        return 2 - 2 * F.cosine_similarity(online.float(), target.float()).mean()


class Distillation(Pretraining):
    """DINO: teacher, centre and temperatures; the teacher follows when the batch has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.query).requires_grad_(False)
        self.register_buffer("center", torch.zeros(8))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.features(batch)
        with torch.no_grad():
            logits = self.teacher(x).float()
            self.center.mul_(0.9).add_(logits.mean(0), alpha=0.1)
        target = ((logits - self.center) / 0.1).softmax(-1)
        return -(target * (self.query(x).float() / 0.5).log_softmax(-1)).sum(-1).mean()

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.query.parameters(), strict=True):
            slow.data.mul_(0.996).add_(fast.data, alpha=0.004)


class PrototypesOfLengthOne(Pretraining):
    """SwAV: prototypes are normalised in place before they are used."""

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            self.query.weight.copy_(F.normalize(self.query.weight.data.clone(), dim=1))
        scores = self.query(F.normalize(self.features(batch), dim=-1))
        return F.cross_entropy(scores.float() / 0.1, batch[:, 0] % 8)


class PrototypesOfLengthOneByData(Pretraining):
    """The same in place on `.data`, of a block as well."""

    def loss(self, batch: Tensor) -> Tensor:
        for weight in (self.query.weight, self.blocks[0].up.weight):
            weight.data.div_(weight.data.norm(dim=1, keepdim=True))
        return F.cross_entropy(self.query(self.features(batch)).float(), batch[:, 0] % 8)


class AngularMargin(Pretraining):
    """ArcFace: cosines to the rows of a Linear's weight, which is never called."""

    def loss(self, batch: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.features(batch)), F.normalize(self.query.weight)).float()
        margin = F.one_hot(batch[:, 0] % 8, 8) * 0.2
        return F.cross_entropy(
            4 * (cosine.clamp(-0.99, 0.99).acos() + margin).cos(), batch[:, 0] % 8
        )


class PenalizedWeights(SmallGpt):
    """L2 and orthogonality of weights that their modules use, too."""

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        for block in self.blocks:
            gram = block.down.weight @ block.down.weight.t()
            loss = (
                loss
                + 0.1 * (gram.float() - torch.eye(8)).square().mean()
                + block.up.weight.square().sum() * 1e-2
            )
        return loss + 0.1 * torch.linalg.vector_norm(self.head.weight)


class WeightReadsInBlocks(Block):
    """A block that looks at its own weights: a norm, a dtype, a ternary copy (as BitNet), and one without autocast."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.seen = list[float]()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        self.seen.append(float(weight.detach().float().norm()))
        scale = weight.abs().mean()
        ternary = (weight / scale).round().clamp(-1, 1) * scale
        hidden = F.linear(self.norm(x), weight + (ternary - weight).detach(), self.up.bias)
        with torch.autocast("cpu", enabled=False):
            out = F.linear(
                F.gelu(hidden).to(self.down.weight.dtype), self.down.weight, self.down.bias
            )
        return x + out


class BlocksThatReadWeights(SmallGpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WeightReadsInBlocks(8) for _ in range(2))

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses += [seen for block in self.blocks for seen in block.seen]
        for block in self.blocks:
            block.seen.clear()


class LinearsWithoutAutocast(SmallGpt):
    """A loss that is computed in float32, as numerically delicate ones are."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(batch[:, :-1]))
        with torch.autocast("cpu", enabled=False):
            logits = self.head(self.blocks[1](x.float()))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class FollowsTheWeightsDtype(SmallGpt):
    """As T5 casts its activations; what it saw is recorded."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x.to(block.up.weight.dtype))
        self.losses += [
            float(w.dtype == torch.float32) for w in (self.head.weight, self.blocks[0].up.weight)
        ]
        logits = self.head(x).to(self.head.weight.dtype)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class WeightsBorrowed(Pretraining):
    """One weight by its module and by `F.linear`, by a product with a LoRA, and by an embedding's lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (
            nn.Parameter(torch.randn(2, 8) * 0.1),
            nn.Parameter(torch.randn(8, 2) * 0.1),
        )

    def loss(self, batch: Tensor) -> Tensor:
        x = self.query(self.features(batch)) + F.linear(
            self.features(batch), self.query.weight + self.high @ self.low
        )
        x = (
            x
            + F.embedding(batch[:, 0] % 8, self.query.weight)
            + F.linear(x, self.blocks[0].up.weight)[:, :8]
        )
        return F.cross_entropy(F.linear(x, self.embed.weight).float(), batch[:, 1])


class SpectralNormByHand(nn.Linear):
    """Power iteration on a weight, with the vector in a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.register_buffer("u", F.normalize(torch.ones(size), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            v = F.normalize(self.weight.t() @ self.u, dim=0)
            self.u.copy_(F.normalize(self.weight @ v, dim=0))
        sigma = torch.dot(self.u, torch.mv(self.weight.float(), v))
        return F.linear(x, self.weight / sigma, self.bias)


class SpectrallyNormalized(SmallGpt):
    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList([SpectralNormByHand(8), SpectralNormByHand(8)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block, mixer in zip(self.blocks, self.mixers, strict=True):
            x = self.normed(block(mixer(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())


class StandardizedConvolution(nn.Conv2d):
    """Weight standardisation, as in BiT."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        deviation = self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (deviation + 1e-5), self.bias, padding=1)


class StandardizedConvolutions(Recorded):
    """By a subclass in units, by a function on an ordinary convolution, and by a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.plain = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.blocks = nn.ModuleList(StandardizedConvolution(4, 4, 3) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        x = self.plain(self.stem(images))
        for block in self.blocks:
            x = F.relu(block(x)) + F.conv2d(
                x, self.plain.weight - self.plain.weight.mean(), padding=1
            )
        penalty = self.stem.weight.flatten(1).norm(dim=1).sum() + self.blocks[0].weight.abs().mean()
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels) + 0.05 * penalty

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class AttentionAndRecurrence(SmallGpt):
    """Modules with weights of several maps in one, which torch takes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.bilinear = nn.Bilinear(8, 8, 8)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        x = x + self.attention(x, x, x)[0] + self.bilinear(x, x)
        penalty = (
            self.attention.in_proj_weight.square().mean() + self.bilinear.weight.square().mean()
        )
        x = self.blocks[1](self.blocks[0](x))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten()) + penalty


class SharedLayers(SmallGpt):
    """A unit that runs three times in a step, and a layer that runs twice inside of one."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in [self.blocks[0]] * 3:
            x = block(block.down(F.relu(block.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())


class TwiceInABlock(Block):
    """The matrices of a block twice in each of its forwards."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x


class SharedInsideOfUnits(SmallGpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwiceInABlock(8) for _ in range(2))


class AttendsTwice(SmallGpt):
    """A module twice in a step, whose forward reads a child's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x + self.attention(x, x, x)[0])
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())


class TiedLinears(SmallGpt):
    """One weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def loss(self, batch: Tensor) -> Tensor:
        x = self.first(self.embed(batch[:, :-1]))
        for block in self.blocks:
            x = block(self.second(x))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())


class PenalizesBeforeAnotherUse(SmallGpt):
    """A second forward of a block behind a backward that has kept the graph of the first."""

    def loss(self, batch: Tensor) -> Tensor:
        embedded = self.embed(batch[:, :-1])
        x = self.blocks[0](embedded)
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())
        (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + 10 * gradient.square().sum() + self.blocks[0](embedded).square().mean()


CASES = [
    in_bf16(case(AttendsTwice)),
    in_bf16(case(TiedLinears)),
    in_bf16(case(PenalizesBeforeAnotherUse)),
    in_bf16(case(SharedLayers)),
    in_bf16(case(SharedInsideOfUnits, options={"accumulate_grad_batches": 2}, batches=4)),
    in_bf16(case(MomentumContrast)),
    in_bf16(case(MomentumContrastInPlace)),
    in_bf16(case(MomentumContrastByLerp)),
    in_bf16(case(BootstrapYourOwnLatent)),
    in_bf16(case(Distillation)),
    in_bf16(case(PrototypesOfLengthOne)),
    in_bf16(case(PrototypesOfLengthOneByData)),
    in_bf16(case(AngularMargin)),
    in_bf16(case(PenalizedWeights)),
    in_bf16(case(BlocksThatReadWeights)),
    in_bf16(case(LinearsWithoutAutocast)),
    in_bf16(case(FollowsTheWeightsDtype)),
    in_bf16(case(WeightsBorrowed, options={"accumulate_grad_batches": 2})),
    in_bf16(case(SpectrallyNormalized)),
    in_bf16(case(StandardizedConvolutions, loader=image_loader)),
    in_bf16(case(AttentionAndRecurrence)),
]


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_weights_are_read_and_written_in_float32(beside_ddp: BesideDdp, strategy: str) -> None:
    beside_ddp(CASES, strategy)


# -- modules of torch's that are not what they were when the model was set up


class BlockWith(nn.Module):
    """A block with one module more, which `apply` calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.more = Block(8), self.make()

    def make(self) -> nn.Module:
        return nn.Linear(8, 8)

    def apply_more(self, x: Tensor) -> Tensor:
        return self.more(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.apply_more(x)


def weight_norm(layer: nn.Module) -> nn.Module:
    """By hooks, which torch calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class NormedByHooks(BlockWith):
    """weight_norm as it was before parametrizations, with spectral_norm around another layer."""

    def make(self) -> nn.Module:
        normed = weight_norm(nn.Linear(8, 8))
        return nn.Sequential(normed, nn.utils.spectral_norm(nn.Linear(8, 8)))


class PrunedLayer(BlockWith):
    def make(self) -> nn.Module:
        return prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.3)


class GeneratedWeight(BlockWith):
    """A hypernetwork: the weight of a layer is an attribute, computed in each forward."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.more.weight.detach()
        del self.more.weight
        self.more.weight = weight
        self.code, self.generator = nn.Parameter(torch.ones(8, 2)), nn.Linear(2, 8)

    def apply_more(self, x: Tensor) -> Tensor:
        self.more.weight = self.generator(self.code).float()
        return self.more(x)


class HiddenWeight(BlockWith):
    """For one call another tensor lies over the parameter, in the module's dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8)[:, None])

    def apply_more(self, x: Tensor) -> Tensor:
        vars(self.more)["weight"] = self.more.weight * self.scale
        y = self.more(x)
        del vars(self.more)["weight"]
        return y


class SeveralDilations(BlockWith):
    """One kernel at three dilations."""

    def make(self) -> nn.Module:
        return nn.Conv1d(8, 8, 3)

    def apply_more(self, x: Tensor) -> Tensor:
        for dilation in (1, 2, 3):
            self.more.dilation, self.more.padding = (dilation,), (dilation,)
            x = x + self.more(x.transpose(1, 2)).transpose(1, 2)
        return x


class PaddedByAHook(BlockWith):
    """Convolutions are made circular by a hook, as for textures that tile."""

    def make(self) -> nn.Module:
        layer = nn.Conv1d(8, 8, 3, padding=1)

        def make_circular(module: nn.Module, _: Any) -> None:
            module.padding_mode = "circular"

        layer.register_forward_pre_hook(make_circular)
        return layer

    def apply_more(self, x: Tensor) -> Tensor:
        return self.more(x.transpose(1, 2)).transpose(1, 2)


class AttentionOfOtherHeads(BlockWith):
    """The number of heads changes with the call."""

    def make(self) -> nn.Module:
        return nn.MultiheadAttention(8, 2, batch_first=True)

    def apply_more(self, x: Tensor) -> Tensor:
        for heads in (1, 4):
            self.more.num_heads, self.more.head_dim = heads, 8 // heads
            x = x + self.more(x, x, x)[0]
        return x


def quantize(weight: Tensor) -> Tensor:
    """Eight bits and back, with the gradient of neither."""
    scale = weight.abs().max() / 127
    return weight + ((weight / scale).round() * scale - weight).detach()


class QuantizedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, quantize(self.weight), self.bias)


class Quantize(TorchFunctionMode):
    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            args = (args[0], quantize(args[1]), *args[2:])
        return function(*args, **(kwargs or {}))


class QuantizedByAMode(BlockWith):
    def apply_more(self, x: Tensor) -> Tensor:
        with Quantize():
            return self.more(x)


class QuantizedByAPatch(BlockWith):
    """`nn.Linear.forward` is another one while the layer runs."""

    def apply_more(self, x: Tensor) -> Tensor:
        with patch.object(nn.Linear, "forward", QuantizedLinear.forward):
            return self.more(x)


class QuantizedByAFunction(BlockWith):
    """`torch.nn.functional.linear` is another one while the layer runs."""

    def apply_more(self, x: Tensor) -> Tensor:
        linear = F.linear
        with patch.object(F, "linear", lambda x, weight, bias: linear(x, quantize(weight), bias)):
            return self.more(x)


class QuantizedByAnotherClass(BlockWith):
    def apply_more(self, x: Tensor) -> Tensor:
        self.more.__class__ = QuantizedLinear
        return self.more(x)


class QuantizedByAnotherForward(BlockWith):
    def apply_more(self, x: Tensor) -> Tensor:
        self.more.forward = MethodType(QuantizedLinear.forward, self.more)
        return self.more(x)


class Watched(Tensor):
    """An input whose class has its own idea of a layer."""

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [it.as_subclass(Tensor) if isinstance(it, cls) else it for it in args]
        if function is F.linear:
            plain[1] = quantize(plain[1])
        return function(*plain, **(kwargs or {}))


class QuantizedByTheInputsClass(BlockWith):
    def apply_more(self, x: Tensor) -> Tensor:
        return self.more(x.as_subclass(Watched))


class ConvolvesByItsOwn(BlockWith):
    """An instance's `_conv_forward`, the patch that makes diffusion models' images tile."""

    def make(self) -> nn.Module:
        layer = nn.Conv1d(8, 8, 3, padding=1)

        def convolve(self: nn.Conv1d, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            weight = weight / (weight.square().sum() + 1e-8).sqrt()
            return nn.Conv1d._conv_forward(self, x, weight, bias)

        layer._conv_forward = MethodType(convolve, layer)
        return layer

    def apply_more(self, x: Tensor) -> Tensor:
        return self.more(x.transpose(1, 2)).transpose(1, 2)


class OnAnotherDefaultDevice(BlockWith):
    """A mode that only says where new tensors lie changes nothing."""

    def apply_more(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return self.more(x) + torch.ones(8)


CHANGED = [
    NormedByHooks,
    PrunedLayer,
    GeneratedWeight,
    HiddenWeight,
    SeveralDilations,
    PaddedByAHook,
    AttentionOfOtherHeads,
    QuantizedByAMode,
    QuantizedByAPatch,
    QuantizedByAFunction,
    QuantizedByAnotherClass,
    QuantizedByAnotherForward,
    QuantizedByTheInputsClass,
    ConvolvesByItsOwn,
    OnAnotherDefaultDevice,
]


def of_units(block: type[nn.Module]) -> type[OfUnits]:
    """A model of two such blocks."""
    return type(f"Of{block.__name__}", (OfUnits,), {"unit": block, "__module__": __name__})


OF_CHANGED = {f"Of{block.__name__}": of_units(block) for block in CHANGED}
globals().update(OF_CHANGED)  # processes find them by name


@pytest.mark.parametrize("strategy", UNITS_TOO)
def test_modules_that_change_after_setup_compute_as_under_ddp(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    beside_ddp([in_bf16(case(model)) for model in OF_CHANGED.values()], strategy)


class Compiled(OfUnits):
    """Blocks that are compiled, without a backend that rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        for block in self.blocks:
            block.compile(backend="aot_eager")


COMPILED = {
    f"Compiled{block.__name__}": type(
        f"Compiled{block.__name__}", (Compiled,), {"unit": block, "__module__": __name__}
    )
    for block in (
        BlockWith,
        NormedByHooks,
        PrunedLayer,
        HiddenWeight,
        SeveralDilations,
        PaddedByAHook,
        AttentionOfOtherHeads,
        QuantizedByAnotherClass,
    )
}
globals().update(COMPILED)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "full_shard in one unit"])
def test_compiled_modules_that_change_after_setup_compute_as_under_ddp(
    beside_ddp: BesideDdp, strategy: str
) -> None:
    warns = EXPECTED + "|The .grad attribute of a Tensor"  # torch's compiler reads it
    beside_ddp([in_bf16(case(model, warns=warns)) for model in COMPILED.values()], strategy)
