"""Measures contestants in turn, each time in fresh processes: the ranks of this machine's CPU, and their memory."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import track


class Rounds(Protocol):
    """What a setting has to say."""

    @property
    def ranks(self) -> int:
        """Processes."""
        ...

    @property
    def rounds(self) -> int:
        """How often each is measured."""
        ...


Measure = Callable[[int, str, Any, int, str], None]
"""Of (rank, name, setting, port, folder): begins with :func:`become_rank`, leaves ``{rank}.json`` in the folder."""


def in_turn(
    measure: Measure, names: Sequence[str], setting: Rounds, folder: Path
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Measure all of them, several rounds over, so that a drift of the machine meets each.

    Yields:
        A name, and what each rank has left, by rank.
    """
    jobs = [(round_, name) for round_ in range(setting.rounds) for name in names]
    for number, (round_, name) in enumerate(track(jobs, "measuring", console=Console(stderr=True))):
        # Every second round backwards, so that nobody always runs after the same neighbour.
        name = name if round_ % 2 == 0 else names[::-1][names.index(name)]
        port = 20000 + (os.getpid() + number) % 20000
        with tempfile.TemporaryDirectory(dir=folder) as place:
            mp.spawn(measure, (name, setting, port, place), nprocs=setting.ranks)
            yield (
                name,
                [
                    json.loads(Path(place, f"{rank}.json").read_text())
                    for rank in range(setting.ranks)
                ],
            )


def become_rank(rank: int, ranks: int, port: int) -> int:
    """Make this process a rank as a launcher would, and quiet.

    Returns:
        A descriptor of what standard output was.
    """
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks), RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    stdout = os.dup(1)
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 1
    )  # rank 0 prints a table of units that would tear the progress bar
    torch.manual_seed(0)
    return stdout


def resident(key: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status: peak memory is read on Linux only")
