"""Release: which shardeddp this process runs, by its version and by what its files hold."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

_PACKAGE = Path(__file__).resolve().parents[1]


def describe_release(package: Path = _PACKAGE) -> str:
    """Version and installed code; equal where ranks run the same, wherever it is installed.

    Args:
        package: The folder of the package.
    """
    try:
        number = version("shardeddp")
    except PackageNotFoundError:
        number = "that is not installed"
    return f"shardeddp {number} (installed code {_digest(package)})"


def _digest(package: Path) -> str:
    digest = xxhash.xxh3_64()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
