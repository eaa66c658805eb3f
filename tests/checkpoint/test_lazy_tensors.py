"""A lazy tensor is a tensor to whoever looks at it, and is read when its elements are used."""

import copy
import pickle

import pytest
import torch

from shardeddp.checkpoint.read import LazyTensor
from shardeddp.plan.layout import Interval

VALUES = torch.arange(12.0)


class Reads:
    """Counts what is read."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def __call__(self, interval: Interval) -> torch.Tensor:
        self.intervals.append(interval)
        return VALUES[interval.start : interval.stop].clone()


@pytest.fixture
def reads() -> Reads:
    return Reads()


@pytest.fixture
def lazy(reads: Reads) -> LazyTensor:
    return LazyTensor(("model", "weight"), (3, 4), torch.float32, reads)


def test_questions_read_nothing(lazy: LazyTensor, reads: Reads) -> None:
    assert (lazy.shape, lazy.dtype, lazy.numel(), lazy.dim()) == ((3, 4), torch.float32, 12, 2)
    assert lazy.device.type == "cpu" and not lazy.requires_grad
    assert repr(lazy) == "LazyTensor(model.weight, shape=(3, 4), dtype=torch.float32)"
    assert reads.intervals == []


def test_operations_read_all_of_it(lazy: LazyTensor, reads: Reads) -> None:
    whole = VALUES.view(3, 4)
    assert type(lazy + 1) is torch.Tensor and torch.equal(lazy + 1, whole + 1)
    assert torch.equal(lazy[1], whole[1])
    assert torch.equal(torch.cat([lazy, whole]), torch.cat([whole, whole]))
    assert torch.equal(lazy.detach().clone(), whole)
    assert torch.equal(torch.zeros(3, 4).copy_(lazy), whole)
    assert lazy.sum().item() == 66 and lazy.tolist() == whole.tolist()
    assert torch.equal(copy.deepcopy(lazy), whole)
    assert torch.equal(pickle.loads(pickle.dumps(lazy)), whole)
    assert set(reads.intervals) == {Interval(0, 12)}


def test_an_interval_is_all_that_a_shard_reads(lazy: LazyTensor, reads: Reads) -> None:
    assert torch.equal(lazy.elements(Interval(3, 7)), VALUES[3:7])
    assert reads.intervals == [Interval(3, 7)]


def test_what_was_read_ahead_is_not_read_again_and_is_given_away_once(
    lazy: LazyTensor, reads: Reads
) -> None:
    lazy.read_ahead(Interval(3, 7))
    staged = lazy.elements(Interval(3, 7))
    assert torch.equal(staged, VALUES[3:7]) and reads.intervals == [Interval(3, 7)]
    assert lazy.elements(Interval(3, 7)) is not staged
    assert len(reads.intervals) == 2


def test_what_is_written_into_it_is_what_it_holds(lazy: LazyTensor, reads: Reads) -> None:
    expected = VALUES.view(3, 4).clone()
    assert lazy.mul_(2) is lazy
    assert lazy.lerp_(torch.ones(3, 4), 0.5) is lazy
    expected.mul_(2).lerp_(torch.ones(3, 4), 0.5)
    lazy[0, 1] = 7.0
    expected[0, 1] = 7.0
    torch._foreach_add_([lazy], 1.0)
    torch.add(expected, 1.0, out=lazy)
    assert torch.equal(lazy + 0, expected + 1)
    assert torch.equal(lazy.elements(Interval(3, 7)), (expected + 1).flatten()[3:7])
    assert torch.equal(copy.deepcopy(lazy), expected + 1)
    assert torch.equal(lazy.copy_(torch.zeros(4)) + 0, torch.zeros(3, 4))
    lazy.data = torch.ones(3, 4)
    assert torch.equal(lazy + 0, torch.ones(3, 4))
    assert len(reads.intervals) == 1


def test_what_is_written_into_a_view_or_an_array_of_it_is_what_it_holds(lazy: LazyTensor) -> None:
    view, array = lazy.view(-1)[2:4], lazy.numpy()
    view.zero_()
    array[2] = -1
    lazy.t()[0, 0] = 5
    lazy.detach()[1, 1] = 6
    expected = VALUES.view(3, 4).clone()
    expected[0, 2:] = 0
    expected[2], expected[0, 0], expected[1, 1] = -1, 5, 6
    assert torch.equal(lazy + 0, expected)


def test_what_is_only_read_is_not_kept(lazy: LazyTensor, reads: Reads) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    with torch.no_grad():
        parameter.copy_(lazy)
    assert lazy.double().sum() == 66 and (lazy * 2).max() == 22 and lazy.clone().shape == (3, 4)
    assert len(reads.intervals) == 4


def test_its_shape_stays(lazy: LazyTensor) -> None:
    with pytest.raises(RuntimeError, match=r"t_\(\) would change the shape of model.weight.*clone"):
        lazy.t_()
