"""States of optimizers that no step has made are refused before anything of a run is changed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from shardeddp import CheckpointError
from shardeddp.lightning.restore import check_scheduler
from support.resuming import full_shard, in_one_file
from support.tasks import TinyGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


class UnderAdam(TinyGpt):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _group(**options: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer["param_groups"][0].update(options)


def _state(**values: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer["state"][1].update(values)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "text for a learning rate": (_group(lr="0.1"), "options .* make no AdamW"),
    "a number for a flag": (_group(capturable=0.5), "AdamW: capturable is 0.5: expected True"),
    "a flag of GPUs": (_group(capturable=True), "AdamW: capturable is True: .* on the CPU"),
    "a number for betas": (_group(betas=0.9), "options .* make no AdamW"),
    "no second moment": (
        lambda optimizer: optimizer["state"][1].pop("exp_avg_sq"),
        "exp_avg_sq of parameter 1 is missing",
    ),
    "a number for a moment": (_state(exp_avg=0.5), "exp_avg of parameter 1 is a float"),
    "a moment of one element": (_state(exp_avg=torch.ones(1)), r"exp_avg .* has shape \(1,\)"),
    "a moment of integers": (
        lambda optimizer: optimizer["state"][1].update(
            exp_avg=optimizer["state"][1]["exp_avg"].long()
        ),
        "exp_avg of parameter 1 is torch.int64",
    ),
    "a list for a state": (
        lambda optimizer: optimizer["state"].update({1: [1]}),
        "that of parameter 1 is a list",
    ),
    "text for a step": (_state(step="3"), "step of parameter 1 is a str"),
    "groups that are missing": (
        lambda optimizer: optimizer.pop("param_groups"),
        "param_groups",
    ),
}


def resume_changed(path: str, name: str) -> tuple[str, bool]:
    """The error, and whether the model is as it was made."""
    trainer = make_trainer(in_one_file(), max_epochs=1)
    trainer.fit(UnderAdam(), token_loader(8))
    trainer.save_checkpoint(path)
    if torch.distributed.get_rank() == 0:
        content = torch.load(path, weights_only=True)
        CHANGES[name][0](content["optimizer_states"][0])
        torch.save(content, path)
    torch.distributed.barrier()
    torch.manual_seed(3)
    model = UnderAdam()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        make_trainer(full_shard(), max_epochs=2).fit(model, token_loader(8), ckpt_path=path)
    after = full_weights(model)
    return str(caught.value), all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.loop(1)
@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_no_step_has_made_is_refused_and_named(
    world: Worlds, tmp_path: Path, name: str
) -> None:
    for message, unchanged in world(2).run(resume_changed, str(tmp_path / "a.ckpt"), name):
        assert re.search(CHANGES[name][1], message), message
        assert unchanged


class Warming(torch.optim.lr_scheduler.LRScheduler):
    """One of a user's own, with the state of torch's."""

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


class Scheduled(TinyGpt):
    """Under a scheduler of torch's, or under one's own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [Warming(optimizer) if self.own else scheduler]


def resume_schedulers(path: str, own: bool) -> list[str]:
    """The errors of states that are none."""
    trainer = make_trainer(in_one_file(), max_epochs=1)
    trainer.fit(Scheduled(own), token_loader(8))
    trainer.save_checkpoint(path)
    errors = list[str]()
    for state in (
        1,
        [1],
        {"last_epoch": "3"},
        {"_last_lr": ["0.1"]},
        {"last_epoch": None},
        {"base_lrs": [None]},
    ):
        if torch.distributed.get_rank() == 0:
            content = torch.load(path, weights_only=True)
            torch.save({**content, "lr_schedulers": [state]}, path)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError) as caught:
            make_trainer(full_shard(), max_epochs=2).fit(
                Scheduled(own), token_loader(8), ckpt_path=path
            )
        errors.append(str(caught.value))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["of torch", "of a user"])
def test_a_state_of_a_scheduler_that_torch_cannot_go_on_from_is_refused_and_named(
    world: Worlds, tmp_path: Path, own: bool
) -> None:
    for number, state, epoch, rates, no_epoch, no_rates in world(2).run(
        resume_schedulers, str(tmp_path / "a.ckpt"), own
    ):
        assert "lr_schedulers.0 in the checkpoint is a number (int), expected a mapping" in number
        assert "lr_schedulers.0 in the checkpoint is a list (list), expected a mapping" in state
        assert "lr_schedulers.0.last_epoch in the checkpoint is text (str)" in epoch
        assert "lr_schedulers.0._last_lr.0 in the checkpoint is text (str)" in rates
        assert "last_epoch in the checkpoint is an object (NoneType), expected a num" in no_epoch
        assert "base_lrs.0 in the checkpoint is an object (NoneType), expected a num" in no_rates


EVERY: list[tuple[type[Any], dict[str, Any]]] = [
    (lr_scheduler.StepLR, {"step_size": 1}),
    (lr_scheduler.CosineAnnealingLR, {"T_max": 5}),
    (lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 5}),
    (lr_scheduler.CyclicLR, {"base_lr": 0.1, "max_lr": 0.2, "cycle_momentum": False}),
    (lr_scheduler.MultiStepLR, {"milestones": [1, 2]}),
    (lr_scheduler.ExponentialLR, {"gamma": 0.5}),
    (lr_scheduler.LinearLR, {}),
    (lr_scheduler.ConstantLR, {}),
    (lr_scheduler.PolynomialLR, {}),
    (lr_scheduler.OneCycleLR, {"max_lr": 1.0, "total_steps": 9, "cycle_momentum": False}),
    (lr_scheduler.ReduceLROnPlateau, {}),
    (lr_scheduler.LambdaLR, {"lr_lambda": lambda epoch: 1.0}),
]


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_numbers_of_a_scheduler_that_are_none_are_refused_by_name(
    kind: type[Any], options: dict[str, Any]
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = kind(optimizer, **options)
    saved = dict(scheduler.state_dict())
    check_scheduler(saved, scheduler, "lr_schedulers.0")
    numbers = [key for key, value in saved.items() if isinstance(value, (int, float))]
    assert "last_epoch" in numbers
    for key in numbers:
        with pytest.raises(CheckpointError, match=f"lr_schedulers.0.{key} in .* expected a number"):
            check_scheduler({**saved, key: None}, scheduler, "lr_schedulers.0")


def resume_cut(path: str) -> list[str]:
    """The errors of files in torch's former format that were cut off at thirty places."""
    trainer = make_trainer(in_one_file(), max_epochs=1)
    trainer.fit(Scheduled(own=False), token_loader(4))
    trainer.save_checkpoint(path)
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    content, errors = Path(path).read_bytes(), list[str]()
    for place in range(0, len(content), len(content) // 30 + 1):
        Path(path).write_bytes(content[:place])
        with pytest.raises(CheckpointError) as caught:
            make_trainer(full_shard(), max_epochs=2).fit(
                Scheduled(own=False), token_loader(4), ckpt_path=path
            )
        errors.append(str(caught.value))
    return errors


@pytest.mark.slow
def test_a_file_in_torchs_former_format_that_was_cut_off_is_named(
    world: Worlds, tmp_path: Path
) -> None:
    [errors] = world(1).run(resume_cut, str(tmp_path / "a.ckpt"))
    assert len(errors) > 20
    assert all("a.ckpt" in error for error in errors)
