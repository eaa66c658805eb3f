"""Calibration: constants of the cost model from what a probe or a recorded run has measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import torch

from shardeddp.errors import ConfigurationError
from shardeddp.plan.hardware import GPU, GPUS, Cluster, find_gpu, gpu_of_device, name_of_gpu
from shardeddp.planner.collectives import Collective
from shardeddp.planner.cost import (
    BACKWARD_ATTENTION,
    FITTED,
    Constants,
    Step,
    StepSetting,
    time_of_work,
)
from shardeddp.planner.trace import Work

VERSION = 2
"""Of the files; another one is refused."""
TIME_INTERVAL = 0.15
"""Share of a predicted time within which runs lie that the constants were not fitted to (p90)."""
PROBED, RECORDED = 0.10, 0.15
"""The same of parts of a step that a probe, or a run, has measured on the machines of the plan."""
_COMPUTE, _NETWORK = ("compute", "recompute", "launch"), ("gathers", "reductions")
_MOST = 1e4
"""Times by which a run may differ from what was planned."""

# -- What is measured, as files have it


@dataclass(frozen=True, kw_only=True)
class Device:
    """What was measured on."""

    name: str
    """That of the planner's table where it has the device."""
    threads: int
    """Of a rank that computes on the host; 1 elsewhere."""
    memory_gb: float
    """Of a rank, in units of 10**9 bytes."""
    ranks: int
    per_node: int

    @classmethod
    def of(cls, device: torch.device, ranks: int, per_node: int) -> Device:
        """The device of this rank."""
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            name = gpu_of_device(found.name, found.total_memory) or found.name
            threads, memory = 1, found.total_memory
        else:
            name, threads = device.type.upper(), torch.get_num_threads()
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
        return cls(
            name=name, threads=threads, memory_gb=memory / 1e9, ranks=ranks, per_node=per_node
        )


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Work that was timed."""

    label: str
    dtype: str
    """``fp32`` or ``bf16``."""
    work: Work
    """Of the forward."""
    seconds: float
    backward_s: float = 0.0
    """0: there was none."""


@dataclass(frozen=True, kw_only=True)
class TimedCollective:
    """A collective that was timed, of ranks that are neighbours."""

    kind: str
    ranks: int
    nbytes: int
    """Of the whole buffer."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe has measured; seconds are those of the slowest rank."""

    device: Device
    compute: Sequence[Timed]
    host: Timed
    """A step so small that the device waits for the host."""
    memory_gbs: float
    """Read and written by a copy."""
    optimizer_gbs: float
    """The same by a step of AdamW."""
    micro_batch_s: float
    """Of loops and hooks, beside work and collectives."""
    step_s: float
    """The same of an optimizer step, without its micro-batches'."""
    collective_s: float
    """The same of each collective, beside its transfer; 0 of a single rank."""
    spread: float
    """Share by which repetitions are slower than the fastest: how busy the machine is otherwise."""
    collectives: Sequence[TimedCollective] = ()
    """None of a single rank."""
    interference: Mapping[str, float] = field(default_factory=dict[str, float])
    """By kind, seconds that a collective costs computing beside it, per second of its own."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the time of a step is computed from, beside machines and constants."""

    work: Work
    """Of a micro-batch."""
    inner: Work
    """What of it is done by the units but the root."""
    collectives: Sequence[Collective]
    setting: StepSetting

    def time(self, cluster: Cluster, constants: Constants) -> Step:
        """The time of one optimizer step."""
        return time_of_work(
            self.work, self.inner, self.collectives, cluster, self.setting, constants
        )


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the steps of a run took on rank 0: means in seconds."""

    name: str
    """Of the model, and how it was trained."""
    device: Device
    steps: int
    parts: Mapping[str, float]
    """They sum to the step."""
    gathers: Mapping[str, float]
    """Of them, waits for gathers by unit."""
    reductions: Mapping[str, float]
    figures: Mapping[str, float]
    """As loggers get them."""
    memory: Mapping[str, float]
    """Bytes by kind, as planned."""
    task: Task

    @property
    def compute(self) -> float:
        """With what loops and hooks take."""
        return self.parts["compute"] + self.parts["rest"]

    def planned(self, calibration: Calibration) -> tuple[Step, Cluster] | None:
        """The step as it is planned; None: the planner has no figures of the device."""
        name, figures = self.device.name, dict(calibration.figures)
        if not figures and name not in GPUS:
            return None
        if self.device.ranks == 1 and figures:
            figures.setdefault("link_gbs", 1.0)  # which nothing uses
        cluster = Cluster(
            gpu=find_gpu(name, **figures),
            count=self.device.ranks,
            per_node=self.device.per_node,
            network_gbits=calibration.network_gbits,
        )
        return self.task.time(cluster, calibration.constants), cluster


def write(path: Path, measured: Probe | Recorded) -> None:
    """Write a file that :func:`calibrate` reads."""
    head = {"shardeddp": type(measured).__name__.lower(), "version": VERSION}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, **asdict(measured)}, indent=1) + "\n")


# -- Reading of files

_POSITIVE = {
    *("seconds", "memory_gb", "memory_gbs", "optimizer_gbs"),
    *("ranks", "per_node", "threads", "steps"),
}
"""Figures that are above 0; all others are at least 0."""


def read(path: Path) -> Probe | Recorded:
    """What a file has, checked.

    Raises:
        ConfigurationError: It is no such file, of another version, or has figures that nothing can
            have measured.
    """
    wanted = "a file of `shardeddp probe` or StepMonitor(record=...)"
    try:
        document: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{path}: expected {wanted}, found no JSON ({error})") from None
    kinds = {"probe": Probe, "recorded": Recorded}
    name = document.pop("shardeddp", None) if isinstance(document, dict) else None
    if name not in kinds:
        raise ConfigurationError(f"{path}: expected {wanted}, found other JSON")
    version = document.pop("version", None)
    if version != VERSION:
        raise ConfigurationError(
            f"{path}: another version of shardeddp has written it (format {version}, this one reads "
            f"{VERSION}); measure again"
        )
    measured = _parsed(kinds[name], document, f"{path}")
    if isinstance(measured, Recorded):
        missing = {"compute", "gather", "reduction", "optimizer", "rest"} - measured.parts.keys()
        if missing or not measured.compute:
            raise ConfigurationError(
                f"{path}: parts: {', '.join(sorted(missing)) or 'compute'} missing, or 0"
            )
    return measured


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """A value of a type, from JSON."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _parsed(inner[0], value, where)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ConfigurationError(f"{where}: expected {', '.join(hints)}, found {_short(value)}")
        made = {key: _parsed(hint, value[key], f"{where}: {key}") for key, hint in hints.items()}
        for key in made.keys() & _POSITIVE:
            if isinstance(made[key], (int, float)) and made[key] <= 0:
                raise ConfigurationError(f"{where}: {key} is {made[key]}, expected more than 0")
        return cast(Any, kind)(**made)
    if origin is Mapping and isinstance(value, dict):
        return {key: _parsed(inner[1], it, f"{where}: {key}") for key, it in value.items()}
    if origin in (Sequence, tuple) and isinstance(value, list):
        found = cast("list[Any]", value)
        made = [_parsed(inner[0], it, f"{where}[{index}]") for index, it in enumerate(found)]
        if origin is tuple and len(made) != len(inner):
            raise ConfigurationError(f"{where}: expected {len(inner)} values, found {len(made)}")
        return tuple(made) if origin is tuple else made
    number = not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))
    if kind in (int, float) and number and math.isfinite(value) and value >= 0:
        return value
    if (origin is Literal and value in inner) or (kind in (bool, str) and type(value) is kind):
        return value
    wanted = "a finite number of at least 0" if kind in (int, float) else "something else"
    raise ConfigurationError(f"{where}: expected {wanted}, found {_short(value)}")


