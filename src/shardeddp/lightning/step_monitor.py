"""Step monitor: where the time of a training's steps goes, how fast they are, and which rank is slow."""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from typing_extensions import override

from shardeddp.checkpoint.durable import try_writing
from shardeddp.comm import Mesh, StepClock
from shardeddp.comm.agreement import HostReduction
from shardeddp.comm.step_clock import EVALUATION, PARTS, CudaTimer, HostTimer, Span
from shardeddp.config import Options
from shardeddp.engine.runtime import runtime_of
from shardeddp.errors import ConfigurationError
from shardeddp.lightning import private
from shardeddp.lightning.api import (
    Callback,
    LightningModule,
    Trainer,
    log_interval,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from shardeddp.lightning.forked import call_in_fork
from shardeddp.lightning.planning import (
    ASSUMED_GPU,
    RunSetting,
    detached,
    gpu_at,
    memory_at,
    plan_as_set,
    samples_of,
    tokens_of,
)
from shardeddp.lightning.step_report import PlannedStep, StepReport, step_lines
from shardeddp.lightning.stragglers import WINDOW, Stragglers
from shardeddp.lightning.strategy import ShardedDP
from shardeddp.plan.sharding_strategy import ShardingStrategy
from shardeddp.planner.calibration import Device, Recorded, write
from shardeddp.planner.source import without_weights
from shardeddp.report import terminal_width

# -- Totals of steps


@dataclass(kw_only=True)
class _Totals:
    steps: int = 0
    seconds: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """Seconds by part and unit."""
    slower: float = 0.0
    """Seconds of waiting for collectives that were due to a slower rank."""
    samples: int = 0
    tokens: int = 0
    sent: int = 0
    of_all: tuple[float, float] = 0.0, 0.0
    """Samples and tokens of all ranks."""
    own: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Seconds of data and of compute, by step."""

    def add_step(self, spans: Sequence[Span], counts: tuple[int, int, int]) -> None:
        """Add one step."""
        data = compute = 0.0
        for part, unit, _, took in spans:
            if part != EVALUATION:
                self._spend(part, unit, took)
            data += took if part == "data" else 0.0
            compute += took if part == "compute" else 0.0
        self.steps += 1
        self.own.append((data, compute))
        self._count(*counts)

    def compare(self, own: Sequence[float], rank: int, of_all: tuple[float, float]) -> None:
        """Compare with other ranks: seconds of each per step, and what all have counted."""
        self.slower, self.of_all = self.steps * (max(own) - own[rank]), of_all

    def add(self, other: _Totals) -> None:
        """Add the steps of other totals."""
        self.steps += other.steps
        for key, took in other.seconds.items():
            self._spend(*key, took)
        self.slower += other.slower
        self.of_all = self.of_all[0] + other.of_all[0], self.of_all[1] + other.of_all[1]
        self._count(other.samples, other.tokens, other.sent)

    def _spend(self, part: str, unit: str, seconds: float) -> None:
        self.seconds[part, unit] = self.seconds.get((part, unit), 0.0) + seconds

    def _count(self, samples: int, tokens: int, sent: int) -> None:
        self.samples += samples
        self.tokens += tokens
        self.sent += sent

    def described(self) -> list[float]:
        """Return the median seconds of data and of compute per step, samples and tokens."""
        times = [median(it) for it in zip(*self.own, strict=True)] or [0.0, 0.0]
        return [*times, self.samples, self.tokens]

    def means(self) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
        """Return mean seconds per step by part, and by part and unit for gathers and reductions."""
        each = {key: took / self.steps for key, took in self.seconds.items()}
        parts = {part: sum(took for key, took in each.items() if key[0] == part) for part in PARTS}
        waits = parts["gather"] + parts["reduction"]
        moved = min(self.slower / self.steps, waits)
        kept = 1 - moved / waits if waits else 1.0
        parts["ranks"] += moved
        for part in ("gather", "reduction"):
            parts[part] *= kept
        units = {key: took * kept for key, took in each.items() if key[1]}
        return parts, units


@dataclass(kw_only=True)
class _Fit:
    """State of one call of ``Trainer.fit``."""

    mesh: Mesh
    clock: StepClock
    undo: ExitStack
    step: int
    """Number of optimizer steps at the end of the last one; without optimizers, of batches."""
    logged: int
    ended: int = 0
    shows: bool = True
    """Whether the progress bar may have an entry of it: nobody has logged one of that name."""
    is_planned: bool = False
    is_refused: bool = False
    """Whether a logger has refused figures."""
    counted: list[int] = field(default_factory=lambda: [0, 0])
    """Samples and tokens of the current step."""
    sent: int = 0
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque[tuple[int, int, int]])
    """Counts of steps with times that cannot be read yet."""
    window: _Totals = field(default_factory=_Totals)
    asked: tuple[_Totals, HostReduction] | None = None
    """Window with times sent to the other ranks, and the pending reduction."""
    since_log: _Totals = field(default_factory=_Totals)
    all: _Totals = field(default_factory=_Totals)
    stragglers: Stragglers = field(default_factory=Stragglers)
    last: deque[list[Span]] = field(default_factory=lambda: deque[list[Span]](maxlen=10))
    cold: int = 1
    """Steps to leave out: the first, and those around a reshard. They allocate, compile and agree."""

    def count(self, samples: int, tokens: int) -> None:
        """Count a batch of the current step."""
        self.counted = [self.counted[0] + samples, self.counted[1] + tokens]

    def begin_anew(self, mesh: Mesh) -> None:
        """Forget the steps so far, which were those of another strategy."""
        self.hear()
        # Steps that cannot be read yet, the one that ends now, and the first of the new strategy.
        self.cold, self.mesh, self.is_planned = len(self.waiting) + 2, mesh, False
        self.window, self.since_log, self.all = _Totals(), _Totals(), _Totals()
        self.last.clear()

    def end_step(self, step: int, interval: int) -> _Totals | None:
        """End a step; return the totals to log if that is due, ``interval`` steps after the last."""
        self.step = step
        self.clock.end_step()
        sent = self.mesh.sent_nbytes
        self.waiting.append((*self.counted, sent - self.sent))  # pyright: ignore[reportArgumentType]
        self.counted, self.sent = [0, 0], sent
        self.take()
        # Count ended steps, which are equal on all ranks; the number of readable steps may differ.
        self.ended += 1
        due: _Totals | None = None
        if self.ended % WINDOW == 1 and self.asked is not None:
            self.hear()
            if 0 < interval <= self.step - self.logged and self.since_log.steps:
                self.logged, due, self.since_log = self.step, self.since_log, _Totals()
        if self.ended % WINDOW == 0:
            self.ask()
        return due

    @contextmanager
    def excluded(self) -> Generator[None]:
        """Exclude what runs inside from the step: its time, and what it sends."""
        before = self.mesh.sent_nbytes
        with self.clock.during(EVALUATION):
            yield
        self.sent += self.mesh.sent_nbytes - before

    def ask(self) -> None:
        """Send what this rank has measured to the others, and begin a window."""
        self.asked = self.window, _send(self.window.described(), self.mesh)
        self.window = _Totals()

    def take(self) -> None:
        """Take the times of steps that can be read."""
        for spans in self.clock.take():
            counts = self.waiting.popleft()
            if self.cold:
                self.cold -= 1
                continue
            self.window.add_step(spans, counts)
            self.last.append(spans)

    def hear(self, *, is_whole: bool = True) -> None:
        """Evaluate the step times of all ranks, which were sent one step ago."""
        if self.asked is None:
            return
        (window, answer), self.asked = self.asked, None
        ranks = answer.wait().view(torch.float32).view(-1, 4).tolist()
        topology = self.mesh.topology
        alike = topology.world_size // topology.data_size  # ranks with the same batches
        times = [(data, compute) for data, compute, *_ in ranks]
        of_all = sum(it[2] for it in ranks) / alike, sum(it[3] for it in ranks) / alike
        window.compare([*map(sum, times)], self.mesh.rank, of_all)
        self.since_log.add(window)
        self.all.add(window)
        if is_whole and (said := self.stragglers.add(times)):
            rank_zero_warn(said)


# -- StepMonitor


def timer_of(device: torch.device) -> HostTimer | CudaTimer:
    """Return the timer for a device."""
    return CudaTimer() if device.type == "cuda" else HostTimer()


class StepMonitor(Callback):
    """Callback that reports the time of each training step by part, the throughput, and slow ranks.

    The parts of a step sum to its time: compute, exposed waits for all-gathers and for reductions
    (by unit), waits for slower ranks, data, the optimizer, checkpoints, and the rest. All loggers
    get them as ``shardeddp/step/...`` every ``log_every_n_steps``. The progress bar shows the
    throughput, and a table is printed at the end of training, also by an error. A slow rank is reported once.
    Evaluation and the first step are left out. No step waits for the device or for other ranks.
    After a reshard all figures begin anew.

    Args:
        trace: Path for a trace of each rank's last ten steps, written at the end of training, for
            Perfetto or ``chrome://tracing``: ``steps.json`` becomes ``steps.rank0.json`` and so on.
            None: no trace.
        record: Path for the step times of rank 0, written at the end of training, for
            ``shardeddp plan --calibrate``. None: no record.
    """

    def __init__(self, trace: str | Path | None = None, record: str | Path | None = None) -> None:
        super().__init__()
        self.report: StepReport | None = None
        """Report of this rank's last training; during training, of the last logged steps."""
        self.stragglers: list[int] = []
        """Ranks that were slower than the others in that training."""
        self._trace = None if trace is None else Path(trace)
        self._record = None if record is None else Path(record)

        self._fit: _Fit | None = None
        # Copies without weights and shards, or the reason why there is none, by module.
        self._bare: WeakKeyDictionary[LightningModule, Any] = WeakKeyDictionary()
        self._expected: PlannedStep | None = None
        # Of all strategies that a run may be resharded to: a process forks no more after a backward
        # on a GPU.
        self._plans: Mapping[ShardingStrategy, PlannedStep] = {}
        self._note = ""  # reason why figures are missing
        self._unplanned = ""  # settings that the prediction does not know
        self._gpu: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep a copy of the module without weights, to count its FLOPs."""
        if not isinstance(trainer.strategy, ShardedDP):
            raise ConfigurationError(
                f"StepMonitor measures steps of ShardedDP, found {type(trainer.strategy).__name__}. Use "
                f"Trainer(strategy=ShardedDP(...)), or take StepMonitor out of the callbacks"
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if (count := sum(isinstance(it, StepMonitor) for it in callbacks)) > 1:
            raise ConfigurationError(
                f"expected one StepMonitor among the callbacks, found {count}: a run has one "
                f"clock. StepMonitor(trace=..., record=...) writes both"
            )
        if stage != "fit":
            return
        if trainer.is_global_zero and runtime_of(pl_module) is None:
            try:
                with detached(pl_module):
                    self._bare[pl_module] = without_weights(pl_module)
            except ConfigurationError as error:
                self._bare[pl_module] = _reason(error)
        if trainer.is_global_zero and self._record is not None:
            _check_writable("record", self._record)
        if self._trace is not None:
            _check_writable("trace", _trace_of(self._trace, trainer.global_rank))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the measurement."""
        self._stop()
        mesh: Mesh = trainer.strategy.mesh  # pyright: ignore[reportAttributeAccessIssue]
        clock = StepClock(timer_of(mesh.device))
        undo = ExitStack()
        undo.callback(
            private.surround_fetches(
                trainer, lambda: clock.during("data"), lambda: clock.__exit__()
            )
        )
        self._fit = fit = _Fit(
            mesh=mesh,
            clock=clock,
            undo=undo,
            step=trainer.global_step,
            logged=trainer.global_step,
            sent=mesh.sent_nbytes,
        )
        undo.callback(private.surround_validation(trainer, fit.excluded))
        self.report, self.stragglers, self._expected, self._note = None, [], None, ""
        self._plans = {}
        if mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(mesh.device)
        mesh.measure(clock)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Plan the first step before its backward: autograd's threads of GPUs survive no fork."""
        fit = self._fit
        if fit is not None and not fit.is_planned and not isinstance(batch, Iterator):
            self._plan_while_others_wait(trainer, fit, batch)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count a batch, and end a step if the optimizer has stepped."""
        fit = self._fit
        if fit is None:
            return
        strategy: Any = trainer.strategy
        if not strategy.repeats_batch:  # of a rank that has run out of batches
            samples = samples_of(batch)
            fit.count(samples, samples * tokens_of(batch))
        mesh: Mesh = strategy.mesh
        if mesh is not fit.mesh:
            self._begin_anew(fit, mesh)
        if not fit.is_planned:  # the step has taken its batch from an iterator
            self._plan_while_others_wait(trainer, fit, batch)
        # Without an optimizer of Lightning (it makes an empty one) no step is counted: each batch is one.
        has_optimizer = any(it.param_groups for it in trainer.optimizers)
        step = trainer.global_step if has_optimizer else fit.step + 1
        if step != fit.step:
            self._end_step(trainer, fit, step)
        if self.report is not None and trainer.progress_bar_callback is not None:
            name, rate = self.report.throughput
            fit.shows = fit.shows and name not in trainer.callback_metrics  # else the user's own
            if fit.shows:
                private.show_in_progress_bar(trainer, name, rate)

    def _begin_anew(self, fit: _Fit, mesh: Mesh) -> None:
        """Forget the steps so far, which were those of another strategy."""
        rank_zero_info(
            f"StepMonitor: the model was resharded after {fit.ended} steps, and the report is of "
            f"those after it"
        )
        fit.begin_anew(mesh)
        self.stragglers = fit.stragglers.named
        self.report, self._expected, self._note = None, None, ""
        if mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(mesh.device)

    def _end_step(self, trainer: Trainer, fit: _Fit, step: int) -> None:
        due = fit.end_step(step, log_interval(trainer))
        self.stragglers = fit.stragglers.named
        if due is not None:
            self.report = self._report(due)
            for logger in trainer.loggers:
                try:
                    logger.log_metrics(self.report.metrics(), step=fit.step)
                except Exception as error:  # noqa: BLE001 - a training is not to end by it
                    if not fit.is_refused:
                        fit.is_refused = True
                        rank_zero_warn(
                            f"StepMonitor: {type(logger).__name__} has refused its figures, and may "
                            f"do so again without a warning ({type(error).__name__}: {error})"
                        )

    def _plan_while_others_wait(self, trainer: Trainer, fit: _Fit, batch: Any) -> None:
        """Plan in a step that is left out on all ranks; else they would wait in the next one."""
        fit.is_planned = True
        if trainer.is_global_zero:
            self._plan(trainer, batch)
        is_there = torch.zeros(1, dtype=torch.uint8, device="cpu")
        HostReduction(is_there, "plan of a step", fit.mesh.control).wait()

    def _plan(self, trainer: Trainer, batch: Any) -> None:
        """Predict the step and count the model's FLOPs, on rank 0."""
        strategy: Any = trainer.strategy
        self._gpu, self._expected, self._note = gpu_at(strategy.root_device), None, ""
        setting: RunSetting = strategy.setting(trainer)
        options: Options = strategy.options
        bare = self._bare.get(trainer.lightning_module, _SHARDED_BEFORE)
        if isinstance(bare, str):
            self._note = bare
            return
        own = options.sharding_strategy
        candidates = dict(setting.possible({**options.candidates, own: options.sharding}.items()))
        figures = memory_at(strategy.root_device) if self._gpu else {}

        def plans() -> tuple[dict[ShardingStrategy, PlannedStep], str]:
            plan = plan_as_set(
                bare,
                batch,
                [*candidates.items()],
                setting,
                self._gpu or ASSUMED_GPU,
                gpu_figures=figures,
            )
            found = {candidates[it.choice.strategy]: PlannedStep.of(it) for it in plan.plans}
            return found, ", ".join(plan.unplanned)

        try:
            if options.sharding not in self._plans:
                self._plans, self._unplanned = call_in_fork(plans)
            self._expected = self._plans[options.sharding]
        except ConfigurationError as error:
            self._note = _reason(error)
        except Exception as error:  # noqa: BLE001 - a training is not to end by it
            self._note = f"no plan: {type(error).__name__}: {error}"

    def _report(self, totals: _Totals) -> StepReport:
        fit, expected = self._fit, self._expected
        assert fit is not None
        parts, units = totals.means()
        seconds = sum(parts.values())
        flops = peak = None
        if expected is not None:
            choice = expected.choice
            samples = totals.samples / totals.steps
            flops = expected.model_flops * samples / (choice.micro_batch * choice.micro_batches)
            peak = expected.peak_flops if self._gpu else None
        device = fit.mesh.device
        samples_of_all, tokens_of_all = totals.of_all
        return StepReport(
            rank=fit.mesh.rank,
            steps=totals.steps,
            parts=parts,
            units=units,
            samples_per_s=samples_of_all / totals.steps / seconds,
            tokens_per_s=tokens_of_all / totals.steps / seconds
            if tokens_of_all > samples_of_all
            else None,
            model_flops_per_s=None if flops is None else flops / seconds,
            peak_flops_per_s=peak,
            memory_nbytes=torch.cuda.max_memory_allocated(device)
            if device.type == "cuda"
            else None,
            sent_nbytes=totals.sent // totals.steps,
            expected=expected if self._gpu else None,
            unplanned=self._unplanned,
            note=self._note
            or (f"no dense peak of this device ({device.type}) is known" if peak is None else ""),
        )

    # -- Evaluation, and the end

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report; write trace and record."""
        fit = self._fit
        if fit is None:
            return
        if fit.mesh.device.type == "cuda":
            torch.cuda.synchronize(fit.mesh.device)  # once
        fit.take()
        fit.hear()
        fit.ask()
        fit.hear(is_whole=False)
        self.stragglers = fit.stragglers.named
        if fit.all.steps:
            self._finish(fit, trainer)
        else:
            rank_zero_warn(
                f"StepMonitor has nothing to report or to write: of {fit.ended} steps, the first is "
                f"left out, and those around a reshard"
            )
        self._stop()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report and write the steps that all ranks had measured before an error or Ctrl-C."""
        try:
            if self._fit is not None and self._fit.all.steps:
                self._finish(self._fit, trainer)
        except Exception as error:  # noqa: BLE001 - the error that ends the run is not to be lost
            rank_zero_warn(f"StepMonitor could not report: {type(error).__name__}: {error}")
        finally:
            self._stop()

    def _finish(self, fit: _Fit, trainer: Trainer) -> None:
        """Print the report; write trace and record; without communication."""
        self.report = self._report(fit.all)
        try:
            rank_zero_only(print)("\n".join(step_lines(self.report, terminal_width(80))))
        except (OSError, ValueError) as error:  # a pipe or file that was closed
            rank_zero_warn(f"StepMonitor could not print: {type(error).__name__}: {error}")
        with _warned("trace", self._trace):
            self._write_trace(fit)
        if trainer.is_global_zero:
            with _warned("record", self._record):
                self._write_record(self.report, trainer)

    def _stop(self) -> None:
        if self._fit is not None:
            self._fit.mesh.measure(None)
            self._fit.undo.close()
        self._fit = None

    def _write_trace(self, fit: _Fit) -> None:
        if self._trace is None:
            return
        events, begin, rank = list[dict[str, Any]](), 0.0, fit.mesh.rank
        for spans in fit.last:
            events += [
                {
                    "ph": "X",
                    "cat": part,
                    "name": f"{part} {unit}".strip(),
                    "ts": 1e6 * (begin + since),
                    "dur": 1e6 * took,
                    "pid": rank,
                    "tid": 0,
                }
                for part, unit, since, took in spans
            ]
            begin += sum(took for *_, took in spans)
        document = {"traceEvents": events, "distributedInfo": {"rank": rank}}
        path = _trace_of(self._trace, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document), encoding="utf-8")

    def _write_record(self, report: StepReport, trainer: Trainer) -> None:
        if self._record is None:
            return
        if self._expected is None or self._unplanned:
            why = (
                self._note
                if self._expected is None
                else f"the plan does not know {self._unplanned}"
            )
            rank_zero_warn(f"StepMonitor: {self._record} was not written: {why}")
            return
        mesh: Mesh = trainer.strategy.mesh  # pyright: ignore[reportAttributeAccessIssue]
        gathers, reductions = (
            {unit: took for (its, unit), took in report.units.items() if its == part}
            for part in ("gather", "reduction")
        )
        choice = self._expected.choice
        name = (
            f"{type(trainer.lightning_module).__name__}: {choice.strategy} over {choice.shard_size}"
        )
        measured = Recorded(
            name=f"{name}, {choice.micro_batches} x {choice.micro_batch} samples, {choice.precision}",
            device=Device.of(mesh.device, mesh.topology.world_size, trainer.num_devices),
            steps=report.steps,
            parts=report.parts,
            gathers=gathers,
            reductions=reductions,
            figures=report.metrics(),
            memory=vars(self._expected.memory),
            task=self._expected.task,
        )
        write(self._record, measured)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the state of a run from copies and pickles."""
        return {**vars(self), "_fit": None, "_bare": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without a run."""
        vars(self).update(state, _bare=WeakKeyDictionary())


