"""Views of plans and of runs: a table for a terminal, and pictures of memory and time as HTML with SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape

from shardeddp.plan.hardware import GIB, GPUS, Cluster
from shardeddp.planner.calibration import TIME_ERROR, Calibration, Recorded
from shardeddp.planner.cost import FITTED
from shardeddp.planner.search import MEMORY_ERROR, Planned
from shardeddp.report import Column, human_bytes, human_seconds, text_table

_COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#72a0c8",
    "optimizer": "#9ebcda",
    "buffers": "#c5d6e8",
    "in_flight": "#f58518",
    "activations": "#54a24b",
    "logits": "#88d27a",
    "slack": "#bab0ac",
    "context": "#8c8580",
    "compute": "#54a24b",
    "recompute": "#88d27a",
    "gathers": "#f58518",
    "reductions": "#ffbf79",
    "launch": "#bab0ac",
    "exchanges": "#e45756",
    "gather": "#f58518",
    "reduction": "#ffbf79",
    "ranks": "#e45756",
    "data": "#b279a2",
    "checkpoint": "#72b7b2",
    "rest": "#d8d5d0",
}
_LABELS = {"in_flight": "units in flight"}


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
    lines += wrapped.wrap(notes.get("", ""))
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
    memory = {key: value for key, value in vars(plan.memory).items() if key != "host"}
    room = cluster.gpu.memory_gb * 1e9
    memory["free"] = max(0, int(room - plan.memory.peak))
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
    return "\n".join(
        [
            *_head(f"{name} on {cluster.count} x {cluster.gpu.name}", facts),
            f"<h2>Memory of a GPU: {plan.memory.peak / GIB:.1f} GiB of {room / GIB:.1f} GiB</h2>",
            _treemap(memory, 900, 300),
            f"<h2>A step: {human_seconds(step.total)}, {plan.tokens_per_second:,.0f} {plan.counted}/s, "
            f"MFU {100 * plan.mfu:.1f} %</h2>",
            _bar(vars(step), 900),
            f"<h2>Configuration</h2><pre>{escape(configuration)}</pre>",
        ]
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
        *_head(run.name, f"{device.ranks} x {device.name}; rank 0, mean of {run.steps:,} steps"),
        f"<h2>A step: {human_seconds(seconds)}</h2>",
        _bar(run.parts, 900 * seconds / longest),
    ]
    if planned is None:
        sections.append(
            f"<p>The planner has no figures of {escape(device.name)}: --calibrate takes those of "
            f"`shardeddp probe` on the same machine.</p>"
        )
    else:
        step, _ = planned
        sections.append(f"<h2>As planned: {human_seconds(step.total)}</h2>")
        sections.append(_bar(vars(step), 900 * step.total / longest))
        sections += [f"<p>{escape(line)}</p>" for line in calibration.lines]
    for kind, waits in (("gather", run.gathers), ("reduction", run.reductions)):
        if any(waits.values()):
            sections += [f"<h2>Waiting for {kind}s, by unit</h2>", _rows(kind, waits, 900)]
    elsewhere = {"host"} if device.name in GPUS else {"host", "context"}  # CUDA's
    memory = {key: int(value) for key, value in run.memory.items() if key not in elsewhere}
    sections += [
        f"<h2>Memory as planned: {human_bytes(sum(memory.values()))}</h2>",
        _treemap(memory, 900, 300),
        "<h2>Figures</h2><table>",
        *(
            f"<tr><td>{escape(it)}</td><td>{_figure(it, value)}</td></tr>"
            for it, value in figures.items()
        ),
        "</table>",
    ]
    return "\n".join(sections)


def _head(title: str, facts: str) -> list[str]:
    return [
        "<!doctype html><meta charset='utf-8'>",
        f"<title>{escape(title)}</title>",
        "<style>body{font:15px system-ui,sans-serif;margin:32px;max-width:900px;color:#222}"
        "h1{font-size:22px;margin:0}h2{font-size:16px;margin:28px 0 8px}td{padding-right:24px}"
        "pre{background:#f4f4f2;padding:12px}svg{display:block}"
        ".legend span{margin-right:16px;white-space:nowrap}"
        ".legend i{display:inline-block;width:11px;height:11px;margin-right:5px}</style>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(facts)}</p>",
    ]


_MOST_ROWS = 40


def _rows(kind: str, parts: Mapping[str, float], width: float) -> str:
    """Draw a bar for each part, the largest first."""
    most = sorted(parts, key=lambda it: -parts[it])[:_MOST_ROWS]
    drawn = "".join(
        f"<rect x='0' y='{22 * place}' width='{0.5 * width * parts[it] / parts[most[0]]:.1f}' "
        f"height='18' fill='{_COLOURS[kind]}'/><text x='{0.52 * width}' y='{22 * place + 14}' "
        f"font-size='13'>{escape(it)} {human_seconds(parts[it])}</text>"
        for place, it in enumerate(most)
    )
    return f"<svg width='{width}' height='{22 * len(most)}'>{drawn}</svg>"


def _treemap(parts: dict[str, int], width: float, height: float) -> str:
    """Draw rectangles with areas equal to the parts, by recursive splits into similar halves."""
    items = sorted(((v, k) for k, v in parts.items() if v > 0), reverse=True)
    drawn: list[str] = []

    def place(items: Sequence[tuple[int, str]], x: float, y: float, w: float, h: float) -> None:
        if len(items) == 1:
            value, key = items[0]
            drawn.append(_cell(key, human_bytes(int(value)), x, y, w, h))
            return
        total = sum(value for value, _ in items)
        cut = min(
            range(1, len(items)),
            key=lambda it: abs(2 * sum(value for value, _ in items[:it]) - total),
        )
        share = sum(value for value, _ in items[:cut]) / total
        if w > h:
            place(items[:cut], x, y, w * share, h)
            place(items[cut:], x + w * share, y, w * (1 - share), h)
        else:
            place(items[:cut], x, y, w, h * share)
            place(items[cut:], x, y + h * share, w, h * (1 - share))

    if items:
        place(items, 0, 0, width, height)
    legend = _legend({key: human_bytes(int(value)) for value, key in items})
    return f"<svg width='{width}' height='{height}'>{''.join(drawn)}</svg>{legend}"


def _bar(parts: Mapping[str, float], width: float) -> str:
    total, x = sum(parts.values()), 0.0
    drawn: list[str] = []
    legend: dict[str, str] = {}
    for key, value in parts.items():
        if not value:
            continue
        size = width * value / total
        share = f"{100 * value / total:.1f} %"
        drawn.append(_cell(key, share, x, 0, size, 56))
        legend[key] = f"{human_seconds(value)} ({share})"
        x += size
    return f"<svg width='{width:.1f}' height='56'>{''.join(drawn)}</svg>{_legend(legend)}"


def _legend(texts: Mapping[str, str]) -> str:
    """Draw a legend: colour and name of each part, and a text."""
    parts = "\n".join(
        f"<span><i style='background:{_colour(key)}'></i>{escape(_LABELS.get(key, key))} {text}</span>"
        for key, text in texts.items()
    )
    return f"<p class='legend'>{parts}</p>"


def _figure(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return human_bytes(int(value))
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:.3g} TFLOP/s"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _colour(key: str) -> str:
    return _COLOURS.get(key, "#f2f1ee")


def _cell(key: str, text: str, x: float, y: float, w: float, h: float) -> str:
    label = escape(_LABELS.get(key, key))
    cell = (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{w:.1f}' height='{h:.1f}' fill='{_colour(key)}' "
        f"stroke='white' stroke-width='2'><title>{label}: {text}</title></rect>"
    )
    if w > 8 * max(len(label), len(text)) + 8 and h > 40:
        lines = ((0, "600", label), (17, "400", text))
        cell += "".join(
            f"<text x='{x + 8:.1f}' y='{y + 20 + down:.1f}' font-size='13' font-weight='{weight}'>"
            f"{line}</text>"
            for down, weight, line in lines
        )
    return cell
