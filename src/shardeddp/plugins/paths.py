"""Paths of checkpoints, which may be addresses of an object store."""

import os

_LOCAL = ("file://", "file:", "local://", "local:")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address (``s3://bucket/name``), which only a library of such addresses can open."""
    return "://" in local_path(path)


def local_path(path: str | os.PathLike[str]) -> str:
    """A path as the system has it: ``file://`` before it is dropped, as fsspec does; others are as they were."""
    text = os.fspath(path)
    return next((text.removeprefix(scheme) for scheme in _LOCAL if text.startswith(scheme)), text)
