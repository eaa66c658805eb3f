"""Another sharding strategy in the middle of a run: losses, states and identities are those of a run that keeps one."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.autograd.graph import register_multi_grad_hook

from shardeddp import ReshardSchedule, ShardedDP, ShardTensor, StepMonitor
from shardeddp.errors import CheckpointError, ConfigurationError, LayoutMismatchError
from shardeddp.plan.memory import HeldMemory
from shardeddp.tensor import shard_tensor
from support.allocations import record_new_memory
from support.tasks import Block, EvaluatedGpt, NormalizedDescent, TinyGpt, token_loader
from support.trainers import full_weights, make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(90)

NAMES = ["full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard"]


def all_pairs() -> list[str]:
    """Names of which each follows each other one exactly once (a circuit, by Hierholzer's algorithm)."""
    left = {name: [other for other in NAMES if other != name] for name in NAMES}
    stack, circuit = [NAMES[0]], list[str]()
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            circuit.append(stack.pop())
    assert sorted(pairwise(circuit)) == sorted(permutations(NAMES, 2))
    return circuit


class Walk(Callback):
    """Goes on with the next name after every step."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.seen: list[str] = []
        self.identities: set[int] = set()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.identities = set(map(id, pl_module.parameters()))

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        name = self.names[min(trainer.global_step, len(self.names) - 1)]
        if not trainer.strategy.mesh.run.incomplete:
            trainer.strategy.reshard(name, 2 if name == "hybrid_shard" else None)
        self.seen.append(str(trainer.strategy.runtime.sharding))


class Checked(Walk):
    """Compares all elements around each change, and counts the memory of it."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.changes: dict[tuple[str, str], int] = {}
        """The most bytes that a change has held beside the former shards and the new ones.

        States of optimizers count once: the larger of both forms.
        """

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        former = trainer.strategy.options.sharding_strategy
        whole = {name: it.full_tensor() for name, it in self.tensors(trainer, pl_module)}
        states = self.state_nbytes(trainer, pl_module)
        with record_new_memory() as nbytes:
            super().on_train_batch_start(trainer, pl_module)
        moved = dict(self.tensors(trainer, pl_module))
        assert moved.keys() == whole.keys()
        for name, it in moved.items():
            assert torch.equal(it.to_local(), it.spec.localize(whole[name])), name
        if (now := trainer.strategy.options.sharding_strategy) != former:
            units = [it.unit for it in trainer.strategy.runtime.progresses]
            held = sum((it.held() for it in units), HeldMemory())
            shards = held.main_nbytes + held.in_flight_nbytes
            shards += sum(it.to_local().nbytes for name, it in moved.items() if "gradient" in name)
            shards += max(states, self.state_nbytes(trainer, pl_module))
            self.changes[former, now] = max(nbytes) - shards

    def state_nbytes(self, trainer: Any, module: Any) -> int:
        held = {name: it for name, it in self.tensors(trainer, module) if "exp_avg" in name}
        return sum(it.to_local().nbytes for it in held.values())

    def tensors(self, trainer: Any, module: Any) -> Iterator[tuple[str, ShardTensor]]:
        """Parameters, gradients and states of the optimizer."""
        (optimizer,) = trainer.optimizers
        for name, parameter in module.named_parameters():
            yield name, parameter
            if parameter.grad is not None:
                yield f"gradient of {name}", parameter.grad
            for key, it in optimizer.state.get(parameter, {}).items():
                if key != "step":
                    yield f"{key} of {name}", it


def train(
    callbacks: Sequence[Callback],
    kind: type[TinyGpt] = TinyGpt,
    name: str = "full_shard",
    data: Any = None,
    strategy: Any = None,
    **options: Any,
) -> tuple[TinyGpt, Any]:
    torch.manual_seed(3)
    model = kind()
    options = {"max_steps": 21, "max_epochs": -1, "gradient_clip_val": 0.5, **options}
    trainer = make_trainer(
        ShardedDP(name, auto_wrap_policy={Block}, **strategy or {}),
        callbacks=[*callbacks],
        **options,
    )
    trainer.fit(model, token_loader(16 * dist.get_world_size()), data)
    return model, trainer


def compare(found: TinyGpt, expected: TinyGpt, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), rtol=0, atol=tolerance
    )
    weights, others = full_weights(found), full_weights(expected)
    for name, value in others.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=tolerance, msg=name)


