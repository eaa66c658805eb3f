"""Calibration: constants of the cost model from a probe or a recorded run."""

from __future__ import annotations

import json
import math
import os
import sys
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
from shardeddp.planner.cost import (
    BACKWARD_ATTENTION,
    FITTED,
    Constants,
    Step,
    Task,
)
from shardeddp.planner.work import UnitWork
from shardeddp.report import human_seconds

VERSION = 8
"""Version of the file format; files of other versions are refused."""
TIME_ERROR = 0.11
"""Relative error of predicted step times, above the 90th percentile over sizes outside of the fit."""
PROBED, RECORDED = 0.10, 0.15
"""Relative error of step parts that a probe, or a run, measured on the machines of the plan."""
_COMPUTE, _NETWORK = ("compute", "recompute", "launch"), ("gathers", "reductions")
_MOST = 1e4
"""Largest factor between measured and planned times."""

# -- Measurements, in the structure of the files


@dataclass(frozen=True, kw_only=True)
class Device:
    """Device and job size of a measurement."""

    name: str
    """Name in the planner's ``GPUS`` table, or the driver's name for other devices."""
    threads: int
    """Threads per rank on CPU; 1 on GPU."""
    memory_gb: float
    """Memory per rank in 10**9 bytes."""
    ranks: int
    per_node: int

    @classmethod
    def of(cls, device: torch.device, ranks: int, per_node: int) -> Device:
        """Describe the device of this rank."""
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
    """Timed operation or training step."""

    label: str
    dtype: str
    """``fp32`` or ``bf16``."""
    work: UnitWork
    """Work of the forward."""
    seconds: float
    backward_s: float = 0.0
    """Seconds of the backward; 0 without one."""


@dataclass(frozen=True, kw_only=True)
class TimedCollective:
    """Timed collective of consecutive ranks."""

    kind: str
    ranks: int
    nbytes: int
    """Bytes of the whole buffer, not of one rank's shard."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measurements of a probe; times are those of the slowest rank."""

    device: Device
    compute: Sequence[Timed]
    host: Timed
    """Step that is small enough to be bound by kernel launches of the host."""
    memory_gbs: float
    """Bandwidth of a device copy, bytes read plus written, in GB/s."""
    optimizer_gbs: float
    """Bandwidth of an AdamW step, bytes read plus written, in GB/s."""
    micro_batch_s: float
    """Overhead of loops and hooks per micro-batch, without compute and collectives."""
    step_s: float
    """Overhead per optimizer step, without that of its micro-batches."""
    collective_s: float
    """Overhead per collective, without its transfer; 0 for a single rank."""
    spread: float
    """Relative difference of later repetitions from earlier ones: how much the speed drifts."""
    collectives: Sequence[TimedCollective] = ()
    """Timed collectives; empty for a single rank."""
    interference: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds that overlapped compute loses per second of a collective, by kind."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Step times of a run on rank 0: means in seconds."""

    name: str
    """Model name and training setting."""
    device: Device
    steps: int
    parts: Mapping[str, float]
    """Seconds per part of the step; they sum to the step time."""
    gathers: Mapping[str, float]
    """Seconds of waiting for all-gathers, by unit; included in ``parts``."""
    reductions: Mapping[str, float]
    figures: Mapping[str, float]
    """Metrics as logged."""
    memory: Mapping[str, float]
    """Planned bytes by kind."""
    task: Task

    @property
    def compute(self) -> float:
        """Seconds of compute, with those of loops and hooks."""
        return self.parts["compute"] + self.parts["rest"]

    def planned(self, calibration: Calibration) -> tuple[Step, Cluster] | None:
        """Predict the step; None if the planner has no figures for the device."""
        name, figures = self.device.name, dict(calibration.figures)
        if not figures and name not in GPUS:
            return None
        if self.device.ranks == 1 and figures:
            figures.setdefault("link_gbs", 1.0)  # not used
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
    path.write_text(json.dumps({**head, **asdict(measured)}, indent=1) + "\n", encoding="utf-8")


