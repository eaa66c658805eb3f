"""Registry: names under which a Trainer and the command line know the strategy."""

import sys
from typing import Any, NoReturn

from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import NAMESPACE, OTHER, VARIABLE, Strategy, StrategyRegistry
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES

# The last two are what the command line makes of a bare class path.
_NAMES = ("sharded_dp", "shardeddp", "shardeddp.shardeddp")
_START_METHODS = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}


def register_names(strategy: type[Strategy]) -> None:
    """Make ``Trainer(strategy="sharded_dp")`` and its variants known."""
    register = StrategyRegistry.register
    for name in _NAMES:
        register(name, strategy, "ShardedDP, full_shard", override=True)
    for name in SHARDING_STRATEGIES:
        register(
            f"sharded_dp_{name}",
            strategy,
            f"ShardedDP, {name}",
            override=True,
            sharding_strategy=name,
        )
    for name, method in _START_METHODS.items():
        register(
            f"sharded_dp_{name}",
            strategy,
            f"ShardedDP by {method}",
            override=True,
            start_method=method,
        )
    _refuse_elsewhere(
        [name for name, entry in StrategyRegistry.items() if entry["strategy"] is strategy]
    )


def introduction(sharding_strategy: str) -> str:
    """Attributes of a ShardedDP that a Trainer of the other namespace shows when it refuses it."""
    both = f"; for {OTHER} set {VARIABLE}={OTHER}" if OTHER in sys.modules else ""
    return f"<ShardedDP({sharding_strategy!r}) for {NAMESPACE}.Trainer{both}>"


def _refuse_elsewhere(names: list[str]) -> None:
    """Make a Trainer of the other namespace, if imported, say why it has no such strategy."""
    strategies = sys.modules.get(f"{OTHER}.strategies")
    if strategies is not None:
        registry: Any = strategies.StrategyRegistry
        for name in names:
            registry.register(
                name, _refuse, f"ShardedDP, which is for {NAMESPACE} here", override=True
            )


def _refuse() -> NoReturn:
    raise ConfigurationError(
        f"this process has imported both lightning.pytorch and pytorch_lightning, and ShardedDP is "
        f"made for {NAMESPACE}.Trainer. Use that one, or set the environment variable "
        f"{VARIABLE}={OTHER} before Python starts"
    )
