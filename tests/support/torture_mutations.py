"""Random damage to the files of a checkpoint, each of it described; the same seed does the same."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardeddp.checkpoint.items import hexdigest
from shardeddp.checkpoint.manifest import MANIFEST, STATE
from support.tables import (
    Files,
    edit_manifest,
    edit_placement,
    edit_table,
    put_table,
    seal_bytes,
    table_of,
)

PAGE = 4096
_NUMBER = re.compile(rb"(?<=[\[,:])\d+(?=[\],}])")


def read_files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_files(folder: Path, files: Files, was: Files | None = None) -> None:
    """Make a directory hold these files; those that are as they were are not touched."""
    folder.mkdir(exist_ok=True)
    for name in (was or {}).keys() - files.keys():
        (folder / name).unlink()
    for name, content in files.items():
        if was is None or was.get(name) != content:
            (folder / name).write_bytes(content)


def edit_state(files: Files, change: Callable[[Any], object]) -> None:
    """Change what is not a tensor so that all sizes and checksums fit again."""
    tree = json.loads(files[STATE])
    change(tree)
    put_file(files, STATE, json.dumps(tree).encode())


def put_file(files: Files, name: str, content: bytes) -> None:
    """Give a file another content so that its size and checksum fit again."""
    files[name] = content
    edit_manifest(
        files, lambda manifest: manifest["files"].update({name: [len(content), hexdigest(content)]})
    )


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """What was done."""

    kind: str
    what: str
    files: Files


def mutate(original: Files, seed: int) -> Mutation:
    """Damage some file."""
    draw = random.Random(seed)
    kind = draw.choice(list(KINDS))
    files = dict(original)
    return Mutation(kind=kind, what=KINDS[kind](files, draw), files=files)


def _any_file(files: Files, draw: random.Random) -> str:
    # Data and the two files that are read, more often than those that other tools read.
    return draw.choice(
        [name for name in files for _ in range(1 if name in (".metadata", "meta.pt") else 3)]
    )


def _flip(files: Files, draw: random.Random) -> str:
    name = _any_file(files, draw)
    position = draw.randrange(8 * len(files[name]))
    changed = bytearray(files[name])
    changed[position // 8] ^= 1 << position % 8
    files[name] = bytes(changed)
    return f"bit {position} of {name}"


def _truncate(files: Files, draw: random.Random) -> str:
    name = _any_file(files, draw)
    end = draw.choice([0, len(files[name]) - 1, draw.randrange(len(files[name]))])
    files[name] = files[name][:end]
    return f"{name} ends at {end}"


def _zero(files: Files, draw: random.Random) -> str:
    name = _any_file(files, draw)
    start = draw.randrange(len(files[name])) // PAGE * PAGE
    content = files[name]
    page = content[start : start + PAGE]
    files[name] = content[:start] + bytes(len(page)) + content[start + len(page) :]
    return f"page at {start} of {name}"


def _append(files: Files, draw: random.Random) -> str:
    name = _any_file(files, draw)
    more = draw.choice(
        [b"\0", b"}", b" ", b"\n", draw.randbytes(draw.randint(1, 5000)), files[name]]
    )
    files[name] += more
    return f"{len(more)} bytes behind {name}"


def _swap(files: Files, draw: random.Random) -> str:
    first, second = draw.sample(list(files), 2)
    files[first], files[second] = files[second], files[first]
    return f"{first} and {second}"


def _delete(files: Files, draw: random.Random) -> str:
    name = draw.choice(list(files))
    del files[name]
    return name


def _duplicate(files: Files, draw: random.Random) -> str:
    """One range of a data file over another: bytes of the right kind in the wrong place."""
    name = draw.choice([name for name in files if name.endswith(".distcp")])
    content, size = files[name], draw.choice([64, 512, PAGE])
    source, target = (
        draw.randrange(max(1, (len(files[name]) - size) // 64)) * 64 for _ in range(2)
    )
    files[name] = content[:target] + content[source : source + size] + content[target + size :]
    return f"{size} bytes at {source} of {name} to {target}"


def _data(files: Files, draw: random.Random) -> str:
    return draw.choice([name for name in files if name.endswith(".distcp")])


def _repeat_piece(files: Files, draw: random.Random) -> str:
    name = _data(files, draw)

    def change(rows: Any, digests: list[bytes]) -> Any:
        row = draw.randrange(len(rows))
        digests.insert(row, digests[row])
        return np.insert(rows, row, rows[row])

    edit_table(files, name, change)
    return f"a piece of {name} is listed twice"


def _drop_piece(files: Files, draw: random.Random) -> str:
    name = _data(files, draw)

    def change(rows: Any, digests: list[bytes]) -> Any:
        row = draw.randrange(len(rows))
        del digests[row]
        return np.delete(rows, row)

    edit_table(files, name, change)
    return f"a piece of {name} is not listed"


def another(value: int, draw: random.Random) -> int:
    """In the place of a number."""
    return draw.choice(
        [value + 1, max(0, value - 1), 2 * value + 1, 0, 64, 2**31, 2**52, 2**64 - 1, value ^ 64]
    )


def _table(files: Files, draw: random.Random) -> str:
    """Some numbers of a table are others."""
    name, what = _data(files, draw), list[str]()

    def change(rows: Any, digests: list[bytes]) -> None:
        for _ in range(draw.randint(1, 2)):
            row, column = draw.randrange(len(rows)), draw.choice(rows.dtype.names)
            value = int(rows[row][column])
            limit = 2 ** (8 * rows.dtype[column].itemsize)
            rows[row][column] = another(value, draw) % limit
            what.append(f"{column} {value} of row {row} is {rows[row][column]}")

    edit_table(files, name, change)
    return f"{name}: {', '.join(what)}"


def _mix_table(files: Files, draw: random.Random) -> str:
    """Rows change places, are cut off, or lack a checksum; or the counts lie."""
    name = _data(files, draw)
    rows, digests = table_of(files, name)
    kind, lies = draw.choice(["order", "fewer", "digests", "counts"]), dict[str, int]()
    match kind:
        case "order":
            first, second = draw.randrange(len(rows)), draw.randrange(len(rows))
            rows[[first, second]] = rows[[second, first]]
        case "fewer":
            rows = rows[: draw.randrange(len(rows))]
        case "digests":
            draw.choice([digests.pop, lambda: digests.append(bytes(16)), digests.reverse])()
        case "counts":
            lies = {"pieces": another(len(rows), draw), "blocks": another(len(digests), draw)}
    put_table(files, name, rows, digests, **lies)
    return f"{name}: {kind} {lies}"


def _placement(files: Files, draw: random.Random) -> str:
    what = list[str]()

    def change(rows: Any) -> Any:
        row, column = draw.randrange(len(rows)), draw.choice(["start", "file"])
        match draw.choice(["number", "number", "twice", "gone", "swapped"]):
            case "number":
                value, limit = int(rows[row][column]), 2 ** (8 * rows.dtype[column].itemsize)
                rows[row][column] = another(value, draw) % limit
                what.append(f"{column} {value} of row {row} is {rows[row][column]}")
            case "swapped":
                other = draw.randrange(len(rows))
                rows[[row, other]] = rows[[other, row]]
                what.append(f"rows {row} and {other}")
            case "twice":
                rows = np.insert(rows, row, rows[row])
                what.append(f"row {row} twice")
            case "gone":
                rows = np.delete(rows, row)
                what.append(f"no row {row}")
        return rows

    edit_placement(files, change)
    return ", ".join(what)


def _number(seals: bool) -> Callable[[Files, random.Random], str]:
    def change(files: Files, draw: random.Random) -> str:
        body = files[MANIFEST].partition(b'"manifest":')[2][:-1]
        found = draw.choice(list(_NUMBER.finditer(body)))
        value = int(found.group())
        other = another(value, draw)
        edited = body[: found.start()] + b"%d" % other + body[found.end() :]
        files[MANIFEST] = seal_bytes(edited) if seals else files[MANIFEST].replace(body, edited)
        return f"{value} at {found.start()} is {other}: {body[max(0, found.start() - 40) : found.end() + 20]!r}"

    return change


KINDS: dict[str, Callable[[Files, random.Random], str]] = {
    "bit flip": _flip,
    "another bit flip": _flip,
    "truncation": _truncate,
    "zero page": _zero,
    "appended bytes": _append,
    "swapped files": _swap,
    "deleted file": _delete,
    "duplicated range": _duplicate,
    "piece listed twice": _repeat_piece,
    "piece not listed": _drop_piece,
    "number in a table": _table,
    "another number in a table": _table,
    "another table": _mix_table,
    "placement": _placement,
    "number in the manifest": _number(seals=False),
    "number in the manifest, with its sha256": _number(seals=True),
}
