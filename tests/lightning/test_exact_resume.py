"""The losses of a resumed run are, bit by bit, those of the run that was never interrupted, whatever draws numbers."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardeddp import ShardedDP
from support.tasks import Recorded
from support.trainers import make_trainer
from training import STRATEGIES
from world import Worlds

pytestmark = pytest.mark.timeout(90)

SAMPLES, BATCH, WIDTH = 48, 4, 5
EPOCHS = 4
WARNED = ("random states", "places of")


class Dropped(Recorded):
    """Two layers with dropout between them; a user's hook draws a number as well, and so does validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss(self, batch: Tensor) -> Tensor:
        """Mean square, of what dropout has left."""
        return self.net(batch).pow(2).mean()

    def on_fit_start(self) -> None:
        for _ in range(self.global_rank):
            noisy(0)  # every rank has numbers of its own

    def on_train_epoch_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_end(self) -> None:
        random.random()

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        torch.rand(2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class KnowsItsEnd(Dropped):
    """Asks for the number of steps, and so for the loaders, before it is known where these are to go on."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches == EPOCHS * SAMPLES // BATCH // 2
        return super().configure_optimizers()


def noisy(index: int) -> Tensor:
    """One sample, with noise from all three generators."""
    return (
        torch.full((WIDTH,), float(index % 7))
        + torch.randn(WIDTH)
        + random.random()
        + float(np.random.rand())
    )


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return noisy(index)


class NoisyStream(IterableDataset[Tensor]):
    """Samples one after the other, from where the loader says."""

    start = 0

    def __iter__(self) -> Iterator[Tensor]:
        yield from (noisy(index) for index in range(self.start, SAMPLES // 2))


class Generated(DataLoader[Tensor]):
    """Stateful as many write it: a generator, which makes its iterator only when the first batch is asked for."""

    position = 0
    resume_at = 0

    def __iter__(self) -> Iterator[Tensor]:
        start, self.resume_at = self.resume_at, 0
        self.skip(start)
        for index, batch in enumerate(super().__iter__(), start):
            self.position = index + 1
            yield batch
        self.position = 0
        self.skip(0)

    def skip(self, batches: int) -> None:
        """Begin there."""
        if isinstance(self.dataset, NoisyStream):
            self.dataset.start = batches * BATCH
        else:
            self.batch_sampler.sampler.start = batches * BATCH  # type: ignore[union-attr]

    def state_dict(self) -> dict[str, int]:
        """The number of the next batch; after the last one, which Lightning does not look beyond, that of the first."""
        sized = not isinstance(self.dataset, NoisyStream)
        return {"position": self.position % len(self) if sized else self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Begin at that batch."""
        self.resume_at = state_dict["position"]


class Eager(Generated):
    """The same, but the iterator is there before the first batch is asked for."""

    def __iter__(self) -> Iterator[Tensor]:
        start, self.resume_at = self.resume_at, 0
        self.skip(start)
        return self.count(DataLoader.__iter__(self), start)

    def count(self, batches: Iterator[Tensor], start: int) -> Iterator[Tensor]:
        """The batches, counted."""
        for index, batch in enumerate(batches, start):
            self.position = index + 1
            yield batch
        self.position = 0
        self.skip(0)


class ShuffledByEpoch:
    """A sampler whose order depends on the epoch, and which can begin anywhere."""

    start = 0
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning."""
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        yield from order[self.start : SAMPLES // 2]


class InItsOwnOrder(Generated):
    """Draws the order of its rank once, and is in another place than that of another rank."""

    def __init__(self) -> None:
        super().__init__(Noisy(), BATCH, sampler=Drawn())

    def state_dict(self) -> dict[str, int]:
        """With the order."""
        return super().state_dict() | {"order": self.sampler.epoch}  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """With the order."""
        super().load_state_dict(state_dict)
        self.sampler.epoch = state_dict["order"]  # type: ignore[attr-defined]


class Drawn(ShuffledByEpoch):
    def __init__(self) -> None:
        self.epoch = int(np.random.default_rng().integers(1 << 30))

    def set_epoch(self, epoch: int) -> None:
        """One order for all epochs."""


LOADERS: dict[str, Any] = {
    "plain": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "plain stream": lambda: DataLoader(NoisyStream(), BATCH),
    "generated": lambda: Generated(Noisy(), BATCH, sampler=ShuffledByEpoch()),
    "eager": lambda: Eager(Noisy(), BATCH, sampler=ShuffledByEpoch()),
    "generated stream": lambda: Generated(NoisyStream(), BATCH),
    "eager stream": lambda: Eager(NoisyStream(), BATCH),
    "own order": InItsOwnOrder,
}
SAVES: dict[str, dict[str, Any]] = {
    "epoch end": {"save_on_train_epoch_end": True},
    "validation end": {"save_on_train_epoch_end": False},
    "middle": {"every_n_train_steps": 1},
}


def fit(
    loader: str,
    strategy: str,
    save: str,
    folder: str,
    ckpt_path: str | None,
    kind: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Train; losses of this rank, the checkpoints that were saved, and warnings about random states."""
    seed_everything(3, verbose=False)
    model = KnowsItsEnd() if "knows its end" in options else Dropped()
    validation = (
        DataLoader(torch.zeros(4, WIDTH), 2)
        if save == "validation end" or "val" in options
        else None
    )
    options = {
        name: value for name, value in options.items() if name not in ("val", "knows its end")
    }
    trainer = make_trainer(
        ShardedDP(
            strategy,
            1 if strategy == "hybrid_shard" else None,
            auto_wrap_policy=None,
            state_dict_type=kind,
        ),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1, **SAVES[save])],
        use_distributed_sampler=loader not in ("generated", "eager", "own order")
        and "own sampler" not in options,
        **{
            "max_epochs": EPOCHS,
            **{name: value for name, value in options.items() if name != "own sampler"},
        },
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, LOADERS[loader](), validation, ckpt_path=ckpt_path)
    return {
        "losses": model.losses,
        "warned": [
            str(each.message)
            for each in caught
            if any(words in str(each.message) for words in WARNED)
        ],
    }


