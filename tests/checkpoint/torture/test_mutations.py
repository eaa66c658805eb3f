"""A damaged checkpoint gives exactly what was saved or is refused, with the model as it was: never another value."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardeddp.checkpoint.contents import open_checkpoint
from shardeddp.errors import CheckpointError
from support.resuming import fit, full_shard, same_batches
from support.tasks import TinyGpt
from support.torture_mutations import Files, Mutation, edit_state, mutate, read_files, write_files
from support.torture_training import digest, whole
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def original(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a checkpoint that two ranks wrote in a training."""
    path = tmp_path_factory.mktemp("mutations") / "good.ckpt"
    world(2).run(save_one, str(path))
    return read_files(path)


def save_one(path: str) -> None:
    fit(full_shard(), 1, save_to=path)


def load(folder: Path) -> str:
    return digest(whole(open_checkpoint(folder, None)))


class Tally:
    """What came of each kind of damage."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.texts: list[tuple[Mutation, str]] = []
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, mutation: Mutation, folder: Path, expected: str) -> None:
        try:
            found = load(folder)
        except CheckpointError as error:
            self.texts.append((mutation, str(error)))
            self.counts[mutation.kind]["refused"] += 1
            return
        except Exception as error:  # noqa: BLE001 - a finding
            self.wrong.append(f"{mutation.kind}, {mutation.what}: {type(error).__name__}: {error}")
            return
        same = found == expected
        self.counts[mutation.kind]["as saved"] += same
        if not same:
            self.wrong.append(f"{mutation.kind}, {mutation.what}: other values")


def mutate_and_load(original: Files, folder: Path, seed: int, count: int) -> Tally:
    write_files(folder, original)
    expected = load(folder)
    tally, was = Tally(), original
    draw = random.Random(seed)
    for _ in range(count):
        mutation = mutate(original, draw.randrange(2**32))
        write_files(folder, mutation.files, was)
        was = mutation.files
        tally.add(mutation, folder, expected)
    return tally


def check(tally: Tally, folder: Path, seed: int) -> None:
    print(
        f"seed {seed}\n"
        + "\n".join(f"{kind}: {dict(counts)}" for kind, counts in sorted(tally.counts.items()))
    )
    assert tally.wrong == []
    for mutation, text in tally.texts:
        assert str(folder) in text, text
        changed = [name for name in mutation.files if name.startswith("__")]
        if mutation.kind == "duplicated range":
            assert any(name in text for name in changed), text
            assert "bytes" in text and "expected" in text, text


@pytest.mark.slow
def test_damage_is_refused_or_harmless(original: Files, tmp_path: Path) -> None:
    check(mutate_and_load(original, tmp_path / "bad.ckpt", 3, 120), tmp_path, 3)


@pytest.mark.torture
@pytest.mark.timeout(380)
def test_damage_of_2000_kinds_is_refused_or_harmless(original: Files, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    tally = mutate_and_load(original, tmp_path / "bad.ckpt", seed, 2000)
    check(tally, tmp_path, seed)
    assert len(tally.texts) > 1000


def test_every_byte_of_a_tensor_is_under_a_checksum_and_an_error_says_where(
    original: Files, tmp_path: Path
) -> None:
    folder = tmp_path / "bad.ckpt"
    write_files(folder, original)
    tensors = whole(open_checkpoint(folder, None))["state_dict"]
    name, tensor = max(tensors.items(), key=lambda item: item[1].numel())
    raw = tensor.reshape(-1).numpy().tobytes()
    file, start = next(
        (file, content.find(part))
        for file, content in original.items()
        for part in [raw[: len(raw) // 4]]
        if content.find(part) >= 0 and file.endswith(".distcp")
    )
    for position in range(start, start + len(raw) // 4, 7):
        content = bytearray(original[file])
        content[position] ^= 1
        (folder / file).write_bytes(content)
        with pytest.raises(
            CheckpointError, match=f"{file} is damaged: bytes .* of .* have checksum .* expected"
        ) as info:
            load(folder)
        assert name in str(info.value) or "head.weight" in str(info.value)


# -- a training that would go on from it


def go_on(folders: list[str]) -> list[tuple[str, str, bool]]:
    """For each, what the strategy says, what the model holds then, and whether that is what it held before."""
    results = []
    for folder in folders:
        model = TinyGpt()
        before = digest(full_weights(model))
        text = ""
        try:
            make_trainer(full_shard(), max_epochs=1).fit(model, same_batches(), ckpt_path=folder)
        except CheckpointError as error:
            text = str(error)
        after = digest(full_weights(model))
        results.append((text, after, after == before))
    return results


def check_training(
    world: Worlds, original: Files, folder: Path, seed: int, count: int
) -> Counter[str]:
    draw = random.Random(seed)
    write_files(folder / "good.ckpt", original)
    for number in range(count):
        write_files(folder / f"{number}.ckpt", mutate(original, draw.randrange(2**32)).files)
    names = ["good.ckpt", *(f"{number}.ckpt" for number in range(count))]
    (text, expected, unchanged), *results = world(1).run(
        go_on, [str(folder / name) for name in names], timeout_s=250
    )[0]
    assert (text, unchanged) == ("", False)
    outcomes: Counter[str] = Counter()
    for name, (text, weights, unchanged) in zip(names[1:], results, strict=True):
        outcomes["refused" if text else "as saved"] += 1
        assert unchanged if text else weights == expected, f"{name}, seed {seed}: {text}"
    return outcomes


def test_a_refused_checkpoint_leaves_the_model_as_it_was(
    world: Worlds, original: Files, tmp_path: Path
) -> None:
    assert check_training(world, original, tmp_path, 5, 15)["refused"] > 5


@pytest.mark.torture
@pytest.mark.timeout(300)
def test_200_refused_checkpoints_leave_the_model_as_it_was(
    world: Worlds, original: Files, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(seed, check_training(world, original, tmp_path, seed, 200))


def _optimizer(tree: Any) -> Any:
    return tree["optimizer_states"][0]


def _weights(tree: Any) -> list[list[Any]]:
    """Pairs of names and references to tensors."""
    return tree["state_dict"]["$state_dict"][0]


def _exchange(tree: Any) -> None:
    """Two parameters of unequal shapes under each other's names."""
    up, down = (
        next(pair for pair in _weights(tree) if pair[0] == f"blocks.0.{name}.weight")
        for name in ("up", "down")
    )
    up[1], down[1] = down[1], up[1]


