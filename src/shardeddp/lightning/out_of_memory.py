"""Out of memory: a table and a picture of a rank's memory at the failure, and options that would help."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from inspect import signature
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch.optim import Optimizer

from shardeddp.charts import page, treemap
from shardeddp.checkpoint.location import is_remote, local_path
from shardeddp.config import Options
from shardeddp.engine.runtime import Runtime
from shardeddp.engine.states import UnitState
from shardeddp.engine.unit import Unit
from shardeddp.errors import errors_behind, extend_message, text_of
from shardeddp.lightning.api import LightningModule, Trainer, callbacks_of
from shardeddp.plan.memory import MemoryPlan
from shardeddp.report import Column, human_bytes, terminal_width, text_table
from shardeddp.tensor.shard_tensor import local_or_whole

# The last is of libraries of CUDA and ROCm: CUBLAS_STATUS_ALLOC_FAILED and others.
_SIGNS = (
    "not enough memory",
    "can't allocate memory",
    "out of memory",
    "std::bad_alloc",
    "_ALLOC_FAILED",
)
_HEADING = "Memory of this rank when it ran out, as shardeddp counts it:"


def explain_memory(
    error: BaseException, describe: Callable[[BaseException], Sequence[str]]
) -> None:
    """Append a memory table to the message of an out-of-memory error; ignore other errors.

    To be called while the rank still holds the memory of that moment.
    """
    if not is_out_of_memory(error):
        return
    if _HEADING in f"{text_of(error)} {getattr(error, '__notes__', '')}":  # it is told already
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
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in text_of(error) for sign in _SIGNS)
    )


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory of a rank when it ran out."""

    lines: Sequence[str]
    """Table, units and advice for the error's message."""
    page: str
    """HTML page with the memory by kind and unit."""


class OutOfMemory:
    """Reports on out-of-memory errors of a strategy's runs.

    The message of an error says what the rank held at that moment. If the run ends by it, a page
    shows the same by unit.
    """

    def __init__(self, describe: Callable[[BaseException], MemoryReport]) -> None:
        self._describe = describe
        self._page: str | None = None  # of the last error

    def explain(self, error: BaseException) -> None:
        """Add the memory in use to an out-of-memory error; to be called while the rank holds it."""
        explain_memory(error, self._lines)

    def during(self, inner: AbstractContextManager[None]) -> MemoryGuard:
        """Surround a context, and explain an out-of-memory error inside."""
        return MemoryGuard(inner, self._lines)

    def end_run(self, error: BaseException, directory: str | os.PathLike[str], rank: int) -> None:
        """Write the page of a rank whose run ends for want of memory into a local directory."""
        short = [it for it in errors_behind(error) if is_out_of_memory(it)]
        for it in short[:1]:
            self.explain(it)  # of a hook that nothing has surrounded
        page, self._page = self._page, None
        if not short or page is None or is_remote(directory):
            return
        path = Path(local_path(directory)) / f"out-of-memory-rank-{rank}.html"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Messages and names may have surrogates: bytes of paths that are not UTF-8.
            path.write_text(page, encoding="utf-8", errors="backslashreplace")
        except Exception as refused:  # noqa: BLE001 - the first error is the one to report
            extend_message(error, f"No picture of this memory: {refused}")
        else:
            extend_message(error, f"This memory by unit, as a picture: {path}")

    def _lines(self, error: BaseException) -> Sequence[str]:
        report = self._describe(error)
        self._page = report.page
        return report.lines


def refusal_to_repeat(trainer: Trainer, module: LightningModule, options: Options) -> str | None:
    """Return why ``ReshardOnOutOfMemory`` cannot repeat the steps of a training; None: it can."""
    if refusal := refusal_to_reshard(options):
        return refusal
    if not module.automatic_optimization:
        return (
            "does not work with manual optimization: a step that has run "
            "backward and optimizers itself cannot be repeated"
        )
    if "dataloader_iter" in signature(module.training_step).parameters:
        return (
            "does not work with training_step(self, dataloader_iter): a "
            "repeated step would take the next batch, and lose one. Take the batch as argument"
        )
    if any(getattr(it, "changes_by_step", False) for it in callbacks_of(trainer)):
        return (
            "does not work beside ReshardSchedule, which would change the "
            "strategy back before the next step"
        )
    return None


def refusal_to_reshard(options: Options) -> str | None:
    """Return why the strategy cannot change in the middle of a run; None: it can."""
    tensor, experts = options.tensor_parallel_size, options.expert_parallel_size
    if max(tensor, experts) == 1:
        return None
    return (
        f"does not work with split layers or divided experts yet, found "
        f"tensor_parallel_size={tensor} and expert_parallel_size={experts}"
    )


