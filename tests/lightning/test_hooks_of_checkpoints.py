"""States of a user's own classes, and what hooks do to a checkpoint, come back as under DDP."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint

from shardeddp import CheckpointError, ShardedDP
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)


class Timer(L.Callback):
    """Has the name of one of Lightning's, and a state of its own."""

    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": "long"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class OwnStopping(EarlyStopping):
    """One of Lightning's with another state."""

    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"patience": "three"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


OwnStopping.__qualname__ = "EarlyStopping"


class OwnSaves(Checkpoint):
    """Keeps checkpoints by rules of its own."""

    loaded: Any = None

    def __init__(self, state: Any) -> None:
        self.dirpath, self.state = "somewhere", state

    @property
    def state_key(self) -> str:
        return f"OwnSaves of a {type(self.state).__name__}"

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = state_dict


OF_SAVES = ([1, 2], {"dirpath": "elsewhere", "best_k_models": ["a.ckpt"]})


class Phases(torch.optim.lr_scheduler.LRScheduler):
    """Keeps values of changing kinds."""

    phase: Any = 0

    def get_lr(self) -> list[float]:
        if self.last_epoch > 0:
            self.phase = "warm" if isinstance(self.phase, (int, list)) else [1, "cold"]
        return [group["lr"] for group in self.optimizer.param_groups]


class Listed:
    """A scheduler whose state is a list."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.seen: Any = [0]

    def step(self, metrics: Any = None) -> None:
        self.seen.append(len(self.seen))

    def state_dict(self) -> Any:
        return self.seen

    def load_state_dict(self, state: Any) -> None:
        self.seen = list(state)


class Scheduled(TinyGpt):
    listed = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.scheduler = Listed(optimizer) if self.listed else Phases(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


def strategy(kind: str) -> ShardedDP:
    return ShardedDP("full_shard", None, {Block}, state_dict_type=kind)


def data() -> Any:
    return token_loader(8 * dist.get_world_size())


def resume_own_classes(kind: str, path: str, listed: bool) -> tuple[Any, ...]:
    """What own callbacks and an own scheduler have loaded, and the latter's state when it was saved."""

    def make() -> tuple[Any, Any, list[Any]]:
        stops = OwnStopping("loss", check_on_train_epoch_end=False)
        model, callbacks = Scheduled(), [Timer(), stops, *map(OwnSaves, OF_SAVES)]
        model.listed = listed
        return (
            model,
            make_trainer(
                strategy(kind), callbacks=callbacks, max_epochs=2, enable_checkpointing=True
            ),
            callbacks,
        )

    model, trainer, _ = make()
    trainer.fit(model, data())
    trainer.save_checkpoint(path)
    saved = model.scheduler.seen if listed else model.scheduler.phase
    model, trainer, callbacks = make()
    trainer.fit(model, data(), ckpt_path=path)
    again = model.scheduler.seen if listed else model.scheduler.phase
    return [it.loaded for it in callbacks], saved, again


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
@pytest.mark.parametrize("listed", [False, True], ids=["phases", "list"])
def test_own_classes_go_on_whatever_their_states_and_names_are(
    world: Worlds, tmp_path: Path, kind: str, listed: bool
) -> None:
    for found in world(2).run(resume_own_classes, kind, str(tmp_path / "a.ckpt"), listed):
        loaded, saved, again = found
        assert loaded == [{"time_elapsed": "long"}, {"patience": "three"}, *OF_SAVES]
        assert saved == again
        assert saved not in (0, [0])


class Packed(TinyGpt):
    """Keeps entries of a checkpoint in a form of its own, and gives Lightning back what it knows."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["callbacks"] = [*checkpoint["callbacks"].items()]
        checkpoint["optimizer_states"] = dict(enumerate(checkpoint["optimizer_states"]))
        checkpoint["lr_schedulers"] = dict(enumerate(checkpoint["lr_schedulers"]))
        checkpoint["global_step"] = torch.tensor(checkpoint["global_step"])
        checkpoint["epoch"] = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["callbacks"] = dict(checkpoint["callbacks"])
        checkpoint["optimizer_states"] = [*checkpoint["optimizer_states"].values()]
        checkpoint["lr_schedulers"] = [*checkpoint["lr_schedulers"].values()]
        checkpoint["global_step"] = int(checkpoint["global_step"])
        checkpoint["epoch"] = 0


class Forgets(Packed):
    """Undoes a part of it."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["global_step"] = int(checkpoint["global_step"])
        checkpoint["epoch"] = 0


