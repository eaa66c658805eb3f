"""A training step for which memory runs out on all ranks is repeated with deeper sharding, as if nothing had been."""

import copy
import gc
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from shardeddp import ReshardOnOutOfMemory, ReshardSchedule, ShardedDP
from shardeddp.engine.storage import GatheredBuffer
from shardeddp.errors import ConfigurationError
from shardeddp.lightning import repeated_steps
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(90)

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"
PATIENCE_S = 3.0


class Attempts:
    """What is noted about the attempts of a module: not in the module, whose state is set back."""

    def __init__(self) -> None:
        self.count = 0
        self.activations: list[weakref.ref[Tensor]] = []
        self.armed = False


ATTEMPTS: weakref.WeakKeyDictionary[nn.Module, Attempts] = weakref.WeakKeyDictionary()


class Needs(TinyGpt):
    """A module with all that a step changes, for which memory runs out in one step under some strategies."""

    def __init__(self, where: str = "", too_much: Sequence[str] = ("no_shard",)) -> None:
        super().__init__()
        self.where, self.too_much, self.at = where, too_much, (2, 0)
        self.ranks: Sequence[int] = range(8)
        self.later: tuple[int, int] | None = None  # once more, in a forward under shard_grad_op
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.mean, self.tracked = MeanMetric(), MeanMetric()
        ATTEMPTS[self] = Attempts()

    @property
    def attempts(self) -> Attempts:
        """Notes about this module's attempts."""
        return ATTEMPTS[self]

    def need(self, where: str) -> None:
        """Run out of memory, at the place of this module."""
        options = self.trainer.strategy.options  # type: ignore[attr-defined]
        micro_batch = self.trainer.fit_loop.batch_idx % self.trainer.accumulate_grad_batches
        is_now = (self.trainer.global_step, micro_batch) == self.at and where == self.where
        is_here = is_now and dist.get_rank() in self.ranks
        if is_here and options.sharding_strategy in self.too_much:
            self.attempts.count += 1
            self.attempts.armed = where == "gather"
            if not self.attempts.armed:
                raise torch.cuda.OutOfMemoryError(TEXT)
        now = self.trainer.global_step, micro_batch
        if now == self.later and where == "forward 1":
            assert options.sharding_strategy == "shard_grad_op"
            raise torch.cuda.OutOfMemoryError(TEXT)

    def need_in_backward(self, _: Tensor) -> None:
        self.need("backward")

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) of tokens (batch, length)."""
        gc.collect()
        assert not any(each() is not None for each in self.attempts.activations), (
            "of a failed attempt"
        )
        x = self.norm(self.drop(self.embed(tokens)).flatten(0, 1)).view(*tokens.shape, -1)
        self.attempts.activations.append(weakref.ref(x))
        self.log("early", x.detach().mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.tracked.update(x.detach().mean().item())
        for index, block in enumerate(self.blocks):
            x = block(x)
            self.need(f"forward {index}")
            if index == 0:
                self.need("gather")
        x.register_hook(self.need_in_backward)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        """Loss, logged once per batch."""
        logits = self(batch[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict({"late": loss.detach()}, on_step=False, on_epoch=True, sync_dist=True)
        return {"loss": loss, "logits": logits}


class Look(Callback):
    """Keeps losses and strategies."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.names: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:  # type: ignore[override]
        self.losses.append(outputs["loss"].item())
        self.names.append(trainer.strategy.options.sharding_strategy)


def train(
    model: TinyGpt, callbacks: Sequence[Callback], name: str = "no_shard", **options: Any
) -> tuple[Look, dict[str, Tensor], dict[str, float]]:
    torch.manual_seed(5 + dist.get_rank())
    look = Look()
    options = {"max_epochs": 1, "gradient_clip_val": 0.5, **options}
    trainer = make_trainer(
        ShardedDP(name, auto_wrap_policy={Block}), callbacks=[*callbacks, look], **options
    )
    trainer.fit(model, token_loader(64))
    values = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return look, full_weights(model), values


def make(*given: Any) -> Needs:
    torch.manual_seed(3)
    return Needs(*given)


