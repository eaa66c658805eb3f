"""A recording on the meta device gives the values of an eager construction, whatever the constructor does."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shardeddp.engine.recording import Recording
from shardeddp.engine.replay import HOST
from shardeddp.torch_private import torch_function_modes

Make = Callable[[], Tensor]


def fill(write: Callable[[Tensor], object], *shape: int) -> Make:
    def make() -> Tensor:
        tensor = torch.empty(*(shape or (4, 3)))
        with torch.no_grad():
            write(tensor)
        return tensor

    return make


def forked() -> Tensor:
    with torch.random.fork_rng():
        first = torch.randn(3)
    return torch.stack([first, torch.randn(3)])


def set_back() -> Tensor:
    state = torch.get_rng_state()
    torch.rand(5)
    torch.set_rng_state(state)
    return torch.rand(5)


def own_generator() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    first = torch.rand(3, generator=generator)
    second = torch.rand(3, generator=generator.clone_state())
    return torch.stack([first, second, torch.rand(3, generator=generator), torch.rand(3)])


def two_of_one_seed() -> Tensor:
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    torch.rand(64, generator=one)
    torch.rand(16, generator=other)
    return torch.stack([torch.rand(3, generator=one), torch.rand(3, generator=other)])


def forked_to_the_same_seed() -> Tensor:
    torch.manual_seed(5)
    torch.rand(64)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        torch.rand(16)
    return torch.rand(3)


def through_numpy() -> Tensor:
    values = np.ones(3, dtype=np.float32)
    found = torch.empty(3).copy_(torch.from_numpy(values))
    values[:] = 7.0  # the recording has those of before
    return found


def reads_itself() -> Tensor:
    tensor = torch.rand(4, 4)
    return tensor.copy_(tensor.t() + 1).add_(tensor.flip(0))


def normalized() -> Tensor:
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(5, 3))
    return torch.cat([norm.running_mean, norm.running_var])


def other_default() -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.arange(3) * 0.1 + torch.rand(3)
    finally:
        torch.set_default_dtype(torch.float32)


def until_it_fits() -> Tensor:
    tensor = torch.randn(8)
    while (tensor.abs() > 0.5).any():
        tensor = torch.where(tensor.abs() > 0.5, torch.randn(8), tensor)
    return tensor


def spelled_out() -> Tensor:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    return torch.tensor(rates) + torch.tensor(torch.arange(4).tolist())


def on_the_host_between() -> Tensor:
    first = torch.rand(3)
    legacy = torch.Tensor(3).uniform_()
    second = torch.rand(3)
    state = torch.get_rng_state()
    more = torch.rand(2, device=HOST), torch.rand(2, device=HOST)
    torch.set_rng_state(state)
    return torch.cat(
        [
            first,
            second,
            legacy.to(first.device),
            *(it.to(first.device) for it in more),
            torch.rand(2),
        ]
    )


def on_the_host_behind_what_depends_on_values() -> Tensor:
    mask = torch.bernoulli(torch.rand(5))
    own = torch.Generator().manual_seed(1)
    values = torch.cat([torch.normal(mask, 1.0), torch.rand(2, generator=own)])
    return (
        values
        + torch.rand(7, device=HOST, generator=own).to(values.device)
        + torch.rand(7, device=HOST)[0].item()
    )


def indexed() -> Tensor:
    tensor = torch.zeros(4, 4)
    tensor[torch.arange(4), torch.arange(4)] = 1
    tensor[tensor > 0.5] = torch.rand(4)
    tensor[np.array([0, 1])] += 2
    tensor[range(2)] *= 3
    tensor[:, [0, 2]] = tensor[:, [2, 0]]
    tensor[[True, False, False, True]] = 4
    return tensor


def read_in_python() -> Tensor:
    scalar = torch.rand(())
    rows = torch.zeros(int(torch.arange(4).max()), 2) if scalar > -1 else torch.zeros(1)
    return rows + float(f"{scalar:.2f}") + torch.tensor([scalar, 2.0]) + torch.full((2,), scalar)


def swapped() -> Tensor:
    one, other = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
    one.data, other.data = other.data * 2, one.data
    return torch.stack([one.detach(), other.detach()])


CASES: dict[str, Make] = {
    **{
        name: fill(getattr(nn.init, name))
        for name in (
            "xavier_uniform_",
            "kaiming_normal_",
            "orthogonal_",
            "trunc_normal_",
            "eye_",
            "ones_",
        )
    },
    "truncated far out": fill(lambda it: nn.init.trunc_normal_(it, a=1.5, b=3.0)),
    "sparse_": fill(lambda it: nn.init.sparse_(it, 0.4)),
    "dirac_": fill(nn.init.dirac_, 3, 2, 3),
    "seeded sparse_": fill(
        lambda it: nn.init.sparse_(it, 0.4, generator=torch.Generator().manual_seed(1))
    ),
    "seeded truncated": fill(
        lambda it: nn.init.trunc_normal_(it, generator=torch.Generator().manual_seed(1))
    ),
    "part by part": fill(lambda it: (it[:2].normal_(), it[2:, 1].uniform_(), it[2:, ::2].fill_(2))),
    "list as an index": fill(
        lambda it: (it.zero_(), it.__setitem__([0, 2], 5.0), it.__setitem__(([1], [1, 2]), 3.0))
    ),
    "mask": fill(lambda it: (it.normal_(), it.masked_fill_(it > 0, 9.0))),
    "repeated twice": fill(lambda it: it.normal_().uniform_().mul_(3)),
    "transposed": fill(lambda it: it.t().normal_().t().add_(1)),
    "as_strided": fill(lambda it: (it.fill_(1), it.as_strided((3, 3), (2, 2)).mul_(2))),
    "on the host": lambda: torch.empty(3).copy_(torch.tensor([1.0, 2.0, 3.0], device=HOST)),
    "new_tensor": lambda: torch.empty(1).new_tensor([[1.0, 2.0]]) + torch.as_tensor([3.0, 4.0]),
    "no elements": lambda: torch.rand(0, 3),
    "expanded": lambda: torch.rand(3, 1).expand(3, 4),
    "conjugated": lambda: (torch.randn(3, dtype=torch.complex64).conj() * 2).conj(),
    "imaginary": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "bernoulli": lambda: (
        torch.bernoulli(torch.rand(9)) + torch.empty(9).bernoulli_(torch.full((9,), 0.5))
    ),
    "permuted": lambda: torch.rand(6)[torch.randperm(6)],
    "multinomial": lambda: torch.multinomial(torch.rand(6), 4),
    "geqrf": lambda: torch.geqrf(torch.randn(4, 4))[0] + torch.linalg.qr(torch.randn(4, 4))[0],
    "deep copy": lambda: copy.deepcopy(nn.Linear(3, 2)).weight.detach().add_(torch.rand(1)),
    "bfloat16": lambda: nn.Linear(3, 3).to(torch.bfloat16).weight.detach(),
    "forked": forked,
    "set back": set_back,
    "own generator": own_generator,
    "two generators of one seed": two_of_one_seed,
    "forked, to the same seed": forked_to_the_same_seed,
    "numpy": through_numpy,
    "reads itself": reads_itself,
    "batch norm": normalized,
    "another default dtype": other_default,
    "until it fits": until_it_fits,
    "spelled out": spelled_out,
    "swapped": swapped,
    "indexed": indexed,
    "read in Python": read_in_python,
    "drawn without shapes": lambda: torch._sample_dirichlet(torch.rand(3) + 1) + torch.rand(3),
    "host draws between": on_the_host_between,
    "host draws behind others": on_the_host_behind_what_depends_on_values,
}


def repeat(make: Make) -> Tensor:
    recording = Recording()
    with torch.device("meta"), recording.active():
        made = make()
    assert made.is_meta
    view = recording.view_of(made)
    assert recording.knows(view.storage)
    plan = recording.plan({view.storage})
    found = dict(recording.repeat(plan, move_generators=True))
    return view.over(found[view.storage])


def eager_and_recorded(build: Callable[[], Any]) -> tuple[Any, Any, Recording]:
    """What is built eagerly and, from the same seed, on the meta device; and how it was built there."""
    torch.manual_seed(5)
    expected = build()
    torch.manual_seed(5)
    recording = Recording()
    with torch.device("meta"), recording.active():
        return expected, build(), recording


@pytest.mark.parametrize("name", CASES)
def test_values_and_generator_are_those_of_an_eager_run(name: str) -> None:
    torch.manual_seed(5)
    expected = CASES[name]()
    moved = torch.get_rng_state()
    torch.manual_seed(5)
    found = repeat(CASES[name])
    assert torch.equal(torch.get_rng_state(), moved)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_a_generator_that_the_program_has_moved_since_stays_as_it_is() -> None:
    torch.manual_seed(5)
    recording = Recording()
    with torch.device("meta"), recording.active():
        view = recording.view_of(torch.rand(3))
    torch.rand(1)
    moved = torch.get_rng_state()
    list(recording.repeat(recording.plan({view.storage}), move_generators=True))
    assert torch.equal(torch.get_rng_state(), moved)


def test_where_nothing_is_repeated_generators_go_back_to_where_they_stood() -> None:
    torch.manual_seed(5)
    own = torch.Generator().manual_seed(7)
    before = torch.get_rng_state(), own.get_state()
    recording = Recording()
    with torch.device("meta"), recording.active():
        torch.rand(3)
        torch.rand(3, generator=own)
        torch.rand(3)
    assert not torch.equal(torch.get_rng_state(), before[0])
    recording.rewind()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(own.get_state(), before[1])


def test_parameters_are_complete_one_after_the_other_though_a_parent_changes_all_in_the_end() -> (
    None
):
    def build() -> list[Tensor]:
        layers = [nn.Linear(64, 64) for _ in range(8)]
        weights = [layer.weight.detach() for layer in layers]
        for weight in weights:
            weight.normal_()
        for weight in weights:
            weight.mul_(0.5)
        return weights

    expected, weights, recording = eager_and_recorded(build)
    views = [recording.view_of(weight) for weight in weights]
    plan = recording.plan(view.storage for view in views)
    assert plan.completed == [view.storage for view in views]
    # The first draws of the constructors and their bounds are overwritten: they move the generator and no more.
    assert sum(step.is_wanted for step in plan.steps) == 2 * len(views)
    for view, weight, (storage, memory) in zip(
        views, expected, recording.repeat(plan), strict=True
    ):
        assert storage == view.storage
        assert torch.equal(view.over(memory), weight)


DRAWS: dict[str, tuple[Callable[[Tensor], object], tuple[int, ...], torch.dtype, bool]] = {
    # Whether blocks of it are drawn by themselves.
    "uniform": (lambda it: it.uniform_(-1, 2), (24, 8), torch.float32, True),
    "normal": (lambda it: it.normal_(1.0, 3.0), (24, 8), torch.float32, True),
    "bfloat16": (lambda it: it.normal_(), (192,), torch.bfloat16, True),
    "float16": (lambda it: it.uniform_(), (192,), torch.float16, True),
    "float64": (lambda it: it.normal_(), (192,), torch.float64, False),  # takes two numbers each
    "no whole blocks": (lambda it: it.normal_(), (24, 7), torch.float32, False),
    "transposed": (lambda it: it.t().normal_(), (24, 8), torch.float32, False),
    "changed later": (lambda it: it.normal_().mul_(2), (24, 8), torch.float32, False),
    "of integers": (lambda it: it.random_(0, 100), (24, 8), torch.float32, False),
    "own generator": (
        lambda it: it.normal_(generator=torch.Generator().manual_seed(3)),
        (24, 8),
        torch.float32,
        True,
    ),
}


class SkippedNumbers(TorchDispatchMode):
    """Counts the numbers of generators that are drawn into bytes, and used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.random_.default and args[0].dtype is torch.uint8:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("part", [(0, 0), (0, 192), (5, 77), (16, 32), (190, 192), (192, 192)])
