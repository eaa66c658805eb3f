"""State trees as JSON: tagged values for types that JSON lacks; never code."""

from __future__ import annotations

import base64
import copy
import datetime
import math
import pathlib
import re
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from shardeddp.checkpoint.strict_json import MAX_INTEGER
from shardeddp.errors import CheckpointError
from shardeddp.torch_private import STATE_VERSIONS

# A tag is an object of one key: ``(1, 2)`` is ``{"$tuple": [1, 2]}``. It holds the *parts* of
# the value, a simpler value that is encoded in turn, so the codec of a type only takes values apart
# and puts them together. No name in the data is imported or called: tags are looked up in a table.
#
#     encode({"lr": 0.1, "betas": (0.9, inf)}, put) == {"lr": 0.1, "betas": {"$tuple": [0.9, {"$float": "7ff0..."}]}}

TAG = "$"
MAX_DEPTH = 200
"""Limit of JSON levels in a saved tree; Python's reader has room for more."""

_TENSOR = "tensor"
_OPAQUE = "opaque"
_MADE_OF_TENSORS = frozenset({"array", "bytes", "numbers", "sparse", "strings"})
_DATA_NBYTES = 2**12
"""Size from which bytes, and lists and dicts of numbers and text, are stored as tensors."""

_MANY = _DATA_NBYTES // 8
"""Length from which lists and dicts are stored as tensors: numbers of 8 bytes, texts, pairs."""

_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is not valid text."""

_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes})

_MAX_SAME_HASH = 16
"""Limit of keys of one dict with the same hash; more would cost quadratic time.

Such keys can be made, as hashes of numbers are not randomized.
"""


@dataclass(frozen=True, eq=False)
class Opaque:
    """Value that could not be encoded.

    It equals itself alone: two values of one class need not be equal.
    """

    type_name: str
    """Name of its class, for messages; never imported."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Encoding of values of one exact class; subclasses are other classes, and may be code."""

    kind: type
    tag: str
    parts: Callable[[Any], Any]
    """Takes a value apart into a simpler one, which is encoded in turn.

    ``NotImplemented`` leaves a value to the next codec of the class or to JSON, or else it
    becomes :class:`Opaque`.
    """

    build: Callable[[Any], Any]
    """Builds a value from decoded parts, which may be anything; any exception refuses them."""


def dict_codec(kind: type[dict[Any, Any]], tag: str) -> Codec:
    """Return the codec of a dict class that is built from a dict and holds nothing else."""
    return Codec(kind=kind, tag=tag, parts=_pairs, build=lambda parts: kind(_dict(parts)))


def encode(
    tree: Any,
    put: Callable[[torch.Tensor], str],
    more: Sequence[Codec] = (),
    opaque: list[tuple[str, Any]] | None = None,
) -> Any:
    """Encode a state tree as a JSON value; :func:`decode` gives equal values (floats bit by bit).

    A shared reference is written each time.

    Args:
        tree: Containers, numbers, text, tensors and values with a codec; all others become
            :class:`Opaque`.
        put: Stores a tensor (or an array, as a tensor) and names it; called for each occurrence.
        more: Codecs beside :data:`CODECS`.
        opaque: List to which ``(dotted path, value)`` of each :class:`Opaque` is added.

    Raises:
        CheckpointError: A value contains itself, is nested deeper than the parser allows, or has
            keys that the decoder refuses; the message has its path.
    """
    codecs: defaultdict[type, list[Codec]] = defaultdict(list)
    for codec in (*CODECS, *more):
        codecs[codec.kind].append(codec)
    return _Encoder(put=put, codecs=codecs, opaque=[] if opaque is None else opaque).encode(
        tree, ()
    )


def decode(value: Any, get: Callable[[str], torch.Tensor], more: Sequence[Codec] = ()) -> Any:
    """Decode a result of :func:`encode`; runs no code but the codecs and ``get``."""
    codecs = {codec.tag: codec for codec in (*CODECS, *more)}
    try:
        return _Decoder(get=get, codecs=codecs).decode(value)
    except RecursionError:
        raise CheckpointError(
            "The encoded state is nested deeper than any value that this package saves"
        ) from None


