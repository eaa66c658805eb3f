"""States, hyper-parameters and modules of any tree come back bit by bit, or are refused before a byte is written."""

import io
import math
import os
import string
import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import Callback, LightningModule
from torch import nn

from shardeddp import ShardedDP
from support.state_trees import picture
from support.tasks import token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)

STRATEGIES = ("full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard")
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (2, 3), (0, 4), (3, 1, 2)]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits, NaN among them."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    if dtype is torch.bool:
        raw %= 2
    return torch.from_numpy(raw).view(dtype).reshape(shape)


numbers = st.integers() | st.integers(-(2**70), 2**70) | st.floats()
names = st.text(max_size=8)
keys = st.one_of(
    names, st.integers(-9, 9), st.booleans(), st.none(), st.tuples(st.integers(0, 3), names)
)
tensors = st.builds(
    tensor_of, st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 2**31)
)
long_values = st.one_of(
    st.lists(st.integers(-(2**62), 2**62), min_size=513, max_size=520),
    st.binary(min_size=4097, max_size=4200),
    st.integers(0, 99).map(lambda n: {f"word {i}": i * n for i in range(300)}),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    names,
    st.binary(max_size=8),
    st.complex_numbers(),
    st.datetimes().map(lambda it: it.replace(fold=0)),  # which torch.save loses
    st.timedeltas(),
    st.sampled_from([*DTYPES, torch.device("cpu"), torch.Size([2, 0]), Path("a/b"), Path("/x")]),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int16, st.integers(-9, 9)),
    tensors,
    tensors.filter(lambda it: it.dtype in (torch.float32, torch.int64)).map(torch.Tensor.numpy),
    long_values,
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items, pairs = st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)
    fields = st.dictionaries(st.text(string.ascii_lowercase, min_size=1), inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        pairs,
        pairs.map(OrderedDict),
        pairs.map(lambda it: defaultdict(list, it)),
        st.dictionaries(keys, st.integers(0, 9), max_size=4).map(Counter),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        fields.map(lambda it: Namespace(**it)),
        fields.map(lambda it: AttributeDict(**it)),
    )


trees = st.recursive(leaves, containers, max_leaves=12)
parts = st.lists(
    st.one_of(
        st.tuples(st.just("linear"), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16])),
        st.tuples(st.just("norm"), st.integers(1, 5), st.just(torch.float32)),
        st.tuples(st.just("scalar"), st.just(0), st.just(torch.float32)),
        st.tuples(st.just("tied"), st.just(3), st.just(torch.float32)),
        st.tuples(st.just("buffer"), st.integers(0, 3), st.sampled_from(DTYPES)),
    ),
    max_size=4,
)  # fmt: skip


class Drawn(LightningModule):
    """A module of some parts; what it was made of are its hyper-parameters."""

    def __init__(self, parts: Any, tree: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.head = nn.Linear(6, 3)
        self.drawn = nn.ModuleDict()
        for number, (kind, size, dtype) in enumerate(parts):
            module: nn.Module = nn.Module()
            if kind == "linear":
                module = nn.Linear(size, 3, dtype=dtype)
            elif kind == "norm":
                module = nn.BatchNorm1d(size)
            elif kind == "scalar":
                module.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))
            elif kind == "tied":
                module.register_parameter("bias", self.head.bias)
            else:
                module.register_buffer("buffer", tensor_of(dtype, (size, 2), number))
            self.drawn[f"part {number}".replace(" ", "_")] = module

    def training_step(self, batch: Any, batch_index: int) -> Any:
        others = [parameter.float().sum() for parameter in self.drawn.parameters()]
        return self.head(batch.float()).square().mean() + 0.1 * sum(others)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Keeps(Callback):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["kept"]


def strategy_of(name: str, kind: Any) -> ShardedDP:
    size = 1 if name == "hybrid_shard" else None
    return ShardedDP(name, shard_size=size, auto_wrap_policy={nn.Linear}, state_dict_type=kind)


def run(strategy: ShardedDP, model: Drawn, state: Any, path: str | None = None) -> tuple[Any, Any]:
    keeps = Keeps(state)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[keeps])
    # A plain file is read by torch, which takes numpy and dates for code.
    trainer.fit(model, token_loader(4), ckpt_path=path, weights_only=False if path else None)
    return trainer, keeps.state


def save_and_load(path: str, name: str, kind: str, drawn: Any, tree: Any, state: Any) -> None:
    warnings.simplefilter("ignore")
    model = Drawn(drawn, tree)
    trainer, _ = run(strategy_of(name, kind), model, state)
    trainer.save_checkpoint(path)
    other = Drawn(drawn, tree)
    _, loaded = run(strategy_of(name, kind), other, None, path)
    assert picture(loaded) == picture(state)
    assert picture(full_weights(other)) == picture(full_weights(model))
    third = Drawn.load_from_checkpoint(path, weights_only=False)
    assert picture(dict(third.hparams)) == picture(dict(model.hparams))
    assert picture(full_weights(third)) == picture(full_weights(model))


def save_and_load_drawn(path: str, name: str, kind: str, drawn: bytes) -> None:
    save_and_load(path, name, kind, *torch.load(io.BytesIO(drawn), weights_only=False))


def check(world: Worlds, tmp_path: Path, ranks: int, count: int) -> None:
    number = iter(range(10**6))

    @settings(
        max_examples=count,
        derandomize=count < 100,  # the same in each run of CI
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(STRATEGIES), st.sampled_from(["sharded", "full"]), parts, trees, trees)
    def property_holds(name: str, kind: str, drawn: Any, tree: Any, state: Any) -> None:
        path = tmp_path / f"{next(number)}.ckpt"
        file = io.BytesIO()
        torch.save((drawn, tree, state), file)  # pickle alone loses some dtypes
        world(ranks).run(save_and_load_drawn, str(path), name, kind, file.getvalue())

    property_holds()


@pytest.mark.slow
def test_what_saves_loads_equal(world: Worlds, tmp_path: Path) -> None:
    check(world, tmp_path, 1, 8)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_what_saves_loads_equal_in_hundreds_of_trees(world: Worlds, tmp_path: Path) -> None:
    check(world, tmp_path, 2, 300)


def save_large(path: str, nbytes: int) -> None:
    state = {
        "bytes": os.urandom(1000) * (nbytes // 4000),
        "numbers": list(range(nbytes // 32)),
        "tensor": torch.arange(nbytes // 32),
        "array": np.arange(nbytes // 32),
    }
    save_and_load(path, "full_shard", "sharded", [], {}, state)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_a_state_of_a_gigabyte_comes_back(world: Worlds, tmp_path: Path) -> None:
    world(1).run(save_large, str(tmp_path / "a.ckpt"), 2**30, timeout_s=1000)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
REFUSED = {"an object": Unpicklable(), "itself": LOOP, "nesting": DEEP}


def refuse(path: str, what: str) -> str:
    warnings.simplefilter("ignore")
    trainer, _ = run(strategy_of("full_shard", "sharded"), Drawn([], 1), {"deep": [REFUSED[what]]})
    with pytest.raises(Exception) as caught:
        trainer.save_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_refused_before_a_byte_is_written(
    world: Worlds, tmp_path: Path, what: str
) -> None:
    [text] = world(1).run(refuse, str(tmp_path / "folder" / "a.ckpt"), what)
    assert "not to be pickled" in text or "deep" in text
    assert list(tmp_path.iterdir()) == []
