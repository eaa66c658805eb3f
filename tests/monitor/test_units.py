"""What a run prints of its units: once, on rank 0, with the figures of what is stored; and when it warns."""

import contextlib
import io
import warnings
from typing import Any

import pytest
from torch import nn

from shardeddp import ShardedDP
from shardeddp.monitor.report import UnitRow
from shardeddp.monitor.units import unit_row
from support.tasks import Block, EvaluatedGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

BLOCK_NUMEL = sum(parameter.numel() for parameter in Block(8).parameters())


def run(arguments: dict[str, Any], frozen: bool) -> tuple[str, list[str], list[UnitRow]]:
    """What two stages on one Trainer print and warn of, and the figures of the units."""
    model, strategy = EvaluatedGpt(), ShardedDP(**arguments)
    model.blocks[2].requires_grad_(not frozen)
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy, max_steps=1)
        trainer.fit(model, token_loader(8))
        trainer.test(model, token_loader(8), verbose=False)
    told = [str(each.message) for each in caught if str(each.message).startswith("unit")]
    return out.getvalue(), told, [unit_row(track.unit) for track in strategy.runtime.tracks]


def test_rank_zero_prints_the_table_once(world: Worlds) -> None:
    (text, told, _), (silence, _, _) = world(2).run(run, {"auto_wrap_policy": {Block}}, False)
    assert silence == ""
    assert told == []
    assert text.count("full_shard: 4 units on 1 x 2 ranks (replicate x shard)") == 1
    assert text.count("blocks.0 ... blocks.2 (3x)") == 1


def test_the_title_says_how_many_units_and_ranks_there_are(world: Worlds) -> None:
    text = world(2).run(run, {"sharding_strategy": "No_Shard", "auto_wrap_policy": None}, False)[0][0]
    assert "no_shard: 1 unit on 2 x 1 ranks (replicate x shard)" in text


@pytest.mark.parametrize("frozen", [False, True])
def test_a_row_counts_whole_parameters_and_this_ranks_bytes(world: Worlds, frozen: bool) -> None:
    rows = world(2).run(run, {"auto_wrap_policy": {Block}}, frozen)[0][2]
    assert [row.name for row in rows] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    for row in rows[1:]:
        assert (row.num_parameters, row.numel) == (6, BLOCK_NUMEL)
        assert row.trainable_numel == (0 if frozen and row.name == "blocks.2" else BLOCK_NUMEL)
        assert 2 * row.nbytes_per_rank == 4 * (row.numel + row.padding_numel)


def test_a_unit_of_more_than_half_of_the_model_is_warned_of_on_rank_zero(world: Worlds) -> None:
    first, second = world(2).run(run, {"auto_wrap_policy": {nn.LayerNorm}}, False)
    assert len(first[1]) == 1
    assert first[1][0].startswith("unit (root) holds ")
    assert "Name smaller modules in auto_wrap_policy" in first[1][0]
    assert second[1] == []
