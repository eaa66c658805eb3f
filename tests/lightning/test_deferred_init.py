"""A module that was built on the meta device trains as one that was built at once: same values, same draws after it."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torchmetrics import CatMetric, MeanMetric, MetricCollection

from shardeddp import ShardedDP, ShardTensor
from shardeddp.errors import ConfigurationError
from support.deferred import warned
from support.deferred_training import Make, SeesItsStart, deferred_model, same_weights, seed
from support.tasks import (
    VOCABULARY,
    Block,
    EvaluatedGpt,
    Recorded,
    TinyConvNet,
    TinyGpt,
    image_loader,
    token_loader,
)
from support.trainers import full_weights, make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


# -- modules


class Everything(Recorded):
    """Embedding, attention, LSTM, BatchNorm and dropout, whose masks come from the generator that drew the weights."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.recurrent = nn.LSTM(dim, dim, batch_first=True)
        self.norm = nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, VOCABULARY) of tokens (batch, length)."""
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.recurrent(self.dropout(self.blocks(x)))[0]
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))

    def loss(self, batch: Tensor) -> Tensor:
        """Cross-entropy of every next token."""
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One group."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class TiedToTheHead(TinyGpt):
    """The weight of both is what the head has drawn, and the head comes last."""

    def __init__(self) -> None:
        Recorded.__init__(self)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([Block(8)])
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.embed.weight = self.head.weight


class BuildsInConfigureModel(Recorded):
    """An embedding from the constructor, the rest from ``configure_model``; remembers the order of hooks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.hooks: list[str] = []
        self.embed = nn.Embedding(VOCABULARY, 8)

    def setup(self, stage: str) -> None:
        """Remember."""
        self.hooks.append("setup")

    def configure_model(self) -> None:
        """Build the body, eagerly or not."""
        self.hooks.append("configure_model")
        if self.how == "eager":
            self._build()
        elif self.how == "meta":
            with torch.device("meta"):
                self._build()
        else:
            with self.trainer.init_module(empty_init=True):
                self._build()

    def _build(self) -> None:
        self.body = nn.Sequential(Block(8), nn.Dropout(0.1), Block(8))
        self.head = nn.Linear(8, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        """Cross-entropy of every next token."""
        logits = self.head(self.body(self.embed(batch[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Remember what parameters are here."""
        self.hooks.append("configure_optimizers")
        assert all(isinstance(parameter, ShardTensor) for parameter in self.parameters())
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Uninitialised(TinyGpt):
    """Two parameters and a buffer that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))
        self.blocks[1].bias = nn.Parameter(torch.empty(2))
        self.register_buffer("mask", torch.empty(2, 2))


# -- helpers


def loader_of(model: LightningModule) -> Any:
    return image_loader(32) if isinstance(model, TinyConvNet) else token_loader(32)


def trained(
    make: Make, arguments: dict[str, Any], deferred: bool, globally: bool, **options: Any
) -> Any:
    """A module after four steps, and the generator's state then."""
    seed(globally)
    trainer = make_trainer(ShardedDP(**arguments), max_steps=4, max_epochs=-1, **options)
    with trainer.init_module(empty_init=deferred):
        model = make()
    assert any(parameter.is_meta for parameter in model.parameters()) == deferred
    trainer.fit(model, loader_of(model))
    return model, torch.get_rng_state()


def same_runs(make: Make, arguments: dict[str, Any], globally: bool, **options: Any) -> None:
    eager, generator = trained(make, arguments, False, globally, **options)
    deferred, deferred_generator = trained(make, arguments, True, globally, **options)
    assert deferred.losses == eager.losses
    same_weights(full_weights(deferred), full_weights(eager))
    assert torch.equal(deferred_generator, generator)


# -- training


def check_training(arguments: dict[str, Any]) -> None:
    for make in (TinyGpt, TinyConvNet, Everything):
        same_runs(make, arguments, globally=True)
    same_runs(Everything, arguments, globally=False)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
def test_training_is_that_of_a_module_built_at_once(world: Worlds, strategy: str) -> None:
    world(2).run(check_training, {"sharding_strategy": strategy})


@pytest.mark.long
@pytest.mark.slow
def test_it_is_with_replicas(world: Worlds) -> None:
    world(4).run(check_training, {"sharding_strategy": "hybrid_shard", "shard_size": 2})


@pytest.mark.slow
@on_ranks(2)
def test_a_tied_weight_is_that_of_the_module_that_made_it() -> None:
    same_runs(TiedToTheHead, {}, globally=False)


@pytest.mark.slow
@on_ranks(1)
def test_it_is_on_one_rank() -> None:
    check_training({})


@pytest.mark.loop(1)
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
@on_ranks(2)
def test_it_is_in_other_precisions(precision: Any) -> None:
    same_runs(TinyGpt, {"auto_wrap_policy": {Block}}, globally=True, precision=precision)


@on_ranks(2)
def test_a_module_that_is_converted_later_is_initialised_in_the_dtype_it_was_built_in() -> None:
    def run(device: str) -> dict[str, Tensor]:
        seed(True)
        with torch.device(device):
            model = TinyGpt()
        with warned() if device == "meta" else nullcontext():
            make_trainer(ShardedDP(), max_steps=1, precision="bf16-true").fit(
                model, token_loader(8)
            )
        return full_weights(model)

    same_weights(run("meta"), run("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("globally", [True, False])
@on_ranks(2)
def test_configure_model_may_build_on_the_meta_device(globally: bool) -> None:
    runs = {}
    for how in ("eager", "meta", "init_module"):
        seed(globally)
        model = BuildsInConfigureModel(how)
        make_trainer(ShardedDP(), max_steps=4, max_epochs=-1).fit(model, token_loader(32))
        assert model.hooks == ["setup", "configure_model", "configure_optimizers"]
        runs[how] = model.losses, full_weights(model), torch.get_rng_state()
    for how in ("meta", "init_module"):
        assert runs[how][0] == runs["eager"][0]
        same_weights(runs[how][1], runs["eager"][1])
        assert torch.equal(runs[how][2], runs["eager"][2])


class Measures(BuildsInConfigureModel):
    """With metrics as submodules, and a teacher that no state dict has."""

    def _build(self) -> None:
        super()._build()
        self.metric = MetricCollection({"loss": MeanMetric(), "mean": CatMetric()})
        self.teacher = [nn.Linear(8, 8, bias=False)]

    def loss(self, batch: Tensor) -> Tensor:
        """Of every next token, and of what the teacher makes of the embeddings."""
        found = super().loss(batch) + self.teacher[0](self.embed(batch)).square().mean()
        self.metric.update(found.detach())
        return found


@pytest.mark.slow
@on_ranks(2)
def test_metrics_and_modules_in_lists_may_be_built_on_the_meta_device() -> None:
    runs = {}
    for how in ("eager", "meta", "init_module"):
        seed(True)
        model = Measures(how)
        make_trainer(ShardedDP(), max_steps=4, max_epochs=-1).fit(model, token_loader(32))
        runs[how] = model.losses, model.metric.compute()
    assert runs["meta"][0] == runs["init_module"][0] == runs["eager"][0]
    for how in ("meta", "init_module"):
        for name, value in runs["eager"][1].items():
            assert torch.equal(runs[how][1][name], value)


@pytest.mark.loop(1)
@pytest.mark.parametrize("globally", [True, False])
@on_ranks(2)
def test_a_module_may_be_deferred_in_two_places(globally: bool) -> None:
    def run(how: str) -> tuple[list[float], dict[str, Tensor]]:
        seed(globally)
        trainer = make_trainer(ShardedDP(), max_steps=4, max_epochs=-1)
        with trainer.init_module(empty_init=how != "eager"):
            model = BuildsInConfigureModel(how)
        trainer.fit(model, token_loader(32))
        return model.losses, full_weights(model)

    losses, weights = run("eager")
    found, found_weights = run("meta")
    assert found == losses
    same_weights(found_weights, weights)


@on_ranks(2)
def test_numbers_drawn_between_building_and_training_are_not_drawn_again() -> None:
    seed(False)
    expected = SeesItsStart()
    seed(False)
    trainer = make_trainer(ShardedDP(), max_steps=1)
    model = deferred_model(trainer, SeesItsStart)
    torch.rand(3)
    moved = torch.get_rng_state()
    trainer.fit(model, token_loader(8))
    assert torch.equal(model.generator_at_start, moved)
    same_weights(model.weights_at_start, full_weights(expected))


class CopiesInSetup(Callback):
    """Averages of weights that are taken from the model in ``setup``, as it was built."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.module = copy.deepcopy(pl_module.blocks)
        self.weights = [parameter.detach().clone() for parameter in pl_module.parameters()]
        self.chosen = torch.randperm(100), pl_module.head.weight.detach().norm().item()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for kept, parameter in zip(self.weights, pl_module.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)
            for kept, parameter in zip(
                self.module.parameters(), pl_module.blocks.parameters(), strict=True
            ):
                kept.lerp_(parameter, 0.1)

    def kept(self) -> list[Tensor]:
        """All that it has taken."""
        return [*self.weights, *self.module.parameters(), self.chosen[0], Tensor([self.chosen[1]])]


@pytest.mark.slow
@on_ranks(2)
def test_what_setup_hooks_take_from_a_model_is_as_of_one_that_was_built_at_once() -> None:
    def run(deferred: bool) -> tuple[list[float], list[Tensor]]:
        seed(True)
        callback = CopiesInSetup()
        trainer = make_trainer(ShardedDP(), max_steps=4, max_epochs=-1, callbacks=[callback])
        with trainer.init_module(empty_init=deferred):
            model = TinyGpt()
        trainer.fit(model, token_loader(32))
        return model.losses, [*callback.kept(), torch.get_rng_state()]

    losses, kept = run(False)
    found = run(True)
    assert found[0] == losses
    assert all(torch.equal(one, other) for one, other in zip(found[1], kept, strict=True))


@pytest.mark.slow
@on_ranks(2)
def test_a_copy_that_was_taken_before_the_training_is_named() -> None:
    trainer = make_trainer(ShardedDP(), max_steps=1)
    model = deferred_model(trainer, TinyGpt)
    kept = [it.detach().clone() for it in model.blocks.parameters()]
    said = f"^{len(kept)} tensors on the meta device.*between its construction"
    with pytest.warns(UserWarning, match=said):
        trainer.fit(model, token_loader(8))


class KeepsAverages(Callback):
    """Averages that a checkpoint has, and are restored in place."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.kept = {name: it.detach().clone() for name, it in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                self.kept[name].lerp_(parameter, 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.kept)

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        for name, tensor in state_dict.items():
            self.kept[name].copy_(tensor)


def resumed(shared_folder: str) -> None:
    """Two runs, the second from the first's checkpoint, eager and deferred."""
    runs = []
    for deferred in (False, True):
        for max_epochs, ckpt_path in ((1, None), (2, f"{shared_folder}/{deferred}.ckpt")):
            seed(True)
            callback = KeepsAverages()
            trainer = make_trainer(ShardedDP(), max_epochs=max_epochs, callbacks=[callback])
            with trainer.init_module(empty_init=deferred):
                model = TinyGpt()
            trainer.fit(model, token_loader(8), ckpt_path=ckpt_path)
            trainer.save_checkpoint(f"{shared_folder}/{deferred}.ckpt")
        runs.append((model.losses, callback.kept))
    assert runs[0][0] == runs[1][0]
    same_weights(runs[1][1], runs[0][1])


@pytest.mark.long
@pytest.mark.slow
def test_what_a_checkpoint_writes_to_copies_of_setup_hooks_is_there_when_training_goes_on(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(resumed, str(tmp_path))


class NotesItsDevice(nn.Module):
    """Makes positions on the device that it has noted, and counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.device = self.embed.weight.device
        self.count = MeanMetric()

    def forward(self) -> Tensor:
        self.count.update(torch.ones(1))
        return self.embed(torch.arange(4, device=self.device))


class HasATeacher(TinyGpt):
    """Beside the model a teacher, and a copy of it that a setup hook takes."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = SimpleNamespace(each=[NotesItsDevice()])

    def setup(self, stage: str) -> None:
        self.teachers.each.append(copy.deepcopy(self.teachers.each[0]))

    def on_train_batch_end(self, *_: Any) -> None:
        self.said = [teacher() for teacher in self.teachers.each]


@pytest.mark.slow
@on_ranks(2)
def test_modules_beside_a_model_and_copies_of_them_are_on_the_host_as_they_have_noted() -> None:
    said = []
    for deferred in (False, True):
        model, _ = trained(HasATeacher, {}, deferred, globally=True)
        said.append(model.said)
        assert [str(it.to("cpu").count.device) for it in model.teachers.each] == ["cpu", "cpu"]
    assert all(torch.equal(one, other) for one, other in zip(*said, strict=True))


class LoadsInSetup(TinyGpt):
    """As one that takes pretrained weights there."""

    def setup(self, stage: str) -> None:
        weights = {name: torch.ones(it.shape) / 8 for name, it in self.state_dict().items()}
        self.load_state_dict(weights)


@pytest.mark.slow
@on_ranks(2)
def test_weights_that_a_setup_hook_loads_are_those_of_the_model() -> None:
    runs = []
    for deferred in (False, True):
        model, _ = trained(LoadsInSetup, {}, deferred, globally=True)
        runs.append((model.losses, full_weights(model)))
    assert runs[1][0] == runs[0][0]
    same_weights(runs[1][1], runs[0][1])


def fill_data(module: nn.Module) -> None:
    """As many initializers do."""
    if isinstance(module, nn.Embedding):
        module.weight.data.view(-1)[1:].zero_()


LOST_WRITES: dict[str, Callable[[TinyGpt], object]] = {
    "by an initializer": lambda model: nn.init.zeros_(model.embed.weight),
    "to data, by apply": lambda model: model.apply(fill_data),
    "to data that was kept": lambda model: next(it.data for it in model.parameters()).add_(1.0),
}


@pytest.mark.loop(1)
@pytest.mark.parametrize("how", LOST_WRITES)
@on_ranks(2)
def test_a_write_that_is_lost_between_building_and_training_is_refused_by_name(how: str) -> None:
    trainer = make_trainer(ShardedDP(), max_steps=1)
    model = deferred_model(trainer, TinyGpt)
    LOST_WRITES[how](model)
    said = r"embed.weight: expected no writes on the meta device.*or in setup\(\)"
    with pytest.raises(ConfigurationError, match=said):
        trainer.fit(model, token_loader(8))


@on_ranks(2)
def test_parameters_whose_data_was_read_between_building_and_training_are_ordinary_ones() -> None:
    trainer = make_trainer(ShardedDP(), max_steps=1)
    model = deferred_model(trainer, TinyGpt)
    assert all(isinstance(it, nn.Parameter) for it in model.parameters())
    assert type(copy.deepcopy(model.head).weight) is nn.Parameter
    assert sum(it.data.numel() for it in model.parameters()) == sum(
        it.numel() for it in model.parameters()
    )
    trainer.fit(model, token_loader(8))
    assert len(model.losses) == 1


class FailsInSetup(Callback):
    """In ``setup``, and again when it hears of that."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        raise LookupError("no data")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, _: Any) -> None:
        raise LookupError("no data to tell of")


@on_ranks(2)
def test_a_setup_hook_that_fails_ends_the_recording() -> None:
    trainer = make_trainer(ShardedDP(), max_steps=1, callbacks=[FailsInSetup()])
    model = deferred_model(trainer, TinyGpt)
    with pytest.raises(LookupError, match="no data"):
        trainer.fit(model, token_loader(8))
    assert _len_torch_function_stack() == _len_torch_dispatch_stack() == 0


@pytest.mark.slow
@on_ranks(2)
def test_several_modules_may_be_built_before_one_is_trained() -> None:
    seed(False)
    expected = [full_weights(EvaluatedGpt()) for _ in range(2)]
    seed(False)
    trainer = make_trainer(ShardedDP(), max_epochs=1)
    copy.deepcopy(trainer.strategy)
    with trainer.init_module(empty_init=True):
        models = [EvaluatedGpt(), EvaluatedGpt()]
    for model, weights in zip(models, expected, strict=True):
        trainer.validate(model, token_loader(8), verbose=False)
        same_weights(full_weights(model), weights)


@on_ranks(1)
def test_without_empty_init_a_module_is_built_on_the_host() -> None:
    trainer = make_trainer(ShardedDP(), max_steps=1, precision="bf16-true")
    for empty_init in (None, False):
        with trainer.init_module(empty_init=empty_init):
            model = TinyGpt()
        assert model.embed.weight.device.type == "cpu"
        assert model.embed.weight.dtype is torch.bfloat16


# -- what cannot be initialised


@on_ranks(2)
def test_what_nothing_initialises_is_listed_on_every_rank_before_any_training() -> None:
    trainer = make_trainer(ShardedDP(), max_steps=1)
    with trainer.init_module(empty_init=True):
        model = Uninitialised()
    with pytest.raises(
        ConfigurationError, match=r"found 3 on the meta device.*: blocks.1.bias, gain, mask."
    ) as caught:
        trainer.fit(model, token_loader(8))
    assert "in the constructors of Block, Uninitialised" in str(caught.value)
    assert model.losses == []
    with pytest.raises(ConfigurationError, match="build the module anew"):
        make_trainer(ShardedDP(), max_steps=1).fit(model, token_loader(8))
