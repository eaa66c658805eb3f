"""A module on the meta device takes its values from a checkpoint, without being initialised before."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardeddp import ShardedDP
from support.deferred_training import SeesItsStart, deferred_model, same_weights, seed
from support.tasks import EvaluatedGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


class GptWithAnotherHead(EvaluatedGpt):
    """One that an ordinary checkpoint lacks a layer of."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.strict_loading = False


@pytest.fixture(scope="module")
def checkpoint(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> str:
    """After four steps, one epoch."""
    path = tmp_path_factory.mktemp("checkpoints") / "one.ckpt"
    world(2).run(write_checkpoint, str(path))
    return str(path)


def write_checkpoint(path: str) -> None:
    seed(True)
    model = EvaluatedGpt()
    trainer = make_trainer(ShardedDP(state_dict_type="full"), max_epochs=1)
    trainer.fit(model, token_loader(32))
    trainer.save_checkpoint(path)


def never_initialised() -> Any:
    return mock.patch.multiple(
        "torch.nn.init",
        normal_=mock.Mock(side_effect=AssertionError("initialised")),
        kaiming_uniform_=mock.Mock(side_effect=AssertionError("initialised")),
        ones_=mock.Mock(side_effect=AssertionError("initialised")),
    )


def resume(path: str, weights_only: bool | None) -> None:
    def run(deferred: bool) -> SeesItsStart:
        seed(True)
        trainer = make_trainer(ShardedDP(), max_epochs=2)
        model = deferred_model(trainer, SeesItsStart) if deferred else SeesItsStart()
        with never_initialised():
            trainer.fit(model, token_loader(32), ckpt_path=path, weights_only=weights_only)
        return model

    eager, deferred = run(False), run(True)
    assert len(deferred.losses) == 4
    assert deferred.losses == eager.losses
    same_weights(deferred.weights_at_start, torch.load(path, weights_only=True)["state_dict"])
    same_weights(full_weights(deferred), full_weights(eager))


@pytest.mark.slow
@pytest.mark.parametrize("weights_only", [None, True, False])
def test_training_resumes_from_a_checkpoint_without_an_initialization(
    world: Worlds, checkpoint: str, weights_only: bool | None
) -> None:
    world(2).run(resume, checkpoint, weights_only)


def evaluate(path: str) -> None:
    expected = EvaluatedGpt.load_from_checkpoint(path)
    reference = make_trainer(ShardedDP())
    loader = token_loader(16)
    for verb in ("validate", "test", "predict"):
        trainer = make_trainer(ShardedDP())
        model = deferred_model(trainer)
        with never_initialised():
            found = getattr(trainer, verb)(model, loader, ckpt_path=path)
        torch.testing.assert_close(
            found, getattr(reference, verb)(expected, loader), rtol=0, atol=0
        )


@pytest.mark.slow
def test_every_verb_takes_a_checkpoint(world: Worlds, checkpoint: str) -> None:
    world(2).run(evaluate, checkpoint)


def load_partly(path: str) -> None:
    seed(True)
    expected = GptWithAnotherHead().extra
    trainer = make_trainer(ShardedDP())
    model = deferred_model(trainer, GptWithAnotherHead)
    trainer.validate(model, token_loader(8), ckpt_path=path)
    weights = full_weights(model)
    loaded = torch.load(path, weights_only=True)["state_dict"]
    same_weights({name: weights.pop(name) for name in loaded}, loaded)
    assert list(weights) == ["extra.weight", "extra.bias"]
    assert weights["extra.weight"].std() > 0.1
    assert weights["extra.weight"].abs().max() <= 8**-0.5
    assert weights["extra.weight"].shape == expected.weight.shape


def test_what_a_checkpoint_lacks_is_initialised(world: Worlds, checkpoint: str) -> None:
    world(2).run(load_partly, checkpoint)


def load_strictly(path: str) -> None:
    trainer = make_trainer(ShardedDP())
    model = deferred_model(trainer, GptWithAnotherHead)
    model.strict_loading = True
    with pytest.raises(RuntimeError, match=r'Missing key.*"extra.weight", "extra.bias"'):
        trainer.validate(model, token_loader(8), ckpt_path=path)


def test_what_a_checkpoint_lacks_is_an_error_where_loading_is_strict(
    world: Worlds, checkpoint: str
) -> None:
    world(2).run(load_strictly, checkpoint)


def load_into_meta(path: str) -> None:
    trainer = make_trainer(ShardedDP(), max_epochs=1)
    with trainer.init_module(empty_init=True):
        model = EvaluatedGpt.load_from_checkpoint(path)
    assert model.embed.weight.is_meta
    trainer.validate(model, token_loader(8), verbose=False)
    same_weights(full_weights(model), torch.load(path, weights_only=True)["state_dict"])


def test_load_from_checkpoint_gives_a_deferred_module_its_weights(
    world: Worlds, checkpoint: str
) -> None:
    world(2).run(load_into_meta, checkpoint)


def train_twice(path: str) -> None:
    seed(True)
    trainer = make_trainer(ShardedDP(), max_epochs=1)
    model = deferred_model(trainer)
    trainer.fit(model, token_loader(32))
    same_weights(full_weights(model), torch.load(path, weights_only=True)["state_dict"])
    trainer.validate(model, token_loader(8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    trainer.validate(model, token_loader(8), ckpt_path=path)  # a sharded module loads at once
    same_weights(full_weights(model), torch.load(path, weights_only=True)["state_dict"])


def test_later_runs_of_a_module_find_it_as_any_other(world: Worlds, checkpoint: str) -> None:
    world(2).run(train_twice, checkpoint)