def _short(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, dict) else repr(value)[:80]


# -- Constants from figures


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants, and what of them was measured on the machines of a plan; by default nothing."""

    constants: Constants = FITTED
    device: Device | None = None
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the device, for :func:`find_gpu`, where the planner's table does not have it."""
    network_gbits: float | None = None
    """Of a GPU between nodes; what was measured of it is as much as collectives reach."""
    intervals: Mapping[str, float] = field(default_factory=dict[str, float])
    """By part of a step that was measured, the share within which its time lies."""
    lines: Sequence[str] = ()
    """What was calibrated with what."""

    def interval(self, step: Step) -> float:
        """Share of a step's predicted time within which it lies."""
        parts = vars(step).items()
        weighted = sum(took * self.intervals.get(name, TIME_INTERVAL) for name, took in parts)
        return weighted / step.total


def calibrate(
    paths: Sequence[Path], gpu: str | None = None, network_gbits: float | None = None
) -> Calibration:
    """Constants from files: those of a probe, and then those of a run, of each the last.

    Args:
        paths: Files of ``shardeddp probe`` and of ``StepMonitor(record=...)``.
        gpu: That the plan is for; None: the one that was measured.
        network_gbits: What the plan says of the network between nodes.

    Raises:
        ConfigurationError: A file cannot be read, or is of another device.
    """
    result = Calibration(network_gbits=network_gbits)
    found = [(read(Path(it)), it) for it in paths]
    for measured, path in sorted(found, key=lambda it: isinstance(it[0], Recorded)):
        name = measured.device.name
        wanted = name_of_gpu(gpu or (result.device.name if result.device else name))
        if wanted != name_of_gpu(name):
            raise ConfigurationError(
                f"{path} was measured on {name}, and the plan is for {wanted}: leave the file out, "
                f"or plan for {name}"
            )
        if isinstance(measured, Probe):
            result = _of_probe(measured, path, network_gbits)
        else:
            result = _of_run(measured, path, result)
    return result


