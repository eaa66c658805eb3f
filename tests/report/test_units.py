"""What a run says of its units: one line, on rank 0; a table with the figures if asked for; and when it warns."""

import contextlib
import io
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shardeddp import ShardedDP
from shardeddp.report import unit_row
from support.experts import StackedExperts
from support.tasks import Block, EvaluatedGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

BLOCK_NUMEL = sum(parameter.numel() for parameter in Block(8).parameters())

SPLIT = {
    "tensor_parallel_size": 2,
    "tensor_parallel_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
}


def run(
    arguments: dict[str, Any],
    frozen: bool,
    kind: type[EvaluatedGpt] = EvaluatedGpt,
    **options: Any,
) -> dict[str, Any]:
    """What two stages on one Trainer say and warn of, what is printed when asked for, and the figures of the units."""
    model, strategy = kind(), ShardedDP(**arguments)
    model.blocks[2].requires_grad_(not frozen)
    trainer = make_trainer(strategy, max_steps=1, **options)
    said = Listening()
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        warnings.catch_warnings(record=True) as caught,
        said,
    ):
        warnings.simplefilter("always")
        trainer.fit(model, token_loader(8))
        trainer.test(model, token_loader(8), verbose=False)
    silent = out.getvalue() == ""
    with contextlib.redirect_stdout(out):
        strategy.print_units()
    told = [str(each.message) for each in caught if str(each.message).startswith("unit")]
    rows = [unit_row(progress.unit) for progress in strategy.runtime.progresses]
    return {
        "lines": said.lines,
        "silent": silent,
        "table": out.getvalue(),
        "told": told,
        "rows": rows,
    }


class Listening(logging.Handler):
    """Keeps what this package says through Lightning's logger."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")

    def emit(self, record: logging.LogRecord) -> None:
        if "ShardedDP" in record.getMessage():
            self.lines.append(record.getMessage())

    def __enter__(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)


def test_rank_zero_says_one_line_when_the_model_is_sharded_and_others_nothing(
    world: Worlds,
) -> None:
    first, second = world(2).run(run, {"auto_wrap_policy": {Block}}, False)
    assert first["lines"] == [
        "ShardedDP: full_shard: 4 units on 1 x 2 ranks (replicate x shard): 976 parameters, 1.91 KiB per rank; "
        "all in float32"
    ]
    assert second["lines"] == []
    assert first["silent"] and second["silent"] and first["told"] == second["told"] == []


def in_bf16(_: Any) -> dict[str, Any]:
    return run({"auto_wrap_policy": None}, True, precision="bf16-mixed")


def test_the_line_says_what_is_kept_computed_and_reduced_in_which_dtype(world: Worlds) -> None:
    line = world(1).run(in_bf16, None)[0]["lines"][0]
    assert line.startswith("ShardedDP: full_shard: 1 unit on 1 x 1 ranks")
    assert "976 parameters, 3.81 KiB per rank" in line, "what is kept, not what travels"
    assert line.endswith("kept in float32, computed in bfloat16 and float32, reduced in float32")


def test_the_table_is_printed_once_where_all_ranks_ask_for_it(world: Worlds) -> None:
    first, other = world(2).run(run, {"auto_wrap_policy": {Block}}, False)
    assert first["table"].count("full_shard: 4 units on 1 x 2 ranks (replicate x shard)") == 1
    assert first["table"].count("blocks.0 ... blocks.2 (3x)") == 1
    assert other["table"] == ""


def test_the_title_says_how_many_units_and_ranks_there_are(world: Worlds) -> None:
    found = world(2).run(run, {"sharding_strategy": "No_Shard", "auto_wrap_policy": None}, False)[0]
    assert "no_shard: 1 unit on 2 x 1 ranks (replicate x shard)" in found["table"]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_row_counts_whole_parameters_and_this_ranks_bytes(world: Worlds, frozen: bool) -> None:
    rows = world(2).run(run, {"auto_wrap_policy": {Block}}, frozen)[0]["rows"]
    assert [row.name for row in rows] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    for row in rows[1:]:
        assert (row.num_parameters, row.numel) == (6, BLOCK_NUMEL)
        assert row.trainable_numel == (0 if frozen and row.name == "blocks.2" else BLOCK_NUMEL)
        assert 2 * row.nbytes_per_rank == 4 * (row.numel + row.padding_numel)


def test_layers_that_ranks_split_are_counted_whole(world: Worlds) -> None:
    found = world(2).run(run, {"auto_wrap_policy": {Block}, **SPLIT}, False)[0]
    assert (
        "4 units on 1 x 1 x 2 ranks (replicate x shard x tensor): 976 parameters"
        in (found["lines"][0])
    )
    for row in found["rows"][1:]:
        assert row.numel == row.trainable_numel == BLOCK_NUMEL
        # All ranks have the norm and the second layer's bias, and half of the rest.
        assert row.nbytes_per_rank == 4 * (BLOCK_NUMEL + 2 * 8 + 8) // 2


class Mixed(Block):
    """A block beside experts, which get its tokens in turn."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.experts = StackedExperts(4, dim, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (..., dim) to the same."""
        rows = x.flatten(0, -2)
        index = torch.arange(len(rows)).unsqueeze(1) % 4
        return super().forward(x) + self.experts(rows, index, torch.ones(index.shape)).view_as(x)


class WithExperts(EvaluatedGpt):
    """Whose experts ranks can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed(8) for _ in self.blocks)


@pytest.mark.parametrize(
    ("kind", "options", "axes", "heading", "numel"),
    [
        (EvaluatedGpt, SPLIT, "1 x 1 x 2 ranks (replicate x shard x tensor)", "split / 2", 272),
        (
            WithExperts,
            {"expert_parallel_size": 2},
            "1 x 2 ranks (replicate x shard), experts on 1 x 1 x 2 ranks (replicate x shard x expert)",
            "experts / 2",
            4 * 2 * 8 * 12,
        ),
    ],
    ids=["layers", "experts"],
)
def test_the_table_says_what_ranks_divide_and_among_how_many(
    world: Worlds,
    kind: type[EvaluatedGpt],
    options: dict[str, Any],
    axes: str,
    heading: str,
    numel: int,
) -> None:
    options = {"auto_wrap_policy": {Mixed if kind is WithExperts else Block}, **options}
    title, *lines = world(2).run(run, options, False, kind)[0]["table"].splitlines()
    assert title == f"full_shard: 4 units on {axes}"
    place = lines[0].index(heading) + len(heading)
    cells = {line.split()[0]: line[:place].split()[-1] for line in lines if len(line) > place}
    assert (cells["(root)"], cells["blocks.0"]) == ("0", str(numel))
    assert cells["total"] == f"{3 * numel:,}"
    assert lines[-1] == f"{heading}: parameters of which 2 neighbouring ranks have a part each"


def test_a_unit_of_more_than_half_of_the_model_is_warned_of_on_rank_zero(world: Worlds) -> None:
    first, second = world(2).run(run, {"auto_wrap_policy": {nn.LayerNorm}}, False)
    assert len(first["told"]) == 1
    assert first["told"][0].startswith("unit (root) holds ")
    assert "Name smaller modules in auto_wrap_policy" in first["told"][0]
    assert second["told"] == []
