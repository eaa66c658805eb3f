"""State trees of every type that a checkpoint can hold, and what it takes to see that they came back as they were."""

import datetime
import json
import math
import pathlib
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict

from shardeddp.checkpoint.state_codec import Opaque, decode, dict_codec, encode
from shardeddp.checkpoint.strict_json import MAX_INTEGER, parse_json

MORE = [dict_codec(AttributeDict, "attribute_dict")]


class Store:
    """Tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, tensor: torch.Tensor) -> str:
        name = f"extra.{len(self.tensors)}"
        self.tensors[name] = tensor
        return name


def through_json(tree: Any) -> Any:
    store = Store()
    text = json.dumps(encode(tree, store.put, MORE), allow_nan=False)
    return decode(parse_json(text.encode(), "state.json"), store.tensors.__getitem__, MORE)


def picture(value: Any) -> Any:
    """A value that is equal for two trees only if they have the same types and the same bits."""
    kind = type(value).__qualname__
    match value:
        case float() | np.generic():
            return kind, np.asarray(value).tobytes()
        case complex():
            return kind, picture(value.real), picture(value.imag)
        case torch.Tensor():
            plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            bits = plain.view(torch.uint8).numpy().tobytes()
            return kind, str(value.dtype), tuple(value.shape), bits
        case np.ndarray():
            return kind, str(value.dtype), tuple(value.shape), value.tobytes()
        case dict():
            factory = value.default_factory if isinstance(value, defaultdict) else None
            return kind, factory, [(picture(key), picture(item)) for key, item in value.items()]
        case deque():
            return kind, value.maxlen, [picture(item) for item in value]
        case list() | tuple():
            return kind, [picture(item) for item in value]
        case set() | frozenset():
            return kind, sorted(repr(picture(item)) for item in value)
        case Namespace():
            return kind, picture(vars(value))
        case Opaque():
            return kind, value.type_name
        case int():
            return kind, hex(value)
    return kind, repr(value)


WORDS = [f"word {number}" for number in range(600)]
MANY: dict[str, Any] = {
    "words": WORDS,
    "a vocabulary": {word: number for number, word in enumerate(WORDS)},
    "an inverted one": dict(enumerate(WORDS)),
    "letters": ["", "\u00fc", "\U0001f600", "\ud83d", "\ude00", "\x00", "$"] * 100,
    "nothing but empty text": [""] * 600,
    "a long text among short ones": ["a", "b" * 70_000, ""],
    "keys like tags": {f"${word}": True for word in WORDS},
    "mixed values": {word: (1, 2.5, True, None, "x", b"y", 2j)[len(word) % 7] for word in WORDS},
    "large keys": {2**70 + number: -number for number in range(600)},
    "tuple": tuple(WORDS),
    "set": set(WORDS),
    "set of numbers": frozenset(range(-300, 300)),
    "ordered": OrderedDict.fromkeys(WORDS, 0.5),
    "counter": Counter(WORDS),
    "default": defaultdict(int, dict.fromkeys(WORDS, 3)),
}
"""Trees of many words and numbers, which tensors hold."""

EXAMPLES: dict[str, Any] = {
    **{f"many: {name}": tree for name, tree in MANY.items()},
    "true among many numbers": {**dict.fromkeys(range(2, 600), 1), True: 1},
    "many containers": {word: [1] for word in WORDS},
    "edge floats": [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 0.1],
    "edge integers": [MAX_INTEGER, MAX_INTEGER + 1, -MAX_INTEGER - 1, -(2**63), 10**6000],
    "complex": [1 + 2j, complex(-0.0, math.inf)],
    "text": [
        "",
        "$",
        "$tuple",
        "\x00",
        "\u00fc",
        "\U0001f600",
        "\ud800",
        "\ud83d\ude00",
        "name\udcff",
    ],
    "bytes": [b"", bytes(range(256))],
    "more containers": [deque([1, (2,)], maxlen=3), deque(), bytearray(b"ab" * 3000), bytearray()],
    "a date": datetime.date(2024, 2, 29),
    "tuples": [(), ((),), (1, (2, [3]))],
    "keys": {1: "a", "1": "b", None: {}, (1, 2): 3, 2.5: [], True is False: 1},
    "keys like tags": [{"$tuple": [1]}, {"$x": 1, "y": 2}, {"$": 0}, {"": 0}, {"a$": 1}],
    "a lone half as a key": {"\udc80": 1},
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "default": [
        defaultdict(list, a=[1]),
        defaultdict(dict),
        defaultdict(None, {1: 2}),
        defaultdict(int, {2: 3}),
    ],
    "counter": Counter({30: 1, 80: 2}),
    "sets": [set(), {1, "a", (2, 3)}, frozenset({frozenset({1}), b"x"})],
    "dtypes": [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool],
    "devices": [torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")],
    "sizes": [torch.Size([]), torch.Size([2, 0, 3])],
    "paths": [Path("a/b"), Path(), pathlib.Path("/x/..")],
    "times": [
        datetime.timedelta(days=-1, microseconds=3),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1),
    ],
    "a zone": datetime.datetime(
        2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-5.5))
    ),
    "numpy numbers": [
        np.float16(0.1),
        np.float32("inf"),
        np.float64(-0.0),
        np.int64(-(2**63)),
        np.uint8(255),
    ],
    "more numpy numbers": [
        np.bool_(False),
        np.complex64(1j),
        np.complex128(1 - 2j),
        np.uint64(2**64 - 1),
    ],
    "arrays": [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.zeros((0, 2), np.float16),
        np.array(3.5),
        np.ones(2) > 0,
    ],
    "foreign arrays": np.arange(6).reshape(2, 3).T,
    "tensors": [
        torch.arange(6).reshape(2, 3).float(),
        {"deep": (torch.tensor(1j), torch.empty(0))},
    ],
    "attributes": AttributeDict(lr=0.1, deep=AttributeDict(a=(1,))),
    "namespace": Namespace(lr=0.1, betas=(0.9, 0.95), name="x"),
    "the same twice": [[shared := [1, 2], shared], {"a": shared}],
}
