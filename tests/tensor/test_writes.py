"""What writes to sharded parameters without saying so reaches their shards, or is refused by name."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn

from shardeddp.tensor.shard_tensor import ShardTensor
from shards import check_same, make_mesh, shard, whole
from training import Sharding
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(90)

functional = torch.ops._c10d_functional


def both(size: int) -> Any:
    """A sharded and a plain parameter with gradients; of ``size`` ranks that share a model."""
    values = {"first": torch.ones(2), "weight": torch.arange(1.0, 16).view(3, 5)}
    pair = shard(make_mesh(size), values)["weight"]
    for parameter in (pair.sharded, pair.plain):
        parameter.grad = torch.full_like(parameter, 3.0)
    return pair


def ranked(*shape: int) -> Tensor:
    """Other values on each rank."""
    return torch.full(shape, 1.0 + dist.get_rank())


def nothing() -> list[Tensor]:
    return [torch.zeros(3, 5) for _ in range(dist.get_world_size() - 1)]


def in_a_list(p: Tensor) -> None:
    dist.all_gather([p.data, *nothing()], ranked(3, 5))


def coalesced(p: Tensor) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(p.data)
        dist.all_reduce(p.grad)


def broadcast_many(p: Tensor) -> None:
    dist._broadcast_coalesced(dist.group.WORLD, [p.data, p.grad], 1 << 20, 0)


def averaged(p: Tensor) -> None:
    waiting = [dist.all_reduce(p.grad, async_op=True), dist.all_reduce(p.data, async_op=True)]
    for work in waiting:
        work.wait()
    p.grad.div_(dist.get_world_size())


def around_a_buffer(p: Tensor) -> None:
    """What averages gradients by hand."""
    flat = torch.zeros(16)
    flat[:15] = p.grad.view(-1)
    part = torch.zeros(16 // dist.get_world_size())
    dist.reduce_scatter_tensor(part, flat)
    dist.all_gather_into_tensor(flat, part)
    p.grad.view(-1).copy_(flat[:15])


# By name: functions whose effect on a parameter, on its gradient and in what they return is that on plain ones.
RIGHT: dict[str, Callable[[Tensor], Any]] = {
    "gradient": lambda p: dist.all_reduce(p.grad),
    "parameter": dist.all_reduce,
    "data": lambda p: dist.all_reduce(p.data, op=dist.ReduceOp.MAX),
    "clone": lambda p: (lambda copy: (dist.all_reduce(copy), copy)[1])(p.detach().clone()),
    "later": averaged,
    "row": lambda p: dist.all_reduce(p.data[1]),
    "flat, later": lambda p: dist.all_reduce(p.data.view(-1), async_op=True).wait(),
    "column": lambda p: dist.broadcast(p.data[:, :1].contiguous(), 0),
    "broadcast": lambda p: dist.broadcast(p.data, 0),
    "gathered into a list": in_a_list,
    "gathered into a view": lambda p: dist.all_gather_into_tensor(p.data.view(-1)[: dist.get_world_size()], ranked(1)),
    "reduced by hand": around_a_buffer,
    "scattered alike": lambda p: dist.scatter(p.data, [torch.ones(3, 5)] * dist.get_world_size() if alone() else None),
    "coalesced": coalesced,
    "broadcast coalesced": broadcast_many,
    "functional in place": lambda p: functional.wait_tensor(functional.all_reduce_(p.data, "sum", world_name())),
    "functional": lambda p: functional.wait_tensor(functional.all_reduce(p.data, "sum", world_name())),
    "differentiable": lambda p: differentiable.all_reduce(p.detach().clone()),
    "read": lambda p: dist.all_gather([torch.zeros(3, 5), *nothing()], p.data),
    "out": lambda p: torch.mm(torch.ones(3, 2), torch.ones(2, 5), out=p.data),
    "fused": lambda p: torch._fused_sgd_(
        [p.data], [p.grad], [], weight_decay=0.1, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=True,
    ),
    "each of many": lambda p: torch._foreach_lerp_([p.data, p.grad], [torch.ones(3, 5), torch.zeros(3, 5)], 0.5),
    "renormalized embedding": lambda p: F.embedding(torch.tensor([1, 2]), p.data, max_norm=1.0),
    "running statistics": lambda p: F.batch_norm(torch.eye(4, 5), p.data[0], torch.ones(5), training=True),
    "undeclared write": lambda p: undeclared(p.data),
    "undeclared write to a row": lambda p: undeclared(p.data[1]),
    "declared write": lambda p: declared(p.data),
    "no write": lambda p: only_reads(p.data),
    "shape of another": lambda p: torch.zeros(2).resize_as_(p.data).shape,
}  # fmt: skip


def alone() -> bool:
    return dist.get_rank() == 0


def world_name() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


@torch.library.custom_op("shardeddp_tests::undeclared", mutates_args=())
def undeclared(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sum()


@torch.library.custom_op("shardeddp_tests::declared", mutates_args={"x"})
def declared(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sum()


@torch.library.custom_op("shardeddp_tests::only_reads", mutates_args=())
def only_reads(x: Tensor) -> Tensor:
    return x.sum()


@torch.library.custom_op("shardeddp_tests::uneven", mutates_args=())
def uneven(x: Tensor) -> Tensor:
    x.add_(dist.get_rank())
    return x.sum()


def compare_right(size: int) -> None:
    warnings.simplefilter(
        "ignore", FutureWarning
    )  # names of collectives that torch is about to change
    for name, function in RIGHT.items():
        pair = both(size)
        found, expected = function(pair.sharded), function(pair.plain)
        if isinstance(expected, Tensor):
            check_same(whole(found), expected, f"result of {name}")
        check_same(pair.sharded, pair.plain, name)
        check_same(pair.sharded.grad, pair.plain.grad, f"gradient after {name}")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_what_operations_write_without_saying_so_reaches_the_shards(
    world: Worlds, ranks: int, size: int
) -> None:
    world(ranks).run(compare_right, size)


# By name: functions whose result is another one on each rank, or comes when nobody looks.
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "reduce": (lambda p: dist.reduce(p.grad, 0), "different values"),
    "scatter": (
        lambda p: dist.scatter(p.data, [torch.ones(3, 5), torch.zeros(3, 5)] if alone() else None),
        "different val",
    ),
    "exchange": (
        lambda p: dist.all_to_all_single(p.data.view(-1)[:2], torch.arange(2.0)),
        "different values",
    ),
    "reduce and scatter": (
        lambda p: dist.reduce_scatter_tensor(p.data.view(-1)[:2], torch.arange(4.0)),
        "different",
    ),
    "receive": (lambda p: dist.recv(p.data, 1 - dist.get_rank()), "would receive into"),
    "receive later": (lambda p: dist.irecv(p.data[0], 1 - dist.get_rank()), "would receive into"),
    "statistics of each rank": (
        lambda p: F.batch_norm(
            ranked(4, 5) * torch.arange(20).view(4, 5), p.data[0], torch.ones(5), training=True
        ),
        "different values",
    ),
    "undeclared write of each rank": (lambda p: uneven(p.data), "different values"),
    "views at once": (lambda p: torch._foreach_zero_([p.data, p.data[0]]), "several views"),
    "recorded": (declared, "while gradients are recorded"),
    "recorded and undeclared": (undeclared, "while gradients are recorded"),
    "memory": (lambda p: p.data.set_(torch.zeros(3)), "would change the shape or the memory"),
    "lent memory": (lambda p: torch.zeros(3).set_(p.data), "would change the shape or the memory"),
    "shape": (lambda p: p.data.resize_(15), "would change the shape or the memory"),
    "memory of a row": (lambda p: p.data[0].untyped_storage(), "no memory holds"),
    "address of a row": (lambda p: p.data[0].data_ptr(), "no memory holds"),
    "exported": (lambda p: torch.from_dlpack(p.data), "no memory holds"),
    "exported row": (lambda p: torch.from_dlpack(p.data[0]), "no memory holds"),
    "function of each element": (lambda p: p.data.apply_(lambda x: x + 1), "no memory holds"),
    "function of each element of a row": (
        lambda p: p.data[0].apply_(lambda x: x + 1),
        "no memory holds",
    ),
    "capsule": (lambda p: torch.utils.dlpack.to_dlpack(p.data), "Cannot access data pointer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@on_ranks(2)
def test_what_cannot_be_the_same_on_all_ranks_is_refused_by_name_and_changes_nothing(
    size: int,
) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    warnings.filterwarnings("ignore", "parameter weight is used outside")
    for name, (function, text) in REFUSED.items():
        pair = both(size)
        with pytest.raises((RuntimeError, NotImplementedError), match=text) as caught:
            function(pair.sharded)
        assert name == "capsule" or "weight" in str(caught.value)
        check_same(pair.sharded, pair.plain, name)
        check_same(pair.sharded.grad, pair.plain.grad, f"gradient after {name}")


@pytest.mark.slow
@on_ranks(2)
def test_collectives_inside_of_a_coalescing_block_are_refused() -> None:
    pair = both(2)
    text = "weight, which is sharded, inside of a block that coalesces"
    with pytest.raises(NotImplementedError, match=text), dist._coalescing_manager():
        dist.broadcast(pair.sharded.data, 0)
    dist.distributed_c10d._world.pg_coalesce_state.clear()


@on_ranks(2)
def test_parameters_stay_leaves_that_can_be_trained() -> None:
    pair = both(2)
    dist.all_reduce(pair.sharded)
    assert pair.sharded.is_leaf
    assert isinstance(pair.sharded, nn.Parameter)
    assert pair.sharded.requires_grad


def add_penalty(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(0.1 * parameter.sign())
    parameter.grad += parameter
    parameter.grad[1:].mul_(2.0)


@on_ranks(2)
def test_gradients_are_written_to_with_gradients_enabled() -> None:
    warnings.simplefilter("ignore")
    pair = both(2)
    for parameter in (pair.sharded, pair.plain):
        add_penalty(parameter)
    assert isinstance(pair.sharded.grad, ShardTensor)
    check_same(pair.sharded.grad, pair.plain.grad, "gradients")


# -- each rank its own


class Codebook(nn.Module):
    """A layer, and entries that are not trained but written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 6))
        self.codes = nn.Parameter(torch.ones(5, 6), requires_grad=False)
        self.rows = nn.Sequential(nn.Embedding(5, 6, max_norm=0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (rows, 4) to (rows,)."""
        return (self.layer(x) - self.codes[0]).square().sum(1)


def lerp(model: Codebook, x: Tensor) -> None:
    model.codes[:2].lerp_(model.layer(x).mean(0), 0.1)


def look_up(model: Codebook, x: Tensor) -> None:
    model.rows(x[0, :1].long())


def copy(model: Codebook, x: Tensor) -> None:
    model.codes.copy_(x.mean().expand(5, 6))


def copy_data(model: Codebook, x: Tensor) -> None:
    model.codes.data.copy_(x.mean().expand(5, 6))


def mask(model: Codebook, x: Tensor) -> None:
    model.codes.mul_(torch.eye(5, 6).roll(int(x[0, 0]), 0))


def write_to_a_view(model: Codebook, x: Tensor) -> None:
    model.codes[1:3] = x.mean()


def write_many(model: Codebook, x: Tensor) -> None:
    torch._foreach_add_([model.codes], [x.mean().expand(5, 6)])


def scale(model: Codebook, x: Tensor) -> None:
    model.codes.mul_(x.mean().item())


def on_one_rank(model: Codebook, x: Tensor) -> None:
    if x[0, 0] == 1:
        model.codes.zero_()


Write = Callable[[Codebook, Tensor], None]
INSIDE: list[Write] = [lerp, look_up, copy, mask, write_to_a_view]
OUTSIDE: list[Write] = [copy, copy_data, mask, write_to_a_view, write_many, scale, on_one_rank]


def train(strategy: str, write: Write, inside: bool, x: Tensor) -> ShardTensor:
    """Three steps of a model that writes to its entries, and those entries."""
    torch.manual_seed(0)
    model = Codebook()
    runtime = Sharding(strategy=strategy, units=("layer", "rows")).apply(model)
    for _ in range(3):
        with runtime.step("training_step") as outputs:
            if inside:
                with torch.no_grad():
                    write(model, x)
            outputs.append(model(x).sum())
        outputs.pop().backward()
        if not inside:
            with torch.no_grad():
                write(model, x)
    return model.codes  # type: ignore[return-value]


WRITES = [*((write, True) for write in INSIDE), *((write, False) for write in OUTSIDE)]


@pytest.mark.parametrize(("write", "inside"), WRITES)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_ranks_that_write_different_values_are_told(
    world: Worlds, strategy: str, write: Write, inside: bool
) -> None:
    if strategy == "shard_optimizer" and write is on_one_rank:
        pytest.skip("the next gather takes all ranks: tests/lightning/test_desync.py")
    name = r"rows\.0\.weight" if write is look_up else "codes"
    world(2).run(check_told, strategy, write, inside, name)


def check_told(strategy: str, write: Write, inside: bool, name: str) -> None:
    with pytest.raises(
        RuntimeError, match=rf"parameter {name}: ranks have written different values to it"
    ):
        train(strategy, write, inside, ranked(2, 4))


@pytest.mark.loop(1)
@pytest.mark.parametrize(("write", "inside"), WRITES)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_ranks_that_write_the_same_are_not(
    world: Worlds, strategy: str, write: Write, inside: bool
) -> None:
    world(2).run(check_not_told, strategy, write, inside)


def check_not_told(strategy: str, write: Write, inside: bool) -> None:
    x = torch.full((2, 4), 2.0)
    found = train(strategy, write, inside, x)
    assert torch.equal(found.full_tensor(), train("no_shard", write, inside, x).full_tensor())


@on_ranks(2)
def test_replicas_that_hold_all_of_a_parameter_may_drift_as_they_do_without_sharding() -> None:
    codes = train("no_shard", copy, True, ranked(2, 4))
    assert codes.full_tensor()[0, 0] == 1.0 + dist.get_rank()


# -- other memory, and memory of earlier gathers


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
@on_ranks(2)
def test_what_is_set_is_copied(strategy: str, inside: bool) -> None:
    model = Codebook()
    runtime = Sharding(strategy=strategy, units=("layer", "rows")).apply(model)
    wanted = torch.arange(30.0).view(5, 6)
    with torch.no_grad():
        if inside:
            with runtime.step("training_step"):
                model.codes.set_(wanted)
                assert torch.equal(model.codes.detach(), wanted)
        else:
            model.codes.set_(wanted)
        assert torch.equal(model.codes.full_tensor(), wanted)  # type: ignore[operator]
        with (
            runtime.step("training_step"),
            pytest.raises(RuntimeError, match=r"codes is sharded.*other memory"),
        ):
            model.codes.set_(wanted.untyped_storage())


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_a_write_to_a_view_of_an_earlier_step_is_one_to_the_parameter(strategy: str) -> None:
    model = Codebook()
    runtime = Sharding(strategy=strategy, units=("layer", "rows")).apply(model)

    def step(write: Callable[[], object]) -> None:
        with runtime.step("training_step") as outputs:
            with torch.no_grad():
                write()
            outputs.append(model(torch.ones(2, 4)).sum())
        outputs.pop().backward()

    kept: list[Tensor] = []
    step(lambda: kept.append(model.codes.data[0]))
    step(lambda: kept[0].sum())
    was = model.codes.full_tensor().clone()  # type: ignore[operator]
    step(lambda: kept[0].mul_(2))
    kept[0].add_(1)
    was[0] = 2 * was[0] + 1
    assert torch.equal(model.codes.full_tensor(), was)  # type: ignore[operator]
    assert torch.equal(kept[0], was[0])


@on_ranks(2)
def test_where_there_are_no_elements_of_a_parameter_nothing_was_written_elsewhere() -> None:
    model = Codebook()
    runtime = Sharding(units=("layer", "rows")).apply(model)
    kept: list[Tensor] = []
    for _ in range(3):
        with runtime.step("training_step") as outputs:
            with torch.no_grad():
                for parameter in model.parameters():
                    kept.append(parameter.detach())
                    parameter.copy_(torch.ones_like(parameter) * len(kept))
            outputs.append(model(torch.ones(2, 4)).sum())
        outputs.pop().backward()


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
@on_ranks(2)
def test_a_backward_names_what_was_written_to_between_it_and_its_forward(strategy: str) -> None:
    model = Codebook()
    runtime = Sharding(strategy=strategy, units=("layer", "rows")).apply(model)
    with runtime.step("training_step") as outputs:
        model.codes.requires_grad_()
        outputs.append((model(torch.ones(2, 4)).sum() * model.codes.square()).sum())
        model.codes.data.mul_(2)
    with pytest.raises(
        RuntimeError, match=r"parameter codes was written to between its forward and its backward"
    ):
        outputs.pop().backward()


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
@on_ranks(2)
def test_a_backward_names_a_weight_that_hooks_have_swapped_and_put_back(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kept: list[torch.Tensor] = []

    def add_noise(module: Any, _: Any) -> None:
        kept.append(module.weight.data.clone())
        module.weight.data = module.weight.data + 0.1

    def take_back(module: Any, *_: Any) -> None:
        module.weight.data = kept.pop()

    model[1].register_forward_pre_hook(add_noise)
    model[1].register_forward_hook(take_back)
    Sharding(strategy=strategy, units=("0", "1")).apply(model)
    with pytest.raises(RuntimeError, match=r"parameter 1.weight was (written to|changed) between"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
@on_ranks(2)
def test_a_rank_may_look_at_its_part_of_what_it_is_writing(strategy: str) -> None:
    model = Codebook()
    runtime = Sharding(strategy=strategy, units=("layer", "rows")).apply(model)
    sharded: Any = model.codes
    for _ in range(2):
        with runtime.step("training_step") as outputs:
            with torch.no_grad():
                model.codes.mul_(0.5)
                if dist.get_rank() == 0:
                    sharded.to_local().sum()
                model.codes.add_(1)
            outputs.append(model(torch.ones(2, 4)).sum())
            if dist.get_rank() == 1:
                sharded.to_local().sum()
        outputs.pop().backward()
    assert torch.equal(sharded.full_tensor(), torch.full((5, 6), 1.75))


def tie_outside(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.data


def tie_the_parameter(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight


def tie_a_detached(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.detach()


def take_values(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.data.clone()


def take_others(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.data * 1.0


def take_its_own_back(model: nn.Sequential) -> None:
    backup = model[1].weight.data
    model[1].weight.data = torch.ones(4, 4)
    model[1].weight.data = backup


def change_places(model: nn.Sequential) -> None:
    one, other = model[0].weight, model[1].weight
    one.data, other.data = other.data, one.data


@pytest.mark.loop(1)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in a step"])
@pytest.mark.parametrize("units", [(), ("0",), ("1",)], ids=["root", "first", "second"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
@on_ranks(2)
def test_the_step_after_a_parameter_was_assigned_another_one_says_that_they_share_no_memory(
    strategy: str, units: tuple[str, ...], inside: bool
) -> None:
    silent = take_values, take_others, take_its_own_back, change_places
    for assign in (tie_outside, tie_the_parameter, tie_a_detached, *silent):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        runtime = Sharding(strategy=strategy, units=units).apply(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not inside:
                assign(model)
            for number in range(3):
                with runtime.step("training_step"):
                    if inside and number == 0:
                        assign(model)
        said = [str(it.message) for it in caught if "memory of others" in str(it.message)]
        expected = 0 if assign in silent or dist.get_rank() else 1
        assert len(said) == expected, assign.__name__
        assert all("1.weight that of 0.weight" in text for text in said)
