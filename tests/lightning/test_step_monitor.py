"""StepMonitor in runs of a Trainer: parts of steps, what loggers and people get, and what it leaves alone."""

import contextlib
import csv
import io
import itertools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shardeddp import ConfigurationError, ReshardSchedule, ShardedDP, StepMonitor
from shardeddp.comm.step_clock import PARTS, HostTimer
from shardeddp.lightning import step_monitor as module
from shardeddp.lightning.step_report import StepReport
from shardeddp.lightning.stragglers import WINDOW
from shardeddp.plan.hardware import Cluster, find_gpu
from shardeddp.planner.calibration import calibrate, read, write
from shardeddp_cli import main
from support.probes import probe_of
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds, on_ranks

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
]

STEPS = 12


class Takes(TinyGpt):
    """A step that takes some time: it is added to an injected clock, or slept."""

    spend: Callable[[str], object] = staticmethod(lambda part: None)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """A loss."""
        self.spend("compute")
        return super().training_step(batch, batch_index)

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        """A loss that nobody looks at."""
        self.spend("evaluation")
        self.loss(batch)

    def on_validation_model_eval(self) -> None:
        """Before callbacks hear of a validation."""
        self.spend("evaluation")
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        """After callbacks have heard of its end."""
        self.spend("evaluation")
        super().on_validation_model_train()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """After backward."""
        self.spend("optimizer")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Before it is written."""
        self.spend("hook of a checkpoint")


def takes(spend: Callable[[str], object]) -> Takes:
    """A task whose parts spend time that way."""
    task = Takes()
    task.spend = spend
    return task


class Watches(Callback):
    """Reads a clock of its own where an optimizer step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self._steps = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """A step may end here."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.ends.append(time.perf_counter())


def fit_between_watches(**options: Any) -> StepReport:
    """A report of all steps but the first, whose time two other clocks bear out.

    One is read before the monitor and one after it, so that whatever holds the process up between the
    two is inside of what they allow.
    """
    before, after = Watches(), Watches()
    report = fit(before=(before,), callbacks=(after,), **options)
    assert report.steps == len(before.ends) - 1 == len(after.ends) - 1
    total = report.seconds * report.steps
    least, most = before.ends[-1] - after.ends[0], after.ends[-1] - before.ends[0]
    assert least <= total + 1e-6 and total - 1e-6 <= most
    return report


def fit(
    strategy: str = "full_shard",
    task: LightningModule | None = None,
    *,
    monitor: StepMonitor | None = None,
    shard_size: int | None = None,
    before: tuple[Callback, ...] = (),
    callbacks: tuple[Callback, ...] = (),
    loader: Any = None,
    val: Any = None,
    **options: Any,
) -> StepReport:
    """What a monitor reports of a training."""
    monitor = monitor or StepMonitor()
    trainer = make_trainer(
        ShardedDP(strategy, shard_size, {Block}),
        callbacks=[*before, monitor, *callbacks],
        **{"max_steps": STEPS, **options},
    )
    loader = loader or token_loader(4 * 20 * dist.get_world_size())
    trainer.fit(task or Takes(), loader, val)
    assert trainer.strategy.mesh.run.clock is None, "nothing is measured any more"
    assert monitor.report is not None
    return monitor.report


# -- Parts that sum to the step


def shares(strategy: str, shard_size: int | None, options: dict[str, Any]) -> StepReport:
    report = fit_between_watches(strategy=strategy, shard_size=shard_size, **options)
    assert tuple(report.parts) == PARTS
    assert min(report.parts.values()) >= 0
    return report


@pytest.mark.loop(1)
@pytest.mark.parametrize(
    ("strategy", "size", "shard_size", "options"),
    [
        ("full_shard", 2, None, {}),
        ("full_shard", 2, None, {"accumulate_grad_batches": 2, "max_steps": 6}),
        ("hybrid_shard", 4, 2, {}),
        ("shard_grad_op", 2, None, {"accumulate_grad_batches": 2, "max_steps": 6}),
        ("no_shard", 2, None, {"gradient_clip_val": 0.5}),
    ],
)
def test_parts_sum_to_the_step_and_units_have_their_names(
    world: Worlds, strategy: str, size: int, shard_size: int | None, options: dict[str, Any]
) -> None:
    units = {"(root)", "blocks.0", "blocks.1", "blocks.2"}
    for report in world(size).run(shares, strategy, shard_size, options):
        reduced = {unit for part, unit in report.units if part == "reduction"}
        gathered = {unit for part, unit in report.units if part == "gather"}
        assert reduced == gathered == units
        for part in ("gather", "reduction"):
            summed = sum(took for (its, _), took in report.units.items() if its == part)
            assert summed == pytest.approx(report.parts[part])
        micro_batches = options.get("accumulate_grad_batches", 1)
        assert report.sent_nbytes > 0
        assert report.samples_per_s == pytest.approx(size * 4 * micro_batches / report.seconds)
        assert report.tokens_per_s == pytest.approx(6 * report.samples_per_s)


SECONDS = {
    "data": 1.0,
    "compute": 8.0,
    "optimizer": 2.0,
    "evaluation": 50.0,
    "hook of a checkpoint": 4.0,
}


class Time:
    """A clock that a training moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, part: str) -> None:
        """A part takes its time."""
        self.now += SECONDS[part]


