"""Ranks with different numbers of batches to train on: all stop together, or go on together to the end of the last."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from shardeddp import ConfigurationError, ShardedDP
from shardeddp.lightning.private import PrefetchDataFetcher
from shardeddp.lightning.uneven_data import WatchedFetcher
from support.tasks import EvaluatedGpt
from support.trainers import full_weights
from support.uneven import Resumable, loader, sequences, trainer_of
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def refuse(strategy: str) -> list[str]:
    """What training ends with: the steps taken, and the error."""
    found = []
    for known in (True, False, "told"):
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
    for known, unknown, told, enough in world(2).run(refuse, strategy):
        assert known.startswith(f"0 {text} 3, rank 1 has 2.")  # before the first step
        assert unknown.startswith(
            f"1 {text} more than 2, rank 1 has 2."
        )  # before the last one that all could take
        assert told.startswith(f"0 {text} 3, rank 1 has 2.")
        assert enough == "2"  # who stops before that has nothing to fear


def stop_together(
    strategy: str, counts: tuple[int, int], known: bool | str, accumulate: int
) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model = EvaluatedGpt()
    trainer = trainer_of(
        strategy, uneven_batches="min", max_epochs=2, accumulate_grad_batches=accumulate
    )
    trainer.fit(model, loader(counts, known), loader((1, 1), True))
    return {"losses": model.losses, "steps": trainer.global_step, "weights": full_weights(model)}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_with_min_an_epoch_ends_as_if_all_ranks_had_the_fewest_batches(
    world: Worlds, strategy: str
) -> None:
    for accumulate in (1, 2):
        expected = world(2).run(stop_together, strategy, (3, 3), True, accumulate)
        for known in (True, False, "told"):
            found = world(2).run(stop_together, strategy, (3, 5), known, accumulate)
            for ours, theirs in zip(found, expected, strict=True):
                assert len(ours["losses"]) == 6
                assert ours["steps"] == theirs["steps"] == (6 if accumulate == 1 else 4)
                torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-5, atol=0)


def join(strategy: str, known: bool | str, accumulate: int) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model = EvaluatedGpt()
    trainer = trainer_of(
        strategy, uneven_batches="join", max_epochs=2, accumulate_grad_batches=accumulate
    )
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_with_join_a_rank_without_batches_goes_on_with_gradients_of_zero(
    world: Worlds, strategy: str
) -> None:
    for accumulate in (1, 2):
        losses, weights = joined_by_one_process(accumulate)
        for known in (True, False, "told"):
            first, second = world(2).run(join, strategy, known, accumulate)
            assert len(first["losses"]) == 10
            assert first["steps"] == (10 if accumulate == 1 else 6)
            assert second["losses"] == pytest.approx(losses, rel=1e-4)
            for name, value in weights.items():
                torch.testing.assert_close(first["weights"][name], value, rtol=1e-4, atol=1e-5)


def resume_joined(folder: str, ckpt_path: str | None) -> tuple[list[float], dict[str, Tensor]]:
    seed_everything(1, verbose=False)
    model = EvaluatedGpt()
    trainer = trainer_of(
        "full_shard",
        uneven_batches="join",
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)],
    )
    data = loader((3, 5), True).dataset
    trainer.fit(model, Resumable(data, batch_size=2), ckpt_path=ckpt_path)
    return model.losses, full_weights(model)


@pytest.mark.long
@pytest.mark.slow
def test_a_rank_that_has_joined_goes_on_so_when_the_run_is_resumed(
    world: Worlds, tmp_path: Path
) -> None:
    straight = world(2).run(resume_joined, str(tmp_path / "a"), None)
    path = str(tmp_path / "a" / "step=4.ckpt")
    for before, after in zip(
        straight, world(2).run(resume_joined, str(tmp_path / "b"), path), strict=True
    ):
        assert len(after[0]) == 6
        torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)


class AsksForSteps(EvaluatedGpt):
    """Needs to know how many steps there will be before any loader is there."""

    def configure_optimizers(self) -> Any:
        """A schedule that ends with training."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=self.steps
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def ask_for_steps(choice: str) -> tuple[int, int]:
    model = AsksForSteps()
    trainer = trainer_of("full_shard", uneven_batches=choice, max_epochs=2)
    trainer.fit(model, loader((3, 5), True))
    return model.steps, trainer.global_step


@pytest.mark.slow
def test_all_ranks_are_told_the_same_number_of_steps(world: Worlds) -> None:
    assert world(2).run(ask_for_steps, "min") == [(6, 6)] * 2
    assert world(2).run(ask_for_steps, "join") == [(10, 10)] * 2


def end_early(choice: str, counts: tuple[int, int]) -> tuple[int, str]:
    model = EvaluatedGpt()
    said = ""
    try:
        trainer_of("full_shard", uneven_batches=choice, max_epochs=2).fit(
            model, loader(counts, "falsely")
        )
    except ConfigurationError as error:
        said = str(error)
    return len(model.losses), said


@pytest.mark.slow
def test_a_loader_that_ends_before_it_has_said_is_found(world: Worlds) -> None:
    assert (
        world(2).run(end_early, "error", (3, 3)) == [(6, "")] * 2
    )  # all at once: an end like any other
    assert world(2).run(end_early, "join", (3, 3)) == [(6, "")] * 2
    for choice in ("error", "min"):
        for losses, said in world(2).run(end_early, choice, (2, 3)):
            assert (losses, choice) in ((0, "error"), (2, "min"))
            assert ("rank 0 has 2, rank 1 has more than 3" in said) == (choice == "min")
            assert ("rank 0 has 3, rank 1 has 4" in said) == (choice == "error")
    assert world(2).run(end_early, "join", (2, 3)) == [(6, "")] * 2


def find_rate() -> str:
    trainer = trainer_of("full_shard", max_epochs=1, enable_checkpointing=False)
    model = EvaluatedGpt()
    model.lr = 0.1  # type: ignore[assignment]
    with pytest.raises(ConfigurationError) as caught:
        Tuner(trainer).lr_find(model, loader((3, 5), True), num_training=50)
    return str(caught.value)


def test_tuners_which_take_callbacks_away_are_told_too(world: Worlds) -> None:
    for said in world(2).run(find_rate):
        assert "rank 0 has 3, rank 1 has 5" in said


class TakesItsBatches(EvaluatedGpt):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


def join_in_vain(strategy: str) -> str:
    warnings.filterwarnings("ignore", ".*dataloader_iter")
    with pytest.raises(ConfigurationError) as caught:
        trainer_of(strategy, uneven_batches="join", max_epochs=1).fit(
            TakesItsBatches(), loader((1, 1), False)
        )
    return str(caught.value)


def test_join_says_what_it_cannot_repeat(world: Worlds) -> None:
    for said in world(2).run(join_in_vain, "full_shard"):
        assert "cannot give a batch again to a training_step(self, dataloader_iter)" in said
    fetcher = PrefetchDataFetcher()
    fetcher.setup(CombinedLoader([iter(())], "max_size_cycle"))
    with pytest.raises(RuntimeError, match="rank 1 has no batch at all in this epoch"):
        next(iter(WatchedFetcher(fetcher, lambda: True, 1)))


def test_a_choice_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="uneven_batches='max': expected one of error, min, join"
    ):
        ShardedDP(uneven_batches="max")  # type: ignore[arg-type]