def resume_packed(kind: str, folder: str, model: type[Packed]) -> tuple[float, Any]:
    """Largest difference to training without a stop, and the error, if there is one."""

    def fit(epochs: int, made: TinyGpt, path: str | None = None) -> Any:
        saves = ModelCheckpoint(folder, save_last=True)
        trainer = make_trainer(
            strategy(kind), callbacks=[saves], max_epochs=epochs, enable_checkpointing=True
        )
        trainer.fit(made, data(), ckpt_path=path)
        return full_weights(made)

    torch.manual_seed(1)
    whole = Packed()
    torch.manual_seed(1)
    halves = model()
    expected = fit(2, whole)
    fit(1, halves)
    try:
        found = fit(2, model(), f"{folder}/last.ckpt")
    except CheckpointError as error:
        return 0.0, str(error)
    return max((expected[name] - found[name]).abs().max().item() for name in expected), None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_what_a_hook_undoes_is_looked_at_after_it(world: Worlds, tmp_path: Path, kind: str) -> None:
    for difference, error in world(2).run(resume_packed, kind, str(tmp_path), Packed):
        assert error is None
        assert difference == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_what_no_hook_undoes_is_an_error_with_its_place(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    for _, error in world(2).run(resume_packed, kind, str(tmp_path), Forgets):
        assert "callbacks: expected a mapping, found a list" in error
        assert "last.ckpt" in error


class Loopless(TinyGpt):
    """Leaves something else in the place of what loops have saved."""

    loops: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loops"] = self.loops


def resume_loopless(kind: str, folder: str) -> list[Any]:
    """The step after a resume without loops, and errors of the others."""
    found = list[Any]()
    for number, loops in enumerate((None, [], {"fit_loop": None}, {"fit_loop": {"state_dict": 1}})):
        path = f"{folder}/{number}.ckpt"
        model = Loopless()
        model.loops = loops
        trainer = make_trainer(strategy(kind), max_epochs=1)
        trainer.fit(model, data())
        trainer.save_checkpoint(path)
        trainer = make_trainer(strategy(kind), max_epochs=2)
        try:
            trainer.fit(Loopless(), data(), ckpt_path=path)
        except CheckpointError as error:
            found.append(str(error))
        else:
            found.append(trainer.global_step)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_a_hook_may_take_the_state_of_loops_away(world: Worlds, tmp_path: Path, kind: str) -> None:
    for step, *errors in world(2).run(resume_loopless, kind, str(tmp_path)):
        assert step > 0
        assert "loops: expected a mapping, found a list" in errors[0]
        assert "loops.fit_loop: expected a mapping, found a NoneType" in errors[1]
        assert "loops.fit_loop.state_dict: expected a mapping, found 1" in errors[2]


class Place:
    """Something that only pickle can keep."""


class Somewhere(TinyGpt):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["where"] = Place()


def resume_with_object(kind: str, path: str) -> tuple[str, int]:
    """The error, and the step after a resume that trusts the file."""
    warnings.filterwarnings("ignore", "where in the checkpoint can be kept by pickle alone")
    trainer = make_trainer(strategy(kind), max_steps=-1, max_epochs=1)
    trainer.fit(Somewhere(), data())
    trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError) as caught:
        make_trainer(strategy(kind), max_steps=-1, max_epochs=2).fit(
            Somewhere(), data(), ckpt_path=path
        )
    trainer = make_trainer(strategy(kind), max_steps=-1, max_epochs=2)
    trainer.fit(Somewhere(), data(), ckpt_path=path, weights_only=False)
    return str(caught.value), trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_what_only_pickle_can_load_is_a_checkpoint_error_that_says_how(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    for text, step in world(2).run(resume_with_object, kind, str(tmp_path / "a.ckpt")):
        assert "a.ckpt" in text
        assert "weights_only=False" in text
        assert ("Place" if kind == "full" else "where") in text
        assert step > 1
