"""States that cannot be loaded again are refused by their place; warnings name what needs pickle."""

import enum
import math
import os
import threading
import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from shardeddp import CheckpointError, ShardedDP
from shardeddp.config import StateDictType
from support.tasks import TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)


class Keeps(Callback):
    state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [self.state]}


def _nested(depth: int) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = [value]
    return value


def _cycle() -> Any:
    value: dict[str, Any] = {}
    value["again"] = [value]
    return value


REFUSED: dict[str, tuple[Callable[[], Any], str, tuple[StateDictType, ...]]] = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta device", ("sharded", "full")),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8),
        "nested or quantized",
        ("sharded",),
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "nested or quantized",
        ("sharded", "full"),
    ),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "layout", ("sharded", "full")),
    "keys of one hash": (
        lambda: {(2**61 - 1) * number: number for number in range(20)},
        "more than 16 keys have one hash",
        ("sharded",),
    ),
    "set of one hash": (
        lambda: {(2**61 - 1) * number for number in range(600)},
        "more than 16 keys have one hash",
        ("sharded",),
    ),
    "lock": (threading.Lock, "pickle", ("sharded", "full")),
    "function": (lambda: {"a": (1, lambda: 1)}, "pickle", ("sharded", "full")),
    "cycle": (_cycle, "contains itself", ("sharded",)),
    "deep": (lambda: _nested(10_000), "deeper than 200 JSON levels", ("sharded",)),
}
LOADED: dict[str, Callable[[], Any]] = {
    "one element of a column": lambda: torch.arange(4.0).view(2, 2)[:1, 1],
    "negative view": lambda: torch.tensor([1 + 2j]).conj().imag,
    "expanded": lambda: torch.ones(1).expand(3, 4),
    "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,)).to_dense(),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "reversed array": lambda: torch.from_numpy(np.arange(6)[::-1].copy()),
}


def save_odd_states(folder: str) -> dict[str, str]:
    """Error or difference of each state; none where all is well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of quantized and nested tensors
        return _save_odd_states(folder)


def _save_odd_states(folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in ("sharded", "full"):
        keeps = Keeps()
        trainer = make_trainer(ShardedDP(state_dict_type=kind), max_steps=1, callbacks=[keeps])
        trainer.fit(TinyGpt(), token_loader(8))
        for name, (make, _, kinds) in REFUSED.items():
            if kind not in kinds:
                continue
            keeps.state = make()
            try:
                trainer.save_checkpoint(os.path.join(folder, f"{kind}-{name}.ckpt"))
            except Exception as error:  # noqa: BLE001 - the test looks at each
                found[f"{kind} {name}"] = f"{type(error).__name__}: {error}"
            while (
                name == "deep" and keeps.state
            ):  # freed level by level, or the interpreter recurses
                keeps.state = keeps.state[0]
        for path in ("", "a\0b.ckpt"):
            with pytest.raises(ValueError, match="takes the path of a checkpoint"):
                trainer.save_checkpoint(path)
        for name, make in LOADED.items():
            keeps.state = make()
            path = os.path.join(folder, f"{kind}-{name}-loaded.ckpt")
            trainer.save_checkpoint(path)
            [loaded] = trainer.strategy.load_checkpoint(path)["callbacks"]["Keeps"]["kept"]
            same = loaded.dtype == keeps.state.dtype and loaded.shape == keeps.state.shape
            if not same or not torch.equal(loaded.double(), keeps.state.double()):
                found[f"{kind} {name}"] = f"{keeps.state} came back as {loaded}"
    return found


@pytest.mark.slow
def test_states_that_cannot_be_loaded_again_are_refused_by_their_place_and_the_others_come_back(
    world: Worlds, tmp_path: Path
) -> None:
    for found in world(2).run(save_odd_states, str(tmp_path)):
        expected = {
            f"{kind} {name}": why for name, (_, why, kinds) in REFUSED.items() for kind in kinds
        }
        assert found.keys() == expected.keys()
        for name, why in expected.items():
            assert why in found[name], name
            assert "callbacks.Keeps.kept.0" in found[name] and "Error" in found[name], name
    assert all("-loaded" in each.name for each in tmp_path.iterdir())


def save_what_needs_pickle(path: str) -> list[str]:
    keeps = Keeps()
    keeps.state = np.str_("text")
    trainer = make_trainer(ShardedDP(state_dict_type="sharded"), max_steps=1, callbacks=[keeps])
    trainer.fit(TinyGpt(), token_loader(8))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.save_checkpoint(path)
    return [str(each.message) for each in said]


def test_a_save_names_what_resumes_with_pickle_alone(world: Worlds, tmp_path: Path) -> None:
    said, other = world(2).run(save_what_needs_pickle, str(tmp_path / "x.ckpt"))
    [warning] = said
    assert "callbacks.Keeps.kept.0 in the checkpoint" in warning and "weights_only=False" in warning
    assert not other


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    first: Any
    second: Any


class Words(list[str]):
    """Of somebody's own class, with an attribute."""

    language = "none"


