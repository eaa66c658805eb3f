"""A training that saves all the time and tells what it is doing, in memory that outlives it; to be killed anywhere.

It is deterministic, so that what a checkpoint of any step has to hold is known from a run that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import mmap
import os
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from shardeddp import CheckpointError, ShardedDP
from shardeddp.checkpoint import durable, write
from shardeddp.checkpoint.contents import open_checkpoint
from shardeddp.checkpoint.export import to_ckpt
from shardeddp.checkpoint.find import find_checkpoints
from shardeddp.config import CheckpointOptions
from support.tasks import VOCABULARY, Block, TinyGpt
from support.trainers import full_weights, make_trainer

STEPS = 14
EVERY = 2
RANKS = {"full_shard": 2, "hybrid_shard": 4}
"""Of a training, by strategy; a hybrid one has two groups of two."""

PURE = frozenset(
    {"fspath", "_path_normpath", "_path_splitroot_ex", "getcwd", "getpid", "kill", "urandom"}
)
"""Functions of the module for system calls that touch no file."""

_SLOT = struct.Struct(
    "<III20s"
)  # saves begun, saves returned, calls into the system in this save, name of the last


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Where a rank is."""

    begun: int
    """Saves."""

    returned: int
    calls: int
    """Into the system, of the save that goes on or was the last."""

    call: str

    @property
    def training(self) -> bool:
        return self.call != ""

    @property
    def saving(self) -> bool:
        return self.begun > self.returned

    def __str__(self) -> str:
        return (
            f"save {self.begun}, call {self.calls} ({self.call})"
            if self.saving
            else f"after save {self.returned}"
        )


class Board:
    """Memory that ranks and those who watch them share; made before the ranks are forked."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._memory = mmap.mmap(-1, ranks * _SLOT.size)

    def write(self, rank: int, begun: int, returned: int, calls: int = 0, call: str = "") -> None:
        _SLOT.pack_into(self._memory, rank * _SLOT.size, begun, returned, calls, call.encode()[:20])

    def read(self, rank: int) -> Phase:
        begun, returned, calls, call = _SLOT.unpack_from(self._memory, rank * _SLOT.size)
        return Phase(begun=begun, returned=returned, calls=calls, call=call.rstrip(b"\0").decode())

    def clear(self) -> None:
        for rank in range(self._ranks):
            self.write(rank, 0, 0)


class Reporter:
    """Stands around every save of a rank: notes on the board where it is, and in a file which saves have returned."""

    def __init__(self, board: Board, rank: int, notes: Path) -> None:
        self._board = board
        self._rank = rank
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._begun = self._returned = self._calls = 0
        self._write_checkpoint = write.write_checkpoint

    def install(self) -> None:
        write.write_checkpoint = self.write_checkpoint

    def started(self) -> None:
        """Training begins."""
        self._board.write(self._rank, 0, 0, 0, "training")

    def write_checkpoint(self, snapshot: Any, target: Path, run: Any, *rest: Any) -> None:
        self._begun += 1
        self._calls = 0
        os.write(self._notes, b"begun %d\n" % run.step)
        self._board.write(self._rank, self._begun, self._returned, 0, "begin")
        sys.setprofile(self._profile)
        try:
            self._write_checkpoint(snapshot, target, run, *rest)
        finally:
            sys.setprofile(None)
        os.write(self._notes, b"returned %d\n" % run.step)
        os.fsync(self._notes)
        self._returned += 1
        self._board.write(self._rank, self._begun, self._returned, 0, "training")

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if (
            event == "c_call"
            and argument.__module__ in ("posix", "fcntl")
            and argument.__name__ not in PURE
        ):
            name = argument.__name__
        elif event == "call" and frame.f_code is durable.swap.__code__:
            name = "renameat2"
        else:
            return
        self._calls += 1
        self._board.write(self._rank, self._begun, self._returned, self._calls, name)


class Scored(TinyGpt):
    """Logs a value that goes up and down, so that some checkpoints push out others and some are not kept at all."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        self.log("score", float((self.global_step + 1) * 7 % 5))
        return loss


