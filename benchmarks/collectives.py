"""Which composition of transfers is fastest for gloo: its own collectives, broadcasts, all-to-all, or point to point.

    python benchmarks/collectives.py --ranks 2 --mebibytes 13 64
    python benchmarks/collectives.py --ranks 4 --mebibytes 13

``shardeddp.comm`` uses the rows marked "ours".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from shardeddp.comm.backends import GlooCollectives
from shardeddp.comm.collectives import Traffic

Case = tuple[str, str, Callable[[], object]]


def cases(rank: int, ranks: int, numel: int) -> list[Case]:
    """What is compared: (collective, composition, call)."""
    numel -= numel % ranks
    buffer, shard, arrived = torch.rand(numel), torch.empty(numel // ranks), torch.empty(numel)
    slices = buffer.view(ranks, -1)
    ours = GlooCollectives(dist.group.WORLD, range(ranks), Traffic())

    def broadcasts() -> None:
        works = [dist.broadcast(slices[source], source, async_op=True) for source in range(ranks)]
        for work in works:
            work.wait()

    def all_to_all() -> None:
        dist.all_to_all_single(arrived, buffer)
        torch.mean(arrived.view(ranks, -1), 0, out=shard)

    def averaged_all_reduce() -> None:
        dist.all_reduce(buffer)
        buffer.div_(ranks)

    return [
        ("all-gather", "gloo's own", lambda: dist.all_gather_into_tensor(buffer, slices[rank])),
        ("all-gather", "a broadcast per rank", broadcasts),
        ("all-gather", "point to point (ours)", lambda: ours.all_gather_(buffer).wait()),
        ("reduce-scatter", "gloo's own", lambda: dist.reduce_scatter_tensor(shard, buffer)),
        ("reduce-scatter", "all-to-all, local mean", all_to_all),
        (
            "reduce-scatter",
            "point to point, local mean (ours)",
            lambda: ours.reduce_scatter(shard, buffer).wait(),
        ),
        ("all-reduce", "gloo's own, division", averaged_all_reduce),
        (
            "all-reduce",
            "point to point, local mean (ours)",
            lambda: ours.all_reduce_(buffer, "mean").wait(),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How it is measured."""

    ranks: int
    mebibytes: list[int]
    repeats: int


Row = tuple[str, str, int, float]
"""Collective, composition, MiB, median seconds."""


def measure(rank: int, setting: Setting, port: int, folder: str) -> None:
    """Time every case on one rank, all cases once per repeat."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=setting.ranks
    )
    rows: list[Row] = []
    for mebibytes in setting.mebibytes:
        compared = cases(rank, setting.ranks, mebibytes * 2**18)
        times = time_in_turn(compared, setting.repeats)
        rows += [
            (kind, name, mebibytes, statistics.median(seconds))
            for (kind, name, _), seconds in zip(compared, times, strict=True)
        ]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def time_in_turn(compared: Sequence[Case], repeats: int) -> list[list[float]]:
    """By case, seconds of every call."""
    times: list[list[float]] = [[] for _ in compared]
    for repeat in range(-2, repeats):
        for place, (_, _, call) in enumerate(compared):
            dist.barrier()
            start = time.perf_counter()
            call()
            if repeat >= 0:
                times[place].append(time.perf_counter() - start)
            dist.barrier()
    return times


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument(
        "--mebibytes", type=int, nargs="+", default=[13, 64], help="buffer sizes, default 13 and 64"
    )
    parser.add_argument("--repeats", type=int, default=15, help="default 15")
    setting = Setting(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (setting, 20000 + os.getpid() % 20000, folder), nprocs=setting.ranks)
        rows: list[Row] = json.loads(Path(folder, "rows.json").read_text())
    Console().print(table(rows, setting))


def table(rows: Sequence[Row], setting: Setting) -> Table:
    """One line per size and case."""
    shown = Table(
        title=f"gloo, {setting.ranks} ranks, fp32, medians of {setting.repeats}, torch {torch.__version__}"
    )
    for column in ("collective", "composition"):
        shown.add_column(column)
    for column in ("buffer", "time"):
        shown.add_column(column, justify="right")
    for kind, name, mebibytes, seconds in rows:
        shown.add_row(kind, name, f"{mebibytes} MiB", f"{1e3 * seconds:.1f} ms")
    return shown


if __name__ == "__main__":
    main()
