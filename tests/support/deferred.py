"""Modules that initialise themselves in every way that constructors do, and models of them on the meta device."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

from shardeddp.config import parse_options
from shardeddp.engine.recording import Recording
from shardeddp.engine.shard_model import shard_model
from shardeddp.wrap import SingleUnitPolicy, build_units
from training import Sharding, full

Build = Callable[[], nn.Module]
M = TypeVar("M", bound=nn.Module)


class Affine(nn.Module):
    """Two parameters, a persistent and another buffer, all filled by ``reset_parameters``."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim, 3))
        self.shift = nn.Parameter(torch.empty(3))
        self.register_buffer("mean", torch.empty(3))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random, constant, and computed values; ``.data`` as much code still has it."""
        self.scale.data.uniform_(-1, 1)
        nn.init.ones_(self.shift)
        self.mean.normal_()
        self.table = torch.arange(4.0) ** 2

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., dim) to (..., 3)."""
        return x @ self.scale + self.shift + self.mean + self.table.sum()


class ScalesItsChildren(nn.Module):
    """Owns nothing, and initialises what its children have initialised before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=2)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As many language models do it."""
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("2.weight"):
                nn.init.normal_(parameter, std=0.02 / 2**0.5)
        nn.init.orthogonal_(self.body[0].weight)
        nn.init.trunc_normal_(self.body[2].bias)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            module.weight.data[module.padding_idx].zero_()


class InitialisesItsChildren(nn.Module):
    """Writes to its children in every way that constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=1)
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.norm = nn.BatchNorm1d(4)
        nn.init.trunc_normal_(self.embed.weight, std=0.02)
        nn.init.constant_(self.body[0].weight, 0.5)
        nn.init.orthogonal_(self.body[1].weight)
        with torch.no_grad():
            self.body[0].bias[1:] = 7.0
            self.body[0].bias[[0, 3]] = torch.tensor([3.0, 4.0])
            self.body[1].weight.mul_(2).add_(torch.randn(4, 4))
            self.body[2].weight.copy_(self.body[1].weight.t())
        self.norm(torch.randn(5, 4))
        self.copied = copy.deepcopy(self.body[2])
        self.half = nn.Linear(4, 4).to(torch.bfloat16)
        self.register_buffer("rates", torch.linspace(0, 0.3, 4) * self.norm.running_mean)
        self.register_buffer("wide", torch.rand(3, 1).expand(3, 4))
        self.register_buffer("row", self.wide[1], persistent=False)


class HasAResetThatItsConstructorDoesNotCall(nn.Module):
    """Its constructor leaves the child as it is, and so does a deferred initialization."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def reset_parameters(self) -> None:
        """Only for users."""
        nn.init.zeros_(self.inner.weight)


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self, take: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        if take == "head":
            self.embed.weight = self.head.weight
        else:
            self.head.weight = self.embed.weight


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(11, 6, padding_idx=1),
        nn.Linear(6, 5),
        nn.LayerNorm(5),
        nn.Conv1d(5, 4, 3),
        nn.BatchNorm1d(4),
        nn.Linear(4, 3, bias=False),
    )


def attention() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 6), nn.MultiheadAttention(6, 2, add_bias_kv=True), nn.Linear(6, 6)
    )


def recurrent() -> nn.Module:
    return nn.ModuleList(
        [nn.LSTM(5, 4, num_layers=2, bidirectional=True), nn.GRU(4, 3), nn.LSTMCell(3, 2)]
    )


def affine() -> nn.Module:
    return nn.Sequential(Affine(), nn.Linear(3, 3))


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8)


def tied_to_the_first() -> nn.Module:
    return Tied("embed")


def sixteen_bits() -> nn.Module:
    return nn.Sequential(
        nn.Linear(40, 3, dtype=torch.bfloat16),
        nn.Linear(3, 3),
        nn.Linear(2, 2, dtype=torch.float64),
    )


def parametrized() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 2)),
    )


def computed_anew() -> nn.Module:
    pruned = prune.l1_unstructured(nn.Linear(3, 3), "weight", amount=0.5)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), pruned)


def copied_layers() -> nn.Module:
    return nn.Sequential(
        *nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 2).layers
    )


def tied_to_the_last() -> nn.Module:
    return Tied("head")


MODELS: list[Build] = [
    InitialisesItsChildren,
    parametrized,
    computed_anew,
    copied_layers,
    tied_to_the_last,
    layers,
    attention,
    recurrent,
    affine,
    transformer_layer,
    tied_to_the_first,
    sixteen_bits,
    ScalesItsChildren,
    HasAResetThatItsConstructorDoesNotCall,
]


def recorded(build: Callable[[], M]) -> tuple[M, Recording]:
    """A model on the meta device, and how it was built."""
    recording = Recording()
    with torch.device("meta"), recording.watched():
        return build(), recording


def on_meta(build: Build) -> nn.Module:
    """A model on the meta device that nobody has recorded."""
    with torch.device("meta"):
        return build()


def warned() -> Any:
    """Expects the warning that nobody has recorded a model, on rank 0."""
    if dist.get_rank():
        return nullcontext()
    said = r"on the meta device, and their construction was not recorded.* of them are lost. Do"
    return pytest.warns(UserWarning, match=said)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, whole."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: full(tensor).detach().clone() for name, tensor in tensors.items()}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), f"{name}: {found[name]} is not {tensor}"


def shard(
    model: nn.Module, recording: Recording | None, load: Callable[[], None] | None = None
) -> None:
    """Shard as one unit, with what is known of the model's making."""
    units = build_units(model, SingleUnitPolicy())
    shard_model(units, Sharding().mesh(), parse_options({}), recording=recording, load=load)
