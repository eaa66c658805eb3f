"""The five sharding strategies as three knobs: how many ranks share, when units reshard, when gradients are reduced."""

import difflib
from dataclasses import dataclass
from enum import Enum


class Reshard(Enum):
    """When a unit's unsharded parameters are released; who pays the memory until then."""

    AFTER_FORWARD = "after_forward"
    """Unsharded while the unit computes: one unit at a time, plus prefetch."""

    AFTER_BACKWARD = "after_backward"
    """Unsharded from the unit's forward to the end of its backward."""

    NEVER = "never"
    """Gathered buffers are retained, and filled again only when the main shard has changed."""


class ShardSize(Enum):
    """Shard sizes that depend on the run."""

    WORLD = "world"
    NODE = "node"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a sharding strategy is to the engine."""

    shard_size: int | ShardSize
    reshard: Reshard
    reduce_every_backward: bool
    """False: gradients accumulate unsharded and are reduced once per optimizer step."""


PLACEMENTS: dict[str, Placement] = {
    # ZeRO-3, FSDP
    "full_shard": Placement(shard_size=ShardSize.WORLD, reshard=Reshard.AFTER_FORWARD, reduce_every_backward=True),
    # HSDP, MiCS
    "hybrid_shard": Placement(shard_size=ShardSize.NODE, reshard=Reshard.AFTER_FORWARD, reduce_every_backward=True),
    # ZeRO-2
    "shard_grad_op": Placement(shard_size=ShardSize.WORLD, reshard=Reshard.AFTER_BACKWARD, reduce_every_backward=True),
    # ZeRO-1
    "shard_optimizer": Placement(shard_size=ShardSize.WORLD, reshard=Reshard.NEVER, reduce_every_backward=False),
    # DDP: the group that shares a model is the rank itself
    "no_shard": Placement(shard_size=1, reshard=Reshard.NEVER, reduce_every_backward=False),
}


def find_placement(sharding_strategy: str) -> Placement:
    """The placement of a strategy, whose name is taken in any case.

    Raises:
        ValueError: There is no such strategy; names the nearest one.
    """
    name = sharding_strategy.lower()
    if name in PLACEMENTS:
        return PLACEMENTS[name]
    near = difflib.get_close_matches(name, PLACEMENTS, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"sharding_strategy={sharding_strategy!r} is not known; expected one of {', '.join(PLACEMENTS)}{hint}"
    )
