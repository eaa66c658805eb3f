"""Saving and loading of a large state against torch.distributed.checkpoint over FSDP2, on one disk, in one run.

Both save the parameters and the AdamW state of one model over the same CPU ranks (gloo), both flush what they write
to the disk, and both read it back into shards. The floor is one bare file a rank with as many bytes. All take turns,
several rounds over, each in fresh processes, so that a drift of the machine meets all and peak memory is its own.
Both load into a model that has been made and an optimizer that has no state yet, as a run that resumes does, from the
page cache.

    python benchmarks/checkpoint.py                             # 1 GB over 2 ranks
    python benchmarks/checkpoint.py --rounds 5 --folder FOLDER  # on the disk to be measured
    python benchmarks/checkpoint.py --layers 1000 --width 32    # 2,000 small parameters
    python benchmarks/checkpoint.py --reuse-memory              # without what new memory costs
    python benchmarks/checkpoint.py --profile                   # where the time goes in ours
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import gc
import io
import json
import os
import platform
import pstats
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from checkpoint_engines import ENGINES, Engine
from fresh_ranks import become_rank, in_turn, resident
from shardeddp.checkpoint.verify import verify


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is saved, and how often that is measured."""

    ranks: int
    layers: int
    width: int
    repeats: int
    rounds: int
    profile: bool
    reuse_memory: bool

    @property
    def nbytes(self) -> int:
        """Of the parameters and the two moments of each."""
        return self.layers * _layer_nbytes(self.width)


def _layer_nbytes(width: int) -> int:
    return 3 * 4 * (width * width + width)


@dataclass(kw_only=True)
class Measured:
    """One round of one engine on one rank: seconds, and bytes beyond what was in use before."""

    save_s: list[float] = field(default_factory=list)
    """Until the save call returns."""

    done_s: list[float] = field(default_factory=list)
    """Until everything is on the disk."""

    load_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    """To copy this rank's part to new memory once."""

    save_nbytes: list[int] = field(default_factory=list)
    load_nbytes: list[int] = field(default_factory=list)
    shard_nbytes: int = 0
    stored_nbytes: int = 0


def measure(rank: int, name: str, setting: Setting, port: int, folder: str) -> None:
    """One round on one rank; leaves the figures in ``folder``."""
    stdout = become_rank(rank, setting.ranks, port)
    release = gc.collect if setting.reuse_memory else _release_memory
    if setting.reuse_memory:
        _keep_freed_memory()
    engine = ENGINES[name](setting.ranks, setting.layers, setting.width)
    found = Measured(shard_nbytes=sum(shard.nbytes for shard in engine.shards()))
    for number in range(setting.repeats + 1):
        verifies = rank == 0 and name.startswith("shardeddp")
        _measure_once(engine, Path(folder) / f"checkpoint-{number}", found, verifies, release)
    if setting.profile and rank == 0 and name.startswith("shardeddp"):
        os.dup2(stdout, 1)
    if setting.profile:
        _profile(engine, Path(folder) / "profiled", shown=rank == 0 and name == "shardeddp")
    for values in (found.save_s, found.done_s, found.load_s, found.verify_s, found.copy_s):
        del values[:1]  # what is made or loaded once only
    Path(folder, f"{rank}.json").write_text(json.dumps(asdict(found)))
    dist.barrier()


def _measure_once(
    engine: Engine,
    path: Path,
    found: Measured,
    verifies: bool,
    release: Callable[[], object],
) -> None:
    release()
    with _timed(found.copy_s):
        copies = [shard.clone() for shard in engine.shards()]
    del copies
    release()
    with _peak(found.save_nbytes), _timed(found.done_s):
        with _timed(found.save_s, together=False):
            engine.save(path)
        engine.wait()
    engine.forget()
    release()
    with _peak(found.load_nbytes), _timed(found.load_s):
        engine.load(path)
    if verifies:
        start = time.perf_counter()
        assert verify(path) == []
        found.verify_s.append(time.perf_counter() - start)
        found.stored_nbytes = sum(file.stat().st_size for file in path.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)


@contextmanager
def _timed(into: list[float], together: bool = True) -> Iterator[None]:
    """Seconds from the moment at which all ranks are there until all ranks, or this one, are done."""
    dist.barrier()
    start = time.perf_counter()
    yield
    if together:
        dist.barrier()
    into.append(time.perf_counter() - start)