class Table(dict[str, Any]):
    pass


def three() -> int:
    return 3


def english() -> Words:
    made = Words(["a", "b"])
    made.language = "en"
    return made


NEED_PICKLE = {
    "named tuple": {"a": [Pair(1, Pair(torch.arange(4)[1:3], "x"))]},
    "own list": english(),
    "own dict": Table(a=Table(b=torch.ones(4)[1:], c=english())),
    "own factory": defaultdict(three, a=1),
    "keys": {Color.RED: Color.RED, (Color.RED, 2): 3, math.nan: Color.RED, "plain": 1},
    "queue": deque([1, Color.RED], maxlen=3),
    "counts": Counter({Color.RED: 2, "x": 1}),
    "lists": defaultdict(list, {"a": [Color.RED]}),
    "ordered": OrderedDict(a=(Color.RED, [Color.RED])),
}


def load_what_needs_pickle(name: str, path: str) -> tuple[str, bool]:
    """What is said by default, and whether pickle brings back values and types."""
    keeps, value = Keeps(), NEED_PICKLE[name]
    keeps.state = value
    strategy: Any = ShardedDP(state_dict_type="sharded")
    trainer = make_trainer(strategy, max_steps=1, callbacks=[keeps])
    trainer.fit(TinyGpt(), token_loader(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError) as refused:
        strategy.load_checkpoint(path)
    read = strategy.load_checkpoint(path, weights_only=False)
    [loaded] = read["callbacks"]["Keeps"]["kept"]
    return str(refused.value), picture(loaded) == picture(value)


def picture(value: Any) -> str:
    """Values with the classes of containers and their attributes."""
    if isinstance(value, dict):
        items = ", ".join(f"{picture(key)}: {picture(it)}" for key, it in value.items())
        return f"{type(value).__name__}({items}){getattr(value, 'default_factory', '')}"
    if isinstance(value, (list, tuple)):
        own = getattr(value, "__dict__", "")
        return f"{type(value).__name__}({', '.join(map(picture, value))}){own}"
    return repr(value)


class Holder:
    """An object of the user's, which only pickle saves."""

    def __init__(self, held: Any) -> None:
        self.held = held


HELD: dict[str, Callable[[Any], Any]] = {
    "Pair": lambda it: Pair(it, 1),
    "Holder": Holder,
    "Holder in a queue": lambda it: deque([[Holder(it)]]),
    "set": lambda it: {it},
}


def save_shards_in_objects(path: str) -> dict[str, str]:
    keeps = Keeps()
    trainer = make_trainer(ShardedDP(state_dict_type="sharded"), max_steps=1, callbacks=[keeps])
    module = TinyGpt()
    trainer.fit(module, token_loader(8))
    said: dict[str, str] = {}
    for name, hold in HELD.items():
        keeps.state = {"a": hold(next(module.parameters()).detach())}
        with pytest.raises(CheckpointError) as refused:
            trainer.save_checkpoint(path)
        said[name] = str(refused.value)
    return said


def test_shards_in_what_needs_pickle_are_refused_by_their_place(
    world: Worlds, tmp_path: Path
) -> None:
    for said in world(2).run(save_shards_in_objects, str(tmp_path / "x.ckpt")):
        assert "the Pair at callbacks.Keeps.kept.0.a " in said["Pair"]
        assert "the Holder at callbacks.Keeps.kept.0.a " in said["Holder"]
        assert "the Holder at callbacks.Keeps.kept.0.a.0." in said["Holder in a queue"]
        for each in said.values():
            assert "leads to embed.weight, which is sharded, and one rank pickles it alone" in each
            assert "never come" not in each
    assert [*tmp_path.iterdir()] == []


def load_kinds_of_torch(path: str) -> list[str]:
    """What is loaded with and without `weights_only`, by the strategy and by torch."""
    for said in ("TypedStorage is deprecated", "torch.quantize_per_tensor"):
        warnings.filterwarnings("ignore", said)
    keeps, plain = Keeps(), torch.arange(4.0)
    keeps.state = [
        torch.quantize_per_tensor(plain, 0.5, 1, torch.quint8)[1:],
        torch.quantize_per_channel(plain.view(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        plain.untyped_storage(),
        torch.tensor([1, 2, 3]).storage(),
    ]
    strategy: Any = ShardedDP(state_dict_type="full")
    trainer = make_trainer(strategy, max_steps=1, callbacks=[keeps])
    trainer.fit(TinyGpt(), token_loader(8))
    trainer.save_checkpoint(path)
    found = list[Any]()
    for weights_only in (True, False):
        found.append(strategy.load_checkpoint(path, weights_only=weights_only))
        found.append(torch.load(path, weights_only=weights_only))
    return [
        repr(
            [
                [*it] if isinstance(it, (torch.UntypedStorage, torch.TypedStorage)) else it
                for it in kept
            ]
        )
        for kept in (it["callbacks"]["Keeps"]["kept"][0] for it in found)
    ]


def test_whatever_torch_saves_a_full_file_has(world: Worlds, tmp_path: Path) -> None:
    for found in world(2).run(load_kinds_of_torch, str(tmp_path / "x.ckpt")):
        assert len({*found}) == 1
        assert "quantization_scheme=torch.per_tensor_affine, scale=0.5" in found[0]
        assert "tensor([1., 2., 3.]" in found[0]
        assert found[0].endswith("[1, 2, 3]]")


@pytest.mark.loop(1)
@pytest.mark.parametrize("name", NEED_PICKLE)
def test_what_needs_pickle_is_refused_without_and_comes_back_with_it(
    world: Worlds, tmp_path: Path, name: str
) -> None:
    for said, same in world(2).run(load_what_needs_pickle, name, str(tmp_path / "x.ckpt")):
        assert "objects that only pickle can save, at callbacks.Keeps.kept.0" in said
        assert same


def save_views(folder: str) -> None:
    def keep_views(trainer: Any, module: TinyGpt, checkpoint: dict[str, Any]) -> None:
        weight = module.blocks[0].up.weight.detach()
        checkpoint["views"] = {"row": weight[1], "rest": [(weight.t(), weight.reshape(-1))]}
        checkpoint["views"]["queue"] = deque([Namespace(row=weight[2])], maxlen=3)
        checkpoint["queue"] = deque([weight])
        if kind == "full":
            checkpoint["object"] = Holder(weight[3])

    for kind in ("sharded", "full"):
        callback = Callback()
        callback.on_save_checkpoint = keep_views  # type: ignore[method-assign]
        strategy: Any = ShardedDP(state_dict_type=kind)
        trainer = make_trainer(strategy, max_steps=1, callbacks=[callback])
        model = TinyGpt()
        trainer.fit(model, token_loader(8))
        trainer.save_checkpoint(path := f"{folder}/{kind}.ckpt")
        weight = model.blocks[0].up.weight.full_tensor()  # type: ignore[operator]
        read = strategy.load_checkpoint(path, weights_only=kind == "sharded")
        found = read["views"]
        ((transposed, flat),) = found["rest"]
        assert type(found["row"]) is torch.Tensor
        assert torch.equal(found["row"], weight[1])
        assert torch.equal(transposed, weight.t())
        assert torch.equal(flat, weight.reshape(-1))
        assert found["queue"].maxlen == 3
        assert torch.equal(found["queue"][0].row, weight[2])
        assert torch.equal(read["queue"][0], weight)
        if kind == "full":
            assert torch.equal(read["object"].held, weight[3])


def test_views_of_parameters_are_saved_as_the_elements_that_they_show(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(save_views, str(tmp_path))
