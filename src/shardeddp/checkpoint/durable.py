"""Crash-safe file operations: exclusive creation, flushing, swapping of names, locks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import os
import re
import socket
import stat
import sys
import uuid
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal, TypeAlias

from shardeddp.checkpoint.remote import StoreFile, Upload
from shardeddp.errors import CheckpointError, DamagedCheckpointError
from shardeddp.plan.layout import Interval

StrPath: TypeAlias = "str | os.PathLike[str]"

Durability: TypeAlias = Literal["disk", "process"]
"""Failures that a finished write survives: ``disk`` a loss of power, ``process`` a process's end.

``disk`` flushes everything.
"""

Permissions: TypeAlias = Literal["private", "umask"]
"""Permissions of new files and directories.

``private``: for the owner alone (0600, 0700). ``umask``: by the process's umask.
"""

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_SWAP = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_NO_LOCK = frozenset(
    {errno.ENOLCK, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}
)
_READ_NBYTES = 2**20  # read at once


def free_nbytes(path: StrPath) -> int | None:
    """Return the bytes that this user can still write to a file system.

    None if it does not report them, like some network file systems.
    """
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def make_directories(path: StrPath, permissions: Permissions, durability: Durability) -> None:
    """Make a directory and missing parents; each entry is flushed into its parent."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        make_directories(above, permissions, durability)
        with contextlib.suppress(FileExistsError):  # another process saves there as well
            make_directory(path, permissions)
        with opened_directory(above) as descriptor:
            sync_directory(descriptor, durability)
    # A file of that name makes the first use of the directory fail.


def make_directory(path: StrPath, permissions: Permissions) -> None:
    """Make one directory, which must not exist."""
    os.mkdir(path, 0o700 if permissions == "private" else 0o777)


def create_exclusively(path: StrPath, permissions: Permissions) -> int:
    """Make a file, which must not exist, open for writing; child processes do not inherit it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600 if permissions == "private" else 0o666)


Source: TypeAlias = "int | StoreFile"
"""File open for reading at any offset: a descriptor (its position is kept), or an object."""


def read_text(source: Source, interval: Interval, name: str) -> bytearray:
    """Read text of a file, which has no zero bytes; see :func:`read_dense`."""
    return read_dense(source, interval, name, 1)


def read_dense(source: Source, interval: Interval, name: str, zeros: int) -> bytearray:
    """Read bytes of a file; memory is allocated as content arrives.

    A file may have any size and no content: holes, which read as zero bytes. ``zeros`` such bytes
    in a row count as a hole, which is refused as damage, like an early end.
    """
    data = bytearray()
    while len(data) < interval.numel:
        start = interval.start + len(data)
        part = bytearray(min(_READ_NBYTES, interval.stop - start))
        del part[read_into(source, memoryview(part), start) :]
        if not part or bytes(zeros) in part:
            kind, hole = ("text", "a zero byte") if zeros == 1 else ("content", "a hole")
            raise DamagedCheckpointError(
                f"{name} is damaged: expected {interval.numel:,} bytes of {kind}, found "
                f"{hole if part else 'the end of the file'} within the {_READ_NBYTES:,} from byte "
                f"{start:,}"
            )
        data += part
    return data


def read_into(source: Source, view: memoryview, offset: int) -> int:
    """Fill a buffer with a file's bytes from ``offset``; return the number of bytes read."""
    if isinstance(source, StoreFile):
        return source.read_into(view, offset)
    done = 0
    while done < len(view) and (count := os.preadv(source, [view[done:]], offset + done)):
        done += count
    return done


@contextlib.contextmanager
def open_regular(path: StrPath, directory: int | None = None) -> Generator[tuple[int, int]]:
    """Open a regular file for reading; yield its descriptor and size.

    Links, pipes, devices and directories are refused. The path is relative to the descriptor
    ``directory``, if one is given.
    """
    # O_NONBLOCK: to open a pipe without a writer would block.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{os.fspath(path)} is a symbolic link, expected an ordinary file. Copy the file "
                f"itself to its place."
            ) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(
                f"{os.fspath(path)} is {kind_of(found.st_mode)}, expected an ordinary file."
            )
        yield descriptor, found.st_size
    finally:
        os.close(descriptor)


