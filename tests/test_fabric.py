"""Fabric's loops run with nothing but the strategy changed, and end where DDP ends."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardeddp
from shardeddp import CheckpointError, ConfigurationError
from shardeddp.checkpoint.safetensors import Entry, write_safetensors
from shardeddp.fabric import ShardedDP
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES
from shardeddp.tensor.shard_tensor import ShardTensor
from support.compiling import fresh_compiler
from support.fabric_runs import (
    GPT,
    Block,
    GPTModule,
    batches,
    finetune,
    launched,
    next_token_loss,
    pretrain,
    together,
    train_with_the_trainer,
)
from support.object_stores import use_shelf
from world import Worlds, on_ranks

pytestmark = [pytest.mark.timeout(100), pytest.mark.slow]


def fully_sharded(model: GPT, mesh: DeviceMesh) -> GPT:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def run_loop(name: str, loop: str, folder: str, options: dict[str, Any]) -> list[float]:
    if name == "ddp":
        strategy = DDPStrategy()
    elif name == "model_parallel":
        # The loop changes no output in place, and saves under one name twice.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module|Detected an existing checkpoint")
        strategy = ModelParallelStrategy(
            fully_sharded, data_parallel_size=2, tensor_parallel_size=1
        )
    else:
        strategy = ShardedDP(name, **options)
    with launched(strategy) as fabric:
        return {"pretrain": pretrain, "finetune": finetune}[loop](fabric, Path(folder))


@pytest.mark.long
@pytest.mark.parametrize("loop", ["pretrain", "finetune"])
def test_losses_are_those_of_ddp_under_every_strategy(
    world: Worlds, tmp_path: Path, loop: str
) -> None:
    expected = world(2).run(run_loop, "ddp", loop, str(tmp_path / "ddp"), {})
    assert expected[0][0] > 1.2 * expected[0][-1]
    for name in SHARDING_STRATEGIES:
        options = {"shard_size": 1} if name == "hybrid_shard" else {}
        found = world(2).run(run_loop, name, loop, str(tmp_path / name), options)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4), name


def test_losses_of_a_pretraining_are_those_of_fully_shard(world: Worlds, tmp_path: Path) -> None:
    # Not with Fabric's FSDPStrategy, which refuses the CPU.
    expected = world(2).run(run_loop, "model_parallel", "pretrain", str(tmp_path / "theirs"), {})
    found = world(2).run(run_loop, "full_shard", "pretrain", str(tmp_path / "ours"), {})
    assert expected[0][0] > 1.2 * expected[0][-1]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-6)


@on_ranks(2)
def test_a_module_is_sharded_and_named_as_before() -> None:
    with launched(ShardedDP()) as fabric:
        model = fabric.setup(GPT())
        assert all(isinstance(it, ShardTensor) for it in model.parameters())
        assert list(model.state_dict()) == list(GPT().state_dict())


@on_ranks(2)
def test_communication_is_over_all_ranks() -> None:
    with launched(ShardedDP()) as fabric:
        rank = fabric.global_rank
        assert float(fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum")) == 1.0
        assert fabric.broadcast({"rank": rank}) == {"rank": 0}
        assert fabric.all_gather(torch.tensor(rank)).tolist() == [0, 1]
        fabric.barrier()


@on_ranks(2)
def test_modules_built_on_the_meta_device_get_the_values_of_their_construction() -> None:
    with launched(ShardedDP()) as fabric:
        torch.manual_seed(5)
        with fabric.init_module(empty_init=True):
            model = GPT()
        assert all(it.is_meta for it in model.parameters())
        model = fabric.setup(model)
        torch.manual_seed(5)
        whole = GPT()
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor().detach(), theirs.detach())


@on_ranks(2)
def test_a_teacher_that_is_never_set_up_has_its_values_in_the_first_forward() -> None:
    def losses(fabric: Fabric, empty_init: bool) -> list[float]:
        torch.manual_seed(0)
        with fabric.init_module(empty_init=empty_init):
            student, teacher = nn.Linear(4, 4), nn.Linear(4, 4, bias=False).requires_grad_(False)
            other = nn.Linear(4, 4)
        student, other = fabric.setup_module(student), fabric.setup_module(other)
        parameters = [*student.parameters(), *other.parameters()]
        optimizer = fabric.setup_optimizers(torch.optim.SGD(parameters, lr=0.1))
        x, found = torch.ones(2, 4), list[float]()
        for _ in range(3):
            loss = (student(other(x)) - teacher(x)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    with launched(ShardedDP()) as fabric:
        expected = losses(fabric, False)
    with launched(ShardedDP()) as fabric:
        assert losses(fabric, True) == expected


@on_ranks(2)
def test_gradients_are_clipped_by_their_global_norm() -> None:
    with launched(ShardedDP()) as fabric:
        model = GPT()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        tokens = torch.randint(0, 13, (2, 8), generator=torch.Generator().manual_seed(1))
        fabric.backward(model(tokens).square().mean())
        norm = fabric.clip_gradients(model, optimizer, max_norm=1e-3)
        again = fabric.clip_gradients(model, optimizer, max_norm=1e3)
        assert float(norm) > 1e-3
        assert float(again) == pytest.approx(1e-3, rel=1e-3)


@on_ranks(2)
def test_an_optimizer_of_another_module_is_refused() -> None:
    with launched(ShardedDP()) as fabric:
        fabric.setup_module(GPT())
        with pytest.raises(shardeddp.ConfigurationError, match="setup_module"):
            fabric.setup_optimizers(torch.optim.SGD(nn.Linear(2, 2).parameters()))


def two_forwards(name: str) -> list[float]:
    with launched(DDPStrategy() if name == "ddp" else ShardedDP(name)) as fabric:
        return together(fabric)


def test_two_forwards_may_come_before_their_backward(world: Worlds) -> None:
    expected = world(2).run(two_forwards, "ddp")
    for name in ("full_shard", "shard_grad_op", "no_shard"):
        assert world(2).run(two_forwards, name)[0] == pytest.approx(expected[0], rel=1e-4), name


def mixed(name: str) -> list[float]:
    strategy = DDPStrategy() if name == "ddp" else ShardedDP(name)
    with launched(strategy, precision="bf16-mixed") as fabric:
        return together(fabric)


def test_mixed_precision_is_that_of_ddp(world: Worlds) -> None:
    expected = world(2).run(mixed, "ddp")
    assert world(2).run(mixed, "full_shard")[0] == pytest.approx(expected[0], rel=2e-2)


# -- a compiled module


@pytest.mark.parametrize("name", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_a_compiled_module_trains_as_an_eager_one(name: str) -> None:
    losses: dict[bool, list[float]] = {}
    counters.clear()
    with fresh_compiler() as backend, launched(ShardedDP(name, auto_wrap_policy={Block})) as fabric:
        for is_compiled in (False, True):
            torch.manual_seed(0)
            built: Any = torch.compile(GPT(), backend=backend) if is_compiled else GPT()
            model = fabric.setup_module(built)
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
            losses[is_compiled] = []
            for (tokens,) in list(fabric.setup_dataloaders(batches()))[:4]:
                loss = next_token_loss(model(tokens), tokens)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses[is_compiled].append(loss.item())
        graphs = counters["stats"]["unique_graphs"]
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-4, atol=0)
    # Fabric hands a copy of the backend on.
    assert graphs == 1, "of the blocks, and nothing of the engine"


# -- checkpoints


def save(kind: str, name: str, path: str) -> dict[str, torch.Tensor]:
    use_shelf()
    strategy = DDPStrategy() if name == "ddp" else ShardedDP(name, state_dict_type=kind)
    with launched(strategy) as fabric:
        torch.manual_seed(3)
        model = GPT()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        fabric.backward(model(torch.arange(8)[None] % 13).square().mean())
        optimizer.step()
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 7})
        return {key: whole(it).clone() for key, it in model.state_dict().items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor).detach()


def load(name: str, path: str) -> tuple[dict[str, torch.Tensor], int, list[float]]:
    use_shelf()
    with launched(DDPStrategy() if name == "ddp" else ShardedDP(name)) as fabric:
        model = GPT()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert fabric.load(path, state) == {} or name != "ddp"
        weights = {key: whole(it).clone() for key, it in model.state_dict().items()}
        states = optimizer.optimizer.state_dict()["state"]
        return weights, state["step"], [float(it["step"]) for it in states.values()]


@pytest.mark.parametrize(
    ("saved_by", "kind", "loaded_by"),
    [
        ("full_shard", "sharded", "full_shard"),
        ("full_shard", "sharded", "no_shard"),
        ("shard_grad_op", "full", "ddp"),
        ("ddp", "full", "full_shard"),
    ],
)
def test_a_checkpoint_is_loaded_by_another_strategy(
    world: Worlds, tmp_path: Path, saved_by: str, kind: str, loaded_by: str
) -> None:
    path = str(tmp_path / "step.ckpt")
    [saved, _] = world(2).run(save, kind, saved_by, path)
    assert os.path.isdir(path) == (kind == "sharded")
    for loaded, step, steps in world(2).run(load, loaded_by, path):
        torch.testing.assert_close(loaded, saved)
        assert step == 7
        assert steps
        assert set(steps) == {1.0}


def load_what_stands_beside(kind: str, folder: str) -> None:
    with launched(ShardedDP(state_dict_type=kind)) as fabric:

        def made(value: float) -> Any:
            module = torch.nn.Linear(2, 2)
            torch.nn.init.constant_(module.weight, value)
            return fabric.setup(module)

        def values(*modules: Any) -> list[float]:
            return [float(whole(it.module.weight)[0, 0]) for it in modules]

        named = {"gen.net": made(1.0), "keys": made(2.0), "training": made(3.0)}
        other = {"weight": torch.full((2, 2), 7.0)}
        fabric.save(f"{folder}/a.ckpt", {**named, "state_dict": other, "best": None})
        state = {"gen.net": made(0.0), "keys": made(0.0), "training": made(0.0), "best": 3.5}
        fabric.load(f"{folder}/a.ckpt", state)
        assert values(state["gen.net"], state["keys"], state["training"]) == [1.0, 2.0, 3.0]
        assert state["best"] is None
        alone = {"keys": made(0.0)}
        fabric.load(f"{folder}/a.ckpt", alone)
        assert values(alone["keys"]) == [2.0]
        with pytest.raises(
            ConfigurationError, match=r"'a' and 'a\.b' would be saved under the same"
        ):
            fabric.load(f"{folder}/a.ckpt", {"a": made(0.0), "a.b": made(0.0)}, strict=False)


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_modules_are_loaded_under_any_key_beside_any_entry(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    world(2).run(load_what_stands_beside, kind, str(tmp_path))


def save_over(folder: str) -> list[str]:
    errors = list[str]()
    with launched(ShardedDP(state_dict_type="full")) as fabric:
        module = fabric.setup(torch.nn.Linear(2, 2))
        for name in ("notes.txt", "mine"):
            with pytest.raises(CheckpointError) as caught:
                fabric.save(f"{folder}/{name}", {"model": module})
            errors.append(str(caught.value))
        fabric.save(f"{folder}/sharded.ckpt", {"model": module, "step": 2})
        assert fabric.load(f"{folder}/sharded.ckpt")["step"] == 2
    return errors


def save_sharded(folder: str) -> None:
    with launched(ShardedDP(state_dict_type="sharded")) as fabric:
        fabric.save(
            f"{folder}/sharded.ckpt", {"model": fabric.setup(torch.nn.Linear(2, 2)), "step": 1}
        )


def test_a_file_takes_the_place_of_a_checkpoint_and_of_nothing_else(
    world: Worlds, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").touch()
    world(2).run(save_sharded, str(tmp_path))
    for file, folder in world(2).run(save_over, str(tmp_path)):
        assert "notes.txt is an ordinary file that is no checkpoint" in file
        assert "mine is a directory, expected the path of a new file" in folder
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path / "mine") == ["x"]
    assert (tmp_path / "sharded.ckpt").is_file()


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_in_an_object_store_is_loaded(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    path = f"shelf://{tmp_path}/step.ckpt"
    [saved, _] = world(2).run(save, kind, "full_shard", path)
    for loaded, step, steps in world(2).run(load, "full_shard", path):
        torch.testing.assert_close(loaded, saved)
        assert (step, set(steps)) == (7, {1.0})


def load_what_is_not_there(folder: str) -> str:
    with launched(ShardedDP()) as fabric, pytest.raises(FileNotFoundError) as caught:
        fabric.load(f"{folder}/step=8.ckpt", {"model": fabric.setup(GPT())})
    return str(caught.value)


def test_a_checkpoint_that_is_not_there_is_an_error_with_those_beside_it(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(save, "sharded", "full_shard", str(tmp_path / "step=7.ckpt"))
    found = world(2).run(load_what_is_not_there, str(tmp_path))
    text = f"Checkpoint file not found: {tmp_path}/step=8.ckpt; beside it there are step=7.ckpt"
    assert found == [text, text]


def load_weights(path: str, raw: bool) -> dict[str, torch.Tensor]:
    with launched(ShardedDP()) as fabric:
        model = fabric.setup(GPT())
        if raw:
            fabric.load_raw(path, model)
        else:
            fabric.load(path, {"model": model})
        return {key: whole(it).clone() for key, it in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "raw"),
    [("weights.pth", True), ("weights.safetensors", True), ("weights.safetensors", False)],
)
def test_weights_alone_are_loaded(world: Worlds, tmp_path: Path, name: str, raw: bool) -> None:
    weights = dict(GPT().state_dict())
    path = tmp_path / name
    if path.suffix == ".pth":
        torch.save(weights, path)
    else:
        entries = [Entry(name=key, tensor=it, dtype=it.dtype) for key, it in weights.items()]
        with path.open("wb") as file:
            write_safetensors(file, entries, {})
    torch.testing.assert_close(world(2).run(load_weights, str(path), raw)[1], weights)


def test_a_module_class_reads_what_fabric_saved(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "step.ckpt")
    [saved, _] = world(2).run(save, "sharded", "full_shard", path)
    module = shardeddp.load_from_checkpoint(GPTModule, path)
    torch.testing.assert_close(dict(module.state_dict()), saved)


def resume(path: str) -> float:
    module = GPTModule()
    train_with_the_trainer("", module, ckpt_path=path)
    [optimizer] = module.trainer.optimizers
    return max(float(it["step"]) for it in optimizer.state_dict()["state"].values())


def test_the_trainer_goes_on_from_what_fabric_saved(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "step.ckpt")
    world(2).run(save, "sharded", "full_shard", path)
    assert world(2).run(resume, path) == [3.0, 3.0]


def load_from_trainer(path: str) -> list[float]:
    with launched(ShardedDP()) as fabric:
        model = GPTModule()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        rest = fabric.load(path, {"model": model, "optimizer": optimizer})
        assert rest["global_step"] == 2
        states = optimizer.optimizer.state_dict()["state"]
        return [float(it["step"]) for it in states.values()]


def test_fabric_reads_what_the_trainer_saved(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "trained.ckpt")
    world(2).run(train_with_the_trainer, path)
    assert set(world(2).run(load_from_trainer, path)[0]) == {2.0}


def test_what_goes_with_the_trainer_is_refused() -> None:
    options = shardeddp.CheckpointOptions(asynchronous=True)
    with pytest.raises(
        shardeddp.ConfigurationError, match=r"^CheckpointOptions\(asynchronous=True\) goes"
    ):
        ShardedDP(checkpoint_options=options)
    with pytest.raises(
        shardeddp.ConfigurationError, match=r"^uneven_batches goes with the Trainer"
    ):
        ShardedDP(uneven_batches="min")
    with pytest.raises(shardeddp.ConfigurationError, match=r"^expert_parallel_size goes with the"):
        ShardedDP(expert_parallel_size=2)
    with pytest.raises(TypeError, match="use_orig_params"):
        ShardedDP(use_orig_params=True)
    assert isinstance(Fabric(accelerator="cpu", devices=1, strategy=ShardedDP()), Fabric)
