"""Remote paths: addresses in object stores, and the few operations that checkpoints need of one."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import posixpath
import random
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, TypeVar

from shardeddp.errors import CheckpointError, ConfigurationError

# -- Capabilities of a store
#
# [Note: object stores] A store maps names to objects. An object appears whole under its name, when
# its upload ends, and replaces the former one in one step. There is no rename and no lock, and a
# directory is just a prefix of names. fsspec has a client for each kind of store with one
# interface: this file knows no more of a store than its protocol.
#
# Requests fail now and then, for example when a store is busy. Requests that can be repeated
# without harm are repeated a few times; a remaining error is an ``OSError``.

READ_ONLY = ("http", "https")
"""Protocols that checkpoints are only read from."""

DELAYS_S = (0.2, 1.0, 3.0, 8.0)
"""Delays between tries in seconds; each is shortened at random, to spread the ranks' requests."""

_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    TypeError,
    ValueError,
)
"""Errors that a repetition would not change."""

WINDOW_NBYTES = 32 * 2**20
"""Bytes read in one request."""

_WINDOWS_AHEAD = 1
_KEPT_NBYTES = 7 * WINDOW_NBYTES // 2
"""Bytes of recent windows to keep: three of a large object, and small objects besides."""

PART_NBYTES = 50 * 2**20
"""Bytes uploaded in one request, about half of the memory of an upload; more for objects that would
need more parts than stores allow."""

_MOST_PARTS = 9_000  # S3 takes 10,000
_SENT_NBYTES = 16 * 2**20  # handed to the client at once
_SENT_AHEAD = 2  # writes waiting for the client, which takes long at the end of each part

ResultT = TypeVar("ResultT")


