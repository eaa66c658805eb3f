"""Private names of Lightning are as they are expected in the installed release, and a change is named."""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardeddp.errors import ConfigurationError
from shardeddp.lightning import private
from shardeddp.lightning.api import NAMESPACE, NEEDS, STANDALONE, UNIFIED, named
from shardeddp.lightning.private import RELIANCES, PrivateName, check_lightning

ROOT = Path(__file__).resolve().parents[2]


class Stock:
    """In the place of a class of Lightning."""

    declared: int

    def __init__(self, flag: bool) -> None:
        self._assigned = 1
        if flag:
            self._sometimes: int = 2

    def method(self, first: int, second: int = 0, *rest: int, **named: int) -> None: ...

    @staticmethod
    def static(first: int) -> None: ...


class Derived(Stock):
    def __init__(self) -> None:
        super().__init__(False)


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, Any] = {
        "of:Stock": Stock,
        "of:Derived": Derived,
        "of": SimpleNamespace(__name__="a.of", f=len),
    }
    monkeypatch.setattr(private, "named", lambda path, namespace: parts[path])


def problem(
    owner: str, name: str, parameters: str | None = None, replaced: bool = False
) -> str | None:
    return PrivateName(
        owner=f"of:{owner}", name=name, parameters=parameters, replaced=replaced
    ).problem()


def test_the_trainer_calls_setup_hooks_after_the_barrier_that_is_relied_on() -> None:
    called = inspect.getsource(named("pytorch.trainer.call", NAMESPACE)._call_setup_hook)
    assert -1 < called.find(f'barrier("{private.BEFORE_SETUP}")') < called.find('"setup"')


@pytest.mark.parametrize("namespace", [UNIFIED, STANDALONE])
def test_the_installed_release_has_every_name(namespace: str) -> None:
    if namespace != NAMESPACE:
        pytest.importorskip(namespace, reason="the other package is not installed")
    assert [found for reliance in RELIANCES if (found := reliance.problem(namespace))] == []


def test_each_name_is_listed_once() -> None:
    keys = [(reliance.owner, reliance.name) for reliance in RELIANCES]
    assert len(set(keys)) == len(keys) > 40


@pytest.mark.parametrize("owner", ["Stock", "Derived"])
@pytest.mark.parametrize("name", ["_assigned", "_sometimes", "declared", "method"])
def test_an_attribute_may_be_assigned_by_a_constructor_or_declared(
    stock: None, owner: str, name: str
) -> None:
    assert problem(owner, name) is None


def test_a_lost_attribute_or_method_is_named(stock: None) -> None:
    assert problem("Derived", "_gone") == "Derived._gone: expected an attribute, found none"
    assert problem("Derived", "_gone", "first") == "Derived._gone: expected a method, found none"


@pytest.mark.parametrize("parameters", ["", "first", "first second"])
def test_a_method_may_have_further_parameters_with_defaults(stock: None, parameters: str) -> None:
    found = problem("Stock", "method", parameters)
    assert (found is None) == (parameters != "")


@pytest.mark.parametrize("parameters", ["", "first second", "other"])
def test_changed_parameters_are_named(stock: None, parameters: str) -> None:
    expected = ", ".join(parameters.split())
    assert (
        problem("Stock", "static", parameters)
        == f"Stock.static: expected ({expected}), found (first)"
    )


def test_a_method_that_is_replaced_has_exactly_the_parameters_of_the_replacement(
    stock: None,
) -> None:
    assert problem("Stock", "method", "first", replaced=True) is not None
    assert problem("Stock", "static", "first", replaced=True) is None


def test_an_error_names_change_and_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        PrivateName(
            owner="pytorch.trainer.connectors.signal_connector:_SignalConnector",
            name="_lost",
            parameters="",
        ),
        PrivateName(owner="pytorch.loops.lost:_Loop", name="_x"),
    )
    monkeypatch.setattr(private, "RELIANCES", table)
    check_lightning.cache_clear()
    try:
        with pytest.raises(ConfigurationError) as caught:
            check_lightning()
    finally:
        check_lightning.cache_clear()
    text = str(caught.value)
    assert re.match(
        r"Lightning \d+\.\d+\S* has changed _SignalConnector\._lost: expected a method, found none; ",
        text,
    )
    assert "pytorch.loops.lost._Loop: expected to be there, found nothing" in text
    assert text.endswith(f"needs lightning {NEEDS}")


def test_a_name_that_is_imported_and_gone_is_an_error_of_the_same_kind() -> None:
    with pytest.raises(
        ConfigurationError, match=r"has changed pytorch\.loops\._Gone: expected to be there.*needs"
    ):
        named("pytorch.loops:_Gone")


def test_the_package_requires_the_releases_that_the_error_names() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package in ("lightning", "pytorch-lightning"):
        assert f'"{package}{NEEDS}"' in text


def test_both_halves_of_the_imported_names_say_the_same() -> None:
    tree = ast.parse(Path(private.__file__).read_text(encoding="utf-8"))
    choice = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [
        (alias.asname or alias.name, str(node.module).removeprefix("lightning."), alias.name)
        for node in choice.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    named = re.findall(
        r"(\w+) = named\('([\w.]+):(\w+)'\)", "\n".join(map(ast.unparse, choice.orelse))
    )
    assert sorted(imported) == sorted(named) != []
