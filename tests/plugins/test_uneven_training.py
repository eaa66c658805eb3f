"""Ranks with different numbers of batches to train on: all stop together, or go on together to the end of the last."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from shardeddp import ConfigurationError, ShardedDP
from shardeddp.lightning_api import PrefetchDataFetcher
from shardeddp.plugins.uneven_training import Repeating
from support.tasks import EvaluatedGpt
from support.trainers import full_weights
from support.uneven import loader, sequences, trainer_of
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def refuse(strategy: str) -> list[str]:
    """What training ends with: the steps taken, and the error."""
    found = []
    for known in (True, False):
        model = EvaluatedGpt()
        with pytest.raises(ConfigurationError) as caught:
            trainer_of(strategy, max_epochs=1).fit(model, loader((3, 2), known))
        found.append(f"{len(model.losses)} {str(caught.value)[:100]}")
    enough = EvaluatedGpt()
    trainer_of(strategy, max_steps=2).fit(enough, loader((3, 2), True))
    return [*found, str(len(enough.losses))]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_training_with_uneven_batches_is_an_error_on_all_ranks_that_names_the_counts(
    world: Worlds, strategy: str
) -> None:
    text = "ranks have different numbers of batches to train on: rank 0 has"
    for known, unknown, enough in world(2).run(refuse, strategy):
        assert known.startswith(f"0 {text} 3, rank 1 has 2.")  # before the first step
        assert unknown.startswith(f"1 {text} more than 2, rank 1 has 2.")  # before the last one that all could take
        assert enough == "2"  # who stops before that has nothing to fear


def stop_together(strategy: str, counts: tuple[int, int], known: bool, accumulate: int) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model = EvaluatedGpt()
    trainer = trainer_of(strategy, uneven_batches="min", max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(model, loader(counts, known), loader((1, 1), True))
    return {"losses": model.losses, "steps": trainer.global_step, "weights": full_weights(model)}


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_with_min_an_epoch_ends_as_if_all_ranks_had_the_fewest_batches(world: Worlds, strategy: str) -> None:
    for accumulate in (1, 2):
        expected = world(2).run(stop_together, strategy, (3, 3), True, accumulate)
        for known in (True, False):
            found = world(2).run(stop_together, strategy, (3, 5), known, accumulate)
            for ours, theirs in zip(found, expected, strict=True):
                assert len(ours["losses"]) == 6
                assert ours["steps"] == theirs["steps"] == (6 if accumulate == 1 else 4)
                torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-5, atol=0)


def join(strategy: str, known: bool, accumulate: int) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model = EvaluatedGpt()
    trainer = trainer_of(strategy, uneven_batches="join", max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(model, loader((3, 5), known), loader((1, 1), True))
    return {"losses": model.losses, "steps": trainer.global_step, "weights": full_weights(model)}


def joined_by_one_process(accumulate: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the second rank's batches, and the weights, where the first rank counts for nothing in the last two."""
    seed_everything(1, verbose=False)
    model = EvaluatedGpt()
    (optimizer,), (scheduler,) = model.configure_optimizers()
    mine, theirs = sequences(0, 6).split(2), sequences(1, 10).split(2)
    losses = []
    for _ in range(2):
        for index, batch in enumerate(theirs):
            loss = model.loss(batch)
            losses.append(loss.item())
            total = loss + model.loss(mine[index]) if index < len(mine) else loss
            (total / 2 / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(theirs):
                optimizer.step()
                optimizer.zero_grad()
                scheduler["scheduler"].step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_with_join_a_rank_without_batches_goes_on_with_gradients_of_zero(world: Worlds, strategy: str) -> None:
    for accumulate in (1, 2):
        losses, weights = joined_by_one_process(accumulate)
        for known in (True, False):
            first, second = world(2).run(join, strategy, known, accumulate)
            assert len(first["losses"]) == 10
            assert first["steps"] == (10 if accumulate == 1 else 6)
            assert second["losses"] == pytest.approx(losses, rel=1e-4)
            for name, value in weights.items():
                torch.testing.assert_close(first["weights"][name], value, rtol=1e-4, atol=1e-5)


class TakesItsBatches(EvaluatedGpt):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


def join_in_vain(strategy: str) -> str:
    warnings.filterwarnings("ignore", ".*dataloader_iter")
    with pytest.raises(ConfigurationError) as caught:
        trainer_of(strategy, uneven_batches="join", max_epochs=1).fit(TakesItsBatches(), loader((1, 1), False))
    return str(caught.value)


def test_join_says_what_it_cannot_repeat(world: Worlds) -> None:
    for said in world(2).run(join_in_vain, "full_shard"):
        assert "cannot give a batch again to a training_step(self, dataloader_iter)" in said
    fetcher = PrefetchDataFetcher()
    fetcher.setup(CombinedLoader([iter(())], "max_size_cycle"))
    with pytest.raises(RuntimeError, match="rank 1 has no batch at all in this epoch"):
        next(iter(Repeating(fetcher, 1)))


def test_a_choice_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="uneven_batches='max': expected one of error, min, join"):
        ShardedDP(uneven_batches="max")  # type: ignore[arg-type]
