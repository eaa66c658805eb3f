"""States of units, of their buffers and of the model: changed by verbs alone, and documented as they are checked."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from torch import nn

from shardeddp.engine import runtime, states
from shardeddp.engine.flat_group import FlatGroup
from shardeddp.engine.order import OrderAgreement, PassOrder
from shardeddp.engine.progress import UnitProgress
from shardeddp.engine.runtime import Runtime
from shardeddp.engine.states import (
    BUFFER_VERBS,
    EVENTS,
    FORESIGHT_EVENTS,
    ORDER_EVENTS,
    UNIT_VERBS,
    BufferState,
    Phase,
)
from shardeddp.engine.unit import Unit
from training import Sharding
from world import on_ranks

ENGINE = Path(runtime.__file__).parent
CHANGING = {"add", "append", "clear", "discard", "pop", "remove", "update"}  # of sets and lists


def documented() -> Iterator[list[str]]:
    """Rows of the table: states, verb or event, next state, callers."""
    lines = inspect.getdoc(states).splitlines()  # type: ignore[union-attr]
    bars = [at for at, line in enumerate(lines) if line.startswith("====")]
    starts = [
        0,
        *(at + 2 for at in range(len(lines[bars[0]])) if lines[bars[0]][at : at + 2] == "  "),
    ]
    rows: list[list[str]] = []
    for line in lines[bars[1] + 1 : bars[2]]:
        cells = [
            line[start:stop].strip()
            for start, stop in zip(starts, [*starts[1:], None], strict=True)
        ]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1][-1] += f" {cells[-1]}"
    yield from rows


def test_the_table_of_states_says_what_is_checked() -> None:
    checked = {
        verb: transition
        for table in (UNIT_VERBS, BUFFER_VERBS, EVENTS, ORDER_EVENTS, FORESIGHT_EVENTS)
        for verb, transition in table.items()
    }
    found = {verb: (sources, target) for sources, verb, target, _ in documented()}
    assert found == {
        verb: (
            "any"
            if sources in (set(Phase), set(BufferState))
            else ", ".join(sorted(it.value for it in sources)),
            target.value,
        )
        for verb, (sources, target) in checked.items()
    }


def test_the_callers_in_the_table_are_all_there_are() -> None:
    for _, verb, _, callers in documented():
        by_owner: dict[type, str] = {
            Runtime: f"unit.{verb}(",
            OrderAgreement: f"unit.{verb}(",
            Unit: f"self.{verb}(",
        }
        if verb in EVENTS:
            by_owner = {Runtime: f'_enter_phase("{verb}")'}
        elif verb in ORDER_EVENTS or verb in FORESIGHT_EVENTS:
            by_owner = {PassOrder: f'"{verb}"', OrderAgreement: f'.enter("{verb}")'}
        elif verb in BUFFER_VERBS:
            by_owner = {FlatGroup: f"self.buffer.{verb}("}
        calling = {
            name
            for owner, call in by_owner.items()
            for name, method in inspect.getmembers(owner, inspect.isfunction)
            if call in inspect.getsource(method)
        }
        assert {each.strip() for each in callers.split(",")} == calling, verb


def writes(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Attributes of these names that a file assigns, or changes in place."""
    for node in ast.walk(tree):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            targets = [*node.targets]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func.value] if node.func.attr in CHANGING else []
        for target in targets:
            for each in ast.walk(target):
                if (
                    isinstance(each, ast.Attribute)
                    and each.attr in names
                    and "progress" in ast.unparse(each.value)
                ):
                    yield ast.unparse(each)


def test_no_other_file_writes_to_the_progress_of_a_unit() -> None:
    names = {field.name for field in fields(UnitProgress)}
    found = {
        path.name: [*writes(ast.parse(path.read_text()), names)]
        for path in ENGINE.glob("*.py")
        if path.name != "progress.py"
    }
    assert {name: each for name, each in found.items() if each} == {}
    assert [*writes(ast.parse("progress.reached = progress.active = True"), names)] == [
        "progress.reached",
        "progress.active",
    ]
    assert [*writes(ast.parse("self._root.progress.arrived.add(2)"), names)]


@pytest.mark.parametrize("verb", ["bind", "unbind"])
@on_ranks(2)
def test_verbs_of_a_buffer_without_memory_are_refused(verb: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    buffer = Sharding(units=("*",)).apply(model).progresses[1].unit.groups[0].buffer
    with pytest.raises(RuntimeError, match=rf"{verb} of the buffer of 0.weight.*found it rel"):
        getattr(buffer, verb)()
    buffer.allocate()
    getattr(buffer, verb)()
    assert buffer.state is BUFFER_VERBS[verb][1]
    buffer.release()
    assert buffer.state is BufferState.RELEASED and buffer.flat is None
