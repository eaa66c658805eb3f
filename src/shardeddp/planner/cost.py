"""Cost: predicted time of a training step by kind of work, from counted work and few constants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardeddp.plan.hardware import Cluster
from shardeddp.planner.collectives import Collective
from shardeddp.planner.work import UnitWork

BACKWARD_ATTENTION = 2.5
"""FLOPs of fused attention's backward per FLOP of its forward; it recomputes the scores."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants that data sheets do not give; the defaults are fitted to published runs.

    `benchmarks/plan_accuracy.py --calibrate` fits them to 221 runs of MPT, Llama and GPT under FSDP1,
    FSDP2, YaFSDP and Megatron-DeepSpeed on 1 to 128 A100 and H100, without constants that are
    specific to one framework. Every value is positive: the fit varies logarithms.
    """

    matmul: float = 0.977
    """Rate of large matmuls, as a fraction of the best rate measured on the GPU."""
    matmul_traffic: float = 0.913
    """Time of a matmul's operands and results, as a multiple of their time at full bandwidth."""
    attention: float = 0.288
    """Rate of fused attention, as a fraction of the dense peak."""
    moved: float = 0.869
    """Time of element-wise bytes, as a multiple of their time at full bandwidth."""
    moved_backward: float = 1.68
    """Element-wise bytes of a backward per byte of its forward."""
    root_moved: float = 1.61
    """Element-wise bytes of the root (embedding, logits, loss) per counted byte."""
    recompute: float = 0.784
    """Time of a recomputation per time of the forward."""
    kernel_us: float = 11.0
    """Fixed device time of each kernel."""
    launch_us: float = 23.4
    """Host time of each kernel launch in a forward."""
    launch_backward: float = 3.27
    """Host time of all launches in a backward per host time of those in the forward."""
    link: float = 0.737
    """Fraction of the intra-node link bandwidth that collectives reach."""
    network: float = 0.710
    """Fraction of the inter-node bandwidth that collectives reach."""
    network_unstated: float = 0.601
    """Assumed fraction of the reference machine's network where its bandwidth is not given."""
    latency_us: float = 24.0
    """Fixed latency of a collective."""
    hop_us: float = 6.18
    """Latency of each hop between neighbours of a ring."""
    interference: float = 0.401
    """Slowdown of compute by overlapped communication."""
    shortage: float = 0.157
    """Slowdown of compute by an allocator that releases blocks and reserves them again in a step."""
    interferences: Mapping[str, float] = field(default_factory=dict[str, float])
    """Slowdown by kind of collective, for measured kinds."""
    optimizer: float = 1.05
    """Time of an optimizer step, as a multiple of its states' time at full bandwidth."""
    micro_batch_ms: float = 5.19
    """Host time of each micro-batch, without its kernel launches."""
    step_ms: float = 2.62
    """Fixed host time of an optimizer step."""
    collective_us: float = 1e-3
    """Host time of each collective without its transfer: hooks, enqueueing on a stream, swapping of
    parameters. Nearly 0 unless measured: constants fitted to runs of one strategy have it in
    ``micro_batch_ms``."""
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    """Relative rate of matmuls, of attention and of moved bytes by GPU, and of collectives by kind
    (all-gather: 1)."""


