"""Ranks with different numbers of batches: training stops on all of them, evaluation gives every rank its results."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardeddp import ConfigurationError, ShardedDP
from support.tasks import VOCABULARY, Block, EvaluatedGpt
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def sequences(rank: int, count: int) -> Tensor:
    return torch.randint(VOCABULARY, (count, 6), generator=torch.Generator().manual_seed(rank))


class Stream(IterableDataset[Tensor]):
    """Sequences, and no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        yield from sequences(dist.get_rank(), self.count)


def loader(counts: tuple[int, int], known: bool) -> DataLoader[Tensor]:
    """As many batches of two on each rank as ``counts`` has."""
    rank = dist.get_rank()
    data: Any = sequences(rank, 2 * counts[rank]) if known else Stream(2 * counts[rank])
    return DataLoader(data, batch_size=2)


def trainer_of(strategy: str, **options: Any) -> Any:
    chosen = {name: options.pop(name) for name in ("uneven_batches",) if name in options}
    return make_trainer(
        ShardedDP(strategy, auto_wrap_policy={Block}, **chosen), use_distributed_sampler=False, **options
    )


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


def evaluate(strategy: str) -> list[tuple[int, float, float, int, float]]:
    """By kind of loader: batches seen in validation, its metric, that of testing, predictions, a later loss."""
    answers = []
    for known in (True, False):
        seed_everything(1, verbose=False)
        model, trainer = EvaluatedGpt(), trainer_of(strategy, max_epochs=1)
        loop = trainer.fit_loop.epoch_loop.val_loop
        trainer.fit(model, loader((2, 2), True), loader((1, 4), known))
        seen, validated = loop.batch_progress.total.processed, float(trainer.callback_metrics["val"])
        tested = trainer.test(model, loader((4, 1), known), verbose=False)[0]["test"]
        predictions = trainer.predict(model, loader((3, 1), known))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader((2, 2), True))
        answers.append((seen, validated, tested, len(predictions), model.losses[-1]))
    return answers


def test_evaluation_with_uneven_batches_gives_what_it_gives_where_nothing_is_gathered(world: Worlds) -> None:
    expected = world(2).run(evaluate, "no_shard")
    assert [[seen for seen, *_ in answers] for answers in expected] == [[1, 1], [4, 4]]
    assert [[answer[3] for answer in answers] for answers in expected] == [[3, 3], [1, 1]]
    for strategy in ("full_shard", "shard_optimizer"):
        for ours, theirs in zip(world(2).run(evaluate, strategy), expected, strict=True):
            for found, wanted in zip(ours, theirs, strict=True):
                assert found == pytest.approx(wanted, rel=1e-4)


def test_a_choice_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="uneven_batches='join': expected one of error, min"):
        ShardedDP(uneven_batches="join")  # type: ignore[arg-type]