@contextmanager
def _peak(into: list[int]) -> Iterator[None]:
    """The most resident memory beyond what there is now."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    yield
    into.append(resident("VmHWM") - before)


def _release_memory() -> None:
    """Give freed memory back to the system, so that it is not taken for memory that is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _keep_freed_memory() -> None:
    """Let the allocator keep what is freed, of tensors below 32 MiB (see mallopt(3))."""
    trim_threshold, mmap_threshold, never = -1, -3, -1
    libc = ctypes.CDLL(None)
    assert libc.mallopt(trim_threshold, never) and libc.mallopt(mmap_threshold, 2**25)


def _profile(engine: Engine, path: Path, shown: bool) -> None:
    """Say where the time of one save and one load goes."""
    actions: list[tuple[str, Callable[[], None]]] = [
        ("save", lambda: engine.save(path)),
        ("load", lambda: engine.load(path)),
    ]
    for what, action in actions:
        profiler = cProfile.Profile()
        dist.barrier()
        profiler.runcall(action)
        engine.wait()
        if shown:
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(14)
            Console(stderr=True).print(f"{what}, rank 0\n{text.getvalue()}", highlight=False)


def run(names: list[str], setting: Setting, folder: Path) -> dict[str, list[Measured]]:
    """Measure in turn; the times of rank 0, the memory of the worst rank."""
    results: dict[str, list[Measured]] = {name: [] for name in names}
    for name, found in in_turn(measure, names, setting, folder):
        ranks = [Measured(**figures) for figures in found]
        ranks[0].save_nbytes = [
            max(it) for it in zip(*(rank.save_nbytes for rank in ranks), strict=True)
        ]
        ranks[0].load_nbytes = [
            max(it) for it in zip(*(rank.load_nbytes for rank in ranks), strict=True)
        ]
        results[name].append(ranks[0])
    return results


def table(results: dict[str, list[Measured]], setting: Setting) -> Table:
    """Medians, and ratios to stock, to one copy of a rank's part, and to the size of that part."""
    shown = Table(
        title=f"{setting.nbytes / 1e9:.2f} GB ({2 * setting.layers} parameters and AdamW) over "
        f"{setting.ranks} gloo ranks, torch {torch.__version__}, "
        f"{platform.machine()}, {date.today()}"
    )
    for column in (
        "engine",
        "save",
        "/ stock",
        "call / copy",
        "memory / shard",
        "load",
        "/ stock",
        "memory / shard",
        "verify",
    ):
        shown.add_column(column, justify="left" if column == "engine" else "right")
    stock = results.get("stock")

    def memory(nbytes: int, shard: int) -> str:
        return "" if setting.reuse_memory else f"{nbytes / shard:.2f}"

    for name, rounds in results.items():
        save, load = _median(rounds, "done_s"), _median(rounds, "load_s")
        against = [
            "" if stock is None else f"{own / _median(stock, key):.2f}"
            for own, key in ((save, "done_s"), (load, "load_s"))
        ]
        shard = rounds[0].shard_nbytes
        verify_s = _median(rounds, "verify_s") if rounds[0].verify_s else None
        shown.add_row(
            name,
            f"{save:.3g} s",
            against[0],
            f"{_median(rounds, 'save_s') / _median(rounds, 'copy_s'):.2f}",
            memory(_most(rounds, "save_nbytes"), shard),
            f"{load:.3g} s",
            against[1],
            memory(_most(rounds, "load_nbytes"), shard),
            "" if verify_s is None else f"{rounds[0].stored_nbytes / verify_s / 1e9:.2f} GB/s",
        )
    return shown


def _median(rounds: list[Measured], name: str) -> float:
    return statistics.median(value for measured in rounds for value in getattr(measured, name))


def _most(rounds: list[Measured], name: str) -> int:
    return max(value for measured in rounds for value in getattr(measured, name))


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(ENGINES), default=list(ENGINES), help="what to compare"
    )
    sizes = {"ranks": 2, "megabytes": 1000, "width": 2048, "repeats": 3, "rounds": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--layers", type=int, help="default: as many as have --megabytes")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: where temporary files go"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of our save and load goes"
    )
    parser.add_argument(
        "--reuse-memory",
        action="store_true",
        help="let processes keep what they free: times without what new memory costs, and no "
        "figures of memory",
    )
    parser.add_argument("--save", type=Path, help="write all figures to this file")
    options = vars(parser.parse_args())
    names, save, place = options.pop("only"), options.pop("save"), options.pop("folder")
    megabytes, layers = options.pop("megabytes"), options.pop("layers")
    layers = layers or max(1, round(megabytes * 1e6 / _layer_nbytes(options["width"])))
    setting = Setting(**options, layers=layers)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        results = run(names, setting, Path(folder))
    Console().print(table(results, setting))
    if save is not None:
        save.write_text(
            json.dumps(
                {name: [asdict(item) for item in items] for name, items in results.items()},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