def gathers_that_fail(model: Needs) -> Any:
    """Context in which the next gather's memory is missing while the model is armed."""
    allocate = GatheredBuffer.allocate

    def fails_if_armed(buffer: GatheredBuffer) -> Tensor:
        if model.attempts.armed:
            model.attempts.armed = False
            raise torch.cuda.OutOfMemoryError(TEXT)
        return allocate(buffer)

    return mock.patch.object(GatheredBuffer, "allocate", fails_if_armed)


def compare(
    where: str, accumulate: int, first: str, too_much: Sequence[str], names: Sequence[str]
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "name": first}
    wheres = where.split(" or ")
    expected, found = make(), make(wheres[dist.get_rank() % len(wheres)], too_much)
    last: Any = names[-1]
    wanted, weights, values = train(expected, [ReshardSchedule({2: last})], **options)
    deeper: Any = ReshardOnOutOfMemory([*names])  # type: ignore[list-item]
    with (
        gathers_that_fail(found),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        look, others, logged = train(found, [deeper], **options)
    texts = [str(each.message) for each in told if "memory has run out" in str(each.message)]
    assert len(texts) == (len(too_much) if dist.get_rank() == 0 else 0), texts
    assert all(TEXT in each and "step 2" in each for each in texts)
    assert found.attempts.count == len(too_much)
    assert look.names == wanted.names and look.names[-1] == last
    torch.testing.assert_close(
        torch.tensor(look.losses), torch.tensor(wanted.losses), rtol=0, atol=1e-6
    )
    assert logged == pytest.approx(values, abs=1e-6)
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=1e-5, atol=1e-6, msg=key)
    for key, value in dict(expected.named_buffers()).items():
        torch.testing.assert_close(dict(found.named_buffers())[key], value, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.tracked.compute(), expected.tracked.compute())
    assert found.tracked.update_count == expected.tracked.update_count


@pytest.mark.loop(2)
@pytest.mark.parametrize("accumulate", [1, 2])
# Without a gather, ranks are at one place in the forward and before the first reduction.
@pytest.mark.parametrize("where", ["forward 1", "backward", "forward 1 or backward"])
def test_a_repeated_step_is_that_of_a_run_that_has_changed_before_it(
    world: Worlds, where: str, accumulate: int
) -> None:
    world(2).run(compare, where, accumulate, "no_shard", ["no_shard"], ["full_shard"])


TWICE = ["no_shard", "shard_optimizer"], ["shard_optimizer", "shard_grad_op"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "first", "where", "too_much", "names"),
    [
        (2, "no_shard", "forward 2", *TWICE),
        (2, "no_shard", "backward", *TWICE),
        (2, "shard_grad_op", "gather", ["shard_grad_op"], ["full_shard"]),
        (4, "hybrid_shard", "gather", ["hybrid_shard"], ["full_shard"]),
        (4, "hybrid_shard", "backward", ["hybrid_shard"], ["full_shard"]),
    ],
)
def test_every_deeper_strategy_is_tried_until_one_fits(
    world: Worlds, ranks: int, first: str, where: str, too_much: list[str], names: list[str]
) -> None:
    world(ranks).run(compare, where, 1, first, too_much, names)


