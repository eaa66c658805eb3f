"""The names under which a Trainer and the command line know the strategy."""

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from shardeddp.plan.placement import PLACEMENTS

# The last two are what the command line makes of a bare class path.
_NAMES = ("sharded_dp", "shardeddp", "shardeddp.shardeddp")
_START_METHODS = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}


def register_names(strategy: type[Strategy]) -> None:
    """Make ``Trainer(strategy="sharded_dp")`` and its variants known."""
    register = StrategyRegistry.register
    for name in _NAMES:
        register(name, strategy, "ShardedDP, full_shard", override=True)
    for name in PLACEMENTS:
        register(f"sharded_dp_{name}", strategy, f"ShardedDP, {name}", override=True, sharding_strategy=name)
    for name, method in _START_METHODS.items():
        register(f"sharded_dp_{name}", strategy, f"ShardedDP by {method}", override=True, start_method=method)
