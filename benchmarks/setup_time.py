"""How long it takes to shard a module of a billion parameters in 200 units that was built on the meta device.

FSDP2's ``fully_shard`` leaves the values to the user (``to_empty``, ``reset_parameters``), whereas ours ends with the
values that an unsharded module would have. Both times are shown: until everything is wrapped, and until it is usable.
The floor draws the same numbers into one buffer and keeps a rank's part of them, without names, units or hooks.

    python benchmarks/setup_time.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

from fresh_ranks import become_rank, in_turn
from shardeddp.comm import Mesh
from shardeddp.config import parse_options
from shardeddp.engine.deferred_init import Materializer
from shardeddp.engine.recording import Recording
from shardeddp.engine.shard_model import shard_model
from shardeddp.plan.topology import Topology
from shardeddp.wrap import build_units, resolve_policy

VOCABULARY = 32_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The size of the module."""

    blocks: int
    dim: int
    ranks: int
    rounds: int


class Block(nn.Module):
    """The parameters of a transformer's block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.qkv(self.norm_1(x))) + self.down(self.up(self.norm_2(x)))


def build(setting: Setting) -> nn.Sequential:
    """Blocks between an embedding and a head, without values."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Embedding(VOCABULARY, setting.dim),
            *(Block(setting.dim) for _ in range(setting.blocks)),
            nn.Linear(setting.dim, VOCABULARY, bias=False),
        )


def ours(setting: Setting) -> tuple[float, float]:
    """Seconds until wrapped, and until usable."""
    recording = Recording()
    with recording.active():
        model = build(setting)
    mesh = Mesh(
        Topology(world_size=setting.ranks, shard_size=setting.ranks),
        torch.device("cpu"),
        timedelta(minutes=5),
    )
    filling: list[float] = []
    fill = Materializer.fill

    def timed(self: Materializer, mesh: Mesh) -> set[str]:
        start = time.perf_counter()
        kept = fill(self, mesh)
        filling.append(time.perf_counter() - start)
        return kept

    Materializer.fill = timed  # type: ignore[method-assign]
    dist.barrier()
    start = time.perf_counter()
    units = build_units(model, resolve_policy([Block]))
    shard_model(units, mesh, parse_options({}), recording=recording)
    usable = time.perf_counter() - start
    return usable - sum(filling), usable


def fsdp2(setting: Setting) -> tuple[float, float]:
    """The same of ``fully_shard``."""
    model = build(setting)
    mesh = init_device_mesh("cpu", (setting.ranks,))
    dist.barrier()
    start = time.perf_counter()
    for module in model:
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wrapped = time.perf_counter() - start
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            module.reset_parameters()
    return wrapped, time.perf_counter() - start


def floor(setting: Setting) -> tuple[float, float]:
    """Nothing, and seconds to draw all numbers of the module and to keep a part of them."""
    layers = [module for module in build(setting).modules() if not list(module.children())]
    most = max(parameter.numel() for layer in layers for parameter in layer.parameters())
    dist.barrier()
    start = time.perf_counter()
    buffer, kept = torch.empty(most), list[torch.Tensor]()
    for layer in layers:
        for parameter in layer.parameters():
            values = buffer[: parameter.numel()]
            if isinstance(layer, nn.Embedding):
                values.normal_()
            elif isinstance(layer, nn.Linear):
                values.uniform_(-0.1, 0.1)
            kept.append(values.chunk(setting.ranks)[0].clone())
    return 0.0, time.perf_counter() - start


CONTESTANTS = {"FSDP2 fully_shard": fsdp2, "ShardedDP full_shard": ours, "floor": floor}


def measure(rank: int, name: str, setting: Setting, port: int, folder: str) -> None:
    """Leave both times in ``folder``."""
    become_rank(rank, setting.ranks, port)
    dist.init_process_group("gloo", rank=rank, world_size=setting.ranks)
    wrapped, usable = CONTESTANTS[name](setting)
    Path(folder, f"{rank}.json").write_text(json.dumps({"wrapped_s": wrapped, "usable_s": usable}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure in turn, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=199, help="units beside the root")
    parser.add_argument("--dim", type=int, default=640)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    setting = Setting(**vars(parser.parse_args()))
    names = list(CONTESTANTS)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for name, ranks in in_turn(measure, names, setting, Path(folder)):
            found[name].append((ranks[0]["wrapped_s"], ranks[0]["usable_s"]))
    numel = sum(parameter.numel() for parameter in build(setting).parameters())
    table = Table("", "wrapped (s)", "ratio", "with values (s)", "ratio")
    table.title = (
        f"{numel / 1e9:.2f} billion parameters, {setting.blocks + 1} units, {setting.ranks} ranks"
    )
    for name, times in found.items():
        row = [name]
        for each, base in zip(
            zip(*times, strict=True), zip(*found[names[0]], strict=True), strict=True
        ):
            row += [
                f"{statistics.median(each):.2f}",
                f"{statistics.median(each) / statistics.median(base):.2f}",
            ]
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