class Unusual(Needs):
    """Keeps state where modules usually have none, and fails with an error that is its own cause."""

    def __init__(self, where: str = "", too_much: Sequence[str] = ("no_shard",)) -> None:
        super().__init__(where, too_much)
        self.at = (0, 0)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("running", None)
        self.metrics = {"mean": MeanMetric()}
        self.drop.metrics = deque([MeanMetric()])  # type: ignore[assignment]
        self.noise = torch.Generator().manual_seed(1)
        self.register_buffer("queue", torch.zeros(1))
        self.hidden = [nn.BatchNorm1d(8)]
        self.count, self.means = 0, list[float]()
        object.__setattr__(self, "write", type(self).log.__get__(self))

    def need(self, where: str) -> None:
        try:
            super().need(where)
        except torch.cuda.OutOfMemoryError as error:
            raise error from error

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        self.eval()
        if self.where == "forward -1":
            self.need(self.where)
        self.train()
        self.queue.data = torch.cat(
            [self.queue, self.hidden[0](self.embed.weight.detach()).sum()[None]]
        )
        self.count += 1
        self.means.append(self.queue.mean().item())
        found = super().training_step(batch, batch_index)
        loss = found["loss"] * self.scale
        value, last = loss.detach(), self.running
        self.running = value.clone() if last is None else 0.5 * last + value  # type: ignore[reportConstantRedefinition]
        self.register_buffer(f"of_{batch_index}", value.clone())
        self.metrics["mean"].update(value)
        self.drop.metrics[0].update(value)  # type: ignore[index, union-attr]
        loss = loss * (1 + torch.rand((), generator=self.noise))
        self.write("bound", value, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)  # type: ignore[operator]
        super().log(
            "inherited", value, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True
        )
        assert "log" not in vars(self)
        return {"loss": loss * (1 + self.running), "scale": self.scale}


class Hooked(Unusual):
    """Changes state between forward and backward, in hooks, and in its optimizer."""

    def __init__(self, where: str = "", too_much: Sequence[str] = ("no_shard",)) -> None:
        super().__init__(where, too_much)
        self.zeroed, self.temperature = 0, 1.0
        self.delta = torch.zeros(1, requires_grad=True)
        calls = [0, 0]

        def of_parameter(gradient: Tensor) -> Tensor:
            calls[0] += 1
            return gradient * (1 + 0.1 * calls[0])

        def of_module(_: Any, gradients: Any, __: Any) -> Any:
            calls[1] += 1
            return (gradients[0] * (1 + 0.1 * calls[1]),)

        self.head.weight.register_hook(of_parameter)
        self.head.register_full_backward_hook(of_module)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.zeroed += 1
        self.temperature *= 1 + 0.1 * torch.rand(()).item()
        self.log("zeroed", self.temperature, on_step=False, on_epoch=True, sync_dist=True)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.temperature *= 1.1
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_after_backward(self) -> None:
        gradient = self.delta.grad
        assert gradient is not None
        with torch.no_grad():
            self.delta -= 0.1 * gradient
        self.delta.grad = None

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        self.schedule.step()
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["weight_decay"] += 0.01
        handles = [
            self.blocks[0].register_forward_hook(lambda module, args, output: output + 0.1),
            self.blocks[0].register_forward_pre_hook(
                lambda module, args, kwargs: ((args[0] + 0.1,), kwargs), with_kwargs=True
            ),
            self.blocks[0].register_full_backward_hook(lambda module, before, after: None),
            self.head.weight.register_hook(lambda gradient: 2 * gradient),
        ]
        found = super().training_step(batch, batch_index)
        for handle in handles:
            handle.remove()
        return {"loss": found["loss"] * self.temperature + self.delta.sum()}


def compare_hooked(where: str) -> None:
    compare_unusual(where, Hooked)


@pytest.mark.parametrize("where", ["forward 1", "backward"])
def test_hooks_and_optimizers_are_those_of_the_begin_of_a_repeated_step(
    world: Worlds, where: str
) -> None:
    world(2).run(compare_hooked, where)


def compare_unusual(where: str, kind: type[Unusual] = Unusual) -> None:
    expected, found = kind(), kind(where)
    found.load_state_dict(expected.state_dict())
    wanted, weights, values = train(expected, [ReshardSchedule({0: "full_shard"})])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "memory has run out")
        look, others, logged = train(found, [ReshardOnOutOfMemory(["full_shard"])])
    assert found.attempts.count == 1 and look.names == wanted.names
    assert look.losses == pytest.approx(wanted.losses, abs=1e-6)
    assert logged == pytest.approx(values, abs=1e-6) and "bound" in logged
    assert found.scale.requires_grad
    assert (found.count, found.means) == (expected.count, pytest.approx(expected.means, abs=1e-5))
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=1e-5, atol=1e-6, msg=key)
    for key, value in dict(expected.named_buffers()).items():
        torch.testing.assert_close(dict(found.named_buffers())[key], value, rtol=0, atol=1e-5)
    for its, other in (
        (found.metrics["mean"], expected.metrics["mean"]),
        (found.drop.metrics[0], expected.drop.metrics[0]),  # type: ignore[index, union-attr]
    ):
        assert its.update_count == other.update_count  # type: ignore[union-attr]
    assert torch.equal(found.noise.get_state(), expected.noise.get_state())


