"""Accuracy of the planner: constants fitted to some published runs, judged on others.

python benchmarks/plan_accuracy.py --calibrate A.json --judge B.json
python benchmarks/plan_accuracy.py --calibrate A.json --hold-out size     # or: gpus, none
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from shardeddp.config import choose_sharding
from shardeddp.plan.hardware import GIB, GPUS, Cluster, find_gpu
from shardeddp.plan.memory import plan_memory
from shardeddp.plan.sharding_strategy import ShardingStrategy
from shardeddp.planner.collectives import collectives_of_step
from shardeddp.planner.cost import FITTED, Constants, StepSetting, Task
from shardeddp.planner.memory import BufferMemory, Memory, Peak
from shardeddp.planner.search import MEMORY_ERROR, combined
from shardeddp.planner.trace import profile
from shardeddp.planner.transformer import Decoder, Dimensions
from shardeddp.planner.work import ModelProfile, UnitWork
from shardeddp.wrap import resolve_policy
from shardeddp.wrap.flat_buffers import costs_of

UNFUSED = ("Megatron-DeepSpeed",)
"""Engines whose runs computed attention without a fused kernel, and did not overlap reductions."""

RECOMPUTES = {
    "none": (0.0, 0.0, 0.0),
    "full": (1.0, 1.0, 1.0),
    "selective-op": (0.5, 0.0, 1.0),  # torchtitan keeps attention and every other matmul
    "selective": (0.0, 1.0, 0.0),  # Megatron computes attention's core again
}


PRECISIONS = {
    **dict.fromkeys(("bf16", "bf16-mixed", "fp16", "16-mixed"), "bf16"),
    **dict.fromkeys(("bf16-true", "16-true"), "bf16-true"),
    **dict.fromkeys(("fp32", "32-true"), "32-true"),
}
"""The planner's precision by that of a row."""


@dataclass(kw_only=True)
class Run:
    """One published run, with its work and its collectives."""

    row: dict[str, Any]
    task: Task
    cluster: Cluster
    profile: ModelProfile
    memory: Memory
    measured: float | None

    @property
    def engine(self) -> str:
        return self.row["system"]


@cache
def decoder_profile(
    dims: Dimensions, length: int, micro_batch: int, precision: str, reduce: str
) -> ModelProfile:
    with torch.device("meta"):
        module = Decoder(dims, length)

    def step(model: torch.nn.Module, samples: int) -> torch.Tensor:
        return model(torch.empty(samples, length, dtype=torch.long))

    found = profile(
        module,
        step,
        policy=resolve_policy("auto"),
        precision=precision,
        micro_batch=micro_batch,
        tokens=micro_batch * length,
    )
    if reduce == "bf16":  # gradients travel in it
        found.units = [
            replace(
                unit,
                parameters=tuple(replace(it, reduce_in=torch.bfloat16) for it in unit.parameters),
            )
            for unit in found.units
        ]
    return found


def read(path: Path) -> tuple[list[Run], list[str]]:
    """The runs of a file that a sharded engine could have made, and why others are left out."""
    runs: list[Run] = []
    left: list[str] = []
    for row in json.loads(path.read_text())["rows"]:
        try:
            runs.append(as_run(row))
        except (ValueError, KeyError, TypeError) as error:
            left.append(f"{row.get('id', '?')}: {type(error).__name__}: {str(error)[:120]}")
    return runs, left