FITTED = Constants(
    rates={
        "A100-40": 1.05,
        "A100-80": 1.11,
        "H100-80": 1.00,
        "H100-96-500W": 0.855,
        "attention A100-40": 1.14,
        "attention A100-80": 1.17,
        "attention H100-80": 0.655,
        "attention H100-96-500W": 0.896,
        "moved A100-40": 1.20,
        "moved A100-80": 0.962,
        "moved H100-80": 0.981,
        "moved H100-96-500W": 0.851,
    },
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of one optimizer step; the parts sum to the whole."""

    compute: float
    recompute: float
    gathers: float
    """Exposed time of all-gathers: the part that compute does not overlap; and all of that of
    buffers' broadcasts."""
    reductions: float
    optimizer: float
    launch: float
    """Time that the device waits for the host, which launches kernels and finds memory."""
    exchanges: float = 0.0
    """Exchanges of activations in split layers and experts, which wait for them."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """Settings that change a step's time, apart from work, collectives and cluster."""

    micro_batches: int = 1
    recomputes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Recomputed fractions of inner units' matmuls, attention and other kernels."""
    copies_s: float = 0.0
    """Seconds of a micro-batch in which inputs of recomputed units go to the host and come back;
    the device computes nothing meanwhile."""
    trained: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Fractions of matmuls, attention and other kernels that have a backward; frozen parameters
    take none for their gradients."""
    fp32: bool = False
    optimizer_nbytes: float = 0.0
    """Bytes that a rank's optimizer step reads and writes."""
    host_gbs: float | None = None
    """Bandwidth in GB/s of an optimizer step on the host; None: the step runs on the device."""

    shortage: float = 0.0
    """Fraction of the slowdown by allocators that cannot keep their blocks; 0 if they can."""
    forward_prefetch: int = 1
    """Number of units gathered ahead in forward; 0: compute waits for each gather."""
    backward_prefetch: int = 1
    """Number of units gathered ahead in backward; 0: compute waits for each gather."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Input of the cost model for one step, apart from the cluster and the constants."""

    work: UnitWork
    """Work of a micro-batch."""
    inner: UnitWork
    """Part of ``work`` that inner units do."""
    collectives: Sequence[Collective]
    setting: StepSetting

    def time(self, cluster: Cluster, constants: Constants) -> Step:
        """Predict the time of one optimizer step."""
        c, setting = constants, self.setting
        count = setting.micro_batches
        root = UnitWork()
        root.add(self.work)
        root.add(self.inner, times=-1)
        own, own_launch = _forward(self.inner, cluster, setting, c)
        others, other_launch = _forward(root, cluster, setting, c, c.root_moved)
        forward = tuple(map(sum, zip(own, others, strict=True)))
        matmul, attention, moved = forward
        trained = setting.trained
        backward = (
            2 * matmul * trained[0],
            BACKWARD_ATTENTION * attention * trained[1],
            c.moved_backward * moved * trained[2],
        )
        again = [
            c.recompute * share * part for share, part in zip(setting.recomputes, own, strict=True)
        ]
        again_launch = own_launch * sum(setting.recomputes) / 3
        forward_launch = own_launch + other_launch
        ahead, back, redone = sum(forward), sum(backward), sum(again)
        hosts = {
            "forward": forward_launch,
            "backward": c.launch_backward * forward_launch * trained[2] + again_launch,
        }
        work = {"forward": ahead, "backward": back + redone}
        waits = {key: _soft_max(work[key], hosts[key], 16) - work[key] for key in work}
        compute = {phase: work[phase] + waits[phase] for phase in work}
        gathers, reductions = _exposed_by_kind(self, cluster, c, compute)
        issued = sum(it.times for it in self.collectives if it.phase != "layer")
        exchanges = sum(
            time_collective(it, cluster, c) * it.times
            for it in self.collectives
            if it.phase == "layer"
        )
        rate = setting.host_gbs or cluster.gpu.memory_tbs * 1e3 / c.optimizer
        return Step(
            compute=(ahead + back) * count,
            recompute=(redone + setting.copies_s) * count,
            gathers=gathers,
            reductions=reductions,
            optimizer=setting.optimizer_nbytes / (rate * 1e9),
            launch=(sum(waits.values()) + c.micro_batch_ms * 1e-3) * count
            + c.shortage * setting.shortage * sum(work.values()) * count
            + c.step_ms * 1e-3
            + c.collective_us * 1e-6 * issued,
            exchanges=exchanges,
        )


def _exposed_by_kind(
    task: Task, cluster: Cluster, c: Constants, compute: Mapping[str, float]
) -> tuple[float, float]:
    """Return the seconds of a step's all-gathers, and of its reductions, that nothing hides.

    ``compute`` are the seconds of a micro-batch's forward and backward, with waits for the host.
    """
    setting, count = task.setting, task.setting.micro_batches
    # Per phase, for all-gathers and for reductions: seconds, and slowdown of overlapped compute.
    times: dict[str, list[tuple[float, float]]] = {
        phase: [
            _sum_of(
                (seconds, seconds * c.interferences.get(it.kind, c.interference))
                for it in task.collectives
                if it.phase == phase and (it.kind != "all_gather") is reduces
                for seconds in [time_collective(it, cluster, c) * it.times]
            )
            for reduces in (False, True)
        ]
        for phase in ("forward", "backward", "step")
    }
    reductions = 0.0
    gathers = sum(
        time_collective(it, cluster, c) * it.times for it in task.collectives if it.phase == "begin"
    )
    for phase, prefetch in (
        ("forward", setting.forward_prefetch),
        ("step", setting.forward_prefetch),
        ("backward", setting.backward_prefetch),
    ):
        if not prefetch:
            gathers += times[phase][0][0]
            times[phase][0] = _NONE
    # Collectives once per step overlap as well: all-gathers the first forward, reductions the last
    # backward.
    for phase, once in (
        ("forward", (times["step"][0], _NONE)),
        ("backward", (_NONE, times["step"][1])),
    ):
        each = [(seconds / count, costs / count) for seconds, costs in times[phase]]
        last = [*map(_sum_of, zip(each, once, strict=True))]
        for repeats, parts in ((count - 1, each), (1, last)):
            seconds, costs = _sum_of(parts)
            exposed = _exposed(seconds, costs, compute[phase]) * repeats
            share = parts[0][0] / seconds if seconds else 0.0
            gathers += share * exposed
            reductions += (1 - share) * exposed
    return gathers, reductions


def _forward(
    work: UnitWork, cluster: Cluster, setting: StepSetting, c: Constants, factor: float = 1.0
) -> tuple[tuple[float, float, float], float]:
    """Return device seconds of matmuls, attention, other kernels; and host seconds of launches."""
    gpu = cluster.gpu
    peak = (gpu.fp32_tflops if setting.fp32 else gpu.bf16_tflops) * 1e12
    bandwidth = gpu.memory_tbs * 1e12
    moved = work.moved_nbytes * c.moved * factor / c.rates.get(f"moved {gpu.name}", 1.0)
    matmul = work.matmul_flops / (peak * gpu.best * c.matmul * c.rates.get(gpu.name, 1.0))
    matmul += c.matmul_traffic * work.matmul_nbytes / bandwidth
    attention_rate = c.rates.get(f"attention {gpu.name}", 1.0)
    attention = work.attention_flops / (peak * c.attention * attention_rate)
    rest = moved / bandwidth + work.kernels * c.kernel_us * 1e-6
    return (matmul, attention, rest), work.kernels * c.launch_us * 1e-6


def time_collective(it: Collective, cluster: Cluster, c: Constants) -> float:
    """Predict the seconds of one call of a collective.

    Rings share the network of a node. A ring of all its ranks has the whole bandwidth; a replicate
    group has a part of it, since a node has several. An all-gather passes every rank in turn; an
    all-reduce does so inside a node, and goes up and down a tree of nodes. An all-to-all is no ring:
    its traffic to other nodes shares the network with that of the node's other ranks.
    """
    passes = 2 if it.kind == "all_reduce" else 1
    nodes = min(it.ranks, math.ceil(it.ranks * it.stride / cluster.ranks_per_node))
    rate = cluster.gpu.link_gbs * c.link
    if nodes > 1:
        stated = cluster.network_gbits or cluster.gpu.network_gbits * c.network_unstated
        own = stated / 8 * c.network
        inside = max(1, cluster.ranks_per_node // it.stride)
        if it.kind == "all_to_all":
            leaving = (it.ranks - it.ranks / nodes) / (it.ranks - 1)
            rate = min(rate / (1 - leaving) if leaving < 1 else rate, own / leaving)
        else:
            rate = min(rate, own * inside)
    hops = it.ranks - 1
    if it.kind == "all_reduce" and nodes > 1:
        hops = math.ceil(it.ranks / nodes) - 1 + math.ceil(math.log2(nodes))
    latency = (c.latency_us + c.hop_us * hops) * 1e-6
    seconds = it.nbytes * (it.ranks - 1) / it.ranks / (rate * 1e9) + latency
    return passes * seconds / c.rates.get(it.kind, 1.0)


_NONE = (0.0, 0.0)


def _sum_of(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    first = second = 0.0
    for one, other in pairs:
        first, second = first + one, second + other
    return first, second


def _exposed(communication: float, costs: float, compute: float) -> float:
    """Return the seconds that communication adds to the compute that overlaps it.

    ``costs`` are the seconds that compute loses if all communication is overlapped.
    """
    hidden = min(1.0, compute / communication) if communication else 0.0
    return _soft_max(communication, compute) - compute + costs * hidden


def _soft_max(one: float, other: float, sharpness: int = 6) -> float:
    """Return a smooth maximum, larger for similar values: two queues never overlap perfectly."""
    larger = max(one, other)
    return (
        larger * (1 + (min(one, other) / larger) ** sharpness) ** (1 / sharpness) if larger else 0.0
    )
