"""Probes that nothing has measured: what known constants say that a device takes."""

from dataclasses import replace
from typing import Any

from shardeddp.plan.hardware import Cluster, find_gpu
from shardeddp.planner.calibration import Device, Probe, Timed, TimedCollective
from shardeddp.planner.collectives import Collective
from shardeddp.planner.cost import FITTED, Constants, Step, StepSetting, Task, time_collective
from shardeddp.planner.work import UnitWork

CPU = Device(name="CPU", threads=1, memory_gb=16.0, ranks=2, per_node=2)
FIGURES = {
    "bf16_tflops": 0.2,
    "fp32_tflops": 0.1,
    "memory_gb": 16.0,
    "memory_tbs": 0.02,
    "link_gbs": 2.0,
    "best": 1.0,
}
KNOWN = replace(
    FITTED,
    matmul=1.0,
    matmul_traffic=0.3,
    attention=0.4,
    moved=1.5,
    moved_backward=2.0,
    root_moved=1.0,
    kernel_us=8.0,
    launch_us=1e-3,
    link=1.0,
    latency_us=100.0,
    hop_us=100.0 * FITTED.hop_us / FITTED.latency_us,
    interferences={"all_gather": 0.9, "reduce_scatter": 0.6, "all_reduce": 0.3},
    optimizer=2.5,
    micro_batch_ms=1.5,
    step_ms=0.5,
    collective_us=300.0,
    rates={"all_reduce": 0.8, "reduce_scatter": 0.5},
)


def work(flops: float, kernels: int, moved: float = 0.0, attention: float = 0.0) -> UnitWork:
    return UnitWork(
        matmul_flops=flops,
        matmul_nbytes=flops / 80,
        attention_flops=attention,
        moved_nbytes=moved,
        kernels=kernels,
    )


def timed(label: str, done: UnitWork, constants: Constants, dtype: str = "fp32") -> Timed:
    """What work takes by the model, without what it takes beside it."""
    cluster = Cluster(gpu=find_gpu("CPU", **FIGURES), count=1)
    alone = replace(constants, micro_batch_ms=0.0, step_ms=0.0)
    setting = StepSetting(fp32=dtype == "fp32")

    def step_of(done: UnitWork, constants: Constants) -> Step:
        return Task(work=done, inner=done, collectives=[], setting=setting).time(cluster, constants)

    def seconds(backward: float) -> float:
        none = replace(alone, moved_backward=backward)
        return step_of(done, none).total

    matmuls = replace(done, moved_nbytes=0.0, kernels=0, attention_flops=0.0)
    ahead = step_of(matmuls, alone).compute / 3
    if label == "matmul":
        return Timed(label=label, dtype=dtype, work=matmuls, seconds=ahead)
    both = seconds(constants.moved_backward)
    rest = seconds(1.0) - seconds(0.0)
    attention = replace(
        matmuls, matmul_flops=0.0, matmul_nbytes=0.0, attention_flops=done.attention_flops
    )
    attended = step_of(attention, alone).compute / 3.5
    forward = ahead + attended + rest
    return Timed(label=label, dtype=dtype, work=done, seconds=forward, backward_s=both - forward)


def probe_of(constants: Constants = KNOWN, **changes: Any) -> Probe:
    """The probe of a CPU with two ranks, by constants."""
    cluster = Cluster(gpu=find_gpu("CPU", **FIGURES), count=2)
    large = replace(work(1e9, 1), matmul_nbytes=0.0)
    measured = Probe(
        device=CPU,
        compute=[
            timed("matmul", large, constants),
            timed("matmul", large, constants, "bf16"),
            timed("decoder", work(1e9, 50, 1e7, 1e7), constants),
            timed("decoder", work(2e9, 50, 8e7, 1e7), constants),
            timed("decoder", work(1e8, 70, 9e7, 9e7), constants),
            timed("decoder", replace(work(3e9, 60, 2e7, 5e7), matmul_nbytes=1e9), constants),
        ],
        host=timed("decoder", work(1e5, 100, 1e5), constants),
        memory_gbs=20.0,
        optimizer_gbs=20.0 / constants.optimizer,
        micro_batch_s=constants.micro_batch_ms / 1e3,
        spread=0.03,
        step_s=constants.step_ms / 1e3,
        collective_s=constants.collective_us / 1e6,
        collectives=[
            TimedCollective(
                kind=kind,
                ranks=2,
                nbytes=nbytes,
                seconds=time_collective(
                    Collective(kind=kind, phase="forward", unit=0, nbytes=nbytes, ranks=2),
                    cluster,
                    constants,
                ),
            )
            for nbytes in (1 << 12, 1 << 20, 1 << 24)
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
        ],
        interference=constants.interferences,
    )
    return replace(measured, **changes)
