"""What users keep in a checkpoint beside model and optimizers goes on after a resume as it does under DDP."""

import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from shardeddp import ShardedDP, ShardTensor
from shardeddp.checkpoint.schema import KEY
from support.resuming import same_batches
from support.tasks import Block, TinyGpt
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(90)

ALL = [
    ("full_shard", None),
    ("shard_grad_op", None),
    ("shard_optimizer", None),
    ("no_shard", None),
    ("hybrid_shard", 2),
]
FORMATS = [
    *((*each, "auto") for each in ALL),
    *(("full_shard", None, "sharded"), ("no_shard", None, "sharded")),
]
"""Without optimizer states, formats differ only by whether there are shards."""

Reference = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def ddp(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """``ddp(n, function)`` is what a run leaves under DDP on n ranks, found once."""
    path = str(tmp_path_factory.mktemp("ddp") / "last.ckpt")
    return lambda size, *functions: reference(size, *functions, path, "ddp", None)


def strategy_of(name: str, size: int | None, kind: Any = "auto") -> Any:
    if name == "ddp":
        return DDPStrategy()
    return ShardedDP(name, size, {Block}, state_dict_type=kind)


# -- tensors like parameters


class Average(Callback):
    """A home-made EMA, which goes on with the very tensors that it has loaded."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.kept:
            self.kept = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                self.update(self.kept[name], parameter)

    def update(self, kept: Tensor, parameter: Tensor) -> None:
        kept.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]


class ScaledSum(Average):
    """The same by other operations."""

    def update(self, kept: Tensor, parameter: Tensor) -> None:
        kept.mul_(0.9).add_(parameter.detach(), alpha=0.1)


class Latest(Average):
    """Copies."""

    def update(self, kept: Tensor, parameter: Tensor) -> None:
        kept.copy_(parameter.detach())


class Cloned(Average):
    """Goes on with copies of what it has loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = {name: tensor.to("cpu").clone() for name, tensor in state_dict["kept"].items()}


class Viewed(Average):
    """Holds views of what it has loaded, and scales it before there are shards."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]
        self.views = [tensor.view(-1) for tensor in self.kept.values()]
        for tensor in self.kept.values():
            tensor.mul_(2)


class ByFunctions(Average):
    """Updates many at once, out of a list in a tuple."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.kept.values()), [p.detach() for p in pl_module.parameters()], 0.2
            )

    def state_dict(self) -> dict[str, Any]:
        return {"kept": (list(self.kept), list(self.kept.values()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = dict(zip(*state_dict["kept"], strict=True))


class KeepsInItself(TinyGpt):
    """A module with a momentum copy of one of its own weights, and a number that is no parameter's."""

    teacher: Tensor | None = None
    plain: Tensor | None = None

    def on_train_start(self) -> None:
        if self.teacher is None:
            self.teacher, self.plain = self.head.weight.detach().clone(), torch.zeros(3)

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.teacher is not None and self.plain is not None
        with torch.no_grad():
            self.teacher.mul_(0.5).add_(self.head.weight.detach(), alpha=0.5)
            self.plain += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"teacher": [self.teacher], "plain": self.plain}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (self.teacher,), self.plain = checkpoint["mine"]["teacher"], checkpoint["mine"]["plain"]


KEEPERS: list[type[Average]] = [Average, ScaledSum, Latest, Cloned, Viewed, ByFunctions]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor).detach().clone()


def save_and_resume(path: str, *strategy: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    for epochs in (1, 2):
        model, keepers = KeepsInItself(), [keeper() for keeper in KEEPERS]
        trainer = make_trainer(strategy_of(*strategy), max_epochs=epochs, callbacks=keepers)
        trainer.fit(model, same_batches(), ckpt_path=path if epochs == 2 else None)
        if epochs == 1:
            trainer.save_checkpoint(path)
            dist.barrier()
    assert model.teacher is not None and model.plain is not None
    kept = {
        f"{type(it).__name__} {name}": whole(tensor)
        for it in keepers
        for name, tensor in it.kept.items()
    }
    kinds = [{type(tensor).__name__ for tensor in it.kept.values()} for it in keepers]
    extra = {"teacher": whole(model.teacher), "plain": model.plain}
    return {"kept": {**kept, **extra, **full_weights(model)}, "kinds": kinds}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "sharded"])