@pytest.mark.long
@pytest.mark.slow
@on_ranks(4)
def test_each_strategy_goes_on_as_each_other_one() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    expected, _ = train([EMAWeightAveraging(decay=0.5)], **options)
    circuit, average = Walk(all_pairs()), EMAWeightAveraging(decay=0.5)
    found, trainer = train([circuit, average], **options)
    compare(found, expected)
    assert circuit.identities == set(map(id, found.parameters()))
    assert len(set(circuit.seen)) == len(NAMES)
    assert trainer.strategy.options.sharding_strategy == "full_shard"


class WideGpt(TinyGpt):
    """Large enough that a few kilobytes of messages do not count."""

    def __init__(self) -> None:
        super().__init__(64, 4)


def change_all() -> tuple[dict[tuple[str, str], int], list[int]]:
    checked = Checked(all_pairs())
    model, _ = train([checked], WideGpt)
    assert sorted(checked.changes) == sorted(permutations(NAMES, 2))
    return checked.changes, [it.numel() * it.itemsize for it in model.parameters()]


@pytest.mark.long
@pytest.mark.slow
def test_each_change_moves_every_element_and_never_brings_the_model_to_one_rank(
    world: Worlds,
) -> None:
    answers = world(4).run(change_all)
    _, nbytes = answers[0]
    print(f"\n{sum(nbytes):,} bytes of parameters, the largest of them {max(nbytes):,}")
    for pair in answers[0][0]:
        most = max(changes[pair] for changes, _ in answers)
        print(f"| {' | '.join(pair)} | {most:,} | {most / sum(nbytes):.1%} |")
        assert most <= max(nbytes), pair  # one state is gathered at a time