# -- Reading of files

_POSITIVE = {
    *("seconds", "memory_gb", "memory_gbs", "optimizer_gbs"),
    *("ranks", "per_node", "threads", "steps", "micro_batches", "stride", "host_gbs"),
}
"""Names of figures that must be above 0; all others must be at least 0."""


def read(path: Path) -> Probe | Recorded:
    """Read and validate a file.

    Raises:
        ConfigurationError: The file has another format or version, or has impossible figures.
    """
    wanted = "a file of `shardeddp probe` or StepMonitor(record=...)"
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: expected {wanted}, found no JSON ({error})") from None
    kinds = {"probe": Probe, "recorded": Recorded}
    name = document.pop("shardeddp", None) if isinstance(document, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise ConfigurationError(f"{path}: expected {wanted}, found other JSON")
    version = document.pop("version", None)
    if version != VERSION:
        raise ConfigurationError(
            f"{path}: another version of shardeddp has written it (format {version}, this one reads "
            f"{VERSION}); measure again"
        )
    measured = _parsed(kinds[name], document, f"{path}")
    try:
        Cluster(gpu=GPUS["H100-80"], count=measured.device.ranks, per_node=measured.device.per_node)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: device: {error}") from None
    if isinstance(measured, Recorded):
        missing = {"compute", "gather", "reduction", "optimizer", "rest"} - measured.parts.keys()
        if missing or not measured.compute:
            raise ConfigurationError(
                f"{path}: parts: {', '.join(sorted(missing)) or 'compute'} missing, or 0"
            )
    return measured


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to a type, with validation."""
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
    if kind in (int, float) and number and 0 <= value <= sys.float_info.max:  # not NaN
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
    """Constants of the cost model, fitted or measured; by default nothing is measured."""

    constants: Constants = FITTED
    device: Device | None = None
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """Figures for :func:`find_gpu` of a device that is not in the planner's table."""
    network_gbits: float | None = None
    """Inter-node bandwidth per GPU in Gbit/s; a measured one is the rate that collectives reach."""
    relative_errors: Mapping[str, float] = field(default_factory=dict[str, float])
    """Relative error of the predicted time, by measured part of a step."""
    lines: Sequence[str] = ()
    """Report lines: files used, and the figures taken from them."""

    def relative_error(self, step: Step) -> float:
        """Return the relative error of a step's predicted time, weighted over its parts."""
        parts = vars(step).items()
        weighted = sum(took * self.relative_errors.get(name, TIME_ERROR) for name, took in parts)
        return weighted / step.total


def calibrate(
    paths: Sequence[Path], gpu: str | None = None, network_gbits: float | None = None
) -> Calibration:
    """Compute constants from files: first the probes, then the runs; the last one of each holds.

    Args:
        paths: Files of ``shardeddp probe`` and of ``StepMonitor(record=...)``.
        gpu: GPU of the plan; None: the measured one.
        network_gbits: Inter-node bandwidth per GPU of the plan in Gbit/s; None: unknown.

    Raises:
        ConfigurationError: A file cannot be read, or was measured on another device.
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
    if found is None:  # without a data sheet, measured figures are the only ones
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
        if not any(it.kind == "all_gather" for it in timed):
            raise ConfigurationError(
                f"{path}: collectives: expected an all_gather of {ranks} ranks beside the other kinds, "
                f"found none; measure again"
            )
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
        relative_errors=dict.fromkeys(measured, max(PROBED, probe.spread, misfit)),
        lines=[
            f"Calibrated with {path} ({device.ranks} x {device.name}{threads}): {', '.join(said)}."
        ],
    )


_LEAST = 1e-3
"""Lower bound of constants, which must be positive."""


def _of_compute(rows: Sequence[Timed], gpu: GPU, host: Timed) -> tuple[dict[str, Any], float]:
    """Fit compute constants to timed forwards and backwards; also return the largest misfit."""
    if gpu.name not in GPUS:  # on CPU there is no device that waits for the host
        rows = [*rows, host]
    names = ("matmul_flops", "matmul_nbytes", "attention_flops", "moved_nbytes", "kernels")
    work = [[getattr(it.work, name) for name in names] for it in rows]
    # Whole steps weigh more because they are predicted; single operations separate the constants.
    weights = [4.0 if it.backward_s else 1.0 for it in rows]
    costs = _least_squares(work, [it.seconds for it in rows], weights)
    flop, operand, attention, moved, kernel = costs
    # Whole steps: time of matmuls and attention in both passes, of other kernels in the forward.
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
        "rates": {
            **FITTED.rates,
            **dict.fromkeys((gpu.name, f"attention {gpu.name}", f"moved {gpu.name}"), 1.0),
        },
    }
    return changed, misfit


def _least_squares(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return the non-negative costs with the least squared relative error of the predicted seconds.

    Tries every subset of columns with a cost above 0; there are few columns.
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
    """Return bandwidth in GB/s and latency in seconds of one group's all-gathers."""
    gathers = [it for it in timed if it.kind == "all_gather"]
    rows = [[it.nbytes * (it.ranks - 1) / it.ranks, 1.0] for it in gathers]
    costs = _least_squares(rows, [it.seconds for it in gathers], [1.0] * len(rows))
    return 1e-9 / max(costs[0], 1e-18), max(costs[1], 1e-7)


def _speed(kind: str, timed: Sequence[TimedCollective], gbs: float, latency: float) -> float:
    """Return the speed of a kind of collective relative to an all-gather of the same traffic."""
    passes = 2 if kind == "all_reduce" else 1
    return median(
        passes * (it.nbytes * (it.ranks - 1) / it.ranks / (gbs * 1e9) + latency) / it.seconds
        for it in timed
        if it.kind == kind
    )


def _of_run(run: Recorded, path: Path, base: Calibration) -> Calibration:
    """Scale the constants so that the predicted time of a run equals the measured one."""
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
        # On CPU, or with tensor parallelism, the run's compute time includes the slowdown by
        # transfers and the waits for activations, which the plan counts as collectives. Their
        # constants stay as they are; compute is scaled so that the sum is that of the run.
        compute = _factor(
            run.compute + exposed,
            lambda it: _parts(task.time(cluster, _scaled(constants, compute=it)), together),
            f"{path}: computing and communication",
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
            f"{path}: communication that nothing hides",
        )
        constants = _scaled(constants, network=network)
        measured += _NETWORK
    said = f"compute {compute:.3g}, optimizer {optimizer:.3g}, collectives {network:.3g}"
    return replace(
        base,
        constants=constants,
        device=base.device or device,
        relative_errors={**base.relative_errors, **dict.fromkeys(measured, RECORDED)},
        lines=[
            *base.lines,
            f"Calibrated with {path} ({run.steps:,} steps on {device.ranks} x {device.name}): times what "
            f"was planned, {said}.",
        ],
    )


def _scaled(constants: Constants, *, compute: float = 1.0, network: float = 1.0) -> Constants:
    """Return constants that multiply the time of compute and of collectives by these factors."""
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


def _factor(seconds: float, planned: Callable[[float], float], what: str) -> float:
    """Bisect for the factor with ``planned(factor) == seconds``; ``planned`` must be increasing.

    Raises:
        ConfigurationError: No factor reaches it; ``what`` took the seconds.
    """
    low, high = -math.log(_MOST), math.log(_MOST)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if planned(math.exp(middle)) < seconds else (low, middle)
    found = math.exp((low + high) / 2)
    if not math.isclose(planned(found), seconds, rel_tol=1e-3):
        raise ConfigurationError(
            f"{what} took {human_seconds(seconds)} of a step, and the plan is "
            f"{human_seconds(planned(found))} where it is nearest: what was measured before (a probe "
            f"while the machine was busy) does not go with the run. Measure both again"
        )
    return found