class Slow(Dataset[Tensor]):
    """Tokens that take time to load."""

    def __init__(self, spend: Callable[[str], object]) -> None:
        self._spend, self._inner = spend, token_loader(80).dataset

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Tensor:
        self._spend("data")
        return self._inner[index]


def exact(**options: Any) -> dict[str, float]:
    """Parts of a step on an injected clock; two samples a batch."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Time()
        patch.setattr(module, "timer_of", lambda device: HostTimer(clock))
        loader = DataLoader(Slow(clock.spend), batch_size=2)
        report = fit(task=takes(clock.spend), loader=loader, **options)
        return {part: took for part, took in report.parts.items() if took}


def exact_with_accumulation() -> dict[str, float]:
    return exact(accumulate_grad_batches=2)


def exact_with_validation() -> dict[str, float]:
    return exact(val=token_loader(8), val_check_interval=3)


def exact_with_checkpoints(folder: str) -> dict[str, float]:
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    return exact(callbacks=(saves,), enable_checkpointing=True)


@pytest.mark.slow
@pytest.mark.long
def test_each_part_has_its_own_time_and_nothing_else(world: Worlds, tmp_path: Path) -> None:
    for size in (1, 2):
        for parts in world(size).run(exact):
            assert parts == {"data": 2, "compute": 8, "optimizer": 2}
        for parts in world(size).run(exact_with_accumulation):
            assert parts == {"data": 4, "compute": 16, "optimizer": 2}
        for parts in world(size).run(exact_with_validation):
            assert parts == {"data": 2, "compute": 8, "optimizer": 2}, "evaluation is no part"
    for parts in world(2).run(exact_with_checkpoints, str(tmp_path)):
        assert {**parts, "rest": 0, "checkpoint": 0} == {
            "data": 2,
            "compute": 8,
            "optimizer": 2,
            "rest": 0,
            "checkpoint": 0,
        }
        # Lightning calls the module's hook before it calls the strategy.
        assert parts["rest"] == 4


def waiting() -> StepReport:
    def spend(part: str) -> None:
        time.sleep(0.1 if part == "compute" and dist.get_rank() == 1 else 0.001)

    return fit(task=takes(spend))


@pytest.mark.slow
def test_time_that_ranks_wait_for_a_slow_one_is_not_the_network_s(world: Worlds) -> None:
    fast, slow = world(2).run(waiting)
    assert fast.parts["ranks"] > max(0.05, slow.parts["ranks"])


def checkpointing(folder: str) -> StepReport:
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    return fit(callbacks=(saves,), enable_checkpointing=True)


@pytest.mark.slow
def test_checkpoints_are_a_part(world: Worlds, tmp_path: Path) -> None:
    for report in world(2).run(checkpointing, str(tmp_path)):
        assert report.parts["checkpoint"] > report.parts["data"] > 0


class Exchanges(Takes):
    """Sends much in its validation."""

    def on_validation_epoch_end(self) -> None:
        """Hear of the others."""
        self.all_gather(torch.zeros(1000))


def sent_with_validation(every: int) -> int:
    loaders = {"val": token_loader(8), "val_check_interval": every} if every else {}
    return fit(task=Exchanges(), max_steps=4, **loaders).sent_nbytes


def test_bytes_of_a_step_are_those_of_training_alone(world: Worlds) -> None:
    without, with_validation = (world(2).run(sent_with_validation, it)[0] for it in (0, 2))
    assert without == with_validation


# -- Runs


class Fails(Takes):
    """A module that breaks off in the middle of a forward."""

    at = 3

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """A loss, up to some step."""
        loss = super().training_step(batch, batch_index)
        if self.trainer.global_step == self.at:
            raise KeyError("enough")
        return loss


@on_ranks(2)
def test_a_training_that_breaks_off_reports_what_all_ranks_had_measured() -> None:
    task, monitor = Fails(), StepMonitor()
    task.at = 2 * WINDOW + 2
    with pytest.raises(KeyError, match="enough"):
        fit(task=task, monitor=monitor, max_steps=3 * WINDOW)
    assert monitor.report is not None and 0 < monitor.report.steps < task.at


@pytest.mark.slow
@on_ranks(2)
def test_a_monitor_measures_the_next_training_after_one_that_has_failed() -> None:
    monitor = StepMonitor()
    with pytest.raises(KeyError, match="enough"):
        fit(task=Fails(), monitor=monitor)
    assert monitor.report is None
    first = fit(monitor=monitor)
    second = fit(monitor=monitor, max_steps=7)
    assert (first.steps, second.steps) == (STEPS - 1, 6)


@pytest.mark.slow
@on_ranks(2)
def test_a_training_that_goes_on_measures_its_own_steps() -> None:
    monitor, task = StepMonitor(), Takes()
    trainer = make_trainer(ShardedDP(auto_wrap_policy={Block}), max_steps=4, callbacks=[monitor])
    loader = token_loader(4 * 20 * dist.get_world_size())
    trainer.fit(task, loader)
    assert monitor.report is not None
    assert monitor.report.steps == 3
    trainer.fit_loop.epoch_loop.max_steps = 10
    trainer.fit(task, loader)
    assert monitor.report.steps == 5


class Manual(TinyGpt):
    """Two backwards and one step of the optimizer in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        """Steps by itself."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.slow
@on_ranks(2)
def test_manual_optimization_has_the_same_parts() -> None:
    report = fit_between_watches(task=Manual())
    assert report.parts["optimizer"] > 0
    assert report.parts["compute"] > report.parts["rest"]


class OwnOptimizer(Manual):
    """Steps an optimizer that Lightning does not know."""

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        """Steps by itself."""
        self.manual_backward(self.loss(batch))
        self.own.step()
        self.own.zero_grad()

    def configure_optimizers(self) -> None:
        """None for Lightning."""
        self.own = torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(1)
def test_batches_are_steps_where_lightning_knows_no_optimizer() -> None:
    options = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 8}
    with pytest.warns(UserWarning, match="this fit will run with no optimizer"):
        assert fit(task=OwnOptimizer(), **options).steps == 7


def resharded(file: str) -> StepReport:
    return fit(
        monitor=StepMonitor(record=file),
        callbacks=(ReshardSchedule({1: "no_shard"}),),
        max_steps=6,
    )


def without_shards() -> StepReport:
    return fit("no_shard", max_steps=2)


def test_a_report_after_a_reshard_is_of_the_steps_of_the_new_strategy(
    world: Worlds, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    report = world(2).run(resharded, str(file))[0]
    # The first step of the new strategy is left out, and the next one: the report is not told when.
    assert report.steps == 6 - 1 - 2
    assert report.sent_nbytes == world(2).run(without_shards)[0].sent_nbytes
    assert read(file).name.startswith("Takes: no_shard over 1,")  # type: ignore[union-attr]


@on_ranks(1)
def test_flops_are_those_of_the_module_that_is_trained() -> None:
    def flops(task: LightningModule) -> float:
        report = fit(task=task, monitor=monitor, max_steps=2)
        assert report.model_flops_per_s is not None, report.note
        return report.model_flops_per_s * report.seconds

    monitor, small, large = StepMonitor(), TinyGpt(), TinyGpt(dim=16)
    first = flops(small)
    assert flops(large) > 2 * first
    assert flops(small) == pytest.approx(first)
    other = StepMonitor()
    note = fit(task=small, monitor=other, max_steps=2).note
    assert note.startswith("the module was sharded by an earlier run without this StepMonitor")


@on_ranks(1)
def test_a_second_monitor_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"expected one StepMonitor .* found 2"):
        fit(callbacks=(StepMonitor(),))


def of_batches_by_rank() -> tuple[StepReport, int]:
    size = 4 - 2 * dist.get_rank()
    tokens = torch.randint(11, (20 * size, 6 - dist.get_rank()))
    loader = DataLoader(tokens, batch_size=size)  # type: ignore[arg-type]
    return fit(loader=loader, max_steps=8, use_distributed_sampler=False), size


def test_rates_of_all_ranks_are_sums_over_ranks(world: Worlds) -> None:
    for report, _ in world(2).run(of_batches_by_rank):
        assert report.samples_per_s * report.seconds == pytest.approx(4 + 2)
        assert report.tokens_per_s is not None
        assert report.tokens_per_s * report.seconds == pytest.approx(4 * 6 + 2 * 5)


@on_ranks(2)
def test_batches_that_a_rank_repeats_for_others_are_not_counted() -> None:
    monitor, own = StepMonitor(), 4 + 4 * dist.get_rank()
    trainer = make_trainer(
        ShardedDP(auto_wrap_policy={Block}, uneven_batches="join"),
        callbacks=[monitor],
        max_epochs=1,
        max_steps=-1,
        use_distributed_sampler=False,
    )
    tokens = torch.randint(11, (2 * own, 6))
    trainer.fit(TinyGpt(), DataLoader(tokens, batch_size=2))  # type: ignore[arg-type]
    report = monitor.report
    assert report is not None and report.steps == 7  # the first is left out
    assert report.samples_per_s * report.seconds * 7 == pytest.approx(2 * (3 + 7))


# -- What people get


def logged(folder: str) -> None:
    fit(
        monitor=StepMonitor(Path(folder) / "trace/steps.json"),
        logger=CSVLogger(folder),
        log_every_n_steps=5,
    )


@pytest.mark.slow
def test_loggers_get_stable_names_and_a_trace_sums_to_the_steps(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(logged, str(tmp_path))
    [table] = tmp_path.glob("lightning_logs/*/metrics.csv")
    with table.open() as file:
        rows = [row for row in csv.DictReader(file) if row["shardeddp/step/total_s"]]
    assert [row["step"] for row in rows] == ["6", "11"]
    names = {name for name in rows[0] if name.startswith("shardeddp/")}
    assert names == {
        *(f"shardeddp/step/{part}_s" for part in (*PARTS, "total")),
        "shardeddp/samples_per_s",
        "shardeddp/tokens_per_s",
        "shardeddp/model_flops_per_s",
        "shardeddp/sent_bytes",
    }
    for row in rows:
        parts = sum(float(row[f"shardeddp/step/{part}_s"]) for part in PARTS)
        assert parts == pytest.approx(float(row["shardeddp/step/total_s"]))
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace/steps.rank{rank}.json").read_text())
        events = trace["traceEvents"]
        assert {event["cat"] for event in events} >= {"compute", "gather", "data", "optimizer"}
        for event, following in itertools.pairwise(events):
            assert event["ts"] + event["dur"] == pytest.approx(following["ts"])


def recorded(folder: str, task: LightningModule | None = None) -> StepReport:
    return fit(task=task, monitor=StepMonitor(record=Path(folder) / "runs/run.json"))


def test_the_record_of_a_run_makes_its_plan_as_long_as_it_was(
    world: Worlds, tmp_path: Path
) -> None:
    report, _ = world(2).run(recorded, str(tmp_path))
    run, probe = tmp_path / "runs/run.json", tmp_path / "probe.json"
    write(probe, probe_of())
    found = calibrate([probe, run])
    cluster = Cluster(gpu=find_gpu("CPU", **found.figures), count=2)
    step = read(run).task.time(cluster, found.constants)  # type: ignore[union-attr]
    parts = report.parts
    assert step.total - step.optimizer == pytest.approx(
        sum(parts[part] for part in ("compute", "rest", "gather", "reduction"))
    )
    assert step.optimizer == pytest.approx(parts["optimizer"])
    assert f"({STEPS - 1} steps on 2 x CPU): times what was planned, compute" in found.lines[1]
    assert main(["report", str(run), "--calibrate", str(probe)]) == 0
    page = run.with_suffix(".html").read_text()
    assert "<h1>Takes: full_shard over 2, 1 x 4 samples, 32-true</h1>" in page
    assert "blocks.1" in page


@on_ranks(1)
def test_a_run_that_cannot_be_planned_records_nothing_and_says_why(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"run.json was not written: AsksTrainer cannot be planned: its "
    ):
        recorded(str(tmp_path), AsksTrainer())
    assert not (tmp_path / "runs").exists()


@on_ranks(1)
@pytest.mark.parametrize("option", ["record", "trace"])
def test_a_file_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, option: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "is/run.rank0.json").mkdir(parents=True)
    task = Takes()
    for path in ("file/run.json", "is" if option == "record" else "is/run.json"):
        monitor = StepMonitor(**{option: tmp_path / path})
        with pytest.raises(ConfigurationError, match=rf"{option}=...\): expected a file that can"):
            fit(task=task, monitor=monitor)
    assert not task.losses


class Spoils(Callback):
    """Takes the place of a file during a training."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_start(self, *_: Any) -> None:
        """Make a folder of that name."""
        self._path.mkdir()


