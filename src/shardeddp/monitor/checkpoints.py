"""Tables and sentences about checkpoints, for a terminal: what is in one, and whether it is as it was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardeddp.checkpoint.format.manifest import CRC, Manifest
from shardeddp.checkpoint.reading.inspection import Row, total
from shardeddp.checkpoint.reading.verification import Verification
from shardeddp.monitor.report import human_bytes, human_count

MAX_DAMAGES = 20
"""Of one checkpoint that are shown."""

_NARROW = 100
"""Columns; below, the table leaves out what is least asked for."""


def inspection_view(path: Path, manifest: Manifest, rows: Sequence[Row], width: int, folded: bool) -> RenderableType:
    """A checkpoint as a list of facts and a table of tensors.

    Args:
        path: Of the checkpoint.
        manifest: Of the checkpoint.
        rows: Of the table.
        width: Of the terminal, in columns.
        folded: Whether a row may stand for several tensors.
    """
    hint = [Text("one row per module; --all lists every tensor, --tensors PATTERN some", style="dim")]
    return Group(_facts(path, manifest), Text(), _tensor_table(rows, width), *(hint if folded else []))


def verification_view(found: Verification, seconds: float) -> RenderableType:
    """One line for a good checkpoint, a line for each damage of another."""
    speed = f"{human_bytes(found.nbytes)} in {seconds:.1f} s"
    step = "" if found.step is None else f", step {found.step:,}"
    if found.good:
        head = Text.assemble(("good     ", "bold green"), f"{found.path} ({speed}{step})")
    else:
        count = f"{len(found.damages):,} place{'s' * (len(found.damages) > 1)}"
        head = Text.assemble(("DAMAGED  ", "bold red"), f"{found.path} ({count}{step})")
    lines = [Text(f"  {damage}") for damage in found.damages[:MAX_DAMAGES]]
    if len(found.damages) > MAX_DAMAGES:
        lines.append(Text(f"  and {len(found.damages) - MAX_DAMAGES:,} more; --json has them all"))
    if found.unchecked:
        names = ", ".join(found.unchecked[:3]) + (", ..." if len(found.unchecked) > 3 else "")
        lines.append(Text(f"  not checked, for it was written without a checksum: {names}"))
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
        table.add_row(Text(name), Text(fact))
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
        table.add_column("pieces", f"{together.num_pieces:,}", justify="right", no_wrap=True)
    table.add_column("size", human_bytes(together.nbytes), justify="right", no_wrap=True)
    for row in rows:
        figures = [human_count(row.numel), f"{row.num_pieces:,}"] if wide else []
        size = human_bytes(row.nbytes) if not row.same_as else "tied"
        table.add_row(_name(row), _shape(row), ", ".join(row.dtypes), *figures, size)
    return table


def _name(row: Row) -> Text:
    return Text(f"{row.name} (is {row.same_as})" if row.same_as else row.name)


def _shape(row: Row) -> Text:
    if row.shape is None:
        return Text(f"{row.num_tensors:,} tensors", style="dim")
    return Text(" x ".join(map(str, row.shape)) or "scalar")
