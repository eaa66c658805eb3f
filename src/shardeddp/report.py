"""Reports for a terminal: the table of units, and contents and damages of checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardeddp.checkpoint.manifest import CRC, Manifest
from shardeddp.checkpoint.verify import Row, Verification, total
from shardeddp.engine.runtime import Runtime
from shardeddp.engine.unit import Unit
from shardeddp.errors import printable

# -- Table of units

# One unit of this size or less costs nobody memory worth a warning: 4 MB in fp32.
SMALL_MODEL_NUMEL = 1_000_000

_NARROWEST = 80


@dataclass(frozen=True, kw_only=True)
class UnitRow:
    """The figures of one unit.

    They count elements of whole parameters except where they say "per rank".
    """

    name: str
    """The unit's module as people read it, ``(root)`` for the root."""

    num_parameters: int
    """Parameter objects; a tied one counts once."""

    numel: int
    """Elements of all parameters, without padding."""

    trainable_numel: int
    """Elements of those parameters that require gradients."""

    nbytes_per_rank: int
    """Bytes of the main shards on one rank, padding included."""

    padding_numel: int
    """Elements that the flat buffers hold beyond ``numel``, over all ranks."""


def oversized(rows: Sequence[UnitRow]) -> UnitRow | None:
    """The unit that holds more than half of all parameters, if that is worth a warning.

    Such a unit sets the peak memory alone: when it is gathered, most of the model is. It is worth a
    warning if the model is in several units (with parameters), so that its user means to share them
    out, or is one unit of more than ``SMALL_MODEL_NUMEL`` elements; a tiny model in one unit is as
    it should be.

    Args:
        rows: Every unit of the model, the root among them.

    Returns:
        The unit, or None.
    """
    total = sum(row.numel for row in rows)
    holding = [row for row in rows if row.numel > 0]
    if len(holding) < 2 and total <= SMALL_MODEL_NUMEL:
        return None
    return next((row for row in holding if 2 * row.numel > total), None)


