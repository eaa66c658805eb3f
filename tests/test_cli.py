"""The command line says what is the matter in words, and its exit status says whether anything is."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardeddp.checkpoint import write
from shardeddp.checkpoint.manifest import DCP_METADATA, MANIFEST
from shardeddp.planner.calibration import write as write_measured
from shardeddp_cli import main
from support.exporting import checkpoint, flip, put, read_safetensors, weights
from support.probes import probe_of

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


@pytest.mark.long
@pytest.mark.slow
def test_it_is_run_as_a_module_too(path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "shardeddp", "verify", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"good     {path} (")


@pytest.mark.long
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


def test_of_a_missing_checkpoint_those_beside_it_are_named(path: Path, capsys: Output) -> None:
    missing = path.parent / "step=8.ckpt"
    (path.parent / "of-ddp.ckpt").touch()
    status, _, err = run(capsys, "inspect", missing)
    assert status == 1
    assert f"{missing} does not exist; beside it there are step=7.ckpt, of-ddp.ckpt" in err
    _, _, err = run(capsys, "inspect", path.parent / "absent" / "step=8.ckpt")
    assert "does not exist, nor is there the directory that it would lie in" in err


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


DIMS = "layers=2,width=8,heads=2,vocabulary=16"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["verify"],
        ["unknown"],
        ["consolidate", "{path}"],
        ["consolidate", "{path}", "-o", "a.bin"],
        ["consolidate", "{path}", "-o", "a.safetensors", "--max-shard-size", "many"],
        ["consolidate", "{path}", "-o", "a.ckpt", "--max-shard-size", "5GB"],
        ["inspect", "{path}", "--state", "--json"],
        ["consolidate", "{path}", "-o", "a.ckpt", "--dtype", "bf16"],
        ["consolidate", "{path}", "-o", "a.ckpt", "--ema"],
        ["inspect", "{path}", "--all", "--tensors", "x"],
        ["plan", "--gpus", "8", "--dims", "layers=2"],
        ["plan", "--gpus", "8", "--dims", f"{DIMS},layers=3"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--gpu", "H999"],
        ["plan", "--gpus", "9", "--dims", DIMS],
        ["plan", "--gpus", "8", "--dims", DIMS, "--tensor-parallel", "3"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--tensor-parallel", "8"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--tensor-parallel-plan", "no such file"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--expert-parallel", "3"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--expert-parallel", "2"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--experts", "layers.*"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--link-gbs", "nan"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--memory-tbs", "-1"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--bf16-tflops", "0"],
        ["plan", "--gpus", "16", "--dims", DIMS, "--network", "inf"],
        ["plan", "--gpus", "8", "--dims", DIMS + ",hidden=0"],
        ["plan", "--gpus", "8", "--dims", DIMS + ",hidden=true"],
        ["plan", "--gpus", "8", "--dims", "layers=100000,width=8,heads=2,vocabulary=16"],
        ["plan", "--gpus", "8", "torch.nn.Linear", "--args", "[1]"],
        ["plan", "--gpus", "8", "--dims", DIMS, "--gpu", "V100", "--precision", "bf16-mixed"],
    ],
)
def test_a_wrong_command_line_is_status_2(path: Path, capsys: Output, arguments: list[str]) -> None:
    assert run(capsys, *[text.format(path=path) for text in arguments])[0] == 2


@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate", "diff", "metadata"])
@pytest.mark.parametrize(
    ("exists", "given", "named"),
    [
        ("m.safetensors", "m.safetensors", "m.safetensors"),
        ("m.safetensors.index.json", "m.safetensors.index.json", "m.safetensors.index.json"),
        ("m.safetensors.index.json", "m.safetensors", "m.safetensors.index.json"),
    ],
)
def test_safetensors_are_refused_by_their_name(
    path: Path, tmp_path: Path, capsys: Output, command: str, exists: str, given: str, named: str
) -> None:
    (tmp_path / exists).touch()
    more = {"consolidate": ["-o", tmp_path / "a.ckpt"], "diff": [path]}.get(command, [])
    status, _, said = run(capsys, command, tmp_path / given, *more)
    assert status == 1
    assert f"{tmp_path / named} is of safetensors, which are not taken here" in said


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


# -- the index of torch.distributed.checkpoint, made later


@pytest.fixture
def of_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that was saved without .metadata, since it has more pieces than are named in it."""
    monkeypatch.setattr(write, "DCP_PIECES", 3)
    return put(tmp_path / "step=8.ckpt", checkpoint(8))


