"""Reports for a terminal: the table of units, and contents and damages of checkpoints."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby

import torch

from shardeddp.checkpoint.location import Location
from shardeddp.checkpoint.manifest import CRC, Manifest
from shardeddp.checkpoint.verify import Row, Verification, total
from shardeddp.engine.runtime import Runtime
from shardeddp.engine.unit import Unit
from shardeddp.errors import first_three, listed_ranks, printable
from shardeddp.plan.topology import Topology

# -- Tables as plain text
#
# Without rich: Lightning chooses its progress bar and its summary by whether rich is installed.

_NARROWEST = 80
_SHORTEST_NAME = 8


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table, from its heading to its footer."""

    heading: str
    cells: Sequence[str]
    footer: str
    is_number: bool = True
    """Numbers are right-aligned and never broken; names are, if the table is too wide."""


def text_table(columns: Sequence[Column], width: int) -> list[str]:
    """Return the lines of a table with a heading and a footer.

    Args:
        columns: Columns with the same number of cells, at least one of names.
        width: Columns of the terminal. Names continue on further lines until the table fits.
    """
    texts = [[column.heading, *column.cells, column.footer] for column in columns]
    widths = [max(map(len, each)) for each in texts]
    gaps = 2 * (len(columns) - 1)
    names = [index for index, column in enumerate(columns) if not column.is_number]
    while sum(widths) + gaps > width and max(widths[index] for index in names) > _SHORTEST_NAME:
        widths[max(names, key=widths.__getitem__)] -= 1
    rows = [_row_lines(columns, row, widths) for row in zip(*texts, strict=True)]
    rule = _rule() * (sum(widths) + gaps)
    heading, *body, footer = rows
    return [*heading, rule, *(line for row in body for line in row), rule, *footer]


