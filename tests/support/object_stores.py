"""Object stores for tests: one in a directory, which fails when it is told to, and servers of S3 and Google."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

# -- A store in a directory

Fault = Callable[[str, str], str]
"""From an operation and a path: "" for none, "before" and "after" for an error before or after it is done."""


class Shelf(AbstractFileSystem):
    """Object store in a directory: ``shelf:///folder/name``; objects appear whole, and there is no rename.

    All processes of the machine see the same. What is uploaded in parts lies elsewhere until it is whole.
    """

    protocol = "shelf"
    cachable = False
    fault: Fault | None = None
    operations = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return os.path.normpath(path.removeprefix("shelf://"))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        with operation("info", path):
            found = os.stat(path)
            kind = "directory" if os.path.isdir(path) else "file"
            return {"name": path, "type": kind, "size": found.st_size, "mtime": found.st_mtime}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        with operation("ls", path):
            entries = [os.path.join(path, name) for name in sorted(os.listdir(path))]
        # A store has no empty folders.
        kept = [each for each in entries if os.path.isfile(each) or os.listdir(each)]
        sizes = [
            {
                "name": each,
                "type": "file" if os.path.isfile(each) else "directory",
                "size": os.path.getsize(each),
            }
            for each in kept
        ]
        return sizes if detail else kept

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        with operation("cat", path), open(path, "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        with operation("put", path):
            part = _part(path)
            Path(part).write_bytes(value)
            os.replace(part, path)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        with operation("put", rpath):
            part = _part(rpath)
            shutil.copyfile(lpath, part)
            os.replace(part, rpath)

    def rm_file(self, path: str) -> None:
        with operation("rm", path):
            os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(os.stat(path).st_mtime, tz=timezone.utc)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **_: Any) -> Any:
        return ShelfFile(self, path, mode, block_size=2**16)


class ShelfFile(AbstractBufferedFile):
    """Upload in parts."""

    def _initiate_upload(self) -> None:
        self.place = _part(self.path)

    def _upload_chunk(self, final: bool = False) -> bool:
        with operation("part", self.path):
            with open(self.place, "ab") as file:
                file.write(self.buffer.getvalue())
            if final:
                os.replace(self.place, self.path)
        return True

    def discard(self) -> None:
        Path(vars(self).get("place", "nothing")).unlink(missing_ok=True)


def _part(path: str) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    root = Path("/", *Path(path).parts[1:3]) / f".parts-{os.getuid()}"
    root.mkdir(exist_ok=True)
    return str(root / uuid.uuid4().hex)


@contextmanager
def operation(name: str, path: str) -> Iterator[None]:
    """One operation of the store, which fails before or after it is done if it is told to."""
    Shelf.operations += 1
    when = Shelf.fault(name, path) if Shelf.fault is not None else ""
    if when == "before":
        raise _error()
    yield
    if when == "after":
        raise _error()


def _error() -> Exception:
    return random.choice(
        [
            OSError(errno.EIO, "connection reset"),
            TimeoutError("no answer"),
            ConnectionError("closed"),
            RuntimeError("SlowDown: reduce your request rate"),
        ]
    )


def use_shelf() -> None:
    """Let fsspec know the store; in every process that uses it."""
    fsspec.register_implementation("shelf", Shelf, clobber=True)


def die_at(number: int) -> Fault:
    """A process that is killed at one of its operations."""

    def fault(name: str, path: str) -> str:
        if Shelf.operations >= number:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    return fault


# -- Servers

# Read as gcsfs is imported: else it asks by gRPC, which the server has not, what kind of bucket it is.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


@contextmanager
def s3_server() -> Iterator[str]:
    """A server of S3 in a process of its own, with an empty ``bucket``; gives its address.

    Skips the test where its packages are missing.
    """
    for package in ("moto", "flask", "flask_cors", "s3fs"):
        pytest.importorskip(package, reason="the extra `stores` brings a server of S3")
    code = "import moto.server; moto.server.main(['-H', '127.0.0.1', '-p', '{port}'])"
    with _server(code, "moto-api/data.json") as address:
        use_s3(address)
        fsspec.filesystem("s3").mkdir("bucket")
        yield address


@contextmanager
def gs_server() -> Iterator[str]:
    """The same of Google's storage."""
    for package in ("gcp_storage_emulator", "gcsfs"):
        pytest.importorskip(
            package, reason="the extra `stores` brings a server of Google's storage"
        )
    code = (
        "import time; from gcp_storage_emulator.server import create_server as make; "
        "make('127.0.0.1', {port}, True, default_bucket='bucket').start(); time.sleep(3600)"
    )
    with _server(code, "storage/v1/b") as address:
        use_gs(address)
        yield address


@contextmanager
def _server(code: str, path: str) -> Iterator[str]:
    """Code runs as a server, which answers a request for a path once it is ready."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    server = subprocess.Popen(
        [sys.executable, "-c", code.format(port=port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/{path}").close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        server.kill()
        server.wait()


def use_s3(address: str) -> None:
    """Let clients of S3 in this process use a server."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests"}
    # Everybody may read, so that the server's addresses will do for http.
    public = {"ACL": "public-read"}
    fsspec.config.conf["s3"] = {"endpoint_url": address, "s3_additional_kwargs": public}


def use_gs(address: str) -> None:
    """Let clients of Google's storage in this process use a server, which asks for no credentials."""
    fsspec.config.conf["gs"] = {"endpoint_url": address, "token": "anon"}
