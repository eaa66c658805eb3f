"""What people are told of a sharded model: one line when it has been sharded, a warning, and a table if they ask."""

import warnings
from collections.abc import Iterable

import torch

from shardeddp.monitor.report import UnitRow, human_bytes, oversized, print_unit_table
from shardeddp.sharding.runtime import Runtime
from shardeddp.sharding.unit import Unit


def describe_units(sharding_strategy: str, runtime: Runtime) -> str:
    """One line: how many units on which mesh, what a rank stores, and in which dtypes.

    Warns where one unit holds most of the model.
    """
    rows = _rows(runtime)
    largest = oversized(rows)
    if largest is not None:
        warnings.warn(
            f"unit {largest.name} holds {largest.numel:,} of {sum(row.numel for row in rows):,} parameters: while it "
            f"is unsharded, so is most of the model. Name smaller modules in auto_wrap_policy, for example the classes "
            f"of the model's repeated blocks",
            stacklevel=2,
        )
    numel, nbytes = sum(row.numel for row in rows), sum(row.nbytes_per_rank for row in rows)
    return (
        f"{_title(sharding_strategy, runtime)}: {numel:,} parameters, {human_bytes(nbytes)} per rank; "
        f"{_describe_dtypes(runtime)}"
    )


def print_units(sharding_strategy: str, runtime: Runtime) -> None:
    """Print the table of units of a sharded model."""
    print_unit_table(_rows(runtime), _title(sharding_strategy, runtime))


def _rows(runtime: Runtime) -> list[UnitRow]:
    return [unit_row(track.unit) for track in runtime.tracks]


def _title(sharding_strategy: str, runtime: Runtime) -> str:
    topology, count = runtime.mesh.topology, len(runtime.tracks)
    ranks = f"{topology.replicate_size} x {topology.shard_size} ranks (replicate x shard)"
    return f"{sharding_strategy}: {count} unit{'s' * (count > 1)} on {ranks}"


def _describe_dtypes(runtime: Runtime) -> str:
    units = [track.unit.spec for track in runtime.tracks]
    specs = [spec for unit in units for spec in (*unit.parameters, *unit.idle)]
    used = {
        "kept in": _named(spec.dtype for spec in specs),
        "computed in": _named(spec.param_dtype for spec in specs),
        "reduced in": _named(spec.reduce_dtype for spec in specs if spec.parameter.requires_grad),
    }
    told = {dtypes for dtypes in used.values() if dtypes}
    return f"all in {told.pop()}" if len(told) == 1 else ", ".join(f"{k} {v}" for k, v in used.items() if v)


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))


def unit_row(unit: Unit) -> UnitRow:
    """The figures of one unit."""
    costs = unit.costs()
    layouts = [cost.layout for cost in costs]
    return UnitRow(
        name=unit.label,
        num_parameters=sum(len(layout.slots) for layout in layouts),
        numel=sum(layout.numel for layout in layouts),
        trainable_numel=sum(cost.layout.numel for cost in costs if cost.trainable),
        nbytes_per_rank=sum(cost.layout.shard_numel * cost.main_itemsize for cost in costs),
        padding_numel=sum(layout.padding_numel for layout in layouts),
    )