def write_buffers(file: int | Upload, buffers: Sequence[bytes | memoryview]) -> int:
    """Append buffers to a file, in one call if the system allows it; return the number of bytes."""
    left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer) > 0]
    nbytes = sum(map(len, left))
    if isinstance(file, Upload):
        for view in left:
            file.write(view)
        return nbytes
    while left:
        count = os.writev(file, left)
        if count == 0:
            raise OSError(errno.EIO, "nothing was written")
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return nbytes


def sync_file(descriptor: int, durability: Durability) -> None:
    """Flush a file to the storage, unless it has to survive only the process."""
    if durability == "process":
        return
    if sys.platform == "darwin":  # fsync there leaves the data in the drive's own cache
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_directory(descriptor: int, durability: Durability) -> bool:
    """Flush the names of a directory to the storage; False if the file system cannot."""
    try:
        sync_file(descriptor, durability)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
        return False
    return True


@contextlib.contextmanager
def opened_directory(path: StrPath) -> Generator[int, None, None]:
    """Open a directory within the block; yield its descriptor."""
    descriptor = os.open(path, OPEN_DIRECTORY)
    try:
        yield descriptor
    finally:
        close_directory(descriptor)


def close_directory(descriptor: int) -> None:
    """Close a descriptor that was opened to name, flush or lock a directory.

    Nothing was written through it, so errors are ignored.
    """
    with contextlib.suppress(OSError):
        os.close(descriptor)


def lock(descriptor: int) -> bool | None:
    """Lock a file or directory for this process without waiting.

    The lock is freed when the descriptor is closed, also by a kill. It holds between the processes
    of one host, and of several if the file system supports that.

    Returns:
        True if this process has it now, False if another one has it, None if the file system has no
        locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCK:
            raise
        return None
    return True


@functools.cache
def kernel() -> tuple[str, str]:
    """Return this host's name, and an id of the kernel that grants its locks until the next boot.

    Containers of one host have different names and one kernel; hosts may share a name.
    """
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:63] or "unnamed"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = f"{host} {uuid.getnode()}".encode()
    return host, hashlib.sha256(boot).hexdigest()[:8]


@contextlib.contextmanager
def held(path: Path) -> Generator[bool, None, None]:
    """Hold a path's lock in the block, if it is a directory or a regular file.

    Yield True if no other process holds it.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = 0
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        yield True
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield lock(descriptor) is True
    finally:
        close_directory(descriptor)


def _find_renameat2() -> Callable[..., int] | None:
    """Return the C library's ``renameat2`` (Linux only); None without it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    ]
    function.restype = ctypes.c_int
    return function


_RENAMEAT2 = _find_renameat2()


def swap(
    first: StrPath, second: StrPath, renameat2: Callable[..., int] | None = _RENAMEAT2
) -> bool:
    """Swap two names of one file system in one step; both exist, and may be of different kinds.

    Return False if the system or file system cannot do that; nothing has changed then. Tests alone
    pass ``renameat2``.
    """
    if renameat2 is None:
        return False
    names = _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second)
    if renameat2(*names, _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_SWAP:
        return False
    raise OSError(number, os.strerror(number), os.fspath(first), None, os.fspath(second))


def resolve(target: StrPath) -> tuple[Path, str]:
    """Return the directory of a target, with links resolved, and the target's name.

    The name is "" if the target has none of its own. The target itself is not followed.
    """
    folder, name = os.path.split(os.fspath(target).rstrip("/"))
    return Path(os.path.realpath(folder or ("." if name else "/"))), "" if name in (
        ".",
        "..",
    ) else name


def try_writing(path: Path) -> None:
    """Raise the error with which a file cannot be written; missing directories can be made.

    No file is made or changed.
    """
    if path.exists():
        path.open("ab").close()
    else:
        with TemporaryFile(dir=next(it for it in path.absolute().parents if it.exists())):
            pass


def exists(path: StrPath) -> bool:
    """Return True if a name is taken, also by a dangling link; raises if the system cannot tell."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def kind_of(mode: int) -> str:
    """Return a file's kind in words, from its ``st_mode``."""
    kinds: dict[str, Callable[[int], bool]] = {
        "a symbolic link": stat.S_ISLNK,
        "a directory": stat.S_ISDIR,
        "an ordinary file": stat.S_ISREG,
        "a pipe": stat.S_ISFIFO,
        "a socket": stat.S_ISSOCK,
    }
    return next((kind for kind, holds in kinds.items() if holds(mode)), "a device")
