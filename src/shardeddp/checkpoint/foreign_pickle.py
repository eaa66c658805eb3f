"""Foreign pickles: a reader of `torch.save` archives that runs no code."""

from __future__ import annotations

import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from shardeddp.errors import CheckpointError

# -- Reads data out of a pickle without running it: known globals become plain values, everything
#    else is refused
#
# A pickle is a program, and Python's reader executes it. This reader is a machine for the subset
# that data needs: it imports nothing, calls nothing that the file names, and sets no attribute of
# any class. A global is looked up in a table of the caller; what the table holds is an inert value,
# or a :class:`Maker` that turns the arguments in the file into one. What it builds is at most a
# constant times as large as the file: a reference to the memo costs no copy, and lengths are
# checked against the bytes that are left before anything is allocated.

MAX_STACK = 1_000_000
"""Values under construction; a pickler writes containers in batches of 1000, tuples whole."""

MAX_DIMS = 64
MAX_DEPTH = 64
MAX_VISITS = 250_000
"""Values of a tree, counted at each visit.

Shared lists in shared lists are small here and endless to a reader.
"""

MAX_NAME = 300
_PROTOCOLS = range(2, 6)
_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Maker:
    """Stands for a class or function; ``make`` raises ValueError or TypeError for unfit arguments.

    And :class:`CodeAskedForError` for those with which it would be a program.
    """

    make: Callable[..., Any]


class CodeAskedForError(Exception):
    """A global that may run code, by its dotted name."""


class Record:
    """An object of a class called ``kind``, as the file describes it; the class is not involved."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    @property
    def fields(self) -> Mapping[Any, Any]:
        """The attributes, for the classes that are pickled as a mapping of them.

        Raises:
            CheckpointError: There is no such mapping.
        """
        if not isinstance(self.state, dict):
            raise CheckpointError(
                f"expected a {self.kind} with named attributes, found {type(self.state).__name__}"
            )
        return self.state


def make_size(numbers: Any = ()) -> tuple[int, ...]:
    """A shape or an offset: few integers, none negative, each exact in any number format."""
    if not isinstance(numbers, (tuple, list)) or len(numbers) > MAX_DIMS:
        raise ValueError(f"expected at most {MAX_DIMS} sizes")
    if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
        raise ValueError("expected sizes between 0 and 2**53")
    return tuple(numbers)


def _make_latin1(text: Any, encoding: Any) -> bytes:
    """How protocol 2 spells bytes; any other codec would be a program."""
    if isinstance(text, str) and encoding == "latin1":
        return text.encode("latin1")
    raise ValueError("expected a text in latin1")


def _make_bytearray(data: Any = b"") -> bytearray:
    """Of bytes alone: an integer would be a length to allocate."""
    if isinstance(data, bytes):
        return bytearray(data)
    raise ValueError("expected bytes")


def _make_set(items: list[Any]) -> set[Any]:
    return {_key(item) for item in items}


def _make_frozenset(items: list[Any]) -> frozenset[Any]:
    return frozenset(_make_set(items))


def _key(value: Any) -> Any:
    """A value that may be hashed.

    The hash of tuples in tuples has no depth limit in CPython, and deep ones crash it.
    """
    flat = (
        type(value) is tuple
        and len(value) <= MAX_DIMS
        and all(type(item) in _SCALARS for item in value)
    )
    if not flat and type(value) not in _SCALARS and not isinstance(value, (Record, torch.dtype)):
        raise ValueError(f"expected a key of plain values, found {type(value).__name__}")
    return value


_BUILTIN = {
    "bytes": Maker(lambda: b""),
    "bytearray": Maker(_make_bytearray),
    "set": Maker(_make_set),
    "frozenset": Maker(_make_frozenset),
    "complex": Maker(complex),
}
BUILTINS: Mapping[str, Any] = {
    **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
    "torch.Size": Maker(make_size),
    "collections.OrderedDict": Maker(lambda: OrderedDict[Any, Any]()),
    "_codecs.encode": Maker(_make_latin1),
    **{
        f"{home}.{name}": make
        for home in ("builtins", "__builtin__")
        for name, make in _BUILTIN.items()
    },
}
"""Globals of plain data, under the names of protocol 2 and of the later ones."""


def unpickle(
    data: bytes,
    where: str,
    known: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a pickle of data.

    Args:
        data: The whole pickle; what follows it is refused.
        where: What the bytes are, for errors.
        known: What a global stands for, by dotted name.
        persistent: Makes a value of a reference to data outside of the pickle; refused without.

    Raises:
        CheckpointError: A global that is not known, or no pickle of data; says where.
    """
    machine = _Machine(data, where, known, persistent)
    try:
        return machine.run()
    except (
        LookupError,
        ValueError,
        TypeError,
        ArithmeticError,
        AttributeError,
        struct.error,
    ) as error:
        raise CheckpointError(
            f"{where} is damaged, or no pickle of plain data: at byte {machine.at:,} of "
            f"{len(data):,}: {error}"
        ) from error