def as_run(row: dict[str, Any]) -> Run:
    model, hardware, parallel, run = (row[key] for key in ("model", "hardware", "parallel", "run"))
    degrees = {key: parallel.get(key) or 1 for key in ("tp", "pp", "cp", "ep")}
    if any(value > 1 for value in degrees.values()):
        raise ValueError(f"tensor, pipeline, context or expert parallel: {degrees}")
    if model.get("n_experts") or model.get("experts"):
        raise ValueError("experts")
    dims = Dimensions(
        layers=model["n_layers"],
        width=model["d_model"],
        heads=model["n_heads"],
        kv_heads=model.get("n_kv_heads"),
        hidden=model.get("d_ff"),
        vocabulary=model["vocab"],
        gated=model.get("mlp") == "swiglu",
        tied=bool(model.get("tied")),
        bias=bool(model.get("bias")),
        rope=model.get("pos") == "rope",
        rms=model.get("family") == "llama",
        fused_attention=row["system"] not in UNFUSED,
        fused_loss="loss/attn: flash" in row.get("notes", ""),
    )
    length, micro_batch = run["seq_len"], run["micro_batch"]
    if run["precision"] not in PRECISIONS:
        raise ValueError(
            f"precision {run['precision']}: rates of {', '.join(PRECISIONS)} are known"
        )
    precision = PRECISIONS[run["precision"]]
    # Megatron's gradients travel in the dtype of its parameters where nothing else is said.
    is_half = run["precision"] in ("fp16", "16-mixed")
    reduce = run.get("reduce_dtype") or ("bf16" if is_half else "fp32")
    found = decoder_profile(dims, length, micro_batch, precision, reduce)
    gpu = hardware["gpu"]
    figures = (
        {}
        if gpu in GPUS
        else {
            "bf16_tflops": hardware.get("bf16") or hardware.get("fp16"),
            "memory_gb": hardware["hbm_gb"],
            "memory_tbs": hardware["hbm_tbs"],
            "link_gbs": hardware["nvlink"],
        }
    )
    cluster = Cluster(
        gpu=replace(find_gpu(gpu, **figures), name=gpu),
        count=hardware["gpus"],
        per_node=hardware.get("gpus_per_node") or 8,
        network_gbits=hardware.get("inter_node_gbps_per_gpu"),
    )
    strategy, size = parallel["strategy"], parallel.get("shard_size")
    sharding = choose_sharding(strategy, size if strategy == "hybrid_shard" else None)
    topology = sharding.topology(cluster.num_nodes, cluster.ranks_per_node)
    units = [costs_of(unit, topology) for unit in found.units]
    accumulation = run.get("grad_accum") or 1
    trained = sum(group.slice_nbytes for unit in units for group in unit)
    memory = memory_of_run(run, found, units, sharding)
    setting = StepSetting(
        micro_batches=accumulation,
        fp32=precision == "32-true",
        shortage=memory.shortage(cluster.gpu),
        recomputes=RECOMPUTES[run.get("activation_checkpointing") or "none"],
        optimizer_nbytes=7.0 * trained,  # AdamW reads four and writes three
    )
    collectives = combined(collectives_of_step(units, sharding, accumulation))
    if row["system"] in UNFUSED:  # their reductions follow the backward, and nothing hides them
        collectives = [
            it if it.kind == "all_gather" else replace(it, phase="begin") for it in collectives
        ]
    return Run(
        row=row,
        task=Task(
            work=found.total,
            inner=found.inner,
            collectives=collectives,
            setting=setting,
        ),
        cluster=cluster,
        profile=found,
        memory=memory,
        measured=seconds_of(row, found),
    )