def _row_lines(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the lines of one row, as many as its longest name takes."""
    cells = [
        [text] if column.is_number else textwrap.wrap(text, width, break_on_hyphens=False) or [""]
        for column, text, width in zip(columns, row, widths, strict=True)
    ]
    lines: list[str] = []
    for number in range(max(map(len, cells))):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        aligned = [
            part.rjust(width) if column.is_number else part.ljust(width)
            for column, part, width in zip(columns, parts, widths, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return lines


def _rule() -> str:
    """Return the character for rules in the encoding of standard output."""
    try:
        "\u2500".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "-"
    return "\u2500"


def terminal_width(least: int = 1) -> int:
    """Return the columns of the terminal, but at least ``least``; 80 for a log file."""
    return max(least, shutil.get_terminal_size().columns)


# -- Table of units

# A single unit of this size or less costs no memory worth a warning: 4 MB in fp32.
SMALL_MODEL_NUMEL = 1_000_000


@dataclass(frozen=True)
class UnitRow:
    """Figures of one unit.

    They count elements of whole parameters except where they say "per rank".
    """

    name: str
    """Label of the unit's module, ``(root)`` for the root."""

    num_parameters: int
    """Number of parameter objects; a tied one counts once."""

    numel: int
    """Number of elements of all parameters, without padding."""

    trainable_numel: int
    """Number of elements of those parameters that require gradients."""

    nbytes_per_rank: int
    """Bytes of the main shards on one rank, padding included."""

    padding_numel: int
    """Number of padding elements in the flat buffers, over all ranks."""

    divided_numel: int = 0
    """Number of elements of parameters of experts, or of split layers, that ranks divide."""


def oversized(rows: Sequence[UnitRow]) -> UnitRow | None:
    """Return the unit that holds more than half of all parameters, if worth a warning; else None.

    Such a unit sets the peak memory alone: when it is gathered, most of the model is. It is worth a
    warning if the model has several units (with parameters), so that its user means to divide it,
    or is one unit of more than ``SMALL_MODEL_NUMEL`` elements; a tiny model in one unit is fine.
    """
    total = sum(row.numel for row in rows)
    holding = [row for row in rows if row.numel > 0]
    if len(holding) < 2 and total <= SMALL_MODEL_NUMEL:
        return None
    return next((row for row in holding if 2 * row.numel > total), None)


def unit_table(
    rows: Sequence[UnitRow], title: str, width: int, *, kind: str = "split", size: int = 1
) -> list[str]:
    """Return the lines of a table of units with a total; neighbours with equal figures share a row.

    ``kind`` and ``size`` head the column of parameters that ``size`` ranks divide.

    Returns:
        Lines of the table. A row of several units shows the figures of one of them. Trainable
        parameters have a column only if some are frozen, divided ones only if ranks divide some.
    """
    equal = [list(units) for _, units in groupby(rows, key=_figures)]
    total = _total(rows)
    any_frozen = total.trainable_numel != total.numel
    divided = f"{kind} / {size}" if size > 1 else ""
    footers = _cells(total, any_frozen, divided)
    figures = [_cells(units[0], any_frozen, divided) for units in equal]
    names = Column(
        heading="unit",
        cells=[folded_name([unit.name for unit in units]) for units in equal],
        footer=f"total ({len(rows):,} {'unit' if len(rows) == 1 else 'units'})",
        is_number=False,
    )
    numbers = [
        Column(heading=heading, cells=[each[heading] for each in figures], footer=footer)
        for heading, footer in footers.items()
    ]
    folded = any(len(units) > 1 for units in equal)
    legend = ["(Nx): N units with these figures each"] if folded else []
    if divided:
        legend.append(f"{divided}: parameters of which {size} neighbouring ranks have a part each")
    return [title, *text_table([names, *numbers], width), *legend]


def human_count(count: int) -> str:
    """Return a number of elements as text: exact below 10,000, three digits above.

    Example:
        >>> human_count(9_999), human_count(12_345), human_count(7_077_888)
        ('9,999', '12.3 K', '7.08 M')
    """
    return f"{count:,}" if count < 10_000 else _scaled(count, 1000, ("", "K", "M", "B", "T"))


def human_bytes(nbytes: int) -> str:
    """Return a number of bytes as text, in powers of 1024.

    Example:
        >>> human_bytes(512), human_bytes(28_311_552)
        ('512 B', '27.0 MiB')
    """
    return (
        f"{nbytes} B"
        if nbytes < 1024
        else _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    )


def human_seconds(seconds: float) -> str:
    """Return a duration as text, in seconds, milliseconds or microseconds.

    Example:
        >>> human_seconds(1234.5), human_seconds(0.0123)
        ('1,234 s', '12.3 ms')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds >= 0.1 / factor:
            value = factor * seconds
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
    return f"{1e6 * seconds:.3g} us"


def _scaled(value: float, base: int, suffixes: Sequence[str]) -> str:
    """Return a value with three significant digits and the suffix that keeps it below the base."""
    exponent = 0
    # 999.5 rounds to 1000 of this suffix, which is 1.00 of the next.
    while value >= 999.5 and exponent < len(suffixes) - 1:
        value /= base
        exponent += 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {suffixes[exponent]}".rstrip()


def _figures(row: UnitRow) -> tuple[int, ...]:
    """Return the figures that are equal for units of one row."""
    return astuple(row)[1:]


def _total(rows: Iterable[UnitRow]) -> UnitRow:
    """Return the sum of all units."""
    sums = [sum(column) for column in zip(*map(_figures, rows), strict=True)] or [0] * 6
    return UnitRow("total", *sums)


def _cells(row: UnitRow, any_frozen: bool, divided: str) -> dict[str, str]:
    """Return the figures of one row as text by the heading of their column, in column order.

    ``divided`` is the heading of parameters that ranks divide; empty: they have no column.
    """
    trainable = {"trainable": human_count(row.trainable_numel)} if any_frozen else {}
    parts = {divided: human_count(row.divided_numel)} if divided else {}
    share = _percent(row.padding_numel, row.numel + row.padding_numel)
    return {
        "tensors": f"{row.num_parameters:,}",
        "parameters": human_count(row.numel),
        **trainable,
        **parts,
        "per rank": human_bytes(row.nbytes_per_rank),
        "padding": f"{human_count(row.padding_numel)} ({share})",
    }


def _percent(part: int, whole: int) -> str:
    """Return a share with one decimal; a share that is not zero never reads as zero."""
    if part == 0:
        return "0%"
    share = 100 * part / whole
    return "<0.1%" if share < 0.05 else f"{share:.1f}%"


def folded_name(names: Sequence[str]) -> str:
    """Return one name for equal units that follow each other.

    Example:
        >>> folded_name(["head"]), folded_name(["layers.0", "layers.1", "layers.2"])
        ('head', 'layers.0 ... layers.2 (3x)')
    """
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)}x)"


# -- Messages about a sharded model


def describe_units(sharding_strategy: str, runtime: Runtime) -> str:
    """Return one line with the number of units, mesh, bytes per rank, and dtypes.

    Warns if one unit holds most of the model.
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
    title, width = _title(sharding_strategy, runtime), terminal_width(_NARROWEST)
    experts, layers = runtime.mesh.expert_size, runtime.mesh.topology.tensor_size
    kind, size = ("experts", experts) if experts > 1 else ("split", layers)
    print("\n".join(unit_table(_rows(runtime), title, width, kind=kind, size=size)))


def _rows(runtime: Runtime) -> list[UnitRow]:
    return [unit_row(progress.unit) for progress in runtime.progresses]


def _title(sharding_strategy: str, runtime: Runtime) -> str:
    topology, count = runtime.mesh.topology, len(runtime.progresses)
    ranks = _axes(topology, "tensor")
    if runtime.mesh.experts is not None:
        ranks += f", experts on {_axes(runtime.mesh.experts.topology, 'expert')}"
    title = f"{sharding_strategy}: {count} unit{'s' * (count > 1)} on {ranks}"
    if topology.order is None or topology.replicate_size == 1:
        return title
    return f"{title}, the first of ranks {listed_ranks(topology.shard_groups()[0])}"


def _axes(topology: Topology, tensor_axis: str) -> str:
    """Return the sizes and names of a mesh's axes."""
    axes = {"replicate": topology.replicate_size, "shard": topology.shard_size}
    if topology.tensor_size > 1:
        axes[tensor_axis] = topology.tensor_size
    return f"{' x '.join(map(str, axes.values()))} ranks ({' x '.join(axes)})"


def _describe_dtypes(runtime: Runtime) -> str:
    units = [progress.unit.spec for progress in runtime.progresses]
    specs = [spec for unit in units for spec in (*unit.parameters, *unit.passthrough)]
    used = {
        "kept in": _named(spec.dtype for spec in specs),
        "computed in": _named(spec.param_dtype for spec in specs),
        "reduced in": _named(spec.reduce_dtype for spec in specs if spec.parameter.requires_grad),
    }
    distinct = {dtypes for dtypes in used.values() if dtypes}
    return (
        f"all in {distinct.pop()}"
        if len(distinct) == 1
        else ", ".join(f"{k} {v}" for k, v in used.items() if v)
    )


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))


