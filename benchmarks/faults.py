"""What every rank sees, and how soon, when one of them fails in a given way: injects each fault into a real run.

Two ranks train a small model as processes of their own, as torchrun starts them, with ``timeout=8`` seconds where the
default is 600. Times are seconds from the fault until each process has ended.

    python benchmarks/faults.py
    python benchmarks/faults.py --only killed frozen --markdown
    python benchmarks/faults.py --accelerator gpu                   # on two GPUs
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

import shardeddp
from shardeddp import ShardedDP

TIMEOUT_S = 8.0
WIDTH = 16
STEPS = 400
AT = 4
"""The step of the fault."""

UNEVEN = ", with uneven_units"
FIRST_FAILS = "exception in forward, rank 0"
OTHER_GATHER = "another shape in self.all_gather, with debug"
OTHER_COLLECTIVE = "another collective of torch.distributed, with debug"
OTHER_CODE = "other code under the same version"

LIMIT_S = 60.0
"""After how long a process counts as hung."""


# -- on a rank


class Tokens(IterableDataset[Tensor]):
    """Batches without a length."""

    def __init__(self, count: int, fails: bool) -> None:
        self.count, self.fails = count, fails

    @override
    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            if self.fails and index == 2 * (AT + 3):
                raise OSError("the file of this rank cannot be read")
            yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Model(LightningModule):
    """Blocks that are units; it does to itself what the fault says."""

    def __init__(self, fault: str, odd: bool, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)) for _ in range(depth)
        )
        self.fault, self.odd = fault, odd

    def now(self, fault: str, step: int = AT) -> bool:
        """Whether this is the rank and the step of a fault."""
        return self.odd and self.fault == fault and self.global_step == step

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == AT:
            sys.stdout.write(json.dumps({"at": time.time(), "pid": os.getpid()}) + "\n")
            sys.stdout.flush()
            time.sleep(0.5 if self.fault in SIGNALS else 0.0)
        if self.global_step == AT and self.fault == OTHER_GATHER:
            self.all_gather(torch.zeros(2 + self.odd))
        if self.global_step == AT and self.fault == OTHER_COLLECTIVE:
            dist.all_reduce(torch.zeros(2)) if self.odd else dist.broadcast(torch.zeros(2), 0)
        for index, block in enumerate(self.blocks):
            if not (self.now("unit skipped by one rank") and index == 1):
                batch = batch + block(batch)
            if index == 1 and self.now("exception in forward"):
                raise LookupError(f"rank {dist.get_rank()} lost its data")
        if self.now("out of memory"):
            raise MemoryError("rank 1 cannot allocate 16 GiB")
        if self.now("exception in backward"):
            batch.register_hook(_fail)
        loss = batch.pow(2).mean()
        loss.item()  # where a rank on a device waits for those that have failed
        return loss * float("nan") if self.now("NaN in the loss") else loss

    @override
    def configure_gradient_clipping(self, *arguments: Any, **named: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def _fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError("rank 1 fails in backward")


class FailsInCallback(Callback):
    """A callback of the user's that raises on one rank."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(pl_module, Model) and pl_module.now("exception in a callback", AT + 1):
            raise PermissionError("rank 1 cannot write its log")


