"""Step time, memory, launches and host time of ShardedDP on one CUDA device, against the plain module, FSDP1 and FSDP2.

In world size 1 everything is real. Worlds of more ranks are torch's fake process group: this rank's allocations and
launches are the true ones, its peers do not exist, and transfers cost nothing. Every measurement has a process of its
own, so that peaks are its own and one that runs out of memory does not end the others.

    python benchmarks/gpu.py --model 1B --output benchmarks/results/gpu.md
    python benchmarks/gpu.py --model 1B 8B --world 1 8 64 --only plain fsdp2 full_shard
    python benchmarks/gpu.py --device cpu --model tiny --world 1 8 --steps 2          # does the script itself run?

Columns: *step* is the median on the device's clock; *peak* and *reserved* are the caching allocator's; *kernels* and
*memcpys* are what one step launches, *copies* the copy operators that it calls. *host* is the time in which the host
enqueues forward and backward of a model with as many modules but tiny ones, on an idle device; *host / unit* is what
the engine adds to the plain module's, per unit; *host step* the optimizer's part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from gpu_engines import ENGINES, PRECISIONS, Engine, build_engine, world
from llama import CONFIGS

COPY_OPERATORS = {
    "aten::copy_",
    "aten::_foreach_copy_",
    "aten::cat",
    "aten::split_with_sizes_copy",
    "fsdp::all_gather_copy_in",
    "fsdp::split_with_sizes_copy",
    "fsdp::chunk_cat",
}
GPU = torch.device("cuda", 0)
WARMUP_STEPS = 3
WIDTH = 170
"""Of a table, in characters; a file that this is piped to has no width of its own."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement."""

    engine: str
    model: str
    world: int
    batch: int
    steps: int
    precision: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came of it; None: the device has no such figure."""

    hardware: str
    step_s: float
    peak_nbytes: int | None
    reserved_nbytes: int | None
    host_s: float
    host_optimizer_s: float
    kernels: int | None = None
    memcpys: int | None = None
    copies: int | None = None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A measurement that ended with an error."""

    reason: str


def measure(index: int, job: Job, target: str) -> None:
    """Run one job in this process and leave its figures in the file ``target``, the profiler's last: it may fail."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here
    device = GPU if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    config = CONFIGS[job.model]
    with world(job.world, device):
        host_s, host_optimizer_s = _host_times(job, device)
        engine = build_engine(job.engine, config, device, job.precision)
        tokens = torch.randint(0, config.vocab_size, (job.batch, config.length + 1), device=device)
        _clean(device)
        for _ in range(WARMUP_STEPS):
            engine.accumulate(tokens)
            engine.update()
        step_s = _step_time(engine, tokens, job.steps, device)
        figures = Figures(
            hardware=_hardware(device),
            step_s=step_s,
            peak_nbytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            reserved_nbytes=torch.cuda.max_memory_reserved(device)
            if device.type == "cuda"
            else None,
            host_s=host_s,
            host_optimizer_s=host_optimizer_s,
        )
        Path(target).write_text(json.dumps(asdict(figures)))
        figures = _profiled(figures, engine, tokens, device)
        Path(target).write_text(json.dumps(asdict(figures)))
        del engine


def _clean(device: torch.device) -> None:
    """Forget what making the model has taken."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _host_times(job: Job, device: torch.device) -> tuple[float, float]:
    """Medians of the host's time for (forward and backward, optimizer step) of a model of tiny modules."""
    config = CONFIGS[job.model].narrow()
    engine = build_engine(job.engine, config, device, job.precision)
    tokens = torch.randint(0, config.vocab_size, (1, config.length + 1), device=device)
    parts: tuple[list[float], list[float]] = ([], [])
    for step in range(WARMUP_STEPS + max(job.steps, 10)):
        _wait(device)
        start = time.perf_counter()
        engine.accumulate(tokens)
        middle = time.perf_counter()
        engine.update()
        end = time.perf_counter()
        if step >= WARMUP_STEPS:
            parts[0].append(middle - start)
            parts[1].append(end - middle)
    _wait(device)
    return statistics.median(parts[0]), statistics.median(parts[1])