def unit_row(unit: Unit) -> UnitRow:
    """Return the figures of one unit."""
    costs, specs = unit.costs(), (*unit.spec.parameters, *unit.spec.passthrough)
    numels = [
        (it.parameter.requires_grad, math.prod((it.distribution or it.parameter).shape))
        for it in specs
    ]
    divided = [it.distribution for it in specs if it.distribution and it.distribution.boxes]
    return UnitRow(
        name=unit.label,
        num_parameters=len(numels),
        numel=sum(numel for _, numel in numels),
        trainable_numel=sum(numel for is_trained, numel in numels if is_trained),
        nbytes_per_rank=sum(cost.main_nbytes for cost in costs),
        padding_numel=sum(cost.layout.padding_numel * cost.tensor_size for cost in costs),
        divided_numel=sum(math.prod(it.shape) for it in divided),
    )


# -- Tables and sentences about checkpoints

MAX_DAMAGES = 20
"""Maximum number of damages shown for one checkpoint."""

_NARROW = 100
"""Width in columns; in a narrower terminal the table leaves out the least important columns."""


def inspection_view(
    path: Location, manifest: Manifest, rows: Sequence[Row], width: int, folded: bool
) -> list[str]:
    """Return the lines for a checkpoint: facts, and a table of tensors."""
    hint = "one row per module; --all lists every tensor, --tensors PATTERN some"
    hints = textwrap.wrap(hint, width) if folded else []
    return [*_facts(path, manifest, width), "", *tensor_table(rows, width), *hints]