def memory_of_run(
    run: dict[str, Any], found: ModelProfile, units: Sequence[Any], sharding: ShardingStrategy
) -> Memory:
    """The plan's memory of a run."""
    options: dict[str, Any] = {
        "needs_receive_buffer": False,
        "accumulates": (run.get("grad_accum") or 1) > 1,
    }
    recompute = run.get("activation_checkpointing") or "none"
    if recompute == "selective-op":  # torchtitan keeps attention and every other matmul
        # of a unit with parameters of its own: its input is as large as attention's result
        given, whole = found.kept["selective"], found.kept["none"].kept
        half = [own + nbytes // 2 for own, nbytes in zip(given.given, given.kept, strict=True)]
        again = [max(0, of - own) for of, own in zip(whole, half, strict=True)]
        kept = replace(given, kept=half, again=again)
        found, recompute = replace(found, kept={**found.kept, "selective": kept}), "selective"
    elif recompute == "selective":  # Megatron computes attention's core again: fused keeps none
        recompute = "none"
    if run.get("compile") and recompute == "none":
        whole = found.kept["none"]
        kept = replace(whole, kept=[int(COMPILED_KEPT * it) for it in whole.kept])
        found = replace(found, kept={**found.kept, "none": kept})
    buffers = BufferMemory.of(units, found.visits, sharding, prefetch=(1, 1), **options)
    between_steps = plan_memory(units, sharding, prefetch=1, **options)
    return Peak.of(found, recompute, buffers).memory(between_steps)


def seconds_of(row: dict[str, Any], found: ModelProfile) -> float | None:
    measured, run = row["measured"], row["run"]
    tokens = found.tokens * (run.get("grad_accum") or 1)
    if measured.get("step_s"):
        return float(measured["step_s"])
    if measured.get("tokens_per_s_per_gpu"):
        return tokens / measured["tokens_per_s_per_gpu"]
    peak = (row["hardware"].get("bf16") or row["hardware"].get("fp16")) * 1e12
    for key, again in (("model_tflops", 0), ("mfu", 0), ("hw_tflops", 1), ("hfu", 1)):
        value = measured.get(key)
        if value:
            work = found.total
            # Published counts take the whole square of causal attention.
            flops = 3 * (work.matmul_flops + 2 * work.attention_flops)
            flops *= 4 / 3 if again and run.get("activation_checkpointing") == "full" else 1
            rate = value * 1e12 if "tflops" in key else value * peak
            return flops * (run.get("grad_accum") or 1) / rate
    return None


# -- the fit: logarithms of constants that stay near what is plausible, robust to odd runs

PRIORS = {
    # by constant: where the fit starts, and how far its logarithm may lie from there (one standard
    # deviation)
    "matmul": (1.0, 0.15),
    "matmul_traffic": (1.0, 0.5),
    "attention": (0.5, 0.3),
    "moved": (0.5, 0.4),
    "moved_backward": (1.5, 0.25),
    "root_moved": (1.5, 0.4),
    "recompute": (0.95, 0.1),
    "micro_batch_ms": (2.0, 0.5),
    "kernel_us": (3.0, 0.5),
    "launch_us": (20.0, 0.4),
    "launch_backward": (2.0, 0.3),
    "link": (0.76, 0.1),
    "network": (0.75, 0.2),
    "network_unstated": (0.75, 0.4),
    "latency_us": (30.0, 0.7),
    "hop_us": (7.0, 0.5),
    "interference": (0.2, 0.6),
    "shortage": (0.1, 0.5),
    "optimizer": (1.5, 0.4),
    "step_ms": (5.0, 0.7),
    "compiled_moved": (
        0.5,
        0.3,
    ),  # shares of element-wise bytes and of kernels that torch.compile leaves
    "compiled_launch": (0.5, 0.3),
}
COMPILED_KEPT = 0.6
"""Share of saved tensors that torch.compile keeps; the rest it computes again in backward."""
RATE, LAUNCH = 0.08, 0.4
NOISE = 0.03


def predicted(run: Run, constants: Constants) -> float:
    """Seconds; engines differ from the planner's model in their rates, runs in whether they compile."""
    rates, engine = constants.rates, run.engine
    compiles = bool(run.row["run"].get("compile"))
    moved = rates["compiled_moved"] if compiles else 1.0
    kernels = rates["compiled_launch"] if compiles else 1.0

    def adapted(work: UnitWork) -> UnitWork:
        return replace(
            work,
            matmul_flops=work.matmul_flops / rates.get(engine, 1.0),
            attention_flops=work.attention_flops / rates.get(f"attention {engine}", 1.0),
            moved_nbytes=work.moved_nbytes * moved * rates.get(f"moved {engine}", 1.0),
            kernels=work.kernels * kernels,
        )

    launch_us = constants.launch_us * rates.get(f"launch {engine}", 1.0)
    task = replace(run.task, work=adapted(run.task.work), inner=adapted(run.task.inner))
    return task.time(run.cluster, replace(constants, launch_us=launch_us)).total


def with_constants(constants: Constants, values: Mapping[str, float]) -> Constants:
    """Constants with other values; names that are no field are rates."""
    own = {key: value for key, value in values.items() if key in vars(constants)}
    rates = {key: value for key, value in values.items() if key not in own}
    return replace(constants, **own, rates={**constants.rates, **rates})


def fit(runs: Sequence[Run]) -> Constants:
    """Constants for runs, by Gauss-Newton on logarithms with priors and Huber weights."""
    names = list(PRIORS)
    starts, spreads = map(list, zip(*PRIORS.values(), strict=True))
    for gpu in sorted({run.cluster.gpu.name for run in runs}):
        names += [gpu, f"attention {gpu}", f"moved {gpu}"]
        spreads += [RATE, 0.2, 0.1]
    for engine in sorted({run.engine for run in runs}):
        names += [engine, f"attention {engine}", f"launch {engine}", f"moved {engine}"]
        spreads += [RATE, 0.06, LAUNCH, 0.25]
    sizes: defaultdict[str, int] = defaultdict(int)
    for run in runs:
        sizes[run.row["source"]["key"]] += 1
    # A source of many similar runs counts for less than as many of different sources.
    balance = torch.tensor(
        [min(1.0, (30 / sizes[run.row["source"]["key"]]) ** 0.5) for run in runs],
        dtype=torch.double,
    )
    spread = torch.tensor(spreads, dtype=torch.double)
    starts += [1.0] * (len(names) - len(starts))
    point = torch.zeros(len(names), dtype=torch.double)

    def residuals(at: torch.Tensor) -> torch.Tensor:
        values = {n: s * math.exp(v) for n, s, v in zip(names, starts, at.tolist(), strict=True)}
        constants = with_constants(Constants(), values)
        errors = [math.log(predicted(run, constants) / run.measured) for run in runs]  # type: ignore[operator]
        return torch.tensor(errors, dtype=torch.double)

    damping, current = 1e-2, residuals(point)

    def objective(errors: torch.Tensor, at: torch.Tensor) -> float:
        scaled = errors.abs() / NOISE
        huber = torch.where(scaled < 1.5, scaled**2, 3 * scaled - 2.25)
        return float((balance * huber).sum() + ((at / spread) ** 2).sum())

    for _ in range(25):
        step = 1e-4
        columns = []
        for index in range(len(names)):
            moved = point.clone()
            moved[index] += step
            columns.append((residuals(moved) - current) / step)
        jacobian = torch.stack(columns, dim=1)
        scaled = current.abs() / NOISE
        weight = (
            balance / NOISE**2 * torch.where(scaled < 1.5, torch.ones_like(scaled), 1.5 / scaled)
        )
        hessian = jacobian.T @ (weight[:, None] * jacobian) + torch.diag(spread**-2)
        gradient = jacobian.T @ (weight * current) + point / spread**2
        before = objective(current, point)
        while damping < 1e6:
            change = torch.linalg.solve(hessian + damping * torch.diag(hessian.diag()), -gradient)
            trial = point + change.clamp(-0.5, 0.5)
            errors = residuals(trial)
            if objective(errors, trial) < before:
                break
            damping *= 4
        else:
            break
        done = before - objective(errors, trial) < 1e-4 * before
        point, current, damping = trial, errors, max(1e-4, damping / 4)
        if done:
            break
    values = {n: s * math.exp(v) for n, s, v in zip(names, starts, point.tolist(), strict=True)}
    return with_constants(Constants(), values)


# -- reports


def statistics_of(errors: Sequence[float]) -> str:
    ordered = sorted(map(abs, errors))
    p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    return (
        f"n {len(ordered):4d}  mean {100 * statistics.fmean(ordered):5.2f} %  median "
        f"{100 * statistics.median(ordered):5.2f} %  p90 {100 * p90:5.2f} %  max {100 * ordered[-1]:5.2f} %  "
        f"bias {100 * statistics.fmean(errors):+5.2f} %"
    )


def order_of_pairs(runs: Sequence[Run], constants: Constants) -> str:
    """Pairs of one source, model and GPU whose tokens per second differ by 3 % or more."""
    groups: defaultdict[object, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        if run.measured:
            tokens = run.profile.tokens * run.task.setting.micro_batches
            key = (run.row["source"]["key"], run.row["model"]["name"], run.cluster.gpu.name)
            groups[key].append((tokens / run.measured, tokens / predicted(run, constants)))
    right = pairs = 0
    for group in groups.values():
        for (one, mine), (other, yours) in combinations(group, 2):
            if abs(one - other) / max(one, other) >= 0.03:
                pairs += 1
                right += (one > other) == (mine > yours)
    return f"pairs in the right order: {right} of {pairs}" + (
        f" ({100 * right / pairs:.1f} %)" if pairs else ""
    )


def memory_errors(run: Run) -> dict[str, float]:
    """Errors of the planned peak by the kind that was published: in use, or reserved."""
    measured, memory = run.row["measured"], run.memory
    most = int(1e9 * run.cluster.gpu.memory_gb) - memory.context
    planned = {
        "reserved": min(memory.reserved, most),
        "in use": memory.peak - memory.context - memory.slack,
    }
    published = {
        "reserved" if "reserved" in str(measured.get("peak_kind")) else "in use": measured.get(
            "peak_mem_gib"
        )
    }
    if measured.get("peak_reserved_gib"):
        published["reserved"] = measured["peak_reserved_gib"]
    return {key: planned[key] / GIB / it - 1 for key, it in published.items() if it}


def report_memory(runs: Sequence[Run], verbose: bool) -> None:
    """Errors of peaks by kind, engine and compilation; and what is said of runs out of memory."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    verdicts: defaultdict[bool, list[bool]] = defaultdict(list)
    for run in runs:
        compiled = ", compiled" if run.row["run"].get("compile") else ""
        for kind, error in memory_errors(run).items():
            groups[f"memory {kind}, {run.row['source']['key']}, {run.engine}{compiled}"].append(
                error
            )
            groups[f"memory {kind}"].append(error)
            if verbose:
                planned = {key: round(it / GIB, 2) for key, it in vars(run.memory).items() if it}
                print(f"{run.row['id']:18s} {kind:9s} {100 * error:+6.1f} %  {planned}")
        limit = run.cluster.gpu.memory_gb * 1e9
        fits = run.memory.peak * (1 + MEMORY_ERROR) <= limit
        verdicts[bool(run.row["measured"].get("oom"))].append(fits)
    for name in sorted(groups):
        print(f"{name:58s} {statistics_of(groups[name])}")
    print(
        f"runs that ran: {sum(verdicts[False])} of {len(verdicts[False])} are said to fit; out of "
        f"memory: {sum(verdicts[True])} of {len(verdicts[True])} are said to fit"
    )


def report(runs: Sequence[Run], constants: Constants, verbose: bool = False) -> list[float]:
    timed = [run for run in runs if run.measured]
    errors = {id(run): predicted(run, constants) / run.measured - 1 for run in timed}  # type: ignore[operator]
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for run in timed:
        row = run.row
        groups[f"time, {row['source']['key']}, {row['system']}, {run.cluster.gpu.name}"].append(
            errors[id(run)]
        )
        groups[f"time, {row['model']['name']}"].append(errors[id(run)])
        groups[f"time, {run.cluster.count} GPUs"].append(errors[id(run)])
        if verbose:
            setting = f"S{row['run']['seq_len']} {row['run']['micro_batch']} x {run.task.setting.micro_batches}"
            gpus = f"{run.cluster.gpu.name} x {run.cluster.count}"
            seconds = f"{run.measured:9.4f} {predicted(run, constants):9.4f}"
            name = f"{row['id']:18s} {run.engine[:14]:14s} {row['model']['name']:12s}"
            taken = 100 * run.memory.peak / (1e9 * run.cluster.gpu.memory_gb)
            print(
                f"{name} {gpus:16s} {setting:18s} {seconds} memory {taken:4.0f} %  "
                f"time {100 * errors[id(run)]:+6.1f} %"
            )
    for name in sorted(groups):
        print(f"{name:58s} {statistics_of(groups[name])}")
    print(order_of_pairs(timed, constants))
    report_memory(runs, verbose)
    return list(errors.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        help="runs to fit the constants to; without: those that are shipped",
    )
    parser.add_argument("--judge", type=Path, help="runs to compare with")
    parser.add_argument(
        "--hold-out",
        choices=("size", "gpus", "none"),
        help="fit on the rest of --calibrate, judge on what is held out",
    )
    parser.add_argument("--print-constants", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    runs, left = read(options.calibrate) if options.calibrate else ([], [])
    timed = [run for run in runs if run.measured]
    judged: list[float] = []
    if options.hold_out == "size":
        for name in sorted({run.row["model"]["name"] for run in timed}):
            rest = [run for run in timed if run.row["model"]["name"] != name]
            judged += report(
                [run for run in timed if run.row["model"]["name"] == name],
                fit(rest),
                options.verbose,
            )
    elif options.hold_out == "gpus":
        rest = [run for run in timed if run.cluster.count <= 8]
        judged += report(
            [run for run in timed if run.cluster.count > 8], fit(rest), options.verbose
        )
    else:
        shipped = with_constants(FITTED, {"compiled_moved": 0.454, "compiled_launch": 0.517})
        constants = fit(timed) if timed else shipped
        if options.print_constants:
            print(constants)
        if options.judge:
            runs, left = read(options.judge)
        judged += report(runs, constants, options.verbose)
    for line in left:
        print(f"left out: {line}")
    print(statistics_of(judged))
    ordered = sorted(map(abs, judged))
    p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    print(
        f"mean {100 * statistics.fmean(ordered):.2f} median {100 * statistics.median(ordered):.2f} p90 {100 * p90:.2f}"
    )


if __name__ == "__main__":
    main()
