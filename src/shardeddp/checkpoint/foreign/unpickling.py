"""Reads data out of a pickle without running it: known globals become plain values, everything else is refused.

A pickle is a program, and Python's reader executes it. This reader is a machine for the subset that data needs: it
imports nothing, calls nothing that the file names, and sets no attribute of any class. A global is looked up in a table
of the caller; what the table holds is an inert value, or a :class:`Maker` that turns the arguments in the file into
one. What it builds is at most a constant times as large as the file: a reference to the memo costs no copy, and
lengths are checked against the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shardeddp.errors import CheckpointError

MAX_STACK = 1_000_000
"""Values under construction; a pickler writes containers in batches of 1000, tuples whole."""

MAX_DIMS = 64
MAX_DEPTH = 64
MAX_VISITS = 250_000
"""Values of a tree, counted where they are met: shared lists in shared lists are small here and endless to a reader."""

MAX_NAME = 300
_PROTOCOLS = range(2, 6)
_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Maker:
    """What stands for a class or function: ``make`` raises ValueError or TypeError for arguments that do not fit.

    And :class:`CodeAskedForError` for those with which it would be a program.
    """

    make: Callable[..., Any]


class CodeAskedForError(Exception):
    """A global that may run code, by its dotted name."""


class Record:
    """An object of a class called ``kind``, as the file describes it: nothing of the class itself is involved."""

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
            raise CheckpointError(f"expected a {self.kind} with named attributes, found {type(self.state).__name__}")
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
    """A value that may be hashed: the hash of tuples in tuples has no limit of depth in CPython, and kills it."""
    flat = type(value) is tuple and len(value) <= MAX_DIMS and all(type(item) in _SCALARS for item in value)
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
    **{f"{home}.{name}": make for home in ("builtins", "__builtin__") for name, make in _BUILTIN.items()},
}
"""Globals of plain data, under the names of protocol 2 and of the later ones."""


def unpickle(data: bytes, where: str, known: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None) -> Any:
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
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, struct.error) as error:
        raise CheckpointError(
            f"{where} is damaged, or no pickle of plain data: at byte {machine.at:,} of {len(data):,}: {error}"
        ) from error


def check_tree(value: Any, where: str) -> None:
    """Refuse a value that is too deep or too large to walk through, shared parts counted as often as they are met.

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
                f"{where} holds values in values, expected at most {MAX_DEPTH} levels and {MAX_VISITS:,} values: it is"
                " refused as too expensive to read"
            )
        open_values.extend((part, depth + 1) for part in parts if type(part) not in _SCALARS)


class _Machine:
    """The stack machine of a pickle, for data; its arguments are those of :func:`unpickle`."""

    def __init__(
        self, data: bytes, where: str, known: Mapping[str, Any], persistent: Callable[[Any], Any] | None
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
            f"{self.where} asks for the global {dotted[:MAX_NAME]!r}, which may run code: expected plain data and"
            " tensors only. Nothing was run. If you trust whoever wrote the file, pass trust_pickle=True, which runs it"
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
        elif not isinstance(target, OrderedDict):  # a state dict carries versions of modules, which nobody reads
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
            raise ValueError(f"expected place {len(self.memo):,} of the memo to be taken, found {index:,}")
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
            raise ValueError(f"expected protocol {_PROTOCOLS.start} to {_PROTOCOLS.stop - 1}, found {found}")

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
"""What each instruction does. Not here: INST, OBJ, EXT, NEWOBJ_EX, text numbers, POP, DUP, and buffers outside."""
