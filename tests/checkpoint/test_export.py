"""Exported weights are exactly those of the checkpoint; files appear whole or not at all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging

from shardeddp.checkpoint.export import Selection, to_ckpt, to_safetensors
from shardeddp.checkpoint.manifest import STATE
from shardeddp.checkpoint.verify import verify
from shardeddp.errors import CheckpointError
from support.exporting import PARAMETERS, checkpoint, flip, put, read_safetensors, same, weights
from support.foreign import train_model_parallel
from support.tables import pieces_of
from world import Worlds

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled, unavailable or uninitialized"
    ),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

DATA = "__0_0.distcp"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return put(tmp_path / "step=7.ckpt")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- safetensors


def test_a_safetensors_file_has_every_tensor_once(path: Path, tmp_path: Path) -> None:
    exported = to_safetensors(path, tmp_path / "model.safetensors")
    found, metadata = read_safetensors(tmp_path / "model.safetensors")
    expected = weights(7)
    del expected["net.head.weight"]
    assert same(found, expected)
    assert metadata == {"format": "pt", "net.head.weight": "net.embed.weight"}
    assert (exported.paths, exported.num_tensors) == ([tmp_path / "model.safetensors"], 5)


def test_names_lose_a_prefix(path: Path, tmp_path: Path) -> None:
    to_safetensors(path, tmp_path / "model.safetensors", Selection(strip_prefix="net."))
    found, metadata = read_safetensors(tmp_path / "model.safetensors")
    assert set(found) == {"embed.weight", "scale", "count", "mask", "none"}
    assert metadata["head.weight"] == "embed.weight"


def test_a_prefix_that_no_name_has_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no name starts with 'model\.'; the first is 'net\.embed\.weight'"
    ):
        to_safetensors(path, tmp_path / "model.safetensors", Selection(strip_prefix="model."))


def test_only_floating_point_tensors_are_cast(path: Path, tmp_path: Path) -> None:
    to_safetensors(path, tmp_path / "model.safetensors", Selection(dtype=torch.float16))
    found, _ = read_safetensors(tmp_path / "model.safetensors")
    expected = {
        name: it.half() if it.is_floating_point() else it for name, it in weights(7).items()
    }
    del expected["net.head.weight"]
    assert same(found, expected)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1e5, torch.float16),
        (3.4e38, torch.bfloat16),
        (1e300, torch.float32),
        (-1e300, torch.bfloat16),
    ],
)
def test_values_that_a_cast_makes_infinite_are_counted_and_written_only_if_asked(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    wide = torch.tensor([1.0, value, float("inf"), float("nan"), value], dtype=torch.float64)
    content = checkpoint(state_dict={"wide": wide, "infinite": torch.tensor([float("inf")])})
    path, target = put(tmp_path / "wide.ckpt", content), tmp_path / "wide.safetensors"
    selection = Selection(dtype=dtype)
    with pytest.raises(CheckpointError, match=r"2 finite values are infinite as .*\(2 of wide\)"):
        to_safetensors(path, target, selection)
    assert not target.exists()
    (note,) = to_safetensors(path, target, selection, force=True).notes
    assert "2 of wide" in note


def test_above_a_size_there_are_several_files_and_an_index(path: Path, tmp_path: Path) -> None:
    exported = to_safetensors(path, tmp_path / "model.safetensors", max_nbytes=280)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert [it.name for it in exported.paths] == [*files, "model.safetensors.index.json"]
    index = json.loads(exported.paths[-1].read_bytes())
    parts = {name: read_safetensors(tmp_path / name)[0] for name in files}
    assert index["weight_map"] == {name: file for file, part in parts.items() for name in part}
    assert index["metadata"]["total_size"] == sum(
        it.nbytes for part in parts.values() for it in part.values()
    )
    assert same(
        parts[files[0]] | parts[files[1]],
        {k: v for k, v in weights(7).items() if k != "net.head.weight"},
    )
    assert set(parts[files[0]]) == {"net.embed.weight"}  # 280 bytes: just what a file may have


def test_an_entry_that_is_no_tensor_is_left_out_and_said(tmp_path: Path) -> None:
    path = put(
        tmp_path / "step=7.ckpt",
        checkpoint(state_dict={"weight": torch.ones(2), "_extra_state": {"a": 1}}),
    )
    exported = to_safetensors(path, tmp_path / "model.safetensors")
    assert exported.notes == ["left out what is no dense tensor: _extra_state"]
    assert set(read_safetensors(tmp_path / "model.safetensors")[0]) == {"weight"}


def test_a_dtype_that_the_format_lacks_is_refused_with_its_name(tmp_path: Path) -> None:
    path = put(
        tmp_path / "step=7.ckpt",
        checkpoint(state_dict={"wave": torch.ones(2, dtype=torch.complex128)}),
    )
    with pytest.raises(NotImplementedError, match=r"wave is torch\.complex128"):
        to_safetensors(path, tmp_path / "model.safetensors")
    assert names(tmp_path) == {"step=7.ckpt"}


# -- files


def test_what_is_there_is_replaced_only_if_asked(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    target.write_text("precious")
    with pytest.raises(CheckpointError, match="exists already; --force replaces it"):
        to_safetensors(path, target)
    assert target.read_text() == "precious"
    to_safetensors(path, target, force=True)
    assert len(read_safetensors(target)[0]) == 5


@pytest.mark.parametrize("suffix", ["safetensors", "ckpt"])
def test_a_damaged_tensor_is_named_and_nothing_is_left(
    path: Path, tmp_path: Path, suffix: str
) -> None:
    piece = pieces_of(path, "model.net.scale")[0]
    flip(path / DATA, piece.payload)
    export = to_ckpt if suffix == "ckpt" else to_safetensors
    with pytest.raises(CheckpointError, match=rf"{DATA} is damaged: bytes .* of model\.net\.scale"):
        export(path, tmp_path / f"model.{suffix}")
    assert names(tmp_path) == {path.name}


def test_a_damaged_state_is_refused(path: Path, tmp_path: Path) -> None:
    flip(path / STATE, 200)
    with pytest.raises(CheckpointError, match="is damaged"):
        to_safetensors(path, tmp_path / "model.safetensors")


def test_an_export_tells_how_far_it_is(path: Path, tmp_path: Path) -> None:
    for number, export in enumerate((to_safetensors, to_ckpt)):
        total: list[int] = []
        done: list[int] = []
        exported = export(
            path, tmp_path / f"{number}.out", started=total.append, progress=done.append
        )
        assert total == [sum(done)] == [exported.nbytes]


EXPORT = """
import resource, sys
from pathlib import Path
from shardeddp.checkpoint.export import (to_ckpt, to_safetensors)
to_safetensors(Path(sys.argv[1] + "/small.ckpt"), Path(sys.argv[1] + "/small.safetensors"))
to_ckpt(Path(sys.argv[1] + "/small.ckpt"), Path(sys.argv[1] + "/small-whole.ckpt"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
to_safetensors(Path(sys.argv[1] + "/large.ckpt"), Path(sys.argv[1] + "/large.safetensors"))
to_ckpt(Path(sys.argv[1] + "/large.ckpt"), Path(sys.argv[1] + "/large-whole.ckpt"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
@pytest.mark.slow
def test_an_export_needs_less_memory_than_one_large_tensor(tmp_path: Path) -> None:
    put(tmp_path / "small.ckpt")
    large = {"first": torch.zeros(32 * 2**20), "second": torch.ones(32 * 2**20)}
    put(
        tmp_path / "large.ckpt",
        checkpoint(state_dict=large, optimizer_states=[]),
        durability="process",
    )
    command = [sys.executable, "-W", "ignore", "-c", EXPORT, str(tmp_path)]
    grown = int(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    )
    assert grown * 1024 < large["first"].nbytes


# -- averaged weights


class Line(LightningModule):
    """One weight, for averaging."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (batch - self.weight).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class SaveInside(EMAWeightAveraging):
    """Saves while training, as callbacks do: with both states."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "plain.ckpt")


def test_averaged_weights_are_those_that_lightning_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[SaveInside(decay=0.5)],
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2))
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert not torch.equal(plain["state_dict"]["weight"], plain["current_model_state"]["weight"])
    put(tmp_path / "sharded.ckpt", {**plain, "optimizer_states": []})
    for ema, key in ((True, "state_dict"), (False, "current_model_state")):
        exported = to_safetensors(
            tmp_path / "sharded.ckpt", tmp_path / f"{key}.safetensors", Selection(ema=ema)
        )
        assert same(read_safetensors(exported.paths[0])[0], plain[key])
        assert ("--ema" in "".join(exported.notes)) is not ema
        to_ckpt(
            tmp_path / "sharded.ckpt",
            tmp_path / f"{key}.ckpt",
            Selection(ema=ema, weights_only=True),
        )
        found = torch.load(tmp_path / f"{key}.ckpt", weights_only=True)
        assert same(found["state_dict"], plain[key])
        assert "current_model_state" not in found


def test_without_averaged_weights_there_are_none_to_export(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there are no averaged weights.*Leave --ema out"):
        to_safetensors(path, tmp_path / "model.safetensors", Selection(ema=True))


# -- checkpoints of other tools


@pytest.mark.long
@pytest.mark.slow
def test_a_directory_of_lightnings_own_strategy_is_exported(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "theirs.ckpt"
    saved = world(2).run(train_model_parallel, str(path))[0]
    expected = {
        name.removeprefix("model."): it for name, it in saved.items() if name.startswith("model.")
    }
    to_safetensors(path, tmp_path / "model.safetensors", Selection(foreign=True))
    assert same(read_safetensors(tmp_path / "model.safetensors")[0], expected)
    exported = to_ckpt(path, tmp_path / "whole.ckpt", Selection(foreign=True))
    assert exported.notes == []
    found = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert same(found["state_dict"], expected)
    [optimizer] = found["optimizer_states"]
    assert optimizer["param_groups"][0]["params"] == [0, 1, 2, 3]
    moments = [it for name, it in saved.items() if name.endswith("exp_avg")]
    assert all(
        torch.equal(optimizer["state"][number]["exp_avg"], it) for number, it in enumerate(moments)
    )
    assert found["epoch"] == 2
    assert found["hyper_parameters"] == {"width": 5, "names": ["a"]}


def test_plain_dcp_is_exported(tmp_path: Path) -> None:
    state = {name: weights()[name] for name in PARAMETERS}
    dcp.save(dict(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    to_safetensors(tmp_path / "stock", tmp_path / "model.safetensors", Selection(foreign=True))
    assert same(read_safetensors(tmp_path / "model.safetensors")[0], state)
    to_ckpt(tmp_path / "stock", tmp_path / "whole.ckpt", Selection(foreign=True))
    assert same(torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"], state)


def test_nothing_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    path, other = put(tmp_path / "a.ckpt"), put(tmp_path / "b.ckpt")
    (tmp_path / "link").symlink_to(other)
    for folder in (path, other, tmp_path / "link", path / ".." / "b.ckpt"):
        for export, name in ((to_safetensors, "model.safetensors"), (to_ckpt, "model.ckpt")):
            with pytest.raises(CheckpointError, match="is a checkpoint: expected model"):
                export(path, folder / name)
    assert verify(path) == verify(other) == []


def test_files_of_an_earlier_export_go_with_it(tmp_path: Path) -> None:
    path, target = put(tmp_path / "a.ckpt"), tmp_path / "model.safetensors"
    foreign = tmp_path / "model-00009-of-00009.safetensors"
    foreign.write_text("mine")

    def files() -> set[str]:
        return {it.name for it in tmp_path.iterdir() if it.name.startswith("model")} - {
            foreign.name
        }

    for nbytes in (100, 280, 10**9, 100, 10**9, 280):
        if files():
            with pytest.raises(CheckpointError, match=r"--force|is there already"):
                to_safetensors(path, target, max_nbytes=nbytes)
        exported = to_safetensors(path, target, max_nbytes=nbytes, force=True)
        assert files() == {it.name for it in exported.paths}
    assert foreign.read_text() == "mine"


@pytest.mark.parametrize(
    "listed", ["../train.py", "/etc/passwd", "train.py", "model.py", "model-1-of-2.safetensors"]
)
def test_an_index_deletes_nothing_but_files_of_its_export(tmp_path: Path, listed: str) -> None:
    path, target = put(tmp_path / "out" / "a.ckpt"), tmp_path / "out" / "model.safetensors"
    victim = target.parent / listed
    if not listed.startswith("/"):
        victim.write_text("mine")
    index = target.with_name(f"{target.name}.index.json")
    index.write_text(json.dumps({"weight_map": {"a": listed}}))
    to_safetensors(path, target, force=True)
    assert victim.exists()
    assert target.exists()
    assert not index.exists()
