"""``model.generate()`` in validation, and where no unit is gathered: the tokens are those of DDP."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from shardeddp import ShardedDP
from shardeddp.wrap import AutoPolicy
from support import real_models as models
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

STRATEGIES = {
    "full_shard": {},
    "hybrid_shard": {"shard_size": 1},
    "shard_grad_op": {},
    "shard_optimizer": {},
    "no_shard": {},
}


class GeneratesAtTheEnd(models.TiedLlama):
    """Generates after validation and after training as well, outside of any step."""

    def on_validation_epoch_end(self) -> None:
        self.continue_something()

    def on_train_end(self) -> None:
        self.continue_something()

    def continue_something(self) -> None:
        with torch.no_grad():
            self.generated += self.generate(
                torch.arange(1, 1 + models.PROMPT).unsqueeze(0)
            ).tolist()


class EndsEarly(models.TiedLlama):
    """Ranks end their sequences at different lengths."""

    def generate(self, prompts: Tensor) -> Tensor:
        """One token on rank 0, five on the others."""
        last = 1 if dist.get_rank() == 0 else 5
        return self.model.generate(prompts, max_new_tokens=last, do_sample=False, eos_token_id=None)


class AdaptersEndEarly(models.LoraLlama):
    """The same through peft."""

    generate = EndsEarly.generate


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": models.TiedLlama,
    "Llama, LoRA of peft": models.LoraLlama,
    "T5": models.T5,
    "Mixtral": models.Mixtral,
    "Llama, outside of steps too": GeneratesAtTheEnd,
    "Llama, ranks end at different lengths": EndsEarly,
    "Llama, LoRA of peft, ranks end at different lengths": AdaptersEndEarly,
}


def train_and_generate(name: str, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """Validate before, between and after epochs; None for DDP."""
    warnings.filterwarnings("ignore", models.DEPRECATED)
    seed_everything(1, verbose=False)
    module = MODELS[name]()
    strategy = (
        DDPStrategy()
        if arguments is None
        else ShardedDP(**arguments, auto_wrap_policy=AutoPolicy(min_numel=1))
    )
    trainer = make_trainer(strategy, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module, models.sequence_loader(16), models.sequence_loader(16))
    trainer.validate(module, models.sequence_loader(16), verbose=False)
    return {
        "tokens": module.generated,
        "losses": module.losses,
        "val": float(trainer.callback_metrics["val"]),
        "training": module.training,
    }


@pytest.fixture(scope="module")
def reference(world: Worlds) -> Callable[[str], list[dict[str, Any]]]:
    """What DDP generates, by rank."""
    return cache(lambda name: world(2).run(train_and_generate, name, None))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_those_of_ddp(
    world: Worlds, reference: Callable[[str], list[dict[str, Any]]], name: str, strategy: str
) -> None:
    arguments = {"sharding_strategy": strategy, **STRATEGIES[strategy]}
    for found, expected in zip(
        world(2).run(train_and_generate, name, arguments), reference(name), strict=True
    ):
        assert found["tokens"] == expected["tokens"]
        assert len({tuple(tokens) for tokens in found["tokens"]}) > 1, "every sequence is the same"
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["val"] == pytest.approx(expected["val"], rel=1e-4)
