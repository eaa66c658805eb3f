"""Two nodes on a slow link: step time, bytes across it and communication that compute does not hide, in one run.

``full_shard`` and ``hybrid_shard`` against FSDP2's ``fully_shard`` on all ranks and on a mesh of replicas, two CPU
ranks (gloo) on each of two network namespaces of this machine (root, ``ip`` and ``tc``). The rate of the link between
them is changed while they train. They take turns, several rounds over, each time in fresh processes.

The cores of one machine are shared by both nodes and by the transport, which those of two machines with accelerators
are not. So the blocks of the GPT compute little, and pause for a while in their forward and twice as long in their
backward: communication has that time to itself, as much as an accelerator would leave it.

Wire time is what the fuller direction of the link carries in a step, over its rate. Compute is a step without any
communication. What a step takes beyond that on a link without limits is the transport's work on shared cores; what it
takes beyond *that* on a slower link is exposed. Nobody can expose less than the wire time that does not fit behind
compute (replicas meet in backward, so theirs has only that to hide behind); the target allows that, and a tenth of the
step that it leads to.

    python benchmarks/two_nodes.py                              # no limit, 10, 1 and 0.1 Gbit/s
    python benchmarks/two_nodes.py --rates 1 --delay 2 --rounds 5
    python benchmarks/two_nodes.py --only fsdp2 full_shard --pause 0 --batch 8
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from linked_nodes import NUM_NODES, LinkedNodes, MissingMeans, address, sent_nbytes, shape
from shardeddp import ShardedDP
from step_time import Language, TorchFSDP2, Unsynchronised
from step_time import Setting as ModelSetting

RANKS_PER_NODE = 2
RANKS = NUM_NODES * RANKS_PER_NODE
UNLIMITED = float("inf")
JOB_TIMEOUT_S = 900
SLACK = 0.1

FLOOR = "floor"
STRATEGIES: dict[str, Any] = {
    FLOOR: Unsynchronised,
    "fsdp2": TorchFSDP2,
    "full_shard": lambda _: ShardedDP("full_shard"),
    "hsdp": lambda setting: TorchFSDP2(setting, RANKS_PER_NODE),
    "hybrid_shard": lambda _: ShardedDP("hybrid_shard"),
}
HYBRID_OF = {"full_shard": "hybrid_shard", "fsdp2": "hsdp"}
BACKWARD_SHARE = 2 / 3
"""Of compute; all that replicas can hide their communication behind."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained over which link, and how often it is measured."""

    dim: int
    blocks: int
    batch: int
    length: int
    steps: int
    warmup: int
    rounds: int
    pause: float
    """Milliseconds that a block pauses in a step."""

    delay: float
    """Milliseconds that a packet takes, one way."""

    rates: tuple[float, ...]
    """In Gbit/s."""

    def of(self, name: str) -> tuple[float, ...]:
        """The rates at which a contestant is measured: who sends nothing needs no link."""
        return (UNLIMITED,) if name == FLOOR else self.rates


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one rank saw at one rate."""

    step_s: list[float]
    sent_nbytes: float
    """By its node across the link, per step."""


def pause_after(forward_s: float, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """A forward hook that makes a module take longer, like an accelerator, without taking a core."""
    time.sleep(forward_s)
    output.register_hook(lambda gradient: time.sleep(2 * forward_s))


class Stages(L.Callback):
    """Changes the rate of the link every few steps, and notes what they take."""

    def __init__(self, rates: Sequence[float], setting: Setting) -> None:
        self._rates, self._setting = rates, setting
        self._length = setting.warmup + setting.steps
        self._starts: list[float] = []
        self._sent_before = 0
        self.seen: list[Stage] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A step begins, and with it the one before is over."""
        number, step = divmod(batch_idx, self._length)
        self._starts.append(time.perf_counter())
        if step == 0:
            if number:
                self._end_stage()
            if number < len(self._rates):
                self._begin_stage(self._rates[number])
        if step == self._setting.warmup:
            self._sent_before = sent_nbytes()

    def _begin_stage(self, rate: float) -> None:
        dist.barrier()  # the last bytes of the stage before are through
        if os.environ["LOCAL_RANK"] == "0":
            shape(rate, self._setting.delay)
        dist.barrier()
        self._starts = [time.perf_counter()]

    def _end_stage(self) -> None:
        steps = [end - start for start, end in zip(self._starts, self._starts[1:], strict=False)]
        sent = (sent_nbytes() - self._sent_before) / self._setting.steps
        self.seen.append(Stage(step_s=steps[self._setting.warmup :], sent_nbytes=sent))