def are_leaves(values: Iterable[Any]) -> bool:
    """Return True if no value contains another one, at the speed of C.

    Searches for tensors skip a vocabulary of a million words in this way.
    """
    return _LEAVES.issuperset(map(type, values))


def tensors_with_paths(
    tree: Any, keys: tuple[Any, ...] = (), around: tuple[int, ...] = ()
) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
    """Yield tensors in nested mappings, namespaces and sequences, each with its path of keys.

    Values that contain themselves or are too deep are skipped; encoding reports them.
    """
    if isinstance(tree, torch.Tensor):
        yield tree, keys
        return
    if id(tree) in around or len(around) > MAX_DEPTH:
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, (Mapping, Namespace)):
        mapping = vars(tree) if isinstance(tree, Namespace) else cast("Mapping[Any, Any]", tree)
        items = () if are_leaves(mapping.values()) else mapping.items()
    elif isinstance(tree, (list, tuple, deque)):
        sequence = cast("Sequence[Any]", tree)
        items = () if are_leaves(sequence) else enumerate(sequence)
    for key, item in items:
        yield from tensors_with_paths(item, (*keys, key), (*around, id(tree)))


def versions_of(state: Any) -> Mapping[str, dict[str, Any]] | None:
    """Return the versions of modules' states, by fqn, that torch keeps in a state dict.

    ``nn.Module.load_state_dict`` passes them to modules, which convert states of older versions.
    """
    return vars(state).get(STATE_VERSIONS) if isinstance(state, OrderedDict) else None


def with_versions(
    state: dict[Any, Any], versions: Mapping[str, dict[str, Any]] | None
) -> dict[Any, Any]:
    """Return a copy of a state dict with versions; without versions the state dict itself."""
    if versions is None:
        return state
    copied = OrderedDict(state)
    vars(copied)[STATE_VERSIONS] = OrderedDict(versions)
    return copied


def without_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a copy of a state dict without a prefix in the names of tensors and modules."""
    versions = versions_of(state)
    if versions is not None:
        # Names with the prefix come last: they win where a shortened name exists already.
        names = sorted((f"{name}." for name in versions), key=lambda name: name.startswith(prefix))
        versions = {name.removeprefix(prefix)[:-1]: versions[name[:-1]] for name in names}
    return with_versions({name.removeprefix(prefix): it for name, it in state.items()}, versions)


def plain(
    tree: Any,
    leaf: Callable[[Any], Any] = lambda value: value,
    kept: Container[int] = frozenset(),
) -> Any:
    """Return a tree in containers that ``weights_only=True`` reads, but for ids in ``kept``.

    ``leaf`` maps each value that is no container to its replacement.
    """
    if id(tree) in kept:
        return with_leaves(tree, leaf)
    if isinstance(tree, dict):
        kind = OrderedDict if type(tree) is OrderedDict else dict
        mapping = cast("dict[Any, Any]", tree)
        if are_leaves(mapping) and are_leaves(mapping.values()):
            copied = kind(mapping)
        else:
            copied = kind(
                (plain(key, leaf, kept), plain(item, leaf, kept)) for key, item in mapping.items()
            )
        return with_versions(copied, versions_of(tree))
    if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        items = cast("Sequence[Any]", tree)
        values = list(items) if are_leaves(items) else [plain(it, leaf, kept) for it in items]
        return values if isinstance(tree, list) else tuple(values)
    return leaf(tree)


def with_leaves(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a tree with replaced leaves, in containers of its classes; itself if none changes.

    ``leaf`` maps each value that is no container, keys aside, to its replacement. Containers are
    mappings, namespaces, lists, tuples and queues.
    """
    if isinstance(tree, Namespace):
        own = vars(tree)
        values: dict[str, Any] = with_leaves(own, leaf)
        return tree if values is own else _copy_of(tree, lambda it: it.__dict__.update(values))
    if isinstance(tree, Mapping):
        mapping = cast("Mapping[Any, Any]", tree)
        if are_leaves(mapping.values()):
            return tree
        changed = {
            key: made for key, it in mapping.items() if (made := with_leaves(it, leaf)) is not it
        }
        if not changed:
            return tree
        return _copy_of(
            mapping if isinstance(mapping, dict) else dict(mapping),
            lambda it: dict.update(it, changed),
        )
    if not isinstance(tree, (list, tuple, deque)) or type(tree) is torch.Size:
        return leaf(tree)
    items = cast("Sequence[Any]", tree)
    if are_leaves(items):
        return tree
    made = [with_leaves(it, leaf) for it in items]
    if all(one is other for one, other in zip(made, items, strict=True)):
        return tree
    if isinstance(tree, list):
        return _copy_of(tree, lambda it: list.__setitem__(it, slice(None), made))
    if isinstance(tree, deque):
        return _copy_of(tree, lambda it: (it.clear(), it.extend(made)))
    built = tuple.__new__(type(tree), made)  # also a namedtuple
    if hasattr(tree, "__dict__"):
        vars(built).update(vars(tree))
    return built


