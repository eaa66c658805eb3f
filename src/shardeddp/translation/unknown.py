"""Unknown options: the error about arguments that ShardedDP does not have, with the line to write."""

from __future__ import annotations

# ruff: noqa: SIM905  # tables of words are read as text
from collections.abc import Iterable, Mapping
from typing import Any

from shardeddp.errors import closest, did_you_mean
from shardeddp.translation.calls import OpaqueValueError, described, python_code
from shardeddp.translation.rules import Translation, apply_rules, in_order
from shardeddp.translation.strategies import RULES, complete


def explain_unknown(names: Iterable[str], given: Mapping[str, Any], known: Iterable[str]) -> str:
    """Return the error message for arguments that ShardedDP does not have."""
    known, lines, foreign = list(known), list[str](), dict[str, str]()
    own = {key: it for key, it in given.items() if key in known}
    for name in names:
        owner = _owner(name)
        if name in _TRAINERS:
            lines.append(
                f"{name}: it belongs to the Trainer: Trainer({name}={_or_own(given[name])})"
            )
        elif owner is None:
            near = closest(name, known)
            theirs = [] if near else [f"{it} (of {_owner(it)})" for it in closest(name, _THEIRS)]
            lines.append(f"{name}: not known{did_you_mean([*near, *theirs])}")
            own |= {it: given[name] for it in near if it not in given}
        else:
            foreign[name] = owner
    made = Translation(options=own)
    for name in in_order(foreign):
        owner, before, options = foreign[name], len(made.notes), dict(made.options)
        apply_rules(made, RULES[owner], {name: described(given[name])})
        changed = {key: it for key, it in made.options.items() if options.get(key) is not it}
        said = "".join(f"; {it.text}" for it in made.notes[before:])
        if changed:
            said = f"write {_line(changed)}{said}"
            said += "".join(
                f"; {key}={_or_own(options[key])} is given as well: keep one of the two"
                for key in changed
                if key in options and options[key] != changed[key]
            )
            lines.append(f"{name} (of {owner}): {said}")
        else:
            lines.append(f"{name} (of {owner}): leave it out{said or '; nothing is needed for it'}")
    before = len(made.notes)
    complete(made)
    lines += [f"{it.key}: leave it out; {it.text}" for it in made.notes[before:]]
    listed = "".join(f"\n  {text}" for text in lines)
    line = _line(made.options, "ShardedDP({})")
    return f"ShardedDP has no such arguments:{listed}\nThe line to write: {line}"


_TRAINERS = "precision devices num_nodes gradient_clip_val accumulate_grad_batches".split()
"""Arguments of Lightning's Trainer that are often given to a strategy."""

_THEIRS = frozenset(name for rules in RULES.values() for name in rules)


def _owner(name: str) -> str | None:
    """Return the other strategy that has an argument; None if there is none."""
    return next((each for each, rules in RULES.items() if name in rules), None)


def _line(options: Mapping[str, Any], around: str = "{}") -> str:
    """Write options as code; list the names of options with values that cannot be written."""
    shown = {key: _or_own(it) for key, it in options.items()}
    line = ", ".join(f"{key}={text}" for key, text in shown.items() if text != _OWN)
    left = [key for key, text in shown.items() if text == _OWN]
    return around.format(line) + "".join(f", and your own {key}=" for key in left)


_OWN = "..."


def _or_own(value: Any) -> str:
    try:
        return python_code(value)
    except OpaqueValueError:
        return _OWN