@on_ranks(1)
def test_a_file_that_cannot_be_written_any_more_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.warns(UserWarning, match=r"run.json'\) was not written: IsADirectoryError"):
        report = fit(monitor=StepMonitor(record=path), callbacks=(Spoils(path),), max_steps=3)
    assert report.steps == 2


@on_ranks(1)
def test_a_training_of_one_step_says_that_nothing_is_reported() -> None:
    with (
        pytest.warns(UserWarning, match="nothing to report or to write: of 1 steps"),
        pytest.raises(AssertionError),
    ):
        fit(max_steps=1)


@on_ranks(1)
def test_traces_have_the_whole_name_of_their_path(tmp_path: Path) -> None:
    for name in ("run.v1", "run.v2.json"):
        fit(monitor=StepMonitor(tmp_path / name), max_steps=2)
    assert {it.name for it in tmp_path.iterdir()} == {"run.v1.rank0.json", "run.v2.rank0.json"}


@on_ranks(1)
def test_a_record_has_no_plan_that_is_not_of_the_run(tmp_path: Path) -> None:
    monitor = StepMonitor(record=tmp_path / "run.json")
    strategy = ShardedDP(auto_wrap_policy={Block}, activation_checkpointing={"Linear"})
    trainer = make_trainer(strategy, callbacks=[monitor], max_steps=3)
    with pytest.warns(
        UserWarning, match="not written: the plan does not know activation_checkpointing of mod"
    ):
        trainer.fit(Takes(), token_loader(16))
    assert not (tmp_path / "run.json").exists()


