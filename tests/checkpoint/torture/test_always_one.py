"""While checkpoints replace each other there is always one that is whole, whoever looks and whenever."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from shardeddp import ShardedDP
from shardeddp.checkpoint.find import find_checkpoints
from shardeddp.config import CheckpointOptions
from support.tasks import Block, TinyGpt
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


def train(folder: str, saves: int, asynchronous: bool) -> None:
    """A checkpoint after each step, of which only the newest is kept."""
    strategy = ShardedDP(
        auto_wrap_policy={Block},
        state_dict_type="sharded",
        checkpoint_options=CheckpointOptions(asynchronous=asynchronous),
    )
    saving = ModelCheckpoint(folder, "{step}", save_top_k=1, every_n_train_steps=1)
    tokens: Any = torch.randint(0, 11, (2 * saves, 6), generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(strategy, max_steps=saves, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(TinyGpt(), torch.utils.data.DataLoader(tokens, batch_size=1))


class Watcher(threading.Thread):
    """Counts the whole checkpoints of a directory every 10 ms."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="watcher")
        self.counts: list[int] = []
        self.newest = 0
        self.done = threading.Event()
        self._folder = folder

    def run(self) -> None:
        while not self.done.wait(0.01):
            self.look()

    def look(self) -> None:
        """Count the checkpoints that are there now."""
        self.counts.append(self._count())

    def _count(self) -> int:
        # Looking is not one step: what is listed may be replaced before it is opened. Not three times in a row.
        for _ in range(3):
            found = find_checkpoints(self._folder).checkpoints
            if found and found[-1].step >= self.newest:
                self.newest = found[-1].step
                return len(found)
        assert not found, "an older one is the newest again"
        return 0


def watch(world: Worlds, folder: Path, saves: int, asynchronous: bool) -> list[int]:
    watcher = Watcher(folder)
    watcher.start()
    began = time.monotonic()
    try:
        world(2).run(train, str(folder), saves, asynchronous, timeout_s=250)
    finally:
        watcher.done.set()
        watcher.join()
    watcher.look()  # once more: the last save may have come after the last look
    assert watcher.newest == saves
    assert [it.step for it in find_checkpoints(folder).checkpoints] == [saves]
    first = next(index for index, count in enumerate(watcher.counts) if count)
    print(f"{len(watcher.counts)} samples of {saves} saves in {time.monotonic() - began:.1f} s")
    return watcher.counts[first:]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_there_is_always_a_whole_checkpoint(
    world: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    counts = watch(world, tmp_path, 30, asynchronous)
    assert min(counts) >= 1
    assert max(counts) <= 2


@pytest.mark.torture
@pytest.mark.timeout(300)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_there_is_always_a_whole_checkpoint_over_500_saves(
    world: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    counts = watch(world, tmp_path, 500, asynchronous)
    assert len(counts) > 500
    assert min(counts) >= 1
    assert max(counts) <= 2
