"""Steps on segments of neighbours: to the bit those on single parameters, whatever happens between the steps."""

import collections
import copy
import pickle
import threading
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from shardeddp.comm import Mesh
from shardeddp.optim import elementwise
from shardeddp.optim.attach import attach_optimizer
from shardeddp.optim.scope import ELEMENTWISE
from shardeddp.tensor.shard_tensor import ShardTensor
from support.optimizers import Lion, stepped_on
from training import Sharding
from world import on_ranks

pytestmark = pytest.mark.timeout(90)

Options = dict[str, Any]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

SHAPES = [
    (1,),
    (3, 5),
    (),
    (7,),
    (4, 4),
    (17,),
    (0, 3),
    (33,),
    (2, 2, 3),
    (65,),
    (9, 11),
    (128,),
    (6,),
    (6,),
]
STEPS = 8


class Part(nn.Module):
    """Small parameters of many shapes, with a gradient that is different in every step."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.parts = nn.ParameterList([torch.randn(shape) for shape in SHAPES])
        self.unused: set[int] = set()

    def forward(self, step: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(100 * step + self.number)
        total = torch.zeros(())
        for index, parameter in enumerate(self.parts):
            weight = torch.randn(parameter.shape, generator=noise)
            if index not in self.unused:
                total = total + (parameter * weight).sum() + (parameter**2).sum()
        return total


class Patchwork(nn.Module):
    """Two units of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.units = nn.ModuleList([Part(0), Part(1)])

    def forward(self, step: int) -> torch.Tensor:
        return torch.stack([unit(step) for unit in self.units]).sum()


def on_one_mesh() -> Callable[[], Sharding]:
    mesh = Sharding().mesh()

    class OnOneMesh(Sharding):
        def mesh(self) -> Mesh:
            return mesh

    return lambda: OnOneMesh(units=("units.*",))


def alone(parameters: list[Any], parts: list[Any]) -> list[list[int]]:
    return [[index] for index, part in enumerate(parts) if part is not None]


class Training:
    """One sharded model with its optimizer, which may be kept from joining neighbours."""

    def __init__(self, sharding: Sharding, make: MakeOptimizer, joins: bool, **how: Any) -> None:
        self.model = Patchwork()
        self.runtime = sharding.apply(self.model)
        self.parameters: list[Any] = list(self.model.parameters())
        self.optimizer = make(self.model.parameters())
        self.joins, self.how = joins, how
        self.kept: list[Any] = []  # by a program, from step to step
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.attach(self.optimizer)

    def attach(self, optimizer: optim.Optimizer) -> None:
        attach_optimizer(optimizer, **self.how)
        self.optimizer, self.seen = optimizer, stepped_on(optimizer)

    def use(self, *unused: int) -> None:
        for unit in self.model.units:
            unit.unused = set(unused)

    def backward(self, step: int) -> None:
        with self.runtime.step("training_step") as outputs:
            outputs.append(self.model(step))
        outputs[0].backward()

    def step(self) -> None:
        """The optimizer's, by the scaler, which divides gradients by its scale."""
        if self.scaler.is_enabled():
            for parameter in self.parameters:
                parameter.grad.mul_(self.scaler.get_scale())
        self.seen.clear()
        with mock.patch.object(elementwise, "chains", elementwise.chains if self.joins else alone):
            self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def joined(self) -> int:
        """How many parameters were stepped on together with others."""
        stepped = [it for it in self.parameters if it.grad is not None]
        return len(stepped) - len(self.seen) if self.seen else 0

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, parameter in enumerate(self.parameters):
            found[f"parameter {number}"] = parameter.to_local().clone()
            if parameter in self.optimizer.state:
                for name, value in self.optimizer.state[parameter].items():
                    local = value.to_local() if isinstance(value, ShardTensor) else value
                    found[f"{name} of {number}"] = copy.deepcopy(local)
        return found


Program = Callable[[Training, int], None]
"""What user code does before a step, and between its backward and it."""


