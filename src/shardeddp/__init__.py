"""shardeddp: sharded training for PyTorch Lightning, of unmodified LightningModules."""

from lightning.pytorch.strategies import StrategyRegistry

from shardeddp.errors import ConfigurationError, LayoutMismatchError, RankError, ReleasedParameterError
from shardeddp.plan.placement import PLACEMENTS
from shardeddp.sharding.gradients import clip_grad_norm_, clip_grad_value_
from shardeddp.sharding.shard_tensor import ShardTensor
from shardeddp.strategy import ShardedDP
from shardeddp.wrap import AutoPolicy, ClassPolicy, NamePolicy, Policy, PredicatePolicy, SizePolicy

__version__ = "0.1.0"

__all__ = [
    "AutoPolicy",
    "ClassPolicy",
    "ConfigurationError",
    "LayoutMismatchError",
    "NamePolicy",
    "Policy",
    "PredicatePolicy",
    "RankError",
    "ReleasedParameterError",
    "ShardTensor",
    "ShardedDP",
    "SizePolicy",
    "clip_grad_norm_",
    "clip_grad_value_",
]


def _register_strategies() -> None:
    """Make ``Trainer(strategy="sharded_dp")`` and its variants known."""
    register = StrategyRegistry.register
    # The last two are what the command line makes of a bare class path.
    for name in ("sharded_dp", "shardeddp", "shardeddp.shardeddp"):
        register(name, ShardedDP, description="ShardedDP, full_shard", override=True)
    for placement in PLACEMENTS:
        register(
            f"sharded_dp_{placement}", ShardedDP, f"ShardedDP, {placement}", override=True, sharding_strategy=placement
        )
    for name, start_method in (("spawn", "spawn"), ("fork", "fork"), ("notebook", "fork")):
        register(f"sharded_dp_{name}", ShardedDP, f"ShardedDP by {start_method}", True, start_method=start_method)


_register_strategies()
