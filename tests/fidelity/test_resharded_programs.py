"""The corpora under another sharding strategy in every step: as under DDP, or refused by name."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback

from support import fidelity, parity
from support.fidelity import BesideDdp, Case
from support.parity import Trained
from world import Worlds

pytestmark = [pytest.mark.fidelity, pytest.mark.timeout(240)]

NAMES = ["no_shard", "shard_optimizer", "full_shard", "shard_grad_op", "no_shard", "full_shard"]

REFUSED = re.compile(
    "something holds views of parameters|hooks on nodes of the graph|finding views of parameters failed"
)
"""Of programs that hold views of parameters from step to step, or nodes of the graph."""


class Walks(Callback):
    """Goes on with the next strategy after every optimizer step."""

    def __init__(self) -> None:
        self.count, self.step = 0, -1

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step != self.step and not trainer.strategy.mesh.run.incomplete:
            trainer.strategy.reshard(NAMES[self.count % len(NAMES)])
            self.count, self.step = self.count + 1, trainer.global_step


def train_resharded(cases: Sequence[Case], strategy: str) -> list[Trained]:
    make = parity.make_trainer

    def made(strategy: Any, **options: Any) -> Any:
        callbacks = options.pop("callbacks", None) or []
        return make(strategy, callbacks=[Walks(), *callbacks], **options)

    with mock.patch.object(parity, "make_trainer", made):
        return fidelity.train_in_turn(cases, strategy)


def cases_of(file: str) -> list[Case]:
    lists = vars(importlib.import_module(f"fidelity.{file}")).values()
    found = [each for it in lists if isinstance(it, (list, tuple)) for each in it]
    return list({id(each): each for each in found if isinstance(each, Case)}.values())


OTHERS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("test_*.py")
    if path.stem not in ("test_held_out", "test_drawn_programs", Path(__file__).stem)
)


@pytest.fixture(scope="session")
def resharded(world: Worlds) -> BesideDdp:
    return BesideDdp(world, train_resharded)


@pytest.mark.long
@pytest.mark.parametrize(
    "file", ["test_held_out", *(pytest.param(it, marks=pytest.mark.torture) for it in OTHERS)]
)
def test_programs_go_on_under_other_strategies(resharded: BesideDdp, file: str) -> None:
    differ = resharded.differences(cases_of(file), "full_shard")
    may_refuse = file != "test_held_out"
    assert {n: how for n, how in differ.items() if not (may_refuse and REFUSED.search(how))} == {}
