"""Step report: times of the steps of a rank, by part, beside the plan; for loggers and terminals."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardeddp.planner.cost import Step, Task
from shardeddp.planner.memory import Memory
from shardeddp.planner.search import Choice, Planned
from shardeddp.report import Column, human_bytes, human_count, text_table

_PREDICTED = {
    "compute": ("compute", "recompute", "launch"),
    "gather": ("gathers",),
    "reduction": ("reductions",),
    "optimizer": ("optimizer",),
}
_NAMES = {
    "gather": "waiting for gathers",
    "reduction": "waiting for reductions",
    "ranks": "waiting for slower ranks",
}
_MOST_UNITS = 3


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """Figures of the plan of a run's own settings; see :class:`Planned`."""

    choice: Choice
    memory: Memory
    step: Step
    task: Task
    model_flops: float
    peak_flops: float

    @staticmethod
    def of(plan: Planned) -> PlannedStep:
        """Return the figures of a plan, without the model."""
        return PlannedStep(**{it.name: getattr(plan, it.name) for it in fields(PlannedStep)})


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Mean times and rates of the steps of one rank."""

    rank: int
    steps: int
    parts: Mapping[str, float]
    """Seconds by part; they sum to the step time."""
    units: Mapping[tuple[str, str], float]
    """Seconds of gathers and reductions by part and unit; included in ``parts``."""
    samples_per_s: float
    """Samples per second of all ranks."""
    tokens_per_s: float | None
    """Tokens per second of all ranks; None if samples are not sequences."""
    model_flops_per_s: float | None
    """Model FLOP/s per rank, without recomputation; None: unknown."""
    peak_flops_per_s: float | None
    """Dense peak of the device in FLOP/s; None: unknown."""
    memory_nbytes: int | None
    """Peak of allocated device memory; None: unknown."""
    sent_nbytes: int
    """Bytes that a rank sends per step."""
    expected: PlannedStep | None
    """Prediction of the planner; None for unknown devices."""
    note: str
    """Reason why the MFU is unknown."""
    unplanned: str = ""
    """Settings that the prediction does not know."""

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return sum(self.parts.values())

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, as a fraction of the dense peak."""
        if self.model_flops_per_s is None or self.peak_flops_per_s is None:
            return None
        return self.model_flops_per_s / self.peak_flops_per_s

    @property
    def throughput(self) -> tuple[str, float]:
        """Name and value of the throughput: tokens or samples per second."""
        if self.tokens_per_s is None:
            return "samples/s", self.samples_per_s
        return "tokens/s", self.tokens_per_s

    def metrics(self) -> dict[str, float]:
        """Return the known figures by their names in loggers."""
        figures = {
            "step/total_s": self.seconds,
            **{f"step/{part}_s": seconds for part, seconds in self.parts.items()},
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "model_flops_per_s": self.model_flops_per_s,
            "mfu": self.mfu,
            "memory_bytes": self.memory_nbytes,
            "sent_bytes": self.sent_nbytes,
        }
        return {
            f"shardeddp/{name}": float(figure)
            for name, figure in figures.items()
            if figure is not None
        }


def step_lines(report: StepReport, width: int) -> list[str]:
    """Format a table of the step's parts, the units with the longest waits, and the throughput."""
    expected = None if report.expected is None else vars(report.expected.step)
    rows: list[tuple[str, float, float | None]] = []
    for part, seconds in report.parts.items():
        names = _PREDICTED.get(part, ())
        predicted = sum(expected[name] for name in names) if expected and names else None
        rows.append((_NAMES.get(part, part), seconds, predicted))
        units = {unit: took for (its, unit), took in report.units.items() if its == part}
        most = sorted(units, key=lambda unit: -units[unit])[:_MOST_UNITS]
        rows += [(f"- {unit}", units[unit], None) for unit in most if units[unit] > 0]
    whole = report.seconds
    columns = [
        Column(heading="part", cells=[row[0] for row in rows], footer="step", is_number=False),
        Column(heading="ms", cells=[_ms(row[1]) for row in rows], footer=_ms(whole)),
        Column(heading="share", cells=[_share(row[1] / whole) for row in rows], footer="100.0 %"),
    ]
    if expected is not None:
        cells = ["" if row[2] is None else _ms(row[2]) for row in rows]
        columns.append(Column(heading="predicted", cells=cells, footer=_ms(sum(expected.values()))))
    title = f"Steps of rank {report.rank}: mean of {report.steps:,}"
    return [title, *text_table(columns, width), *_speed_lines(report, width)]


def _speed_lines(report: StepReport, width: int) -> list[str]:
    name, rate = report.throughput
    said = [f"{rate:,.4g} {name}"]
    if report.model_flops_per_s is not None:
        said.append(f"{human_count(round(report.model_flops_per_s))} model FLOP/s per rank")
    said.append("MFU not known" if report.mfu is None else f"MFU {_share(report.mfu)}")
    said.append(f"{human_bytes(report.sent_nbytes)} sent per step")
    if report.memory_nbytes is not None:
        peak = f"{human_bytes(report.memory_nbytes)} at the peak"
        planned = report.expected and human_bytes(report.expected.memory.peak)
        said.append(f"{peak} ({planned} planned)" if planned else peak)
    lines = [", ".join(said), *([f"MFU: {report.note}"] if report.note else [])]
    if report.expected is not None and report.unplanned:
        lines.append(f"The prediction does not know {report.unplanned}")
    return [line for each in lines for line in textwrap.wrap(each, width)]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"