def _copy_of(container: Any, change: Callable[[Any], Any]) -> Any:
    copied = copy.copy(container)
    change(copied)
    return copied


def opaque_paths(tree: Any) -> list[str]:
    """Dotted paths of opaque values in a decoded tree; an opaque key is a path of its own."""
    return [".".join(path) for path in _opaque_paths(tree, ())]


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    put: Callable[[torch.Tensor], str]
    codecs: Mapping[type, Sequence[Codec]]
    opaque: list[tuple[str, Any]]
    open: set[int] = field(default_factory=set[int])
    """Ids of the values around the current one."""

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if _is_plain_scalar(value):
            return value
        if id(value) in self.open or len(self.open) >= MAX_DEPTH:
            what = (
                "contains itself"
                if id(value) in self.open
                else f"lies deeper than {MAX_DEPTH} JSON levels"
            )
            raise _refused(value, path, what)
        self.open.add(id(value))
        try:
            return self._encode_container(value, path)
        finally:
            self.open.remove(id(value))

    def _encode_container(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            return {TAG + _TENSOR: self.put(value)}
        if type(value) is dict and not _is_table(value) and all(map(_is_plain_key, value)):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        for codec in self.codecs.get(type(value), ()):
            try:
                parts = codec.parts(value)
            except ValueError as error:
                raise _refused(value, path, f"has what cannot be read again: {error}") from None
            if parts is not NotImplemented:
                return {TAG + codec.tag: self.encode(parts, path)}
        if type(value) is list:
            return [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        self.opaque.append((dotted(path), value))
        return {TAG + _OPAQUE: f"{type(value).__module__}.{type(value).__qualname__}"}


@dataclass(frozen=True, kw_only=True)
class _Decoder:
    get: Callable[[str], torch.Tensor]
    codecs: Mapping[str, Codec]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Decoded tensors by name: each occurrence is the same object again."""

    taken: set[int] = field(default_factory=set[int])
    """Ids of tensors that a value was made of."""

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if all(map(_is_plain_key, value)):
            return {key: self.decode(item) for key, item in value.items()}
        if len(value) != 1:
            raise CheckpointError(
                f"The encoded state is damaged: expected a tag alone, found it among {len(value)} "
                f"keys"
            )
        [(key, encoded)] = value.items()
        return self._decode_tag(key.removeprefix(TAG), encoded)

    def _decode_tag(self, tag: str, encoded: Any) -> Any:
        if tag == _TENSOR and isinstance(encoded, str):
            return self._get(encoded)
        codec = self.codecs.get(tag)
        if codec is None:
            raise CheckpointError(
                f"The encoded state has the tag {tag[:40]!a} with a {type(encoded).__name__}, "
                f"which this version does not know: it is damaged, or a newer version has written "
                f"it"
            )
        parts = self.decode(encoded)
        try:
            if tag in _MADE_OF_TENSORS:
                self._take(parts if type(parts) is list else [parts])
            return codec.build(parts)
        except Exception as error:  # noqa: BLE001 - parts are anything, and each type refuses them in its own way
            raise CheckpointError(
                f"The encoded state is damaged: its {type(parts).__name__} makes no {codec.tag}: "
                f"{str(error)[:200]}"
            ) from None

    def _get(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            self.tensors[name] = self.get(name)
        return self.tensors[name]

    def _take(self, parts: Any) -> None:
        """Use each tensor once: else a short document could demand many copies of a large one."""
        for part in parts:
            if isinstance(part, torch.Tensor):
                if id(part) in self.taken:
                    raise ValueError("a tensor stands there twice")
                self.taken.add(id(part))
            elif type(part) is list:
                self._take(part)


def _refused(value: Any, path: tuple[str, ...], why: str) -> CheckpointError:
    return CheckpointError(
        f"The state cannot be saved: the {type(value).__name__} at {dotted(path)} {why}"
    )


def dotted(path: Sequence[str]) -> str:
    """Return a path for messages; the middle of a long one is left out."""
    if len(path) > 2 * _SHOWN:
        path = [*path[:_SHOWN], f"({len(path) - 2 * _SHOWN} more)", *path[-_SHOWN:]]
    return ".".join(path) or "its root"


_SHOWN = 6
"""Keys shown at each end of a long path."""


def _is_plain_scalar(value: Any) -> bool:
    """Return True if JSON has the value and keeps it exactly."""
    if value is None or type(value) is bool:
        return True
    if type(value) is int:
        return -MAX_INTEGER <= value <= MAX_INTEGER
    return math.isfinite(value) if type(value) is float else _is_plain_text(value)


def _is_plain_text(value: Any) -> bool:
    # File names may hold bytes that are not valid text, as halves of surrogate pairs, which the
    # parser refuses.
    return type(value) is str and (value.isascii() or not _HALF.search(value))


def _is_plain_key(key: Any) -> bool:
    return _is_plain_text(key) and not key.startswith(TAG)


def _opaque_paths(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(value, Opaque):
        yield path
    elif isinstance(value, dict) and are_leaves(value) and are_leaves(value.values()):
        return
    elif isinstance(value, (dict, Namespace)):
        for key, item in (value if isinstance(value, dict) else vars(value)).items():
            yield from _opaque_paths(key, (*path, "(key)"))
            # A key of many digits cannot even be printed.
            name = str(key) if _is_plain_scalar(key) else f"({type(key).__name__})"
            yield from _opaque_paths(item, (*path, name))
    elif isinstance(value, (list, tuple, set, frozenset, deque)) and not are_leaves(value):
        for index, item in enumerate(value):
            yield from _opaque_paths(item, (*path, str(index)))


def _is_table(value: Mapping[Any, Any]) -> bool:
    """Return True if a dict is stored as two lists: many words or numbers, and no containers."""
    kinds = set(map(type, value)) if len(value) >= _MANY else set()
    return (kinds == {str} or kinds == {int}) and are_leaves(value.values())


def _table(value: Mapping[Any, Any]) -> Any:
    return [_apart(value), list(value.values())] if _is_table(value) else NotImplemented


def _build_table(parts: Any) -> dict[Any, Any]:
    keys, values = _list(parts)
    return dict(zip(_distinct(keys), _list(values), strict=True))


def _pairs(value: Mapping[Any, Any]) -> Any:
    if _is_table(value):
        return dict(value)
    return [list(pair) for pair in zip(_apart(value), value.values(), strict=True)]


def _state_dict(value: OrderedDict[Any, Any]) -> Any:
    """Return the pairs, and the versions of modules' states that torch keeps beside them."""
    noted = vars(value)
    if not noted.get(STATE_VERSIONS) or len(noted) > 1:
        return NotImplemented
    versions = noted[STATE_VERSIONS]
    if odd := [name for name, it in versions.items() if type(it.get("version", 0)) is not int]:
        raise ValueError(f"the version of the state of module {odd[0]!r} is no integer")
    short = {
        name: it["version"] if it.keys() == {"version"} else it for name, it in versions.items()
    }
    return [_pairs(value), short]


def _build_state_dict(parts: Any) -> dict[Any, Any]:
    pairs, versions = _list(parts)
    noted = {
        name: it if isinstance(it, dict) else {"version": it}
        for name, it in _dict(versions).items()
    }
    return with_versions(_dict(pairs), noted)


def _dict(parts: Any) -> dict[Any, Any]:
    if type(parts) is dict:
        return cast("dict[Any, Any]", parts)
    pairs = [(key, item) for key, item in _list(parts)]
    _distinct([key for key, _ in pairs])
    return dict(pairs)


def _apart(keys: Collection[Any]) -> list[Any]:
    """Return the keys as a list; refuse many keys of one hash."""
    if keys and max(Counter(map(hash, keys)).values()) > _MAX_SAME_HASH:
        raise ValueError(f"more than {_MAX_SAME_HASH} keys have one hash")
    return list(keys)


def _distinct(parts: Any) -> list[Any]:
    """Return keys that a hash table takes in linear time and without losing one."""
    keys = _apart(_list(parts))
    if len(set(keys)) != len(keys):
        raise ValueError("a key stands there twice")
    return keys


def _members(value: Collection[Any]) -> list[Any]:
    # The order of strings depends on the hash seed; the bytes of a checkpoint should not.
    return sorted(value) if set(map(type, value)) == {str} else _apart(value)


def _list(parts: Any) -> list[Any]:
    """Require a list, as was written: another iterable may never end."""
    if type(parts) is not list:
        raise TypeError(f"expected a list, found a {type(parts).__name__}")
    return cast("list[Any]", parts)


def _text(parts: Any) -> str:
    if type(parts) is not str:
        raise TypeError(f"expected text, found a {type(parts).__name__}")
    return parts


def _default_dict_parts(value: defaultdict[Any, Any]) -> Any:
    names = [name for name, factory in _FACTORIES.items() if factory is value.default_factory]
    if value.default_factory is not None and not names:
        return NotImplemented  # the user's code
    return [names[0] if names else None, _pairs(value)]


def _build_default_dict(parts: Any) -> defaultdict[Any, Any]:
    factory, pairs = parts
    return defaultdict(None if factory is None else _FACTORIES[_text(factory)], _dict(pairs))


def _datetime_parts(value: datetime.datetime) -> Any:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        return NotImplemented
    return [value.isoformat(), value.fold] if value.fold else value.isoformat()


def _build_datetime(parts: Any) -> datetime.datetime:
    text, fold = parts if type(parts) is list else (parts, 0)
    return datetime.datetime.fromisoformat(text).replace(fold=fold)


def _array_parts(value: np.ndarray[Any, Any]) -> Any:
    native = value.dtype.newbyteorder("=")
    return (
        torch.from_numpy(np.array(value, dtype=native, order="C"))
        if native.type in _NUMPY.values()
        else NotImplemented
    )


def _build_scalar(kind: type[np.generic], parts: Any) -> np.generic:
    # The limit is for numpy, which would put all digits into its error.
    if not isinstance(parts, (int, float, complex)) or (
        isinstance(parts, int) and parts.bit_length() > 64
    ):
        raise TypeError(f"expected a number of at most 64 bits, found a {type(parts).__name__}")
    return kind(parts)


def sparse_parts(value: torch.Tensor) -> Any:
    """Return the layout, the shape and the plain tensors of a sparse tensor."""
    value, coalesced = value.detach(), True
    if value.layout is torch.sparse_coo:
        parts, coalesced = [value._indices(), value._values()], value.is_coalesced()
    elif value.layout in _COMPRESSED_ROWS:
        parts = [value.crow_indices(), value.col_indices(), value.values()]
    elif value.layout in _COMPRESSED_COLUMNS:
        parts = [value.ccol_indices(), value.row_indices(), value.values()]
    else:
        return NotImplemented
    return [str(value.layout).removeprefix("torch."), list(value.shape), parts, coalesced]


def _build_sparse(parts: Any) -> torch.Tensor:
    layout, shape, tensors, coalesced = _list(parts)
    if not all(isinstance(tensor, torch.Tensor) for tensor in _list(tensors)):
        raise TypeError("expected the tensors of a sparse one")
    # A clone reads a lazy part from the disk.
    size, tensors = _build_size(shape), [tensor.clone() for tensor in tensors]
    if layout == "sparse_coo":
        indices, values = tensors
        return torch.sparse_coo_tensor(
            indices, values, size, is_coalesced=bool(coalesced), check_invariants=True
        )
    layouts = {
        str(it).removeprefix("torch."): it for it in (*_COMPRESSED_ROWS, *_COMPRESSED_COLUMNS)
    }
    compressed, plain, values = tensors
    found = layouts[_text(layout)]
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=found, check_invariants=True
    )


def _build_size(parts: Any) -> torch.Size:
    if not all(type(length) is int and _is_plain_scalar(length) for length in _list(parts)):
        raise TypeError("expected integers below 2**53")
    return torch.Size(parts)


def _bytes_parts(value: bytes) -> Any:
    small = len(value) < _DATA_NBYTES
    return base64.b64encode(value).decode() if small else _bytes_as_tensor(value)


def _bytes_as_tensor(value: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy())


def _build_bytes(parts: Any) -> bytes:
    if isinstance(parts, torch.Tensor):
        return parts.numpy().tobytes()
    return base64.b64decode(_text(parts), validate=True)


def _numbers(value: list[Any]) -> Any:
    """Return a long list of floats, or of 64-bit integers, as a tensor."""
    kind = type(value[0]) if len(value) >= _MANY else None
    if kind not in (int, float) or set(map(type, value)) != {kind}:
        return NotImplemented
    try:
        return torch.from_numpy(np.array(value, dtype=np.int64 if kind is int else np.float64))
    except OverflowError:
        return NotImplemented


def _texts(value: list[Any]) -> Any:
    """Return a list of much text as its letters, and the length of each text in letters."""
    if not value or set(map(type, value)) != {str}:
        return NotImplemented
    lengths = np.fromiter(map(len, value), dtype=np.int64, count=len(value))
    if len(value) < _MANY and lengths.sum() < _DATA_NBYTES:
        return NotImplemented
    lengths = lengths.astype(np.min_scalar_type(lengths.max()))
    letters = "".join(value).encode("utf-8", "surrogatepass")
    return [_bytes_as_tensor(letters), torch.from_numpy(lengths)]


def _build_texts(parts: Any) -> list[str]:
    letters, lengths = (part.numpy() for part in _list(parts))
    text = letters.tobytes().decode("utf-8", "surrogatepass")
    if lengths.dtype.kind not in "iu" or (lengths > len(text)).any() or (lengths < 0).any():
        raise ValueError("expected the lengths of texts")
    stops = np.cumsum(lengths, dtype=np.int64).tolist()
    if stops[-1:] != [len(text)]:
        raise ValueError("their lengths are not that of all the text")
    return [text[start:stop] for start, stop in pairwise([0, *stops])]


def _build_str(parts: Any) -> str:
    return bytes.fromhex(parts).decode("utf-8", "surrogatepass")


def _bytes(parts: Any) -> bytes:
    if type(parts) is not bytes:
        raise TypeError(f"expected bytes, found a {type(parts).__name__}")
    return parts


def _build_deque(parts: Any) -> deque[Any]:
    items, limit = _list(parts)
    return deque(_list(items), limit)


def _build_namespace(parts: Any) -> Namespace:
    namespace = Namespace()
    vars(namespace).update({_text(key): item for key, item in parts.items()})
    return namespace


_FACTORIES: dict[str, type] = {
    it.__name__: it for it in (dict, list, set, tuple, int, float, bool, str)
}
_DTYPES = {
    str(it).removeprefix("torch."): it for it in vars(torch).values() if isinstance(it, torch.dtype)
}
_NUMPY: dict[str, type[np.generic]] = {
    np.dtype(name).name: np.dtype(name).type
    for name in [
        "bool",
        "i1",
        "i2",
        "i4",
        "i8",
        "u1",
        "u2",
        "u4",
        "u8",
        "f2",
        "f4",
        "f8",
        "c8",
        "c16",
    ]
}


_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)

