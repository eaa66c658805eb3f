"""Remote paths: addresses in object stores, and the few operations that checkpoints need of one."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import posixpath
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from shardeddp.errors import ConfigurationError

# -- What a store does, and what it does not
#
# [Note: object stores] A store maps names to objects. An object appears whole under its name, when
# its upload ends, and takes the place of the one before in one step. There is no rename, no lock,
# and a directory is no more than the beginning of names. fsspec has a client for each kind of store
# and lets all of them look alike: nothing here knows more of one than its protocol.
#
# Requests fail now and then: a store that is busy says so. What can be repeated without harm is
# repeated a few times; every error that is left is an ``OSError``, as those of files are.

READ_ONLY = ("http", "https")
"""Protocols from which checkpoints are read only."""

_DELAYS_S = (0.2, 1.0, 3.0, 8.0)
"""Waits between tries; each is shortened by chance, so that ranks do not come back at once."""

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
"""Errors that come again."""

WINDOW_NBYTES = 32 * 2**20
"""Read in one request."""

_WINDOWS_AHEAD = 1
_KEPT_NBYTES = 7 * WINDOW_NBYTES // 2
"""Of what was read last: three windows of a large object, and small objects besides."""

PART_NBYTES = 50 * 2**20
"""Uploaded in one request, about half of the memory of an upload; more for objects of which stores
would need too many."""

_MOST_PARTS = 9_000  # S3 takes 10,000
_SENT_NBYTES = 16 * 2**20  # handed to the client in one go
_SENT_AHEAD = 2  # of these that wait for the client, which takes long at the end of each part

ResultT = TypeVar("ResultT")


class RemotePath:
    """An address in a store, such as ``s3://bucket/run/last.ckpt``; joined like a ``Path``.

    It is no ``os.PathLike``: the system would take it for a file of its own. Whatever asks the
    store raises an ``OSError`` where that does not answer or refuses, and a ``FileNotFoundError``
    where there is no object of this name.

    Args:
        url: Protocol and name.
        windows: Bytes that were read already, for those who read on; None: nothing is kept.
    """

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
        """The last part of the name."""
        return posixpath.basename(self._rest)

    @property
    def suffix(self) -> str:
        """Ending of the name, with its dot."""
        return posixpath.splitext(self._rest)[1]

    @property
    def parent(self) -> RemotePath:
        """What it lies in."""
        return RemotePath(f"{self.protocol}://{posixpath.dirname(self._rest)}", self._windows)

    def reading_ahead(self) -> RemotePath:
        """The same path; what is read of objects under it is kept for a while, and read ahead."""
        return RemotePath(str(self), Windows())

    def is_relative_to(self, other: RemotePath) -> bool:
        """Whether it lies in another, or is that."""
        return f"{self}/".startswith(f"{other}/")

    # -- Objects

    def nbytes(self) -> int:
        """Size of the object."""
        # A client that has listed the names before may answer from that list.
        try:
            info = self._try(lambda fs, path: _fresh(fs).info(path))
        except NotADirectoryError:  # another object has the beginning of the name
            info = {}
        if info.get("type") == "directory" or info.get("size") is None:
            raise FileNotFoundError(errno.ENOENT, "no object has this name", str(self))
        return int(info["size"])

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        try:
            self.nbytes()
        except FileNotFoundError:
            return False
        return True

    def open(self) -> StoreFile:
        """The object, for reading at any place; nothing has to be closed."""
        return StoreFile(self, self._windows)

    def get(self, start: int, stop: int) -> bytes:
        """Some bytes of the object, all of which it has."""
        if start >= stop:
            return b""
        data = self._try(lambda fs, path: fs.cat_file(path, start=start, end=stop))
        if len(data) > stop - start:
            raise OSError(errno.ENOTSUP, "the server gives whole files, not parts", str(self))
        return data

    def put(self, data: bytes) -> None:
        """Make the object with this content, or put it in the place of the one that is there.

        After an error the store may have it nevertheless.
        """
        self._try_writing(lambda fs, path: fs.pipe_file(path, data))

    @contextlib.contextmanager
    def upload(self, nbytes: int) -> Generator[Upload]:
        """Make an object from what is written while the block runs.

        It appears when the block ends; if that fails, nothing of it is left that has a name, where
        the store allows that.

        Args:
            nbytes: About how much is going to be written.
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
        """Make the object from a file of this machine; it appears when all of it is there."""
        self._try_writing(lambda fs, path: fs.put_file(file, path))

    def get_file(self, file: str) -> None:
        """Copy the object to a file of this machine."""
        self._try(lambda fs, path: fs.get_file(path, file))

    def delete(self) -> None:
        """Delete the object, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._try(lambda fs, path: fs.rm_file(path))

    def modified(self) -> float:
        """When the object was put there, in seconds since 1970 by the clock of the store."""
        return self._try(lambda fs, path: _fresh(fs).modified(path)).timestamp()

    # -- Names

    def list(self) -> dict[str, int | None]:
        """Names directly under this one, sorted: the size of an object, None for further names.

        http lists nothing: an ``OSError``.
        """
        try:
            entries = self._try(lambda fs, path: _fresh(fs).ls(path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found: dict[str, int | None] = {}
        _, here = self._client()
        for entry in entries:
            full = str(entry["name"]).rstrip("/")
            if full.strip("/") != here.strip("/"):  # the object that stands for a folder, or itself
                size = None if entry.get("type") == "directory" else int(entry["size"])
                found[posixpath.basename(full)] = size
        return dict(sorted(found.items()))

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        """Sizes of objects directly under this name; None for those that are not there."""
        if self.protocol not in READ_ONLY:
            found = self.list()
            return {name: found.get(name) for name in names}
        sizes: dict[str, int | None] = {}
        for name in names:  # nothing is listed there
            try:
                sizes[name] = (self / name).nbytes()
            except FileNotFoundError:
                sizes[name] = None
        return sizes

    def delete_folder(self) -> None:
        """Delete the folder of this name where stores have such, if it is empty."""
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
        """The same of what makes an object.

        The folder that it is in is made where the file system has such. Stores (asynchronous) do
        not: with them that could make a bucket.
        """

        def write(fs: Any, path: str) -> ResultT:
            if not getattr(fs, "async_impl", False):
                fs.makedirs(posixpath.dirname(path), exist_ok=True)
            return action(fs, path)

        return self._try(write)

    def _client(self) -> tuple[Any, str]:
        """The client of fsspec, which keeps one for each process, and the name as that has it."""
        fsspec: Any = importlib.import_module("fsspec.core")  # takes a while, and few need it

        try:
            return fsspec.url_to_fs(str(self))
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"{self} cannot be opened: {error}") from error


def repeated(
    action: Callable[[], ResultT], errors: tuple[type[Exception], ...] = (Exception,)
) -> ResultT:
    """The result of something that may be done again if it fails.

    Args:
        action: What is done.
        errors: Those after which it is done again, unless they or their causes come every time.
    """
    for delay in _DELAYS_S:
        try:
            return action()
        except errors as error:
            if isinstance(error, _FINAL) or isinstance(error.__cause__, _FINAL):
                raise
            time.sleep(delay * random.uniform(0.5, 1.0))
    return action()


class StoreFile:
    """An object of a store, open for reading at any place."""

    def __init__(self, path: RemotePath, windows: Windows | None) -> None:
        self._path = path
        self._windows = windows
        self.nbytes = path.nbytes() if windows is None else windows.nbytes(path)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill a buffer from a byte of the object on; how many bytes there were."""
        stop, done = min(offset + len(view), self.nbytes), 0
        while offset + done < stop:
            part = self._part(offset + done, stop)
            if not part:
                break
            view[done : done + len(part)] = part
            done += len(part)
        return done

    def _part(self, start: int, stop: int) -> memoryview:
        """Bytes from one place on, at least one of them."""
        if self._windows is None:
            return memoryview(self._path.get(start, min(stop, start + WINDOW_NBYTES)))
        number, offset = divmod(start, WINDOW_NBYTES)
        window = memoryview(self._windows.get(self._path, number))
        return window[offset : offset + stop - start]


