"""Checkpoints that were written to do harm are refused, quickly and in little memory; nothing of theirs is run."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from shardeddp import ShardedDP
from shardeddp.checkpoint.find import find_checkpoints
from support.tasks import Block
from support.torture_hostile import CASES, HARMLESS, build, callbacks_that_delete
from support.torture_mutations import Files, read_files, write_files
from support.torture_training import Scored
from support.trainers import make_trainer
from world import Worlds

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]

TESTS = Path(__file__).resolve().parents[2]
SECONDS, NBYTES = 1.0, 50_000_000
"""For any checkpoint."""

SECONDS_PER_BYTE, NBYTES_PER_BYTE = 2e-7, 64
"""For what its file adds: a value takes this much of its text."""


def train(folder: str, steps: int, path: str | None = None) -> list[str]:
    """Train with checkpoints of which one is kept.

    Returns:
        What was warned of.
    """
    saving = ModelCheckpoint(
        folder, "{step}", monitor="score", mode="min", save_top_k=1, every_n_train_steps=1
    )
    tokens = torch.randint(0, 11, (40, 6), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(tokens, batch_size=2)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            ShardedDP(auto_wrap_policy={Block}, state_dict_type="sharded"),
            max_steps=steps,
            callbacks=[saving],
            enable_checkpointing=True,
        )
        trainer.fit(Scored(), loader, ckpt_path=path)
        assert trainer.global_step == steps
    return [str(warning.message) for warning in caught]


@pytest.fixture(scope="module")
def original(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of an honest checkpoint."""
    folder = tmp_path_factory.mktemp("honest")
    world(2).run(train, str(folder), 2)
    return read_files(find_checkpoints(folder).checkpoints[-1].path)


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marker") / "code-was-run"


@pytest.fixture(scope="module")
def found(
    original: Files, marker: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, float, int, int]]:
    """What came of each case, seconds, bytes of memory, bytes of text on the disk."""
    folder = tmp_path_factory.mktemp("hostile")
    write_files(folder / "0.ckpt", original)
    names = {f"{number}": name for number, name in enumerate([*CASES, *HARMLESS], start=1)}
    (folder / "secret.distcp").write_bytes(original["__0_0.distcp"])
    for number, name in names.items():
        build(original, folder / f"{number}.ckpt", marker, name)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)]),
    }
    command = [sys.executable, str(TESTS / "support" / "torture_reader.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return {
        names.get(number, "honest"): (outcome, seconds, nbytes, text_nbytes(folder, number))
        for number, outcome, seconds, nbytes in lines
    }


def text_nbytes(folder: Path, number: str) -> int:
    files = [folder / f"{number}.ckpt" / name for name in ("manifest.json", "state.json")]
    return sum(file.stat().st_blocks * 512 for file in files if file.is_file())


@pytest.mark.long
def test_the_honest_one_is_read(found: dict[str, tuple[str, float, int, int]]) -> None:
    assert found["honest"][0] == "read"


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_checkpoint_is_refused(
    found: dict[str, tuple[str, float, int, int]], marker: Path, name: str
) -> None:
    outcome, seconds, nbytes, size = found[name]
    assert outcome.startswith("refused: "), outcome
    assert ".ckpt" in outcome
    assert seconds < SECONDS + SECONDS_PER_BYTE * size
    assert nbytes < NBYTES + NBYTES_PER_BYTE * size
    assert not marker.exists()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_other_tools_would_run_is_not_read(
    found: dict[str, tuple[str, float, int, int]], marker: Path, name: str
) -> None:
    assert found[name][0] == "read"
    assert not marker.exists()


@pytest.mark.parametrize(
    "victim", ["{folder}/../victim", "{folder}/../victim.ckpt", "{victim}", "{folder}/link/victim"]
)
@pytest.mark.parametrize("content", ["a directory", "a checkpoint"])
def test_saved_callbacks_cannot_have_a_directory_deleted(
    world: Worlds, original: Files, tmp_path: Path, victim: str, content: str
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    for name in ("victim", "victim.ckpt"):
        write_files(
            tmp_path / name, original if content == "a checkpoint" else {"thesis.tex": b"mine"}
        )
    files = dict(original)
    callbacks_that_delete(files, folder, victim.format(folder=folder, victim=tmp_path / "victim"))
    write_files(folder / "evil.ckpt", files)
    warned = world(2).run(train, str(folder), 8, str(folder / "evil.ckpt"))[0]
    for name in ("victim", "victim.ckpt"):
        assert len(read_files(tmp_path / name)) == (
            len(original) if content == "a checkpoint" else 1
        )
    if "folder" in victim:  # Lightning itself sees where the other one lies
        assert any("was not deleted" in text and "victim" in text for text in warned), warned
