"""The form of a state: all of it but the elements of tensors and the values of numbers, as JSON that ranks exchange.

Numbers are left out because an optimizer that counts in Python has new ones in every step. Where a number of another
rank is not known, a :class:`NumberElsewhere` stands in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

Number = bool | int | float


def form_of(value: Any, optimizer: str) -> Any:
    """The form of a state, or of a part of one.

    Args:
        value: The state.
        optimizer: Name of whose it is.

    Raises:
        TypeError: It holds something that other ranks cannot be told of.
    """
    if isinstance(value, torch.Tensor):
        return ["tensor", [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]]
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return ["dict", [[key, form_of(item, optimizer)] for key, item in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [form_of(item, optimizer) for item in value]]
    if isinstance(value, Number):
        return ["number", None]
    if value is None or isinstance(value, str):
        return ["value", value]
    raise TypeError(
        f"{optimizer} keeps a {type(value).__name__} as a state of a parameter: expected numbers, text, tensors and "
        f"lists, tuples and dicts (by text or number) of them, which other ranks can be told of. Say "
        f"ShardedDP(optimizer_scope={{'{optimizer}': 'model'}}) to have it step on all ranks"
    )


def has_number(form: Any) -> bool:
    """Whether there is a number in states of a form."""
    kind, content = form
    if kind == "dict":
        return any(has_number(item) for _, item in content)
    return kind == "number" or (kind in ("list", "tuple") and any(map(has_number, content)))


def numbers_in(value: Any, path: str = "") -> Iterator[tuple[str, Number]]:
    """The numbers of a state, by path: the keys and places on the way to one, each behind a dot."""
    if isinstance(value, Number):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from numbers_in(item, f"{path}.{key}")


class NumberElsewhere:
    """A number among the states of a parameter that another rank owns, which this one does not know.

    Whatever is asked of it raises an error: no answer would be right.

    Args:
        fqn: Of the parameter.
        path: Of the number among its states.
    """

    def __init__(self, fqn: str, path: str) -> None:
        self._fqn = fqn
        self.path = path

    def __repr__(self) -> str:
        return f"<{self.path.removeprefix('.')} of {self._fqn}: a number of another rank>"

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"{self.path.removeprefix('.')!r}, a state of {self._fqn}, is a number that the rank which steps this "
            f"parameter counts in Python, and that other ranks have not been told since: call optimizer.state_dict() "
            f"on all ranks, after which all know such numbers until the next step"
        )

    __hash__ = object.__hash__
    __bool__ = __int__ = __float__ = __index__ = __format__ = __reduce_ex__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __neg__ = __pos__ = __abs__ = __round__ = __invert__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