def _of_probe(probe: Probe, path: Path, network_gbits: float | None) -> Calibration:
    device, found = probe.device, GPUS.get(probe.device.name)
    best = {"fp32": 0.0, "bf16": 0.0}
    for it in probe.compute:
        if it.label == "matmul" and it.dtype in best:
            rate = it.work.matmul_flops / it.seconds / 1e12
            best[it.dtype] = max(best[it.dtype], rate)
    main = "bf16" if found else "fp32"
    rows = [it for it in probe.compute if it.dtype == main]
    if not all(best.values()) or not any(it.backward_s for it in rows):
        raise ConfigurationError(f"{path}: compute lacks matmuls of fp32 and bf16, or whole steps")
    figures: dict[str, float] = {}
    if found is None:  # what was measured is all that there is
        figures = {
            "bf16_tflops": best["bf16"],
            "fp32_tflops": best["fp32"],
            "memory_gb": device.memory_gb,
            "memory_tbs": probe.memory_gbs / 1e3,
            "best": 1.0,
        }
    gpu = found or find_gpu(device.name, **figures, link_gbs=1.0)
    changed, misfit = _of_compute(rows, gpu, probe.host)
    changed["optimizer"] = gpu.memory_tbs * 1e3 / probe.optimizer_gbs
    changed["micro_batch_ms"], changed["step_ms"] = 1e3 * probe.micro_batch_s, 1e3 * probe.step_s
    changed["collective_us"] = max(_LEAST, 1e6 * probe.collective_s)
    said = [f"matmul {best[main]:.3g} TFLOP/s in {main}", f"memory {probe.memory_gbs:.3g} GB/s"]
    measured = [*_COMPUTE, "optimizer"]
    network = network_gbits
    for ranks in sorted({it.ranks for it in probe.collectives}):
        timed = [it for it in probe.collectives if it.ranks == ranks]
        gbs, latency = _rate_and_latency(timed)
        said.append(f"{ranks} ranks {gbs:.3g} GB/s and {1e6 * latency:.3g} us")
        if ranks <= device.per_node:
            if found is None:
                figures["link_gbs"] = gbs
            changed["link"] = gbs / (found.link_gbs if found else gbs)
            usual = FITTED.latency_us + FITTED.hop_us * (ranks - 1)
            changed["latency_us"] = FITTED.latency_us * 1e6 * latency / usual
            changed["hop_us"] = FITTED.hop_us * 1e6 * latency / usual
        else:
            reached = 8 * gbs / device.per_node
            network = network_gbits or reached
            changed["network"] = reached / network
        kinds = {it.kind for it in timed} - {"all_gather"}
        changed["rates"] = {
            **changed["rates"],
            **{kind: _speed(kind, timed, gbs, latency) for kind in kinds},
        }
        measured += [*_NETWORK, "exchanges"]
    changed["interferences"] = {k: max(_LEAST, it) for k, it in probe.interference.items()}
    said.append(
        f"repetitions within {100 * probe.spread:.0f} %, its own steps within {100 * misfit:.0f} %"
    )
    threads = f", {device.threads} threads" if device.threads > 1 else ""
    return Calibration(
        constants=replace(FITTED, **changed),
        device=device,
        figures=figures,
        network_gbits=network,
        intervals=dict.fromkeys(measured, max(PROBED, probe.spread, misfit)),
        lines=[
            f"Calibrated with {path} ({device.ranks} x {device.name}{threads}): {', '.join(said)}."
        ],
    )