@pytest.mark.parametrize(("strategy", "size"), ALL)
def test_copies_of_parameters_go_on_as_under_ddp(
    world: Worlds, ddp: Reference, tmp_path: Path, strategy: str, size: int | None, kind: str
) -> None:
    ranks = 4 if size else 2
    expected = ddp(ranks, save_and_resume)
    found = world(ranks).run(save_and_resume, str(tmp_path / "ours.ckpt"), strategy, size, kind)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_weights(mine["kept"], theirs["kept"])
        sharded, scaled, latest, _, _, listed = mine["kinds"]
        assert sharded == scaled == latest == listed == {"ShardTensor"}


# -- optimizers that are not there


class Unoptimized(TinyGpt):
    """Counts batches and trains nothing."""

    def configure_optimizers(self) -> None:
        return None


def train_without_optimizers(path: str, *strategy: Any) -> dict[str, Any]:
    for epochs in (1, 2):
        model = Unoptimized()
        trainer = make_trainer(strategy_of(*strategy), max_epochs=epochs)
        trainer.fit(model, same_batches(), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
        dist.barrier()
    return {"losses": model.losses, "batches": trainer.fit_loop.epoch_loop.total_batch_idx}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size", "kind"), FORMATS)
def test_a_module_without_optimizers_is_saved_and_resumed(
    world: Worlds, ddp: Reference, tmp_path: Path, strategy: str, size: int | None, kind: str
) -> None:
    ranks = 4 if size else 2
    expected = ddp(ranks, quietly, train_without_optimizers)
    found = world(ranks).run(
        quietly, train_without_optimizers, str(tmp_path / "ours.ckpt"), strategy, size, kind
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["batches"] == theirs["batches"]
        torch.testing.assert_close(mine["losses"], theirs["losses"])


class StepsItself(TinyGpt):
    """Descends without an optimizer."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return None

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.losses.append(float(loss.detach()))
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        """Down the gradients, which are dropped then."""
        for parameter in self.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


class HasNone(StepsItself):
    """The same with an empty list of optimizers."""

    def configure_optimizers(self) -> Any:
        return []


class HasItsOwn(StepsItself):
    """An optimizer of which Lightning knows nothing, with a state of its own in the checkpoint."""

    def on_fit_start(self) -> None:
        self.own = torch.optim.SGD(self.parameters(), lr=0.1)

    def step(self) -> None:
        self.own.step()
        self.own.zero_grad()


def train_twice(model_class: type[LightningModule], path: str, *strategy: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    for epochs in (1, 2):
        model: Any = model_class()
        trainer = make_trainer(strategy_of(*strategy), max_epochs=epochs)
        trainer.fit(model, same_batches(), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
        dist.barrier()
    return {"losses": model.losses, "weights": full_weights(model)}


Comparison = Callable[[type[LightningModule], str, int | None, str], None]


@pytest.fixture
def goes_on(world: Worlds, ddp: Reference, tmp_path: Path) -> Comparison:
    """Fails where a module that is saved and resumed does not go on as under DDP."""

    def compare(
        model_class: type[LightningModule], strategy: str, size: int | None, kind: str
    ) -> None:
        ranks = 4 if size else 2
        expected = ddp(ranks, quietly, train_twice, model_class)
        found = world(ranks).run(
            quietly, train_twice, model_class, str(tmp_path / "ours.ckpt"), strategy, size, kind
        )
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine["losses"], theirs["losses"], rtol=1e-5, atol=0)
            assert_same_weights(mine["weights"], theirs["weights"])

    return compare


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [StepsItself, HasNone, HasItsOwn])
@pytest.mark.parametrize(("strategy", "size", "kind"), FORMATS)
def test_a_module_that_steps_by_itself_goes_on_after_a_resume(
    goes_on: Comparison,
    model_class: type[LightningModule],
    strategy: str,
    size: int | None,
    kind: str,
) -> None:
    goes_on(model_class, strategy, size, kind)


def quietly(function: Callable[..., Any], *arguments: Any) -> Any:
    warnings.filterwarnings("ignore", "`LightningModule.configure_optimizers` returned `None`")
    warnings.filterwarnings("ignore", "the checkpoint has no optimizer states")
    return function(*arguments)


class Stripped(TinyGpt):
    """Leaves its optimizer states out."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


class StrippedOfSchedulersToo(Stripped):
    """The schedule begins anew as well."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["lr_schedulers"] = []


class TwoOptimizers(Stripped):
    """Both begin anew."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        body = [p for p in self.blocks.parameters() if p.ndim >= 2]
        rest = [self.embed.weight]
        return [torch.optim.Adam(body, lr=1e-2), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.losses.append(float(loss.detach()))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


class Emptied(TinyGpt):
    """Keeps the options of its optimizer, and leaves the moments out."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"][0]["state"] = {}


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [Stripped, StrippedOfSchedulersToo, TwoOptimizers, Emptied])
@pytest.mark.parametrize(("strategy", "size", "kind"), FORMATS)
def test_a_checkpoint_without_optimizer_states_is_gone_on_from(
    goes_on: Comparison,
    model_class: type[LightningModule],
    strategy: str,
    size: int | None,
    kind: str,
) -> None:
    goes_on(model_class, strategy, size, kind)


# -- what is the user's stays the user's


def prefixed(
    module: torch.nn.Module, state_dict: dict[str, Any], *arguments: Any, **options: Any
) -> Any:
    state = {name.removeprefix("old."): value for name, value in state_dict.items()}
    module.times = getattr(module, "times", 0) + 1  # type: ignore[assignment]
    return type(module).load_state_dict(module, state, *arguments, **options)  # type: ignore[arg-type]


class Renamed(TinyGpt):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {
            f"old.{name}": value for name, value in checkpoint["state_dict"].items()
        }


def load_in_its_own_way(path: str, kind: Any) -> tuple[int, bool, bool]:
    seed_everything(1, verbose=False)
    model = Renamed()
    trainer = make_trainer(strategy_of("full_shard", None, kind), max_epochs=1)
    trainer.fit(model, same_batches())
    trainer.save_checkpoint(path)
    dist.barrier()
    resumed = Renamed()
    own = resumed.load_state_dict = types.MethodType(prefixed, resumed)  # type: ignore[method-assign]
    again = make_trainer(strategy_of("full_shard", None, kind), max_epochs=1)
    again.fit(resumed, same_batches(), ckpt_path=path)
    mine, theirs = full_weights(resumed), full_weights(model)
    return (
        resumed.times,
        resumed.load_state_dict is own,
        all(torch.equal(mine[name], theirs[name]) for name in theirs),
    )


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", ["auto", "sharded"])
def test_an_instance_loads_by_its_own_method_and_keeps_it(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    assert (
        world(2).run(load_in_its_own_way, str(tmp_path / "x.ckpt"), kind) == [(1, True, True)] * 2
    )


class Watches(TinyGpt):
    seen: dict[str, Any] | None = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen, self.keys = checkpoint, list(checkpoint)


def save_what_was_seen(path: str, kind: Any) -> bool:
    model = Watches()
    trainer = make_trainer(strategy_of("full_shard", None, kind), max_epochs=1)
    trainer.fit(model, same_batches())
    trainer.save_checkpoint(path)
    assert model.seen is not None
    return list(model.seen) == model.keys and KEY not in model.seen


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", ["auto", "sharded"])
def test_the_checkpoint_that_a_hook_has_seen_stays_as_it_is(
    world: Worlds, tmp_path: Path, kind: str
) -> None:
    assert world(2).run(save_what_was_seen, str(tmp_path / "x.ckpt"), kind) == [True, True]