def train(fault: str, rank: int, folder: str, accelerator: str) -> None:
    """Run until the fault, or to the end."""
    seed_everything(1, verbose=False)
    odd = rank == (0 if fault == FIRST_FAILS else 1)
    name = "no_shard" if fault == "another strategy" and odd else "full_shard"
    depth = 4 if fault == "another model" and odd else 3
    count = 2 * (AT + 2) if fault == "fewer batches" and odd else 2 * STEPS
    callbacks: list[Callback] = [FailsInCallback()]
    if fault == "exception, and a checkpoint on exceptions":
        callbacks.append(OnExceptionCheckpoint(folder))
    trainer = Trainer(
        accelerator=accelerator,
        devices=2,
        strategy=ShardedDP(
            name,
            auto_wrap_policy={nn.Sequential},
            timeout=TIMEOUT_S,
            debug=fault in (OTHER_GATHER, OTHER_COLLECTIVE),
            forward_prefetch=2 if fault == "another prefetch" and odd else 1,
            uneven_units=fault.endswith(UNEVEN),
        ),
        max_steps=STEPS,
        default_root_dir=folder,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=len(callbacks) > 1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    said = (
        "exception in forward"
        if fault in (FIRST_FAILS, "exception, and a checkpoint on exceptions")
        else fault.removesuffix(UNEVEN)
    )
    model = Model(said, odd, depth)
    sys.stdout.write(json.dumps({"at": time.time(), "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    _wait_for(
        lambda: _marks(Path(folder), "at", 1)
    )  # ranks start up to seconds apart, which is no fault
    trainer.fit(
        model, DataLoader(Tokens(count, odd and fault == "exception in the data"), batch_size=2)
    )


# -- who injects and watches


SIGNALS: dict[str, tuple[int, int]] = {
    "killed (kill -9), rank 1": (1, signal.SIGKILL),
    "killed (kill -9), rank 0": (0, signal.SIGKILL),
    "frozen (SIGSTOP), rank 1": (1, signal.SIGSTOP),
    "frozen (SIGSTOP), rank 0": (0, signal.SIGSTOP),
}
FAULTS = [
    *SIGNALS,
    "exception in forward",
    FIRST_FAILS,
    "exception in backward",
    "exception in forward" + UNEVEN,
    "exception in backward" + UNEVEN,
    "exception in a callback",
    "exception in the data",
    "out of memory",
    "exception, and a checkpoint on exceptions",
    "NaN in the loss",
    "fewer batches",
    "unit skipped by one rank",
    OTHER_GATHER,
    OTHER_COLLECTIVE,
    "another model",
    "another strategy",
    "another prefetch",
    OTHER_CODE,
]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How one rank has ended."""

    seconds: float
    """From the fault on; of a frozen rank 0."""

    code: int | None
    """None: it had not ended, or was frozen."""

    output: str

    @property
    def last_error(self) -> str:
        """The first line of the last exception that it has printed, unless it only says that a transfer broke."""
        lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in self.output.splitlines()]
        found = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        said = next(
            (line for line in reversed(found) if "gloo" not in line), found[-1] if found else ""
        )
        return said.removeprefix("shardeddp.errors.").replace(f"{Path(__file__).parents[1]}/", "")


def inject(fault: str, folder: Path, accelerator: str = "cpu") -> list[Seen]:
    """Start two ranks, inject a fault, and wait until both have ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = [_start(fault, rank, port, folder, accelerator) for rank in range(2)]
    victim, signum = SIGNALS.get(fault, (-1, 0))
    try:
        begun = _wait_for(lambda: _marks(folder, "at", 2 if fault not in SETUP_FAULTS else 1))
        if victim >= 0:
            time.sleep(0.2)
            started[victim].send_signal(signum)
            begun = time.time()
        ended: dict[int, float] = {}
        frozen = victim if signum == signal.SIGSTOP else -1
        deadline = time.time() + LIMIT_S
        while len(ended) < len(started) - (frozen >= 0) and time.time() < deadline:
            for rank, process in enumerate(started):
                if rank != frozen and rank not in ended and process.poll() is not None:
                    ended[rank] = time.time()
            time.sleep(0.01)
        texts = [(folder / f"{rank}.err").read_text(errors="replace") for rank in range(2)]
        return [
            Seen(
                seconds=ended.get(rank, time.time()) - begun if rank != frozen else 0.0,
                code=process.poll() if rank in ended else None,
                output=texts[rank],
            )
            for rank, process in enumerate(started)
        ]
    finally:
        for process in started:
            process.kill()
            process.wait()


SETUP_FAULTS = ("another model", "another strategy", "another prefetch", OTHER_CODE)


def _start(
    fault: str, rank: int, port: str, folder: Path, accelerator: str
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "faults",
        "OMP_NUM_THREADS": "1",
    }
    if fault == OTHER_CODE and rank == 1:
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_change_code(folder)), os.environ.get("PYTHONPATH", "")]
        )
    command = [sys.executable, "-W", "ignore", __file__, "--run", fault, "--folder", str(folder)]
    command += ["--accelerator", accelerator]
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=err)


def _change_code(folder: Path) -> Path:
    """Where a copy of the package is that differs by a line."""
    package = folder / "other" / "shardeddp"
    shutil.copytree(
        Path(shardeddp.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    with (package / "__init__.py").open("a") as file:
        file.write("# a line that other ranks do not have\n")
    return package.parent


def _marks(folder: Path, name: str, needed: int) -> float:
    """When the last rank has come to a point for the time that is asked for; 0 before that."""
    texts = [(folder / f"{rank}.out").read_text() for rank in range(2)]
    found = [
        [json.loads(line)[name] for line in text.splitlines() if line.startswith("{")]
        for text in texts
    ]
    return (
        max(marks[needed - 1] for marks in found)
        if all(len(marks) >= needed for marks in found)
        else 0.0
    )


def _wait_for(condition: Callable[[], float]) -> float:
    deadline = time.time() + LIMIT_S
    while time.time() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    return time.time()  # they never come: what they have said is shown


def show(rows: list[tuple[str, list[Seen]]], *, markdown: bool) -> None:
    """Print what was seen."""
    head = ["fault", "rank", "ended after", "exit code", "its last error"]
    body = [
        [
            fault if rank == 0 else "",
            str(rank),
            "frozen"
            if not seen.seconds
            else "HANGS"
            if seen.code is None
            else f"{seen.seconds:.1f} s",
            "" if seen.code is None else str(seen.code),
            seen.last_error,
        ]
        for fault, ranks in rows
        for rank, seen in enumerate(ranks)
    ]
    if markdown:
        for line in [head, ["---"] * len(head), *body]:
            cells = [
                textwrap.shorten(cell.replace("|", "/"), 120, placeholder=" ...") for cell in line
            ]
            sys.stdout.write("| " + " | ".join(cells) + " |\n")
        return
    table = Table(*head)
    for line in body:
        table.add_row(*line)
    Console().print(table)


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[""], help="faults whose name begins like this"
    )
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu", help="default cpu")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        train(arguments.run, int(os.environ["RANK"]), arguments.folder, arguments.accelerator)
        return
    rows: list[tuple[str, list[Seen]]] = []
    for fault in FAULTS:
        if fault.startswith(tuple(arguments.only)):
            with tempfile.TemporaryDirectory() as folder:
                rows.append((fault, inject(fault, Path(folder), arguments.accelerator)))
                sys.stderr.write(f"{fault}: {[seen.last_error[:200] for seen in rows[-1][1]]}\n")
    show(rows, markdown=arguments.markdown)


if __name__ == "__main__":
    main()
