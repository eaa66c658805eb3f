"""What a deferred initialization cannot do is an error on every rank, or a warning, that names what to change."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.errors import ConfigurationError, LayoutMismatchError, RankError
from shardeddp.tensor.shard_tensor import ShardTensor
from support.deferred import ScalesItsChildren, layers, on_meta
from training import Sharding, full
from world import on_ranks

pytestmark = pytest.mark.timeout(60)


class Forgets(nn.Module):
    """Its reset leaves out a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Parameter(torch.ones(2))
        self.forgotten = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(2))

    def reset_parameters(self) -> None:
        """Half of it."""
        nn.init.ones_(self.known)


class HasNoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)


@on_ranks(2)
def test_what_nothing_initialises_is_listed() -> None:
    model = on_meta(lambda: nn.Sequential(HasNoReset(), Forgets()))
    with pytest.raises(ConfigurationError, match=r"found 3 .*: 0.gain, 1.forgotten, 1.mask") as caught:
        Sharding().apply(model)
    assert "Define reset_parameters() in Forgets, HasNoReset" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"sharded already: '0.gain', .*build the module anew"):
        Sharding().apply(model)


class KeepsAPlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.cache = torch.arange(3)


@on_ranks(2)
def test_plain_tensors_on_the_meta_device_are_listed_before_anything_is_sharded() -> None:
    model = on_meta(lambda: nn.Sequential(KeepsAPlainTensor()))
    with pytest.raises(ConfigurationError, match=r"found 1 plain attributes: 0.cache"):
        Sharding().apply(model)
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
    Sharding().apply(model)
    assert model.weight is before
    assert torch.equal(full(model.weight), torch.full((2, 3), 3.0))
    with pytest.raises(ConfigurationError, match=r"replaced the parameter 'weight': expected .*\(2, 3\).*\(3, 2\)"):
        Sharding().apply(on_meta(lambda: ReplacesItsParameter((3, 2))))


class FailsOnRankOne(nn.Linear):
    def reset_parameters(self) -> None:
        """Fail, once the model is there."""
        if not self.weight.is_meta and dist.get_rank() == 1:
            raise OSError("no such table")
        super().reset_parameters()


@on_ranks(2)
def test_a_reset_that_fails_on_one_rank_fails_on_all() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), FailsOnRankOne(2, 2)))
    with pytest.raises(RankError, match=r"(?s)initialising 1 failed on rank 1.*no such table"):
        Sharding().apply(model)
    assert isinstance(model[1].weight, ShardTensor)


@on_ranks(2)
def test_ranks_must_defer_the_same() -> None:
    model = on_meta(layers) if dist.get_rank() else layers()
    with pytest.raises(LayoutMismatchError, match=r"rank 1 has .*on the meta device"):
        Sharding().apply(model)


class InitialisesInItsConstructor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        pass


@on_ranks(2)
def test_a_constructor_whose_initialization_is_lost_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="InitialisesInItsConstructor initialises parameters by _init_weights"):
        Sharding().apply(on_meta(InitialisesInItsConstructor))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sharding().apply(on_meta(ScalesItsChildren))
