"""What an optimizer step on many small sharded parameters costs, against the same step on plain tensors.

Each of two ranks holds half of the elements of every unit; the plain tensors to compare with are of the sizes that a
rank holds, so both sides do the same arithmetic, and the difference is what sharding adds.

    python benchmarks/optimizer_step.py --parameters 1000
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn

from shardeddp.comm import Mesh
from shardeddp.config import parse_options
from shardeddp.engine.shard_model import shard_model
from shardeddp.optim.attach import attach_optimizer
from shardeddp.plan.topology import Topology
from shardeddp.wrap import build_units, resolve_policy


class Sum(nn.Module):
    """Adds up its parameters, whose gradients are ones."""

    def __init__(self, parameters: int, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(numel) for _ in range(parameters)])

    def forward(self) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


VARIANTS = {
    "AdamW foreach": {"foreach": True},
    "AdamW fused": {"fused": True},
    "AdamW for-loop": {"foreach": False},
}


def measure(
    rank: int,
    ranks: int,
    parameters: int,
    numel: int,
    steps: int,
    offload: bool,
    port: int,
    folder: str,
) -> None:
    """Time both sides, step by step in turn, on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    results = {}
    for name, options in VARIANTS.items():
        model = Sum(parameters, numel)
        mesh = Mesh(
            Topology(world_size=ranks, shard_size=ranks), torch.device("cpu"), timedelta(minutes=1)
        )
        runtime = shard_model(build_units(model, resolve_policy(None)), mesh, parse_options({}))
        sharded = list(model.parameters())
        with runtime.step("training_step") as outputs:
            outputs.append(model())
        outputs[0].backward()
        plain = [parameter.to_local().clone().requires_grad_() for parameter in sharded]
        for parameter in plain:
            parameter.grad = torch.ones_like(parameter)
        ours, theirs = (torch.optim.AdamW(side, lr=1e-3, **options) for side in (sharded, plain))
        attach_optimizer(ours, offload)
        results[name] = _in_turn(ours, theirs, steps)
        if rank == 0:
            torch.testing.assert_close(sharded[0].to_local(), plain[0].detach(), rtol=0, atol=0)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _in_turn(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, steps: int
) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(steps + 3):
        for optimizer, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            optimizer.step()
            if step >= 3:
                seconds.append(time.perf_counter() - start)
    return times


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"ranks": 2, "parameters": 1000, "numel": 2048, "steps": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--offload", action="store_true", help="step on copies in host memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        port = 20000 + os.getpid() % 20000
        mp.spawn(
            measure,
            (*vars(options).values(), port, folder),
            nprocs=options.ranks,
        )
        results = json.loads(Path(folder, "results.json").read_text())
    shown = Table(
        title=f"optimizer step, {options.parameters} parameters of {options.numel} elements over {options.ranks} ranks"
    )
    for column in ("optimizer", "sharded", "plain", "ratio of medians"):
        shown.add_column(column, justify="left" if column == "optimizer" else "right")
    for name, times in results.items():
        ours, theirs = (statistics.median(side) for side in times)
        shown.add_row(
            name, f"{1e3 * ours:.2f} ms", f"{1e3 * theirs:.2f} ms", f"{ours / theirs:.2f}"
        )
    Console().print(shown)


if __name__ == "__main__":
    main()