def compare(
    sharding: Sharding,
    make: MakeOptimizer,
    program: Program,
    case: str,
    steps: int = STEPS,
    looks: bool = False,
    quiet: int = 0,
    **how: Any,
) -> int:
    """Train with segments and without; how many parameters were joined in the last step.

    With ``looks``, states are looked at after every third step, else only after the last. The
    program does nothing in the last ``quiet`` ones: neighbours that it parted are not joined at
    once.
    """
    both = [Training(sharding, make, joins, **how) for joins in (True, False)]
    for step in range(steps + quiet):
        for each in both:
            each.model.zero_grad()
            each.backward(step)
            if step < steps:
                program(each, step)
            each.step()
        assert both[1].joined == 0
        last = step == steps + quiet - 1
        check(both, f"{case}, step {step}", (looks and step % 3 == 2 and step < steps) or last)
    return both[0].joined


def check(both: list[Training], case: str, looks: bool = True) -> None:
    if not looks:
        for number, pair in enumerate(zip(*(each.parameters for each in both), strict=True)):
            assert torch.equal(*(it.to_local() for it in pair)), f"{case}: parameter {number}"
        return
    found, expected = (each.values() for each in both)
    assert list(found) == list(expected), case
    for name, value in expected.items():
        same = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert same, f"{case}: {name} is {found[name]}, expected {value}"


def nothing(training: Training, step: int) -> None:
    pass