_LEAST = 1e-3
"""Of constants, which are positive."""


def _of_compute(rows: Sequence[Timed], gpu: GPU, host: Timed) -> tuple[dict[str, Any], float]:
    """Constants of forwards and backwards from some that were timed, and how far these are off."""
    if gpu.name not in GPUS:  # the host computes: it waits for nobody
        rows = [*rows, host]
    names = ("matmul_flops", "matmul_nbytes", "attention_flops", "moved_nbytes", "kernels")
    work = [[getattr(it.work, name) for name in names] for it in rows]
    # Whole steps are what is planned; single operations tell their parts apart.
    weights = [4.0 if it.backward_s else 1.0 for it in rows]
    costs = _least_squares(work, [it.seconds for it in rows], weights)
    flop, operand, attention, moved, kernel = costs
    # Whole steps: what matmuls and attention take, the rest, and the rest of the backward.
    ahead = [[cost * it for cost, it in zip(costs, each, strict=True)] for each in work]
    whole = [
        (it, 3 * sum(parts[:2]) + (1 + BACKWARD_ATTENTION) * parts[2], sum(parts[3:]))
        for it, parts in zip(rows, ahead, strict=True)
        if it.backward_s and it is not host
    ]
    rest = sum(moved for *_, moved in whole)
    others = sum(it.seconds + it.backward_s - done - moved for it, done, moved in whole)
    factor = min(5.0, max(0.3, others / rest)) if rest else FITTED.moved_backward
    misfit = max(
        abs((done + (1 + factor) * moved) / (it.seconds + it.backward_s) - 1)
        for it, done, moved in whole
    )
    known = gpu.name in GPUS
    peak = 1e12 * (gpu.bf16_tflops if known else gpu.fp32_tflops)
    bandwidth = 1e12 * gpu.memory_tbs
    changed: dict[str, Any] = {
        "matmul": 1 / (max(flop, 1e-18) * peak * gpu.best),
        "matmul_traffic": max(_LEAST, operand * bandwidth),
        "attention": 1 / (max(attention, 1e-18) * peak),
        "moved": max(_LEAST, moved * bandwidth),
        "moved_backward": factor,
        "root_moved": 1.0,
        "kernel_us": max(_LEAST, 1e6 * kernel),
        "launch_us": 1e6 * host.seconds / max(1, host.work.kernels) if known else _LEAST,
        "launch_backward": host.backward_s / host.seconds,
        "rates": {**FITTED.rates, gpu.name: 1.0, f"attention {gpu.name}": 1.0},
    }
    return changed, misfit


