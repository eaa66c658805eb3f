"""Loader states: where each rank is in its data. Lightning saves what one rank says and gives that to all."""

from __future__ import annotations

import pickle
import warnings
from typing import Any, cast

import torch.distributed as dist

from shardeddp.comm.agreement import gather_results
from shardeddp.errors import CheckpointError

_PLACE = "combined_loader"
"""The name that the states of training loaders have among those of Lightning's fit loop."""


def gather_loader_states(checkpoint: dict[str, Any], group: dist.ProcessGroup) -> tuple[dict[str, Any], list[Any]]:
    """Every rank's states, by rank, where they are not the same; a collective.

    Args:
        checkpoint: Of this rank, as Lightning has made it; it stays as it is.
        group: The host group of all ranks.

    Returns:
        The checkpoint with rank 0's states in place of its own, and all of them; nothing of the latter if all ranks
        are in one place, or have no stateful loader.
    """
    # Pickled on the way between ranks of one job only.
    own = _fit_loop(checkpoint).get(_PLACE)
    sent = gather_results("saving the states of data loaders", lambda: pickle.dumps(own), group)
    if len(set(sent)) == 1:
        return checkpoint, []
    states = [pickle.loads(each) for each in sent]
    loops, fit_loop = checkpoint["loops"], checkpoint["loops"]["fit_loop"]
    fit_loop = {**fit_loop, "state_dict": {**fit_loop["state_dict"], _PLACE: states[0]}}
    return {**checkpoint, "loops": {**loops, "fit_loop": fit_loop}}, states


def take_loader_state(checkpoint: dict[str, Any], states: object, rank: int, world_size: int) -> None:
    """Put this rank's states where Lightning looks for them.

    Args:
        checkpoint: As it was read.
        states: By rank, as saved.
        rank: This rank.
        world_size: Number of ranks now. If there were more or fewer, all go on from where rank 0 was: rank 0 warns.

    Raises:
        CheckpointError: These are no states.
    """
    if not isinstance(states, list):
        raise CheckpointError(
            f"the states of data loaders in the checkpoint are damaged: expected a list of them by rank, found "
            f"{type(states).__name__}. Load an older checkpoint, or remove them: del checkpoint['shardeddp']"
        )
    by_rank = cast("list[Any]", states)
    if len(by_rank) == world_size:
        _fit_loop(checkpoint)[_PLACE] = by_rank[rank]
    elif rank == 0:
        warnings.warn(
            f"the checkpoint has the places of {len(by_rank)} ranks in their data, each its own, and this run has "
            f"{world_size}: all loaders go on from where that of rank 0 was, so that samples may be seen twice or not "
            f"at all in this epoch. Resume with {len(by_rank)} ranks for the same data",
            stacklevel=2,
        )


def _fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The part that is read and written here; an empty one where weights alone are saved."""
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
