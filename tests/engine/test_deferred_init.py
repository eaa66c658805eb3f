"""Models on the meta device get, when they are sharded, the values that their constructors would have given them."""

import functools
import gc
import types
import warnings
from contextlib import nullcontext
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import AttributeDict
from torch import nn
from torch.utils.data import TensorDataset

from shardeddp.engine.deferred_init import fill_rest
from shardeddp.engine.recording import Recording
from shardeddp.tensor.shard_tensor import ShardTensor
from support.deferred import (
    MODELS,
    ScalesItsChildren,
    Tied,
    affine,
    check_equal,
    layers,
    recorded,
    shard,
    values,
)
from training import Sharding, full
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


# -- the values of the eager initialization


def check_as_eager(sharding: Sharding, seed_by_rank: bool) -> None:
    for build in MODELS:
        seed = 5 + seed_by_rank * dist.get_rank()
        torch.manual_seed(5)
        expected = values(build())
        torch.manual_seed(seed)
        build()
        moved = torch.get_rng_state()
        torch.manual_seed(seed)
        model, recording = recorded(build)
        before = dict(model.named_parameters())
        sharding.apply(model, recording=recording)
        assert torch.equal(torch.get_rng_state(), moved), (
            f"{build.__name__} has drawn another number of times"
        )
        for name, parameter in model.named_parameters():
            assert parameter is before[name]
            assert isinstance(parameter, ShardTensor)
        check_equal(values(model), expected)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
def test_values_and_the_generator_are_those_after_an_eager_initialization(
    world: Worlds, strategy: str
) -> None:
    world(2).run(check_as_eager, Sharding(strategy=strategy, units=("*",)), False)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_they_are_in_other_worlds(world: Worlds, size: int) -> None:
    world(size).run(check_as_eager, Sharding(), False)


@pytest.mark.long
@pytest.mark.slow
def test_values_are_those_of_rank_zero_where_ranks_are_seeded_apart(world: Worlds) -> None:
    world(4).run(check_as_eager, Sharding(strategy="hybrid_shard", shard_size=2), True)


# -- who sends what


@on_ranks(2)
def test_nothing_is_sent_where_ranks_construct_alike() -> None:
    for strategy in ("full_shard", "no_shard"):
        torch.manual_seed(5)
        model, recording = recorded(layers)
        runtime = Sharding(strategy=strategy).apply(model, recording=recording)
        assert runtime.mesh.traffic.total_nbytes == 0, vars(runtime.mesh.traffic)


def constant_of(rank: int) -> nn.Module:
    model = layers()
    with torch.no_grad():
        next(model.parameters()).copy_(torch.full((), float(rank)))
    return model


def draws_before(rank: int) -> nn.Module:
    torch.rand(1 + rank, device="cpu")
    return layers()


def scaled_by(rank: int) -> nn.Module:
    model = layers()
    with torch.no_grad():
        next(model.parameters()).mul_(1.0 + rank)
    return model


class Slotted:
    __slots__ = ("table",)

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table


class Tables(list[torch.Tensor]):
    """A list that pytree does not look into."""


