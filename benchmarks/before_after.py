"""Step time of two source trees of this package, a few steps of each in turn: has a change made steps slower?

Both trees train the same GPT at the same time, each on ranks of its own; one of them sleeps while the other steps.
So a drift of the machine, or another program on it, meets both alike. A figure is that of a turn: from the start of
its first step to the end of its last one. Whoever takes the second turn of a pair is some percent slower, even if both
trees are one, so half of the turns begin with the other tree.

    git worktree add ../before v0.1.0
    python benchmarks/before_after.py ../before                   # the five strategies, 2 ranks, batch 1 x 128
    python benchmarks/before_after.py ../before --batch 8 --only full_shard --turns 60
    python benchmarks/before_after.py ../before --ranks 4 --only hybrid_shard
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from fresh_ranks import become_rank

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "examples"))

from gpt.model import GPT  # noqa: E402

NAMES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard")
SIDES = ("before", "after")
FIRST_TURNS = 3
"""Turns that are left out: setups, first steps."""


class Turns:
    """Turns of two sides, in a file that all ranks map: each counts its own, and nobody writes to another's count."""

    def __init__(self, path: Path, side: int, rank: int, ranks: int) -> None:
        with path.open("r+b") as file:
            self._counts = mmap.mmap(file.fileno(), 16 * ranks)
        self._side, self._rank, self._ranks = side, rank, ranks
        self._own = 0

    def wait(self) -> None:
        """Wait until all ranks of the other side have taken as many turns: the side before goes first."""
        others = (1 - self._side) * self._ranks
        needed = self._own + self._side
        while any(self._count(others + rank) < needed for rank in range(self._ranks)):
            time.sleep(5e-4)

    def end(self) -> None:
        """End this rank's turn."""
        self._own += 1
        struct.pack_into("q", self._counts, 8 * (self._side * self._ranks + self._rank), self._own)

    def _count(self, at: int) -> int:
        return struct.unpack_from("q", self._counts, 8 * at)[0]


class InTurn(L.Callback):
    """Takes a turn every few steps, and times it."""

    def __init__(self, turns: Turns, steps: int) -> None:
        self.turns, self.steps = turns, steps
        self.turn_s: list[float] = []
        self._begun = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Wait for the turn that begins with this step."""
        if batch_idx % self.steps == 0:
            self.turns.wait()
            self._begun = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End the turn that ends with this step."""
        if batch_idx % self.steps == self.steps - 1:
            self.turn_s.append(time.perf_counter() - self._begun)
            self.turns.end()


class Language(L.LightningModule):
    """The GPT on random tokens with AdamW."""

    def __init__(self, dim: int, blocks: int) -> None:
        super().__init__()
        self.gpt = GPT(vocab_size=256, dim=dim, num_layers=blocks, num_heads=8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Next-token loss."""
        logits = self.gpt(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with stock options."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(given: dict[str, Any]) -> None:
    """Train as one rank of one side; rank 0 leaves the seconds of its turns."""
    become_rank(given["rank"], given["ranks"], given["port"])
    import shardeddp

    assert Path(shardeddp.__file__).is_relative_to(given["tree"]), shardeddp.__file__
    folder, steps = Path(given["folder"]), given["steps"] * (given["turns"] + FIRST_TURNS)
    side = SIDES.index(given["side"])
    in_turn = InTurn(Turns(folder / "turns", side, given["rank"], given["ranks"]), given["steps"])
    size = {"shard_size": 2} if given["name"] == "hybrid_shard" else {}
    data = torch.randint(0, 256, (given["ranks"] * given["batch"] * steps, given["length"] + 1))
    trainer = L.Trainer(
        accelerator="cpu", devices=given["ranks"], strategy=shardeddp.ShardedDP(given["name"], **size), max_steps=steps,
        callbacks=[in_turn], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Language(given["dim"], given["blocks"])
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=given["batch"]))
    if given["rank"] == 0:
        Path(folder, f"{given['side']}.json").write_text(json.dumps(in_turn.turn_s[FIRST_TURNS:]))


def compare(name: str, trees: list[Path], setting: dict[str, int], port: int) -> list[list[float]]:
    """Train both sides at once; return the seconds of their turns. The first side takes the first turn of each pair."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "turns").write_bytes(bytes(16 * setting["ranks"]))
        ranks: list[subprocess.Popen[bytes]] = []
        for number, (side, tree) in enumerate(zip(SIDES, trees, strict=True)):
            for rank in range(setting["ranks"]):
                given = {**setting, "name": name, "side": side, "rank": rank, "folder": folder}
                given |= {"port": port + number, "tree": str(tree)}
                environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
                command = [sys.executable, __file__, "--as-rank", json.dumps(given)]
                ranks.append(subprocess.Popen(command, env=environment))
        failed = [process.wait() for process in ranks]
        if any(failed):
            raise RuntimeError(f"ranks of {name} have ended with {failed}")
        return [json.loads(Path(folder, f"{side}.json").read_text()) for side in SIDES]


def ratio(halves: list[list[float]]) -> float:
    """Ratio without the advantage of the first turn: geometric mean of the medians of both halves."""
    return statistics.geometric_mean(map(statistics.median, halves))


def interval(halves: list[list[float]]) -> tuple[float, float]:
    """95 % interval of :func:`ratio`, by a thousand resamplings."""
    draw = random.Random(0)
    found = sorted(ratio([draw.choices(it, k=len(it)) for it in halves]) for _ in range(1000))
    return found[25], found[974]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, nargs="?", help="root of the tree to compare with")
    parser.add_argument("--after", type=Path, default=HERE, help="root of the other; default: this")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES[:4], help="strategies")
    sizes = dict(ranks=2, dim=512, blocks=8, batch=1, length=128, steps=4, turns=15)
    for size, default in sizes.items():
        parser.add_argument(f"--{size}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--as-rank", type=json.loads, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    if options["as_rank"] is not None:
        train(options["as_rank"])
        return
    if options["before"] is None:
        parser.error("expected the root of the tree to compare with")
    setting = {size: options[size] for size in sizes}
    trees = [options["before"].resolve(), options["after"].resolve()]
    shown = Table(
        title=f"GPT d={setting['dim']}, {setting['blocks']} blocks, batch {setting['batch']} x {setting['length']}, "
        f"{setting['ranks']} gloo ranks on {os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}, "
        f"{date.today()}",
        caption=f"ms per step, medians of {2 * setting['turns']} turns of {setting['steps']} steps; ratio: after / "
        f"before of pairs of turns, with its 95 % interval",
    )
    for column in ("strategy", *SIDES, "ratio", "interval"):
        shown.add_column(column, justify="left" if column == "strategy" else "right")
    for number, name in enumerate(options["only"]):
        port = 20000 + (os.getpid() * 7 + 4 * number) % 20000
        before, after = compare(name, trees, setting, port)
        after_first, before_second = compare(name, trees[::-1], setting, port + 2)
        halves = [
            [late / early for early, late in zip(*half, strict=True)]
            for half in ((before, after), (before_second, after_first))
        ]
        before, after = before + before_second, after + after_first
        low, high = interval(halves)
        shown.add_row(
            name,
            *(
                f"{1e3 * statistics.median(each) / setting['steps']:.1f}"
                for each in (before, after)
            ),
            f"{ratio(halves):.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    Console().print(shown)


if __name__ == "__main__":
    main()