class Windows:
    """Windows of objects that were read last, and those that are read ahead; for any threads.

    Objects that others replace meanwhile are not for it: files of a checkpoint never are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._threads: ThreadPoolExecutor | None = None

    def nbytes(self, path: RemotePath) -> int:
        """Size of an object, which is asked for once."""
        found = self._sizes.get(str(path))
        if found is None:
            found = self._sizes[str(path)] = path.nbytes()
        return found

    def get(self, path: RemotePath, number: int) -> bytes:
        """One window; those behind it are read along if the one before it was."""
        with self._lock:
            onward = (str(path), number - 1) in self._found
            wanted = self._window(path, number)
            for ahead in range(1, _WINDOWS_AHEAD + 1) if onward else ():
                self._window(path, number + ahead)
            # A window may be asked for by its pieces: the one before it stays for as long.
            while sum(map(self._nbytes_of, self._found)) > _KEPT_NBYTES:
                self._found.popitem(last=False)
        try:
            return wanted.result()
        except BaseException:
            with self._lock:
                self._found.pop((str(path), number), None)
            raise

    def _nbytes_of(self, key: tuple[str, int]) -> int:
        path, number = key  # there may be an empty one behind the last
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
    """An object on its way into a store; see :meth:`RemotePath.upload`.

    A thread sends what was collected, while more is.
    """

    def __init__(self, path: RemotePath, file: Any) -> None:
        self._path, self._file = path, file
        self._collected = io.BytesIO()
        self._thread = ThreadPoolExecutor(1, "shardeddp-upload")
        self._waiting: deque[Future[Any]] = deque()

    def write(self, data: bytes | memoryview) -> None:
        """Append some bytes."""
        self._collected.write(data)
        if self._collected.tell() >= _SENT_NBYTES:
            self._send()

    def close(self) -> None:
        """End it: the object appears."""
        self._send()
        self._wait(0)
        with self._errors():
            self._file.close()
        self._thread.shutdown()

    def discard(self) -> None:
        """Give it up. The file's own end, and that of its life, would make an object of it."""
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
        """Until no more than so many are on their way."""
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
    """The client without the names that it has listed before: others write, too."""
    fs.invalidate_cache()
    return fs


_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}


def _as_os_error(error: Exception, path: RemotePath) -> Exception:
    """An error of a client, whose classes are its own, as the system would raise it."""
    if isinstance(error, ConfigurationError) or (isinstance(error, OSError) and error.errno):
        return error
    # OSError makes the class that belongs to a number.
    number = next((it for kind, it in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
    return OSError(number, f"{type(error).__name__}: {error}", str(path))


# -- Refusal of stores in which nothing can be saved


def require_writable(folder: RemotePath, processes: int) -> None:
    """Refuse a store in which checkpoints could not be saved; writes an object and deletes it.

    Args:
        folder: Where checkpoints are going to lie.
        processes: How many write to it.
    """
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
