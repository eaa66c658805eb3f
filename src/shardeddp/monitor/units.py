"""What rank 0 prints when a model has been sharded: the table of units, and a warning where one holds too much."""

import warnings

from shardeddp.monitor.report import UnitRow, oversized, print_unit_table
from shardeddp.sharding.runtime import Runtime
from shardeddp.sharding.unit import Unit


def report_units(sharding_strategy: str, runtime: Runtime) -> None:
    """Print the table of units of a sharded model."""
    units = [track.unit for track in runtime.tracks]
    rows = [unit_row(unit) for unit in units]
    topology = runtime.mesh.topology
    counted = f"{len(units)} unit{'s' * (len(units) > 1)}"
    ranks = f"{topology.replicate_size} x {topology.shard_size} ranks (replicate x shard)"
    print_unit_table(rows, f"{sharding_strategy}: {counted} on {ranks}")
    largest = oversized(rows)
    if largest is not None:
        warnings.warn(
            f"unit {largest.name} holds {largest.numel:,} of {sum(row.numel for row in rows):,} parameters: while it "
            f"is unsharded, so is most of the model. Name smaller modules in auto_wrap_policy, for example the classes "
            f"of the model's repeated blocks",
            stacklevel=2,
        )


def unit_row(unit: Unit) -> UnitRow:
    """The figures of one unit."""
    layouts = [(group.layout, group.trainable) for group in unit.groups]
    return UnitRow(
        name=unit.label,
        num_parameters=sum(len(layout.slots) for layout, _ in layouts),
        numel=sum(layout.numel for layout, _ in layouts),
        trainable_numel=sum(layout.numel for layout, trainable in layouts if trainable),
        nbytes_per_rank=sum(layout.shard_numel * layout.itemsize for layout, _ in layouts),
        padding_numel=sum(layout.padding_numel for layout, _ in layouts),
    )