def check_tree(value: Any, where: str) -> None:
    """Refuse a value too deep or too large to walk; shared parts count at each visit.

    Raises:
        CheckpointError: It is.
    """
    open_values, visits = [(value, 0)], 0
    while open_values:
        item, depth = open_values.pop()
        parts: list[Any] = []
        if isinstance(item, dict):
            parts = [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            parts = list(item)
        visits += 1 + len(parts)
        if depth > MAX_DEPTH or visits > MAX_VISITS:
            raise CheckpointError(
                f"{where} holds values in values, expected at most {MAX_DEPTH} levels and "
                f"{MAX_VISITS:,} values: it is refused as too expensive to read"
            )
        open_values.extend((part, depth + 1) for part in parts if type(part) not in _SCALARS)


class _Machine:
    """The stack machine of a pickle, for data; its arguments are those of :func:`unpickle`."""

    def __init__(
        self,
        data: bytes,
        where: str,
        known: Mapping[str, Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data = data
        self.where = where
        self.known = known
        self.persistent = persistent
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Execute up to the end."""
        data, stack, codes = self.data, self.stack, _CODES
        while (code := data[self.at]) != _STOP:
            self.at += 1
            if (step := codes.get(code)) is None:
                raise ValueError(f"instruction {bytes([code])!r} is not among those of plain data")
            step(self)
            if len(stack) > MAX_STACK:
                raise ValueError(f"more than {MAX_STACK:,} values are under construction")
        if len(stack) != 1 or self.marks or self.at + 1 != len(data):
            raise ValueError("expected one value and nothing behind it")
        return stack[0]

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > len(self.data) - self.at:
            raise ValueError(f"expected {count:,} more bytes, found {len(self.data) - self.at:,}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, layout: str) -> Any:
        """The next number of a layout of `struct`."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def since_mark(self) -> list[Any]:
        """Take what stands above the last mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def push_global(self, module: Any, name: Any) -> None:
        """Look a global up."""
        dotted = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else ""
        if dotted not in self.known:
            self.refuse_global(dotted)
        self.stack.append(self.known[dotted])

    def refuse_global(self, dotted: str) -> NoReturn:
        """Say what the file asked for."""
        raise CheckpointError(
            f"{self.where} asks for the global {dotted[:MAX_NAME]!r}, which may run code: expected "
            f"plain data and tensors only. Nothing was run. If you trust whoever wrote the file, "
            f"pass trust_pickle=True, which runs it"
        )

    def make(self) -> None:
        """REDUCE and NEWOBJ: a known maker and its arguments become a value."""
        arguments, maker = self.stack.pop(), self.stack.pop()
        if not isinstance(maker, Maker) or not isinstance(arguments, tuple):
            raise ValueError(f"a {type(maker).__name__} was to be called")
        try:
            self.stack.append(maker.make(*arguments))
        except CodeAskedForError as error:
            self.refuse_global(str(error))

    def build(self) -> None:
        """Give an object its state, once."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record) and target.state is None and state is not None:
            target.state = state
        elif not isinstance(
            target, OrderedDict
        ):  # a state dict carries versions of modules, which nobody reads
            raise ValueError(f"the state of a {type(target).__name__} was to be set")

    def set_items(self, items: list[Any]) -> None:
        """Fill a mapping; a key comes once."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"items of a {type(target).__name__} were to be set")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if _key(key) in target:
                raise ValueError("a key comes twice in a mapping")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        """Fill a list or a set."""
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is set:
            target.update(map(_key, items))
        else:
            raise ValueError(f"a {type(target).__name__} was to be extended")

    def push_tuple(self, count: int) -> None:
        """The last values as a tuple."""
        if len(self.stack) < count:
            raise ValueError("too few values for a tuple")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def push_persistent(self) -> None:
        """Replace a reference by what it stands for."""
        if self.persistent is None:
            raise ValueError("it refers to data outside of itself")
        self.stack.append(self.persistent(self.stack.pop()))

    def memoize(self, index: int) -> None:
        """Keep the last value for later use; places are taken in their order."""
        if index > len(self.memo):
            raise ValueError(
                f"expected place {len(self.memo):,} of the memo to be taken, found {index:,}"
            )
        self.memo[index] = self.stack[-1]

    def mark(self) -> None:
        """Where the parts of a container start."""
        if len(self.marks) > MAX_STACK // 100:
            raise ValueError("more containers in containers than data has")
        self.marks.append(len(self.stack))

    def start_frame(self) -> None:
        """A frame is for readers of streams; its bytes are all there."""
        if self.number("<Q") > len(self.data) - self.at:
            raise ValueError("a frame ends behind the end")

    def check_protocol(self) -> None:
        """The first instruction."""
        if (found := self.number("<B")) not in _PROTOCOLS:
            raise ValueError(
                f"expected protocol {_PROTOCOLS.start} to {_PROTOCOLS.stop - 1}, found {found}"
            )

    def line(self) -> str:
        """The text up to the next line break: a part of a global's name."""
        stop = self.data.index(b"\n", self.at, self.at + MAX_NAME)
        text = self.take(stop - self.at).decode()
        self.at += 1
        return text


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make(machine))


_STOP = ord(".")
_CODES: Mapping[int, Callable[[_Machine], Any]] = {
    0x80: _Machine.check_protocol,
    0x95: _Machine.start_frame,
    ord("("): _Machine.mark,
    ord("N"): _push(lambda it: None),
    0x88: _push(lambda it: True),
    0x89: _push(lambda it: False),
    ord("J"): _push(lambda it: it.number("<i")),
    ord("K"): _push(lambda it: it.take(1)[0]),
    ord("M"): _push(lambda it: it.number("<H")),
    0x8A: _push(lambda it: int.from_bytes(it.take(it.take(1)[0]), "little", signed=True)),
    ord("G"): _push(lambda it: it.number(">d")),
    0x8C: _push(lambda it: it.take(it.take(1)[0]).decode("utf-8", "surrogatepass")),
    ord("X"): _push(lambda it: it.take(it.number("<I")).decode("utf-8", "surrogatepass")),
    ord("C"): _push(lambda it: it.take(it.take(1)[0])),
    ord("B"): _push(lambda it: it.take(it.number("<I"))),
    0x96: _push(lambda it: bytearray(it.take(it.number("<Q")))),
    ord("]"): _push(lambda it: []),
    ord("}"): _push(lambda it: {}),
    ord(")"): _push(lambda it: ()),
    0x8F: _push(lambda it: set[Any]()),
    ord("a"): lambda it: it.extend([it.stack.pop()]),
    ord("e"): lambda it: it.extend(it.since_mark()),
    0x90: lambda it: it.extend(it.since_mark()),
    ord("s"): lambda it: it.set_items([it.stack.pop(-2), it.stack.pop()]),
    ord("u"): lambda it: it.set_items(it.since_mark()),
    ord("t"): _push(lambda it: tuple(it.since_mark())),
    0x91: _push(lambda it: frozenset(map(_key, it.since_mark()))),
    0x85: _push(lambda it: (it.stack.pop(),)),
    0x86: lambda it: it.push_tuple(2),
    0x87: lambda it: it.push_tuple(3),
    ord("h"): _push(lambda it: it.memo[it.take(1)[0]]),
    ord("j"): _push(lambda it: it.memo[it.number("<I")]),
    ord("q"): lambda it: it.memoize(it.take(1)[0]),
    ord("r"): lambda it: it.memoize(it.number("<I")),
    0x94: lambda it: it.memoize(len(it.memo)),
    ord("c"): lambda it: it.push_global(it.line(), it.line()),
    0x93: lambda it: it.push_global(it.stack.pop(-2), it.stack.pop()),
    ord("R"): _Machine.make,
    0x81: _Machine.make,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.push_persistent,
}
"""What each instruction does.

Not here: INST, OBJ, EXT, NEWOBJ_EX, text numbers, POP, DUP, and buffers outside.
"""


# -- Reads what ``torch.save`` wrote: a zip archive of stored records, anywhere in a file, checked
#    by its own CRCs
#
# ``torch.load`` does not compare the CRCs that ``torch.save`` writes; this reader does. It takes
# nothing on trust: a record lies inside of the archive, is neither compressed nor encrypted, and is
# as long as its tensor says, before it is read.

READ_NBYTES = 4 * 2**20
MAX_PICKLE_NBYTES = 64 * 2**20
MAX_DIRECTORY_NBYTES = 16 * 2**20
_FOREIGN = 0xFFFFFFFF
"""What a 32-bit field of a zip holds when the value stands in a 64-bit one."""

_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 0x2041  # flag bits 0, 6 and 13

_LITTLE = (b"little", b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes of an open file, and what they are, for errors."""

    fd: int
    offset: int
    nbytes: int
    where: str

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Bytes from ``offset`` of the span on.

        Raises:
            CheckpointError: They are not all in it.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CheckpointError(
                f"{self.where} is damaged: it points to bytes {offset:,} to {offset + nbytes:,} of "
                f"its {self.nbytes:,}"
            )
        data = bytearray(nbytes)
        view, done = memoryview(data), 0
        while done < nbytes:
            part = os.pread(self.fd, min(nbytes - done, READ_NBYTES), self.offset + offset + done)
            if not part:
                raise CheckpointError(
                    f"{self.where}: the file ends {nbytes - done:,} bytes too early"
                )
            view[done : done + len(part)] = part
            done += len(part)
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A record of an archive."""

    header: int
    """Where its local header is, from the start of the archive."""

    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageType:
    """The class of a storage: what its elements are."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A tensor as its pickle describes it: a view of a record."""

    record: str
    dtype: torch.dtype
    offset: int
    """First element, in elements of ``dtype``."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    record_nbytes: int
    """Of the record, as the pickle has it."""

    @property
    def span(self) -> int:
        """Elements from the first to behind the last; 0 without elements."""
        if 0 in self.shape:
            return 0
        return 1 + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )


class Archive:
    """The records of an archive; ``has_crc`` says whether there is anything to check them with.

    Args:
        span: All bytes of it.

    Raises:
        CheckpointError: It is none that ``torch.save`` has written, or it is damaged.
    """

    def __init__(self, span: Span) -> None:
        self.span = span
        self._records = dict(_entries(span))
        # torch.serialization.set_crc32_options(False) writes zeros.
        self.has_crc = any(record.crc for record in self._records.values())
        if sum(record.nbytes for record in self._records.values()) > span.nbytes:
            raise CheckpointError(f"{span.where} is damaged: its records overlap")
        if bytes(self._read("byteorder") if "byteorder" in self._records else b"") not in _LITTLE:
            raise CheckpointError(
                f"{span.where} was written on a big-endian machine, which is not supported"
            )

    def payload(self, record: str, nbytes: int) -> Span:
        """Where the bytes of a record are; its CRC has been compared.

        Raises:
            CheckpointError: There is no such record, it has another length, or it is damaged.
        """
        where = f"record {record} of {self.span.where}"
        if (stored := self._records.get(record)) is None:
            raise CheckpointError(
                f"{self.span.where} is damaged: it has no record {record[:100]!r}"
            )
        if stored.nbytes != nbytes:
            raise CheckpointError(f"{where}: expected {nbytes:,} bytes, found {stored.nbytes:,}")
        header = _LOCAL.unpack(self.span.read(stored.header, _LOCAL.size))
        start = stored.header + _LOCAL.size + header[9] + header[10]
        if header[0] != b"PK\x03\x04" or header[3] or start + nbytes > self.span.nbytes:
            raise CheckpointError(f"{where}: its header is damaged, or does not lie in the archive")
        payload = Span(fd=self.span.fd, offset=self.span.offset + start, nbytes=nbytes, where=where)
        if self.has_crc:
            _compare_crc(payload, stored.crc)
        return payload

    def check(self) -> int:
        """Compare the CRC of every record; returns how many bytes that were."""
        return sum(
            self.payload(name, record.nbytes).nbytes for name, record in self._records.items()
        )

    def load_view(self) -> TensorView:
        """The description of the one tensor that the archive is.

        Raises:
            CheckpointError: It is something else.
        """
        known = _known(lambda view: view)
        view = unpickle(self._pickle(), self.span.where, known, _storage)
        if not isinstance(view, TensorView):
            raise CheckpointError(
                f"{self.span.where}: expected a tensor, found {type(view).__name__}"
            )
        return view

    def load(self) -> Any:
        """The value that was saved: plain containers of plain values and CPU tensors.

        Raises:
            CheckpointError: It holds anything else, or is damaged.
        """
        storages: dict[str, torch.Tensor] = {}
        known = _known(partial(self._tensor, storages))
        value = unpickle(self._pickle(), self.span.where, known, _storage)
        check_tree(value, self.span.where)
        return value

    def _tensor(self, storages: dict[str, torch.Tensor], view: TensorView) -> torch.Tensor:
        """A view of a record, which is read once."""
        nbytes = view.record_nbytes
        if view.record not in storages:
            data = self.payload(view.record, nbytes).read(0, nbytes)
            storages[view.record] = (
                torch.frombuffer(data, dtype=torch.uint8) if nbytes else torch.empty(0)
            )
        if 0 in view.shape:
            return torch.empty(view.shape, dtype=view.dtype)
        elements = nbytes // view.dtype.itemsize * view.dtype.itemsize
        return (
            storages[view.record][:elements]
            .view(view.dtype)
            .as_strided(view.shape, view.strides, view.offset)
        )

    def _pickle(self) -> bytes:
        if (
            record := self._records.get("data.pkl")
        ) is not None and record.nbytes > MAX_PICKLE_NBYTES:
            raise CheckpointError(
                f"{self.span.where}: a pickle of {record.nbytes:,} bytes is too large to be data"
            )
        return bytes(self._read("data.pkl"))

    def _read(self, record: str) -> bytearray:
        nbytes = self._records[record].nbytes if record in self._records else 0
        return self.payload(record, nbytes).read(0, nbytes)


def _compare_crc(payload: Span, expected: int) -> None:
    crc = 0
    for start in range(0, payload.nbytes, READ_NBYTES):
        crc = zlib.crc32(payload.read(start, min(READ_NBYTES, payload.nbytes - start)), crc)
    if crc != expected:
        raise CheckpointError(
            f"{payload.where} is damaged: expected CRC {expected:08x} over its {payload.nbytes:,} "
            f"bytes at byte {payload.offset:,} of the file, found {crc:08x}. Use another checkpoint"
        )


def _entries(span: Span) -> Iterator[tuple[str, Stored]]:
    """The directory of the archive: record by name, without the folder that all are in."""
    start, nbytes, count = _directory(span)
    data, at = span.read(start, nbytes), 0
    seen: set[str] = set()
    for _ in range(count):
        if at + _ENTRY.size > nbytes:
            raise CheckpointError(f"{span.where} is damaged: its directory ends early")
        fields = _ENTRY.unpack_from(data, at)
        flags, method, crc, packed, unpacked, name_nbytes, extra_nbytes, comment_nbytes = (
            *(fields[3], fields[4]),
            *fields[7:13],
        )
        at += _ENTRY.size
        name = bytes(data[at : at + name_nbytes]).decode("utf-8", "replace").partition("/")[2]
        extra = bytes(data[at + name_nbytes : at + name_nbytes + extra_nbytes])
        at += name_nbytes + extra_nbytes + comment_nbytes
        unpacked, packed, header = _wide((unpacked, packed, fields[16]), extra)
        if (
            fields[0] != b"PK\x01\x02"
            or method
            or flags & _ENCRYPTED
            or packed != unpacked
            or name in seen
        ):
            raise CheckpointError(
                f"{span.where}: expected records that are stored as they are, each once; record "
                f"{name[:100]!r} is not"
            )
        if header + _LOCAL.size + unpacked > start:
            raise CheckpointError(
                f"{span.where}: record {name[:100]!r} does not lie in the archive"
            )
        seen.add(name)
        yield name, Stored(header=header, nbytes=unpacked, crc=crc)


def _directory(span: Span) -> tuple[int, int, int]:
    """Start, bytes and entries of the directory, from the record at the end of the archive."""
    problem = f"{span.where} is no archive of torch.save, or its end is missing"
    if span.nbytes < _END.size:
        raise CheckpointError(problem)
    end = span.nbytes - _END.size
    signature, _, _, _, count, nbytes, start, _ = _END.unpack(span.read(end, _END.size))
    if signature != b"PK\x05\x06":
        raise CheckpointError(problem)
    if count == 0xFFFF or _FOREIGN in (nbytes, start):
        locator = end - _END64_LOCATOR.size
        found, _, wide, _ = _END64_LOCATOR.unpack(span.read(locator, _END64_LOCATOR.size))
        if found != b"PK\x06\x07":
            raise CheckpointError(problem)
        found, *_, count, nbytes, start = _END64.unpack(span.read(wide, _END64.size))
        if found != b"PK\x06\x06":
            raise CheckpointError(problem)
    if start + nbytes > end or nbytes > MAX_DIRECTORY_NBYTES:
        raise CheckpointError(
            f"{span.where}: its directory of {nbytes:,} bytes at {start:,} cannot be"
        )
    return start, nbytes, count


def _wide(values: Sequence[int], extra: bytes) -> list[int]:
    """Sizes and offset of an entry.

    Those that do not fit into 32 bits stand in its extra field, in this order.
    """
    wide, at = b"", 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    numbers = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
    return [next(numbers, _FOREIGN) if value == _FOREIGN else value for value in values]


def _known(tensor: Callable[[TensorView], Any]) -> Mapping[str, Any]:
    """The globals of an archive's pickle; ``tensor`` makes the values."""

    def rebuild(
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        requires_grad: Any,
        hooks: Any,
        dtype: Any = None,
        metadata: Any = None,
    ) -> Any:
        # Version 2 has its metadata (bits of conjugation) where version 3 has the dtype.
        if (
            not isinstance(storage, _Storage)
            or metadata
            or (dtype and not isinstance(dtype, torch.dtype))
        ):
            raise ValueError("expected a plain tensor of a storage")
        dtype = dtype or storage.dtype
        (start,), sizes, steps = make_size((offset,)), make_size(shape), make_size(strides)
        view = TensorView(
            record=storage.record,
            dtype=dtype,
            offset=start,
            shape=sizes,
            strides=steps,
            record_nbytes=storage.nbytes,
        )
        if len(sizes) != len(steps) or (
            view.span and (start + view.span) * dtype.itemsize > storage.nbytes
        ):
            raise ValueError("a tensor reaches beyond its storage")
        return tensor(view)

    def parameter(data: Any, requires_grad: Any, hooks: Any) -> Any:
        return data  # a parameter's value is all that is wanted of it

    return {**_STORAGE_TYPES, **BUILTINS, **_tensor_makers(rebuild, parameter)}


def _tensor_makers(rebuild: Callable[..., Any], parameter: Callable[..., Any]) -> Mapping[str, Any]:
    return {
        "torch._utils._rebuild_tensor_v2": Maker(rebuild),
        "torch._utils._rebuild_tensor_v3": Maker(rebuild),
        "torch._utils._rebuild_parameter": Maker(parameter),
        "torch.device": Maker(torch.device),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storage:
    """What a reference in the pickle stands for."""

    dtype: torch.dtype
    record: str
    nbytes: int


def _storage(reference: Any) -> _Storage:
    tag, kind, key, _, numel = (
        reference  # where the storage was does not matter: it comes to the host
    )
    if tag != "storage" or not isinstance(kind, StorageType) or not isinstance(key, str):
        raise ValueError("expected a reference to a storage")
    (count,) = make_size((numel,))
    return _Storage(dtype=kind.dtype, record=f"data/{key}", nbytes=count * kind.dtype.itemsize)


_STORAGE_TYPES: Mapping[str, Any] = {
    "torch.DoubleStorage": StorageType(dtype=torch.float64),
    "torch.FloatStorage": StorageType(dtype=torch.float32),
    "torch.HalfStorage": StorageType(dtype=torch.float16),
    "torch.BFloat16Storage": StorageType(dtype=torch.bfloat16),
    "torch.LongStorage": StorageType(dtype=torch.int64),
    "torch.IntStorage": StorageType(dtype=torch.int32),
    "torch.ShortStorage": StorageType(dtype=torch.int16),
    "torch.CharStorage": StorageType(dtype=torch.int8),
    "torch.ByteStorage": StorageType(dtype=torch.uint8),
    "torch.BoolStorage": StorageType(dtype=torch.bool),
    "torch.ComplexFloatStorage": StorageType(dtype=torch.complex64),
    "torch.ComplexDoubleStorage": StorageType(dtype=torch.complex128),
    "torch.storage.UntypedStorage": StorageType(dtype=torch.uint8),
}