def _least_squares(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Costs of at least 0 by which sums over rows come nearest to seconds, in shares of them.

    Of all choices of costs that are 0, the best one: there are few.
    """
    weight = torch.tensor(weights, dtype=torch.double, device="cpu")
    table = torch.tensor(rows, dtype=torch.double, device="cpu")
    table = table * (weight / torch.tensor(seconds, dtype=torch.double, device="cpu"))[:, None]
    scale = table.norm(dim=0).clamp(min=1e-300)
    best, nearest = torch.zeros(table.shape[1], dtype=torch.double, device="cpu"), math.inf
    for count in range(1, table.shape[1] + 1):
        for chosen in combinations(range(table.shape[1]), count):
            part = (table / scale)[:, chosen]
            found = torch.linalg.lstsq(part, weight[:, None]).solution[:, 0]
            miss = float((part @ found - weight).norm())
            if found.min() >= 0 and miss < nearest:
                best, nearest = torch.zeros_like(best), miss
                best[list(chosen)] = found
    return (best / scale).tolist()


def _rate_and_latency(timed: Sequence[TimedCollective]) -> tuple[float, float]:
    """GB/s and seconds of gathers of one group."""
    gathers = [it for it in timed if it.kind == "all_gather"]
    rows = [[it.nbytes * (it.ranks - 1) / it.ranks, 1.0] for it in gathers]
    costs = _least_squares(rows, [it.seconds for it in gathers], [1.0] * len(rows))
    return 1e-9 / max(costs[0], 1e-18), max(costs[1], 1e-7)


def _speed(kind: str, timed: Sequence[TimedCollective], gbs: float, latency: float) -> float:
    """Of a kind of collective, in shares of that of gathers which send as much."""
    passes = 2 if kind == "all_reduce" else 1
    return median(
        passes * (it.nbytes * (it.ranks - 1) / it.ranks / (gbs * 1e9) + latency) / it.seconds
        for it in timed
        if it.kind == kind
    )


def _of_run(run: Recorded, path: Path, base: Calibration) -> Calibration:
    """Constants by which the plan of a run takes as long as the run has taken."""
    device, task = run.device, run.task
    found = run.planned(base)
    if found is None:
        raise ConfigurationError(
            f"{path} was measured on {device.name}, of which the planner has no figures: calibrate "
            f"with a file of `shardeddp probe` on the same machine as well"
        )
    planned, cluster = found
    constants = base.constants
    exposed = run.parts["gather"] + run.parts["reduction"]
    together = (*_COMPUTE, *_NETWORK, "exchanges")
    if base.figures or planned.exchanges:
        # The host computes, or layers are split: what transfers cost computing beside them, and waits
        # for activations, are in the run's computing, and in the plan's collectives. Those are as they
        # are planned otherwise; the sum is the run's.
        compute = _factor(
            run.compute + exposed,
            lambda it: _parts(task.time(cluster, _scaled(constants, compute=it)), together),
        )
    else:
        compute = run.compute / _parts(planned, _COMPUTE)
    constants = _scaled(constants, compute=compute)
    optimizer = network = 1.0
    measured = [*_COMPUTE]
    if run.parts["optimizer"] and planned.optimizer and task.setting.host_gbs is None:
        optimizer = run.parts["optimizer"] / planned.optimizer
        constants = replace(constants, optimizer=constants.optimizer * optimizer)
        measured.append("optimizer")
    if exposed and task.collectives and not base.figures and not planned.exchanges:
        computing = constants
        network = _factor(
            exposed,
            lambda it: _parts(task.time(cluster, _scaled(computing, network=it)), _NETWORK),
        )
        constants = _scaled(constants, network=network)
        measured += _NETWORK
    said = f"compute {compute:.3g}, optimizer {optimizer:.3g}, collectives {network:.3g}"
    return replace(
        base,
        constants=constants,
        device=base.device or device,
        intervals={**base.intervals, **dict.fromkeys(measured, RECORDED)},
        lines=[
            *base.lines,
            f"Calibrated with {path} ({run.steps:,} steps on {device.ranks} x {device.name}): times what "
            f"was planned, {said}.",
        ],
    )


def _scaled(constants: Constants, *, compute: float = 1.0, network: float = 1.0) -> Constants:
    """Constants by which computing, and collectives, take so many times as long."""
    c = constants
    return replace(
        c,
        matmul=c.matmul / compute,
        matmul_traffic=c.matmul_traffic * compute,
        attention=c.attention / compute,
        moved=c.moved * compute,
        kernel_us=c.kernel_us * compute,
        launch_us=c.launch_us * compute,
        micro_batch_ms=c.micro_batch_ms * compute,
        step_ms=c.step_ms * compute,
        collective_us=c.collective_us * compute,
        link=c.link / network,
        network=c.network / network,
        latency_us=c.latency_us * network,
        hop_us=c.hop_us * network,
    )


def _parts(step: Step, names: Sequence[str]) -> float:
    return sum(vars(step)[name] for name in names)


def _factor(seconds: float, planned: Callable[[float], float]) -> float:
    """Factor by which what is planned, which grows with it, takes so many seconds."""
    low, high = -math.log(_MOST), math.log(_MOST)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if planned(math.exp(middle)) < seconds else (low, middle)
    return math.exp((low + high) / 2)
