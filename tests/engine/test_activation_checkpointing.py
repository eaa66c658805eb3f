"""Activation checkpointing of sharded models: results of one plain process, and no gather more than without."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy

from shardeddp.config import ActivationCheckpointing, resolve_activation_checkpointing
from shardeddp.engine.activation_checkpointing import checkpoint_activations
from shardeddp.errors import ConfigurationError
from shardeddp.wrap import AutoPolicy, ClassPolicy, NamePolicy, PredicatePolicy
from training import RUNTIMES, WIDTH, Sharding, Trial, batch
from world import on_ranks

every_strategy = pytest.mark.parametrize("strategy", RUNTIMES)

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"save_ops": "matmul"},
    "offload": {"cpu_offload": True},
    "every second": {"every": 2},
    "around units": {"modules": "Stack"},
    "inside units": {"modules": nn.Tanh},
}


class Block(nn.Module):
    """Two layers and dropout, with an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.activation, self.dropout = nn.Tanh(), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(self.activation(self.up(x) + bias)))


class Stack(nn.Module):
    """Blocks, each of which gets something of the one before by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = x.mean()
        for block in self.blocks:
            x = block(x, bias=bias)
            bias = x.mean()
        return x


class Net(nn.Module):
    """A stack of blocks behind a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.stack = nn.Linear(WIDTH, WIDTH), Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(self.stem(x))


def make_trial(strategy: str, kind: str | None) -> Trial:
    """The model with activation checkpointing, and without any as the reference."""
    model = Net()
    if kind is not None:
        checkpoint_activations(
            model, ActivationCheckpointing(**{"modules": [Block], **KINDS[kind]})
        )
    trial = Trial(model, Sharding(strategy=strategy, units=("stack.blocks.*",)))
    for module in trial.reference.modules():
        vars(module).pop("forward", None)
    return trial


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + rank)  # the same dropout in both
    return model(batch(rank, step, 4, WIDTH)).pow(2).mean()


