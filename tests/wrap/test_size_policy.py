"""Units by size: collected from the leaves upwards, each parameter counted once."""

import pytest
import torch
from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.wrap import SizePolicy

pytestmark = pytest.mark.timeout(30)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)  # 60 parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x)[..., :4]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Linear(4, 4)  # 20 parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class Toy(nn.Module):
    """Three blocks of 80 parameters, a head of 20."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


LAYERS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("min_numel", "expected"),
    [
        (
            1,
            [name for layer in LAYERS for name in (f"{layer}.attention.qkv", f"{layer}.mlp")]
            + ["head"],
        ),
        (
            20,
            [name for layer in LAYERS for name in (f"{layer}.attention.qkv", f"{layer}.mlp")]
            + ["head"],
        ),
        (21, [f"{layer}.attention.qkv" for layer in LAYERS]),
        (61, LAYERS),
        (80, LAYERS),
        (81, []),
        (10**9, []),
    ],
)
def test_units_are_collected_from_the_leaves_until_they_are_large_enough(
    min_numel: int, expected: list[str]
) -> None:
    assert SizePolicy(min_numel).select(Toy()) == expected


def test_what_inner_units_took_does_not_count_for_the_outer_ones() -> None:
    # Each inner block takes 60 of its 80; the 3 * 20 that are left make one unit of the sequence around them.
    model = nn.Sequential(nn.Sequential(Block(), Block(), Block()), nn.Linear(4, 4))
    assert SizePolicy(60).select(model) == [
        "0.0.attention.qkv",
        "0.1.attention.qkv",
        "0.2.attention.qkv",
        "0",
    ]


def test_parameters_of_a_module_itself_count_and_tied_ones_count_once() -> None:
    class Scaled(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    shared = nn.Linear(4, 4)
    model = nn.Sequential(Scaled(shared), Scaled(shared))
    assert SizePolicy(25).select(model) == ["0"]
    assert SizePolicy(5).select(model) == ["0.linear", "0", "1"]


def test_containers_pass_their_parameters_on_to_the_module_around_them() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.weights = nn.ParameterList(torch.ones(10) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert SizePolicy(80).select(nn.Sequential(Around())) == ["0"]


def test_the_parts_of_attention_count_for_the_attention() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.ReLU())
    assert SizePolicy(80).select(model) == ["0"]
    assert SizePolicy(10).select(model) == ["0"]


@pytest.mark.parametrize("min_numel", [0, -5])
def test_a_size_below_one_is_refused(min_numel: int) -> None:
    with pytest.raises(ConfigurationError, match=f"found {min_numel}"):
        SizePolicy(min_numel)