@pytest.mark.parametrize("where", ["forward -1", "forward 1", "backward"])
def test_state_in_unusual_places_is_that_of_the_begin_of_a_repeated_step(
    world: Worlds, where: str
) -> None:
    world(2).run(compare_unusual, where)


# -- where a step cannot be repeated


def fails(where: str, ranks: Sequence[int], others: str, at: Any, name: str, options: Any) -> str:
    """Text of the error that ends the run on this rank."""
    model = make(where, ["no_shard", "shard_grad_op", "full_shard"])
    model.at = at[0]
    model.later = at[1] if len(at) > 1 else None
    if others:
        model.where = where if dist.get_rank() in ranks else others
    else:
        model.ranks = ranks
    deeper = ReshardOnOutOfMemory(patience_s=PATIENCE_S)
    with warnings.catch_warnings(), gathers_that_fail(model), pytest.raises(Exception) as caught:
        warnings.filterwarnings("ignore", "memory has run out")
        train(model, [deeper], name, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("where", "ranks", "others", "at", "name", "options"),
    [
        pytest.param("forward 1", [0], "", [(2, 0)], "shard_grad_op", {}, id="one rank alone"),
        pytest.param(
            "forward 0", [0], "forward 2", [(2, 0)], "shard_grad_op", {}, id="not at one place"
        ),
        pytest.param(
            "gather", [0], "forward 1", [(2, 0)], "shard_grad_op", {}, id="a gather not launched"
        ),
        pytest.param(
            "forward 1",
            [0, 1],
            "",
            [(1, 1)],
            "no_shard",
            {"accumulate_grad_batches": 2},
            id="in a forward after that of another micro-batch",
        ),
        pytest.param(
            "forward 1",
            [0, 1],
            "",
            [(1, 0), (1, 1)],
            "no_shard",
            {"accumulate_grad_batches": 2},
            id="in a forward after a repeated micro-batch",
        ),
        pytest.param(
            "backward",
            [0, 1],
            "",
            [(1, 1)],
            "no_shard",
            {"accumulate_grad_batches": 2},
            id="gradients of a micro-batch before",
        ),
        pytest.param("forward 1", [0, 1], "", [(2, 0)], "full_shard", {}, id="the deepest"),
        pytest.param("forward 1", [0], "", [(2, 0)], "no_shard", {}, id="a single rank"),
    ],
)
def test_the_error_ends_the_run(
    world: Worlds,
    request: pytest.FixtureRequest,
    where: str,
    ranks: Any,
    others: str,
    at: Any,
    name: str,
    options: Any,
) -> None:
    count = 1 if request.node.callspec.id == "a single rank" else 2
    texts = world(count).run(fails, where, ranks, others, at, name, options)
    assert texts[0].startswith(f"OutOfMemoryError: {TEXT}")
    assert "Memory of this rank" in texts[0]


class Frozen(Needs):
    """Leaves a block out of its optimizer, whose gradient is that of all steps."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [it for name, it in self.named_parameters() if not name.startswith("blocks.0")]
        )


class Changing(Needs):
    """Takes its batch apart."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(
            *args, **{**kwargs, "batch_size": 4}
        )  # nobody finds it in the rest of the batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch}

    def training_step(self, batch: Any, batch_index: int) -> Any:
        return super().training_step(batch.pop("x"), batch_index)


class InPlace(Needs):
    """Changes a large tensor in a list of a metric."""

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.mean.add_state("values", [], "cat")

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        values: Any = self.mean.values
        if not values:
            values.append(torch.zeros(20_000))
        values[0] += 1
        return super().training_step(batch, batch_index)