def test_a_checkpoint_of_many_pieces_is_saved_without_metadata_and_a_line_says_how_to_make_it(
    of_many_pieces: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not (of_many_pieces / DCP_METADATA).exists()
    (line,) = [it.getMessage() for it in caplog.get_records("setup")]
    assert "has 9 pieces, too many to write .metadata" in line
    assert line.endswith(f"shardeddp metadata {of_many_pieces}")


def test_the_metadata_is_made_later(
    path: Path, of_many_pieces: Path, tmp_path: Path, capsys: Output
) -> None:
    state = {"model": {"net.embed.weight": torch.zeros(7, 10)}}
    with pytest.raises(CheckpointException, match="metadata"):
        dcp.load(state, checkpoint_id=of_many_pieces, no_dist=True)
    status, out, _ = run(capsys, "metadata", of_many_pieces)
    assert (status, out) == (0, f"wrote {of_many_pieces / DCP_METADATA} for 9 pieces\n")
    dcp.load(state, checkpoint_id=of_many_pieces, no_dist=True)
    assert torch.equal(state["model"]["net.embed.weight"], weights(8)["net.embed.weight"])
    status, out, _ = run(capsys, "verify", of_many_pieces)
    assert status == 0 and ".metadata" in out
    # It is what a save would have written.
    again = put(tmp_path / "again.ckpt", checkpoint(8))
    assert main(["metadata", str(again)]) == 0
    ours, theirs = (
        pickle.loads((each / DCP_METADATA).read_bytes()) for each in (of_many_pieces, path)
    )
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


def test_metadata_that_is_there_is_not_replaced(
    path: Path, of_many_pieces: Path, tmp_path: Path, capsys: Output
) -> None:
    status, _, err = run(capsys, "metadata", path)
    assert status == 1 and "was saved with .metadata" in err
    (of_many_pieces / DCP_METADATA).write_text("mine")
    status, _, err = run(capsys, "metadata", of_many_pieces)
    assert status == 1 and "exists already; --force replaces it" in err
    assert run(capsys, "metadata", of_many_pieces, "--force")[0] == 0
    flip(of_many_pieces / DATA, of_many_pieces.joinpath(DATA).stat().st_size - 5)
    before = (of_many_pieces / DCP_METADATA).read_bytes()
    status, _, err = run(capsys, "metadata", of_many_pieces, "--force")
    assert status == 1 and "its table of pieces" in err
    assert (of_many_pieces / DCP_METADATA).read_bytes() == before
    assert len(os.listdir(of_many_pieces)) == len(os.listdir(path))
    whole = tmp_path / "whole.ckpt"
    assert run(capsys, "consolidate", path, "-o", whole)[0] == 0
    status, _, err = run(capsys, "metadata", whole)
    assert status == 1 and "is one plain file" in err


# -- diff, migrate, and what needs no torch


def test_equal_checkpoints_have_no_difference(tmp_path: Path, capsys: Output) -> None:
    one, other = put(tmp_path / "one.ckpt"), put(tmp_path / "other.ckpt")
    status, out, err = run(capsys, "diff", one, other)
    assert (status, err) == (0, "")
    assert out.startswith("equal: ")


def test_names_shapes_dtypes_and_values_that_differ_are_said(
    tmp_path: Path, capsys: Output
) -> None:
    tensors = {"same": torch.ones(2), "off": torch.zeros(3), "shape": torch.ones(2, 2)}
    tensors["kind"] = torch.tensor([3])
    torch.save({"state_dict": {**tensors, "gone": torch.ones(1)}}, tmp_path / "one.ckpt")
    tensors |= {"off": torch.tensor([0.0, 0.5, -2.0]), "shape": torch.ones(4)}
    tensors |= {"same": tensors["same"].double(), "kind": tensors["kind"].float()}
    torch.save({"state_dict": tensors}, tmp_path / "other.ckpt")
    status, out, err = run(capsys, "diff", tmp_path / "one.ckpt", tmp_path / "other.ckpt")
    assert (status, err) == (1, "")
    assert out.splitlines() == [
        f"state_dict.gone: only in {tmp_path / 'one.ckpt'}",
        "state_dict.same: torch.float32 and torch.float64",
        "state_dict.off: 2 of 3 values differ, by up to 2",
        "state_dict.shape: shape (2, 2) and (4,)",
        "state_dict.kind: torch.int64 and torch.float32",
        "5 differences; largest of values 2, in 4 tensors of both",
    ]


WIDE = {
    "near": ([2**53 + 1], [2**53], torch.int64, torch.int64),
    "largest": ([2**63 - 1], [2**63 - 2], torch.int64, torch.int64),
    "unsigned": ([2**63 + 1], [2**63], torch.uint64, torch.uint64),
    "signs": ([-1], [2**64 - 1], torch.int64, torch.uint64),
    "kinds": ([2**53 + 1], [2.0**53], torch.int64, torch.float64),
    "nan": (
        [complex(1, float("nan"))],
        [complex(2, float("nan"))],
        torch.complex64,
        torch.complex64,
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_values_that_are_one_number_in_float64_differ(
    tmp_path: Path, capsys: Output, name: str
) -> None:
    one, other, *dtypes = WIDE[name]
    for value, dtype, file in zip((one, other), dtypes, ("one", "other"), strict=True):
        torch.save(
            {"state_dict": {"w": torch.tensor(value, dtype=dtype)}}, tmp_path / f"{file}.ckpt"
        )
    status, out, _ = run(capsys, "diff", tmp_path / "one.ckpt", tmp_path / "other.ckpt")
    assert status == 1
    assert "1 of 1 values differ, by up to" in out
    assert "by up to 0" not in out
    status, _, _ = run(capsys, "diff", tmp_path / "one.ckpt", tmp_path / "one.ckpt")
    assert status == 0


def test_values_of_equal_numbers_in_other_layouts_and_dtypes_are_equal(
    tmp_path: Path, capsys: Output
) -> None:
    eye = torch.eye(3)
    pairs = {
        "sparse": (eye.to_sparse(), eye.to_sparse()),
        "nan": (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])),
        "complex": (torch.tensor([1j]), torch.tensor([1j])),
    }
    for file, at in ("one", 0), ("other", 1):
        torch.save({"state_dict": {it: pairs[it][at] for it in pairs}}, tmp_path / f"{file}.ckpt")
    status, out, err = run(capsys, "diff", tmp_path / "one.ckpt", tmp_path / "other.ckpt")
    assert (status, out, err) == (0, "equal: 3 tensors\n", "")


def test_a_directory_and_the_file_made_of_it_are_compared(
    path: Path, tmp_path: Path, capsys: Output
) -> None:
    assert run(capsys, "consolidate", path, "-o", tmp_path / "whole.ckpt")[0] == 0
    assert run(capsys, "diff", "--weights-only", path, tmp_path / "whole.ckpt")[0] == 0
    os.unlink(path / DATA)
    status, out, err = run(capsys, "diff", path, tmp_path / "whole.ckpt")
    assert (status, out, len(err.splitlines())) == (1, "", 1)


def test_migrate_exits_with_1_where_something_is_lost(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "train.py"
    file.write_text("Trainer(strategy='fsdp')")
    status, out, err = run(capsys, "migrate", file)
    assert (status, err) == (0, "")
    assert "strategy=ShardedDP()" in out
    file.write_text("FSDPStrategy(ignored_modules=[x])")
    assert run(capsys, "migrate", file)[0] == 1
    file.write_text("nothing")
    status, out, err = run(capsys, "migrate", file)
    assert (status, out, len(err.splitlines())) == (1, "", 1)


# -- plan and probe

PLAN = ("plan", "--dims", "layers=1,width=32,heads=2,vocabulary=32", "--gpus", "2")


def test_a_plan_that_does_not_fit_says_what_is_missing(capsys: Output) -> None:
    dims = "layers=2,width=64,heads=2,vocabulary=128"
    arguments = ("plan", "--dims", dims, "--gpus", "2", "--memory-gb", "0.1", "--why")
    status, out, _ = run(capsys, *arguments)
    assert status == 1
    assert "more than 0.1 GiB." in out
    assert "leaves" not in out


def test_a_picture_that_could_not_be_written_is_refused_before_the_plan(
    tmp_path: Path, capsys: Output
) -> None:
    for file in (tmp_path, tmp_path / "nowhere" / "plan.html"):
        status, out, err = run(capsys, *PLAN, "--html", file)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert f"--html {file}: expected a file in an existing directory" in err


def test_the_json_of_a_plan_has_its_reasons_if_they_are_asked_for(capsys: Output) -> None:
    best, *others = json.loads(run(capsys, *PLAN, "--json", "--why")[1])
    assert best["why"][0].startswith("A step is ")
    assert not any("why" in it for it in others)
    assert "why" not in json.loads(run(capsys, *PLAN, "--json")[1])[0]


def test_states_of_another_optimizer_are_planned_and_the_plan_says_how_many(
    capsys: Output,
) -> None:
    taken = {
        count: json.loads(run(capsys, *PLAN, "--json", "--optimizer-states", count)[1])[0]
        for count in ("0", "2", "3")
    }
    nbytes = {count: it["memory_nbytes"]["optimizer"] for count, it in taken.items()}
    assert nbytes["0"] == 0
    assert 2 * nbytes["3"] == 3 * nbytes["2"]
    assert len({it["step_seconds"]["optimizer"] for it in taken.values()}) == 3
    text = "Optimizer states: 2 of each trained parameter, those of AdamW."
    assert text in " ".join(run(capsys, *PLAN)[1].split())
    text = "Optimizer states: 1 of each trained parameter."
    assert text in " ".join(run(capsys, *PLAN, "--optimizer-states", "1")[1].split())
    assert run(capsys, *PLAN, "--optimizer-states", "-1")[0] == 2


@pytest.mark.slow
def test_layers_are_split_as_a_file_says(tmp_path: Path, capsys: Output) -> None:
    path, given = tmp_path / "plan.json", {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    given["blocks.*.gate"] = "colwise"
    for content in (given, {"tensor_parallel_plan": given}):
        path.write_text(json.dumps(content))
        arguments = (*PLAN, "--tensor-parallel", "1", "2", "--tensor-parallel-plan", path)
        status, out, _ = run(capsys, *arguments, "--json")
        assert status == 0
        assert {it["tensor_parallel_size"] for it in json.loads(out)} == {1, 2}
    status, out, _ = run(capsys, *arguments)
    assert (status, " TP " in out) == (0, True)
    path.write_text("[1")
    assert run(capsys, *arguments)[0] == 2


@pytest.mark.long
@pytest.mark.slow
def test_plans_of_divided_experts_are_compared(capsys: Output) -> None:
    arguments = ["plan", "gpt.mixture.MixtureGPTModule", "--gpus", "4", "--length", "16", "--args"]
    arguments += ['{"dim": 32, "num_layers": 2}', "--input", "int64:B,S", "--input", "int64:B,S"]
    arguments += ["--micro-batch", "2", "--expert-parallel", "1", "2", "4"]
    arguments += ["--experts", "gpt.blocks.*.mlp.experts.*"]
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    assert {it["expert_parallel_size"] for it in json.loads(out)} == {1, 2, 4}
    assert " EP " in run(capsys, *arguments)[1]


def test_a_gpu_without_bfloat16_is_planned_in_float16(capsys: Output) -> None:
    status, out, _ = run(capsys, "plan", "--gpus", "8", "--dims", DIMS, "--gpu", "V100")
    assert (status, "precision: 16-mixed" in out) == (0, True)


def test_a_plan_is_calibrated_with_the_figures_of_a_file(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "a.json"
    write_measured(file, probe_of())
    status, out, err = run(capsys, *PLAN, "--calibrate", file, "--json")
    assert (status, err) == (0, "")
    before, after = json.loads(run(capsys, *PLAN, "--json")[1])[0], json.loads(out)[0]
    assert after["step_seconds"] != before["step_seconds"]
    assert "CPU" in run(capsys, *PLAN, "--calibrate", file)[1].splitlines()[0]
    status, out, err = run(capsys, *PLAN, "--calibrate", file, "--gpu", "A100")
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert "measured on CPU, and the plan is for A100-80" in err


@pytest.mark.parametrize("text", [None, "nothing", '{"shardeddp": "probe", "version": 1}'])
def test_a_wrong_file_to_calibrate_with_is_one_line(
    tmp_path: Path, capsys: Output, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    status, out, err = run(capsys, *PLAN, "--calibrate", tmp_path / "a.json")
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert err.startswith(f"shardeddp plan: {tmp_path / 'a.json'}: ")


def test_a_probe_is_no_run_to_report(tmp_path: Path, capsys: Output) -> None:
    write_measured(tmp_path / "a.json", probe_of())
    status, out, err = run(capsys, "report", tmp_path / "a.json")
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert "expected what StepMonitor(record=...) has written, found a probe" in err
    assert not (tmp_path / "a.html").exists()


@pytest.mark.parametrize("kind", ["itself", "a link", "another name"])
def test_what_is_read_is_not_written_to(tmp_path: Path, capsys: Output, kind: str) -> None:
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    write_measured(file, probe_of())
    text = file.read_text()
    torch.save({"state_dict": {}}, file.with_suffix(".ckpt"))
    if kind == "a link":
        other.symlink_to(file)
        other.with_suffix(".ckpt").symlink_to(file.with_suffix(".ckpt"))
    given = {"itself": file, "a link": other, "another name": tmp_path / "." / "a.json"}[kind]
    for arguments in (
        (*PLAN, "--calibrate", file, "--html", given),
        ("report", file, "-o", given),
        ("report", tmp_path / "run.json", "--calibrate", file, "-o", given),
        ("consolidate", given.with_suffix(".ckpt"), "-o", file.with_suffix(".ckpt")),
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert "which is read and would be overwritten" in err
    assert file.read_text() == text


@pytest.mark.parametrize(
    "more", [["--input", "int64:B,S"], ["--args", "{}"], ["--experts", "blocks.*"]]
)
def test_options_of_a_module_are_refused_beside_dimensions(capsys: Output, more: list[str]) -> None:
    status, out, err = run(capsys, *PLAN, *more)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert f"{more[0]} is that of a LightningModule" in err


@pytest.mark.parametrize("where", ["", "nowhere/probe.json"])
def test_a_probe_that_could_not_be_written_does_not_begin(
    tmp_path: Path, capsys: Output, where: str
) -> None:
    status, out, err = run(capsys, "probe", "-o", tmp_path / where)
    assert (status, out) == (2, "")
    assert "expected a file in an existing directory" in err


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_neither_torch_nor_lightning(argument: str) -> None:
    code = (
        "import sys, shardeddp_cli\n"
        "try: shardeddp_cli.main([sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'lightning', 'shardeddp'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code, argument], check=True, timeout=50)


def test_a_plain_file_of_another_strategy_is_inspected(tmp_path: Path, capsys: Output) -> None:
    state = {"state_dict": {"net.weight": torch.ones(2, 3)}, "optimizer_states": []}
    torch.save(state, tmp_path / "ddp.ckpt")
    status, out, err = run(capsys, "inspect", tmp_path / "ddp.ckpt")
    assert (status, err) == (0, "")
    assert "net.weight" in out
    assert "2 x 3" in out
    assert run(capsys, "inspect", "--tensors", "bias", tmp_path / "ddp.ckpt")[0] == 1
    assert run(capsys, "inspect", "--json", tmp_path / "ddp.ckpt")[0] == 2


def test_hyper_parameters_and_metrics_are_shown(tmp_path: Path, capsys: Output) -> None:
    state = {
        "state_dict": {"weight": torch.ones(2)},
        "hyper_parameters": {"lr": 0.5, "betas": [1, 2]},
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.25)},
            "Timer{'a': 1}": 1,
            "Timer{'a': 2}": 2,
        },
    }
    torch.save(state, tmp_path / "ddp.ckpt")
    status, out, err = run(capsys, "inspect", "--state", tmp_path / "ddp.ckpt")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "hyper_parameters.lr: 0.5",
        "hyper_parameters.betas.0: 1",
        "hyper_parameters.betas.1: 2",
        "callbacks.ModelCheckpoint.best_model_score: 0.25",
        "callbacks.Timer{'a': 1}: 1",
        "callbacks.Timer{'a': 2}: 2",
    ]


def test_the_state_of_a_directory_is_shown(path: Path, capsys: Output) -> None:
    status, out, err = run(capsys, "inspect", "--state", path)
    assert (status, err) == (0, "")
    assert "global_step: 7" in out
