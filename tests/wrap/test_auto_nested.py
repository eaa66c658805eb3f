"""The policy "auto" on lists inside lists: experts and heads inside blocks, blocks inside stages."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from module_zoo import Attention, Block, Experts, Gpt, Mlp, OtherTower, Stage, Tower, numbered
from shardeddp.wrap import AutoPolicy

pytestmark = pytest.mark.timeout(30)


def units(build: Callable[[], nn.Module], policy: AutoPolicy | None = None) -> list[str]:
    with torch.device("meta"):
        model = build()
    return (policy or AutoPolicy()).select(model)


@pytest.mark.parametrize("depth", [2, 4, 16])
def test_mixture_of_experts_gives_its_blocks_and_not_the_experts(depth: int) -> None:
    assert units(lambda: Gpt(128, (Block(128, Experts(128, 8)) for _ in range(depth)))) == numbered(
        "layers", depth
    )


def test_dense_and_expert_blocks_of_one_class_are_all_units() -> None:
    def build() -> nn.Module:
        return Gpt(128, [Block(128), *(Block(128, Experts(128, 8)) for _ in range(5))])

    assert units(build) == numbered("layers", 6)


def test_a_block_that_holds_most_of_the_model_gives_its_experts_and_its_other_children() -> None:
    def build() -> nn.Module:
        return Gpt(128, [Block(128, Experts(128, 16)), Block(128), Block(128)])

    expected = ["layers.0.attention", *numbered("layers.0.mlp.experts", 16), "layers.1", "layers.2"]
    assert units(build) == expected


def test_max_fraction_opens_blocks_into_their_children() -> None:
    names = units(lambda: Gpt(256, (Block(256) for _ in range(4))), AutoPolicy(max_fraction=0.2))
    assert names == [
        f"layers.{index}.{part}" for index in range(4) for part in ("attention", "mlp")
    ]


def test_a_child_that_is_too_large_as_well_is_opened_again() -> None:
    names = units(lambda: Gpt(256, (Block(256) for _ in range(4))), AutoPolicy(max_fraction=0.1))
    assert names == [
        f"layers.{index}.{part}"
        for index in range(4)
        for part in ("attention", "mlp.up", "mlp.down")
    ]


def test_heads_in_lists_inside_a_block_are_not_units() -> None:
    def block() -> nn.Module:
        return Block(128, nn.Sequential(*(Mlp(32) for _ in range(8))))

    assert units(lambda: Gpt(128, (block() for _ in range(4)))) == numbered("layers", 4)


@pytest.mark.parametrize("depths", [(2, 2, 6, 2), (2, 2, 18, 2), (2, 2, 2, 2)])
def test_swin_gives_its_blocks_and_not_its_stages(depths: tuple[int, ...]) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.layers = nn.ModuleList(
            Stage(96 * 2**index, depth) for index, depth in enumerate(depths)
        )
        return model

    expected = [
        f"layers.{stage}.blocks.{block}"
        for stage, depth in enumerate(depths)
        for block in range(depth)
    ]
    # The first blocks (110,592 weights and some) are below 1/256 of the larger models.
    assert units(build, AutoPolicy(min_numel=50_000)) == expected


def test_mirrored_stages_of_a_few_sizes_give_their_blocks() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.layers = nn.ModuleList(Stage(dim, 2) for dim in (128, 192, 256, 256, 192, 128))
        return model

    assert units(build) == [
        f"layers.{stage}.blocks.{block}" for stage in range(6) for block in range(2)
    ]


def test_two_stages_of_two_sizes_give_their_blocks() -> None:
    assert units(lambda: nn.Sequential(Stage(128, 6), Stage(192, 3))) == numbered(
        "0.blocks", 6
    ) + numbered("1.blocks", 3)


def test_stages_of_one_size_cannot_be_told_from_blocks_with_experts() -> None:
    assert units(lambda: nn.Sequential(*(Stage(128, 2) for _ in range(4)))) == ["0", "1", "2", "3"]


def test_blocks_of_many_sizes_stay_whole_where_lists_are_a_small_part_of_them() -> None:
    class WithHeads(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.body = nn.Linear(4 * dim, 4 * dim)
            self.heads = nn.ModuleList(Mlp(dim // 2) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def build() -> nn.Module:
        return nn.ModuleList(WithHeads(dim) for dim in (192, 256, 320))

    assert units(build, AutoPolicy(min_numel=20_000)) == ["0", "1", "2"]


def test_equal_plain_sequentials_of_unequal_parts_are_blocks() -> None:
    class Residual(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)

    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(Residual(Attention(128)), Residual(Mlp(128))) for _ in range(6))
        )

    assert units(build) == [str(index) for index in range(6)]


def test_lists_of_lists_are_looked_through() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.stages = nn.ModuleList(nn.ModuleList(Block(128) for _ in range(2)) for _ in range(3))
        return model

    assert units(build) == [f"stages.{stage}.{block}" for stage in range(3) for block in range(2)]


def test_plain_sequentials_of_equal_blocks_are_looked_through() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(*(Block(128) for _ in range(4))) for _ in range(3)))

    assert units(build) == [f"{stage}.{block}" for stage in range(3) for block in range(4)]


def test_two_towers_in_a_module_dict_give_their_blocks() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"image": Tower(128, 4), "text": OtherTower(96, 3)})

    assert units(build) == numbered("image.layers", 4) + numbered("text.layers", 3)
