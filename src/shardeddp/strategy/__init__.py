"""The Lightning face of the engine."""

from shardeddp.strategy.sharded_dp import ShardedDP

__all__ = ["ShardedDP"]