def printed() -> tuple[str, list[str]]:
    """What is shown, and the units that gathers were waited for longest of."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        units = fit().units
    waited = {unit: took for (part, unit), took in units.items() if part == "gather" and took > 0}
    return text.getvalue(), sorted(waited, key=lambda unit: -waited[unit])[:3]


def test_rank_0_shows_a_table_at_the_end(world: Worlds) -> None:
    (shown, most), (nothing, _) = world(2).run(printed)
    assert nothing == ""
    assert most
    assert shown.startswith(f"Steps of rank 0: mean of {STEPS - 1}\n")
    for text in (
        "waiting for gathers",
        *(f"- {unit} " for unit in most),
        "waiting for slower ranks",
        "rest",
        "100.0 %",
    ):
        assert text in shown
    assert "tokens/s" in shown
    assert "model FLOP/s per rank" in shown
    assert "no dense peak of this device (cpu) is known" in shown


class Bar(Callback):
    """Looks at what a progress bar would show."""

    shown: dict[str, Any]

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Look."""
        self.shown = dict(trainer.progress_bar_metrics)


@on_ranks(2)
def test_the_progress_bar_has_one_entry_of_it() -> None:
    bar = Bar()
    fit(callbacks=(bar,), log_every_n_steps=5, enable_progress_bar=True)
    assert "tokens/s" in bar.shown
    assert not [name for name in bar.shown if name.startswith("shardeddp")]


