"""Calls: objects of other libraries by the calls that make them, and Python code of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import partial
from types import EllipsisType, FunctionType, NoneType
from typing import Any, cast


class Expression(str):
    """Python source of a value that is unknown before the program runs."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call that constructs an object."""

    path: str
    """Class or function, as written in the source."""

    positional: tuple[Any, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    written: str = ""
    """Original source of the call; empty if it is to be written from path and arguments."""

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.path.rpartition(".")[2]

    @property
    def named(self) -> dict[str, Any]:
        """All arguments by name; positional ones get the names of the class's signature."""
        places = _PLACES.get(self.name, ())
        extra = (f"argument {place + 1}" for place in range(len(places), len(self.positional)))
        return {**dict(zip([*places, *extra], self.positional, strict=False)), **self.arguments}

    def get(self, name: str) -> Any:
        """Return an argument; None if it is missing."""
        return self.named.get(name)

    def __repr__(self) -> str:
        if self.written:
            return self.written
        shown = [
            *map(repr, self.positional),
            *(f"{key}={it!r}" for key, it in self.arguments.items()),
        ]
        return f"{self.path}({', '.join(shown)})"


_PLACES: dict[str, tuple[str, ...]] = {
    "MixedPrecision": ("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads",
                       "cast_forward_inputs", "cast_root_forward_inputs",
                       "_module_classes_to_ignore"),
    "MixedPrecisionPolicy": ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
    "CPUOffload": ("offload_params",),
    "CPUOffloadPolicy": ("pin_memory",),
    "ModuleWrapPolicy": ("module_classes",),
    "CustomPolicy": ("lambda_fn",),
    "init_device_mesh": ("device_type", "mesh_shape"),
    "timedelta": ("days", "seconds", "microseconds", "milliseconds", "minutes", "hours", "weeks"),
}  # fmt: skip
"""Positional parameters of other libraries' classes, in order."""


def described(value: Any) -> Any:
    """Convert a value of a running program to the form in which files are read.

    Enumeration members become their names; partials and dataclass instances become a :class:`Call`.
    Other values, such as classes, functions and dtypes, are returned unchanged.
    """
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, partial):
        made = cast("partial[Any]", value)
        arguments = {key: described(it) for key, it in made.keywords.items()}
        return Call(
            path="functools.partial", positional=(made.func, *made.args), arguments=arguments
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return Call(
            path=type(value).__name__,
            arguments={
                each.name: described(getattr(value, each.name))
                for each in dataclasses.fields(value)
                if each.init and getattr(value, each.name) not in (None, each.default)
            },
        )
    return value


def has_expression(value: Any) -> bool:
    """True if a value contains an :class:`Expression`."""
    if isinstance(value, Call):
        return has_expression(value.named)
    if isinstance(value, Mapping):
        return any(map(has_expression, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_expression, cast("Sequence[Any]", value)))
    return isinstance(value, Expression)


class OpaqueValueError(Exception):
    """Value of a running program that cannot be written as code."""


def python_code(value: Any, quote: Callable[[str], str] = repr) -> str:
    """Write a value as Python code; names in it are assumed to be imported.

    Raises:
        OpaqueValueError: The value cannot be written as code.
    """
    write = partial(python_code, quote=quote)
    if isinstance(value, Expression) or (isinstance(value, Call) and value.written):
        return str(value)
    if isinstance(value, Call):
        pairs = (f"{key}={write(it)}" for key, it in value.arguments.items())
        return f"{value.name}({', '.join([*map(write, value.positional), *pairs])})"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, timedelta):
        return repr(value.total_seconds())
    if isinstance(known := described(value), Call):
        return write(known)
    if type(value).__module__.startswith("shardeddp.wrap."):  # policies
        return write(Call(path=type(value).__name__, arguments=vars(value)))
    if isinstance(value, (type, FunctionType)) and value.__name__.isidentifier():
        return value.__name__
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value).items()
        return f"{{{', '.join(f'{write(key)}: {write(it)}' for key, it in entries)}}}"
    if isinstance(value, (list, tuple, set, frozenset)):
        inner = ", ".join(map(write, cast("Iterable[Any]", value)))
        if isinstance(value, tuple):
            return f"({inner},)" if inner else "()"
        return f"{{{inner}}}" if isinstance(value, (set, frozenset)) and inner else f"[{inner}]"
    plain = isinstance(value, (int, float, complex, bytes, NoneType, EllipsisType))
    if plain or type(value).__name__ == "dtype":
        return repr(value)
    raise OpaqueValueError