def unit_table(rows: Sequence[UnitRow], title: str) -> Table:
    """A table of units with a total; neighbours with equal figures share a row.

    Args:
        rows: The units in model order.
        title: Printed above the table.

    Returns:
        A table that fits 80 columns, long names on several lines. A row of several units shows the
        figures of one of them. Trainable parameters have a column only if some are frozen.
    """
    runs = [list(run) for _, run in groupby(rows, key=_figures)]
    folded = any(len(run) > 1 for run in runs)
    table = Table(
        title=Text(title),
        caption=Text("(Nx): N units with these figures each") if folded else None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=True,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    total = _total(rows)
    any_frozen = total.trainable_numel != total.numel
    table.add_column(
        "unit", f"total ({len(rows):,} {'unit' if len(rows) == 1 else 'units'})", overflow="fold"
    )
    for heading, cell in _cells(total, any_frozen).items():
        table.add_column(heading, cell, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(_run_name(run), *_cells(run[0], any_frozen).values())
    return table


def print_unit_table(rows: Sequence[UnitRow], title: str, console: Console | None = None) -> None:
    """Prints the table of units; the caller decides on which rank.

    Args:
        rows: The units in model order.
        title: Printed above the table.
        console: Where to; None: standard output, at the width of the terminal, but no less than 80
            columns, which is also the width of a log file.
    """
    if console is None:
        detected = Console()
        console = detected if detected.width >= _NARROWEST else Console(width=_NARROWEST)
    console.print(unit_table(rows, title))


def human_count(count: int) -> str:
    """A number of elements for people: exact below 10,000, three digits above.

    Example:
        >>> human_count(9_999), human_count(12_345), human_count(7_077_888)
        ('9,999', '12.3 K', '7.08 M')
    """
    return f"{count:,}" if count < 10_000 else _scaled(count, 1000, ("", "K", "M", "B", "T"))


def human_bytes(nbytes: int) -> str:
    """A number of bytes for people, in powers of 1024.

    Example:
        >>> human_bytes(512), human_bytes(28_311_552)
        ('512 B', '27.0 MiB')
    """
    return (
        f"{nbytes} B"
        if nbytes < 1024
        else _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    )


def _scaled(value: float, base: int, suffixes: Sequence[str]) -> str:
    """The value with three significant digits and the suffix that leaves it below the base."""
    exponent = 0
    # 999.5 rounds to 1000 of this suffix, which is 1.00 of the next.
    while value >= 999.5 and exponent < len(suffixes) - 1:
        value /= base
        exponent += 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {suffixes[exponent]}".rstrip()


def _figures(row: UnitRow) -> tuple[int, ...]:
    """Properties in which units of one row are equal."""
    return (
        row.num_parameters,
        row.numel,
        row.trainable_numel,
        row.nbytes_per_rank,
        row.padding_numel,
    )


def _total(rows: Iterable[UnitRow]) -> UnitRow:
    """The sum of all units."""
    sums = [sum(column) for column in zip(*map(_figures, rows), strict=True)] or [0] * 5
    return UnitRow(
        name="total",
        num_parameters=sums[0],
        numel=sums[1],
        trainable_numel=sums[2],
        nbytes_per_rank=sums[3],
        padding_numel=sums[4],
    )


def _cells(row: UnitRow, any_frozen: bool) -> dict[str, str]:
    """The figures of one row as text by the heading of their column, in column order."""
    trainable = {"trainable": human_count(row.trainable_numel)} if any_frozen else {}
    share = _percent(row.padding_numel, row.numel + row.padding_numel)
    return {
        "tensors": f"{row.num_parameters:,}",
        "parameters": human_count(row.numel),
        **trainable,
        "per rank": human_bytes(row.nbytes_per_rank),
        "padding": f"{human_count(row.padding_numel)} ({share})",
    }


def _percent(part: int, whole: int) -> str:
    """A share with one decimal; a share that is not zero never reads as zero."""
    if part == 0:
        return "0%"
    share = 100 * part / whole
    return "<0.1%" if share < 0.05 else f"{share:.1f}%"


def _run_name(run: Sequence[UnitRow]) -> Text:
    """``layers.0 ... layers.31 (32x)``, as text in which brackets mean nothing to rich."""
    if len(run) == 1:
        return Text(run[0].name)
    return Text(f"{run[0].name} ... {run[-1].name} ({len(run)}x)")


# -- Messages about a sharded model


def describe_units(sharding_strategy: str, runtime: Runtime) -> str:
    """One line: number of units, mesh, bytes per rank, and dtypes.

    Warns where one unit holds most of the model.
    """
    rows = _rows(runtime)
    largest = oversized(rows)
    if largest is not None:
        warnings.warn(
            f"unit {largest.name} holds {largest.numel:,} of {sum(row.numel for row in rows):,} "
            f"parameters: while it is unsharded, so is most of the model. Name smaller modules in "
            f"auto_wrap_policy, for example the classes of the model's repeated blocks",
            stacklevel=2,
        )
    numel, nbytes = sum(row.numel for row in rows), sum(row.nbytes_per_rank for row in rows)
    return (
        f"{_title(sharding_strategy, runtime)}: {numel:,} parameters, {human_bytes(nbytes)} per "
        f"rank; {_describe_dtypes(runtime)}"
    )


def print_units(sharding_strategy: str, runtime: Runtime) -> None:
    """Print the table of units of a sharded model."""
    print_unit_table(_rows(runtime), _title(sharding_strategy, runtime))


def _rows(runtime: Runtime) -> list[UnitRow]:
    return [unit_row(progress.unit) for progress in runtime.progresses]


def _title(sharding_strategy: str, runtime: Runtime) -> str:
    topology, count = runtime.mesh.topology, len(runtime.progresses)
    ranks = f"{topology.replicate_size} x {topology.shard_size} ranks (replicate x shard)"
    return f"{sharding_strategy}: {count} unit{'s' * (count > 1)} on {ranks}"


def _describe_dtypes(runtime: Runtime) -> str:
    units = [progress.unit.spec for progress in runtime.progresses]
    specs = [spec for unit in units for spec in (*unit.parameters, *unit.passthrough)]
    used = {
        "kept in": _named(spec.dtype for spec in specs),
        "computed in": _named(spec.param_dtype for spec in specs),
        "reduced in": _named(spec.reduce_dtype for spec in specs if spec.parameter.requires_grad),
    }
    told = {dtypes for dtypes in used.values() if dtypes}
    return (
        f"all in {told.pop()}"
        if len(told) == 1
        else ", ".join(f"{k} {v}" for k, v in used.items() if v)
    )


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


# -- Tables and sentences about checkpoints

MAX_DAMAGES = 20
"""Of one checkpoint that are shown."""

_NARROW = 100
"""Columns; in a narrower terminal the table leaves out the least important ones."""


def inspection_view(
    path: Path, manifest: Manifest, rows: Sequence[Row], width: int, folded: bool
) -> RenderableType:
    """A checkpoint as a list of facts and a table of tensors.

    Args:
        path: Of the checkpoint.
        manifest: Of the checkpoint.
        rows: Of the table.
        width: Of the terminal, in columns.
        folded: Whether a row may stand for several tensors.
    """
    hint = [
        Text("one row per module; --all lists every tensor, --tensors PATTERN some", style="dim")
    ]
    return Group(
        _facts(path, manifest), Text(), _tensor_table(rows, width), *(hint if folded else [])
    )


def verification_view(found: Verification, seconds: float) -> RenderableType:
    """One line for a good checkpoint, a line for each damage of another."""
    speed = f"{human_bytes(found.nbytes)} in {seconds:.1f} s"
    path = printable(str(found.path))
    step = "" if found.step is None else f", step {found.step:,}"
    if found.good:
        head = Text.assemble(("good     ", "bold green"), f"{path} ({speed}{step})")
    else:
        count = f"{len(found.damages):,} place{'s' * (len(found.damages) > 1)}"
        head = Text.assemble(("DAMAGED  ", "bold red"), f"{path} ({count}{step})")
    lines = [Text(printable(f"  {damage}")) for damage in found.damages[:MAX_DAMAGES]]
    if len(found.damages) > MAX_DAMAGES:
        lines.append(Text(f"  and {len(found.damages) - MAX_DAMAGES:,} more; --json has them all"))
    if found.unchecked:
        names = ", ".join(found.unchecked[:3]) + (", ..." if len(found.unchecked) > 3 else "")
        lines.append(
            Text(printable(f"  not checked, for it was written without a checksum: {names}"))
        )
    return Group(head, *lines)


def _facts(path: Path, manifest: Manifest) -> Table:
    run = manifest.run
    ranks = f"{run.world_size} rank{'s' * (run.world_size > 1)}"
    files = "one file" if manifest.algorithm == CRC else f"{len(manifest.files) + 1:,} files"
    shards = f", shards over {run.shard_size}" if run.shard_size != run.world_size else ""
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    facts = {
        "checkpoint": str(path),
        "saved at": f"step {run.step:,}, epoch {run.epoch:,}",
        "by": f"{ranks}, {run.sharding_strategy}{shards}",
        "versions": versions,
        "holds": f"{len(manifest.tensors):,} tensors, {human_bytes(manifest.nbytes)}, {files}",
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(Text(name), Text(printable(fact)))
    return table


def _tensor_table(rows: Sequence[Row], width: int) -> Table:
    together = total(rows)
    wide = width >= _NARROW
    table = Table(
        box=box.SIMPLE_HEAD,
        show_footer=True,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("tensor", "total", overflow="fold")
    table.add_column("shape", f"{together.num_tensors:,} tensors", overflow="fold")
    table.add_column("dtype", overflow="fold")
    if wide:
        table.add_column("elements", human_count(together.numel), justify="right", no_wrap=True)
        table.add_column("parts", f"{together.num_parts:,}", justify="right", no_wrap=True)
    table.add_column("size", human_bytes(together.nbytes), justify="right", no_wrap=True)
    for row in rows:
        figures = [human_count(row.numel), f"{row.num_parts:,}"] if wide else []
        size = human_bytes(row.nbytes) if not row.same_as else "tied"
        table.add_row(_name(row), _shape(row), ", ".join(row.dtypes), *figures, size)
    return table


def _name(row: Row) -> Text:
    return Text(printable(f"{row.name} (is {row.same_as})" if row.same_as else row.name))


def _shape(row: Row) -> Text:
    if row.shape is None:
        return Text(f"{row.num_tensors:,} tensors", style="dim")
    return Text(" x ".join(map(str, row.shape)) or "scalar")
