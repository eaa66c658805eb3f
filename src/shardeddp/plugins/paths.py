"""Paths of checkpoints, which may be addresses of an object store."""

import os


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address (``s3://bucket/name``), which only a library of such addresses can open."""
    return "://" in os.fspath(path)