@pytest.mark.parametrize("name", DRAWS)
def test_a_rank_draws_its_part_and_comes_past_the_numbers_of_others(
    name: str, part: tuple[int, int]
) -> None:
    draw, shape, dtype, narrows = DRAWS[name]

    def build() -> list[Tensor]:
        tensors = [torch.empty(shape, dtype=dtype) for _ in range(2)]
        for tensor in tensors:
            draw(tensor)
        return tensors

    torch.manual_seed(5)
    expected = build()
    moved = torch.get_rng_state()
    torch.manual_seed(5)
    recording = Recording()
    with torch.device("meta"), recording.active():
        views = [recording.view_of(tensor) for tensor in build()]
    plan = recording.plan(view.storage for view in views)
    plan.narrow({view: part for view in views})
    list(recording.repeat(plan))  # how this torch draws is tried out once
    with SkippedNumbers() as skipped:
        found = dict(recording.repeat(plan, move_generators=True))
    for view, whole in zip(views, expected, strict=True):
        values = view.over(found[view.storage])
        assert torch.equal(values.view(-1)[slice(*part)], whole.view(-1)[slice(*part)])
    assert torch.equal(torch.get_rng_state(), moved)
    blocks = range(part[0] // 16 * 16, part[1], 16)
    assert skipped.count == (2 * (192 - 16 * len(blocks)) if narrows else 0)


def test_draws_that_nobody_wants_are_passed_by() -> None:
    def build() -> Tensor:
        weight = torch.empty(64, 64).uniform_(0, 1)
        return weight.normal_()  # as models do to their layers' weights after the constructor

    expected, built, recording = eager_and_recorded(build)
    view = recording.view_of(built)
    plan = recording.plan([view.storage])
    list(recording.repeat(plan))  # how this torch draws is tried out once
    with SkippedNumbers() as skipped:
        ((_, memory),) = recording.repeat(plan)
    assert torch.equal(view.over(memory), expected)
    assert skipped.count == 64 * 64


def test_what_was_made_unseen_and_what_comes_of_it_is_not_known() -> None:
    with torch.device("meta"):
        unseen = torch.ones(3)
    recording = Recording()
    with torch.device("meta"), recording.active():
        derived = unseen * 2
        replaced = torch.empty(3).copy_(derived).fill_(1)
    assert not recording.knows(recording.view_of(unseen).storage)
    assert not recording.knows(recording.view_of(derived).storage)
    assert recording.knows(recording.view_of(replaced).storage)
    with (
        torch.device("meta"),
        recording.active(),
        pytest.raises(RuntimeError, match="made unrecorded"),
    ):
        derived.sum().item()


@pytest.mark.parametrize("move", [lambda it: it.cpu(), lambda it: it.to(HOST)])
def test_a_tensor_that_is_moved_to_the_host_is_the_same_as_it_is_there(
    move: Callable[[Tensor], Tensor],
) -> None:
    recording = Recording()
    with torch.device("meta"), recording.active():
        tensor = torch.ones(3)
        assert move(tensor) is tensor
        assert tensor.to("cpu", torch.float64).dtype is torch.float64
        assert tensor.to(HOST, copy=True) is not tensor


@pytest.mark.parametrize("pickled", [pickle.dumps, lambda it: torch.save({"it": it}, io.BytesIO())])
def test_a_tensor_without_values_is_neither_pickled_nor_saved(
    pickled: Callable[[Tensor], object],
) -> None:
    recording = Recording()
    with torch.device("meta"), recording.active():
        tensor = nn.Parameter(torch.ones(3))
        with pytest.raises(RuntimeError, match=r"to pickle or save, found one of shape \(3,\)"):
            pickled(tensor)


HOSTED = torch.arange(12.0).view(3, 4) / 7


def host(*shape: int) -> Tensor:
    """A tensor that is on the host whatever the device is."""
    return torch.zeros(shape, device=HOST)


def sum_of_squares() -> Tensor:
    total = host()
    for _ in range(3):
        total += torch.randn(4).pow(2).sum()
    return total


def written_on_the_host() -> Tensor:
    found, weight = host(3, 4), torch.randn(3, 4)
    found[:, 1:] += weight[:, 1:]
    found[1] = weight[2]
    found.addmm_(HOSTED, torch.randn(4, 4))
    torch.mul(found, weight, out=found)
    torch._foreach_add_([found, weight], [weight, found])
    found[torch.randn(3) > 0] = 1.0
    return torch.cat([found, weight])


def data_dependent() -> Tensor:
    layer, convolution = nn.Linear(4, 4), nn.Conv1d(3, 2, 1)
    found = layer(HOSTED)
    with torch.no_grad():
        layer.bias -= found.mean(0)
        layer.weight[1:3] = HOSTED[:2]
        layer.weight.masked_fill_(HOSTED[:1] > 0.1, 0.5)
    parts = [HOSTED @ layer.weight, convolution(HOSTED), torch.where(HOSTED > 1, found, HOSTED)]
    rows = nn.functional.embedding(torch.tensor([2, 0], device=HOST), layer.weight)
    return torch.cat([*parts, rows, layer(HOSTED), layer.weight[torch.arange(2, device=HOST)]]).data


def replaced_data() -> Tensor:
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3, device=HOST)
    with torch.no_grad():
        other.weight.copy_(layer.weight)
    layer.weight.data = HOSTED.clone()
    layer.bias.data.copy_(HOSTED[:, 0])
    return torch.cat([layer.weight, other.weight, layer.bias.expand(4, 3).t()]).data


