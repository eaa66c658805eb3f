"""Charts of memory and time: HTML pages with SVG that need no other file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import accumulate
from typing import TypeAlias

from shardeddp.report import human_bytes, human_seconds

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


def page(title: str, facts: str, sections: Iterable[str]) -> str:
    """Make an HTML page with a title, a line of facts and sections of HTML."""
    return "\n".join(
        [
            "<!doctype html><meta charset='utf-8'>",
            f"<title>{escape(title)}</title>",
            "<style>body{font:15px system-ui,sans-serif;margin:32px;max-width:900px;color:#222}"
            "h1{font-size:22px;margin:0}h2{font-size:16px;margin:28px 0 8px}td{padding-right:24px}"
            "pre{background:#f4f4f2;padding:12px;white-space:pre-wrap}svg{display:block}"
            ".legend span{margin-right:16px;white-space:nowrap}"
            ".legend i{display:inline-block;width:11px;height:11px;margin-right:5px}</style>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(facts)}</p>",
            *sections,
        ]
    )


def treemap(memory: Mapping[str, Mapping[str, int]], width: float, height: float) -> str:
    """Draw bytes by kind and unit: a rectangle for each, with an area equal to its bytes.

    A kind without units has one part with an empty name. Kinds are rectangles that are divided
    among their units.
    """
    drawn: list[str] = []
    totals = {kind: sum(parts.values()) for kind, parts in memory.items()}
    for kind, box in _divided(totals, (0, 0, width, height)):
        parts = memory[kind]
        names = [*parts] if any(parts.values()) else []
        for name, inner in _divided({it: parts[it] for it in names}, box):
            label = f"{_label(kind)}, {name}" if name else _label(kind)
            text = human_bytes(parts[name])
            drawn.append(_cell(kind, label, name or _label(kind), text, inner))
        x, y, w, h = box
        drawn.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{w:.1f}' height='{h:.1f}' fill='none' "
            f"stroke='white' stroke-width='4'/>"
        )
    order = sorted((it for it in totals if totals[it] > 0), key=lambda it: -totals[it])
    legend = _legend({kind: human_bytes(totals[kind]) for kind in order})
    return f"<svg width='{width}' height='{height}'>{''.join(drawn)}</svg>{legend}"


_Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, width and height in pixels."""


def _divided(parts: Mapping[str, int], box: _Box) -> Iterator[tuple[str, _Box]]:
    """Divide a rectangle among the parts above zero, by splits into similar halves."""
    items = [(value, key) for key, value in parts.items() if value > 0]
    items.sort(key=lambda it: -it[0])  # equal ones stay in their order
    waiting = [(items, box)] if items else []
    while waiting:
        items, (x, y, w, h) = waiting.pop()
        if len(items) == 1:
            yield items[0][1], (x, y, w, h)
            continue
        sums = [*accumulate(value for value, _ in items)]
        cut = min(range(1, len(items)), key=lambda it: abs(2 * sums[it - 1] - sums[-1]))
        share = sums[cut - 1] / sums[-1]
        if w > h:
            halves = (x, y, w * share, h), (x + w * share, y, w * (1 - share), h)
        else:
            halves = (x, y, w, h * share), (x, y + h * share, w, h * (1 - share))
        waiting += [(items[cut:], halves[1]), (items[:cut], halves[0])]


def bar(parts: Mapping[str, float], width: float) -> str:
    """Draw seconds by part as one bar."""
    total, x = sum(parts.values()), 0.0
    drawn: list[str] = []
    legend: dict[str, str] = {}
    for key, value in parts.items():
        if not value:
            continue
        size = width * value / total
        share = f"{100 * value / total:.1f} %"
        drawn.append(_cell(key, _label(key), _label(key), share, (x, 0, size, 56)))
        legend[key] = f"{human_seconds(value)} ({share})"
        x += size
    return f"<svg width='{width:.1f}' height='56'>{''.join(drawn)}</svg>{_legend(legend)}"


_MOST_ROWS = 40


def rows(kind: str, parts: Mapping[str, float], width: float) -> str:
    """Draw a bar of seconds for each part, the largest first."""
    most = sorted(parts, key=lambda it: -parts[it])[:_MOST_ROWS]
    drawn = "".join(
        f"<rect x='0' y='{22 * place}' width='{0.5 * width * parts[it] / parts[most[0]]:.1f}' "
        f"height='18' fill='{_COLOURS[kind]}'/><text x='{0.52 * width}' y='{22 * place + 14}' "
        f"font-size='13'>{escape(it)} {human_seconds(parts[it])}</text>"
        for place, it in enumerate(most)
    )
    return f"<svg width='{width}' height='{22 * len(most)}'>{drawn}</svg>"


def _legend(texts: Mapping[str, str]) -> str:
    """Draw a legend: colour and name of each part, and a text."""
    parts = "\n".join(
        f"<span><i style='background:{_colour(key)}'></i>{escape(_label(key))} {text}</span>"
        for key, text in texts.items()
    )
    return f"<p class='legend'>{parts}</p>"


def _colour(key: str) -> str:
    return _COLOURS.get(key, "#f2f1ee")


def _label(key: str) -> str:
    return _LABELS.get(key, key)


def _cell(key: str, title: str, name: str, text: str, box: _Box) -> str:
    """Draw a rectangle in the colour of a kind; name and text are in it if they fit."""
    x, y, w, h = box
    cell = (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{w:.1f}' height='{h:.1f}' fill='{_colour(key)}' "
        f"stroke='white' stroke-width='1'><title>{escape(title)}: {text}</title></rect>"
    )
    if w > 7.6 * max(len(name), len(text)) + 10 and h > 40:
        lines = ((0, "600", escape(name)), (17, "400", text))
        cell += "".join(
            f"<text x='{x + 8:.1f}' y='{y + 20 + down:.1f}' font-size='13' font-weight='{weight}'>"
            f"{line}</text>"
            for down, weight, line in lines
        )
    return cell
