"""Whole parameters for a while: what is read, written, saved and copied inside of ``summon_full_params``."""

import copy
import io
import pickle
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.engine.summon import summon
from shardeddp.tensor.shard_tensor import ShardTensor
from training import WIDTH, Sharding, Trial, batch, close, full, linears, square
from world import on_ranks

pytestmark = pytest.mark.timeout(60)
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
X = batch(0, 0, 2, WIDTH)


def tied(strategy: str) -> Trial:
    """A trained model whose first and last layer share a weight."""
    model = linears()
    model[2].weight = model[0].weight
    trial = Trial(model, Sharding(strategy=strategy, units=("0", "1")))
    trial.train(square, steps=1)
    return trial


def summoned(
    trial: Trial,
    module: nn.Module | None = None,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
) -> AbstractContextManager[None]:
    return summon(
        trial.runtime,
        module or trial.model,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=rank0_only,
    )


def is_whole(model: nn.Module) -> bool:
    assert len({isinstance(p, ShardTensor) for p in model.parameters()}) == 1
    return not isinstance(next(iter(model.parameters())), ShardTensor)


@on_ranks(2)
def test_parameters_are_whole_inside_and_each_rank_may_do_what_it_likes() -> None:
    for strategy in STRATEGIES:
        trial = tied(strategy)
        with summoned(trial):
            assert is_whole(trial.model) and trial.model[2].weight is trial.model[0].weight
            with summoned(trial, trial.model[1]):
                pass
            assert is_whole(trial.model)
            trial.check_parameters()
            if dist.get_rank() == 0:
                file = io.BytesIO()
                torch.save(trial.model.state_dict(), file)
                file.seek(0)
                trial.reference.load_state_dict(torch.load(file, weights_only=True))
                loaded = pickle.loads(pickle.dumps(trial.model))
                assert type(loaded[0].weight) is nn.Parameter
                close(loaded(X), trial.reference(X), "of what was pickled")
            with torch.no_grad():
                close(trial.model(X), trial.reference(X), "of a forward inside")
        assert not is_whole(trial.model)
        trial.train(square, steps=1)


def double(model: nn.Module) -> None:
    model[0].weight.mul_(2)
    model[1].bias.data[0] = 7.0


@pytest.mark.slow
@on_ranks(2)
def test_what_rank_zero_writes_is_what_all_ranks_have() -> None:
    for strategy in STRATEGIES:
        trial = tied(strategy)
        with summoned(trial), torch.no_grad():
            double(trial.model) if dist.get_rank() == 0 else trial.model[1].weight.zero_()
        with torch.no_grad():
            double(trial.reference)
        trial.check_parameters()
        with torch.inference_mode(), summoned(trial):
            double(trial.model)
        with torch.no_grad():
            double(trial.reference)
        trial.check_parameters()
        with summoned(trial, writeback=False), torch.no_grad():
            double(trial.model)
        trial.check_parameters()
        trial.train(square, steps=2)


@on_ranks(2)
def test_what_numpy_writes_reaches_the_shards_as_well() -> None:
    trial = tied("full_shard")
    with summoned(trial):
        trial.model[0].weight.detach().numpy()[0] = 5.0
        trial.model[1].bias.untyped_storage().fill_(0)
    with torch.no_grad():
        trial.reference[0].weight[0] = 5.0
        trial.reference[1].bias.zero_()
    trial.check_parameters()


@on_ranks(2)
def test_rank_zero_may_have_them_alone_and_write() -> None:
    trial = tied("full_shard")
    with summoned(trial, rank0_only=True):
        assert is_whole(trial.model) == (dist.get_rank() == 0)
        if dist.get_rank() == 0:
            with torch.no_grad():
                double(trial.model)
    with torch.no_grad():
        double(trial.reference)
    trial.check_parameters()


@on_ranks(2)
def test_what_could_not_reach_the_shards_is_refused_and_nothing_has_changed() -> None:
    trial = tied("full_shard")
    with (
        pytest.raises(RuntimeError, match=r"unit 1 were written to inside of summon_full_params"),
        summoned(trial),
    ):
        with torch.no_grad():
            trial.model[1].weight.zero_()
        trial.model(X)
    trial.runtime.reset()
    with (
        pytest.raises(
            RuntimeError, match=r"backward reached 1\.weight inside of summon_full_params"
        ),
        summoned(trial),
    ):
        trial.model[1].weight.sum().backward()
    assert not is_whole(trial.model)
    trial.train(square, steps=1)


@on_ranks(2)
def test_steps_and_backwards_may_run_inside() -> None:
    for strategy in STRATEGIES:
        trial = tied(strategy)
        loss = trial.forward(square)
        with summoned(trial):
            loss.backward()
            assert is_whole(trial.model)
            trial.forward(square, 1).backward()
        for step in range(2):
            trial.reference_loss(square, step).backward()
        trial.check_gradients()
        trial.check_rest()


@on_ranks(2)
def test_a_copy_of_the_model_computes_without_communication_while_it_is_whole() -> None:
    trial = tied("full_shard")
    teacher = copy.deepcopy(trial.model)
    with summoned(trial, teacher), torch.no_grad():
        assert is_whole(teacher) and not is_whole(trial.model)
        trial.runtime.mesh.traffic.reset()
        close(teacher(X), trial.reference(X), "of the copy")
        assert not trial.runtime.mesh.traffic.calls
        teacher[0].weight.zero_()
    assert not is_whole(teacher) and not full(teacher[0].weight).any()
    trial.check_parameters()


@on_ranks(2)
def test_assigned_data_reaches_the_shards_as_well() -> None:
    trial = Trial(linears(), Sharding(units=("0", "1")))
    with summoned(trial):
        trial.model[1].weight.data = torch.full((WIDTH, WIDTH), 3.0)
    assert bool((full(trial.model[1].weight) == 3.0).all())


@on_ranks(2)
def test_assigned_data_is_refused_where_another_parameter_has_the_same_memory() -> None:
    model = linears()
    model[1].weight.data = model[0].weight.data
    trial = Trial(model, Sharding(units=("0", "1")))
    with (
        summoned(trial),
        pytest.raises(RuntimeError, match=r"1\.weight and 0\.weight have the same"),
    ):
        trial.model[1].weight.data = torch.zeros(WIDTH, WIDTH)
