"""Compares a training run with a recorded one, bit for bit: for changes that are to change no number.

The GPT of the demo trains under each strategy, in float32 and bf16-mixed, with accumulation and clipping. The loss of
every rank and step and a digest of the final weights are recorded, and differ in no bit if nothing has changed. Other
processors and versions of torch round otherwise: record on the machine, then change, then compare.

    python benchmarks/identical.py --record before.json
    python benchmarks/identical.py --against before.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from fresh_ranks import become_rank, in_turn
from shardeddp import ShardedDP

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt.model import GPTModule  # pyright: ignore[reportMissingImports]

RUNS: dict[str, dict[str, Any]] = {
    f"{strategy}, {precision}": {"strategy": strategy, "precision": precision}
    for strategy in ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
    for precision in ("32-true", "bf16-mixed")
}
RANKS = 4  # two replicas of two shards under hybrid_shard
ROWS, LENGTH, VOCABULARY = 4, 32, 128


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained."""

    steps: int
    ranks: int = RANKS
    rounds: int = 1


class Losses(L.Callback):
    """The loss of each micro-batch on this rank, exactly."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.found.append(float(outputs["loss"]).hex())


def train(rank: int, name: str, setting: Setting, port: int, folder: str) -> None:
    """Leave this rank's losses and the digest of the final weights in ``folder``."""
    become_rank(rank, setting.ranks, port)
    torch.set_num_threads(1)
    run, losses, accumulated = RUNS[name], Losses(), 2
    strategy = ShardedDP(
        run["strategy"], shard_size=2 if run["strategy"] == "hybrid_shard" else None
    )
    trainer = L.Trainer(
        strategy=strategy, precision=run["precision"], accelerator="cpu", devices=setting.ranks, callbacks=[losses],
        max_steps=setting.steps, accumulate_grad_batches=accumulated, gradient_clip_val=1.0, default_root_dir=folder,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    tokens = torch.randint(
        VOCABULARY, (setting.steps * accumulated * setting.ranks * ROWS, LENGTH + 1)
    )
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    module = GPTModule(vocab_size=VOCABULARY, dim=64, num_layers=4, num_heads=4, warmup_steps=5)
    trainer.fit(module, DataLoader(data, batch_size=ROWS))
    digest = hashlib.sha256()
    with strategy.summon_full_params():
        for parameter in module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
    Path(folder, f"{rank}.json").write_text(
        json.dumps({"losses": losses.found, "weights": digest.hexdigest()})
    )


def first_difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str | None:
    """Where two runs differ first, or None."""
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        pairs = enumerate(zip(ours["losses"], theirs["losses"], strict=True))
        for batch, (now, before) in pairs:
            if now != before:
                return f"loss of rank {rank}, batch {batch}: {float.fromhex(now)!r}, was {float.fromhex(before)!r}"
        if ours["weights"] != theirs["weights"]:
            return f"final weights of rank {rank}"
    return None


def main() -> None:
    """Train all, record or compare; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--record", type=Path, help="file to write")
    given.add_argument("--against", type=Path, help="file to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = dict(in_turn(train, list(RUNS), Setting(steps=options.steps), Path(folder)))
    if options.record is not None:
        options.record.write_text(json.dumps(found))
        return
    expected: dict[str, Any] = json.loads(options.against.read_text())
    differences = {name: first_difference(found[name], expected[name]) for name in RUNS}
    for name, difference in differences.items():
        Console().print(f"{name}: {'identical' if difference is None else difference}")
    sys.exit(any(difference is not None for difference in differences.values()))


if __name__ == "__main__":
    main()
