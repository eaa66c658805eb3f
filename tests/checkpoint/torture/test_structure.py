"""Checkpoints of another structure under valid checksums are gone on from, or refused; nothing else is raised."""

import copy
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from shardeddp import CheckpointError, ShardedDP
from support.tasks import Block, TinyGpt, token_loader
from support.torture_mutations import Files, edit_manifest, edit_state, read_files, write_files
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(1800)

OTHERS: list[Any] = [
    None, True, -1, 0, 3, 2**53, 0.5, "", "x", "7", [], [1], ["a"], {}, {"a": 1}, {"$tuple": []},
    {"$tensor": "model.head.weight"}, {"$float": "7ff0000000000000"}, {"$bytes": "AAAA"},
    {"$numbers": {"$tensor": "model.embed.weight"}}, {"$set": [1]}, {"$dict": [[1, 2]]},
]  # fmt: skip


OF_LIGHTNING = ("checkpoint contains only the model", "is not a valid EarlyStoppingReason")
"""What Lightning says: how to go on, and of a callback's state, which is the callback's to load."""


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all values of a JSON tree."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def mutate(tree: Any, dice: random.Random) -> None:
    """One to three values are others, gone, twice there, or in another one's place."""
    for _ in range(dice.randint(1, 3)):
        *path, key = dice.choice(places(tree)[1:])
        holder = tree
        for each in path:
            holder = holder[each]
        match dice.choice(["other", "other", "other", "gone", "twice", "swapped", "renamed"]):
            case "other":
                holder[key] = copy.deepcopy(dice.choice(OTHERS))
            case "gone":
                del holder[key]
            case "twice" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "swapped":
                other = dice.choice(
                    list(holder) if isinstance(holder, dict) else range(len(holder))
                )
                holder[key], holder[other] = holder[other], holder[key]
            case "renamed" if isinstance(holder, dict):
                holder[f"{key}x"] = holder.pop(key)


class Scheduled(TinyGpt):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def training_step(self, batch: Any, batch_index: int) -> Any:
        loss = super().training_step(batch, batch_index)
        self.log("score", loss)
        return loss


def train(folder: Path, epochs: int, path: Path | None = None) -> Any:
    callbacks = [
        ModelCheckpoint(folder, save_top_k=1, monitor="score"),
        EarlyStopping("score", check_on_train_epoch_end=True, patience=50),
    ]
    trainer = make_trainer(
        ShardedDP(auto_wrap_policy={Block}, state_dict_type="sharded"),
        max_epochs=epochs,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    trainer.fit(Scheduled(), token_loader(4), ckpt_path=path)
    return trainer


def survive(folder: str, count: int, seed: int) -> dict[str, int]:
    """Go on from that many mutations.

    Returns:
        How many were gone on from and refused. What is raised otherwise fails the test.
    """
    dice, found = random.Random(seed), {"gone on": 0, "refused": 0}
    root = Path(folder)
    warnings.simplefilter("ignore")
    if not (root / "original.ckpt").exists():
        trainer = train(root / "first", 1)
        trainer.save_checkpoint(root / "original.ckpt")
    original: Files = read_files(root / "original.ckpt")
    for number in range(count):
        files, edit = dict(original), dice.choice([edit_state, edit_state, edit_manifest])
        edit(files, lambda tree: mutate(tree, dice))
        path = root / f"{seed}-{number}" / "a.ckpt"
        path.parent.mkdir()
        write_files(path, files)
        try:
            train(path.with_name("own"), 2, path)
            found["gone on"] += 1
        except CheckpointError:
            found["refused"] += 1
        except Exception as error:
            if any(text in str(error) for text in OF_LIGHTNING):
                found["refused"] += 1
                continue
            changed = "state.json" if edit is edit_state else "manifest.json"
            before, after = (json.loads(each[changed]) for each in (original, files))
            text = f"seed {seed}, number {number}, {changed}: {difference(before, after)}"
            raise AssertionError(f"{text}: {type(error).__name__}: {error}"[:2000]) from error
        shutil.rmtree(path.parent)
    return found


def difference(before: Any, after: Any, path: str = "") -> str:
    """Where two trees differ first."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        pairs = [(before[key], after[key], f"{path}.{key}") for key in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [
            (*pair, f"{path}.{index}") for index, pair in enumerate(zip(before, after, strict=True))
        ]
    else:
        return "" if before == after else f"{path}: {before!r:.200} became {after!r:.200}"
    return next((text for pair in pairs if (text := difference(*pair))), "")


@pytest.mark.slow
def test_thirty_structures_are_gone_on_from_or_refused(world: Worlds, tmp_path: Path) -> None:
    [found] = world(1).run(survive, str(tmp_path), 30, 1, timeout_s=600)
    assert found["refused"] > 5
    assert found["gone on"] > 3


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10))
def test_thousands_of_structures_are_gone_on_from_or_refused(
    world: Worlds, tmp_path: Path, seed: int
) -> None:
    seed = random.randrange(2**32) if seed else seed
    refused = 0
    for batch in range(20):  # refused runs keep their process groups until a call ends
        [found] = world(1).run(survive, str(tmp_path), 25, seed + batch, timeout_s=300)
        refused += found["refused"]
    assert refused > 100
