"""Rules: what one argument of another strategy becomes, and what is said about it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardeddp.translation.calls import Expression, has_expression


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a reader has to know about one key."""

    key: str
    text: str
    lost: bool = False
    """Whether something that was asked for cannot be had, so the run will not be the same."""


@dataclass(kw_only=True)
class Translation:
    """Arguments of ShardedDP, and what to know about them."""

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the Trainer that go with them."""

    notes: list[Note] = field(default_factory=list[Note])
    unneeded: list[str] = field(default_factory=list[str])
    """Keys that ask for what is always so, or tune parts that are not there."""

    @property
    def loses(self) -> bool:
        """Whether something that was asked for cannot be had."""
        return any(note.lost for note in self.notes)

    def note(self, key: str, text: str) -> None:
        """Say how a key changes its meaning."""
        self.notes.append(Note(key=key, text=text))

    def lose(self, key: str, text: str) -> None:
        """Say that something cannot be had."""
        self.notes.append(Note(key=key, text=text, lost=True))


Apply = Callable[[Translation, str, Any], None]
"""Takes a key and its value into a translation."""


@dataclass(frozen=True)
class Rule:
    """How a key and its value are taken into a translation; as a decorator, of a function."""

    apply: Apply
    any_value: bool = False
    """Whether it passes values on without a look at them, or looks for expressions itself."""

    needed: bool | None = None
    """Whether its key is needed whatever the value; None: where it changes or says something."""


any_value = partial(Rule, any_value=True)
"""Decorator that makes a rule of a function which takes expressions as well."""

UNNEEDED = Rule(lambda made, key, value: None, any_value=True, needed=False)
"""For keys that ask for what is always so, or tune parts that are not there."""


def takes(expected: str, *types: type) -> Callable[[Apply], Rule]:
    """Decorator that makes a rule for values of some types alone; None asks for nothing."""

    def checked(apply: Apply) -> Rule:
        @any_value
        def rule(made: Translation, key: str, value: Any) -> None:
            if type(value) in types:
                apply(made, key, value)
            else:
                not_understood(made, key, value, expected)

        return rule

    return checked


is_flag = takes("true or false", bool)


def not_understood(made: Translation, key: str, value: Any, expected: str) -> None:
    """Lose a value of another kind; None asks for nothing."""
    if isinstance(value, Expression):
        made.lose(key, f"only the running program knows {value}: expected {expected}")
    elif value is not None:
        made.lose(key, f"{value!r} is not understood: expected {expected}")


def always(text: str) -> Rule:
    """A switch that is always on here."""

    @Rule
    def rule(made: Translation, key: str, value: Any) -> None:
        if value not in (None, True):
            made.note(key, text)

    return rule


def lost(text: str, *, unless: Sequence[Any] = (None, False)) -> Rule:
    """Something that cannot be had, unless its value asks for nothing."""

    @any_value
    def rule(made: Translation, key: str, value: Any) -> None:
        if not any(value is harmless or value == harmless for harmless in unless):
            made.lose(key, text)

    return rule


_LAST = ("device_mesh", "mesh", "mics_shard_size", "zero_hpz_partition_size")
"""Keys that are looked at when the sharding strategy is known."""


def in_order(names: Iterable[str]) -> list[str]:
    """Names of arguments in the order in which they are taken."""
    return sorted(names, key=_LAST.__contains__)


def apply_rules(
    made: Translation, rules: Mapping[str, Rule], arguments: Mapping[str, Any], prefix: str = ""
) -> None:
    """Take each key by its rule; what has none, or surprises it, is lost.

    Args:
        made: What is added to.
        rules: By key.
        arguments: Values by key, as a file has them.
        prefix: Of keys in lines about them.
    """
    for key in in_order(arguments):
        rule, value = rules.get(key), arguments[key]
        if rule is None:
            near = did_you_mean(closest(key, rules))
            made.lose(f"{prefix}{key}", f"no counterpart is known{near}")
            continue
        before = len(made.notes)
        former = dict(made.options), dict(made.trainer), [*made.unneeded]
        if has_expression(value) and not rule.any_value:
            made.lose(key, f"only the running program knows {value!r}")
        else:
            try:
                rule.apply(made, key, value)
            except Exception as error:  # noqa: BLE001 - files hold anything, and a line says so
                made.options, made.trainer, made.unneeded = former
                made.lose(key, f"{value!r} is not understood: {error}")
        said = len(made.notes) > before
        if not (said or rule.needed) and former == (made.options, made.trainer, made.unneeded):
            made.unneeded.append(key)
        made.notes[before:] = [
            dataclasses.replace(note, key=f"{prefix}{note.key}")
            if not note.key.startswith(prefix)
            else note
            for note in made.notes[before:]
        ]


def not_known(name: str, known: Iterable[str]) -> str:
    """Text about a name that is none of the known ones, with the nearest of them."""
    return f"not known{did_you_mean(closest(name, known))}"


def did_you_mean(names: Iterable[str]) -> str:
    """The end of a line about a name that is not known."""
    return "".join(f"; did you mean {name}?" for name in names)


def closest(name: object, known: Iterable[str]) -> list[str]:
    """The known name that is most like another one, if any is."""
    return difflib.get_close_matches(str(name), list(known), n=1)
