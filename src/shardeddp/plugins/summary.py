"""The summary of a sharded model: Lightning's own table, with the column that it has for sharded models."""

from functools import partial
from typing import Any

from typing_extensions import override

from shardeddp.lightning_api import (
    LightningModule,
    LightningModuleSummary,
    ModelSummary,
    Trainer,
    callbacks_of,
    get_human_readable_count,
)
from shardeddp.sharding.shard_tensor import ShardTensor

COLUMN = "Params per Device"
"""As Lightning calls it; ``RichModelSummary`` shows no other."""


class ShardedSummary(LightningModuleSummary):
    """Says what a rank holds of each layer, on average: which rank holds which element of a unit says nothing."""

    @override
    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = super()._get_summary_data()
        place = [name for name, _ in columns].index("Params") + 1
        held = [_held(layer._module) for layer in self._layer_summary.values()]
        if len(columns[place - 1][1]) > len(held):  # parameters of no layer have a row of their own
            held.append(max(0.0, _held(self._model) - sum(held)))
        columns.insert(place, (COLUMN, [get_human_readable_count(round(count)) for count in held]))
        return columns


def complete_summaries(trainer: Trainer) -> None:
    """Let the callbacks that print a summary of the module say what a rank holds.

    Args:
        trainer: Whose callbacks; those that summarize in their own way are left to it.
    """
    for callback in _summaries(trainer):
        vars(callback)["_summary"] = partial(_summarize, callback._max_depth)


def restore_summaries(trainer: Trainer) -> None:
    """Undo :func:`complete_summaries`: the next run of a callback may be under another strategy."""
    for callback in _summaries(trainer):
        vars(callback).pop("_summary", None)


def _summarize(max_depth: int, trainer: Trainer, pl_module: LightningModule) -> ShardedSummary:
    """In the place of ``ModelSummary._summary``."""
    return ShardedSummary(pl_module, max_depth=max_depth)


def _summaries(trainer: Trainer) -> list[Any]:
    summaries = [callback for callback in callbacks_of(trainer) if isinstance(callback, ModelSummary)]
    return [callback for callback in summaries if type(callback)._summary is ModelSummary._summary]


def _held(module: Any) -> float:
    return sum(
        parameter.numel() / (parameter.spec.mesh.owners.size if isinstance(parameter, ShardTensor) else 1)
        for parameter in module.parameters()
    )
