"""The policy "auto" on the shapes that models have: what it takes as blocks, what it opens, what stays with the root.

Models are built on the meta device, so that their real sizes cost nothing.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from module_zoo import Attention, Block, DecoderBlock, Gpt, Mlp, ResNet18, numbered
from shardeddp.errors import ConfigurationError
from shardeddp.wrap import AutoPolicy
from shardeddp.wrap.policy import default_floor

pytestmark = pytest.mark.timeout(30)


def units(build: Callable[[], nn.Module], policy: AutoPolicy | None = None) -> list[str]:
    with torch.device("meta"):
        model = build()
    return (policy or AutoPolicy()).select(model)


RESNET_BLOCKS = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]


# --- transformers ---


@pytest.mark.parametrize(
    ("dim", "depth"), [(64, 4), (128, 4), (256, 6), (768, 12), (4096, 32), (16384, 126)]
)
def test_a_gpt_of_any_size_gives_its_blocks(dim: int, depth: int) -> None:
    assert units(lambda: Gpt(dim, (Block(dim) for _ in range(depth)))) == numbered("layers", depth)


def test_a_thin_and_deep_model_gives_its_blocks() -> None:
    assert len(units(lambda: Gpt(64, (Block(64) for _ in range(200))))) == 200


def test_two_blocks_that_are_half_of_the_model_each_are_not_opened() -> None:
    assert units(lambda: nn.Sequential(Block(256), Block(256))) == ["0", "1"]


def test_a_huge_embedding_stays_with_the_root_and_the_blocks_are_units() -> None:
    assert units(lambda: Gpt(256, (Block(256) for _ in range(4)), vocabulary=200_000)) == numbered(
        "layers", 4
    )


def test_embeddings_in_a_module_dict_stay_with_the_root() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(50257, 768),
                "wpe": nn.Embedding(1024, 768),
                "h": nn.ModuleList(Block(768) for _ in range(12)),
                "ln_f": nn.LayerNorm(768),
            }
        )
        return model

    assert units(build) == numbered("transformer.h", 12)


def test_encoder_and_decoder_give_the_blocks_of_both_lists() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.encoder = nn.ModuleList(Block(128) for _ in range(3))
        model.decoder = nn.ModuleList(DecoderBlock(128) for _ in range(2))
        return model

    assert units(build) == numbered("encoder", 3) + numbered("decoder", 2)


def test_torchs_own_transformer_gives_its_layers() -> None:
    names = units(lambda: nn.Transformer(256, 4, 2, 3, 1024, batch_first=True))
    assert names == numbered("encoder.layers", 2) + numbered("decoder.layers", 3)


def test_layers_named_in_a_module_dict_are_units() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({f"layer{index}": Block(128) for index in range(3)})

    assert units(build) == ["layer0", "layer1", "layer2"]


def test_functional_blocks_of_plain_sequentials_are_units_as_a_whole() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(128), Attention(128), nn.LayerNorm(128), Mlp(128))

    assert units(lambda: nn.Sequential(*(block() for _ in range(6)))) == [
        str(index) for index in range(6)
    ]


# --- vision and plain sequences ---


def test_resnet_gives_its_blocks() -> None:
    assert units(ResNet18) == RESNET_BLOCKS


def test_a_resnet_rebuilt_as_one_sequential_gives_its_blocks_too() -> None:
    names = units(lambda: nn.Sequential(*ResNet18().children()))
    assert names == [name.replace("layer", "") for name in RESNET_BLOCKS]


def test_a_unet_of_double_convolutions_gives_them_whole() -> None:
    def double(cin: int, cout: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(cin, cout, 3), nn.BatchNorm2d(cout), nn.ReLU(), nn.Conv2d(cout, cout, 3)
        )

    def build() -> nn.Module:
        model = nn.Module()
        model.down = nn.ModuleList(
            [double(64, 128), double(128, 256), double(256, 512), double(512, 512)]
        )
        model.up = nn.ModuleList([double(512, 256), double(256, 128), double(128, 64)])
        return model

    assert units(build) == numbered("down", 4) + numbered("up", 3)


def test_a_plain_sequential_gives_its_layers() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            *(layer for _ in range(5) for layer in (nn.Linear(256, 256), nn.ReLU()))
        )

    assert units(build) == ["0", "2", "4", "6", "8"]


def test_a_single_layer_with_most_of_the_model_is_a_unit_because_there_is_nothing_to_open() -> None:
    assert units(
        lambda: nn.Sequential(nn.Linear(25_088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU())
    ) == [
        "0",
        "2",
    ]


def test_layers_with_weight_norm_are_still_of_one_class() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(weight_norm(nn.Linear(256, 256)) for _ in range(3)))

    model = build()
    assert len({type(layer) for layer in model}) == 3
    assert AutoPolicy().select(model) == ["0", "1", "2"]


# --- what stays one unit ---


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: nn.Linear(32, 2), id="one layer"),
        pytest.param(lambda: nn.LSTM(512, 512, num_layers=4), id="an LSTM"),
        pytest.param(
            lambda: nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)), id="a demo MLP"
        ),
        pytest.param(lambda: Gpt(16, (Block(16) for _ in range(4))), id="a tiny GPT"),
        pytest.param(lambda: Gpt(256, []), id="an empty list"),
        pytest.param(lambda: Mlp(2048), id="layers without a list"),
        pytest.param(
            lambda: nn.Sequential(nn.Embedding(50_000, 256), nn.LSTM(256, 256), nn.Linear(256, 9)),
            id="no repetition",
        ),
        pytest.param(lambda: nn.MultiheadAttention(512, 8), id="attention"),
    ],
)
def test_models_without_repeated_blocks_of_some_size_are_one_unit(
    build: Callable[[], nn.Module],
) -> None:
    assert units(build) == []


def test_one_layer_registered_many_times_is_not_repeated() -> None:
    def build() -> nn.Module:
        shared = Block(256)
        return Gpt(256, [shared] * 6)

    assert units(build) == []


def test_a_block_in_two_lists_is_chosen_once() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        first, second, third = Block(128), Block(128), Block(128)
        model.forwards = nn.ModuleList([first, second, third])
        model.backwards = nn.ModuleList([third, second, first])
        return model

    assert units(build) == numbered("forwards", 3)


def test_modules_without_a_forward_are_not_units() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(512, 512))

    assert units(lambda: nn.ModuleList([Bag(), Bag(), Bag()])) == []


def test_the_parts_of_attention_and_of_parametrizations_are_never_units() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(256, 4)
            self.linear = weight_norm(nn.Linear(256, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(Wrapper(), Wrapper())
    assert AutoPolicy(min_numel=1, max_fraction=0.01).select(model) == [
        f"{index}.{part}" for index in range(2) for part in ("attention", "linear")
    ]


# --- the floor and the arguments ---


@pytest.mark.parametrize(
    ("numel", "floor"),
    [
        (0, 16_384),
        (1_000_000, 16_384),
        (4_194_304, 16_384),
        (25_600_000, 100_000),
        (256_000_000, 1_000_000),
    ],
)
def test_the_floor_follows_the_model_between_two_ends(numel: int, floor: int) -> None:
    assert default_floor(numel) == floor
    assert default_floor(1000 * numel + 10**12) == 1_000_000


def test_members_below_the_floor_stay_with_the_root() -> None:
    def build() -> nn.Module:
        return Gpt(128, [Block(128), Block(128), Block(16), Block(16)])

    assert units(build) == ["layers.0", "layers.1"]


def test_min_numel_replaces_the_floor_exactly() -> None:
    numel = sum(parameter.numel() for parameter in Block(16).parameters())
    build: Callable[[], nn.Module] = lambda: Gpt(16, (Block(16) for _ in range(3)))  # noqa: E731
    assert units(build, AutoPolicy(min_numel=numel)) == numbered("layers", 3)
    assert units(build, AutoPolicy(min_numel=numel + 1)) == []


@pytest.mark.parametrize("min_numel", [0, -1])
def test_a_floor_below_one_parameter_is_refused(min_numel: int) -> None:
    with pytest.raises(ConfigurationError, match=f"min_numel of at least 1.*found {min_numel}"):
        AutoPolicy(min_numel=min_numel)


@pytest.mark.parametrize("max_fraction", [0.0, -0.5, 1.5, float("nan")])
def test_a_fraction_outside_zero_to_one_is_refused(max_fraction: float) -> None:
    with pytest.raises(ConfigurationError, match="max_fraction above 0 and at most 1"):
        AutoPolicy(max_fraction=max_fraction)