def measure(name: str, setting: Setting, folder: Path) -> None:
    """Train on this rank, which a launcher has started, and leave the figures in ``folder``."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages = Stages(setting.of(name), setting)
    steps = (setting.warmup + setting.steps) * len(setting.of(name)) + 1
    model = ModelSetting(
        ranks=RANKS, dim=setting.dim, blocks=setting.blocks, batch=setting.batch, length=setting.length, steps=steps,
        warmup=0, rounds=1, precision="32-true", checkpointing=False, offload=False, parts=False,
    )  # fmt: skip
    module = Language(model)
    for block in module.gpt.blocks:
        block.get_submodule("mlp").register_forward_hook(partial(pause_after, setting.pause / 3e3))
    data = torch.randint(0, 256, (RANKS * setting.batch * steps, setting.length + 1))
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS_PER_NODE, num_nodes=NUM_NODES, strategy=STRATEGIES[name](model),
        max_steps=steps, callbacks=[stages], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=setting.batch))
    Path(folder, f"{trainer.global_rank}.json").write_text(
        json.dumps([asdict(stage) for stage in stages.seen])
    )


def launch(
    nodes: LinkedNodes, name: str, setting: Setting, folder: Path, port: int
) -> list[list[Stage]]:
    """Start the ranks of a contestant on both nodes, as a launcher does; what each of them has seen, by rank."""
    work = json.dumps({"name": name, "setting": asdict(setting), "folder": str(folder)})
    for rank in range(RANKS):
        node, local_rank = divmod(rank, RANKS_PER_NODE)
        variables = {
            "MASTER_ADDR": address(0), "MASTER_PORT": port, "WORLD_SIZE": RANKS, "RANK": rank, "NODE_RANK": node,
            "GROUP_RANK": node, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": RANKS_PER_NODE, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        command = [sys.executable, __file__, "--as-rank", work]
        nodes.start(
            node,
            command,
            {key: str(value) for key, value in variables.items()},
            folder / f"{rank}.log",
        )
    try:
        nodes.join(JOB_TIMEOUT_S)
    except (RuntimeError, TimeoutError) as error:
        said = "\n".join(
            f"rank {rank}: ... {(folder / f'{rank}.log').read_text()[-1500:]}"
            for rank in range(RANKS)
        )
        raise RuntimeError(f"{name}: {error}\n{said}") from None
    return [
        [Stage(**s) for s in json.loads((folder / f"{rank}.json").read_text())]
        for rank in range(RANKS)
    ]


Results = dict[str, dict[float, list[Stage]]]
"""By contestant and rate, a stage of each round: steps of rank 0, bytes of the node that sends more."""


def run(names: Sequence[str], setting: Setting) -> Results:
    """Measure all of them, several rounds over, at all rates."""
    results: Results = {name: {rate: [] for rate in setting.of(name)} for name in names}
    # Every second round backwards, so that nobody always runs after the same neighbour.
    jobs = [
        name for round_ in range(setting.rounds) for name in names[:: 1 if round_ % 2 == 0 else -1]
    ]
    with LinkedNodes(setting.delay) as nodes, tempfile.TemporaryDirectory() as place:
        for number, name in enumerate(track(jobs, "measuring", console=Console(stderr=True))):
            folder = Path(place, str(number))
            folder.mkdir()
            ranks = launch(nodes, name, setting, folder, 20000 + number)
            for rate, *stages in zip(setting.of(name), *ranks, strict=True):
                sent = max(stage.sent_nbytes for stage in stages)
                results[name][rate].append(Stage(step_s=stages[0].step_s, sent_nbytes=sent))
    return results


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians of a contestant at a rate, in seconds and bytes."""

    step_s: float
    sent_nbytes: float
    wire_s: float
    compute_s: float
    hiding_s: float
    """Compute that communication can hide behind."""

    free_s: float
    """The step on a link without limits."""

    @property
    def exposed_s(self) -> float:
        """What the limits of the link add to a step."""
        return self.step_s - self.free_s

    @property
    def ideal_s(self) -> float:
        """A step in which all is hidden that can be."""
        return self.compute_s + max(0.0, self.wire_s - self.hiding_s)

    @property
    def allowed_s(self) -> float:
        """What may be exposed."""
        return self.ideal_s - self.compute_s + SLACK * self.ideal_s