def memory_report(
    error: BaseException,
    runtime: Runtime,
    plan: MemoryPlan,
    saved_nbytes: int | None,
    optimizers: Sequence[Optimizer],
    options: Options,
    *,
    may_repeat: bool,
) -> MemoryReport:
    """Report the memory that a rank holds on its device, without calls to the device.

    ``saved_nbytes`` are those that ``full_shard`` takes less, as planned; None: not planned.
    ``may_repeat`` is True if ``ReshardOnOutOfMemory`` could be added to the run.
    """
    units, device = [progress.unit for progress in runtime.progresses], runtime.mesh.device
    held = [each.held() for each in units]
    labels = [unit.label for unit in units]
    now = {
        kind: {label: vars(each)[name] for label, each in zip(labels, held, strict=True)}
        for kind, name in (
            ("parameters", "main_nbytes"),
            ("gradients", "gradient_nbytes"),
            ("in_flight", "in_flight_nbytes"),
        )
    }
    now["optimizer"] = _states(optimizers, units, device)
    rows = {
        "main shards": ("parameters", plan.main_shard_nbytes),
        "gradient shards": ("gradients", plan.gradient_shard_nbytes),
        "optimizer states": ("optimizer", plan.optimizer_nbytes),
        "gathered, or gradients on their way": (
            "in_flight",
            plan.retained_nbytes + plan.in_flight_nbytes,
        ),
    }
    cells = [
        ("now", [sum(now[kind].values()) for kind, _ in rows.values()]),
        ("planned peak", [nbytes for _, nbytes in rows.values()]),
    ]
    columns = [
        Column(heading="kind", cells=[*rows], footer="without activations", is_number=False),
        *(
            Column(heading=heading, cells=[*map(human_bytes, each)], footer=human_bytes(sum(each)))
            for heading, each in cells
        ),
    ]
    gathered = [
        f"{unit.label} ({human_bytes(each.in_flight_nbytes)})"
        for unit, each in zip(units, held, strict=True)
        if unit.state is not UnitState.SHARDED
    ]
    lines = [
        *text_table(columns, terminal_width(80)),
        *_at_work(error, units),
        f"Gathered units: {', '.join(gathered) or 'nothing'}.",
        "What takes less memory:",
        *(f"- {each}" for each in advice(options, device, saved_nbytes, may_repeat=may_repeat)),
    ]
    now |= _outside_of_shards(sum(cells[0][1]), device)
    total = sum(sum(parts.values()) for kind, parts in now.items() if kind != "free")
    planned = {kind: {"": nbytes} for kind, nbytes in rows.values()}
    text = "\n".join(lines)
    html = page(
        f"Out of memory: rank {runtime.mesh.world.rank}",
        text_of(error).partition("\n")[0],
        [
            f"<h2>Held when it ran out: {human_bytes(total)}</h2>",
            treemap(now, 900, 400),
            f"<h2>Planned peak, without activations: {human_bytes(sum(cells[1][1]))}</h2>",
            treemap(planned, 900, 120),
            "<h2>As a table, and what takes less</h2>",
            f"<pre>{escape(text)}</pre>",
        ],
    )
    return MemoryReport(lines=lines, page=html)


def _outside_of_shards(nbytes: int, device: torch.device) -> dict[str, dict[str, int]]:
    """Return bytes of a GPU beside ``nbytes`` of shards, as its allocator counts them.

    They are activations and other tensors, blocks that it keeps free, and memory that it lacks.
    Nothing counts those of a host.
    """
    if device.type != "cuda":
        return {}
    allocated = torch.cuda.memory_allocated(device)
    reserved = torch.cuda.memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return {
        "activations": {"and other tensors": max(0, allocated - nbytes)},
        "slack": {"reserved, not in use": reserved - allocated},
        "free": {"not reserved": max(0, total - reserved)},
    }


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


def advice(
    options: Options,
    device: torch.device,
    saved_nbytes: int | None = None,
    *,
    may_repeat: bool = True,
) -> list[str]:
    """Return changes of options that save memory, the cheapest first.

    ``saved_nbytes`` are those that ``full_shard`` takes less at the peak, without activations;
    None: unknown. ``may_repeat`` as in :func:`memory_report`.
    """
    strategy = options.sharding_strategy
    lines = ["a smaller micro-batch, with Trainer(accumulate_grad_batches=...) for the same step"]
    if options.activation_checkpointing is None:
        lines.append('ShardedDP(activation_checkpointing="auto"): activations are computed again')
    if strategy != "full_shard" and (saved_nbytes is None or saved_nbytes > 0):
        more = "" if saved_nbytes is None else f"{human_bytes(saved_nbytes)} "
        lines.append(
            f'ShardedDP("full_shard"): {strategy} takes {more}more'
            + "; callbacks=[ReshardOnOutOfMemory()] changes to it if it is needed" * may_repeat
        )
    elif options.sharding.reshard.value != "after_forward":
        lines.append("ShardedDP(reshard_after_forward=True): units are released after forward")
    if device.type != "cpu" and not options.cpu_offload.params:
        kind = "True" if options.cpu_offload.optimizer else "CPUOffload(optimizer=True)"
        lines.append(f"ShardedDP(cpu_offload={kind}): states are in host memory")
    return [*lines, "what fits, and how fast it is: shardeddp plan, or ShardedDP(plan_only=True)"]


def _states(
    optimizers: Iterable[Optimizer], units: Sequence[Unit], device: torch.device
) -> dict[str, int]:
    """Return bytes of optimizer states on the device, by unit of the parameter."""
    unit_of = {
        id(it): unit.label for unit in units for group in unit.groups for it in group.sharded
    }
    found: Counter[str] = Counter()
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    local = local_or_whole(value)
                    if local.device.type == device.type:
                        found[unit_of.get(id(parameter), "others")] += local.nbytes
    return found