class Holds(nn.Module):
    """Tensors where only its own code finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        tables = [torch.randn(3) for _ in range(8)]
        self.slotted = Slotted(tables[0])
        self.object = types.SimpleNamespace(inner=[{"deep": tables[1]}])
        self.list = Tables([tables[2]])
        self.set = {tables[3]}
        self.partial = functools.partial(torch.add, tables[4], other=tables[5])
        self.closure = lambda: tables[6]
        self.linear.register_forward_hook(lambda module, args, output, table=tables[7]: table)
        self.found = lambda: torch.cat(
            [
                self.slotted.table,
                self.object.inner[0]["deep"],
                *self.list,
                *self.set,
                self.partial(),
                self.closure(),
                next(iter(self.linear._forward_hooks.values()))(None, None, None),
            ]
        )


@on_ranks(2)
def test_tensors_get_values_whatever_of_a_module_leads_to_them() -> None:
    torch.manual_seed(5)
    expected = Holds().found()
    torch.manual_seed(5)
    model, recording = recorded(Holds)
    Sharding().apply(model, recording=recording, is_only=True)
    assert torch.equal(model.found(), expected)


CACHE: list[nn.Module] = []


class Scattered(nn.Module):
    """Tensors and modules where no attribute of a module leads to, or only a library's objects."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.teacher = [nn.Linear(4, 4, bias=False)]
        self.prior = torch.distributions.Normal(torch.randn(4), torch.ones(4))
        self.batches = TensorDataset(torch.randn(2, 4))
        self.options = AttributeDict(proj=torch.randn(4, 4))
        self.multiply = torch.randn(4).mul
        self.optimizer = torch.optim.Adagrad(self.linear.parameters())
        type(self).table = torch.randn(4)
        CACHE[:] = [nn.Linear(4, 4)]

    def found(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [
            self.teacher[0](x),
            self.prior.log_prob(x),
            self.batches[0][0],
            x @ self.options.proj,
            self.multiply(x),
            self.table,
            CACHE[0](x),
            *(full(state["sum"]) for state in self.optimizer.state.values()),
        ]


@on_ranks(2)
def test_tensors_get_values_whatever_refers_to_them() -> None:
    x = torch.arange(4.0)
    torch.manual_seed(5)
    expected = Scattered().found(x)
    torch.manual_seed(5)
    model, recording = recorded(Scattered)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sharding().apply(model, recording=recording, is_only=True)
    found = model.found(x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Loads(nn.Module):
    """Its constructor loads weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 13)
        weight = torch.full((13, 7), 2.0, device="cpu")
        self.linear.load_state_dict({"weight": weight}, strict=False)


@on_ranks(2)
def test_values_that_were_recorded_are_let_go_when_the_model_has_its_own() -> None:
    model, recording = recorded(Loads)
    Sharding().apply(model, recording=recording, is_only=True)
    assert full(model.linear.weight).eq(2).all()
    gc.collect()
    tensors = [it for it in gc.get_objects() if type(it) is torch.Tensor]
    assert not [it for it in tensors if it.shape == (13, 7) and it.eq(2).all()]


class KeepsAGraph(nn.Module):
    """Keeps what it has computed of a parameter where no attribute leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        CACHE[:] = [cast(Any, self.linear.weight * 2)]


@on_ranks(2)
def test_what_was_computed_with_a_graph_and_is_kept_elsewhere_is_named() -> None:
    model, recording = recorded(KeepsAGraph)
    warnings.filterwarnings("ignore", "something still refers to the memory")  # the graph does
    with pytest.warns(UserWarning, match=r"a tensor of shape \(4, 4\) from parameters.*constant"):
        Sharding().apply(model, recording=recording, is_only=True)
    assert torch.equal(cast(Any, CACHE[0]), full(model.linear.weight) * 2)


@pytest.mark.slow
@on_ranks(2)
def test_a_module_beside_waits_until_it_is_sharded_itself() -> None:
    torch.manual_seed(5)
    expected = Scattered().teacher[0].weight, layers()
    torch.manual_seed(5)
    recording = Recording()
    with torch.device("meta"), recording.watched():
        model, other = Scattered(), layers()
    Sharding().apply(model, recording=recording)
    assert all(it.is_meta for it in (*other.parameters(), model.teacher[0].weight))
    Sharding().apply(other, recording=recording)
    check_equal(values(other), values(expected[1]))
    fill_rest(recording)  # before the first forward
    assert torch.equal(model.teacher[0].weight, expected[0])


class Branches(nn.Module):
    """Its constructor computes with an operator of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        drawn = torch.rand(4)
        chosen: Any = torch.cond(drawn[0] > 2, torch.ones_like, torch.sin, (drawn,))
        self.scale = nn.Parameter(chosen)


@on_ranks(2)
def test_a_constructor_may_call_cond() -> None:
    torch.manual_seed(5)
    expected = values(Branches())
    torch.manual_seed(5)
    model, recording = recorded(Branches)
    Sharding().apply(model, recording=recording)
    check_equal(values(model), expected)


class Notes(nn.Module):
    """What its constructor has noted of where it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.device = self.linear.weight.device
        self.options = {"nested": [{"device": self.linear.weight.device}]}
        self.shift = torch.full((4,), float(dist.get_rank()))
        self.teacher = [nn.Linear(4, 4)]
        self.teacher[0].weight.register_hook(lambda gradient: gradient * 0)
        self.teacher[0].bias.register_post_accumulate_grad_hook(
            lambda parameter: setattr(parameter, "grad", torch.zeros_like(parameter))
        )
        self.scripted = torch.jit.script(Permute())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.arange(4, device=self.device) + self.shift
        return self.scripted(self.teacher[0](self.linear(x)))


class Permute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.order


@on_ranks(2)
def test_devices_hooks_and_values_of_one_rank_are_those_of_an_eager_construction() -> None:
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    torch.manual_seed(5)
    expected = Notes()
    torch.manual_seed(5)
    model, recording = recorded(Notes)
    runtime = Sharding().apply(model, recording=recording, is_only=True)
    assert model.device == torch.device("cpu")
    assert model.options == {"nested": [{"device": torch.device("cpu")}]}
    with runtime.step("training_step") as outputs:
        outputs.append(model(torch.ones(2, 4)))
    assert torch.equal(outputs[0], expected(torch.ones(2, 4)))
    outputs[0].sum().backward()
    (teacher,) = model.teacher
    assert not teacher.weight.grad.any() and not teacher.bias.grad.any()


@on_ranks(2)
def test_what_was_not_found_is_an_error_in_the_first_step() -> None:
    recording = Recording()
    with torch.device("meta"), recording.watched():
        model = layers()
    beside = torch.empty(7, 9, device="meta")  # nobody has seen it
    runtime = Sharding().apply(model, recording=recording, is_only=True)
    said = r"mm has a tensor on the meta device.*\(7, 9\)"
    with pytest.raises(RuntimeError, match=said), runtime.step("training_step"):
        beside @ torch.ones(9, 2)


@on_ranks(2)
def test_what_ranks_keep_elsewhere_may_differ() -> None:
    torch.manual_seed(5)
    expected = layers()
    torch.manual_seed(5)
    recording = Recording()
    with torch.device("meta"), recording.watched():
        model = layers()
        mine = model[0].weight.data if dist.get_rank() == 1 else None
    with nullcontext() if mine is None else pytest.warns(UserWarning, match="still refers to"):
        runtime = Sharding().apply(model, recording=recording, is_only=True)
    assert runtime.mesh.traffic.total_nbytes == 0
    check_equal(values(model), values(expected))
    assert mine is None or torch.equal(mine, expected[0].weight)


@on_ranks(2)
def test_parameters_of_a_model_that_is_gone_are_passed_by() -> None:
    kept: list[torch.Tensor] = []

    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.weight)
            return super().forward(x)

    former = nn.Sequential(Keeps(4, 4))
    runtime = Sharding(units=("0",)).apply(former)
    with runtime.step("training_step") as outputs:
        outputs.append(former(torch.ones(2, 4)))
    del former, runtime, outputs, Keeps
    gc.collect()
    model, recording = recorded(Scattered)
    Sharding().apply(model, recording=recording, is_only=True)
    assert not model.teacher[0].weight.is_meta and kept


@on_ranks(2)
def test_what_torch_func_has_wrapped_and_somebody_keeps_is_passed_by() -> None:
    kept: list[torch.Tensor] = []
    recording = Recording()
    with torch.device("meta"), recording.watched():
        model, beside = layers(), torch.ones(3, 4)
    torch.vmap(lambda row: kept.append(row) or row)(beside)
    Sharding().apply(model, recording=recording, is_only=True)
    assert torch.equal(beside, torch.ones(3, 4)) and kept


@on_ranks(1)
def test_a_lazy_module_that_has_run_gets_its_values() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
        model(torch.zeros(1, 3))
        return model

    torch.manual_seed(5)
    expected = values(build())
    torch.manual_seed(5)
    model, recording = recorded(build)
    Sharding().apply(model, recording=recording)
    check_equal(values(model), expected)


@on_ranks(2)
def test_the_norm_of_a_weight_in_torchs_former_way_is_no_reason_to_warn() -> None:
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is another way
            return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))

    torch.manual_seed(5)
    expected = build()
    torch.manual_seed(5)
    model, recording = recorded(build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime = Sharding().apply(model, recording=recording, is_only=True)
    with runtime.step("training_step") as outputs:
        outputs.append(model(torch.ones(4)))
    assert torch.equal(outputs[0], expected(torch.ones(4)))


@pytest.mark.loop(1)
@pytest.mark.parametrize("build", [constant_of, draws_before, scaled_by])
@on_ranks(2)
def test_rank_zero_sends_its_values_where_ranks_construct_differently(build: Any) -> None:
    torch.manual_seed(5)
    expected = values(build(0))
    torch.manual_seed(5)
    model, recording = recorded(lambda: build(dist.get_rank()))
    runtime = Sharding().apply(model, recording=recording)
    assert runtime.mesh.traffic.total_nbytes > 0
    check_equal(values(model), expected)


@on_ranks(4)
def test_replicas_whose_processors_round_differently_take_the_values_of_the_first() -> None:
    torch.manual_seed(5)
    expected = values(layers())

    def rounds(self: Recording, *args: Any, **kwargs: Any) -> Any:
        for storage, held in repeat(self, *args, **kwargs):
            torch.empty(0, dtype=torch.uint8).set_(held)[:1].bitwise_xor_(1)
            yield storage, held

    repeat = Recording.repeat
    torch.manual_seed(5)
    model, recording = recorded(layers)
    odd = mock.patch.object(Recording, "repeat", rounds)
    with odd if dist.get_rank() in (1, 3) else nullcontext():
        Sharding(strategy="no_shard").apply(model, recording=recording)
    check_equal(values(model), expected)


@on_ranks(2)
def test_a_tied_weight_has_the_values_of_the_module_that_made_it() -> None:
    for take in ("head", "embed"):
        torch.manual_seed(5)
        expected = values(Tied(take))
        torch.manual_seed(5)
        model, recording = recorded(lambda take=take: Tied(take))
        shard(model, recording)
        assert torch.equal(full(model.embed.weight), expected["embed.weight"])
        assert model.embed.weight is model.head.weight


@on_ranks(2)
def test_parameters_that_share_memory_on_the_meta_device_share_it_when_they_are_sharded() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
        model[1].weight.data = model[0].weight.data
        model.view = model[0].weight.detach()
        return model

    torch.manual_seed(5)
    expected = build()[0].weight
    torch.manual_seed(5)
    model, recording = recorded(build)
    shard(model, recording)
    with torch.no_grad():
        model[0].weight.mul_(2)
    for found in (model[0].weight, model[1].weight, model.view):
        assert torch.equal(full(found), 2 * expected)


@on_ranks(2)
def test_a_buffer_keeps_its_identity_and_is_shared_as_before() -> None:
    model, recording = recorded(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    model[1].running_var = model[0].running_var
    reference = model[0].running_var
    Sharding().apply(model, recording=recording)
    assert model[0].running_var is reference
    assert model[1].running_var is reference
    assert torch.equal(reference, torch.ones(3))


# -- what has values already


@on_ranks(2)
def test_real_parameters_and_buffers_keep_their_values_whatever_their_parents_do() -> None:
    torch.manual_seed(5)
    expected = values(ScalesItsChildren())
    torch.manual_seed(5)
    model, recording = recorded(ScalesItsChildren)
    model.body[1] = nn.LayerNorm(4)
    model.body[2] = nn.Linear(4, 5)
    nn.init.constant_(model.body[2].weight, 7.0)
    before = values(model.body[2])
    Sharding(units=("body.*",)).apply(model, recording=recording)
    check_equal(values(model.body[2]), before)
    assert torch.equal(full(model.body[1].weight), torch.ones(4))
    assert torch.equal(full(model.embed.weight), expected["embed.weight"])
    assert torch.equal(full(model.body[0].weight), expected["body.0.weight"])


@on_ranks(2)
def test_a_module_may_be_real_in_part() -> None:
    torch.manual_seed(5)
    expected = affine()
    torch.manual_seed(5)
    model, recording = recorded(affine)
    model[0].shift = nn.Parameter(torch.full((3,), 4.0))
    model[0].mean = torch.full((3,), 5.0)
    Sharding().apply(model, recording=recording)
    assert torch.equal(full(model[0].shift), torch.full((3,), 4.0))
    assert torch.equal(model[0].mean, torch.full((3,), 5.0))
    assert torch.equal(full(model[0].scale), expected[0].scale)
    assert torch.equal(full(model[1].weight), expected[1].weight)
    assert torch.equal(model[0].table, expected[0].table)


@on_ranks(2)
def test_what_a_checkpoint_provides_is_kept_and_the_rest_initialised() -> None:
    torch.manual_seed(1)
    given = {name: torch.randn_like(tensor) for name, tensor in affine().state_dict().items()}
    del given["0.shift"], given["0.mean"]
    model, recording = recorded(affine)
    shard(model, recording, load=lambda: model.load_state_dict(given, strict=False) and None)
    found = values(model)
    check_equal({name: found[name] for name in given}, given)
    assert torch.equal(found["0.shift"], torch.ones(3))
    assert torch.equal(found["0.table"], torch.arange(4.0) ** 2)
    assert found["0.mean"].abs().sum() > 0


@on_ranks(2)
def test_a_parent_that_is_initialised_keeps_what_was_loaded_into_its_children() -> None:
    torch.manual_seed(1)
    given = {
        name: torch.randn_like(tensor) for name, tensor in ScalesItsChildren().state_dict().items()
    }
    del given["body.0.bias"]
    model, recording = recorded(ScalesItsChildren)
    shard(model, recording, load=lambda: model.load_state_dict(given, strict=False) and None)
    found = values(model)
    check_equal({name: found[name] for name in given}, given)
    assert torch.equal(found["body.0.bias"], torch.zeros(4))


@on_ranks(2)
def test_a_complete_checkpoint_draws_nothing() -> None:
    given = layers().state_dict()
    before = torch.get_rng_state()
    model, recording = recorded(layers)
    shard(model, recording, load=lambda: model.load_state_dict(given) and None)
    check_equal(values(model), given)
    assert torch.equal(torch.get_rng_state(), before)
