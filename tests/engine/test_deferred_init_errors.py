"""What a deferred initialization cannot do is an error on every rank, or a warning, that names what to change."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.errors import ConfigurationError, LayoutMismatchError, RankError
from shardeddp.tensor.shard_tensor import ShardTensor
from support.deferred import affine, check_equal, layers, on_meta, recorded, values, warned
from training import Sharding, full
from world import on_ranks

pytestmark = pytest.mark.timeout(60)


class Forgets(nn.Module):
    """Its constructor and its reset leave out a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Parameter(torch.empty(2))
        self.forgotten = nn.Parameter(torch.empty(2))
        self.register_buffer("mask", torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Half of it."""
        nn.init.ones_(self.known)


class HasNoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(2))
        self.inner = nn.Linear(2, 2)


def forgetful() -> nn.Module:
    return nn.Sequential(HasNoReset(), Forgets())


@on_ranks(2)
def test_what_nothing_initialises_is_listed() -> None:
    model, recording = recorded(forgetful)
    with pytest.raises(
        ConfigurationError, match=r"found 3 .*: 0.gain, 1.forgotten, 1.mask"
    ) as caught:
        Sharding().apply(model, recording=recording)
    assert "Fill them in the constructors of Forgets, HasNoReset" in str(caught.value)
    with pytest.raises(
        ConfigurationError, match=r"sharded already: '0.gain', .*build the module anew"
    ):
        Sharding().apply(model)


# -- what was made unseen


@on_ranks(2)
def test_models_that_nobody_has_recorded_get_the_values_of_their_resets_with_a_warning() -> None:
    for build in (layers, affine):
        model = on_meta(build)
        torch.manual_seed(5)
        expected = values(build())
        torch.manual_seed(5)
        with warned():
            Sharding().apply(model)
        check_equal(values(model), expected)


@on_ranks(2)
def test_what_nothing_initialises_is_listed_for_them_too() -> None:
    with pytest.raises(ConfigurationError, match=r"found 3 .*: 0.gain, 1.forgotten, 1.mask"):
        Sharding().apply(on_meta(forgetful))


class ReadsWhatItWasNotShown(nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(table * 2)


@on_ranks(2)
def test_what_was_computed_from_tensors_that_were_made_unseen_is_lost() -> None:
    with torch.device("meta"):
        table = torch.ones(3)
    model, recording = recorded(lambda: ReadsWhatItWasNotShown(table))
    with pytest.raises(
        ConfigurationError, match="found 1 on the meta device that nothing initialises: weight"
    ):
        Sharding().apply(model, recording=recording)


class HasAttributes(nn.Module):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.cache = torch.arange(3)
        self.tables = {"a": [torch.rand(2)], "b": (torch.ones(1), self.inner.weight)}


@on_ranks(2)
def test_attributes_get_their_values_too() -> None:
    torch.manual_seed(5)
    expected = HasAttributes()
    torch.manual_seed(5)
    model, recording = recorded(HasAttributes)
    cache = model.cache
    Sharding().apply(model, recording=recording)
    assert model.cache is cache
    assert torch.equal(cache, torch.arange(3))
    assert torch.equal(model.tables["a"][0], expected.tables["a"][0])
    assert torch.equal(model.tables["b"][0], torch.ones(1))
    assert model.tables["b"][1] is model.inner.weight


class HasAnOddTensor(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        if kind == "sparse":
            self.register_buffer("odd", torch.ones(2, 2).to_sparse_csr())
        elif kind == "computed":
            self.odd = self.inner.weight * 2
        else:
            self.inner(torch.ones(1, 2)).sum().backward()


@on_ranks(2)
def test_what_cannot_be_deferred_is_named_before_anything_is_sharded() -> None:
    for kind, text in (
        ("computed", "one with a graph: 0.odd"),
        ("gradient", "no gradients, found one of 0.inner"),
    ):
        model, recording = recorded(lambda kind=kind: nn.Sequential(HasAnOddTensor(kind)))
        with pytest.raises(ConfigurationError, match=text):
            Sharding().apply(model, recording=recording)
        assert model[0].inner.weight.is_meta


class ReplacesItsParameter(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(2, 3))

    def reset_parameters(self) -> None:
        """Not in place."""
        self.weight = nn.Parameter(torch.full(self.shape, 3.0))


@on_ranks(2)
def test_a_reset_may_replace_a_parameter_by_one_of_its_shape() -> None:
    model = on_meta(lambda: ReplacesItsParameter((2, 3)))
    before = model.weight
    with warned():
        Sharding().apply(model)
    assert model.weight is before
    assert torch.equal(full(model.weight), torch.full((2, 3), 3.0))
    with pytest.raises(
        ConfigurationError, match=r"replaced the parameter 'weight': expected .*\(2, 3\).*\(3, 2\)"
    ):
        Sharding().apply(on_meta(lambda: ReplacesItsParameter((3, 2))))


@on_ranks(2)
def test_an_initialization_that_fails_on_one_rank_fails_on_all() -> None:
    model, recording = recorded(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))))
    fail = mock.Mock(side_effect=OSError("no memory"))
    where = recording.view_of(model[1].weight).storage
    operation = next(it for it in recording.operations if where in it.writes)
    operation.function = fail if dist.get_rank() == 1 else operation.function
    with pytest.raises(RankError, match=r"(?s)initialising parameters failed on rank 1.*no memory"):
        Sharding().apply(model, recording=recording)
    assert isinstance(model[1].weight, ShardTensor)


@on_ranks(2)
def test_ranks_must_defer_the_same() -> None:
    model = on_meta(layers) if dist.get_rank() else layers()
    with pytest.raises(LayoutMismatchError, match=r"rank 1 has .*on the meta device"):
        Sharding().apply(model)


@on_ranks(2)
def test_ranks_must_build_in_the_same_order() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for layer in model if dist.get_rank() else reversed(model):
            nn.init.normal_(layer.weight)
        return model

    model, recording = recorded(build)
    with pytest.raises(LayoutMismatchError, match=r"initialises 0.weight"):
        Sharding().apply(model, recording=recording)
