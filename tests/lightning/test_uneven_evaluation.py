"""Ranks with different numbers of batches to evaluate: every rank gets the results of all."""

import pytest
from lightning.pytorch import seed_everything

from support.tasks import EvaluatedGpt
from support.uneven import loader, trainer_of
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def evaluate(strategy: str) -> list[tuple[int, float, float, int, float]]:
    """By kind of loader: batches seen in validation, its metric, that of testing, predictions, a later loss."""
    answers = []
    for known in (True, False):
        seed_everything(1, verbose=False)
        model, trainer = EvaluatedGpt(), trainer_of(strategy, max_epochs=1)
        loop = trainer.fit_loop.epoch_loop.val_loop
        trainer.fit(model, loader((2, 2), True), loader((1, 4), known))
        seen, validated = (
            loop.batch_progress.total.processed,
            float(trainer.callback_metrics["val"]),
        )
        tested = trainer.test(model, loader((4, 1), known), verbose=False)[0]["test"]
        predictions = trainer.predict(model, loader((3, 1), known))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader((2, 2), True))
        answers.append((seen, validated, tested, len(predictions), model.losses[-1]))
    return answers


@pytest.mark.long
@pytest.mark.slow
def test_evaluation_with_uneven_batches_gives_what_it_gives_where_nothing_is_gathered(
    world: Worlds,
) -> None:
    expected = world(2).run(evaluate, "no_shard")
    assert [[seen for seen, *_ in answers] for answers in expected] == [[1, 1], [4, 4]]
    assert [[answer[3] for answer in answers] for answers in expected] == [[3, 3], [1, 1]]
    for strategy in ("full_shard", "shard_optimizer"):
        for ours, theirs in zip(world(2).run(evaluate, strategy), expected, strict=True):
            for found, wanted in zip(ours, theirs, strict=True):
                assert found == pytest.approx(wanted, rel=1e-4)
