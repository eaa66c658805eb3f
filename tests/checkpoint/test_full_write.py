"""A nested state becomes ordinary: sharded tensors whole and on the host, everything else as it was."""

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardeddp import CheckpointError, CheckpointOptions, ShardedDP, ShardTensor
from shardeddp.checkpoint.full_write import gather_full, stream_full, whole
from shardeddp.checkpoint.manifest import TrainingRun
from shardeddp.checkpoint.read import LazyTensor
from shardeddp.checkpoint.snapshot import memory_key
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


RUN = TrainingRun(
    uuid="0",
    step=3,
    epoch=1,
    world_size=2,
    shard_size=2,
    sharding_strategy="full_shard",
    versions={"torch": "2"},
)


class Pair(NamedTuple):
    weight: Any
    note: str


def sharded_model() -> TinyGpt:
    model = TinyGpt()
    make_trainer(ShardedDP(auto_wrap_policy={Block}), max_steps=1).fit(model, token_loader(8))
    return model


def gather_everything(keeping_rank: int) -> dict[str, Any]:
    model = sharded_model()
    weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
    assert isinstance(weight, ShardTensor)
    plain, untouched = torch.ones(2), OrderedDict(a=1)
    state = {
        "deep": [{"tuple": (weight, 1), "pair": Pair(weight, "text")}],
        "ordered": OrderedDict(weight=weight, bias=bias),
        "gradient": weight.grad,
        "plain": plain,
        "untouched": untouched,
        "text": "text",
    }
    keep = model.global_rank == keeping_rank
    full = gather_full(state, keep=keep)
    pair = full["deep"][0]["pair"]
    assert full["plain"] is plain
    assert full["untouched"] is untouched
    assert isinstance(full["deep"][0]["tuple"], tuple)
    assert isinstance(pair, Pair)
    assert isinstance(state["ordered"]["weight"], ShardTensor), (
        "the state itself must stay as it is"
    )
    found = [full["deep"][0]["tuple"][0], pair.weight, *full["ordered"].values(), full["gradient"]]
    expected = [weight, weight, weight, bias, weight.grad]
    return {
        "kinds": {(type(tensor), tensor.requires_grad, tensor.device.type) for tensor in found},
        "equal": [
            torch.equal(each, tensor.full_tensor())
            for each, tensor in zip(found, expected, strict=True)
        ],
        "empty": [tensor.numel() == 0 for tensor in found],
    }


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("keeping_rank", [0, 1])
def test_sharded_tensors_anywhere_in_a_state_are_gathered_for_the_rank_that_wants_them(
    world: Worlds, keeping_rank: int
) -> None:
    for rank, answers in enumerate(world(2).run(gather_everything, keeping_rank)):
        assert answers["kinds"] == {(Tensor, False, "cpu")}
        assert answers["equal"] == [rank == keeping_rank] * 5
        assert answers["empty"] == [rank != keeping_rank] * 5


def take_whole() -> tuple[bool, bool]:
    weight, plain = sharded_model().blocks[0].up.weight, torch.ones(2)
    return whole(weight).shape == weight.shape and type(whole(weight)) is Tensor, whole(
        plain
    ) is plain


def test_a_tensor_is_whole_whether_it_was_sharded_or_not(world: Worlds) -> None:
    assert world(2).run(take_whole) == [(True, True)] * 2


# -- streamed


def save_streamed(path: str) -> dict[str, Any]:
    model = sharded_model()
    state = {
        "state_dict": dict(model.state_dict()),
        "ours": {"twice": [model.blocks[0].up.weight.detach()] * 2},
    }
    gathered: list[int] = []
    full_tensor = ShardTensor.full_tensor

    def counted(tensor: ShardTensor) -> Tensor:
        gathered.append(tensor.numel())
        return full_tensor(tensor)

    with mock.patch.object(ShardTensor, "full_tensor", counted):
        stream_full(
            state, Path(path), model.blocks[0].up.weight.spec.mesh, (), RUN, CheckpointOptions()
        )
    expected = {name: full_tensor(tensor) for name, tensor in state["state_dict"].items()}
    return {"expected": expected, "gathered": sum(gathered)}


def test_a_streamed_file_is_what_torch_loads_and_each_tensor_was_gathered_once(
    world: Worlds, tmp_path: Path
) -> None:
    path = tmp_path / "deeper" / "full.ckpt"
    answers = world(2).run(save_streamed, str(path))
    loaded = torch.load(path, weights_only=True)
    expected = answers[0]["expected"]
    assert loaded["state_dict"].keys() == expected.keys()
    assert all(type(loaded["state_dict"][name]) is Tensor for name in expected)
    assert all(torch.equal(loaded["state_dict"][name], value) for name, value in expected.items())
    assert torch.equal(loaded["ours"]["twice"][1], expected["blocks.0.up.weight"])
    distinct = {name: value.numel() for name, value in expected.items() if name != "head.weight"}
    assert {answer["gathered"] for answer in answers} == {sum(distinct.values())}


def fail_to_stream(path: str) -> str:
    model = sharded_model()
    mesh = model.blocks[0].up.weight.spec.mesh
    with pytest.raises(CheckpointError) as caught:
        stream_full(dict(model.state_dict()), Path(path), mesh, (), RUN, CheckpointOptions())
    assert torch.equal(
        whole(model.blocks[0].up.weight), whole(model.blocks[0].up.weight)
    )  # ranks are in step
    return str(caught.value)


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(
    world: Worlds, tmp_path: Path
) -> None:
    (tmp_path / "full.ckpt" / "inside").mkdir(parents=True)
    first, second = world(2).run(fail_to_stream, str(tmp_path / "full.ckpt"))
    assert first == second
    assert "full.ckpt is a directory" in first
    assert [path.name for path in tmp_path.iterdir()] == ["full.ckpt"]
    (tmp_path / "a file").touch()
    for error in world(2).run(fail_to_stream, str(tmp_path / "a file" / "deeper" / "x.ckpt")):
        assert "a file/deeper" in error
        assert "Not a directory" in error


def test_lazy_tensors_do_not_share_memory_because_they_have_none() -> None:
    lazy = [
        LazyTensor(("model", str(i)), (3,), torch.float32, lambda interval: torch.ones(3))
        for i in range(6)
    ]
    assert len({memory_key(tensor) for tensor in lazy}) == 6


def fail_to_gather(path: str) -> str:
    model = sharded_model()
    mesh = model.blocks[0].up.weight.spec.mesh
    full_tensor, left = ShardTensor.full_tensor, [3]

    def failing(tensor: ShardTensor) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no room for a whole tensor")
        return full_tensor(tensor)

    with (
        mock.patch.object(ShardTensor, "full_tensor", failing),
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        stream_full(dict(model.state_dict()), Path(path), mesh, (), RUN, CheckpointOptions())
    return str(caught.value)


def test_a_gather_that_fails_is_raised_at_once_as_other_ranks_may_wait_in_it(
    world: Worlds, tmp_path: Path
) -> None:
    answers = world(2).run(fail_to_gather, str(tmp_path / "full.ckpt"))
    assert answers == ["no room for a whole tensor"] * 2
    assert not [*tmp_path.iterdir()]