def keep_everything(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


class Reading(nn.Module):
    """A stack whose blocks read the weight of a layer that is none of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.shared = Stack(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.stack(x), self.shared.weight) + self.shared.bias.sum()


@pytest.mark.loop(3)
@every_strategy
@pytest.mark.parametrize("save_ops", ["matmul", keep_everything], ids=["matmul", "everything"])
@pytest.mark.parametrize("recomputed", ["Stack", "Reading"])
@on_ranks(2)
def test_gathers_inside_of_recomputed_modules_are_none_of_their_operations(
    strategy: str, save_ops: Any, recomputed: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reading())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # it writes to a tensor that is kept, also where nothing is sharded
    checkpoint_activations(model, ActivationCheckpointing(modules=[recomputed], save_ops=save_ops))
    units = ("1.stack.blocks.*", "1.stack.blocks.*.up", "1.shared")
    trial = Trial(model, Sharding(strategy=strategy, units=units))
    for module in trial.reference.modules():
        vars(module).pop("forward", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "parameter 1.shared.* is used outside the forward")
        trial.train(square)


def lower(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return square(model, rank, step).float()


@pytest.mark.slow
@every_strategy
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_recomputed_modules_train_like_plain_ones(strategy: str, kind: str) -> None:
    make_trial(strategy, kind).train(square)


@pytest.mark.loop(1)
@pytest.mark.parametrize("kind", ["full", "selective", "around units"])
@on_ranks(2)
def test_the_recomputation_has_the_autocast_of_the_forward(kind: str) -> None:
    recomputed, plain = (make_trial("full_shard", each) for each in (kind, None))
    for trial in (recomputed, plain):
        trial.forward(lower).backward()
    for found, expected in zip(
        recomputed.model.parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.equal(found.grad.full_tensor(), expected.grad.full_tensor())


@pytest.mark.loop(1)
@every_strategy
@pytest.mark.parametrize("kind", ["full", "offload"])
@on_ranks(2)
def test_frozen_modules_are_recomputed(strategy: str, kind: str) -> None:
    trial = make_trial(strategy, kind)
    for model in (trial.model, trial.reference):
        model.stack.blocks[1].requires_grad_(False)
        model.stack.blocks[2].up.requires_grad_(False)
    trial.train(square)


def adapted(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A step on parameters that one step of gradient descent has adapted, as in MAML."""
    parameters = dict(model.named_parameters())
    x = batch(rank, step, 4, WIDTH)

    def loss(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(10 * step + rank)
        return torch.func.functional_call(model, tensors, (x,)).pow(2).mean()

    gradients = torch.autograd.grad(loss(parameters), [*parameters.values()], create_graph=True)
    pairs = zip(parameters.items(), gradients, strict=True)
    return loss({name: value - 0.5 * gradient for (name, value), gradient in pairs})


@pytest.mark.loop(1)
@every_strategy
@pytest.mark.parametrize("kind", ["full", "offload", "around units"])
@on_ranks(2)
def test_forwards_with_other_tensors_are_recomputed_with_these(strategy: str, kind: str) -> None:
    warnings.filterwarnings("ignore", "parameter .* is used outside the forward")
    make_trial(strategy, kind).train(adapted)


class Counting(nn.Module):
    """A layer that replaces a buffer by the next one, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x + self.linear(x * self.count).sin()


def test_a_buffer_that_a_forward_replaces_is_replaced_once() -> None:
    torch.manual_seed(0)
    recomputed, plain = nn.Sequential(Counting(), Counting()), nn.Sequential(Counting(), Counting())
    plain.load_state_dict(recomputed.state_dict())
    checkpoint_activations(recomputed, ActivationCheckpointing(modules=Counting))
    for model in (recomputed, plain):
        for step in range(3):
            model(batch(0, step, 4, WIDTH)).pow(2).mean().backward()
    for found, expected in zip(recomputed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    assert recomputed[0].count == plain[0].count == 3


def collectives(strategy: str, kind: str | None) -> Counter[str]:
    """What the third step communicates."""
    trial = make_trial(strategy, kind)
    trial.train(square, steps=2)
    trial.runtime.mesh.traffic.reset()
    trial.forward(square).backward()
    return trial.runtime.mesh.traffic.calls


@pytest.mark.long
@pytest.mark.slow
@every_strategy
@on_ranks(2)
def test_recomputation_communicates_nothing_more(strategy: str) -> None:
    plain = collectives(strategy, None)
    for kind in KINDS:
        assert collectives(strategy, kind) == plain, kind


@on_ranks(2)
def test_a_unit_is_neither_released_before_its_recomputation_nor_kept_behind_it() -> None:
    trial = make_trial("full_shard", "full")
    seen: list[str] = []

    def watch(*_: object) -> None:
        # Prefetch is one unit ahead; what is already through its backward must be sharded again.
        states = (progress.unit.state.value for progress in trial.runtime.progresses[1:])
        seen.append("".join("." if state == "sharded" else "u" for state in states))

    for block in trial.model.stack.blocks:
        block.activation.register_forward_hook(watch)
    for step in range(2):
        seen.clear()
        trial.forward(square, step).backward()
    recomputed = seen[-3:]
    assert len(seen) == 6
    assert [states[index] for states, index in zip(recomputed, (2, 1, 0), strict=True)] == [
        "u",
        "u",
        "u",
    ]
    assert recomputed[2][2] == "."


@on_ranks(2)
def test_evaluation_computes_once() -> None:
    trial = make_trial("full_shard", "full")
    calls: list[nn.Module] = []
    for block in trial.model.stack.blocks:
        block.activation.register_forward_hook(lambda module, *_: calls.append(module))
    with torch.no_grad():
        trial.forward(square)
    assert len(calls) == 3


# -- which modules


def chosen(**options: Any) -> list[str]:
    return checkpoint_activations(Net(), ActivationCheckpointing(**options))


BLOCKS = [f"stack.blocks.{index}" for index in range(3)]


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("auto", BLOCKS),
        (Block, BLOCKS),
        ({Block, nn.Tanh}, BLOCKS),
        (["Block", Stack], ["stack"]),
        (NamePolicy("stack.blocks.[01]"), BLOCKS[:2]),
        (lambda name, module: name.endswith("up"), [f"{block}.up" for block in BLOCKS]),
        ({"class_path": "shardeddp.wrap.NamePolicy", "init_args": {"names": ["stack"]}}, ["stack"]),
    ],
)
def test_modules_are_chosen_as_units_are(modules: object, expected: list[str]) -> None:
    assert chosen(modules=modules) == expected


def test_every_counts_the_outermost_modules_in_their_order() -> None:
    assert chosen(modules=[Block, nn.Tanh], every=2) == [BLOCKS[0], BLOCKS[2]]
    assert chosen(modules=nn.Linear, every=3) == ["stem", f"{BLOCKS[1]}.up", f"{BLOCKS[2]}.down"]


def test_a_module_with_two_names_is_chosen_once() -> None:
    model = Net()
    model.again = model.stack.blocks[0]
    assert checkpoint_activations(model, ActivationCheckpointing(modules=[Block])) == BLOCKS


@pytest.mark.parametrize("value", [None, False, "none"])
def test_nothing_turns_it_off(value: object) -> None:
    assert resolve_activation_checkpointing(value) is None


def test_a_value_may_be_modules_or_options() -> None:
    def predicate(name: str, module: nn.Module) -> bool:
        return True

    resolve = resolve_activation_checkpointing
    written = {"class_path": "shardeddp.wrap.NamePolicy", "init_args": {"names": ["stack"]}}
    found = [
        resolve(value)
        for value in (True, "auto", {Block}, predicate, written, {"every": 2, "save_ops": ["mm"]})
    ]
    kinds = [type(options.modules) for options in found if options is not None]
    assert kinds == [AutoPolicy, AutoPolicy, ClassPolicy, PredicatePolicy, NamePolicy, AutoPolicy]
    assert found[-1] is not None and (found[-1].every, found[-1].save_ops) == (2, ["mm"])
    assert resolve(found[-1]) == found[-1]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "found 3"),
        (nn.Linear(1, 1), "of type Linear"),
        ("atuo", 'did you mean "auto"'),
        ({"evry": 2}, "did you mean 'every'"),
        ({"every": 0}, "every: expected 1"),
        (
            {"cpu_offload": "yes"},
            "ActivationCheckpointing.cpu_offload='yes': expected True or False",
        ),
        ({"modules": None}, "found None"),
        ({"modules": {"class_path": "torch.nn.Linear"}}, "class_path of a policy"),
        ({"save_ops": ["aten.mn"]}, "did you mean"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(value: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match="expected") as refusal:
        resolve_activation_checkpointing(value)
    assert said in str(refusal.value)


def test_a_choice_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"find modules of Linear, found none"):
        checkpoint_activations(nn.Linear(2, 2), ActivationCheckpointing())
    with pytest.raises(ConfigurationError, match=r"ActivationCheckpointing\.modules .* found none"):
        chosen(modules=nn.LSTM)


class GradientCheckpointingLayer(nn.Module):
    """By the name of what layers of transformers derive from."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: torch.Tensor,
        past_key_values: list[torch.Tensor] | None = None,
        use_cache: bool = False,
    ) -> torch.Tensor:
        keys = self.linear(x)
        if past_key_values is not None:
            past_key_values.append(keys)
            keys = torch.stack(past_key_values).sum(0)
        return x + keys * (2 if use_cache else 1)


def test_a_layer_of_transformers_fills_its_cache_only_without_gradients() -> None:
    layer, x, cache = GradientCheckpointingLayer(), torch.randn(2, WIDTH), list[torch.Tensor]()
    checkpoint_activations(
        nn.Sequential(layer), ActivationCheckpointing(modules=GradientCheckpointingLayer)
    )
    by_name = layer(x, past_key_values=cache, use_cache=True)
    result = layer(x, cache, True)
    assert torch.equal(result, by_name)
    torch.testing.assert_close(result, x + layer.linear(x))
    result.sum().backward()
    assert cache == []
    with torch.no_grad():
        layer(x, past_key_values=cache)
    assert len(cache) == 1


def keeps_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.addmm.default


@pytest.mark.parametrize("save_ops", ["matmul", keeps_products], ids=["preset", "policy"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell, nn.LSTMCell])
def test_kept_results_that_are_changed_unseen_are_refused(kind: Any, save_ops: Any) -> None:
    model = nn.Sequential(kind(4, 4))
    checkpoint_activations(model, ActivationCheckpointing(modules=[kind], save_ops=save_ops))
    # torch refuses cells of LSTM itself: they change results of matmuls by operations that it sees.
    with pytest.raises((ConfigurationError, RuntimeError), match=r"in place|mutated"):
        found = model(torch.randn(2, 4))
        torch.stack([it.sum() for it in found]).sum().backward()


def test_compiled_modules_change_nothing_in_place_and_may_keep_results() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.GRUCell(4, 4)), torch.randn(2, 4)
    model(inputs).square().sum().backward()
    expected = [it.grad.clone() for it in model.parameters() if it.grad is not None]
    model.zero_grad()
    checkpoint_activations(model, ActivationCheckpointing(modules=[nn.GRUCell], save_ops="matmul"))
    torch.compile(model, backend="aot_eager")(inputs).square().sum().backward()
    torch.testing.assert_close([it.grad for it in model.parameters()], expected)


def test_modules_that_change_results_in_place_are_recomputed_whole() -> None:
    torch.manual_seed(0)
    layer, inputs = nn.GRU(4, 4), torch.randn(3, 2, 4)
    model = nn.Sequential(layer)
    model(inputs)[0].square().sum().backward()
    expected = [it.grad.clone() for it in model.parameters() if it.grad is not None]
    model.zero_grad()
    checkpoint_activations(model, ActivationCheckpointing(modules=[nn.GRU], save_ops="attention"))
    model(inputs)[0].square().sum().backward()
    torch.testing.assert_close([it.grad for it in model.parameters()], expected)
