"""A directory becomes the one file that Lightning writes, readable without this package."""

import pickle
from argparse import Namespace
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from shardeddp.checkpoint.export import Selection, to_ckpt
from shardeddp.errors import CheckpointError
from support.exporting import checkpoint, put, same, weights
from support.resuming import fit, full_shard, losses_and_weights
from support.tasks import TinyGpt
from world import Worlds

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled, unavailable or uninitialized"
    ),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return put(tmp_path / "step=7.ckpt")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- a plain checkpoint


def test_a_ckpt_file_is_what_was_saved(path: Path, tmp_path: Path) -> None:
    to_ckpt(path, tmp_path / "whole.ckpt")
    expected = checkpoint()
    for mmap in (False, True):
        found = torch.load(tmp_path / "whole.ckpt", weights_only=True, mmap=mmap)
        assert same(found.pop("state_dict"), expected["state_dict"])
        states = found["optimizer_states"][0].pop("state")
        assert all(
            same(states[number], it)
            for number, it in expected["optimizer_states"][0]["state"].items()
        )
        assert (
            found["optimizer_states"][0]["param_groups"]
            == expected["optimizer_states"][0]["param_groups"]
        )
        assert found.keys() == expected.keys() - {"state_dict"}
        assert found["hyper_parameters"] == {"width": 10}
        assert found["callbacks"]["Best"]["score"].item() == 0.5


def test_tied_weights_are_tied_in_a_ckpt_file(path: Path, tmp_path: Path) -> None:
    to_ckpt(path, tmp_path / "whole.ckpt")
    state = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
    assert state["net.head.weight"].data_ptr() == state["net.embed.weight"].data_ptr()


def test_with_weights_only_nothing_of_the_training_is_kept(path: Path, tmp_path: Path) -> None:
    to_ckpt(path, tmp_path / "weights.ckpt", Selection(weights_only=True, strip_prefix="net."))
    found = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    kept = {
        "state_dict",
        "epoch",
        "global_step",
        "pytorch-lightning_version",
        "loops",
        "hyper_parameters",
    }
    assert found.keys() == kept
    assert same(
        found["state_dict"], {name.removeprefix("net."): it for name, it in weights(7).items()}
    )


class Strange:
    """No value that could be written without pickle."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strange)

    __hash__ = None  # type: ignore[assignment]


def test_strange_hyper_parameters_are_left_out_and_said(tmp_path: Path) -> None:
    given = {
        "width": 10,
        "odd": [1, Strange()],
        "betas": (Strange(), 0.99),
        "args": Namespace(lr=0.5, loss=Strange()),
        "set": deque([Strange()]),
        "inner": {"kept": (1, 2), "strange": Strange()},
    }
    path = put(tmp_path / "step=7.ckpt", checkpoint(hyper_parameters=given))
    exported = to_ckpt(path, tmp_path / "whole.ckpt")
    gone = ["odd", "betas", "args.loss", "set", "inner.strange"]
    expected = ", ".join(f"hyper_parameters.{place}" for place in gone)
    assert exported.notes[0].startswith(f"left out {expected}: objects that only pickle can save")
    found = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    # What is left of a sequence would be at other positions.
    assert found["hyper_parameters"] == {
        "width": 10,
        "args": Namespace(lr=0.5),
        "inner": {"kept": (1, 2)},
    }


@pytest.mark.filterwarnings("ignore:callbacks.mine in the checkpoint can be kept by pickle alone")
def test_a_strange_callback_state_needs_trust(tmp_path: Path) -> None:
    path = put(tmp_path / "step=7.ckpt", checkpoint(callbacks={"mine": Strange()}))
    with pytest.raises(CheckpointError, match=r"callbacks\.mine.*--trust-pickle"):
        to_ckpt(path, tmp_path / "whole.ckpt")
    to_ckpt(path, tmp_path / "weights.ckpt", Selection(weights_only=True))
    assert "callbacks" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    exported = to_ckpt(path, tmp_path / "whole.ckpt", Selection(trust_pickle=True))
    assert "Strange" in exported.notes[0]
    assert torch.load(tmp_path / "whole.ckpt", weights_only=False)["callbacks"]["mine"] == Strange()


# -- a plain file as the source


@pytest.mark.parametrize("content", [b"text", pickle.dumps({"state_dict": {}})])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plain.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is not what torch\.save writes"):
        to_ckpt(tmp_path / "plain.ckpt", tmp_path / "whole.ckpt")
    assert names(tmp_path) == {"plain.ckpt"}


def test_a_file_with_code_in_it_needs_trust(tmp_path: Path) -> None:
    torch.save(checkpoint(callbacks={"mine": Strange()}), tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=r"holds more than .*Strange.*--trust-pickle"):
        to_ckpt(tmp_path / "plain.ckpt", tmp_path / "whole.ckpt")
    torch.save(OrderedDict(weight=torch.ones(1)), tmp_path / "bare.ckpt")
    with pytest.raises(CheckpointError, match="there is no state_dict in it"):
        to_ckpt(tmp_path / "bare.ckpt", tmp_path / "whole.ckpt")


# -- checkpoints of a training


def save(path: str) -> dict[str, Any]:
    return losses_and_weights(fit(full_shard(), 1, None, path))


def resume(path: str) -> dict[str, Any]:
    return losses_and_weights(fit(full_shard(), 2, path))


@pytest.mark.slow
def test_a_training_on_two_ranks_goes_on_from_the_exported_file(
    world: Worlds, tmp_path: Path
) -> None:
    path = tmp_path / "step.ckpt"
    saved = world(2).run(save, str(path))[0]["weights"]
    to_ckpt(path, tmp_path / "whole.ckpt")
    model = TinyGpt.load_from_checkpoint(
        tmp_path / "whole.ckpt", map_location="cpu", weights_only=True
    )
    assert same(model.state_dict(), {**saved, "head.weight": saved["embed.weight"]})
    expected = world(2).run(resume, str(path))
    found = world(2).run(resume, str(tmp_path / "whole.ckpt"))
    assert [rank["losses"] for rank in found] == [rank["losses"] for rank in expected]
    assert same(found[0]["weights"], expected[0]["weights"])
