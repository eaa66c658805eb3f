"""Both of Lightning's packages work, each without the other; and a program that mixes them is told what to do."""

import ast
import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from shardeddp import ShardedDP
from shardeddp.checkpoint.contents import lightning_version
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    NAMESPACE,
    PUBLIC,
    STANDALONE,
    UNIFIED,
    VARIABLE,
    choose_namespace,
    handed_down,
    register_names,
)
from shardeddp.lightning.api import __file__ as API

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS / "support" / "namespaces.py"
KEYS = ("state_dict", "optimizer_states")
BOTH = {UNIFIED: object(), STANDALONE: object()}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def standalone() -> Any:
    """The other package, in a process that uses ``lightning.pytorch``."""
    return pytest.importorskip(
        STANDALONE, reason="pytorch-lightning is not installed, which lightning itself requires"
    )


# -- training


@pytest.fixture(scope="module")
def programs(
    standalone: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The same program with each package, at the same time: its folder, and what it said."""
    folders = {namespace: tmp_path_factory.mktemp(namespace) for namespace in (UNIFIED, STANDALONE)}
    running = {namespace: start(namespace, folder) for namespace, folder in folders.items()}
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    try:
        for namespace, process in running.items():
            out, error = process.communicate(timeout=200)
            assert process.returncode == 0, error
            (said,) = [
                json.loads(line.removeprefix("said "))
                for line in out.splitlines()
                if line.startswith("said ")
            ]
            found[namespace] = (folders[namespace], said)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return found


def start(namespace: str, folder: Path) -> subprocess.Popen[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", VARIABLE)
    }
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "TESTED": namespace, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("namespace", [UNIFIED, STANDALONE])
def test_a_program_trains_resumes_and_converts_where_the_other_package_is_not_installed(
    programs: dict[str, tuple[Path, dict[str, Any]]], namespace: str
) -> None:
    said = programs[namespace][1]
    assert (said["namespace"], said["trespasses"], said["converts"]) == (namespace, [], True)
    assert said["resumed"]["val"] < said["fitted"]["val"]


@pytest.mark.slow
def test_both_packages_train_alike_and_write_the_same_checkpoints(
    programs: dict[str, tuple[Path, dict[str, Any]]],
) -> None:
    (one, said), (other, said_too) = programs.values()
    assert (said["fitted"], said["resumed"]) == (said_too["fitted"], said_too["resumed"])
    weights, states = (
        [torch.load(folder / "last.ckpt")[key] for folder in (one, other)] for key in KEYS
    )
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert states[0][0]["param_groups"] == states[1][0]["param_groups"]


def test_the_version_in_checkpoints_is_that_of_the_package_that_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name == "lightning":
            raise PackageNotFoundError(name)
        return f"that of {name}"

    monkeypatch.setattr("shardeddp.checkpoint.contents.version", version)
    assert lightning_version() == "that of pytorch-lightning"


# -- the choice


@pytest.mark.parametrize(
    ("asked", "imported", "expected"),
    [
        (None, {}, UNIFIED),
        (None, BOTH, UNIFIED),
        (None, {UNIFIED: object()}, UNIFIED),
        (None, {STANDALONE: object()}, STANDALONE),
        (
            None,
            {STANDALONE: object(), UNIFIED: None},
            STANDALONE,
        ),  # None is how Python notes what must not be imported
        ("", {STANDALONE: object()}, STANDALONE),
        ("lightning", {STANDALONE: object()}, UNIFIED),
        (UNIFIED, {}, UNIFIED),
        (STANDALONE, {UNIFIED: object()}, STANDALONE),
    ],
)
def test_the_package_is_what_is_asked_for_else_what_is_imported(
    asked: str | None, imported: dict[str, Any], expected: str
) -> None:
    environment = {} if asked is None else {VARIABLE: asked}
    assert choose_namespace(environment, imported) == expected


def test_what_is_asked_for_has_to_be_one_of_the_two() -> None:
    with pytest.raises(ConfigurationError, match=r"='keras': expected lightning\.pytorch or"):
        choose_namespace({VARIABLE: "keras"}, {})


def test_without_any_lightning_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardeddp.lightning.api.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install lightning"):
        choose_namespace({}, {})


def test_ranks_that_are_spawned_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with handed_down():
        assert os.environ[VARIABLE] == NAMESPACE
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "lightning")
    with handed_down():
        assert os.environ[VARIABLE] == NAMESPACE
    assert os.environ[VARIABLE] == "lightning"


def test_the_type_checker_sees_the_names_that_the_process_finds() -> None:
    tree = ast.parse(Path(API).read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = [
        (str(node.module).removeprefix("lightning."), alias.asname or alias.name, alias.name)
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    found = [(path, name) for path, name, original in imported if name == original]
    assert sorted(found) == sorted(
        (path, name) for path, names in PUBLIC.items() for name in names.split()
    )
    assert [it for it in imported if it[1] != it[2]] == [
        ("pytorch", "LIGHTNING_VERSION", "__version__")
    ]


# -- both in one program


def test_a_trainer_of_the_other_package_shows_for_whom_the_strategy_is(standalone: Any) -> None:
    hint = rf"<ShardedDP\('full_shard'\) for {UNIFIED}.Trainer; for {STANDALONE} set {VARIABLE}={STANDALONE}>"
    with pytest.raises(ValueError, match=hint):
        standalone.Trainer(strategy=ShardedDP(), accelerator="cpu", devices=1)


def test_a_trainer_of_the_other_package_says_why_it_does_not_have_the_names(
    standalone: Any,
) -> None:
    register_names(ShardedDP)  # as where both packages were imported before this one
    strategies = importlib.import_module(f"{STANDALONE}.strategies")
    names = [
        name
        for name in strategies.StrategyRegistry
        if name.startswith("shardeddp") or "sharded_dp" in name
    ]
    try:
        with pytest.raises(
            ValueError, match=f"ShardedDP is made for {UNIFIED}.Trainer.*{VARIABLE}={STANDALONE}"
        ):
            standalone.Trainer(strategy="sharded_dp_no_shard", accelerator="cpu", devices=1)
    finally:
        for name in names:
            strategies.StrategyRegistry.remove(name)
