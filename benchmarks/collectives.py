"""Which composition of transfers is fastest for gloo: its own collectives, broadcasts, all-to-all, or point to point.

    python benchmarks/collectives.py --ranks 2 --mebibytes 13 64
    python benchmarks/collectives.py --ranks 8 --mebibytes 8 --rates 1 0.1

``shardeddp.comm`` uses the rows marked "ours". With rates, half of the ranks are on each of two network namespaces of
this machine (root, ``ip`` and ``tc``), and the link between them has each of these rates in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from linked_nodes import NUM_NODES, LinkedNodes, MissingMeans, address, sent_nbytes, shape
from shardeddp.comm.gloo import GlooCollectives
from shardeddp.comm.linked import LinkedCollectives
from shardeddp.comm.traffic import Traffic

JOB_TIMEOUT_S = 300
Case = tuple[str, str, Callable[[], object]]


def cases(rank: int, ranks: int, numel: int, linked: bool) -> list[Case]:
    """What is compared: (collective, composition, call)."""
    numel -= numel % ranks
    buffer, shard, arrived = torch.rand(numel), torch.empty(numel // ranks), torch.empty(numel)
    slices = buffer.view(ranks, -1)
    direct = GlooCollectives(dist.group.WORLD, range(ranks), Traffic())
    nodes = [places.tolist() for places in torch.arange(ranks).chunk(NUM_NODES)]
    ours = LinkedCollectives(dist.group.WORLD, range(ranks), Traffic(), nodes) if linked else direct
    mark = "" if linked else " (ours)"

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

    by_node: list[Case] = [
        ("all-gather", "once per node (ours)", lambda: ours.all_gather_(buffer).wait()),
        ("reduce-scatter", "sums of a node (ours)", lambda: ours.reduce_scatter(shard, buffer).wait()),
    ]
    return [
        ("all-gather", "gloo's own", lambda: dist.all_gather_into_tensor(buffer, slices[rank])),
        ("all-gather", "a broadcast per rank", broadcasts),
        ("all-gather", f"point to point{mark}", lambda: direct.all_gather_(buffer).wait()),
        ("reduce-scatter", "gloo's own", lambda: dist.reduce_scatter_tensor(shard, buffer)),
        ("reduce-scatter", "all-to-all, local mean", all_to_all),
        ("reduce-scatter", f"point to point, local mean{mark}", lambda: direct.reduce_scatter(shard, buffer).wait()),
        ("all-reduce", "gloo's own, division", averaged_all_reduce),
        ("all-reduce", "point to point, local mean (ours)", lambda: direct.all_reduce_(buffer, "mean").wait()),
        *(by_node if linked else []),
    ]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How it is measured."""

    ranks: int
    mebibytes: list[int]
    repeats: int
    rates: list[float]
    """Of the link between two nodes, in Gbit/s; none: all ranks are on one."""


Row = tuple[float, str, str, int, float, float]
"""Rate, collective, composition, MiB, median seconds, bytes that cross the link in parts of the buffer."""


def measure(rank: int, setting: Setting, where: str, folder: str) -> None:
    """Time every case on one rank, all cases once per repeat."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://{where}", rank=rank, world_size=setting.ranks)
    rows: list[Row] = []
    for rate in setting.rates or [0.0]:
        if rate:
            dist.barrier()
            if rank % (setting.ranks // NUM_NODES) == 0:
                shape(rate, 0.0)
            dist.barrier()
        for mebibytes in setting.mebibytes:
            compared = cases(rank, setting.ranks, mebibytes * 2**18, bool(rate))
            times, sent = time_in_turn(compared, setting.repeats, sent_nbytes if rate else lambda: 0)
            rows += [
                (rate, kind, name, mebibytes, statistics.median(seconds), nbytes / setting.repeats / mebibytes / 2**20)
                for (kind, name, _), seconds, nbytes in zip(compared, times, sent, strict=True)
            ]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def time_in_turn(
    compared: Sequence[Case], repeats: int, count: Callable[[], int]
) -> tuple[list[list[float]], list[int]]:
    """By case, seconds of every call and what all of them have counted."""
    times: list[list[float]] = [[] for _ in compared]
    counted = [0] * len(compared)
    for repeat in range(-2, repeats):
        for place, (_, _, call) in enumerate(compared):
            dist.barrier()
            before, start = count(), time.perf_counter()
            call()
            if repeat >= 0:
                times[place].append(time.perf_counter() - start)
            dist.barrier()
            if repeat >= 0:
                counted[place] += count() - before
    return times, counted


def launch(setting: Setting, folder: str) -> None:
    """Start the ranks, on nodes where there are any."""
    if not setting.rates:
        mp.spawn(measure, (setting, f"127.0.0.1:{20000 + os.getpid() % 20000}", folder), nprocs=setting.ranks)
        return
    with LinkedNodes() as nodes:
        for rank in range(setting.ranks):
            work = json.dumps([rank, asdict(setting), f"{address(0)}:29500", folder])
            node = rank // (setting.ranks // NUM_NODES)
            nodes.start(node, [sys.executable, __file__, "--as-rank", work], {}, Path(folder, f"{rank}.log"))
        nodes.join(JOB_TIMEOUT_S)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[13, 64], help="buffer sizes, default 13 and 64")
    parser.add_argument("--repeats", type=int, default=15, help="default 15")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="Gbit/s of the link between two nodes")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    as_rank = options.pop("as_rank")
    if as_rank is not None:
        rank, setting, where, folder = json.loads(as_rank)
        measure(rank, Setting(**setting), where, folder)
        return
    setting = Setting(**options)
    if setting.rates and setting.ranks % NUM_NODES:
        parser.error(f"--ranks {setting.ranks}: expected a multiple of {NUM_NODES}, the number of nodes")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that contexts are left
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(setting, folder)
        except MissingMeans as error:
            sys.exit(str(error))
        rows: list[Row] = json.loads(Path(folder, "rows.json").read_text())
    Console().print(table(rows, setting))


def table(rows: Sequence[Row], setting: Setting) -> Table:
    """One line per rate, size and case."""
    shown = Table(title=f"gloo, {setting.ranks} ranks, fp32, medians of {setting.repeats}, torch {torch.__version__}")
    for column in (*(["Gbit/s"] if setting.rates else []), "collective", "composition"):
        shown.add_column(column)
    for column in ("buffer", "time", *(["across / buffer"] if setting.rates else [])):
        shown.add_column(column, justify="right")
    for rate, kind, name, mebibytes, seconds, share in rows:
        cells = [kind, name, f"{mebibytes} MiB", f"{1e3 * seconds:.1f} ms"]
        shown.add_row(*([f"{rate:g}", *cells, f"{share:.2f}"] if setting.rates else cells))
    return shown


if __name__ == "__main__":
    main()