class Averaging(Needs):
    """Has a copy of a block, which follows the block in each step."""

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.teacher = copy.deepcopy(self.blocks[0]).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        for its, other in zip(self.teacher.parameters(), self.blocks[0].parameters(), strict=True):
            its.lerp_(other.detach(), 0.1)
        return super().training_step(batch, batch_index)


class AveragingBeside(Needs):
    """Has such a copy where no strategy looks for modules."""

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.teachers = [nn.Linear(2, 2).requires_grad_(False)]

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        self.teachers[0].weight.mul_(0.9)
        return super().training_step(batch, batch_index)


def logs_of_failure(kind: type[Needs], where: str) -> list[str]:
    lines: list[str] = []
    with (
        mock.patch.object(repeated_steps.log, "error", lines.append),
        warnings.catch_warnings(),
        pytest.raises((torch.OutOfMemoryError, KeyError)),
    ):
        warnings.filterwarnings("ignore", "memory has run out")
        train(kind(where), [ReshardOnOutOfMemory(patience_s=PATIENCE_S)])
    return lines


@pytest.mark.parametrize(
    ("kind", "where", "reason"),
    [
        (Frozen, "backward", "blocks.0.norm.weight had a gradient before its backward"),
        (Changing, "forward 1", "a training_step that changes its batch"),
        (Averaging, "forward 1", "has written to teacher.norm.weight"),
        (Averaging, "backward", "has written to teacher.norm.weight"),
        (AveragingBeside, "forward 1", "a tensor inside of Linear.weight in place"),
        (InPlace, "forward 1", "has changed a tensor inside of MeanMetric.values in place"),
    ],
)
def test_a_step_that_cannot_be_repeated_says_why(
    world: Worlds, kind: Any, where: str, reason: str
) -> None:
    for lines in world(2).run(logs_of_failure, kind, where):
        assert len(lines) == 1 and reason in lines[0], lines


class TakesIterator(Needs):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class Manual(Needs):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@on_ranks(1)
def test_runs_whose_steps_cannot_be_repeated_are_refused() -> None:
    deeper = ReshardOnOutOfMemory()
    for model, callbacks, options, words in (
        (Manual(), [deeper], {"gradient_clip_val": None}, "manual optimization"),
        (TakesIterator(), [deeper], {}, "would take the next batch"),
        (make(), [deeper, ReshardSchedule({1: "no_shard"})], {}, "beside ReshardSchedule"),
    ):
        with warnings.catch_warnings(), pytest.raises(ConfigurationError, match=words):
            warnings.filterwarnings("ignore", ".*`dataloader_iter` step flavor")
            train(model, callbacks, **options)
    trainer = make_trainer("auto", callbacks=[deeper], max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"strategy=ShardedDP"):
        trainer.fit(make(), token_loader(32))
    for given in ([], ["zero9"], "full_shard", None):
        with pytest.raises(ConfigurationError, match="expected ReshardOnOutOfMemory"):
            ReshardOnOutOfMemory(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="above 0, found -1"):
        ReshardOnOutOfMemory(patience_s=-1)


@pytest.mark.slow
def test_a_resumed_run_begins_with_the_strategy_that_fitted(world: Worlds, tmp_path: Path) -> None:
    world(2).run(resume, str(tmp_path / "a.ckpt"))


def resume(path: str) -> None:
    def fit(model: Needs, name: str, ckpt_path: str | None, **options: Any) -> tuple[Any, Look]:
        look = Look()
        trainer = make_trainer(
            ShardedDP(name, auto_wrap_policy={Block}),
            callbacks=[ReshardOnOutOfMemory(), look],
            **options,
        )
        trainer.fit(model, token_loader(32), ckpt_path=ckpt_path)
        return trainer, look

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "memory has run out")
        first, look = fit(make("forward 1"), "no_shard", None, max_steps=3)
    assert look.names == ["no_shard", "no_shard", "shard_grad_op"]
    first.save_checkpoint(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        _, look = fit(make(), "no_shard", path, max_steps=4)
        assert look.names == ["shard_grad_op"]
        _, look = fit(make(), "full_shard", path, max_steps=4)
        assert look.names == ["full_shard"], "it is deeper already"
