"""Metrics and random generators that modules, callbacks and their objects hold are restored, wherever they are."""

import random
from array import array
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricTracker, SumMetric

from shardeddp.lightning.held_state import HeldState

pytestmark = pytest.mark.timeout(30)

LARGE = 16 * 1024 + 1
"""Elements of a tensor outside of buffers and metrics that is not copied."""


class Plain:
    """An object with a metric, and with itself."""

    def __init__(self, held: object) -> None:
        self.held, self.again = held, self


class Counting(Metric):
    """A metric with all kinds of state."""

    values: list[Tensor]
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")
        self.add_state("values", [], "cat")
        self.seen, self.last, self.names = Counter[str](), deque[int](maxlen=3), set[int]()
        self.array, self.text, self.nested = np.zeros(2), "0", {"a": [[0]]}
        self.record = SimpleNamespace(count=0)

    def update(self, value: float) -> None:
        """Change all of them."""
        count = int(self.text) + 1
        self.text, self.late = str(count), count
        self.total += value
        self.values.append(self.total.clone())
        self.seen["a"] += 1
        self.last.append(count)
        self.names.add(count)
        self.array += 1
        self.nested["a"][0][0] += 1
        self.record.count += 1

    def compute(self) -> Tensor:
        """Total."""
        return self.total

    def state(self) -> Any:
        """All of them, comparable."""
        kinds: Any = self.total.item(), [it.item() for it in self.values], dict(self.seen)
        more = [*self.last], {*self.names}, self.array.tolist(), self.text, repr(self.nested)
        return *kinds, *more, self.record.count, self.update_count, getattr(self, "late", None)


def test_all_state_of_a_metric_is_restored_several_times() -> None:
    metric = Counting()
    metric.update(1.0)
    del metric.late
    before, held = metric.state(), HeldState([metric])
    for _ in range(2):
        metric.update(2.0)
        metric.update(2.0)
        metric.values[0] += 1
        assert metric.state() != before
        held.restore()
        assert metric.state() == before
    assert not held.lost()
    metric.values[0] = torch.zeros(LARGE)
    held = HeldState([metric])
    metric.values[0] += 1
    assert held.lost() == "Counting.values"


def _with(module: nn.Sequential, held: object) -> nn.Module:
    module[0].held = {"a": held}  # type: ignore[assignment]
    return module


class Slots:
    """An object without a ``__dict__``."""

    __slots__ = ("empty", "held")
    empty: object

    def __init__(self, held: object) -> None:
        self.held = held

    def get(self) -> object:
        """What it holds."""
        return self.held


@dataclass(slots=True)
class Record:
    """A record with slots."""

    held: object


class Pair(NamedTuple):
    """A tuple with names."""

    a: object
    b: object = None


def _in_class(held: object) -> object:
    return type("Holder", (), {"held": held})()


