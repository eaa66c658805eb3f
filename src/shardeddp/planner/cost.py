"""Cost: the time of a training step by what it is spent on, from counted work and few constants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardeddp.plan.hardware import Cluster
from shardeddp.planner.collectives import Collective
from shardeddp.planner.trace import Work

BACKWARD_ATTENTION = 2.5
"""FLOPs of fused attention's backward per FLOP of its forward: it computes the scores again."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What is not in data sheets; the defaults are fitted to published runs.

    `benchmarks/plan_accuracy.py --calibrate` fits them to 221 runs of MPT, Llama and GPT under FSDP1,
    FSDP2, YaFSDP and Megatron-DeepSpeed on 1 to 128 A100 and H100, without what is theirs alone.
    Every value is positive, so that a fit can move its logarithm.
    """

    matmul: float = 0.982
    """Rate of large matmuls in shares of the best that was measured on the GPU."""
    matmul_traffic: float = 1.74
    """Cost of a matmul's operands and results in shares of their time at full bandwidth."""
    attention: float = 0.269
    """Rate of fused attention in shares of the dense peak."""
    moved: float = 0.674
    """Cost of element-wise bytes in shares of their time at full bandwidth."""
    moved_backward: float = 1.67
    """Element-wise bytes of a backward per byte of its forward."""
    root_moved: float = 0.923
    """Element-wise bytes of the root (embedding, logits, loss) per byte that was counted."""
    recompute: float = 0.805
    """Cost of a recomputation per cost of the forward."""
    kernel_us: float = 4.29
    """Time that each kernel takes on the device whatever its size."""
    launch_us: float = 24.6
    """Host time of each kernel of a forward."""
    launch_backward: float = 1.73
    """Host time of a backward's kernels per that of its forward's, which are fewer."""
    link: float = 0.727
    """Share of the node's link that collectives reach."""
    network: float = 0.707
    """The same for the network between nodes."""
    network_unstated: float = 0.591
    """Share of the reference machine's network that there is where nobody says."""
    latency_us: float = 25.4
    """Of a collective, whatever its ranks."""
    hop_us: float = 6.55
    """Of each step from one rank of a ring to the next."""
    interference: float = 0.371
    """Slowdown of computing by the communication that it hides."""
    interferences: Mapping[str, float] = field(default_factory=dict[str, float])
    """The same by kind of collective, of those that were measured."""
    optimizer: float = 1.23
    """Passes of an optimizer over its states in shares of their time at full bandwidth."""
    micro_batch_ms: float = 12.6
    """Host time of each micro-batch beside its kernels'."""
    step_ms: float = 2.05
    """Of an optimizer step, whatever its size."""
    collective_us: float = 1e-3
    """Host time of each collective beside its transfer: hooks, hand-over to a stream, swapping of
    parameters. As good as nothing where it was not measured: those of a fit to runs of one strategy
    are in ``micro_batch_ms``."""
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rate of matmuls and attention by GPU, in shares of the above; of collectives by kind, in
    shares of that of gathers."""


FITTED = Constants(
    rates={
        "A100-40": 1.08,
        "A100-80": 1.13,
        "H100-80": 1.02,
        "H100-96-500W": 0.798,
        "attention A100-40": 1.16,
        "attention A100-80": 1.16,
        "attention H100-80": 0.653,
        "attention H100-96-500W": 0.859,
    },
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of one optimizer step; the parts sum to the whole."""

    compute: float
    recompute: float
    gathers: float
    """Exposed: not hidden behind computing."""
    reductions: float
    optimizer: float
    launch: float
    """Waiting of the device for the host."""
    exchanges: float = 0.0
    """Of activations, by ranks that split layers or have different experts, which wait for them."""

    @property
    def total(self) -> float:
        """All parts."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """What a step's time depends on beside work, collectives and machines."""

    micro_batches: int = 1
    recomputes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Shares of inner units' matmuls, attention and the rest that backward computes again."""
    fp32: bool = False
    optimizer_nbytes: float = 0.0
    """That a rank's optimizer step reads and writes."""
    host_gbs: float | None = None
    """Rate of an optimizer step on the host; None: it steps on the device."""
    overlaps: bool = True
    """Whether reductions run beside the backward; False: after it."""