def _send(own: Sequence[float], mesh: Mesh) -> HostReduction:
    """Send this rank's figures to all ranks: a non-blocking reduction with a row per rank."""
    numbers = torch.zeros(mesh.topology.world_size, len(own), dtype=torch.float32, device="cpu")
    numbers[mesh.rank] = torch.tensor(own, device="cpu")
    return HostReduction(
        numbers.view(-1).view(torch.uint8), "times of steps", mesh.control, ahead=True
    )


@contextmanager
def _warned(option: str, path: Path | None) -> Generator[None]:
    """Turn an error of the file system into a warning: a training that is over is not to fail."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"StepMonitor({option}={str(path)!r}) was not written: {type(error).__name__}: {error}",
            stacklevel=2,
        )


def _check_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before the training that it would be written after."""
    try:
        try_writing(path)
    except OSError as error:
        raise ConfigurationError(
            f"StepMonitor({option}=...): expected a file that can be written, found {path} "
            f"({type(error).__name__}: {error.strerror}). Name another one"
        ) from error


def _trace_of(path: Path, rank: int) -> Path:
    """Return the file of a rank's trace."""
    return Path(f"{str(path).removesuffix('.json')}.rank{rank}.json")


def _reason(error: ConfigurationError) -> str:
    """Return the first sentence of an error."""
    return str(error).partition(". ")[0]


_SHARDED_BEFORE = (
    "the module was sharded by an earlier run without this StepMonitor, and a plan needs a copy of it "
    "from before: give the first run the same StepMonitor"
)
