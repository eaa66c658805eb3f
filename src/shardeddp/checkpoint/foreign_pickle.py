"""Foreign pickles: a reader of `torch.save` archives that runs no code."""

from __future__ import annotations

import io
import math
import pickletools
import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from shardeddp.checkpoint.items import Record, check_record, read_bytes, records_of
from shardeddp.checkpoint.manifest import Item
from shardeddp.errors import CheckpointError
from shardeddp.garbage import collector_paused
from shardeddp.plan.layout import Interval

# -- Pickle evaluator: data only, everything else is refused
#
# A pickle is a program, and Python's reader executes it. `pickletools` decodes the instructions and
# their arguments; the evaluator below has those that data needs, imports nothing, calls nothing
# that the file names, and sets no attribute of any class. A global is looked up in a table of the
# caller, which has inert values, or a :class:`Maker` that turns the arguments in the file into one.
# The result is at most a constant times as large as the file: a reference to the memo costs no
# copy, and lengths are compared with the remaining bytes before memory is allocated.
#
# An allow-list for ``pickle.Unpickler`` would need more than this. It allocates the lengths and
# memo indexes that a file asks for, fills any object with ``append``, ``add``, ``__setitem__``,
# ``__setstate__`` or ``__dict__``, and hashes nested tuples until the C stack overflows. Only a
# scan that follows stack and memo could detect that in advance: this evaluator without its values.

MAX_VALUES = 250_000
"""Limit of values under construction (a pickler writes batches of 1000), or in a tree.

In a tree each visit counts: nested shared lists are small in memory and endless to walk.
"""

MAX_DIMS = 64
MAX_DEPTH = 64
MAX_CHOSEN_KEYS = 2000
"""Keys of one container with hashes that a file can choose; lookup among equal hashes is slow."""

