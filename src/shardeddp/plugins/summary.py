"""The summary of a sharded model: Lightning's own table, with the column that it has for sharded models."""

from typing import Any

from torch import nn

from shardeddp.lightning_api import ModelSummary, Trainer, callbacks_of, get_human_readable_count, private
from shardeddp.sharding.shard_tensor import ShardTensor

COLUMN = "Params per Device"
"""As Lightning calls it; ``RichModelSummary`` shows no other."""


def complete_summaries(trainer: Trainer) -> None:
    """Let the callbacks that print a summary of the module say what a rank holds.

    Args:
        trainer: Whose callbacks; those that summarize in their own way are left to it.
    """
    for callback in _summaries(trainer):
        private.replace_summary(callback, _summarize)


def restore_summaries(trainer: Trainer) -> None:
    """Undo :func:`complete_summaries`: the next run of a callback may be under another strategy."""
    for callback in _summaries(trainer):
        private.restore_summary(callback)


def _summaries(trainer: Trainer) -> list[ModelSummary]:
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, ModelSummary)]


def _summarize(module: nn.Module, max_depth: int) -> Any:
    """Summary with the number of elements of each layer that a rank holds on average."""
    return private.SummaryWithCounts(module, max_depth, title=COLUMN, count=_held, show=_show)


def _show(count: float) -> str:
    return get_human_readable_count(round(count))


def _held(module: nn.Module) -> float:
    return sum(
        parameter.numel() / (parameter.spec.mesh.owners.size if isinstance(parameter, ShardTensor) else 1)
        for parameter in module.parameters()
    )
