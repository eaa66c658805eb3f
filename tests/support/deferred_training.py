"""Trainers and modules for tests of deferred initialization through Lightning."""

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from support.tasks import EvaluatedGpt
from support.trainers import full_weights

Make = Callable[[], Any]


class SeesItsStart(EvaluatedGpt):
    """Notes weights and generator when fitting begins."""

    def on_fit_start(self) -> None:
        """Before any step."""
        self.generator_at_start = torch.get_rng_state()
        self.weights_at_start = full_weights(self)


def seed(globally: bool) -> None:
    """As users do it: for every run, or for this moment."""
    if globally:
        seed_everything(1, verbose=False)
    else:
        os.environ.pop("PL_GLOBAL_SEED", None)
        torch.manual_seed(1)


def deferred_model(trainer: Trainer, make: Make = EvaluatedGpt) -> Any:
    with trainer.init_module(empty_init=True):
        return make()


def same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