HOLDERS: dict[str, Callable[[object], object]] = {
    "dict of a child": partial(_with, nn.Sequential(nn.Linear(1, 1))),
    "object": lambda it: Plain(Plain(it)),
    "namespace": lambda it: Plain(SimpleNamespace(held=it)),
    "deque": lambda it: Plain(deque([(it,)])),
    "slots": Slots,
    "record with slots": Record,
    "named tuple": lambda it: Plain(Pair(it)),
    "user dict": lambda it: UserDict({"a": it}),
    "bound method": lambda it: Plain(Slots(it).get),
    "partial": lambda it: Plain(partial(Plain, held=it)),
    "argument": lambda it: Plain(partial(Plain, it)),
    "closure": lambda it: Plain(lambda: it),
    "default of a function": lambda it: Plain(lambda held=it: held),
    "attribute of a class": _in_class,
    "module in a list": lambda it: Plain([_with(nn.Sequential(nn.Linear(1, 1)), it)]),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_metrics_and_generators_are_found_in_every_holder(holder: str) -> None:
    metric, of_torch, of_python = SumMetric(), torch.Generator().manual_seed(1), random.Random(1)
    of_numpy, legacy = np.random.default_rng(1), np.random.RandomState(1)
    every = [metric, of_torch, of_python, of_numpy, legacy, random.SystemRandom()]

    def draw() -> list[float]:
        metric.update(1.0)
        drawn = torch.rand((), generator=of_torch).item(), of_python.random()
        return [*drawn, of_numpy.random(), legacy.rand(), metric.compute().item()]

    draw()
    held = HeldState([HOLDERS[holder](every)])
    first = draw()
    assert draw() != first
    held.restore()
    assert draw() == first


def test_a_metric_in_a_module_of_a_callback_is_found() -> None:
    callback = SimpleNamespace(modules=nn.ModuleDict({"a": SumMetric()}))
    held = HeldState([callback])
    metric: Any = callback.modules["a"]
    metric.update(1.0)
    held.restore()
    assert metric.update_count == 0


def test_large_containers_are_not_walked_through() -> None:
    metric = SumMetric()
    held = HeldState([Plain([metric] * 1001)])
    metric.update(1.0)
    held.restore()
    assert metric.compute() == 1
    assert "Plain.held holds SumMetric objects" in held.obstacle()


def test_methods_of_generators_are_followed() -> None:
    draw = np.random.default_rng(1).random
    held = HeldState([Plain(draw)])
    first = draw()
    held.restore()
    assert draw() == first


def test_modules_come_before_the_data_around_them_and_a_walk_that_is_cut_off_is_told() -> None:
    metric = SumMetric()
    data = [[Plain(0) for _ in range(900)] for _ in range(12)]
    held = HeldState([data, nn.ModuleList([nn.ModuleList([metric])])])
    metric.update(1.0)
    held.restore()
    assert metric.update_count == 0
    assert "hold more than 10,000 objects" in held.obstacle()


def test_the_length_of_containers_that_are_not_copied_is_compared() -> None:
    values = [0] * 100_001
    held = HeldState([Plain(values)])
    assert not held.obstacle()
    values.append(1)
    assert held.obstacle().startswith("it has changed Plain.held, of 100,001 entries")


# -- buffers


def _grow_data(buffer: Tensor) -> None:
    buffer.data = torch.cat([buffer, torch.ones(1)])


def _grow_storage(buffer: Tensor) -> None:
    buffer.resize_(buffer.numel() + 1)[-1] = 1


def _set(buffer: Tensor) -> None:
    buffer.set_(torch.ones(5))  # type: ignore[call-overload]


@pytest.mark.parametrize("change", [_grow_data, _grow_storage, _set])
@pytest.mark.parametrize("numel", [0, 1, 2])
def test_buffers_that_have_grown_have_their_former_elements(
    change: Callable[[Tensor], None], numel: int
) -> None:
    module: Any = nn.Module()
    module.register_buffer("queue", torch.arange(float(numel)))
    held, queue = HeldState([module]), module.queue
    for _ in range(2):
        change(queue)
        assert not held.obstacle()
        held.restore()
        assert module.queue is queue and queue.tolist() == [*range(numel)]


def test_elements_of_expanded_buffers_are_restored() -> None:
    module: Any = nn.Module()
    module.register_buffer("scale", torch.zeros(1).expand(4))
    held = HeldState([module])
    module.scale[:1] += 1
    held.restore()
    assert module.scale.tolist() == [0] * 4 and module.scale.stride() == (0,)


def test_buffers_whose_memory_is_gone_or_of_which_there_is_no_copy_are_told() -> None:
    module: Any = nn.Module()
    module.register_buffer("freed", torch.zeros(2))
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    held = HeldState([module])
    module.freed.untyped_storage().resize_(0)
    assert held.lost() == "Module.freed"
    held = HeldState([module.register_buffer("freed", None) or module])
    module.sparse.mul_(2)
    assert held.lost() == "Module.sparse"


def test_parameters_are_compared_and_have_their_requires_grad() -> None:
    module = nn.Linear(1, 1)
    held = HeldState([[module]])
    module.requires_grad_(False)
    held.restore()
    assert module.weight.requires_grad and not held.obstacle()
    with torch.no_grad():
        module.weight += 1
    assert held.lost() == "Linear.weight"


def test_modules_that_were_added_are_gone_and_modes_are_the_former() -> None:
    tracker = MetricTracker(SumMetric(), maximize=True)
    outer = nn.ModuleList([tracker])
    tracker.increment()
    held = HeldState([outer])
    outer.eval()
    tracker.increment()
    tracker.update(1.0)
    held.restore()
    assert len(tracker) == 2 and tracker.n_steps == 1 and tracker.training


# -- attributes


class Config:
    """Plain attributes of several kinds, on objects and their class."""

    of_class = 0

    def __init__(self) -> None:
        self.count, self.users = 0, UserDict(a=0)
        self.bytes, self.codes = bytearray(b"a"), array("i", [0])
        self.pair, self.rows = Pair(np.zeros(1)), [0] * 2000
        self.ordered, self.scale = OrderedDict(a=0, b=0), torch.zeros(())
        self.slots = Slots(0)
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.counted = counted

    def change(self) -> int:
        """Change all of them; return how often it was called, as a closure counts it."""
        self.count += 1
        self.users["a"] += 1
        self.bytes.append(1)
        self.codes.append(1)
        self.pair.a[0] += 1  # type: ignore[index]
        self.rows.append(1)
        self.ordered.move_to_end("a")
        self.scale += 1
        self.slots.held = self.slots.empty = 1
        type(self).of_class += 1
        self.late = 1
        return self.counted()

    def state(self) -> Any:
        """All of them but the closure's, comparable."""
        kinds: Any = self.count, dict(self.users), bytes(self.bytes), [*self.codes]
        more: Any = repr(self.pair), len(self.rows), [*self.ordered], self.scale.item()
        slots = self.slots.held, hasattr(self.slots, "empty")
        return *kinds, *more, *slots, self.of_class, hasattr(self, "late")


@pytest.mark.parametrize("of_metric", [False, True])
def test_attributes_of_objects_are_restored_several_times(of_metric: bool) -> None:
    config, metric = Config(), SumMetric()
    metric.config = config  # type: ignore[assignment]
    held, before = HeldState([metric if of_metric else config]), config.state()
    for _ in range(2):
        assert config.change() == 1
        assert not any(it == old for it, old in zip(config.state(), before, strict=True))
        held.restore()
        assert config.state() == before
    assert not held.obstacle()


def test_tensors_in_named_tuples_are_compared() -> None:
    metric = SumMetric()
    metric.pair = Pair(torch.zeros(LARGE))  # type: ignore[assignment]
    held = HeldState([metric])
    metric.pair.a.add_(1)  # type: ignore[attr-defined, reportAttributeAccessIssue]
    assert held.lost() == "SumMetric.pair"


class Entries(dict[str, Any]):
    """A dictionary that may have attributes."""


class Stack(list[Any]):
    """A list that has slots."""

    __slots__ = ("count",)


def test_attributes_of_containers_and_of_empty_objects_are_restored() -> None:
    entries, stack, empty = Entries(), Stack([0]), SimpleNamespace()
    entries.seen, stack.count = [0], 0  # type: ignore[attr-defined]
    held = HeldState([Plain(entries), Plain(stack), Plain(empty)])
    entries.seen.append(1)  # type: ignore[attr-defined]
    entries["a"] = entries.late = stack.count = empty.late = 1  # type: ignore[attr-defined]
    stack.append(1)
    held.restore()
    assert vars(entries) == {"seen": [0]} and not entries and not vars(empty)
    assert stack == [0] and stack.count == 0


def test_small_tensors_in_containers_are_restored_also_after_writes_that_torch_does_not_count() -> (
    None
):
    shadow = [torch.zeros(2), torch.zeros(2)]
    held = HeldState([Plain({"a": shadow})])
    shadow[0].data.add_(1)
    shadow[1].numpy()[:] = 1
    held.restore()
    assert not held.lost() and torch.stack(shadow).eq(0).all()


def test_a_few_tensors_in_containers_are_copied_and_the_others_compared() -> None:
    values = [torch.zeros(1) for _ in range(201)]
    held = HeldState([Plain(values)])
    values[0] += 1
    assert not held.lost()
    values[200] += 1
    assert held.lost() == "Plain.held"


def test_gradients_of_leaves_that_are_no_parameters_are_restored() -> None:
    fresh, added = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    added.sum().backward()
    held = HeldState([Plain([fresh, added])])
    for _ in range(2):
        (fresh + added).sum().backward()
        held.restore()
        assert fresh.grad is None and added.grad is not None and added.grad.item() == 1


# -- hooks


def test_hooks_of_modules_are_restored_with_what_their_closures_hold() -> None:
    module, count = nn.Linear(1, 1), [0]

    def counted(*_: object) -> None:
        count[0] += 1

    first = module.register_forward_pre_hook(counted, with_kwargs=True)
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    before, held = {**module._forward_pre_hooks}, HeldState([module])
    for _ in range(2):
        module(torch.zeros(1))
        first.remove()
        module.register_forward_pre_hook(counted, prepend=True)
        module.register_forward_hook(counted, with_kwargs=True)
        module.register_full_backward_pre_hook(counted)
        module.register_full_backward_hook(counted)
        held.restore()
        assert count == [0] and [*module._forward_pre_hooks] == [*before]
        assert not (module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)
    module(torch.zeros(1))
    assert count == [1]
    first.remove()
    assert len(module._forward_pre_hooks) == 1 and not module._forward_pre_hooks_with_kwargs


# -- optimizers and schedulers


def test_options_of_optimizers_and_schedulers_are_restored() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(1.0), foreach=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    held = HeldState([optimizer, Plain(schedule)])
    (group,) = optimizer.param_groups
    for _ in range(2):
        optimizer.step()
        schedule.step()
        group["betas"], group["late"] = (0, 0), 1
        held.restore()
        assert group["lr"] == 1 and group["betas"] == (0.9, 0.999) and "late" not in group
        assert group["params"] == [parameter]
        assert schedule.last_epoch == 0 and schedule.get_last_lr() == [1]


def test_objects_that_threads_use_stay_as_they_are_but_for_their_generators() -> None:
    shared: Any = SimpleNamespace(lock=Lock(), ready=[], rng=random.Random(1), count=0)
    held = HeldState([shared])
    first = shared.rng.random()
    shared.ready.append(1)
    shared.count += 1
    held.restore()
    assert (shared.ready, shared.count) == ([1], 1) and shared.rng.random() == first
