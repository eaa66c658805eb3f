"""A training script as users start it under SLURM or torchrun; what each rank does it writes to a file of its own.

Nodes and ranks come from the launcher's environment. The batch of a step follows from the step alone, and each rank
takes its part of it, so that runs of any size, interrupted or not, have the same losses.

Usage: cluster_training.py OUT [--steps N] [--strategy NAME] [--save-every N] [--skew S] [--workers N] [--dropout P]
"""

import argparse
import hashlib
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardeddp import ShardedDP
from support.trainers import full_weights

WIDTH, BATCH = 6, 8
STEP_S = 0.02


class Watched(LightningModule):
    """An ordinary module that says what it loses."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.arguments = arguments
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Tanh(),
            nn.Dropout(arguments.dropout),
            nn.Linear(4 * WIDTH, 1),
        )

    def say(self, **what: Any) -> None:
        """Add a line to this rank's file, in one piece."""
        with (self.arguments.out / f"rank-{self.global_rank}.said").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **what}) + "\n")

    def on_train_start(self) -> None:
        """Say where this rank is."""
        strategy = self.trainer.strategy
        assert isinstance(strategy, ShardedDP)
        topology = strategy.mesh.topology
        self.say(
            started=self.global_step,
            host=socket.gethostname(),
            node=self.trainer.node_rank,
            environment=type(strategy.cluster_environment).__name__,
            shards=topology.shard_groups(),
        )

    def training_step(self, _: Tensor, batch_index: int) -> Tensor:
        """The loss of this rank's part of the step's batch."""
        step, rank, ranks = self.global_step, self.global_rank, self.trainer.world_size
        time.sleep(STEP_S + (self.arguments.skew if (step + rank) % 3 == 0 else 0.0))
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        part = batch[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
        loss = (self.net(part)[:, 0] - part.sum(1)).pow(2).mean()
        self.say(step=step, loss=loss.item(), ranks=ranks)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, so that there are states."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--strategy", default="full_shard")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    torch.set_num_threads(1)
    nodes = int(os.environ.get("SLURM_NNODES", os.environ.get("GROUP_WORLD_SIZE", "1")))
    devices = int(os.environ.get("SLURM_NTASKS_PER_NODE", os.environ.get("LOCAL_WORLD_SIZE", "1")))
    callbacks: list[Callback] = []
    if arguments.save_every:
        saving = {"every_n_train_steps": arguments.save_every, "save_last": True}
        callbacks.append(ModelCheckpoint(arguments.out / "checkpoints", "{step}", **saving))
    seed_everything(1, verbose=False)
    model = Watched(arguments)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=ShardedDP(
            arguments.strategy, auto_wrap_policy=None, state_dict_type="sharded", timeout=60.0
        ),
        max_steps=arguments.steps,
        max_epochs=-1,
        default_root_dir=arguments.out,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    loader = DataLoader(range(4 * BATCH * 100), batch_size=4, num_workers=arguments.workers)
    trainer.fit(model, loader, ckpt_path="last" if callbacks else None)
    weights = b"".join(tensor.numpy().tobytes() for tensor in full_weights(model).values())
    model.say(finished=trainer.global_step, digest=hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
