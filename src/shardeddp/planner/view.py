"""Views of plans and of runs: a table for a terminal, and an HTML page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape

from shardeddp.charts import bar, page, rows, treemap
from shardeddp.plan.hardware import GIB, GPUS, Cluster
from shardeddp.planner.calibration import TIME_ERROR, Calibration, Recorded
from shardeddp.planner.cost import FITTED
from shardeddp.planner.search import MEMORY_ERROR, Planned
from shardeddp.report import Column, human_bytes, human_seconds, text_table


def plan_lines(
    plans: Sequence[Planned],
    cluster: Cluster,
    name: str,
    calibrated: Sequence[str],
    notes: Mapping[str, str],
    top: int,
    width: int,
) -> list[str]:
    """Format a table of the best plans, with the number that fits, calibration and notes."""
    # File names are not broken.
    wrapped = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    measured = f", without measurements {100 * TIME_ERROR:.0f} %" if calibrated else ""
    fitting = sum(plan.fits for plan in plans)
    gpu, shown = cluster.gpu, plans[:top]
    axes = [it for it in _AXES if any(size != "1" for size in _sizes(plans, it))]
    columns = [
        Column(
            heading="strategy / ranks",
            cells=[f"{it.choice.strategy} / {it.choice.shard_size}" for it in shown],
            footer=f"{fitting:,} of {len(plans):,} fit",
            is_number=False,
        ),
        Column(
            heading="recompute, offload, precision",
            cells=[_options(it) for it in shown],
            footer="",
            is_number=False,
        ),
        *(_numbers(it, _sizes(shown, it)) for it in axes),
        _numbers("batch", [_batch(it) for it in shown]),
        _numbers("GiB", [f"{it.memory.peak / GIB:.1f}" for it in shown]),
        _numbers("step", [human_seconds(it.step.total) for it in shown]),
        _numbers(f"{shown[0].counted}/s", [f"{it.tokens_per_second:,.0f}" for it in shown]),
        _numbers("MFU", [f"{100 * it.mfu:.1f} %" for it in shown]),
    ]
    lines = [
        f"{name} on {cluster.count} x {gpu.name} ({cluster.num_nodes} x {cluster.ranks_per_node})",
        *text_table(columns, width),
        f"GiB: peak of a GPU of {gpu.memory_gb * 1e9 / GIB:.1f} GiB, within "
        f"{100 * MEMORY_ERROR:.0f} %. Time of the first: within "
        f"{100 * shown[0].relative_error:.0f} %{measured}.",
        *(line for text in calibrated for line in wrapped.wrap(text)),
    ]
    for axis in axes:
        lines += wrapped.wrap(
            f"{axis}: neighbouring ranks that {_AXES[axis][1]}. {notes.get(axis, '')}"
        )
    for kind in ("", "unplanned"):
        lines += wrapped.wrap(notes.get(kind, ""))
    if cluster.num_nodes > 1 and cluster.network_gbits is None:
        taken = gpu.network_gbits * FITTED.network_unstated
        lines.append(
            f"The network is not known: {taken:.0f} Gbit/s for each GPU is taken (--network)."
        )
    if not fitting:
        lines.append("Nothing fits; this comes nearest. More GPUs, a shorter --length, --offload")
        lines.append("params or a smaller --micro-batch may.")
    return lines


_AXES = {
    "TP": ("tensor_parallel_size", "split each layer"),
    "EP": ("expert_parallel_size", "have different experts"),
}


def _sizes(plans: Sequence[Planned], axis: str) -> list[str]:
    return [str(vars(it.choice)[_AXES[axis][0]]) for it in plans]


def _numbers(heading: str, cells: Sequence[str]) -> Column:
    return Column(heading=heading, cells=cells, footer="")


def _options(plan: Planned) -> str:
    choice = plan.choice
    parts = [choice.recompute] if choice.recompute != "none" else []
    if choice.offload != "none":
        parts.append(f"{choice.offload} offloaded ({plan.memory.host / GIB:.1f} GiB)")
    return ", ".join([*parts, choice.precision])


def _batch(plan: Planned) -> str:
    times = f" x {plan.choice.micro_batches}" if plan.choice.micro_batches > 1 else ""
    return f"{plan.choice.micro_batch}{times}"


def picture(plan: Planned, cluster: Cluster, name: str, configuration: str) -> str:
    """Make the HTML page of a plan: memory as a treemap, the step as a bar, the YAML to copy."""
    room = cluster.gpu.memory_gb * 1e9
    free = {"": max(0, int(room - plan.memory.peak))}
    choice = plan.choice
    split, experts = choice.tensor_parallel_size, choice.expert_parallel_size
    facts = (
        f"{choice.strategy} over {choice.shard_size} ranks; "
        f"{f'layers split over {split} ranks; ' if split > 1 else ''}"
        f"{f'experts divided among {experts} ranks; ' if experts > 1 else ''}"
        f"recompute: {choice.recompute}; "
        f"offload: {choice.offload}; micro-batch {_batch(plan)}; {choice.precision}"
    )
    step = plan.step
    return page(
        f"{name} on {cluster.count} x {cluster.gpu.name}",
        facts,
        [
            f"<h2>Memory of a GPU: {plan.memory.peak / GIB:.1f} GiB of {room / GIB:.1f} GiB</h2>",
            treemap({**plan.memory_by_unit, "free": free}, 900, 400),
            f"<h2>A step: {human_seconds(step.total)}, {plan.tokens_per_second:,.0f} {plan.counted}/s, "
            f"MFU {100 * plan.mfu:.1f} %</h2>",
            bar(vars(step), 900),
            f"<h2>Configuration</h2><pre>{escape(configuration)}</pre>",
        ],
    )


def run_page(run: Recorded, calibration: Calibration) -> str:
    """Make the HTML page of a run: measured and planned parts of a step, waits by unit, memory."""
    seconds, device = sum(run.parts.values()), run.device
    planned = run.planned(calibration)
    longest = seconds if planned is None else max(seconds, planned[0].total)
    figures = {
        name.removeprefix("shardeddp/"): value
        for name, value in run.figures.items()
        if "step/" not in name
    }
    sections = [
        f"<h2>A step: {human_seconds(seconds)}</h2>",
        bar(run.parts, 900 * seconds / longest),
    ]
    if planned is None:
        sections.append(
            f"<p>The planner has no figures of {escape(device.name)}: --calibrate takes those of "
            f"`shardeddp probe` on the same machine.</p>"
        )
    else:
        step, _ = planned
        sections.append(f"<h2>As planned: {human_seconds(step.total)}</h2>")
        sections.append(bar(vars(step), 900 * step.total / longest))
        sections += [f"<p>{escape(line)}</p>" for line in calibration.lines]
    for kind, waits in (("gather", run.gathers), ("reduction", run.reductions)):
        if any(waits.values()):
            sections += [f"<h2>Waiting for {kind}s, by unit</h2>", rows(kind, waits, 900)]
    elsewhere = {"host"} if device.name in GPUS else {"host", "context"}  # CUDA's
    memory = {key: {"": int(value)} for key, value in run.memory.items() if key not in elsewhere}
    total = sum(it[""] for it in memory.values())
    sections += [
        f"<h2>Memory as planned: {human_bytes(total)}</h2>",
        treemap(memory, 900, 300),
        "<h2>Figures</h2><table>",
        *(
            f"<tr><td>{escape(it)}</td><td>{_figure(it, value)}</td></tr>"
            for it, value in figures.items()
        ),
        "</table>",
    ]
    facts = f"{device.ranks} x {device.name}; rank 0, mean of {run.steps:,} steps"
    return page(run.name, facts, sections)


def _figure(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return human_bytes(int(value))
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:.3g} TFLOP/s"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