VARIANTS: dict[str, list[Options]] = {
    "Adadelta": [{"lr": 0.5}, {"weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{"lr": 0.05}, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}],
    "Adam": [{"lr": 0.01}, {"amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{"lr": 0.01}, {"maximize": True, "eps": 0.0}],
    "Adamax": [{"lr": 0.01}, {"weight_decay": 0.1}],
    "ASGD": [{"lr": 0.05, "t0": 1.0}],
    "NAdam": [{"lr": 0.01}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"lr": 0.01}, {"weight_decay": 0.1}],
    "RMSprop": [{"lr": 0.01}, {"momentum": 0.5, "centered": True}],
    "Rprop": [{"lr": 0.01}],
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
}


def made_by(name: str, options: Options) -> MakeOptimizer:
    return lambda parameters: vars(optim)[name](parameters, **options)


def adamw(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.01)


def test_all_optimizers_that_are_element_wise_are_covered() -> None:
    assert {kind.__name__ for kind in ELEMENTWISE} == VARIANTS.keys()


# -- what users do between steps


def leaves_some_unused(training: Training, step: int) -> None:
    """Other parameters have no gradient in each step."""
    training.use(*[[], [3, 4], [0], [9], [], range(6), [0, 11], []][(step + 1) % 8])


def freezes(training: Training, step: int) -> None:
    for index in (1, 7, 8, 20):
        training.parameters[index].requires_grad_(step % 3 != index % 3)


def drops_gradients(training: Training, step: int) -> None:
    """After the backward."""
    for index in range(step % 3, len(training.parameters), 5):
        training.parameters[index].grad = None


def does_a_bit_of_everything(training: Training, step: int) -> None:
    leaves_some_unused(training, step)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.03 / (1 + step)
    state = training.optimizer.state
    if step == 3:
        for parameter in training.parameters[5:9]:
            for name, value in list(state[parameter].items()):
                if isinstance(value, ShardTensor):
                    state[parameter][name] = value * 0.5
    if step == 5:
        training.optimizer.state.pop(training.parameters[2], None)
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("foreach_first", [True, pytest.param(False, marks=pytest.mark.torture)])
@pytest.mark.parametrize("name", sorted(VARIANTS))
@on_ranks(2)
def test_every_optimizer_steps_on_segments_as_on_single_parameters(
    name: str, foreach_first: bool
) -> None:
    """Its options in turn with ``foreach`` and without; the long harness has them the other way round."""
    sharding = on_one_mesh()
    for number, options in enumerate(VARIANTS[name]):
        foreach = foreach_first == (number % 2 == 0)
        make = made_by(name, {**options, "foreach": foreach})
        case = f"{name} with {options}, foreach={foreach}"
        assert compare(sharding(), make, nothing, case) > 12, case
        if "initial_accumulator_value" not in options and name != "Adagrad":
            compare(sharding(), make, does_a_bit_of_everything, case)


def two_interleaved_groups(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    parameters = list(parameters)
    return optim.AdamW(
        [
            {"params": [it for it in parameters if it.ndim < 2], "weight_decay": 0.0},
            {"params": [it for it in parameters if it.ndim >= 2][::-1], "lr": 0.02},
        ],
        lr=0.01,
    )


def with_scheduler(training: Training, step: int) -> None:
    if not training.kept:
        training.kept = [optim.lr_scheduler.StepLR(training.optimizer, 1, 0.7)]
    else:
        training.kept[0].step()
    training.optimizer.param_groups[0]["weight_decay"] = 0.1 * step
    training.optimizer.param_groups[0]["foreach"] = step % 2 == 0


def adds_a_group(training: Training, step: int) -> None:
    if step == 3:
        [group] = training.optimizer.param_groups
        group["params"], moved = group["params"][:9], group["params"][9:]
        training.optimizer.add_param_group({"params": moved, "lr": 0.1})


def loads(training: Training, step: int) -> None:
    if step == 2:
        training.kept = [copy.deepcopy(training.optimizer.state_dict())]
    if step == 4:
        training.optimizer.load_state_dict(training.kept[0])  # which is still held
    if step == 6:
        training.kept = []


def replaces_states(training: Training, step: int) -> None:
    if step == 0:
        return
    state = training.optimizer.state
    one, other = training.parameters[step], training.parameters[step + 12]
    state[one]["exp_avg"] = torch.full(one.shape, 0.25)
    state[one]["step"] = torch.tensor(step + 3.0)
    state[other]["exp_avg_sq"].mul_(2)
    state[other]["step"].add_(1)
    if step == 4:
        del state[training.parameters[9]]
        state[training.parameters[10]].clear()
        state[training.parameters[11]].update(exp_avg=torch.zeros(128))
        training.optimizer.state = {
            it: dict(state[it]) for it in training.parameters if it in state
        }


def writes_to_states_it_has_held(training: Training, step: int) -> None:
    """Across steps: a state, a step count, a slice, an alias past version counters."""
    state = training.optimizer.state
    if step == 1:
        first, second, third, fourth = (training.parameters[index] for index in (1, 3, 5, 9))
        training.kept = [
            state[first],
            state[second]["step"],
            state[third]["exp_avg"],
            state[fourth]["step"].data,
        ]
    if step == 3:
        training.kept[0]["step"] = torch.tensor(1.0)
        training.kept[0]["exp_avg"].zero_()
        training.kept[1].fill_(7.0)
        training.kept[2].mul_(3.0)
        training.kept[3].fill_(5.0)
    if step == 5:
        assert float(state[training.parameters[9]]["step"]) == 7.0
        training.kept = []


def assigns_gradients(training: Training, step: int) -> None:
    for index in range(step, len(training.parameters), 4):
        parameter = training.parameters[index]
        if step % 2:
            parameter.grad = torch.full(parameter.shape, 0.5)
        else:
            parameter.grad = parameter.grad * 2
    if step % 3 == 0:
        for parameter in training.parameters:
            parameter.grad.mul_(0.5)


def keeps_gradients(training: Training, step: int) -> None:
    """The gradients of the step before, which gives the engine reason to take other memory."""
    training.kept = [it.grad for it in training.parameters] if step % 2 else []


def clips(training: Training, step: int) -> None:
    nn.utils.clip_grad_norm_(training.parameters, 0.1 / (1 + step))


def fails_in_between(training: Training, step: int) -> None:
    if step in (0, 3):
        [group] = training.optimizer.param_groups
        kept, group["weight_decay"] = group["weight_decay"], "none"
        with pytest.raises(TypeError):
            training.step()
        group["weight_decay"] = kept


def attaches_again(training: Training, step: int) -> None:
    attach_optimizer(training.optimizer)
    training.optimizer.param_groups[0]["params"] = list(
        training.optimizer.param_groups[0]["params"]
    )


def writes_to_parameters(training: Training, step: int) -> None:
    with torch.no_grad():
        training.parameters[step].mul_(0.5)
        training.parameters[step + 10].data = torch.ones(training.parameters[step + 10].shape)


def turns_differentiable(training: Training, step: int) -> None:
    training.optimizer.param_groups[0]["differentiable"] = step in (2, 3)


def shares_states(training: Training, step: int) -> None:
    """One step count for two parameters; averages in one buffer of the user's, with more in it."""
    state = training.optimizer.state
    if step == 2:
        count = torch.tensor(4.0)
        for parameter in training.parameters[1:3]:
            state[parameter]["step"] = count
        one, other = training.parameters[7:9]
        sizes = [one.to_local().numel(), other.to_local().numel()]
        start = -(-sizes[0] // 4) * 4
        buffer = torch.ones(start + sizes[1])
        for parameter, offset, size in zip((one, other), (0, start), sizes, strict=True):
            part = buffer[offset : offset + size]
            state[parameter]["exp_avg"] = ShardTensor(part, parameter.spec)
        training.kept = [buffer[sizes[0] : start]]
    if step == 5:
        assert bool((training.kept[0] == 1).all())


def exchanges_states(training: Training, step: int) -> None:
    """Of neighbours and of parameters of two units that have one shape."""
    state, half = training.optimizer.state, len(SHAPES)
    if step in (2, 4):
        for one, other in ((half - 2, half - 1), (4, half + 4)):
            pair = [state[training.parameters[index]] for index in (one, other)]
            for name in ("exp_avg", "exp_avg_sq"):
                pair[0][name], pair[1][name] = pair[1][name], pair[0][name]
    if step == 6:
        one, other = training.parameters[half - 2 : half]
        state[one]["exp_avg"] = state[other]["exp_avg"]  # which both of them write to from here


def exchanges_mappings(training: Training, step: int) -> None:
    """States are put away for a step, and put back."""
    if step == 2:
        training.kept = [training.optimizer.state]
        training.optimizer.state = collections.defaultdict(dict)
    if step == 4:
        training.optimizer.state = training.kept.pop()


def is_interrupted(training: Training, step: int) -> None:
    """After a step is over for the optimizer, and before hooks are called."""
    if step == 3:
        kept = training.optimizer._optimizer_step_code
        training.optimizer._optimizer_step_code = interrupt
        with pytest.raises(KeyboardInterrupt):
            training.step()
        training.optimizer._optimizer_step_code = kept


def interrupt() -> None:
    raise KeyboardInterrupt


PROGRAMS: list[tuple[Program, MakeOptimizer, int]] = [
    (leaves_some_unused, adamw, 0),
    (freezes, adamw, 0),
    (drops_gradients, adamw, 0),
    (drops_gradients, made_by("SGD", {"lr": 0.1, "momentum": 0.9}), 0),
    (nothing, two_interleaved_groups, 2),
    (with_scheduler, adamw, 12),
    (with_scheduler, two_interleaved_groups, 2),
    (adds_a_group, adamw, 10),
    (loads, adamw, 12),
    (replaces_states, adamw, 0),
    (writes_to_states_it_has_held, adamw, 6),
    (assigns_gradients, adamw, 0),
    (keeps_gradients, adamw, 12),
    (clips, adamw, 12),
    (fails_in_between, adamw, 0),
    (fails_in_between, made_by("AdamW", {"foreach": True}), 12),
    (attaches_again, adamw, 12),
    (writes_to_parameters, adamw, 12),
    (turns_differentiable, adamw, 0),
    (shares_states, adamw, 5),
    (exchanges_states, adamw, 5),
    (exchanges_mappings, adamw, 12),
    (is_interrupted, adamw, 12),
]
PARTING = {writes_to_states_it_has_held, shares_states, exchanges_states}


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", range(len(PROGRAMS)), ids=[program.__name__ for program, *_ in PROGRAMS]
)
@on_ranks(2)
def test_whatever_user_code_does_between_steps_segments_step_as_single_parameters(
    index: int,
) -> None:
    sharding, (program, make, joined) = on_one_mesh(), PROGRAMS[index]
    for looks in (False, True):
        case = f"{program.__name__} with {make.__name__}"
        quiet = 4 if program in PARTING else 0
        found = compare(sharding(), make, program, case, looks=looks, quiet=quiet)
        assert looks or found >= joined, f"{case}: {found} were joined"


@pytest.mark.long
@pytest.mark.slow
@on_ranks(4)
def test_under_other_strategies_too() -> None:
    for sharding in (
        Sharding(units=("units.*",), strategy="shard_grad_op"),
        Sharding(units=("units.*",), strategy="no_shard"),
        Sharding(units=("units.*",), strategy="hybrid_shard", shard_size=2),
        Sharding(units=("units.*",), strategy="hybrid_shard", shard_size=2, split=True),
    ):
        for program in (nothing, does_a_bit_of_everything):
            found = compare(sharding, adamw, program, f"{sharding} {program.__name__}")
            assert found > 12 or program is not nothing


@pytest.mark.slow
@on_ranks(2)
def test_steps_on_the_host_are_those_on_single_parameters() -> None:
    sharding = on_one_mesh()
    make = made_by("AdamW", {"foreach": False})
    for program in (nothing, leaves_some_unused, replaces_states, loads, writes_to_parameters):
        compare(sharding(), make, program, program.__name__, offload=True)


@pytest.mark.slow
@on_ranks(2)
def test_a_scaler_skips_the_step_on_segments_that_it_skips_on_single_parameters() -> None:
    sharding = on_one_mesh()

    def overflows(training: Training, step: int) -> None:
        if step == 0:
            training.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
            training.scaler.scale(torch.zeros(()))  # makes its scale
        if step in (2, 5):
            for parameter in training.parameters:
                parameter.grad.fill_(float("inf") if step == 2 else float("nan"))

    for options in ({"foreach": True}, {"foreach": False}):
        compare(sharding(), made_by("AdamW", {"lr": 0.01, **options}), overflows, str(options))


# -- copies, memory, and what is not joined


@pytest.mark.slow
@on_ranks(2)
def test_a_copy_and_a_pickle_of_an_optimizer_have_its_states() -> None:
    training = Training(Sharding(units=("units.*",)), adamw, joins=True)
    for step in range(2):
        training.backward(step)
        training.step()
    expected = [
        {
            name: value.full_tensor() if isinstance(value, ShardTensor) else value.clone()
            for name, value in training.optimizer.state[it].items()
        }
        for it in training.parameters
    ]
    for way in (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))):
        copied = way(training.optimizer)
        training.step()  # which the copy does not see
        held = copied.param_groups[0]["params"]
        assert len(copied.state) == len(held)
        for parameter, state in zip(held, expected, strict=True):
            assert list(copied.state[parameter]) == list(state)
            for name, value in copied.state[parameter].items():
                whole = value.full_tensor() if isinstance(value, ShardTensor) else value
                assert torch.equal(whole, state[name]), name
        expected = [
            {
                name: value.full_tensor() if isinstance(value, ShardTensor) else value.clone()
                for name, value in training.optimizer.state[it].items()
            }
            for it in training.parameters
        ]


@on_ranks(2)
def test_segments_come_back_after_their_states_were_looked_at_and_loaded() -> None:
    training = Training(Sharding(units=("units.*",)), adamw, joins=True)
    joined: list[int] = []
    for step in range(4):
        training.backward(step)
        training.step()
        joined.append(training.joined)
        if step == 1:
            assert len(training.optimizer.state_dict()["state"]) == len(training.parameters)
        if step == 2:
            training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    # All but the first one, and one segment per unit.
    assert joined == [len(training.parameters) - 3] * 4, joined


@pytest.mark.slow
@on_ranks(2)
def test_segments_are_joined_while_another_thread_is_in_compiled_code() -> None:
    """Python calls functions in another way then, and counts one more reference to what they are given."""
    training = Training(Sharding(units=("units.*",)), adamw, joins=True)
    began, over = threading.Event(), threading.Event()

    @torch.compile(backend="eager")
    def waits() -> None:
        began.set()
        over.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    try:
        assert began.wait(30)
        joined: list[int] = []
        for step in range(4):
            training.backward(step)
            training.step()
            joined.append(training.joined)
            len(training.optimizer.state[training.parameters[5]])  # divides its segment
            training.optimizer.load_state_dict(training.optimizer.state_dict())
    finally:
        over.set()
        thread.join()
    assert joined == [len(training.parameters) - 3] * 4, joined


@on_ranks(2)
def test_segments_that_a_change_of_groups_divides_are_not_parted_for_long() -> None:
    training = Training(Sharding(units=("units.*",)), adamw, joins=True)
    joined: list[int] = []
    for step in range(10):
        training.model.zero_grad()
        training.backward(step)
        adds_a_group(training, step)
        training.step()
        joined.append(training.joined)
    assert min(joined) == joined[-1] > 10, joined


@pytest.mark.slow
@on_ranks(2)
def test_segments_that_are_looked_at_in_every_step_are_joined_ever_less_often() -> None:
    both = [Training(Sharding(units=("units.*",)), adamw, joins) for joins in (True, False)]
    joined: list[bool] = []
    for step in range(22):
        for each in both:
            each.model.zero_grad()
            each.backward(step)
            each.step()
        joined.append(both[0].joined > 0)
        if step < 16:
            check(both, f"step {step}")
    # Looked at at once after each of these, and not any more after the last.
    assert [step for step, known in enumerate(joined) if known] == [0, 2, 6, 14]
    check(both, "the last step")


@on_ranks(2)
def test_states_and_parameters_are_in_memory_once() -> None:
    def nbytes_of_states(training: Training) -> int:
        storages = {
            value.to_local().untyped_storage()._cdata: value.to_local().untyped_storage().nbytes()
            for it in training.parameters
            for value in training.optimizer.state[it].values()
            if isinstance(value, ShardTensor)
        }
        return sum(storages.values())

    training = Training(Sharding(units=("units.*",)), adamw, joins=True)
    elements = sum(it.to_local().numel() for it in training.parameters)
    for step in range(3):
        training.backward(step)
        training.step()
        shards = {it.to_local().untyped_storage()._cdata for it in training.parameters}
        assert {it.untyped_storage()._cdata for it in training.seen} <= shards
        # Two states, and at most 3 elements of padding after each parameter.
        assert nbytes_of_states(training) <= 2 * 4 * (elements + 3 * len(training.parameters))
        if step == 1:
            training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


@on_ranks(2)
def test_neither_unknown_optimizers_nor_half_precision_on_a_cpu_are_stepped_on_segments() -> None:
    training = Training(Sharding(units=("units.*",)), Lion, joins=True, stated={"Lion": "element"})
    training.backward(0)
    training.step()
    assert training.joined == 0
    with mock.patch.object(Patchwork, "__init__", half):
        training = Training(Sharding(units=("units.*",)), adamw, joins=True)
    training.backward(0)
    training.step()
    assert training.joined == 0


original = Patchwork.__init__


def half(self: Patchwork) -> None:
    original(self)
    self.to(torch.bfloat16)


@on_ranks(2)
def test_two_optimizers_of_interleaved_parameters_leave_each_others_alone() -> None:
    both: list[Training] = []
    for joins in (True, False):
        training = Training(
            Sharding(units=("units.*",)),
            lambda parameters: optim.AdamW(list(parameters)[::2], lr=0.01),
            joins,
        )
        other = optim.SGD(training.parameters[1::2], lr=0.1, momentum=0.9)
        attach_optimizer(other)
        for step in range(4):
            training.model.zero_grad()
            training.backward(step)
            training.step()
            with mock.patch.object(elementwise, "chains", elementwise.chains if joins else alone):
                other.step()
        both.append(training)
        dist.barrier()
    check(both, "two optimizers")


@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW])
@on_ranks(2)
def test_a_parameter_that_a_group_has_twice_is_stepped_on_twice(make: Any) -> None:
    def train(model: nn.Module, runtime: Any) -> list[torch.Tensor]:
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = make([*model.parameters(), *model[1].parameters()], lr=0.1)
        if runtime is not None:
            attach_optimizer(optimizer)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones(parameter.shape)
            optimizer.step()
        return [
            it.full_tensor() if isinstance(it, ShardTensor) else it.detach()
            for it in model.parameters()
        ]

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    whole, model = build(), build()
    expected = train(whole, None)
    found = train(model, Sharding().apply(model))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
