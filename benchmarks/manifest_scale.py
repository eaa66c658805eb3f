"""Indexes of sharded checkpoints of 70 and 405 billion parameters: seconds and memory of a rank, in simulation.

Usage: manifest_scale.py [--models 70B 405B] [--folder /dev/shm]

The layouts are those that the strategy makes of Llama's shapes with a unit for each block, in float32 with AdamW.
Everything is real but the elements of ranks that are only simulated: their data files have holes where those would be
and real tables at the end. One rank besides rank 0 writes its whole file; that its table is the one that the
simulation has made for it is checked. Each part runs in a process of its own, whose memory is looked at: what it takes
beyond what it had before. No process has peers: a gather is the bytes that arrive, in memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llama import Block, Llama, LlamaConfig
from shardeddp.checkpoint.find import read_manifest
from shardeddp.checkpoint.interop import dcp_metadata, to_bytes
from shardeddp.checkpoint.items import ALIGNMENT, frame_of, hexdigest
from shardeddp.checkpoint.location import LocalPath
from shardeddp.checkpoint.manifest import (
    BLOCK_NBYTES,
    DIGEST_NBYTES,
    LIGHTNING_META,
    MANIFEST,
    PIECE,
    PLACEMENT,
    STATE,
    Manifest,
    StoredFile,
    TrainingRun,
    manifest_from_bytes,
    manifest_to_bytes,
)
from shardeddp.checkpoint.pieces import Pieces, intervals_of
from shardeddp.checkpoint.read import CheckpointReader
from shardeddp.checkpoint.snapshot import Snapshot, take_snapshot
from shardeddp.checkpoint.write import Report, index, write_data_file
from shardeddp.config import CheckpointOptions
from shardeddp.plan.layout import FlatLayout, Interval, boxes
from shardeddp.plan.topology import Topology
from shardeddp.tensor.shard_tensor import ShardSpec, ShardTensor

CONFIGS = {
    "70B": LlamaConfig(
        vocab_size=128_256,
        dim=8192,
        hidden=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        length=8192,
    ),
    "405B": LlamaConfig(
        vocab_size=128_256,
        dim=16_384,
        hidden=53_248,
        num_layers=126,
        num_heads=128,
        num_kv_heads=8,
        length=8192,
    ),
    "tiny": LlamaConfig(
        vocab_size=512, dim=128, hidden=256, num_layers=3, num_heads=4, num_kv_heads=2, length=32
    ),
}
RANKS = {"70B": 1024, "405B": 4096, "tiny": 16}
STATES = ("exp_avg", "exp_avg_sq")
ONE = 5
"""The rank that writes and reads."""

RUN = TrainingRun(
    uuid="0" * 32,
    step=1,
    epoch=0,
    world_size=1,
    shard_size=1,
    sharding_strategy="full_shard",
    versions={},
)


@dataclass(frozen=True)
class Model:
    """Parameters of a model and the flat buffers of its units, for a number of ranks."""

    name: str
    ranks: int

    @cached_property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            module = Llama(CONFIGS[self.name])
        blocks = {name for name, child in module.named_modules() if isinstance(child, Block)}
        shapes = {name: tuple(it.shape) for name, it in module.named_parameters()}
        self._units.update({name: [] for name in ["", *blocks]})
        for name in shapes:
            owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
            self._units[owner].append(name)
        return shapes

    @cached_property
    def _units(self) -> dict[str, list[str]]:
        return {}

    @cached_property
    def layouts(self) -> list[FlatLayout]:
        shapes = self.parameters
        return [
            FlatLayout.build(
                names, [shapes[name] for name in names], itemsize=2, num_slices=self.ranks
            )
            for names in self._units.values()
        ]

    def intervals(self, rank: int) -> dict[str, Interval]:
        """What a rank has of each parameter."""
        found = {
            slot.fqn: layout.parameter_interval(slot, rank)
            for layout in self.layouts
            for slot in layout.slots
        }
        return {name: found[name] for name in self.parameters}


def snapshot_of(model: Model, rank: int) -> Snapshot:
    """What the strategy takes of a checkpoint; elements are memory that nobody has touched."""
    mesh: Any = SimpleNamespace(
        rank=rank,
        topology=Topology(world_size=model.ranks, shard_size=model.ranks),
        slices=SimpleNamespace(rank=0),
        experts=None,
        device=torch.device("cpu"),
    )
    weights, states = dict[str, torch.Tensor](), dict[int, dict[str, torch.Tensor]]()
    for number, (name, interval) in enumerate(model.intervals(rank).items()):
        spec = ShardSpec(
            fqn=name, shape=torch.Size(model.parameters[name]), intervals=(interval,), mesh=mesh
        )
        local = [torch.empty(interval.numel) for _ in range(3)]
        weights[name] = ShardTensor(local[0], spec)
        moments = {key: ShardTensor(it, spec) for key, it in zip(STATES, local[1:], strict=True)}
        states[number] = {"step": torch.tensor(1.0), **moments}
    names = [list(weights)]
    groups = [{"lr": 1e-4, "params": list(range(len(weights)))}]
    random_states = {
        "torch": torch.ones(model.ranks if rank == 0 else 1, 10_082, dtype=torch.uint8)
    }
    checkpoint = {
        "epoch": 0,
        "global_step": 1,
        "state_dict": weights,
        "optimizer_states": [{"state": states, "param_groups": groups}],
        "shardeddp": {"random_states": random_states},
    }
    return take_snapshot(checkpoint, names, mesh)


class Simulated:
    """Data files of all ranks without elements.

    Args:
        model: The model.
        sections: Number of each sharded tensor, as rank 0's snapshot has it.
        layout: Checksum of them.
        plain: Elements and itemsize of rank 0's other sections, by number.
    """

    def __init__(
        self, model: Model, sections: dict[str, list[int]], layout: str, snapshot: Snapshot
    ) -> None:
        self._model = model
        self._sections = sections
        self._layout = layout
        self._snapshot = snapshot

    def _boxes(self, rank: int) -> Iterator[tuple[int, int, torch.dtype, tuple[int, ...]]]:
        """Section, first element, dtype and shape of everything that a rank writes."""
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for name, interval in self._model.intervals(rank).items():
            for box_start, sizes in _parts(interval, self._model.parameters[name]):
                found += [(section, box_start, sizes) for section in self._sections[name]]
        for section, start, sizes in sorted(found):
            yield section, start, torch.float32, sizes
        if rank == 0:
            for section in range(self._snapshot.num_sharded, len(self._snapshot.sections)):
                spec = self._snapshot.sections[section]
                yield section, 0, spec.dtype, spec.shape

    def write(self, rank: int, folder: Path) -> Report:
        """A sparse data file with its table, and what the rank tells rank 0."""
        rows, blocks, end = list[tuple[int, ...]](), 0, 0
        for section, start, dtype, shape in self._boxes(rank):
            numel = int(np.prod(shape))
            frame = frame_of(dtype, shape, crc=True)
            item = -(-end // ALIGNMENT) * ALIGNMENT
            payload = item + len(frame.head)
            end = payload + numel * dtype.itemsize + len(frame.tail(0))
            rows.append((section, start, start + numel, item, end - item, payload))
            blocks += -(-numel * dtype.itemsize // BLOCK_NBYTES)
        columns = np.array(rows, dtype=PIECE)
        table = columns.tobytes() + os.urandom(blocks * DIGEST_NBYTES)
        name = f"__{rank}_0.distcp"
        with open(folder / name, "wb") as file:
            file.seek(end)
            file.write(table)
        stored = StoredFile(
            nbytes=end + len(table),
            checksum="0" * 32,
            pieces=len(rows),
            blocks=blocks,
            table=hexdigest(table),
        )
        intervals = intervals_of(*(columns[column] for column in ("section", "start", "stop")))
        return Report(stored, self._layout, intervals)


def _parts(interval: Interval, shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    start = interval.start
    for box in boxes(interval, shape):
        yield start, box.sizes
        start += box.numel


# -- the parts, each in a process of its own


def prepare(folder: LocalPath, model: Model) -> dict[str, Any]:
    """Data files of all ranks, and what they tell rank 0 (not measured)."""
    snapshot = snapshot_of(model, 0)
    sections: dict[str, list[int]] = {name: [] for name in model.parameters}
    for path, section in snapshot.tensors:
        if section < snapshot.num_sharded:
            sections[str(path[1] if path[0] == "model" else path[2])].append(section)
    simulated = Simulated(model, sections, snapshot.layout.hex(), snapshot)
    told, pieces = list[bytes](), 0
    for rank in range(model.ranks):
        report = simulated.write(rank, folder)
        told.append(report.to_bytes())
        pieces += report.file.pieces
    (folder / "told").write_bytes(b"".join(told))
    (folder / "lengths.json").write_text(json.dumps([*map(len, told)]))
    return {"pieces": pieces, "tensors": len(snapshot.tensors)}


def rank_0(folder: Path, model: Model) -> dict[str, Any]:
    """Rank 0: its snapshot, what arrives from all ranks, and the indexes."""
    model.intervals(0)  # what the engine has at hand
    with measured() as figures:
        snapshot = snapshot_of(model, 0)
        lengths = json.loads((folder / "lengths.json").read_text())
        with open(folder / "told", "rb") as file:
            own = file.read(lengths[0])
            arrived = torch.empty(model.ranks, max(lengths[1:]), dtype=torch.uint8)
            for rank, length in enumerate(lengths[1:], start=1):
                file.readinto(arrived[rank, :length].numpy())  # type: ignore[arg-type]
        rows = (arrived[rank, : lengths[rank]].numpy() for rank in range(1, model.ranks))
        reports = [*map(Report.from_bytes, (own, *map(memoryview, rows)))]
        manifest, placement = index(without_objects(snapshot), RUN, reports, [])
        contents: dict[str, bytes | memoryview] = {
            PLACEMENT: placement,
            STATE: json.dumps(snapshot.tree, separators=(",", ":")).encode(),
            LIGHTNING_META: snapshot.rest,
        }
        files = dict(manifest.files)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
            files[name] = StoredFile(nbytes=len(content), checksum=hexdigest(content))
        whole = Manifest(**{**vars_of(manifest), "files": files})
        (folder / MANIFEST).write_bytes(manifest_to_bytes(whole))
    sizes = {name: (folder / name).stat().st_size for name in (MANIFEST, PLACEMENT, STATE, "told")}
    return figures | {"nbytes": sizes}


def write_one(folder: LocalPath, model: Model) -> dict[str, Any]:
    """Another rank: its snapshot and its whole data file, elements and all."""
    own = folder / "own"
    own.mkdir()
    model.intervals(ONE)
    with measured() as figures:
        snapshot = snapshot_of(model, ONE)
        start = time.perf_counter()
        options = CheckpointOptions(durability="process")
        report, _, _ = write_data_file(snapshot, own, ONE, options)
        writing = time.perf_counter() - start
        message = report.to_bytes()
    name = f"__{ONE}_0.distcp"
    expected = (folder / name).stat().st_size
    stored = report.file
    # But for the checksums, which the simulated file has at random.
    rows = [_rows_of(path / name, stored.pieces, stored.table_nbytes) for path in (own, folder)]
    assert stored.nbytes == expected and rows[0] == rows[1], "the simulation is not what is written"
    shutil.rmtree(own)
    figures["seconds"] -= writing
    more = {"file nbytes": stored.nbytes, "writing seconds": writing, "pieces": stored.pieces}
    return figures | more | {"message nbytes": len(message)}


def read_as(folder: LocalPath, model: Model, ranks: int) -> dict[str, Any]:
    """A rank of some world size: everything but the elements themselves."""
    wanted = Model(model.name, ranks).intervals(min(ONE, ranks - 1))
    with measured() as figures:
        reader = CheckpointReader(folder, (min(ONE, ranks - 1), ranks))
        tree = reader.tree()
        pieces = Pieces(folder, reader.manifest)
        found = 0
        for name, interval in wanted.items():
            paths = [f"model.{name}", *(f"optimizer_0.state.{name}.{key}" for key in STATES)]
            for path in paths:
                found += len(pieces.of(*reader.tensors[path].sections, interval))
    assert tree["global_step"] == 1
    return figures | {"pieces": found}


def check(folder: LocalPath, model: Model) -> dict[str, Any]:
    """The part of `shardeddp verify` that is not reading the elements: all tables against the placement."""
    with measured() as figures:
        manifest = read_manifest(folder)
        pieces = Pieces(folder, manifest)
        pieces.check([pieces.read_table(name).intervals() for name in manifest.data_files])
    return figures


def metadata(folder: LocalPath, model: Model) -> dict[str, Any]:
    """`shardeddp metadata`: the index of torch.distributed.checkpoint, where it was not written along."""
    with measured() as figures:
        manifest = manifest_from_bytes((folder / MANIFEST).read_bytes())
        content = to_bytes(dcp_metadata(manifest, Pieces(folder, manifest)))
    return figures | {"nbytes": len(content)}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "prepare": prepare,
    "rank_0": rank_0,
    "write_one": write_one,
    "read_as": read_as,
    "check": check,
    "metadata": metadata,
}


def without_objects(snapshot: Snapshot) -> Snapshot:
    """The same; where objects lie is nothing that grows."""
    return Snapshot(**{**vars_of(snapshot), "objects": []})


def vars_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _rows_of(path: Path, count: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(-nbytes, os.SEEK_END)
        return file.read(count * PIECE.itemsize)


class measured:
    """Seconds and the memory that was taken meanwhile, at its peak."""

    def __enter__(self) -> dict[str, Any]:
        # What was freed before goes back to the system, so that none of it is used unseen.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before, self._start, self._figures = _peak(), time.perf_counter(), dict[str, Any]()
        return self._figures

    def __exit__(self, *_: object) -> None:
        self._figures["seconds"] = time.perf_counter() - self._start
        self._figures["MB"] = (_peak() - self._before) / 1e6


def _peak() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def worlds_of(ranks: int) -> Sequence[int]:
    """World sizes to read under: the same, three quarters, an eighth, and twice as many."""
    return ranks, ranks * 3 // 4, ranks // 8, ranks * 2


def run(part: str, folder: Path, name: str, *arguments: object) -> dict[str, Any]:
    """A part in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder), "--models", name]
    command += ["--world", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def show(what: str, figures: dict[str, Any]) -> None:
    """One line of the result."""
    parts = (
        [f"{figures.pop('seconds'):6.2f} s {figures.pop('MB'):6.0f} MB  "]
        if "MB" in figures
        else []
    )
    print(f"  {what:<44}", *parts, json.dumps(figures) if figures else "", flush=True)


def simulate(name: str, folder: Path) -> None:
    """All parts for one model."""
    ranks = RANKS[name]
    print(f"{name} on {ranks:,} ranks", flush=True)
    show("simulated", run("prepare", folder, name))
    show("rank 0: gathered messages, all indexes", run("rank_0", folder, name))
    show(f"rank {ONE}: snapshot, table, message", run("write_one", folder, name))
    for world in worlds_of(ranks):
        show(f"a rank of {world:,}: all indexes it needs", run("read_as", folder, name, world))
    show("verify: tables against the placement", run("check", folder, name))
    if name != "405B":  # gigabytes of objects
        show("shardeddp metadata", run("metadata", folder, name))


def main() -> None:
    """Simulate, or one part of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=["70B", "405B"])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--world", nargs="*", type=int, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        name = options.models[0]
        figures = PARTS[options.part](
            LocalPath(options.folder), Model(name, RANKS[name]), *options.world
        )
        print(json.dumps(figures))
        return
    for name in options.models:
        folder = Path(tempfile.mkdtemp(dir=options.folder, suffix=".ckpt"))
        try:
            simulate(name, folder)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