def verification_view(found: Verification, seconds: float) -> list[str]:
    """Return one line for a good checkpoint; for a damaged one, also a line for each damage."""
    speed = f"{human_bytes(found.nbytes)} in {seconds:.1f} s"
    step = "" if found.step is None else f", step {found.step:,}"
    count = f"{len(found.damages):,} place{'s' * (len(found.damages) > 1)}"
    head = (
        f"good     {found.path} ({speed}{step})"
        if found.good
        else f"DAMAGED  {found.path} ({count}{step})"
    )
    lines = [head, *(f"  {damage}" for damage in found.damages[:MAX_DAMAGES])]
    if len(found.damages) > MAX_DAMAGES:
        lines.append(f"  and {len(found.damages) - MAX_DAMAGES:,} more; --json has them all")
    if found.unchecked:
        lines.append(
            f"  not checked, for it was written without a checksum: {first_three(found.unchecked)}"
        )
    return [printable(line) for line in lines]


_UNCOUNTED = "step 0, epoch 0, or in a loop of one's own that counts in its state (--state)"


def _facts(path: Location, manifest: Manifest, width: int) -> list[str]:
    run = manifest.run
    ranks = f"{run.world_size} rank{'s' * (run.world_size > 1)}"
    files = "one file" if manifest.algorithm == CRC else f"{len(manifest.files) + 1:,} files"
    shards = f", shards over {run.shard_size}" if run.shard_size != run.world_size else ""
    shards += f", layers over {run.tensor_size}" if run.tensor_size > 1 else ""
    shards += f", experts over {run.expert_size}" if run.expert_size > 1 else ""
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    facts = {
        "checkpoint": str(path),
        "saved at": f"step {run.step:,}, epoch {run.epoch:,}"
        if run.step or run.epoch
        else _UNCOUNTED,
        "by": f"{ranks}, {run.sharding_strategy}{shards}",
        "versions": versions,
        "holds": f"{len(manifest.tensors):,} tensors, {human_bytes(manifest.nbytes)}, {files}",
    }
    return [
        line
        for name, fact in facts.items()
        for line in textwrap.wrap(
            f"{name:<12}{printable(fact)}",
            width,
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
    ]


def tensor_table(rows: Sequence[Row], width: int) -> list[str]:
    """Return the lines of a table with a row for each tensor or module."""
    together = total(rows)
    names = [
        Column(heading="tensor", cells=[_name(r) for r in rows], footer="total", is_number=False),
        Column(
            heading="shape",
            cells=[_shape(r) for r in rows],
            footer=f"{together.num_tensors:,} tensors",
            is_number=False,
        ),
        Column(
            heading="dtype",
            cells=[", ".join(r.dtypes) for r in rows],
            footer="",
            is_number=False,
        ),
    ]
    figures = [
        Column(
            heading="elements",
            cells=[human_count(r.numel) for r in rows],
            footer=human_count(together.numel),
        ),
        Column(
            heading="parts",
            cells=[f"{r.num_parts:,}" for r in rows],
            footer=f"{together.num_parts:,}",
        ),
    ]
    size = Column(
        heading="size",
        cells=["tied" if r.same_as else human_bytes(r.nbytes) for r in rows],
        footer=human_bytes(together.nbytes),
    )
    return text_table([*names, *(figures if width >= _NARROW else []), size], width)


def _name(row: Row) -> str:
    return printable(f"{row.name} (is {row.same_as})" if row.same_as else row.name)


def _shape(row: Row) -> str:
    if row.shape is None:
        return f"{row.num_tensors:,} tensors"
    return " x ".join(map(str, row.shape)) or "scalar"