class Batches:
    """This rank's batches, from where the last run has stopped."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self._tokens = torch.randint(0, VOCABULARY, (STEPS, 2, 6), generator=generator)
        self._position = 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._tokens[self._position :]:
            self._position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class NotesWeights(Callback):
    """Keeps a digest of the weights after each step.

    Args:
        started: Called when the first batch comes.
    """

    def __init__(self, started: Callable[[], object]) -> None:
        self.digests: dict[int, str] = {}
        self._started = started

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._started()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.digests[trainer.global_step] = digest(full_weights(module))


def train(
    folder: Path,
    sharding: str,
    asynchronous: bool,
    path: str | None,
    keep: int,
    started: Callable[[], object],
) -> dict[int, str]:
    """Train to the end; on every rank of a world.

    Args:
        folder: Of the checkpoints.
        sharding: The strategy.
        asynchronous: Whether they are saved in a thread.
        path: To go on from.
        keep: How many, besides the last.
        started: Called when the first batch comes.

    Returns:
        Digests of the weights after each step.
    """
    seed_everything(1, verbose=False)
    notes = NotesWeights(started)
    saving = ModelCheckpoint(
        folder, "{step}", monitor="score", mode="max", save_last=True, save_top_k=keep, every_n_train_steps=EVERY,
        enable_version_counter=False,
    )  # fmt: skip
    options = CheckpointOptions(asynchronous=asynchronous)
    strategy = ShardedDP(
        sharding,
        shard_size=2 if sharding == "hybrid_shard" else None,
        auto_wrap_policy={Block},
        state_dict_type="sharded",
        checkpoint_options=options,
        timeout=30,
    )
    trainer = make_trainer(
        strategy,
        max_epochs=1,
        callbacks=[notes, saving],
        enable_checkpointing=True,
        use_distributed_sampler=False,
    )
    trainer.fit(Scored(), Batches(dist.get_rank()), ckpt_path=path)
    return notes.digests


def digest(value: Any) -> str:
    """Of every bit of a tree of tensors and plain values, types included."""
    state = hashlib.sha256()
    for part in _parts(value):
        state.update(part)
    return state.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    yield type(value).__name__.encode() if not isinstance(value, Tensor) else b"tensor"
    if isinstance(value, Tensor):
        plain = value.detach().as_subclass(Tensor).contiguous().reshape(-1)
        yield (
            f"{plain.dtype}{tuple(value.shape)}".encode()
            + plain.view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode()


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What a checkpoint holds, every byte of its tensors read and checked."""

    step: int
    weights: str
    everything: str
    """All but what depends on which checkpoints there were: the callbacks."""


def picture_of(path: Path) -> Picture:
    """Read a checkpoint as a whole, and check that its parts are of one step.

    Raises:
        AssertionError: Optimizer, scheduler, loops and the step of the run differ.
    """
    checkpoint = whole(open_checkpoint(path, None))
    step = checkpoint["global_step"]
    optimizer = checkpoint["optimizer_states"][0]["state"]
    loop = checkpoint["loops"]["fit_loop"]
    steps = {
        "optimizer": {int(state["step"]) for state in optimizer.values()},
        "scheduler": {checkpoint["lr_schedulers"][0]["last_epoch"]},
        "batches": {loop["epoch_loop.batch_progress"]["total"]["processed"]},
        "loop": {
            loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"][
                "completed"
            ]
        },
    }
    assert all(found == {step} for found in steps.values()), (
        f"{path} is of step {step} and holds {steps}"
    )
    rest = {key: value for key, value in checkpoint.items() if key != "callbacks"}
    return Picture(
        step=step, weights=digest(dict(checkpoint["state_dict"])), everything=digest(rest)
    )


def whole(value: Any) -> Any:
    """A checkpoint with every tensor read."""
    if isinstance(value, dict):
        return type(value)((key, whole(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(whole(item) for item in value)
    return value.clone() if isinstance(value, Tensor) else value


# -- what goes on in the folder of a training


def start_another(folder: Path) -> None:
    """Start Trainers that go on from the last checkpoint of a folder in which another one saves.

    What a checkpoint holds is not looked at here. One that the other replaces meanwhile is refused.
    """
    while True:
        time.sleep(0.2)
        trainer = make_trainer(
            ShardedDP(auto_wrap_policy={Block}, timeout=30),
            max_epochs=1,
            limit_train_batches=0,
            callbacks=[ModelCheckpoint(folder, monitor="score", save_last=True)],
            enable_checkpointing=True,
        )
        try:
            trainer.fit(Scored(), Batches(0), ckpt_path="last")
        except CheckpointError as error:
            print("refused:", error, flush=True)
        else:
            print("started", flush=True)


def export_all(folder: Path, target: Path) -> None:
    """Export whatever checkpoint of a folder is the newest, over and over, to one file in it."""
    while True:
        time.sleep(0.1)
        found = find_checkpoints(folder).checkpoints if folder.is_dir() else ()
        if not found:
            continue
        try:
            to_ckpt(found[-1].path, target, force=True)
        except CheckpointError as error:
            print("refused:", error, flush=True)
        else:
            print("exported", flush=True)


# -- processes


def fork_rank(rank: int, ranks: int, store: Path, log: Path, action: Callable[[], object]) -> int:
    """A forked process that is a rank of a world of its own; it dies with its parent.

    Args:
        rank: Of ``ranks``.
        ranks: How many there are.
        store: A file through which they find each other, new for each world.
        log: Takes what it says.
        action: What it does in that world.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        file_store = dist.FileStore(str(store), ranks)
        dist.init_process_group(
            "gloo", store=file_store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
        )
        action()
        code = 0
    except BaseException:  # noqa: BLE001 - the log has it; nothing of the parent may run in here
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    os._exit(code)