def read_as_arrays() -> Tensor:
    weight = torch.randn(3, 4)
    return torch.from_numpy(weight.numpy() + np.asarray(weight.detach()))


@pytest.mark.parametrize(
    "make",
    [sum_of_squares, written_on_the_host, data_dependent, replaced_data, read_as_arrays],
)
def test_tensors_of_the_host_and_those_that_wait_for_values_are_computed_with_together(
    make: Make,
) -> None:
    (expected, later), (found, later_found), recording = eager_and_recorded(
        lambda: (make(), torch.rand(3, device=HOST))
    )
    assert torch.equal(later_found, later)
    if found.is_meta:
        view = recording.view_of(found)
        found = view.over(dict(recording.repeat(recording.plan([view.storage])))[view.storage])
    assert torch.equal(found, expected)


def test_a_model_that_a_hook_has_for_its_shapes_draws_nothing() -> None:
    torch.manual_seed(5)
    recording = Recording()
    with torch.device("meta"), recording.active():
        weight = torch.randn(4)
    before = torch.get_rng_state()
    with recording.active(builds=False):
        with torch.device("meta"):
            layer = nn.Linear(4, 4)
            layer(torch.randn(2, 4)).sum().backward()
        assert layer.weight.is_meta and not recording.has(layer.weight)
        copied = weight.clone()
        made = torch.ones(3, device=weight.device)
    assert torch.equal(torch.get_rng_state(), before)
    assert recording.has(copied) and recording.has(made)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(4, 4, device="meta"),
        lambda: nn.init.trunc_normal_(torch.empty(4, 4, device="meta")),
    ],
)
def test_it_does_not_where_its_device_is_an_argument(build: Callable[[], object]) -> None:
    torch.manual_seed(5)
    torch.randn(4)
    expected = torch.rand(2)
    torch.manual_seed(5)
    recording = Recording()
    with torch.device("meta"), recording.active():
        weight = torch.randn(4)
    with recording.active(builds=False):
        made = build()
        assert torch.equal(torch.rand(2, device=HOST), expected)
        assert torch.rand_like(weight, device=HOST).is_cpu
    assert made is not None


