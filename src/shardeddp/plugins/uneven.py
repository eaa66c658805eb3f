"""Prediction over ranks with different numbers of batches: a rank that has ended can take no part in gathers."""

import json
import warnings
from collections.abc import Sequence

from shardeddp.comm import exchange
from shardeddp.plan.placement import Reshard
from shardeddp.sharding.runtime import Runtime


def hold_if_uneven(runtime: Runtime, num_batches: Sequence[int | float]) -> None:
    """Release no unit from its first use on if ranks have different numbers of batches, or don't know them.

    Lightning gives each sample to one rank in prediction and repeats none, so most data sets are uneven there.

    Args:
        runtime: Of the model.
        num_batches: Of this rank, by loader; ``inf`` for a loader without a length.
    """
    if runtime.placement.reshard is Reshard.NEVER:
        return
    texts = exchange(json.dumps(list(num_batches)).encode(), runtime.mesh.control)
    counts = [sum(json.loads(text)) for text in texts]
    if len(set(texts)) == 1 and max(counts) < float("inf"):
        return
    nbytes = sum(
        cost.layout.padded_numel * cost.layout.itemsize for track in runtime.tracks for cost in track.unit.costs()
    )
    if runtime.mesh.rank == 0:
        warnings.warn(
            f"ranks have different numbers of batches to predict ({counts}): the whole model ({nbytes:,} bytes) stays "
            f"unsharded meanwhile, because a rank that has ended cannot take part in gathers. Give every rank the same "
            f"number of batches to avoid it",
            stacklevel=2,
        )
    for track in runtime.tracks:
        track.held = True


def let_go(runtime: Runtime | None) -> None:
    """Undo :func:`hold_if_uneven`."""
    held = [] if runtime is None else [track for track in runtime.tracks if track.held]
    for track in held:
        track.held = False
    if runtime is not None and held:
        runtime.reset()