def time_of_work(
    all_work: Work,
    inner: Work,
    collectives: Sequence[Collective],
    cluster: Cluster,
    setting: StepSetting,
    constants: Constants,
) -> Step:
    """The time of one optimizer step.

    Args:
        all_work: Of a micro-batch.
        inner: What of it is done by the units but the root.
        collectives: Of a step.
        cluster: Where it runs.
        setting: How.
        constants: What data sheets do not say.
    """
    c, count = constants, setting.micro_batches
    root = Work()
    root.add(all_work)
    root.add(inner, times=-1)
    own, own_launch = _forward(inner, cluster, setting, c)
    others, other_launch = _forward(root, cluster, setting, c, c.root_moved)
    forward = tuple(map(sum, zip(own, others, strict=True)))
    matmul, attention, moved = forward
    backward = (2 * matmul, BACKWARD_ATTENTION * attention, c.moved_backward * moved)
    again = [
        c.recompute * share * part for share, part in zip(setting.recomputes, own, strict=True)
    ]
    again_launch = own_launch * sum(setting.recomputes) / 3
    forward_launch = own_launch + other_launch
    ahead, back, redone = sum(forward), sum(backward), sum(again)
    hosts = {
        "forward": forward_launch,
        "backward": c.launch_backward * forward_launch + again_launch,
    }
    work = {"forward": ahead, "backward": back + redone}
    waits = {key: _soft_max(work[key], hosts[key], 16) - work[key] for key in work}
    # Of gathers, and of reductions: seconds, and what they cost computing that hides them.
    times: dict[str, list[tuple[float, float]]] = {
        phase: [
            _sum_of(
                (seconds, seconds * c.interferences.get(it.kind, c.interference))
                for it in collectives
                if it.phase == phase and (it.kind != "all_gather") is reduces
                for seconds in [time_collective(it, cluster, c) * it.times]
            )
            for reduces in (False, True)
        ]
        for phase in ("forward", "backward", "step")
    }
    gathers = reductions = 0.0
    if not setting.overlaps:
        reductions = times["backward"][1][0] + times["step"][1][0]
        times["backward"][1] = times["step"][1] = _NONE
    # What happens once per step hides with the rest: gathers in the first forward, reductions in
    # the last backward.
    for phase, once in (
        ("forward", (times["step"][0], _NONE)),
        ("backward", (_NONE, times["step"][1])),
    ):
        each = [(seconds / count, costs / count) for seconds, costs in times[phase]]
        last = [*map(_sum_of, zip(each, once, strict=True))]
        for repeats, parts in ((count - 1, each), (1, last)):
            seconds, costs = _sum_of(parts)
            exposed = _exposed(seconds, costs, work[phase] + waits[phase]) * repeats
            share = parts[0][0] / seconds if seconds else 0.0
            gathers += share * exposed
            reductions += (1 - share) * exposed
    issued = sum(it.times for it in collectives if it.phase != "layer")
    exchanges = sum(
        time_collective(it, cluster, c) * it.times for it in collectives if it.phase == "layer"
    )
    rate = setting.host_gbs or cluster.gpu.memory_tbs * 1e3 / c.optimizer
    return Step(
        compute=(ahead + back) * count,
        recompute=redone * count,
        gathers=gathers,
        reductions=reductions,
        optimizer=setting.optimizer_nbytes / (rate * 1e9),
        launch=(sum(waits.values()) + c.micro_batch_ms * 1e-3) * count
        + c.step_ms * 1e-3
        + c.collective_us * 1e-6 * issued,
        exchanges=exchanges,
    )


def _forward(
    work: Work, cluster: Cluster, setting: StepSetting, c: Constants, factor: float = 1.0
) -> tuple[tuple[float, float, float], float]:
    """Seconds of matmuls, attention and the rest on the device, and of launching on the host."""
    gpu = cluster.gpu
    peak = (gpu.fp32_tflops if setting.fp32 else gpu.bf16_tflops) * 1e12
    bandwidth = gpu.memory_tbs * 1e12
    moved = work.moved_nbytes * c.moved * factor
    matmul = work.matmul_flops / (peak * gpu.best * c.matmul * c.rates.get(gpu.name, 1.0))
    matmul += c.matmul_traffic * work.matmul_nbytes / bandwidth
    attention_rate = c.rates.get(f"attention {gpu.name}", 1.0)
    attention = work.attention_flops / (peak * c.attention * attention_rate)
    rest = moved / bandwidth + work.kernels * c.kernel_us * 1e-6
    return (matmul, attention, rest), work.kernels * c.launch_us * 1e-6


def time_collective(it: Collective, cluster: Cluster, c: Constants) -> float:
    """Seconds of one collective as a ring does it.

    Rings of the ranks of a node share its network: between nodes a ring has all of it, and groups
    across replicas, of which a node has several, a part. A gather passes every rank in turn; an
    all-reduce does so inside a node, and goes up and down a tree of nodes. An all-to-all is no ring:
    what leaves the node shares its network with what leaves from the other ranks.
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
    """Seconds that communication adds to computing beside which it runs.

    Args:
        communication: Seconds.
        costs: By which all of it slows computing that hides it.
        compute: Seconds.
    """
    hidden = min(1.0, compute / communication) if communication else 0.0
    return _soft_max(communication, compute) - compute + costs * hidden


def _soft_max(one: float, other: float, sharpness: int = 6) -> float:
    """The larger, a little more where they are alike: two queues do not stay side by side."""
    larger = max(one, other)
    return (
        larger * (1 + (min(one, other) / larger) ** sharpness) ** (1 / sharpness) if larger else 0.0
    )