def test_statistics_of_a_norm_on_the_host_are_those_of_an_eager_construction() -> None:
    torch.manual_seed(5)
    data = torch.randn(5, 3)

    def run() -> tuple[nn.Module, nn.Module]:
        on_host, deferred = nn.BatchNorm1d(3, device=HOST), nn.BatchNorm1d(3)
        on_host(nn.Linear(3, 5).weight)
        deferred(data)
        return on_host, deferred

    expected, found, recording = eager_and_recorded(run)
    assert torch.equal(found[0].running_mean, expected[0].running_mean)
    with recording.active():
        assert found[1].running_var.tolist() == expected[1].running_var.tolist()


def test_what_would_be_lost_without_a_word_is_refused() -> None:
    recording = Recording()
    with torch.device("meta"), recording.active():
        weight, on_host = torch.randn(3), nn.Linear(3, 1, device=HOST).bias
        with pytest.raises(ValueError, match="read-only"):
            weight.numpy()[0] = 7
        with pytest.raises(RuntimeError, match=r"found one of shape \(3,\).*copy_\(\) them"):
            on_host.data = weight


def test_a_mode_that_is_entered_while_recording_may_outlive_it() -> None:
    recording, counter = Recording(), FlopCounterMode(display=False)
    recorded = recording.active()
    recorded.__enter__()
    counter.__enter__()
    recorded.__exit__(None, None, None)
    torch.ones(2, 3) @ torch.ones(3, 4)
    counter.__exit__(None, None, None)
    assert counter.get_total_flops() == 2 * 2 * 3 * 4
    assert not torch_function_modes()


def test_operations_on_the_host_are_not_kept() -> None:
    recording = Recording()
    with recording.active():
        values = list(itertools.accumulate(torch.rand(4), torch.add))
        torch.tensor([1.0]).add_(values[0])
    assert not recording.plan({0}).steps