UNFIT: dict[str, Callable[[Any], object]] = {
    "an optimizer group is missing": lambda tree: _optimizer(tree)["param_groups"].pop(),
    "an optimizer group has too few parameters": lambda tree: _optimizer(tree)["param_groups"][0][
        "params"
    ].pop(),
    "there is an optimizer too many": lambda tree: tree["optimizer_states"].append(
        _optimizer(tree)
    ),
    "a parameter is missing": lambda tree: _weights(tree).pop(),
    "a parameter is unknown": lambda tree: _weights(tree).append(["more", _weights(tree)[0][1]]),
    "a parameter is no tensor": lambda tree: _weights(tree)[1].__setitem__(1, 3),
    "parameters change places": _exchange,
    "there is no model": lambda tree: tree.pop("state_dict"),
    "there are no optimizers": lambda tree: tree.pop("optimizer_states"),
}


def unfit(original: Files, name: str) -> Files:
    files = dict(original)
    edit_state(files, UNFIT[name])
    return files


def go_on_unfit(folder: str) -> tuple[str, bool]:
    model = TinyGpt()
    before = digest(full_weights(model))
    text = ""
    try:
        make_trainer(full_shard(), max_epochs=1).fit(model, same_batches(), ckpt_path=folder)
    except Exception as error:  # noqa: BLE001 - its kind is looked at
        text = f"{type(error).__name__}: {error}"
    return text, digest(full_weights(model)) == before


@pytest.mark.parametrize("name", UNFIT)
def test_a_checkpoint_that_does_not_fit_is_refused_with_one_text(
    world: Worlds, original: Files, tmp_path: Path, name: str
) -> None:
    write_files(tmp_path / "unfit.ckpt", unfit(original, name))
    results = world(2).run(go_on_unfit, str(tmp_path / "unfit.ckpt"))
    assert results[0] == results[1]
    text, unchanged = results[0]
    assert text.startswith(("CheckpointError", "KeyError")), (
        text
    )  # the latter is Lightning's, for what it looks up
    assert unchanged, f"the model was changed before this was found: {text}"
