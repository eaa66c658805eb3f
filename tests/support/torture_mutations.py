"""Random damage to the files of a checkpoint, each of it described; the same seed does the same."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardeddp.checkpoint.items import checksum
from shardeddp.checkpoint.manifest import MANIFEST, STATE

Files = dict[str, bytes]
"""Content by name."""

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


def seal(document: Mapping[str, Any]) -> bytes:
    """A manifest of this content, with the sha256 that belongs to it."""
    return seal_bytes(json.dumps(document, separators=(",", ":")).encode())


def seal_bytes(body: bytes) -> bytes:
    return b'{"sha256":"%s",\n"manifest":%s}' % (hashlib.sha256(body).hexdigest().encode(), body)


def unsealed(manifest: bytes) -> Any:
    """The content of a manifest."""
    return json.loads(manifest)["manifest"]


def edit_manifest(files: Files, change: Callable[[Any], object]) -> None:
    """Change the manifest so that its sha256 fits again."""
    document = unsealed(files[MANIFEST])
    change(document)
    files[MANIFEST] = seal(document)


def edit_state(files: Files, change: Callable[[Any], object]) -> None:
    """Change what is not a tensor so that all sizes and checksums fit again."""
    tree = json.loads(files[STATE])
    change(tree)
    put_file(files, STATE, json.dumps(tree).encode())


def put_file(files: Files, name: str, content: bytes) -> None:
    """Give a file another content so that its size and checksum fit again."""
    files[name] = content
    edit_manifest(
        files, lambda manifest: manifest["files"].update({name: [len(content), checksum(content)]})
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


def _repeat_piece(files: Files, draw: random.Random) -> str:
    def change(manifest: Any) -> None:
        pieces = draw.choice(manifest["tensors"])[3]
        pieces.insert(draw.randrange(len(pieces) + 1), draw.choice(pieces))

    edit_manifest(files, change)
    return "a piece is listed twice"


def _drop_piece(files: Files, draw: random.Random) -> str:
    def change(manifest: Any) -> None:
        pieces = draw.choice([tensor for tensor in manifest["tensors"] if tensor[3]])[3]
        pieces.pop(draw.randrange(len(pieces)))

    edit_manifest(files, change)
    return "a piece is not listed"


def _number(seals: bool) -> Callable[[Files, random.Random], str]:
    def change(files: Files, draw: random.Random) -> str:
        body = files[MANIFEST].partition(b'"manifest":')[2][:-1]
        found = draw.choice(list(_NUMBER.finditer(body)))
        value = int(found.group())
        other = draw.choice(
            [value + 1, max(0, value - 1), 2 * value + 1, 0, 64, 2**31, 2**52, 2**64, value ^ 64]
        )
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
    "number in the manifest": _number(seals=False),
    "number in the manifest, with its sha256": _number(seals=True),
}
