"""The command line says what is the matter in words, and its exit status says whether anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardeddp.checkpoint.manifest import MANIFEST
from shardeddp.cli import main
from support.exporting import checkpoint, flip, put, read_safetensors

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled, unavailable or uninitialized"
    ),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

DATA = "__0_0.distcp"
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return put(tmp_path / "step=7.ckpt")


def run(capsys: Output, *arguments: str | Path) -> tuple[int, str, str]:
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, captured.out, captured.err


@pytest.mark.slow
def test_it_is_run_as_a_module_too(path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "shardeddp", "verify", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"good     {path} (")


@pytest.mark.slow
def test_importing_the_package_leaves_the_builder_of_command_lines_alone() -> None:
    code = "import sys, shardeddp, shardeddp.cli; sys.exit('jsonargparse' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=50)


# -- verify


def test_a_good_checkpoint(path: Path, capsys: Output) -> None:
    status, out, err = run(capsys, "verify", path)
    assert (status, err) == (0, "")
    assert out.startswith(f"good     {path} (")
    assert "step 7" in out


def test_a_damaged_checkpoint_is_described_in_whole_lines(path: Path, capsys: Output) -> None:
    flip(path / DATA, (path / DATA).stat().st_size - 1)
    os.unlink(path / "state.json")
    status, out, _ = run(capsys, "verify", path)
    head, *damages = out.splitlines()
    assert status == 1
    assert head == f"DAMAGED  {path} (2 places, step 7)"
    assert [line.split(":")[0] for line in damages] == ["  __0_0.distcp", "  state.json"]


def test_of_a_directory_the_newest_good_checkpoint_is_named(tmp_path: Path, capsys: Output) -> None:
    paths = {step: put(tmp_path / f"step={step}.ckpt", checkpoint(step)) for step in (1, 2)}
    flip(paths[2] / DATA, 100)
    status, out, _ = run(capsys, "verify", tmp_path)
    lines = out.splitlines()
    assert status == 1
    assert lines[0].startswith(f"DAMAGED  {paths[2]}")
    assert lines[2].startswith(f"good     {paths[1]}")
    assert lines[3] == f"newest good checkpoint in {tmp_path}: {paths[1]}"


def test_damages_as_json(path: Path, capsys: Output) -> None:
    flip(path / DATA, 100)
    status, out, err = run(capsys, "verify", "--json", path)
    [found] = json.loads(out)
    assert (status, err, found["good"], found["step"]) == (1, "", False, 7)
    assert found["damages"][0]["file"] == DATA


def test_a_stock_checkpoint_is_verified(tmp_path: Path, capsys: Output) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    status, out, _ = run(capsys, "verify", tmp_path / "stock")
    assert status == 0
    assert out.splitlines()[1] == "  not checked, for it was written without a checksum: .metadata"


@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["consolidate", "-o", "a.ckpt"]])
def test_a_wrong_path_is_one_line(tmp_path: Path, capsys: Output, command: list[str]) -> None:
    status, out, err = run(capsys, *command, tmp_path / "nowhere")
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert err.startswith(f"shardeddp {command[0]}: {tmp_path / 'nowhere'}")


@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["consolidate", "-o", "a.ckpt"]])
def test_a_directory_without_checkpoints_is_one_line(
    tmp_path: Path, capsys: Output, command: list[str]
) -> None:
    status, out, err = run(capsys, *command, tmp_path)
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert err.startswith(f"shardeddp {command[0]}: {tmp_path} is no")


# -- inspect


@pytest.mark.parametrize("columns", ["40", "80", "120"])
def test_a_table_fits_the_terminal(
    path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, columns: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "inspect", path.name)
    assert status == 0
    assert max(map(len, out.splitlines())) <= int(columns)
    assert ("parts" in out) is (columns == "120")


def test_a_checkpoint_is_described(path: Path, capsys: Output) -> None:
    _, out, _ = run(capsys, "inspect", path)
    for text in (
        "step 7, epoch 1",
        "1 rank, full_shard",
        "torch 2.13.0",
        "model.net.scale",
        "bfloat16",
        "280 B",
    ):
        assert text in out


def test_tensors_are_listed_by_pattern(path: Path, capsys: Output) -> None:
    _, out, _ = run(capsys, "inspect", path, "--tensors", "net.*.weight")
    assert "model.net.embed.weight" in out
    assert "model.net.scale" not in out
    status, _, err = run(capsys, "inspect", path, "--tensors", "nothing*")
    assert (status, "no tensor has a name like 'nothing*'" in err) == (1, True)


def test_inspection_reads_no_tensors(path: Path, capsys: Output) -> None:
    (path / DATA).write_bytes(bytes((path / DATA).stat().st_size))
    status, out, _ = run(capsys, "inspect", "--json", path)
    assert status == 0
    assert {tensor["name"] for tensor in json.loads(out)["tensors"]} > {
        "model.net.scale",
        "model.net.mask",
    }


def test_a_checkpoint_of_another_tool_is_not_taken_for_ours(tmp_path: Path, capsys: Output) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    for command in (["inspect"], ["consolidate", "-o", tmp_path / "a.ckpt"]):
        status, _, err = run(capsys, *command, tmp_path / "stock")
        assert status == 1
        assert "Another tool wrote it" in err


# -- consolidate


def test_the_weights_are_written(path: Path, tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "model.safetensors"
    arguments = ["--strip-prefix", "net.", "--dtype", "fp16", "--max-shard-size", "1KiB"]
    status, out, err = run(capsys, "consolidate", path, "-o", target, *arguments)
    assert (status, err, out) == (0, "", f"wrote 5 tensors, 167 B to {target}\n")
    assert read_safetensors(target)[0]["scale"].dtype == torch.float16
    status, _, err = run(capsys, "consolidate", path, "-o", target)
    assert (status, "--force" in err) == (1, True)
    assert (
        run(capsys, "consolidate", path, "-o", target, "--force", "--max-shard-size", "100B")[0]
        == 0
    )
    assert (tmp_path / "model.safetensors.index.json").exists()


def test_a_damaged_checkpoint_is_not_exported(path: Path, tmp_path: Path, capsys: Output) -> None:
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:-5])
    status, _, err = run(capsys, "consolidate", path, "-o", tmp_path / "a.ckpt")
    assert (status, len(err.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verify"],
        ["unknown"],
        ["consolidate", "{path}"],
        ["consolidate", "{path}", "-o", "a.bin"],
        ["consolidate", "{path}", "-o", "a.safetensors", "--max-shard-size", "many"],
        ["consolidate", "{path}", "-o", "a.ckpt", "--dtype", "bf16"],
        ["consolidate", "{path}", "-o", "a.ckpt", "--ema"],
        ["inspect", "{path}", "--all", "--tensors", "x"],
    ],
)
def test_a_wrong_command_line_is_status_2(path: Path, capsys: Output, arguments: list[str]) -> None:
    assert run(capsys, *[text.format(path=path) for text in arguments])[0] == 2


@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate"])
@pytest.mark.parametrize(
    "letters", ["\x1b[2J\x1b]0;title\x07", "\x9b31m", "\u202egnp.exe", "\x08\x7f"]
)
def test_names_in_a_checkpoint_do_not_reach_the_terminal_as_commands(
    tmp_path: Path, capsys: Output, command: str, letters: str
) -> None:
    state = checkpoint()
    state["state_dict"] = {f"{key}{letters}": each for key, each in state["state_dict"].items()}
    state["callbacks"] = {f"Own{letters}": {letters: 1}}
    path = put(tmp_path / f"a{letters.replace('/', '')}.ckpt", state)
    flip(path / DATA, 200) if command == "verify" else None
    output = ["-o", tmp_path / "out.safetensors"] if command == "consolidate" else []
    status, out, err = run(capsys, command, path, *output)
    assert status == (command == "verify")
    shown = out + err
    assert letters not in shown
    assert not any(letter in shown for letter in letters if not letter.isprintable())
    if command == "inspect":
        assert "\\x" in shown or "\\u202e" in shown