class MuonGpt(TinyGpt):
    """Matrices of blocks by Muon, which needs them whole; the rest by AdamW, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_index)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [it for it in self.blocks.parameters() if it.ndim == 2]
        others = [it for it in self.parameters() if all(it is not each for each in matrices)]
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)


class DescendingGpt(TinyGpt):
    """An optimizer of which nothing is known."""

    def configure_optimizers(self) -> Any:
        return NormalizedDescent(self.parameters(), {"lr": 0.02})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "strategy"),
    [
        (MuonGpt, {"gradient_clip_val": None}, {}),
        (DescendingGpt, {}, {}),
        (TinyGpt, {"precision": "bf16-mixed"}, {}),
        (TinyGpt, {}, {"cpu_offload": True}),
        (TinyGpt, {}, {"activation_checkpointing": {Block}, "state_dict_type": "sharded"}),
    ],
)
@on_ranks(4)
def test_other_optimizers_precisions_and_places_follow(
    kind: type[TinyGpt], options: dict[str, Any], strategy: dict[str, Any]
) -> None:
    names = [
        "no_shard",
        "full_shard",
        "hybrid_shard",
        "shard_optimizer",
        "full_shard",
        "shard_grad_op",
    ]
    # The monitor leaves out the steps around a reshard.
    options = {"kind": kind, "max_steps": 12, "strategy": strategy, **options}
    expected, _ = train([], **options)
    found, _ = train([Walk(names), StepMonitor()], **options)
    compare(found, expected, 1e-6 if "precision" not in options else 1e-3)


class Counted(Walk):
    """Checks after each change that states are sharded as parameters, and nothing else holds memory."""

    changes = 0

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        former = [
            weakref.ref(it)
            for optimizer in trainer.optimizers
            for state in getattr(optimizer.state, "inside", {}).values()
            for it in state.values()
            if isinstance(it, torch.Tensor) and it.numel() > 1
        ]
        before = trainer.strategy.options.sharding_strategy
        super().on_train_batch_start(trainer)
        now = trainer.strategy.options.sharding_strategy
        if before == now or trainer.global_step == 0:
            return
        self.changes += 1
        if isinstance(trainer.optimizers[0], torch.optim.AdamW):  # an owner's may go on
            gc.collect()
            assert not any(it() is not None for it in former)
        storages, expected = dict[int, int](), 0
        for optimizer in trainer.optimizers:
            for parameter, state in optimizer.state.items():
                sharded = [it for it in state.values() if isinstance(it, ShardTensor)]
                assert sharded
                for it in sharded:
                    storage = it.to_local().untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
                    slices = parameter.spec.mesh.slices.size
                    expected += it.numel() * it.itemsize * dist.get_world_size() // slices
        found = torch.tensor(sum(storages.values()))
        dist.all_reduce(found)
        assert expected <= found.item() <= 1.1 * expected  # slices of flat memory have padding


@pytest.mark.parametrize(
    ("kind", "options", "strategy"),
    [
        (TinyGpt, {}, {}),
        (TinyGpt, {}, {"cpu_offload": True}),
        (MuonGpt, {"gradient_clip_val": None}, {}),
        (DescendingGpt, {}, {}),
    ],
)
@on_ranks(2)
def test_states_of_optimizers_are_sharded_anew_before_the_next_step(
    kind: type[TinyGpt], options: dict[str, Any], strategy: dict[str, Any]
) -> None:
    names = ["no_shard", "no_shard", "full_shard", "no_shard", "shard_grad_op"]
    options = {"kind": kind, "max_steps": 6, "strategy": strategy, **options}
    expected, _ = train([], **options)
    counted = Counted(names)
    found, _ = train([counted], **options)
    compare(found, expected)
    assert counted.changes >= 2  # manual optimization counts two steps per batch


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2)
def test_nobody_gathers_more_than_one_parameter_at_a_time() -> None:
    gathered: list[int] = []
    real = shard_tensor.gather

    def noted(tensor: ShardTensor, *arguments: Any) -> torch.Tensor:
        gathered.append(tensor.numel())
        return real(tensor, *arguments)

    names = [
        "full_shard",
        "no_shard",
        "shard_optimizer",
        "full_shard",
        "shard_grad_op",
        "full_shard",
    ]
    expected, _ = train([], max_steps=12)
    monitor = StepMonitor()
    with mock.patch.object(shard_tensor, "gather", noted):
        found, trainer = train([Walk(names), monitor], max_steps=12)
    compare(found, expected)
    assert monitor.report is not None and monitor.report.sent_nbytes > 0
    assert trainer.strategy.traffic.total_nbytes > 6 * monitor.report.sent_nbytes
    assert gathered and max(gathered) == max(it.numel() for it in found.parameters())


@on_ranks(2)
def test_a_schedule_changes_strategies_at_its_steps_and_a_resumed_run_has_that_of_its_step() -> (
    None
):
    seen: list[tuple[int, str]] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            seen.append((trainer.global_step, trainer.strategy.options.sharding_strategy))

    expected, _ = train([], max_steps=6, name="no_shard")
    schedule = ReshardSchedule({2: "shard_optimizer", 4: "full_shard"})
    found, _ = train([schedule, Look()], max_steps=6, name="no_shard")
    compare(found, expected)
    assert seen == [
        *((step, "no_shard") for step in (1, 2)),
        *((step, "shard_optimizer") for step in (3, 4)),
        *((step, "full_shard") for step in (5, 6)),
    ]


@pytest.mark.slow
def test_evaluation_a_save_and_a_resumed_run_follow(world: Worlds, tmp_path: Path) -> None:
    world(2).run(evaluate_save_resume, str(tmp_path / "last.ckpt"))


def evaluate_save_resume(path: str) -> None:
    data = token_loader(32)
    schedule = ReshardSchedule({2: "full_shard"})
    model, first = train(
        [schedule], EvaluatedGpt, "no_shard", data, max_steps=4, val_check_interval=1
    )
    value = first.callback_metrics["val"].item()
    assert first.validate(model, data, verbose=False)[0]["val"] == pytest.approx(value, rel=1e-6)
    assert all(isinstance(it, ShardTensor) for it in model.parameters())
    first.save_checkpoint(path)
    second: Any = make_trainer(
        ShardedDP("no_shard", auto_wrap_policy={Block}),
        callbacks=[schedule],
        max_steps=6,
        max_epochs=-1,
    )
    second.fit(model, token_loader(32), data, ckpt_path=path)
    assert second.global_step == 6
    assert second.strategy.options.sharding_strategy == "full_shard"


# -- refusals


class Once(Callback):
    """Asks for another strategy in one hook, once."""

    def __init__(self, hook: str, *given: Any) -> None:
        self.raised: BaseException | None = None

        def call(trainer: Any, *_: Any) -> None:
            if self.raised is None:
                try:
                    trainer.strategy.reshard(*given)
                except (RuntimeError, ConfigurationError, LayoutMismatchError) as error:
                    self.raised = error

        setattr(self, hook, call)


REFUSED: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("on_before_zero_grad", ("no_shard",), RuntimeError, "between two optimizer steps"),
    ("on_train_batch_start", ("auto",), ConfigurationError, "expected the name of a strategy"),
    ("on_train_batch_start", ("zero9",), ConfigurationError, "zero9"),
    ("on_train_batch_start", ("full_shard", 3), ConfigurationError, "shard_size"),
    ("on_validation_start", ("no_shard",), RuntimeError, "outside of training"),
]


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_be_is_refused_and_the_run_goes_on() -> None:
    tries = [Once(hook, *given) for hook, given, _, _ in REFUSED]
    options: dict[str, Any] = {
        "kind": EvaluatedGpt,
        "data": token_loader(8),
        "val_check_interval": 1,
    }
    expected, _ = train([], max_steps=4, **options)
    found, _ = train([*tries], max_steps=4, **options)
    for once, (_, _, kind, words) in zip(tries, REFUSED, strict=True):
        assert isinstance(once.raised, kind) and words in str(once.raised), repr(once.raised)
    compare(found, expected)


class Keeps(TinyGpt):
    """Saves a copy of a parameter from before a change, or changes inside of a save."""

    kept: Any = None
    when = "before"

    def on_train_start(self) -> None:
        self.kept = [deepcopy(self.blocks[0].up.weight)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.when == "before":
            checkpoint["kept"] = self.kept
        else:
            self.trainer.strategy.reshard("no_shard")  # type: ignore[attr-defined]


class KeepsInside(Keeps):
    when = "inside"


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", [Keeps, KeepsInside])
def test_shards_from_before_a_change_are_not_saved(
    world: Worlds, kind: type[Keeps], tmp_path: Path
) -> None:
    world(2).run(save_former, kind, str(tmp_path / "a.ckpt"))


def save_former(kind: type[Keeps], path: str) -> None:
    changes = [ReshardSchedule({1: "no_shard"})] if kind is Keeps else []

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                with pytest.raises(CheckpointError, match=r"has the shards from before"):
                    trainer.save_checkpoint(path)

    train([*changes, Saves()], kind, max_steps=2)
    assert not Path(path).exists()


class Holds(TinyGpt):
    """Keeps a view of a parameter, or sets a hook on a node of the graph."""

    kept: Any = None
    what = "view"

    def on_train_start(self) -> None:
        if self.what == "node":
            register_multi_grad_hook([self.blocks[0].up.weight], lambda _: None)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if self.what == "view":
            self.kept = self.embed.weight.detach()[0]
        return super().loss(batch)


class HoldsNode(Holds):
    what = "node"


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Holds, r"views of parameters .* \(root\)"), (HoldsNode, "blocks.0.up.weight")],
)
@on_ranks(2)
def test_what_would_not_follow_is_named(kind: type[TinyGpt], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        train([ReshardSchedule({1: "no_shard"})], kind, max_steps=2)


class HoldsOnOneRank(Holds):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        self.what = "view" if self.global_rank else "nothing"
        return super().loss(batch)


@on_ranks(2)
def test_what_would_not_follow_on_one_rank_is_refused_on_all_which_go_on() -> None:
    once = Once("on_train_batch_end", "no_shard")
    train([once], HoldsOnOneRank, max_steps=4)
    assert isinstance(once.raised, RuntimeError) and "views of parameters" in str(once.raised)


@on_ranks(2)
def test_a_gradient_that_somebody_holds_stays_the_parameters_own() -> None:
    held: list[Any] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            held.append(pl_module.embed.weight.grad)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            if held:
                assert pl_module.embed.weight.grad is held[-1]
                assert held[-1].spec.lies_like(pl_module.embed.weight.spec)

    train([ReshardSchedule({1: "no_shard", 2: "full_shard"}), Look()], max_steps=3)


@on_ranks(2)
def test_micro_batches_in_between_are_refused() -> None:
    once = Once("on_train_batch_end", "no_shard")
    train([once], max_steps=2, accumulate_grad_batches=2)
    assert isinstance(once.raised, RuntimeError) and "between micro-batches" in str(once.raised)


@on_ranks(2)
def test_ranks_that_ask_for_different_strategies_hear_of_it() -> None:
    name = ["no_shard", "shard_optimizer"][dist.get_rank()]
    once = Once("on_train_batch_start", name)
    train([once], max_steps=2)
    assert isinstance(once.raised, LayoutMismatchError) and "no_shard" in str(once.raised)


@pytest.mark.parametrize(
    "strategies", [{"2": "no_shard"}, {1.5: "no_shard"}, {1: ["no_shard"]}, []]
)
def test_a_schedule_says_what_it_expects(strategies: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ReshardSchedule\(\{step: name, ...\}\)"):
        ReshardSchedule(strategies)
