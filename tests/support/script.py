"""A training script as users write them, for tests of how processes start and end; says what it did in JSON lines.

Usage: script.py OUT STRATEGY [--fail-on RANK [--killed]] [--only-fit] [--deferred]
"""

import argparse
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

import shardeddp
from shardeddp.checkpoint.contents import open_checkpoint
from support.sockets import listening
from support.tasks import EvaluatedGpt, token_loader
from support.trainers import EXPECTED_WARNINGS


class FailsOnOneRank(EvaluatedGpt):
    """Raises in the second training step of one rank, if told to, or is killed there."""

    def __init__(self, fail_on: int | None, killed: bool) -> None:
        super().__init__()
        self.fail_on, self.killed = fail_on, killed
        self.beside = SimpleNamespace(table=torch.arange(3.0))  # no module has it
        self.noted, self.alias = self.head.weight.device, self.head.weight.data

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """One loss, or the failure."""
        if batch_index == 1 and self.global_rank == self.fail_on:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError(f"rank {self.global_rank} lost its data")
        return super().training_step(batch, batch_index)


def say(**what: Any) -> None:
    """Print a line that the test can tell from others, in one piece: ranks write to one pipe."""
    sys.stdout.write("said " + json.dumps(what) + "\n")
    sys.stdout.flush()


def run(
    out: Path, strategy: str, make: Callable[[], FailsOnOneRank], only_fit: bool, deferred: bool
) -> None:
    """Train, test and predict on two ranks, save, and compare what the file holds with the module."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with trainer.init_module(empty_init=deferred):
        model = make()
    loader = token_loader(16)
    trainer.fit(model, loader, loader)
    tested = predictions = None
    if not only_fit:
        tested = trainer.test(model, loader, verbose=False)
        predictions = trainer.predict(model, loader)
    path = out / f"{strategy}.ckpt"
    trainer.save_checkpoint(path)
    opened = open_checkpoint(path, None) if path.is_dir() else torch.load(path, weights_only=True)
    saved = opened["state_dict"]
    weights = {
        name: tensor.full_tensor() if isinstance(tensor, shardeddp.ShardTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    say(
        strategy=strategy,
        rank=trainer.global_rank,
        is_ours=isinstance(trainer.strategy, shardeddp.ShardedDP),
        saved=all(torch.equal(saved[name], weights[name]) for name in weights),
        plain=not any(
            isinstance(parameter, shardeddp.ShardTensor) for parameter in model.parameters()
        ),
        test=None if tested is None else round(tested[0]["test"], 4),
        predictions=None if predictions is None else len(predictions),
        beside=model.beside.table.tolist(),
        noted=str(model.noted),
        follows=bool((model.alias == model.head.weight).all()),
        listens_on=sorted({address for address, _ in listening(os.getpid())}),
    )


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("strategy")
    parser.add_argument("--fail-on", type=int, default=None)
    parser.add_argument("--killed", action="store_true")
    parser.add_argument("--only-fit", action="store_true")
    parser.add_argument("--deferred", action="store_true")
    arguments = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message, category in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    make = partial(FailsOnOneRank, arguments.fail_on, arguments.killed)
    run(arguments.out, arguments.strategy, make, arguments.only_fit, arguments.deferred)


if __name__ == "__main__":
    main()