class OwnLog(Takes):
    """Takes fewer arguments to log, and logs a figure of the monitor's name."""

    def log(self, name: str, value: Any) -> None:  # type: ignore[override]
        super().log(name, value, prog_bar=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("tokens/s", 1.0)


class LogsLate(Callback):
    """Begins to log a figure of the monitor's name after the monitor has shown its own."""

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Log it with arguments of its own."""
        if index > 8:
            module.log("tokens/s", 123.0, prog_bar=True)


@on_ranks(1)
def test_a_callback_that_logs_the_monitors_name_late_has_its_entry() -> None:
    bar = Bar()
    fit(
        callbacks=(LogsLate(), bar),
        log_every_n_steps=1,
        max_steps=14,
        enable_progress_bar=True,
    )
    assert bar.shown["tokens/s"] == 123.0


class NestedBatches(Takes):
    """A loss of padded tokens."""

    def loss(self, batch: Any) -> Tensor:
        """A loss."""
        return super().loss(batch.to_padded_tensor(0))


def nested(tokens: list[Tensor]) -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([*tokens[1:], tokens[0][:4]])


@on_ranks(1)
def test_nested_tensors_are_counted_and_not_planned() -> None:
    loader = DataLoader(token_loader(80).dataset, batch_size=4, collate_fn=nested)
    report = fit(task=NestedBatches(), loader=loader, max_steps=6)
    assert report.samples_per_s * report.seconds == pytest.approx(4)
    assert report.tokens_per_s is not None
    assert report.note == "a batch with nested tensors cannot be planned"


class Closed(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        """Fail."""
        raise BrokenPipeError(32, "Broken pipe")


@on_ranks(1)
def test_a_report_that_cannot_be_printed_is_a_warning() -> None:
    with (
        contextlib.redirect_stdout(Closed()),
        pytest.warns(UserWarning, match="StepMonitor could not print: BrokenPipeError"),
    ):
        assert fit(max_steps=3).steps == 2


class Exits(Takes):
    """A copy of it ends the process."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise SystemExit(3)


@on_ranks(1)
def test_a_module_whose_copy_exits_is_not_planned() -> None:
    assert "Exits cannot be copied" in fit(task=Exits(), max_steps=3).note


class Refuses(CSVLogger):
    """Refuses the monitor's figures."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Refuse them."""
        if "shardeddp/tokens_per_s" in metrics:
            raise ValueError("no slashes")


@on_ranks(1)
def test_a_log_of_the_users_and_a_logger_that_refuses_end_no_training(tmp_path: Path) -> None:
    bar, logger = Bar(), Refuses(tmp_path)
    with pytest.warns(UserWarning, match="Refuses has refused its figures") as told:
        fit(
            task=OwnLog(),
            callbacks=(bar,),
            log_every_n_steps=1,
            max_steps=24,
            logger=logger,
            enable_progress_bar=True,
        )
    assert bar.shown["tokens/s"] == 1.0
    assert len([it for it in told if "refused" in str(it.message)]) == 1


class AsksTrainer(Takes):
    """A step that the planner cannot run."""

    def loss(self, batch: Any) -> Tensor:
        """A loss that grows."""
        return super().loss(batch) * (1 + self.trainer.global_step)


@on_ranks(1)
def test_a_module_that_cannot_be_planned_has_no_flops_and_a_reason() -> None:
    report = fit(task=AsksTrainer())
    assert report.model_flops_per_s is report.mfu is None
    assert report.note


NUMBERS = np.random.default_rng(0)
CALLS = [0]


class UsesItsFile(Takes):
    """Draws and counts outside of the module, and communicates by that count."""

    def loss(self, batch: Any) -> Tensor:
        """A loss that is not the same twice."""
        CALLS[0] += 1
        if CALLS[0] % 4 == 0:
            dist.all_reduce(torch.ones(1))
        return super().loss(batch) * (1 + float(NUMBERS.random()))


@on_ranks(2)
def test_a_training_is_the_same_with_a_monitor_and_without() -> None:
    losses: list[list[float]] = []
    for callbacks in ([], [StepMonitor()]):
        NUMBERS.bit_generator.state = np.random.default_rng(0).bit_generator.state
        CALLS[0] = 0
        torch.manual_seed(0)
        task = UsesItsFile()
        trainer = make_trainer(ShardedDP(), callbacks=callbacks, max_steps=8)
        trainer.fit(task, token_loader(4 * 20 * dist.get_world_size()))
        assert CALLS == [8]
        losses.append(task.losses)
    assert losses[0] == losses[1]


def with_a_plan_that_takes(seconds: float) -> tuple[StepReport, float]:
    plan = module.plan_as_set

    def plan_slowly(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return plan(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plan_as_set", plan_slowly)
        report = fit(max_steps=4)
        again = fit(max_steps=8, callbacks=(ReshardSchedule({2: "no_shard"}),))
    return report, report.steps * report.seconds + again.steps * again.seconds


def test_no_rank_waits_for_the_plan_in_a_step_that_is_reported(world: Worlds) -> None:
    for report, seconds in world(2).run(with_a_plan_that_takes, 1.5):
        assert report.steps == 3
        assert report.model_flops_per_s is not None or report.rank
        assert seconds < 1.5


def reported(strategy: str, shard_size: int | None) -> StepReport:
    return fit(strategy, shard_size=shard_size)


@pytest.mark.parametrize(
    ("size", "strategy", "shard_size"),
    [
        (1, "full_shard", None),
        (1, "hybrid_shard", None),
        (2, "hybrid_shard", None),
        (3, "hybrid_shard", 3),
        (3, "hybrid_shard", 1),
        (4, "hybrid_shard", 2),
    ],
)
def test_flops_are_those_of_matmuls_forward_and_backward(
    world: Worlds, size: int, strategy: str, shard_size: int | None
) -> None:
    report = world(size).run(reported, strategy, shard_size)[0]
    tokens = 4 * 5  # the last of each sample has no target
    forward = tokens * 2 * 8 * (3 * (16 + 16) + 11)
    assert report.model_flops_per_s is not None, report.note
    assert report.model_flops_per_s * report.seconds == pytest.approx(3 * forward)


def test_another_strategy_is_refused() -> None:
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, callbacks=[StepMonitor()]
    )
    with pytest.raises(ConfigurationError, match="measures steps of ShardedDP, found SingleDevice"):
        trainer.fit(TinyGpt(), token_loader(4))