def summarise(results: Results) -> dict[str, dict[float, Figures]]:
    """Medians over the rounds, by contestant and rate."""

    def median(name: str, rate: float) -> float:
        return statistics.median(step for stage in results[name][rate] for step in stage.step_s)

    compute_s = median(FLOOR, UNLIMITED)
    figures: dict[str, dict[float, Figures]] = {}
    for name, by_rate in results.items():
        for rate, stages in by_rate.items():
            sent = statistics.median(stage.sent_nbytes for stage in stages)
            figures.setdefault(name, {})[rate] = Figures(
                step_s=median(name, rate),
                sent_nbytes=sent,
                wire_s=sent * 8 / (rate * 1e9),
                compute_s=compute_s,
                hiding_s=compute_s * (BACKWARD_SHARE if name in HYBRID_OF.values() else 1.0),
                free_s=median(name, UNLIMITED),
            )
    return figures


def show_rate(rate: float) -> str:
    """A rate in Gbit/s as people say it."""
    return "none" if rate == UNLIMITED else f"{rate:g}"


def table(figures: dict[str, dict[float, Figures]], setting: Setting) -> Table:
    """One line per rate and contestant."""
    compute_s = figures[FLOOR][UNLIMITED].compute_s
    shown = Table(
        title=f"GPT d={setting.dim}, {setting.blocks} blocks, batch {setting.batch} x {setting.length}, pause "
        f"{setting.pause:g} ms, compute {1e3 * compute_s:.0f} ms, {NUM_NODES} nodes x {RANKS_PER_NODE} gloo ranks, "
        f"delay {setting.delay:g} ms, torch {torch.__version__}, {platform.machine()}, {date.today()}"
    )
    shown.add_column("Gbit/s")
    shown.add_column("strategy", no_wrap=True)
    for column in ("step ms", "sent MB", "wire ms", "exposed", "target"):
        shown.add_column(column, justify="right")
    shown.add_column("")
    for rate in setting.rates:
        for name in (name for name in figures if name != FLOOR):
            own = figures[name][rate]
            shown_s = [own.wire_s, own.exposed_s, own.allowed_s] if rate != UNLIMITED else []
            verdict = "ok" if own.exposed_s <= own.allowed_s else "above"
            cells = [
                f"{1e3 * own.step_s:.0f}",
                f"{own.sent_nbytes / 1e6:.1f}",
                *(f"{1e3 * s:.0f}" for s in shown_s),
            ]
            shown.add_row(show_rate(rate), name, *cells, *([verdict] if shown_s else []))
        shown.add_section()
    return shown


def hybrid_verdicts(figures: dict[str, dict[float, Figures]], rates: Sequence[float]) -> list[str]:
    """Whether replicas on each node win wherever wire and compute say that they should, a line per rate."""
    lines: list[str] = []
    for full, hybrid in HYBRID_OF.items():
        for rate in rates if full in figures and hybrid in figures else ():
            one, other = figures[full][rate], figures[hybrid][rate]
            expected, found = one.ideal_s / other.ideal_s, one.step_s / other.step_s
            verdict = (
                "no matter"
                if expected < 1 + SLACK
                else "as expected"
                if found > 1
                else "NOT as expected"
            )
            lines.append(
                f"{hybrid} against {full}, limit {show_rate(rate)}: {expected:.2f} x faster expected, "
                f"{found:.2f} x found: {verdict}"
            )
    return lines


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    others = [name for name in STRATEGIES if name != FLOOR]
    parser.add_argument("--only", nargs="+", choices=others, default=others, help="what to compare")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[10, 1, 0.1], help="Gbit/s, beside no limit"
    )
    sizes = {
        "dim": 192,
        "blocks": 16,
        "batch": 1,
        "length": 32,
        "steps": 3,
        "warmup": 1,
        "rounds": 2,
    }
    for size, default in sizes.items():
        parser.add_argument(f"--{size}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--pause", type=float, default=45, help="ms that a block pauses in a step, default 45"
    )
    parser.add_argument(
        "--delay", type=float, default=0, help="ms that a packet takes, one way; needs netem"
    )
    parser.add_argument("--save", type=Path, help="write the figures of every step to this file")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    only, save, as_rank = options.pop("only"), options.pop("save"), options.pop("as_rank")
    if as_rank is not None:
        work = json.loads(as_rank)
        measure(work["name"], Setting(**work["setting"]), Path(work["folder"]))
        return
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that contexts are left
    options["rates"] = (UNLIMITED, *options["rates"])
    setting = Setting(**options)
    try:
        results = run([FLOOR, *only], setting)
    except MissingMeans as error:
        sys.exit(str(error))
    figures = summarise(results)
    Console().print(table(figures, setting))
    print("\n".join(hybrid_verdicts(figures, setting.rates)))
    if save is not None:
        plain = {name: {show_rate(rate): [asdict(stage) for stage in stages] for rate, stages in by_rate.items()}
                 for name, by_rate in results.items()}  # fmt: skip
        save.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
