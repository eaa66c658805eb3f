"""Out of memory: a rank's memory at the failure, beside the plan, and options that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from traceback import walk_tb
from typing import Any

import torch
from torch.optim import Optimizer

from shardeddp.config import Options
from shardeddp.engine.runtime import Runtime
from shardeddp.engine.states import UnitState
from shardeddp.engine.unit import Unit
from shardeddp.errors import extend_message
from shardeddp.plan.memory import MemoryPlan
from shardeddp.report import Column, human_bytes, terminal_width, text_table
from shardeddp.tensor.shard_tensor import local_or_whole

# The last is of libraries of CUDA and ROCm: CUBLAS_STATUS_ALLOC_FAILED and others.
_SIGNS = ("not enough memory", "can't allocate memory", "out of memory", "_ALLOC_FAILED")
_HEADING = "Memory of this rank when it ran out, as shardeddp counts it:"


def explain_memory(
    error: BaseException, describe: Callable[[BaseException], Sequence[str]]
) -> None:
    """Append a memory table to the message of an out-of-memory error; ignore other errors.

    To be called while the rank still holds the memory of that moment.
    """
    told = [str(error), *getattr(error, "__notes__", ())]
    if not is_out_of_memory(error) or any(_HEADING in it for it in told):
        return
    try:
        lines = describe(error)
    except Exception as other:  # noqa: BLE001 - the first error is the one to report
        lines = [f"(not counted: {type(other).__name__}: {other})"]
    extend_message(error, "\n".join([_HEADING, *lines]))


class MemoryGuard:
    """Context that surrounds another one, and explains an out-of-memory error inside.

    A class and not a generator, for speed: a step of a small model enters several.
    """

    def __init__(
        self,
        inner: AbstractContextManager[None],
        describe: Callable[[BaseException], Sequence[str]],
    ) -> None:
        self._inner, self._describe = inner, describe

    def __enter__(self) -> None:
        """Enter the other context."""
        self._inner.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Leave the other context; add the memory in use to an out-of-memory error."""
        self._inner.__exit__(kind, error, traceback)
        if error is not None:
            explain_memory(error, self._describe)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory of the device or the host has run out."""
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


def memory_lines(
    error: BaseException,
    runtime: Runtime,
    plan: MemoryPlan,
    optimizers: Sequence[Optimizer],
    options: Options,
) -> list[str]:
    """Return lines on the memory that a rank holds on its device, without calls to the device."""
    units, device = [progress.unit for progress in runtime.progresses], runtime.mesh.device
    held = [each.held() for each in units]
    main, between, in_flight = (
        sum(getattr(each, name) for each in held)
        for name in ("main_nbytes", "gradient_nbytes", "in_flight_nbytes")
    )
    rows = {
        "main shards": (main, plan.main_shard_nbytes),
        "gradient shards": (between, plan.gradient_shard_nbytes),
        "optimizer states": (_states(optimizers, device), plan.optimizer_nbytes),
        "gathered, or gradients on their way": (
            in_flight,
            plan.retained_nbytes + plan.in_flight_nbytes,
        ),
    }
    planned = [each for _, each in rows.values()]
    columns = [
        Column(heading="kind", cells=[*rows], footer="without activations", is_number=False),
        *(
            Column(
                heading=heading, cells=[*map(human_bytes, cells)], footer=human_bytes(sum(cells))
            )
            for heading, cells in (
                ("now", [now for now, _ in rows.values()]),
                ("planned peak", planned),
            )
        ),
    ]
    gathered = [
        f"{unit.label} ({human_bytes(each.in_flight_nbytes)})"
        for unit, each in zip(units, held, strict=True)
        if unit.state is not UnitState.SHARDED
    ]
    return [
        *text_table(columns, terminal_width(80)),
        *_at_work(error, units),
        f"Gathered units: {', '.join(gathered) or 'nothing'}.",
        "What takes less memory:",
        *(f"- {each}" for each in advice(options, device)),
    ]


def _at_work(error: BaseException, units: Sequence[Unit]) -> list[str]:
    """Line on the innermost unit in the error's traceback; it has been resharded since."""
    modules = {id(unit.spec.module): unit for unit in units}
    passed = [
        modules[id(frame.f_locals.get("self"))]
        for frame, _ in walk_tb(error.__traceback__)
        if frame.f_code.co_name == "_call_impl" and id(frame.f_locals.get("self")) in modules
    ]
    if not passed:
        return []
    nbytes = sum(cost.gathered_nbytes for cost in passed[-1].costs())
    return [f"It was in the forward of {passed[-1].label} ({human_bytes(nbytes)} gathered)."]


def advice(options: Options, device: torch.device) -> list[str]:
    """Return changes of options that save memory, the cheapest first."""
    strategy = options.sharding_strategy
    lines = ["a smaller micro-batch, with Trainer(accumulate_grad_batches=...) for the same step"]
    if options.activation_checkpointing is None:
        lines.append('ShardedDP(activation_checkpointing="auto"): activations are computed again')
    if strategy != "full_shard":
        lines.append(
            f'ShardedDP("full_shard"): {strategy} holds more between steps; '
            f"callbacks=[ReshardOnOutOfMemory()] changes to it if it is needed"
        )
    elif options.sharding.reshard.value != "after_forward":
        lines.append("ShardedDP(reshard_after_forward=True): units are released after forward")
    if device.type != "cpu" and not options.cpu_offload.params:
        kind = "True" if options.cpu_offload.optimizer else "CPUOffload(optimizer=True)"
        lines.append(f"ShardedDP(cpu_offload={kind}): states are in host memory")
    return [*lines, "what fits, and how fast it is: shardeddp plan, or ShardedDP(plan_only=True)"]


def _states(optimizers: Iterable[Optimizer], device: torch.device) -> int:
    found: list[Any] = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    local = [local_or_whole(value) for value in found]
    return sum(each.nbytes for each in local if each.device.type == device.type)