def check(
    world: Worlds,
    folder: Path,
    loader: str,
    save: str,
    *,
    step: int,
    strategy: str = "full_shard",
    kind: str = "full",
    trained: int | None = None,
    **options: Any,
) -> None:
    """Resume from the checkpoint of a step, and compare at least ten losses per rank."""
    batches = trained if trained is not None else step
    straight = world(2).run(fit, loader, strategy, save, str(folder / "a"), None, kind, options)
    path = str(folder / "a" / f"step={step}.ckpt")
    resumed = world(2).run(fit, loader, strategy, save, str(folder / "b"), path, kind, options)
    for before, after in zip(straight, resumed, strict=True):
        assert len(after["losses"]) == EPOCHS * SAMPLES // BATCH // 2 - batches >= 10
        assert after["losses"] == before["losses"][batches:]
    assert straight[0]["losses"] != straight[1]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.torture), "sharded"])
def test_between_epochs_with_shards_and_without(
    world: Worlds, tmp_path: Path, strategy: str, kind: str
) -> None:
    check(world, tmp_path, "plain", "epoch end", step=6, strategy=strategy, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "save"),
    [
        *((loader, "epoch end") for loader in LOADERS if loader != "own order"),
        *(
            pytest.param(
                loader,
                "validation end",
                marks=() if loader in ("plain", "generated") else pytest.mark.torture,
            )
            for loader in LOADERS
            if loader != "own order"
        ),
    ],
)
def test_between_epochs_with_every_loader(
    world: Worlds, tmp_path: Path, loader: str, save: str
) -> None:
    check(world, tmp_path, loader, save, step=6)


@pytest.mark.slow
def test_between_epochs_with_a_sampler_that_draws_from_the_global_generator(
    world: Worlds, tmp_path: Path
) -> None:
    check(
        world,
        tmp_path,
        "plain",
        "epoch end",
        step=12,
        **{"own sampler": True, "limit_train_batches": 6},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "step"),
    [
        ("epoch end", 6),
        pytest.param("validation end", 6, marks=pytest.mark.torture),
        ("middle", 8),
    ],
)
def test_of_a_run_that_counts_steps(world: Worlds, tmp_path: Path, save: str, step: int) -> None:
    check(world, tmp_path, "eager", save, step=step, max_epochs=-1, max_steps=24)


