"""Rules: translation of one argument of another strategy, and the note about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardeddp.errors import closest, did_you_mean
from shardeddp.translation.calls import Expression, has_expression


@dataclass(frozen=True, kw_only=True)
class Note:
    """Remark on the translation of one key."""

    key: str
    text: str
    lost: bool = False
    """True if the setting has no counterpart, so that the run will differ."""


@dataclass(kw_only=True)
class Translation:
    """Translated arguments of ShardedDP, with notes."""

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the Trainer that belong to the translation."""

    notes: list[Note] = field(default_factory=list[Note])
    unneeded: list[str] = field(default_factory=list[str])
    """Keys of settings that always hold here, or that tune parts this engine does not have."""

    @property
    def loses(self) -> bool:
        """True if a setting has no counterpart."""
        return any(note.lost for note in self.notes)

    def note(self, key: str, text: str) -> None:
        """Add a note on a change of meaning."""
        self.notes.append(Note(key=key, text=text))

    def lose(self, key: str, text: str) -> None:
        """Add a note on a setting without counterpart."""
        self.notes.append(Note(key=key, text=text, lost=True))


Apply = Callable[[Translation, str, Any], None]
"""Function that adds a key and its value to a translation."""


@dataclass(frozen=True)
class Rule:
    """Rule that adds a key and its value to a translation; also a decorator of a function."""

    apply: Apply
    any_value: bool = False
    """True if the function accepts any value, expressions included."""

    needed: bool | None = None
    """True if the key always counts as needed, False if never; None: if it has an effect."""


any_value = partial(Rule, any_value=True)
"""Decorator for rules that accept expressions as well."""

UNNEEDED = Rule(lambda made, key, value: None, any_value=True, needed=False)
"""Rule for settings that always hold here, or that tune parts this engine does not have."""


def takes(expected: str, *types: type) -> Callable[[Apply], Rule]:
    """Return a decorator for rules that accept only some types; None has no effect."""

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
    """Add a note on a value of the wrong kind; None has no effect."""
    if isinstance(value, Expression):
        made.lose(key, f"only the running program knows {value}: expected {expected}")
    elif value is not None:
        made.lose(key, f"{value!r} is not understood: expected {expected}")


def always(text: str) -> Rule:
    """Make a rule for a switch that is always on here."""

    @Rule
    def rule(made: Translation, key: str, value: Any) -> None:
        if value not in (None, True):
            made.note(key, text)

    return rule


def lost(text: str, *, unless: Sequence[Any] = (None, False)) -> Rule:
    """Make a rule for a setting without counterpart; values in ``unless`` have no effect."""

    @any_value
    def rule(made: Translation, key: str, value: Any) -> None:
        if not any(value is harmless or value == harmless for harmless in unless):
            made.lose(key, text)

    return rule


_LAST = ("device_mesh", "mesh", "mics_shard_size", "zero_hpz_partition_size")
"""Keys to apply last, because they depend on the sharding strategy."""


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names of arguments into the order in which rules are applied."""
    return sorted(names, key=_LAST.__contains__)


def apply_rules(
    made: Translation, rules: Mapping[str, Rule], arguments: Mapping[str, Any], prefix: str = ""
) -> None:
    """Apply the rule of each key; note keys without a rule, or with a failing rule, as lost."""
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
            except Exception as error:  # noqa: BLE001 - a file may hold anything; it is noted
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
    """Return the end of a message on an unknown name, with the closest known one."""
    return f"not known{did_you_mean(closest(name, known))}"
