"""A training script that can be preempted, and what starts and watches it; it says what it does in JSON lines.

Usage: preemption.py OUT [--steps N] [--save CALLBACK] [--accumulate N] [--epoch N] [--fail-on RANK] [--resume PATH]
"""

import argparse
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardeddp import ShardedDP
from support.ports import free_port
from support.tasks import Recorded
from support.trainers import EXPECTED_WARNINGS, full_weights

SCRIPT = str(Path(__file__).resolve())
TESTS = Path(SCRIPT).parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WIDTH = 6
EVERY_RANK = -1


def say(**what: Any) -> None:
    """Print a line that the test can tell from others, in one piece: ranks write to one pipe."""
    sys.stdout.write("said " + json.dumps(what) + "\n")
    sys.stdout.flush()


class Slow(Recorded):
    """Says so when each step begins, and draws numbers in it."""

    def __init__(self, fail_on: int | None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
        self.fail_on = fail_on

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """One loss."""
        say(rank=self.global_rank, step=self.global_step, pid=os.getpid())
        if self.fail_on in (self.global_rank, EVERY_RANK) and self.global_step == 3:
            raise LookupError(f"rank {self.global_rank} lost its data")
        time.sleep(0.01)
        return super().training_step(batch, batch_index)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean square."""
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, so that there are states."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Numbered(DataLoader[Tensor]):
    """A loader that can begin anywhere."""

    start = position = 0

    def __iter__(self) -> Iterator[Tensor]:
        """Batches, from where it was told to begin."""
        start, self.start = self.start, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.position = (index + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        """The number of the next batch."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Begin there."""
        self.start = self.position = state_dict["position"]


class SaysHowItEnds(Callback):
    """Tells which exception callbacks hear of."""

    def on_exception(self, trainer: Trainer, _: Any, exception: BaseException) -> None:
        """Say it."""
        say(
            rank=trainer.global_rank,
            heard=type(exception).__name__,
            received_sigterm=trainer.received_sigterm,
        )


def callbacks(name: str, out: Path) -> list[Callback]:
    """What saves checkpoints."""
    made: dict[str, list[Callback]] = {
        "none": [],
        "last": [ModelCheckpoint(out, save_top_k=0, save_last=True, every_n_train_steps=10_000)],
        "beside": [ModelCheckpoint(out, every_n_train_steps=10_000)],
        "exception": [
            ModelCheckpoint(out, "excepted", save_on_exception=True, every_n_train_steps=10_000)
        ],
        "on_exception": [OnExceptionCheckpoint(out, "excepted")],
    }
    return [*made[name], SaysHowItEnds()]


def run(arguments: argparse.Namespace) -> None:
    """Train to the end, unless something comes in between."""
    former = (
        signal.signal(signal.SIGTERM, lambda *_: say(user="has seen SIGTERM"))
        if arguments.own_handler
        else None
    )
    assert former in (None, signal.SIG_DFL)
    seed_everything(1, verbose=False)
    model = Slow(arguments.fail_on)
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=ShardedDP(auto_wrap_policy=None, state_dict_type="sharded", timeout=60.0),
        max_steps=arguments.steps,
        max_epochs=-1,
        accumulate_grad_batches=arguments.accumulate,
        default_root_dir=arguments.out,
        logger=False,
        enable_checkpointing=arguments.save != "none",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks(arguments.save, arguments.out),
    )
    data = torch.randn(2 * arguments.epoch, WIDTH, generator=torch.Generator().manual_seed(0))
    trainer.fit(model, Numbered(data, 1), ckpt_path=arguments.resume)
    weights = b"".join(tensor.numpy().tobytes() for tensor in full_weights(model).values())
    say(
        rank=trainer.global_rank,
        finished=trainer.global_step,
        digest=hashlib.sha256(weights).hexdigest(),
    )


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epoch", type=int, default=50)
    parser.add_argument("--save", default="none")
    parser.add_argument("--fail-on", type=int, default=None)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--own-handler", action="store_true")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message, category in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    run(parser.parse_args())


# -- in the test


@dataclass(kw_only=True)
class Job:
    """The processes of a run, whose output goes to files."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path
    codes: list[int] = field(default_factory=list[int])

    def said(self) -> list[dict[str, Any]]:
        """What ranks have said so far."""
        texts = [path.read_text() for path in sorted(self.folder.glob("*.out"))]
        lines = [line for text in texts for line in text.splitlines(keepends=True)]
        return [
            json.loads(line[5:])
            for line in lines
            if line.startswith("said ") and line.endswith("\n")
        ]

    def stderr(self) -> str:
        """Of all ranks."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.err")))

    def pids(self, step: int = 2, timeout_s: float = 60.0) -> dict[int, int]:
        """The process of every rank, once both have come to a step."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = {
                each["rank"]: each["pid"] for each in self.said() if each.get("step", -1) >= step
            }
            if len(found) == 2:
                return found
            if all(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.02)
        raise RuntimeError(f"the ranks never came to step {step}:\n{self.stderr()}")

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes of the processes that were started; a hang raises."""
        deadline = time.monotonic() + timeout_s
        self.codes = [
            process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes
        ]
        return self.codes


@contextmanager
def job(
    folder: Path, *arguments: str, launcher: Sequence[str] | None = (), scontrol: Path | None = None
) -> Iterator[Job]:
    """Start the script in a session of its own, of which nothing is left afterwards.

    Args:
        folder: For its output.
        arguments: Of the script; the first is where it saves.
        launcher: What goes before the script; None: one process per rank, started as torchrun does.
        scontrol: The folder of a command of that name: the processes are started as SLURM does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keep = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    keep |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environments = [keep] if launcher is not None else [keep | each for each in _as_torchrun_sets()]
    if scontrol is not None:
        environments = [keep | each for each in _as_slurm_sets(scontrol)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for index, environment in enumerate(environments):
            with (
                (folder / f"{index}.out").open("wb") as out,
                (folder / f"{index}.err").open("wb") as err,
            ):
                command = [sys.executable, *(launcher or ()), SCRIPT, *arguments]
                started.append(
                    subprocess.Popen(
                        command, env=environment, start_new_session=True, stdout=out, stderr=err
                    )
                )
        yield Job(processes=started, folder=folder)
    finally:
        for process in started:
            kill_session(process.pid)
            process.wait()


def kill_session(leader: int) -> None:
    """End what is left of a process and of those that it started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _rendezvous() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def _as_slurm_sets(scontrol: Path) -> list[dict[str, str]]:
    shared = _rendezvous() | {
        "PATH": f"{scontrol}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NAME": "train",
    }
    shared |= {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_NODEID": "0",
    }
    return [shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


def _as_torchrun_sets() -> list[dict[str, str]]:
    shared = _rendezvous() | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


if __name__ == "__main__":
    main()