STATEFUL = ["generated", "eager", "generated stream", "eager stream", "own order"]
DRAWN = [("eager", 8), ("generated stream", 4), ("own order", 4)]
"""Every kind once; the plainest, "generated", is resumed under every strategy."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        # States of ranks do not differ between the strategies that shard them over all ranks.
        pytest.param(name, marks=pytest.mark.torture) if name.startswith("shard_") else name
        for name in STRATEGIES
    ],
)
def test_in_the_middle_of_an_epoch_under_every_strategy(
    world: Worlds, tmp_path: Path, strategy: str
) -> None:
    check(world, tmp_path, "generated", "middle", step=4, strategy=strategy, kind="sharded")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "step"),
    [
        pytest.param(loader, step, marks=() if (loader, step) in DRAWN else pytest.mark.torture)
        for loader in STATEFUL
        for step in (4, 8)
    ],
)
def test_in_the_middle_of_an_epoch_with_every_stateful_loader(
    world: Worlds, tmp_path: Path, loader: str, step: int
) -> None:
    check(world, tmp_path, loader, "middle", step=step)


@pytest.mark.long
@pytest.mark.slow
def test_in_the_middle_of_an_epoch_by_a_model_that_asks_for_the_number_of_steps(
    world: Worlds, tmp_path: Path
) -> None:
    check(world, tmp_path, "own order", "middle", step=4, kind="sharded", **{"knows its end": True})


@pytest.mark.slow
@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(loader, marks=pytest.mark.torture)
        if loader.startswith("generated")
        else loader
        for loader in STATEFUL
    ],
)
def test_in_the_middle_of_an_epoch_with_validation_in_between(
    world: Worlds, tmp_path: Path, loader: str
) -> None:
    check(world, tmp_path, loader, "validation end", step=3, val_check_interval=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "save", "accumulate", "step", "trained"),
    [
        (
            "generated",
            "epoch end",
            4,
            4,
            12,
        ),  # of six batches per epoch, four and then two make a step
        pytest.param("generated", "middle", 4, 1, 4, marks=pytest.mark.torture),
        ("eager stream", "middle", 2, 4, 8),
        pytest.param("eager stream", "epoch end", 2, 3, 6, marks=pytest.mark.torture),
    ],
)
def test_with_accumulated_gradients(
    world: Worlds, tmp_path: Path, loader: str, save: str, accumulate: int, step: int, trained: int
) -> None:
    check(
        world,
        tmp_path,
        loader,
        save,
        step=step,
        trained=trained,
        accumulate_grad_batches=accumulate,
    )


@pytest.mark.slow
def test_another_number_of_ranks_is_told_and_trains_on(world: Worlds, tmp_path: Path) -> None:
    world(2).run(fit, "plain", "full_shard", "epoch end", str(tmp_path), None, "full", {})
    for size in (1, 3):
        resumed = world(size).run(
            fit,
            "plain",
            "full_shard",
            "epoch end",
            str(tmp_path / "b"),
            str(tmp_path / "step=6.ckpt"),
            "full",
            {},
        )
        assert [len(each["warned"]) for each in resumed] == [1] + [0] * (size - 1)
        assert f"random states of 2 ranks and this run has {size}" in resumed[0]["warned"][0]
        assert resumed[0]["losses"]


@pytest.mark.slow
def test_another_number_of_ranks_is_told_that_they_were_in_different_places(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(
        fit, "own order", "full_shard", "middle", str(tmp_path), None, "sharded", {"max_steps": 4}
    )
    path = str(tmp_path / "step=4.ckpt")
    (alone,) = world(1).run(
        fit, "own order", "full_shard", "middle", str(tmp_path / "b"), path, "sharded", {}
    )
    (_, places) = alone["warned"]
    assert "the places of 2 ranks in their data" in places
    assert alone["losses"]