def _step_time(engine: Engine, tokens: torch.Tensor, steps: int, device: torch.device) -> float:
    """Median seconds of a step; the device is never waited for in between."""
    gc.collect()
    _wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(steps):
            engine.accumulate(tokens)
            engine.update()
            times.append(time.perf_counter())
        return statistics.median(end - start for start, end in pairwise(times))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        engine.accumulate(tokens)
        engine.update()
        mark.record()
    _wait(device)
    return statistics.median(start.elapsed_time(end) for start, end in pairwise(marks)) / 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _profiled(
    figures: Figures, engine: Engine, tokens: torch.Tensor, device: torch.device
) -> Figures:
    """The figures with the launches of one step, from the profiler's trace."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=activities) as profiler:
            engine.accumulate(tokens)
            engine.update()
            _wait(device)
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    kinds = Counter(event.get("cat") for event in events)
    copies = sum(
        event.get("cat") == "cpu_op" and event.get("name") in COPY_OPERATORS for event in events
    )
    # Without the right to read the device's counters the profiler sees none of it, and a step has some kernels.
    return replace(
        figures,
        kernels=kinds["kernel"] or None,
        memcpys=kinds["gpu_memcpy"] if kinds["kernel"] else None,
        copies=copies,
    )


def _hardware(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    )


def run(job: Job, folder: Path) -> Figures | Failed:
    """Measure in a process of its own."""
    target = folder / "figures.json"
    target.unlink(missing_ok=True)
    failure = ""
    try:
        mp.spawn(measure, (job, str(target)), nprocs=1)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        failure = str(error).strip().splitlines()[-1]
        print(f"{job}: {error}", file=sys.stderr)
    if target.exists():
        return Figures(**json.loads(target.read_text()))
    return Failed(reason=failure or "no figures")


# -- report

HEADINGS = (
    "engine", "step", "/ plain", "peak", "reserved", "/ fsdp2", "kernels", "memcpys", "copies", "host", "host / unit",
    "host step",
)  # fmt: skip


def rows(results: dict[Job, Figures | Failed], model: str, ranks: int) -> list[list[str]]:
    """The lines of one table: one model in one world. What is plain is always that of world size 1."""
    found = {
        job.engine: figures
        for job, figures in results.items()
        if job.model == model and job.world == ranks
    }
    alone = {
        job.engine: figures
        for job, figures in results.items()
        if job.model == model and job.world == 1
    }
    plain, fsdp2 = (_measured(each) for each in (alone.get("plain"), found.get("fsdp2")))
    units = CONFIGS[model].num_layers + 1
    lines: list[list[str]] = []
    for name, figures in found.items():
        if isinstance(figures, Failed):
            lines.append([name, figures.reason[:60], *[""] * (len(HEADINGS) - 2)])
            continue
        lines.append([
            name,
            f"{1e3 * figures.step_s:.2f} ms",
            f"{figures.step_s / plain.step_s:.3f}" if plain else "-",
            _gibibytes(figures.peak_nbytes),
            _gibibytes(figures.reserved_nbytes),
            f"{figures.peak_nbytes / fsdp2.peak_nbytes:.2f}"
            if fsdp2 and fsdp2.peak_nbytes and figures.peak_nbytes else "-",
            *("-" if number is None else f"{number}" for number in (figures.kernels, figures.memcpys, figures.copies)),
            f"{1e3 * figures.host_s:.2f} ms",
            f"{1e6 * (figures.host_s - plain.host_s) / units:.0f} us" if plain else "-",
            f"{1e3 * figures.host_optimizer_s:.2f} ms",
        ])  # fmt: skip
    return lines


def _measured(figures: Figures | Failed | None) -> Figures | None:
    return figures if isinstance(figures, Figures) else None


def _gibibytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"


def title(model: str, ranks: int, options: argparse.Namespace) -> str:
    """What a table shows."""
    length = CONFIGS[model].length
    peers = "" if ranks == 1 else ", without peers"
    return f"Llama {model}, {options.precision}, batch {options.batch} x {length}, world size {ranks}{peers}"


def markdown(results: dict[Job, Figures | Failed], options: argparse.Namespace) -> str:
    """All tables, with the date, the hardware and the command."""
    hardware = next(
        (figures.hardware for figures in results.values() if isinstance(figures, Figures)),
        "unknown",
    )
    parts = [
        f"# {hardware}, {date.today()}",
        f"torch {torch.__version__}, Python {platform.python_version()}; medians of {options.steps} steps.",
        f"`python benchmarks/gpu.py {' '.join(sys.argv[1:])}`",
    ]
    for model in options.model:
        for ranks in options.world:
            lines = [
                list(HEADINGS),
                ["---", *["---:"] * (len(HEADINGS) - 1)],
                *rows(results, model, ranks),
            ]
            parts += [
                f"## {title(model, ranks, options)}",
                "\n".join(f"| {' | '.join(line)} |" for line in lines),
            ]
    return "\n\n".join(parts) + "\n"


def show(results: dict[Job, Figures | Failed], options: argparse.Namespace) -> None:
    """Print all tables."""
    for model in options.model:
        for ranks in options.world:
            shown = Table(title=title(model, ranks, options))
            for heading in HEADINGS:
                shown.add_column(heading, justify="left" if heading == "engine" else "right")
            for line in rows(results, model, ranks):
                shown.add_row(*line)
            Console(width=WIDTH).print(shown)


def main() -> None:
    """Measure everything asked for, print, write."""
    options = _options()
    jobs = [
        Job(
            engine=engine, model=model, world=ranks, batch=options.batch, steps=options.steps,
            precision=options.precision, device=options.device,
        )
        for model in options.model
        for ranks in options.world
        for engine in options.only
        if engine != "plain" or ranks == 1
    ]  # fmt: skip
    results: dict[Job, Figures | Failed] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in track(jobs, "measuring"):
            results[job] = run(job, Path(folder))
            if options.output is not None:  # after each, for a run that is cut short
                options.output.write_text(markdown(results, options))
    show(results, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    compared = ["plain", "fsdp1", "fsdp2", "full_shard"]
    parser.add_argument(
        "--only", nargs="+", choices=list(ENGINES), default=compared, help=f"default {compared}"
    )
    parser.add_argument(
        "--model", nargs="+", choices=list(CONFIGS), default=["1B"], help="default 1B"
    )
    parser.add_argument(
        "--world", nargs="+", type=int, default=[1, 8, 64], help="world sizes, default 1 8 64"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank, default 1")
    parser.add_argument("--steps", type=int, default=20, help="default 20")
    parser.add_argument(
        "--precision", choices=list(PRECISIONS), default="bf16-true", help="default bf16-true"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default cuda")
    parser.add_argument("--output", type=Path, help="write the tables to this Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
