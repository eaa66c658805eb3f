"""What becomes of a module before it is sharded: its units, their dtypes, casts at their boundaries, checkpointing."""

from torch import nn

from shardeddp.config import MixedPrecision
from shardeddp.lightning_api import Precision
from shardeddp.plugins.activation_checkpointing import ActivationCheckpointing, checkpoint_activations
from shardeddp.plugins.mixed_precision import assign_dtypes, cast_at_boundaries, resolve_dtypes
from shardeddp.plugins.precision import ShardedPrecision
from shardeddp.sharding.spec import UnitSpec
from shardeddp.wrap import Policy, build_units


def plan_units(
    module: nn.Module,
    policy: Policy,
    precision: Precision,
    mixed_precision: MixedPrecision | None,
    activation_checkpointing: ActivationCheckpointing | None,
) -> list[UnitSpec]:
    """Find the units of a module, the root first, and prepare it for being sharded.

    Args:
        module: The module, which is changed.
        policy: Which modules are units.
        precision: The Trainer's.
        mixed_precision: The user's own; None: what the Trainer's says.
        activation_checkpointing: What is computed again in backward; None: nothing.
    """
    units = build_units(module, policy)
    autocast = precision.autocast if isinstance(precision, ShardedPrecision) else None
    dtypes = resolve_dtypes(mixed_precision, autocast)
    units = assign_dtypes(module, units, dtypes)
    cast_at_boundaries(module, units, dtypes)
    if activation_checkpointing is not None:
        checkpoint_activations(module, activation_checkpointing)
    return units