_DENSE = re.compile(r"torch\.(b?float\d.*|complex\d+|u?int(8|16|32|64)|bool)")
_SCALARS = (str, int, float, bool, bytes, type(None))
_LEAVES = (*_SCALARS, bytearray, complex, torch.dtype, torch.device, torch.layout, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Maker:
    """Substitute for a class or function; ``make`` raises an error if arguments are no data."""

    make: Callable[..., Any]


class UnsafeGlobalError(Exception):
    """Global that may run code; the message is its dotted name."""


class Instance:
    """Object of a class called ``kind``, as described by the file; the class is not involved."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, *arguments: Any) -> None:
        self.kind = kind
        self.state: Any = None


def is_dense(dtype: Any) -> bool:
    """Return True for dtypes with self-contained elements of whole bytes, unlike quantized ones."""
    return isinstance(dtype, torch.dtype) and _DENSE.fullmatch(str(dtype)) is not None


def make_size(numbers: Any = ()) -> tuple[int, ...]:
    """Return a shape or an offset: at most ``MAX_DIMS`` integers from 0 to below 2**53."""
    if not isinstance(numbers, (tuple, list)) or len(numbers) > MAX_DIMS:
        raise ValueError(f"expected at most {MAX_DIMS} sizes")
    if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
        raise ValueError("expected sizes between 0 and 2**53")
    return tuple(numbers)


def _make_value(value: Any, *rest: Any) -> Any:
    return value


def _make_latin1(text: Any, encoding: Any) -> bytes:
    """Return bytes as protocol 2 encodes them; any other codec would be a program."""
    if isinstance(text, str) and encoding == "latin1":
        return text.encode("latin1")
    raise ValueError("expected a text in latin1")


def _make_bytearray(data: Any = b"") -> bytearray:
    """Copy bytes; an integer is refused, as it would be a length to allocate."""
    if isinstance(data, bytes):
        return bytearray(data)
    raise ValueError("expected bytes")


def _make_set(items: Iterable[Any] = (), found: set[Any] | None = None) -> set[Any]:
    found = set() if found is None else found
    for item in items:
        found.add(_key(item, found))
    return found


def _key(value: Any, container: Any) -> Any:
    """Return a value that is safe to hash as a key of a container.

    The hash of nested tuples has no depth limit in CPython, and deep ones crash it. Hashes of
    tuples and of large integers are not randomized, unlike those of strings.
    """
    flat = (
        type(value) is tuple
        and len(value) <= MAX_DIMS
        and all(type(item) in _SCALARS for item in value)
    )
    if not flat and type(value) not in _SCALARS and not isinstance(value, (Instance, torch.dtype)):
        raise ValueError(f"expected a key of plain values, found {type(value).__name__}")
    chosen = flat or (type(value) is int and abs(value) >= 2**60)
    if chosen and len(container) >= MAX_CHOSEN_KEYS:
        raise ValueError(f"more than {MAX_CHOSEN_KEYS:,} keys are tuples, or large integers")
    return value


_BUILTIN = {
    "bytes": Maker(lambda: b""),
    "bytearray": Maker(_make_bytearray),
    "set": Maker(_make_set),
    "frozenset": Maker(lambda *items: frozenset(_make_set(*items))),
    "complex": Maker(complex),
}
BUILTINS: Mapping[str, Any] = {
    **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
    "torch.Size": Maker(make_size),
    "collections.OrderedDict": Maker(lambda: OrderedDict[Any, Any]()),
    "_codecs.encode": Maker(_make_latin1),
    **{
        f"{module}.{name}": make
        for module in ("builtins", "__builtin__")
        for name, make in _BUILTIN.items()
    },
}
"""Globals of plain data, under the names of protocol 2 and of the later ones."""


def unpickle(
    data: bytes | bytearray,
    where: str,
    known: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a pickle of data.

    Args:
        data: The whole pickle; trailing bytes are refused.
        where: Description of the bytes, for errors.
        known: Value of each allowed global, by dotted name.
        persistent: Makes the value of a reference to data outside of the pickle; None: refused.
    """
    stream = io.BytesIO(data)
    try:
        with collector_paused():
            return _evaluate(stream, len(data), known, persistent)
    except UnsafeGlobalError as error:
        raise CheckpointError(
            f"{where} asks for the global {str(error)[:300]!r}, which may run code: expected "
            f"plain data and tensors only. Nothing was run. If you trust whoever wrote the file, "
            f"pass trust_pickle=True, which runs it"
        ) from None
    except Exception as error:
        raise CheckpointError(
            f"{where} is damaged, or no pickle of plain data: at byte {stream.tell():,} of "
            f"{len(data):,}: {error}"
        ) from error


# Not supported: INST, OBJ, EXT, NEWOBJ_EX, text numbers, POP, DUP, and out-of-band buffers.
_NAMES = """
    PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE
    SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BYTEARRAY8 EMPTY_LIST EMPTY_TUPLE EMPTY_DICT EMPTY_SET
    APPEND APPENDS ADDITEMS SETITEM SETITEMS TUPLE TUPLE1 TUPLE2 TUPLE3 FROZENSET BINGET LONG_BINGET
    BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID
"""
_INSTRUCTIONS = {
    it.code.encode("latin-1"): (it.name, it.arg.reader if it.arg else None)
    for it in pickletools.opcodes
    if it.name in _NAMES.split()
}


def _evaluate(
    stream: io.BytesIO,
    nbytes: int,
    known: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None,
) -> Any:
    """Evaluate a pickle; an invalid one may raise any exception."""
    stack, marks, memo = list[Any](), list[int](), list[Any]()

    def pop_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    while (instruction := _INSTRUCTIONS.get(code := stream.read(1))) is not None:
        name, reader = instruction
        argument: Any = reader(stream) if reader else None
        match name:
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                place = len(memo) if argument is None else argument
                if place == len(memo):
                    memo.append(stack[-1])
                else:
                    memo[place] = stack[-1]
            case "LONG_BINGET" | "BINGET":
                stack.append(memo[argument])
            case "BININT1" | "BININT2" | "BININT" | "SHORT_BINUNICODE" | "BINUNICODE":
                stack.append(argument)
            case "NEWOBJ" | "REDUCE":
                arguments, maker = stack.pop(), stack.pop()
                if not isinstance(maker, Maker) or not isinstance(arguments, tuple):
                    raise ValueError(f"a {type(maker).__name__} was to be called")
                stack.append(maker.make(*arguments))
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_SET":
                stack.append(_make_set())
            case "BUILD":
                state = stack.pop()
                _build(stack[-1], state)
            case "SETITEMS" | "SETITEM":
                items = pop_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                _set_items(stack[-1], items)
            case "TUPLE1":
                stack.append((stack.pop(),))
            case "TUPLE2":
                stack.append((stack.pop(-2), stack.pop()))
            case "TUPLE3":
                stack.append((stack.pop(-3), stack.pop(-2), stack.pop()))
            case "TUPLE":
                stack.append(tuple(pop_mark()))
            case "FROZENSET":
                stack.append(frozenset(_make_set(pop_mark())))
            case "APPEND" | "APPENDS" | "ADDITEMS":
                items = [stack.pop()] if name == "APPEND" else pop_mark()
                _extend(stack[-1], items)
            case "GLOBAL" | "STACK_GLOBAL":
                words = argument.split(" ", 1) if argument else [stack.pop(-2), stack.pop()]
                dotted = ".".join(words) if all(isinstance(word, str) for word in words) else ""
                if dotted not in known:
                    raise UnsafeGlobalError(dotted)
                stack.append(known[dotted])
            case "BINPERSID":
                if persistent is None:
                    raise ValueError("it refers to data outside of itself")
                stack.append(persistent(stack.pop()))
            case "PROTO":
                pass
            case "FRAME":
                if argument > nbytes - stream.tell():
                    raise ValueError("a frame ends behind the end")
            case "STOP":
                if len(stack) != 1 or marks or stream.tell() != nbytes:
                    raise ValueError("expected one value and nothing behind it")
                return stack[0]
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case _:  # another number, bytes or None: the argument is the value
                stack.append(argument)
        if len(stack) + len(marks) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values are under construction")
    raise ValueError(f"instruction {code!r} is not among those of plain data")


def _set_items(target: Any, items: list[Any]) -> None:
    """Fill a mapping; a repeated key is refused."""
    if not isinstance(target, dict) or len(items) % 2:
        raise ValueError(f"items of a {type(target).__name__} were to be set")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if _key(key, target) in target:
            raise ValueError("a key comes twice in a mapping")
        target[key] = value


def _extend(target: Any, items: list[Any]) -> None:
    """Fill a list or a set."""
    if type(target) is list:
        target.extend(items)
    elif type(target) is set:
        _make_set(items, target)
    else:
        raise ValueError(f"a {type(target).__name__} was to be extended")


def _build(target: Any, state: Any) -> None:
    """Set the state of an object, once."""
    if isinstance(target, Instance) and target.state is None and state is not None:
        target.state = state
    elif not isinstance(target, OrderedDict):  # of a state dict: module versions, unused here
        raise ValueError(f"the state of a {type(target).__name__} was to be set")


def check_tree(value: Any, where: str) -> None:
    """Refuse a value too deep or too large to walk, or with an object in it that is no data.

    Shared values count at each visit.
    """
    open_values, visits = [(value, 0)], 0
    while open_values:
        item, depth = open_values.pop()
        parts: list[Any] = []
        if isinstance(item, dict):
            parts = [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            parts = list(item)
        elif not isinstance(item, _LEAVES):
            raise CheckpointError(f"{where} holds a {type(item).__name__}, expected plain values")
        visits += 1 + len(parts)
        if depth > MAX_DEPTH or visits > MAX_VALUES:
            raise CheckpointError(
                f"{where} holds values in values, expected at most {MAX_DEPTH} levels and "
                f"{MAX_VALUES:,} values: it is refused as too expensive to read"
            )
        open_values.extend((part, depth + 1) for part in parts if type(part) not in _SCALARS)


# -- Traps for the reader of ``torch.load(weights_only=True)``
#
# It runs no code, but it allocates the lengths that a pickle asks for, hashes nested tuples until
# the C stack overflows, and fills dictionaries with keys of one hash. These traps are found before
# it reads, by following its instructions and its stack: for each value the depth of its tuples, and
# whether it is a number, or a global that allocates memory by a number.

_NUMBER, _SIZED, _NUMBERS, _KINDS = 1, 2, 3, 4
_MAX_TUPLES = 500
_MAX_SAME_HASH = 1000
_SIZED_NAMES = re.compile(
    r"(__builtin__|builtins)\W(bytearray|bytes)|torch\W([\w.]+\W)?\w*(Storage|Tensor)"
)


def refuse_traps(stream: BinaryIO, where: str, pickles: int = 1) -> None:
    """Refuse a file that would crash torch's reader of data; other errors are left to torch.

    The stream is at the start of ``pickles`` consecutive pickles.
    """
    try:
        for _ in range(pickles):
            _look_for_traps(stream)
    except _TrapError as error:
        raise CheckpointError(
            f"{where} {error}: no run has saved that, and it is not read"
        ) from None
    except (IndexError, KeyError, ValueError):
        return  # no pickle: torch has the better error


class _TrapError(Exception):
    pass


def _look_for_traps(stream: BinaryIO) -> None:
    stack, marks, memo = list[int](), list[int](), dict[int, int]()
    same_hash = defaultdict[int, set[int]](set)

    def popped(count: int) -> list[int]:
        start = marks.pop() if count < 0 else len(stack) - count
        items = stack[start:]
        del stack[start:]
        return items

    while (found := _SCANNED.get(stream.read(1))) is not None:
        name, reader, pops = found
        argument: Any = reader(stream) if reader else None
        match name:
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BININT" | "BININT1" | "BININT2" | "LONG1":
                if abs(argument) >= _HASH_MODULUS:
                    others = same_hash[hash(argument)]
                    others.add(argument)
                    if len(others) > _MAX_SAME_HASH:
                        raise _TrapError(f"has more than {_MAX_SAME_HASH:,} numbers of one hash")
                stack.append(_NUMBER)
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = popped(pops)
                depth = 1 + max((item // _KINDS for item in items), default=0)
                if depth > _MAX_TUPLES:
                    raise _TrapError(f"has tuples in tuples, {depth} deep")
                begins = bool(items) and items[0] % _KINDS == _NUMBER
                stack.append(depth * _KINDS + (_NUMBERS if begins else 0))
            case "GLOBAL" | "STACK_GLOBAL":
                popped(pops)
                stack.append(_SIZED if argument and _SIZED_NAMES.fullmatch(argument) else 0)
            case "REDUCE" | "NEWOBJ":
                maker, arguments = popped(2)
                if maker % _KINDS == _SIZED and arguments % _KINDS == _NUMBERS:
                    raise _TrapError("asks for memory by a number")
                stack.append(arguments // _KINDS * _KINDS)  # a size is a tuple
            case "MARK":
                marks.append(len(stack))
            case "STOP":
                return
            case _:
                popped(pops)
                if name not in _FILLING:
                    stack.append(0)
    raise ValueError("torch's reader does not know the instruction, or there is none")


_HASH_MODULUS = sys.hash_info.modulus
_FILLING = frozenset(
    {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD", "PROTO", "FRAME"}
)
"""Instructions that push nothing on the stack."""

_POPPED = {
    **dict.fromkeys(("APPEND", "BUILD", "BINPERSID", "TUPLE1"), 1),
    **dict.fromkeys(("SETITEM", "TUPLE2", "STACK_GLOBAL"), 2),
    **dict.fromkeys(("APPENDS", "SETITEMS", "ADDITEMS", "TUPLE", "FROZENSET"), -1),
    "TUPLE3": 3,
}
"""Values that an instruction pops; -1: all from the last mark on."""

_SCANNED = {
    it.code.encode("latin-1"): (it.name, it.arg.reader if it.arg else None, _POPPED.get(it.name, 0))
    for it in pickletools.opcodes
    if it.name in {*_NAMES.split(), "SHORT_BINSTRING", "BINSTRING"} - {"BYTEARRAY8"}
}


# -- Items of ``torch.save``: a pickle and records of elements
#
# ``torch.load`` does not compare the CRCs that ``torch.save`` writes; this reader does. Before an
# element is read, the record has the length in the pickle, and the tensor lies inside its record.

MAX_PICKLE_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """Tensor as its pickle describes it: a view of a record."""

    record: str
    record_nbytes: int
    """Size of the record, as the pickle has it."""

    dtype: torch.dtype
    offset: int
    """Offset of the first element in the record, in elements of ``dtype``."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last; 0 without elements."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storage:
    """Storage that a persistent reference in the pickle describes."""

    record: str
    nbytes: int
    dtype: torch.dtype


class Archive:
    """Archive of ``torch.save``: all bytes of an item of a file that is open for reading."""

    def __init__(self, fd: int, item: Item) -> None:
        self._fd, self._item = fd, item
        records = records_of(fd, item)
        # As in torch, the folder of the first record is that of all.
        folder = records[0].name.partition("/")[0] + "/"
        self._records = {record.name.removeprefix(folder): record for record in records}
        # With torch.serialization.set_crc32_options(False) all CRCs are 0.
        self._has_crc = any(record.crc for record in records)
        if "byteorder" in self._records and bytes(self._read("byteorder")) not in (b"little", b""):
            raise CheckpointError("it was written on a big-endian machine, which is not supported")

    def load_view(self) -> tuple[TensorView, Record]:
        """Return the view of the archive's one tensor, and the record of its elements."""
        view = self._unpickle(lambda view: view)
        if not isinstance(view, TensorView):
            raise CheckpointError(f"expected a tensor, found {type(view).__name__}")
        return view, self._record(view.record, view.record_nbytes)

    def load(self) -> Any:
        """Return the saved value: plain containers of plain values and CPU tensors."""
        storages: dict[str, torch.Tensor] = {}

        def tensor(view: TensorView) -> torch.Tensor:
            if view.record not in storages:
                data = self._read(view.record, view.record_nbytes)
                storages[view.record] = torch.frombuffer(data or bytearray(1), dtype=torch.uint8)
            if 0 in view.shape:
                return torch.empty(view.shape, dtype=view.dtype, device="cpu")
            if math.prod(view.shape) > max(view.record_nbytes, MAX_VALUES):
                raise ValueError("a tensor has more elements than its storage has bytes")
            nbytes = view.record_nbytes // view.dtype.itemsize * view.dtype.itemsize
            elements = storages[view.record][:nbytes].view(view.dtype)
            return elements.as_strided(view.shape, view.strides, view.offset)

        value = self._unpickle(tensor)
        check_tree(value, "its pickle")
        return value

    def _unpickle(self, tensor: Callable[[TensorView], Any]) -> Any:
        return unpickle(self._read("data.pkl"), "its pickle", _known(tensor), _storage)

    def _read(self, name: str, nbytes: int | None = None) -> bytearray:
        record = self._record(name, nbytes)
        where = Interval(record.offset, record.offset + record.nbytes)
        return read_bytes(self._fd, self._item, where)

    def _record(self, name: str, nbytes: int | None = None) -> Record:
        """Return a record after a CRC check; without ``nbytes`` it has to be a small one."""
        if (record := self._records.get(name)) is None:
            raise CheckpointError(f"it has no record {name[:100]!r}")
        if record.nbytes > MAX_PICKLE_NBYTES if nbytes is None else record.nbytes != nbytes:
            expected = f"at most {MAX_PICKLE_NBYTES:,}" if nbytes is None else f"{nbytes:,}"
            raise CheckpointError(f"record {name} has {record.nbytes:,} bytes, expected {expected}")
        if self._has_crc:
            check_record(self._fd, self._item, record)
        return record


def _known(tensor: Callable[[TensorView], Any]) -> Mapping[str, Any]:
    """Return the globals of an archive's pickle; ``tensor`` makes the values."""

    def rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
        # Version 2 has metadata (conjugation bits) in the position of version 3's dtype.
        _, _, dtype, metadata, *_ = (*rest, None, None)
        if not isinstance(storage, _Storage) or metadata or not is_dense(dtype or storage.dtype):
            raise ValueError("expected a plain tensor of a storage")
        view = TensorView(
            record=storage.record,
            record_nbytes=storage.nbytes,
            dtype=dtype or storage.dtype,
            offset=make_size((offset,))[0],
            shape=make_size(shape),
            strides=make_size(strides),
        )
        span = span_of(view.shape, view.strides)
        if span and (view.offset + span) * view.dtype.itemsize > storage.nbytes:
            raise ValueError("a tensor reaches beyond its storage")
        return tensor(view)

    return {
        **_STORAGE_TYPES,
        **BUILTINS,
        "torch._utils._rebuild_tensor_v2": Maker(rebuild),
        "torch._utils._rebuild_tensor_v3": Maker(rebuild),
        "torch._utils._rebuild_parameter": Maker(_make_value),
        "torch.device": Maker(torch.device),
    }


def _storage(reference: Any) -> _Storage:
    # The device of the storage is ignored: all elements come to the host.
    tag, dtype, key, _, numel = reference
    if tag != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
        raise ValueError("expected a reference to a storage")
    (count,) = make_size((numel,))
    return _Storage(record=f"data/{key}", nbytes=count * dtype.itemsize, dtype=dtype)


_STORAGE_TYPES: Mapping[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,
}
"""Dtype of each storage class."""