class RemotePath:
    """Address in a store, such as ``s3://bucket/run/last.ckpt``.

    It is no ``os.PathLike``: the system would take it for a local file. Methods that send requests
    raise an ``OSError`` if the store does not answer or refuses, and a ``FileNotFoundError`` if it
    has no object of this name.
    """

    transient: ClassVar[tuple[type[Exception], ...]] = (CheckpointError,)
    num_readers: ClassVar[int] = 2  # each needs windows of memory, and reads ahead by itself

    def __init__(self, url: str, windows: Windows | None = None) -> None:
        self.protocol, _, rest = url.partition("://")
        self._rest = posixpath.normpath(rest) if rest else ""
        self._windows = windows

    def __str__(self) -> str:
        return f"{self.protocol}://{self._rest}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> RemotePath:
        joined = f"{self._rest}/{name}" if name else self._rest
        return RemotePath(f"{self.protocol}://{joined}", self._windows)

    @property
    def name(self) -> str:
        """Last component of the name."""
        return posixpath.basename(self._rest)

    @property
    def suffix(self) -> str:
        """Suffix of the name, with its dot."""
        return posixpath.splitext(self._rest)[1]

    @property
    def parent(self) -> RemotePath:
        """Address without the last component of its name."""
        return RemotePath(f"{self.protocol}://{posixpath.dirname(self._rest)}", self._windows)

    def reading_ahead(self) -> RemotePath:
        """Return the same path with a cache, which keeps windows for a while and reads ahead."""
        return RemotePath(str(self), Windows())

    def real(self) -> RemotePath:
        """Return the address as it is: a store has no links."""
        return self

    def local_only(self, reason: str) -> NoReturn:
        """Refuse the address for this reason."""
        raise CheckpointError(f"{self}: {reason}")

    def advice(self, error: OSError, nbytes: int | None) -> str:
        """Return advice on credentials."""
        refused = isinstance(error, PermissionError)
        return ". Credentials come from the environment, as the store's client says" * refused

    def is_relative_to(self, other: str, /) -> bool:
        """True if this address equals the other or is below it."""
        return f"{self}/".startswith(f"{other}/")

    # -- Objects

    def nbytes(self) -> int:
        """Return the size of the object."""
        # A client that has listed the names before may answer from that list.
        try:
            info = self._try(lambda fs, path: _fresh(fs).info(path))
        except NotADirectoryError:  # a prefix of the name is an object
            info = {}
        if info.get("type") == "directory" or info.get("size") is None:
            raise FileNotFoundError(errno.ENOENT, "no object has this name", str(self))
        return int(info["size"])

    def is_file(self) -> bool:
        """Return True if there is an object of this name."""
        try:
            self.nbytes()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return True if there are names below this one; False over http, which cannot list."""
        return self.protocol not in READ_ONLY and bool(self.list())

    def is_taken(self) -> bool:
        """Return True if there is an object of this name, or names below it."""
        return self.is_file() or self.is_dir()

    def is_committed(self, marker: str) -> bool:
        """Return True if there is the object that a commit puts last, or a plain one."""
        return (self / marker).is_file() or self.is_file()

    def is_archive(self) -> bool:
        """Return True for an object that begins like a zip archive."""
        return self.is_file() and self.nbytes() > 4 and self.get(0, 4) == b"PK\3\4"

    def kind(self) -> str:
        """Return the kind of the entry in words."""
        if self.is_file():
            return "an ordinary file"
        return "a directory" if self.is_dir() else "nothing"

    def holds(self, name: str) -> bool:
        """Return False: other tools' checkpoints are read from file systems."""
        return False

    def files(self) -> AbstractContextManager[RemotePath]:
        """Return this folder, for reading of its objects."""
        return contextlib.nullcontext(self)

    def open_source(self, name: str = "", /) -> AbstractContextManager[tuple[StoreFile, int]]:
        """Open the object, or the one of this name in the folder; yield it with its size."""
        file = StoreFile(self / name, self._windows)
        return contextlib.nullcontext((file, file.nbytes))

    def check_sizes(self, folder: str, sizes: Mapping[str, int]) -> None:
        """Refuse objects in a folder of this one that are missing, or have other sizes."""
        found = (self / folder)._sizes(sizes)
        for name, nbytes in sizes.items():
            if (size := found.get(name)) is None:
                raise CheckpointError(f"{name} is missing, expected an object of {nbytes:,} bytes")
            if size != nbytes:
                raise CheckpointError(f"{name} has {size:,} bytes, expected {nbytes:,}")

    def _sizes(self, names: Iterable[str]) -> Mapping[str, int | None]:
        if self.protocol not in READ_ONLY:
            return self.list()
        sizes: dict[str, int] = {}
        for name in names:  # these protocols cannot list
            with contextlib.suppress(FileNotFoundError):
                sizes[name] = (self / name).nbytes()
        return sizes

    def get(self, start: int, stop: int) -> bytes:
        """Read bytes ``start`` to ``stop`` of the object, which has to be that long."""
        if start >= stop:
            return b""
        data = self._try(lambda fs, path: fs.cat_file(path, start=start, end=stop))
        if len(data) > stop - start:
            raise OSError(errno.ENOTSUP, "the server gives whole files, not parts", str(self))
        return data

    def put(self, data: bytes) -> None:
        """Make the object with this content, or replace it.

        After an error the store may have it nevertheless.
        """
        self._try_writing(lambda fs, path: fs.pipe_file(path, data))

    @contextlib.contextmanager
    def create(self, nbytes: int, permissions: str, durability: str) -> Generator[Upload]:
        """Make an object from the bytes, about ``nbytes``, that are written within the block.

        It appears when the block ends, durable by itself and with the store's permissions. If the
        block fails, no named object remains, if the store allows that.
        """
        size = max(PART_NBYTES, -(-nbytes // _MOST_PARTS))
        file = self._try_writing(lambda fs, path: fs.open(path, "wb", block_size=size))
        upload = Upload(self, file)
        try:
            yield upload
            upload.close()
        except BaseException:
            upload.discard()
            raise

    def put_file(self, file: str) -> None:
        """Make the object from a local file; it appears when it is complete."""
        self._try_writing(lambda fs, path: fs.put_file(file, path))

    @contextlib.contextmanager
    def local_copy(self, require_room: Callable[[str, int], None]) -> Generator[str]:
        """Yield the path of a copy of the object, in a directory that the block's end deletes."""
        with tempfile.TemporaryDirectory(prefix="shardeddp-") as folder:
            copy = posixpath.join(folder, self.name)
            require_room(folder, self.nbytes())
            self._try(lambda fs, path: fs.get_file(path, copy))
            yield copy

    def delete(self) -> None:
        """Delete the object, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._try(lambda fs, path: fs.rm_file(path))

    def modified(self) -> float:
        """Return the time of the last upload, in seconds since 1970 by the clock of the store."""
        return self._try(lambda fs, path: _fresh(fs).modified(path)).timestamp()

    # -- Names

    def list(self) -> dict[str, int | None]:
        """Return names directly below this one, sorted: sizes of objects, None for prefixes.

        http cannot list: an ``OSError``.
        """
        try:
            entries = self._try(lambda fs, path: _fresh(fs).ls(path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found: dict[str, int | None] = {}
        _, here = self._client()
        for entry in entries:
            full = str(entry["name"]).rstrip("/")
            if full.strip("/") != here.strip("/"):  # the marker object of a folder, or itself
                size = None if entry.get("type") == "directory" else int(entry["size"])
                found[posixpath.basename(full)] = size
        return dict(sorted(found.items()))

    def names(self) -> Sequence[str]:
        """Return the names directly below this one, sorted."""
        return [*self.list()]

    def kinds(self) -> dict[str, str]:
        """Return the kind of all entries by name; none over http, which cannot list."""
        found = () if self.protocol in READ_ONLY else self.list()
        return dict.fromkeys(found, "an ordinary file")

    def delete_folder(self) -> None:
        """Delete the folder of this name if it is empty and the file system has folders."""
        fs, path = self._client()
        if not getattr(fs, "async_impl", False):
            with contextlib.suppress(Exception):
                fs.rmdir(path)

    def _try(self, action: Callable[[Any, str], ResultT]) -> ResultT:
        def once() -> ResultT:
            return action(*self._client())

        try:
            return repeated(once)
        except Exception as error:
            raise _as_os_error(error, self) from error

    def _try_writing(self, action: Callable[[Any, str], ResultT]) -> ResultT:
        """Run an action that makes an object, with its folder made first if the system has folders.

        Stores (asynchronous clients) have none: with them this could make a bucket.
        """

        def write(fs: Any, path: str) -> ResultT:
            if not getattr(fs, "async_impl", False):
                fs.makedirs(posixpath.dirname(path), exist_ok=True)
            return action(fs, path)

        return self._try(write)

    def _client(self) -> tuple[Any, str]:
        """Return fsspec's client, which it keeps for each process, and the client's name for it."""
        fsspec: Any = importlib.import_module("fsspec.core")  # slow to import, and rarely needed

        try:
            return fsspec.url_to_fs(str(self))
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"{self} cannot be opened: {error}") from error


def repeated(
    action: Callable[[], ResultT], errors: tuple[type[Exception], ...] = (Exception,)
) -> ResultT:
    """Return the result of an action, which is repeated after transient errors.

    A second run must do no harm. Permanent errors, or errors with such a cause, end it.
    """
    for delay in DELAYS_S:
        try:
            return action()
        except errors as error:
            if isinstance(error, _FINAL) or isinstance(error.__cause__, _FINAL):
                raise
            time.sleep(delay * random.uniform(0.5, 1.0))
    return action()


class StoreFile:
    """Object of a store, open for reading at any offset."""

    def __init__(self, path: RemotePath, windows: Windows | None) -> None:
        self._path = path
        self._windows = windows
        self.nbytes = path.nbytes() if windows is None else windows.nbytes(path)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill a buffer with bytes from ``offset`` of the object; return the number read."""
        stop, done = min(offset + len(view), self.nbytes), 0
        while offset + done < stop:
            part = self._part(offset + done, stop)
            if not part:
                break
            view[done : done + len(part)] = part
            done += len(part)
        return done

    def _part(self, start: int, stop: int) -> memoryview:
        """Return at least one byte from ``start``, and at most those up to ``stop``."""
        if self._windows is None:
            return memoryview(self._path.get(start, min(stop, start + WINDOW_NBYTES)))
        number, offset = divmod(start, WINDOW_NBYTES)
        window = memoryview(self._windows.get(self._path, number))
        return window[offset : offset + stop - start]


class Windows:
    """Cache of recent windows of objects, with read-ahead; thread-safe.

    It is for objects that are not replaced meanwhile, like the files of a checkpoint.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._threads: ThreadPoolExecutor | None = None

    def nbytes(self, path: RemotePath) -> int:
        """Return the size of an object; the store is asked once."""
        found = self._sizes.get(str(path))
        if found is None:
            found = self._sizes[str(path)] = path.nbytes()
        return found

    def get(self, path: RemotePath, number: int) -> bytes:
        """Return one window; the next ones are read ahead if the previous one was read before."""
        with self._lock:
            onward = (str(path), number - 1) in self._found
            wanted = self._window(path, number)
            for ahead in range(1, _WINDOWS_AHEAD + 1) if onward else ():
                self._window(path, number + ahead)
            # A window may be read in several calls, so the previous one stays as long.
            while sum(map(self._nbytes_of, self._found)) > _KEPT_NBYTES:
                self._found.popitem(last=False)
        try:
            return wanted.result()
        except BaseException:
            with self._lock:
                self._found.pop((str(path), number), None)
            raise

    def _nbytes_of(self, key: tuple[str, int]) -> int:
        path, number = key  # there may be an empty one after the last
        return max(0, min(WINDOW_NBYTES, self._sizes[path] - number * WINDOW_NBYTES))

    def _window(self, path: RemotePath, number: int) -> Future[bytes]:
        key, start = (str(path), number), number * WINDOW_NBYTES
        nbytes = self.nbytes(path)
        if key in self._found or start >= nbytes:
            self._found.setdefault(key, _nothing())
            self._found.move_to_end(key)
            return self._found[key]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_WINDOWS_AHEAD + 1, "shardeddp-read-ahead")
        stop = min(nbytes, start + WINDOW_NBYTES)
        self._found[key] = found = self._threads.submit(path.get, start, stop)
        return found


class Upload:
    """Object being uploaded to a store; see :meth:`RemotePath.create`.

    A thread sends the collected bytes while more are collected.
    """

    def __init__(self, path: RemotePath, file: Any) -> None:
        self._path, self._file = path, file
        self._collected = io.BytesIO()
        self._thread = ThreadPoolExecutor(1, "shardeddp-upload")
        self._waiting: deque[Future[Any]] = deque()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._collected.write(data)
        if self._collected.tell() >= _SENT_NBYTES:
            self._send()

    def close(self) -> None:
        """Finish the upload: the object appears."""
        self._send()
        self._wait(0)
        with self._errors():
            self._file.close()
        self._thread.shutdown()

    def discard(self) -> None:
        """Abort the upload. Closing or collecting the client's file would make an object of it."""
        self._thread.shutdown(cancel_futures=True)
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True

    def _send(self) -> None:
        self._wait(_SENT_AHEAD)
        full, self._collected = self._collected, io.BytesIO()
        self._waiting.append(self._thread.submit(self._file.write, full.getbuffer()))

    def _wait(self, count: int) -> None:
        """Wait until at most ``count`` writes are pending."""
        while len(self._waiting) > count:
            with self._errors():
                self._waiting.popleft().result()

    @contextlib.contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            raise _as_os_error(error, self._path) from error


def _nothing() -> Future[bytes]:
    found = Future[bytes]()
    found.set_result(b"")
    return found


def _fresh(fs: Any) -> Any:
    """Return the client without its cached listings, as other processes write, too."""
    fs.invalidate_cache()
    return fs


_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}


def _as_os_error(error: Exception, path: RemotePath) -> Exception:
    """Return a client's own error as the ``OSError`` that the system would raise."""
    if isinstance(error, ConfigurationError) or (isinstance(error, OSError) and error.errno):
        return error
    # OSError makes the subclass of an error number.
    number = next((it for kind, it in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
    return OSError(number, f"{type(error).__name__}: {error}", str(path))


# -- Refusal of stores that cannot be saved to


def require_writable(folder: RemotePath, processes: int) -> None:
    """Refuse a store that so many processes cannot save to; a probe object is put and deleted."""
    advice = "Save to s3://, gs:// or another object store, or to a local path"
    if folder.protocol in READ_ONLY:
        raise ConfigurationError(
            f"checkpoints cannot be saved to {folder}: {folder.protocol} is for reading. {advice}"
        )
    if "::" in str(folder):
        raise ConfigurationError(
            f"checkpoints cannot be saved to {folder}, a chain of file systems. {advice}"
        )
    if folder.protocol == "memory" and processes > 1:
        raise ConfigurationError(
            f"checkpoints of {processes} processes cannot be saved to {folder}: each process has a "
            f"memory of its own. {advice}"
        )
    probe = folder / f".shardeddp-probe-{random.getrandbits(64):016x}"
    try:
        probe.put(b"x")
        probe.delete()
    except (OSError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"checkpoints cannot be saved to {folder}: {type(error).__name__}: {error}. Credentials "
            f"and endpoints come from the environment, as fsspec's client for {folder.protocol} "
            f"says, and the bucket has to exist"
        ) from error
