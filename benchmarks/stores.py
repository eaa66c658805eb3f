"""Sharded checkpoints in an object store, against the store's own client sending and fetching as many bytes.

One rank, and a server of S3 (moto) on this machine. Each round does all in turn: the client puts a file and gets it,
writes and reads a file that it has opened, in parts, and a model of as many bytes is saved and loaded through Fabric.
(moto copies the whole object for each part that is read; a real store does not.)

    pip install '.[stores,test]'
    python benchmarks/stores.py
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.table import Table
from torch import nn

from shardeddp.fabric import ShardedDP

SERVER = "import moto.server, sys; moto.server.main(['-H', '127.0.0.1', '-p', sys.argv[1]])"
FOLDER = "s3://benchmark/run"


@contextmanager
def server() -> Iterator[None]:
    """A server of S3, which the clients of this process talk to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "us-east-1"}
    os.environ.update(keys | {"AWS_ENDPOINT_URL": address})
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/moto-api/data.json", timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.2)
        fsspec.filesystem("s3").mkdir("benchmark")
        yield
    finally:
        process.terminate()
        process.wait()


def timed(action: Callable[[], object]) -> float:
    """Seconds that it takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(megabytes: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each round, by what was done."""
    width = 1024
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ShardedDP(state_dict_type="sharded"))
    fabric.launch()
    layers = [nn.Linear(width, width, bias=False) for _ in range(megabytes // 4)]
    model: Any = fabric.setup(nn.Sequential(*layers))
    file = folder / "bytes"
    file.write_bytes(os.urandom(megabytes * 2**20))
    store, name = fsspec.url_to_fs(f"{FOLDER}/bytes")
    elements = memoryview(file.read_bytes())

    def write() -> None:
        with store.open(name, "wb", block_size=50 * 2**20) as opened:
            for start in range(0, len(elements), 2**22):
                opened.write(elements[start : start + 2**22])

    def read() -> None:
        with store.open(name, "rb", block_size=32 * 2**20) as opened:
            while opened.read(2**22):
                pass

    actions: dict[str, Callable[[], object]] = {
        "put_file": lambda: store.put_file(str(file), name),
        "get_file": lambda: store.get_file(name, str(folder / "got")),
        'open("wb")': write,
        'open("rb")': read,
        "save": lambda: fabric.save(f"{FOLDER}/model.ckpt", {"model": model}),
        "load": lambda: fabric.load(f"{FOLDER}/model.ckpt", {"model": model}),
    }
    found: dict[str, list[float]] = {name: [] for name in actions}
    for each in range(rounds + 1):
        for what, action in actions.items():
            took = timed(action)
            if each:  # the first makes connections
                found[what].append(took)
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, server():
        found = measure(given.megabytes, given.rounds, Path(folder))
    table = Table(title=f"{given.megabytes} MiB in an object store, {given.rounds} rounds in turn")
    for column in ("", "median, s", "fastest, s", "MiB/s", "of a whole file", "of an opened one"):
        table.add_column(column, justify="left" if not column else "right")
    against = {"save": ("put_file", 'open("wb")'), "load": ("get_file", 'open("rb")')}
    for what, times in found.items():
        row = [what, f"{statistics.median(times):.3f}", f"{min(times):.3f}"]
        row.append(f"{given.megabytes / statistics.median(times):,.0f}")
        for client in against.get(what, ()):
            median = statistics.median(found[client]) / statistics.median(times)
            row.append(f"{median:.2f} ({min(found[client]) / min(times):.2f})")
        table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