_BUILT_IN: tuple[tuple[type, str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (Opaque, "opaque", lambda it: it.type_name, lambda parts: Opaque(_text(parts))),
    (str, "str", lambda it: it.encode("utf-8", "surrogatepass").hex(), _build_str),
    (int, "int", hex, lambda parts: int(_text(parts), 16)),  # in linear time, unlike decimal digits
    (
        float,
        "float",
        lambda it: struct.pack(">d", it).hex(),
        lambda parts: struct.unpack(">d", bytes.fromhex(parts))[0],
    ),
    (complex, "complex", lambda it: [it.real, it.imag], lambda parts: complex(*_list(parts))),
    (bytes, "bytes", _bytes_parts, _build_bytes),
    (bytearray, "bytearray", bytes, lambda parts: bytearray(_bytes(parts))),
    (deque, "deque", lambda it: [list(it), it.maxlen], _build_deque),
    # Of a tensor on the disk, numpy makes the list without a look at each number.
    (list, "numbers", _numbers, lambda parts: parts.numpy().tolist()),
    (list, "strings", _texts, _build_texts),
    (tuple, "tuple", list, lambda parts: tuple(_list(parts))),
    (set, "set", _members, lambda parts: set(_distinct(parts))),
    (frozenset, "frozenset", _members, lambda parts: frozenset(_distinct(parts))),
    (dict, "table", _table, _build_table),
    (dict, "dict", _pairs, _dict),
    (OrderedDict, "state_dict", _state_dict, _build_state_dict),
    (OrderedDict, "ordered_dict", _pairs, lambda parts: OrderedDict(_dict(parts))),
    (Counter, "counter", _pairs, lambda parts: Counter(_dict(parts))),
    (defaultdict, "default_dict", _default_dict_parts, _build_default_dict),
    (Namespace, "namespace", vars, _build_namespace),
    (type(pathlib.Path()), "path", str, lambda parts: pathlib.Path(_text(parts))),
    (
        datetime.timedelta,
        "timedelta",
        lambda it: [it.days, it.seconds, it.microseconds],
        lambda parts: datetime.timedelta(*_list(parts)),
    ),
    (datetime.date, "date", str, lambda parts: datetime.date.fromisoformat(_text(parts))),
    (datetime.datetime, "datetime", _datetime_parts, _build_datetime),
    (
        torch.dtype,
        "dtype",
        lambda it: str(it).removeprefix("torch."),
        lambda parts: _DTYPES[_text(parts)],
    ),
    (torch.device, "device", str, lambda parts: torch.device(_text(parts))),
    (torch.Size, "size", list, _build_size),
    (torch.Tensor, "sparse", sparse_parts, _build_sparse),
    (np.ndarray, "array", _array_parts, lambda parts: parts.detach().cpu().numpy()),
    *(
        (kind, f"numpy.{name}", lambda it: it.item(), partial(_build_scalar, kind))
        for name, kind in _NUMPY.items()
    ),
)
CODECS: tuple[Codec, ...] = tuple(
    Codec(kind=kind, tag=tag, parts=parts, build=build) for kind, tag, parts, build in _BUILT_IN
)
"""Codecs of every version of the format; a tag never changes its meaning."""
