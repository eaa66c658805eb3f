"""What the engine copies in a training step: a shard per gather, one full-size copy per reduction, nothing else.

Every operation of a step is watched, and the elements that it writes are counted by its name; what the same model
writes in one process is subtracted. What is left is the engine's work, and all of it is accounted for.
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardeddp.engine.runtime import Runtime
from shardeddp.tensor.operations import written
from training import Sharding, Trial, batch
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)

WIDTH = 7  # sizes that leave padding everywhere
UNITS = ("0", "1", "2", "3")
Ledger = Counter[str]


class Writes(TorchDispatchMode):
    """Counts the elements that operations write, by operation; transfers and fresh memory do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace != "c10d" and not name.startswith(
            ("empty", "new_empty", "resize_", "set_")
        ):
            targets = written(func, args, kwargs or {})
            if not targets and not any(output.alias_info for output in func._schema.returns):
                targets = [
                    leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)
                ]
            # Those of agreements on the host are of bytes.
            self.ledger[name] += sum(
                target.numel() for target in targets if target.is_floating_point()
            )
        return result


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).relu()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Residual() for _ in UNITS], nn.Linear(WIDTH, 3))


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 2, WIDTH)).square().mean()


def watch(model: nn.Module, runtime: Runtime | None, micro_batches: int) -> Ledger:
    """What forwards and backwards of a step write."""
    writes = Writes()
    for micro_batch in range(micro_batches):
        if runtime is not None:
            runtime.sync_gradients = (
                micro_batch == micro_batches - 1 or runtime.sharding.reduce_every_backward
            )
        with (
            writes,
            nullcontext([]) if runtime is None else runtime.step("training_step") as outputs,
        ):
            outputs.append(square(model, dist.get_rank(), micro_batch))
        with writes:
            outputs[0].backward()
    return writes.ledger


class Engine:
    """What the engine writes beside the model, and the layouts of its units, after two steps that it learns from."""

    def __init__(self, strategy: str) -> None:
        self.trial = Trial(
            make_model(), Sharding(strategy=strategy, units=UNITS), make_optimizer=optim.AdamW
        )
        self.trial.train(square, steps=2)
        progresses = self.trial.runtime.progresses
        self.layouts = [
            layout
            for progress in progresses
            for layout in (group.layout for group in progress.unit.groups)
        ]
        self.numel = sum(layout.numel for layout in self.layouts)
        self.padding = sum(layout.padding_numel for layout in self.layouts)
        self.shard = sum(layout.slice_numel for layout in self.layouts)

    def write(self, micro_batches: int = 1) -> Ledger:
        """Forwards and backwards of one step; by operation, what one process would not have written."""
        for optimizer in (self.trial.optimizer, self.trial.reference_optimizer):
            optimizer.zero_grad()
        ledger = watch(self.trial.model, self.trial.runtime, micro_batches)
        ledger.subtract(watch(self.trial.reference, None, micro_batches))
        return Counter({name: numel for name, numel in ledger.items() if numel})


def write_sharded() -> None:
    engine, ranks = Engine("full_shard"), dist.get_world_size()
    root, *inner = (layout.slice_numel for layout in engine.layouts)
    expected = nonzero(
        # Every unit is gathered in the forward, and again in the backward but for the root and the last one.
        copy_=root + sum(inner) + sum(inner[:-1]),
        # Every gradient is packed once.
        _foreach_copy_=engine.numel,
        _foreach_zero_=engine.padding,
        # The mean over ranks of what has arrived: additions, and one multiplication.
        add=engine.shard,
        add_=(ranks - 2) * engine.shard,
        mul_=engine.shard,
    )
    check(engine.write(), expected)


def check(found: Ledger, expected: Ledger) -> None:
    assert found == expected, f"found {dict(found)}, expected {dict(expected)}"


def nonzero(**numels: int) -> Ledger:
    return Counter({name: numel for name, numel in numels.items() if numel})


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_gather_copies_a_shard_and_a_reduction_packs_each_gradient_once(
    world: Worlds, size: int
) -> None:
    world(size).run(write_sharded)


def write_unsharded() -> None:
    engine, group = Engine("no_shard"), dist.get_world_size()
    # gloo has no average: with several ranks gradients are scaled while they are packed.
    name = "mul" if group > 1 else "_foreach_copy_"
    packing = nonzero(**{name: engine.numel, "_foreach_zero_": engine.padding})
    check(engine.write(), packing)
    # Gradients accumulate where autograd leaves them, as in one process; they are packed once per step.
    check(engine.write(micro_batches=2), packing)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_sharding_nothing_is_copied_but_each_gradient_once_per_step(
    world: Worlds, size: int
) -> None:
    world(size).run(write_unsharded)


@on_ranks(2)
def test_accumulation_of_sharded_gradients_adds_shards() -> None:
    engine = Engine("full_shard")
    once, twice = engine.write(), engine.write(micro_batches=2)
    assert (
        twice["_foreach_copy_"] == 2 * once["_foreach_copy_"]
        and twice["copy_"] == 2 * once["copy_"]
    )
    # One process adds whole gradients, this rank its part of them.
    assert twice["add_"] == engine.shard - engine.numel
    assert set(twice) == {*once, "add_"}


@on_ranks(2)
def test_a_step_of_the_optimizer_copies_nothing() -> None:
    engine = Engine("full_shard")
    engine.trial.backward(square)
    with Writes() as writes:
        engine.trial.optimizer.step()
    assert writes.ledger and not {
        name for name in writes.ledger if "cop" in name or name in ("cat", "clone", "stack")
    }


@on_ranks(2)
def test_an_evaluation_copies_one_shard_per_unit() -> None:
    engine = Engine("full_shard")
    ledgers: list[Ledger] = []
    with torch.no_grad():
        with engine.trial.runtime.step(
            "validation_step"
        ):  # the first of its kind, in which ranks agree on the order
            square(engine.trial.model, dist.get_rank(), 0)
        for model in (engine.trial.model, engine.trial.reference):
            with (
                Writes() as writes,
                nullcontext() if ledgers else engine.trial.runtime.step("validation_step"),
            ):
                square(model, dist.get_rank(), 0)
            ledgers.append(writes.ledger)
    ledgers[0].subtract(ledgers[1])
    assert +ledgers[0] == {"copy_": engine.shard}
