"""A sharded parameter is to all who ask the whole parameter, and where autograd records, the gathered one."""

import copy
import io
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardeddp.sharding.shard_tensor import ShardTensor
from shards import SIZES, Pair, check_same, counted, make_mesh, make_pairs, shard
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)
on_all_sizes = pytest.mark.parametrize("size", SIZES)

QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0) if p.ndim else None),
    "ndim": lambda p: (p.ndim, p.dim()),
    "numel": lambda p: (p.numel(), p.nelement()),
    "length": lambda p: len(p) if p.ndim else None,
    "dtype": lambda p: (p.dtype, p.is_floating_point(), p.is_complex(), p.is_signed()),
    "bytes": lambda p: (p.element_size(), p.itemsize, p.nbytes),
    "device": lambda p: (p.device, p.is_cuda, p.is_cpu, p.is_meta, p.get_device()),
    "layout": lambda p: (p.layout, p.is_sparse, p.stride(), p.is_contiguous(), p.storage_offset()),
    "gradients": lambda p: (p.requires_grad, p.is_leaf, p.grad, p.grad_fn, p.retains_grad),
    "class": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor), torch.is_tensor(p)),
    "hashable": lambda p: (p in {p}, hash(p) == id(p)),
}


# -- what it is


def check_answers() -> None:
    mesh = make_mesh()
    for requires_grad in (True, False):
        pairs = make_pairs(mesh, requires_grad=requires_grad)
        with counted(mesh) as calls:
            for name, pair in pairs.items():
                for question, ask in QUESTIONS.items():
                    assert ask(pair.sharded) == ask(pair.plain), f"{question} of {name}"
        assert not calls
    bounds = [(interval.start, interval.stop) for interval in pairs["cube"].sharded.spec.intervals if interval.numel]
    assert bounds[0][0] == 0 and bounds[-1][1] == 24
    assert all(before[1] == after[0] for before, after in pairwise(bounds))


@on_all_sizes
def test_it_answers_as_the_whole_parameter_without_asking_other_ranks(world: Worlds, size: int) -> None:
    world(size).run(check_answers)


def check_elements() -> None:
    for name, pair in make_pairs(make_mesh()).items():
        local, interval = pair.sharded.to_local(), pair.sharded.spec.interval
        assert local.shape == (interval.numel,)
        assert torch.equal(local, pair.plain.detach().view(-1)[interval.start : interval.stop]), name
        assert torch.equal(pair.sharded.full_tensor(), pair.plain.detach()), name
        full = pair.sharded.full_tensor()
        assert type(full) is torch.Tensor and not full.requires_grad
        full.fill_(7.0)  # a copy
        assert torch.equal(pair.sharded.full_tensor(), pair.plain.detach()), name
        local.mul_(2)  # the shard itself
        assert torch.equal(pair.sharded.full_tensor(), pair.plain.detach() * 2), name


@on_all_sizes
def test_it_holds_one_interval_and_gathers_the_whole(world: Worlds, size: int) -> None:
    world(size).run(check_elements)


@on_ranks(2)
def test_its_text_names_the_parameter_the_shape_and_the_rank_s_elements() -> None:
    mesh = make_mesh()
    cube = make_pairs(mesh)["cube"].sharded
    with counted(mesh) as calls:
        text = repr(cube)
    interval = cube.spec.interval
    assert text.startswith("ShardTensor(cube, shape=(2, 3, 4), dtype=torch.float32")
    assert f"elements {interval.start}..{interval.stop} of 24 on shard rank {dist.get_rank()}" in text
    assert str(nn.ParameterList([cube])) and not calls


@on_ranks(2)
def test_memory_of_the_whole_is_refused_instead_of_that_of_a_temporary_copy() -> None:
    mesh = make_mesh()
    matrix = make_pairs(mesh)["matrix"].sharded
    with counted(mesh) as calls:
        for ask in (matrix.data_ptr, matrix.untyped_storage):
            with pytest.raises(RuntimeError, match=r"matrix is sharded.*to_local\(\)"):
                ask()
    assert not calls


# -- copies


@on_ranks(2)
def test_a_deep_copy_is_a_sharded_parameter_with_elements_of_its_own() -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh)
    matrix = pairs["matrix"].sharded
    matrix.tag = "kept"
    with counted(mesh) as calls:
        module = nn.ParameterList([matrix, pairs["bias"].sharded, matrix])
        copied = copy.deepcopy(module)
    assert not calls
    assert isinstance(copied[0], ShardTensor) and isinstance(copied[0], nn.Parameter)
    assert copied[0] is copied[2] and copied[0] is not matrix
    assert copied[0].tag == "kept" and copied[0].requires_grad
    with torch.no_grad():
        copied[0].zero_()
        copied[1].requires_grad_(False)
    assert pairs["bias"].sharded.requires_grad
    check_same(matrix, pairs["matrix"].plain, "the original")
    check_same(copied[0], torch.zeros(3, 5), "the copy")


@on_ranks(2)
def test_pickling_is_refused_with_a_way_out() -> None:
    matrix = make_pairs(make_mesh())["matrix"].sharded
    attempts: list[Callable[[], Any]] = [
        lambda: pickle.dumps(matrix),
        lambda: torch.save({"state": matrix}, io.BytesIO()),
        lambda: copy.copy(matrix),
        lambda: pickle.dumps(nn.ParameterList([matrix])),
    ]
    for attempt in attempts:
        with pytest.raises(
            NotImplementedError, match="(?s)matrix is sharded.*checkpoint through the Trainer.*full_tens"
        ):
            attempt()


@on_ranks(3)
def test_detached_cloned_and_converted_tensors_are_shards_of_the_same_elements() -> None:
    mesh = make_mesh()
    for name, pair in make_pairs(mesh).items():
        with torch.no_grad(), counted(mesh) as calls:
            detached, cloned = pair.sharded.detach(), pair.sharded.clone()
            halves = pair.sharded.half()
            moved = pair.sharded.to("meta")
        assert not calls
        for tensor in (detached, cloned, halves, moved):
            assert isinstance(tensor, ShardTensor) and tensor.shape == pair.plain.shape and not tensor.requires_grad
        assert halves.dtype == halves.to_local().dtype == torch.float16 and moved.is_meta
        with warned():
            assert pair.sharded.to(torch.float32) is pair.sharded and pair.sharded.contiguous() is pair.sharded
        detached.mul_(2)
        cloned.zero_()
        check_same(pair.sharded, pair.plain.detach() * 2, name)
        check_same(halves, pair.plain.detach().half(), name)


@on_ranks(2)
def test_requires_grad_is_set_on_the_unsharded_parameter_as_well() -> None:
    matrix = make_pairs(make_mesh())["matrix"].sharded
    for change in (lambda: matrix.requires_grad_(False), lambda: setattr(matrix, "requires_grad", False)):
        for wanted, set_it in ((True, matrix.requires_grad_), (False, change)):
            set_it()
            with torch._C.DisableTorchFunctionSubclass():  # to look at it while it is released
                assert matrix.requires_grad == matrix._unsharded.requires_grad == wanted


# -- other memory


@on_ranks(2)
def test_data_is_the_shard_without_history_and_takes_no_other_memory() -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh)
    matrix, plain = pairs["matrix"].sharded, pairs["matrix"].plain
    with counted(mesh) as calls:
        assert isinstance(matrix.data, ShardTensor) and not matrix.data.requires_grad
        matrix.data.mul_(3)
        plain.data.mul_(3)
    assert not calls
    matrix.data = matrix.data  # which changes nothing
    for other in (torch.zeros(3, 5), matrix.data.clone(), matrix.data.half()):
        with pytest.raises(RuntimeError, match=r"matrix is sharded and cannot be given other memory.*copy_"):
            matrix.data = other
    check_same(matrix, plain, "after all")


@on_ranks(2)
def test_a_module_cannot_be_converted_once_it_is_sharded() -> None:
    pairs = make_pairs(make_mesh())
    module = nn.ParameterList([pairs["matrix"].sharded])
    module.to("cpu").to(torch.float32).float()  # nothing to do
    assert module[0] is pairs["matrix"].sharded
    for convert in (module.half, module.double, lambda: module.to(torch.bfloat16)):
        with pytest.raises(RuntimeError, match=r"matrix is sharded .* expected it to stay torch.float32 on cpu"):
            convert()
    check_same(module[0], pairs["matrix"].plain, "after all")


# -- autograd


@contextmanager
def warned(times: int | None = None) -> Iterator[list[warnings.WarningMessage]]:
    """Collects the warnings about uses outside a unit; anything else stays an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message="parameter .* is used outside the forward")
        yield caught
    assert times is None or len(caught) == times


Loss = Callable[[dict[str, torch.Tensor], int], torch.Tensor]


def rank_input(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 + rank))


LOSSES: dict[str, Loss] = {
    "functional": lambda p, rank: F.linear(rank_input(rank), p["matrix"].t(), p["bias"]).square().mean(),
    "matrix product": lambda p, rank: (rank_input(rank) @ p["matrix"]).tanh().sum(),
    "transposed": lambda p, rank: (p["matrix"].T @ rank_input(rank).T).exp().mean(),
    "indexed": lambda p, rank: p["cube"][rank % 2, 1:].sum() * p["matrix"][torch.tensor([0, 2])].prod(),
    "viewed": lambda p, rank: p["cube"].view(-1)[::2].mul(rank + 1).sum() + p["matrix"].flatten().unbind()[3],
    "norms": lambda p, rank: p["cube"].norm() + p["matrix"].norm(1) * rank + p["bias"].abs().max(),
    "decay": lambda p, rank: sum((q**2).sum() for q in p.values()) * 0.1,  # type: ignore[return-value]
    "scalar": lambda p, rank: (rank_input(rank) * p["scalar"]).sum() + p["single"].squeeze() ** 3,
    "twice": lambda p, rank: (p["matrix"] * p["matrix"]).sum() + (p["matrix"].t() @ p["matrix"]).trace(),
    "some": lambda p, rank: (p["matrix"] * (rank == 0)).sum(),
    "in place on a copy": lambda p, rank: p["matrix"].clone().mul_(rank + 2).sum(),
    "stacked": lambda p, rank: torch.stack([p["bias"], p["matrix"][1]]).var() + torch.cat([*p["cube"]]).mean(),
    "with what is frozen": lambda p, rank: (p["matrix"] @ p["bias"].detach()).sum() * p["cube"].detach().sum(),
    "empty": lambda p, rank: p["empty"].sum() + p["single"].sum(),
}


def compare_gradients(shard_size: int | None) -> None:
    mesh = make_mesh(shard_size)
    for name, loss in LOSSES.items():
        pairs = make_pairs(mesh)
        with warned():
            mine = loss({key: pair.sharded for key, pair in pairs.items()}, dist.get_rank())
            mine.backward()
        plain = {key: pair.plain for key, pair in pairs.items()}
        losses = [loss(plain, rank) for rank in range(dist.get_world_size())]
        torch.stack(losses).mean().backward()
        check_same(mine, losses[dist.get_rank()], name)
        for key, pair in pairs.items():
            assert pair.sharded.grad is None or isinstance(pair.sharded.grad, ShardTensor)
            check_same(pair.sharded.grad, pair.plain.grad, f"gradient of {key} after {name}", rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "shard_size"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (2, 1)])
def test_gradients_of_uses_outside_a_unit_are_the_mean_over_all_ranks(
    world: Worlds, size: int, shard_size: int
) -> None:
    world(size).run(compare_gradients, shard_size)


@on_ranks(2)
def test_gradients_of_several_backwards_add_up() -> None:
    pairs = make_pairs(make_mesh())
    for factor in (1.0, 2.0):
        with warned():
            (pairs["matrix"].sharded.square().sum() * factor).backward()
        (pairs["matrix"].plain.square().sum() * factor).backward()
    check_same(pairs["matrix"].sharded.grad, pairs["matrix"].plain.grad, "after two backwards")


@on_ranks(2)
def test_functional_call_computes_with_sharded_parameters() -> None:
    mesh = make_mesh()
    linear = nn.Linear(5, 3)
    values = {"weight": linear.weight.detach() * 2, "bias": linear.bias.detach() + 1}
    pairs = shard(mesh, values)
    x = torch.ones(2, 5)
    with warned(times=2):
        found = torch.func.functional_call(linear, {name: pair.sharded for name, pair in pairs.items()}, (x,))
        found.square().sum().backward()
    expected = torch.func.functional_call(linear, {name: pair.plain for name, pair in pairs.items()}, (x,))
    expected.square().sum().backward()
    check_same(found, expected, "result")
    for name, pair in pairs.items():
        check_same(pair.sharded.grad, pair.plain.grad, f"gradient of {name}")
    assert linear.weight.grad is None


@on_ranks(2)
def test_a_use_is_warned_about_once_per_parameter_and_where_it_is() -> None:
    pairs = make_pairs(make_mesh())
    matrix, cube = pairs["matrix"].sharded, pairs["cube"].sharded
    with warned(times=2) as caught:
        for _ in range(3):
            matrix * 2  # noqa: B018
        line = sys._getframe().f_lineno - 1
        torch.sum(cube)
    assert "parameter matrix is used outside" in str(caught[0].message) and "60 bytes" in str(caught[0].message)
    assert "parameter cube" in str(caught[1].message)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)
    assert caught[1].filename == __file__


@on_ranks(2)
def test_what_is_frozen_or_not_recorded_is_not_warned_about() -> None:
    pairs = make_pairs(make_mesh(), requires_grad=False)
    x = torch.ones(2, 3, requires_grad=True)
    with warned(times=0):
        (x @ pairs["matrix"].sharded).sum().backward()
        (pairs["matrix"].sharded * 2).sum()
    (torch.ones(2, 3).requires_grad_() @ pairs["matrix"].plain).sum().backward()
    check_same(x.grad, (torch.ones(2, 5) @ pairs["matrix"].plain.t()), "gradient of the input")
    assert pairs["matrix"].sharded.grad is None


@on_ranks(2)
def test_gradients_are_computed_without_being_kept() -> None:
    pair = make_pairs(make_mesh())["matrix"]
    with warned():
        found = torch.autograd.grad(pair.sharded.pow(3).sum(), pair.sharded)
    assert isinstance(found[0], ShardTensor) and pair.sharded.grad is None
    check_same(found, torch.autograd.grad(pair.plain.pow(3).sum(), pair.plain), "gradient")


@on_ranks(2)
def test_second_derivatives_are_refused() -> None:
    matrix = make_pairs(make_mesh())["matrix"].sharded
    with warned():
        (gradient,) = torch.autograd.grad(matrix.pow(3).sum(), matrix, create_graph=True)
    with warned(), pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@on_ranks(2)
def test_writing_while_gradients_are_recorded_is_an_error_as_it_is_for_plain_parameters() -> None:
    pairs = make_pairs(make_mesh())
    x = torch.ones(3, 5)

    def assign(p: torch.Tensor) -> None:
        p[0] = 1.0

    writes: dict[str, Callable[[torch.Tensor], Any]] = {
        "element-wise": lambda p: p.mul_(2),
        "operator": lambda p: p.__iadd__(x),
        "copy": lambda p: p.copy_(x),
        "assignment": assign,
        "random": lambda p: p.normal_(),
        "out": lambda p: torch.add(x, x, out=p),
        "view": lambda p: p.view(-1).mul_(2),
        "row": lambda p: p[0].zero_(),
        "diagonal": lambda p: p.fill_diagonal_(1.0),
        "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    }
    for name, write in writes.items():
        with pytest.raises(RuntimeError):
            write(pairs["matrix"].plain)
        with warned(), pytest.raises(RuntimeError, match=r"matrix is sharded and cannot be written to|out=... arg"):
            write(pairs["matrix"].sharded)
        check_same(pairs["matrix"].sharded, pairs["matrix"].plain, f"after {name}")


# -- loading


@on_all_sizes
def test_full_and_sharded_state_dicts_are_loaded(world: Worlds, size: int) -> None:
    world(size).run(load_states)


def load_states() -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh)
    sharded = nn.ParameterDict({name: pair.sharded for name, pair in pairs.items()})
    plain = nn.ParameterDict({name: pair.plain for name, pair in pairs.items()})
    full = {name: torch.randn(pair.plain.shape) for name, pair in pairs.items()}
    with counted(mesh) as calls:
        for module in (sharded, plain):
            assert str(module.load_state_dict(full)) == "<All keys matched successfully>"
    assert not calls
    check_all_same(pairs.values(), "full state")
    others = make_pairs(mesh)
    sharded.load_state_dict({name: pair.sharded for name, pair in others.items()})
    plain.load_state_dict({name: pair.plain for name, pair in others.items()})
    check_all_same(pairs.values(), "state of another sharded model")
    assert all(sharded[name] is pair.sharded for name, pair in pairs.items())
    with pytest.raises(RuntimeError, match="size mismatch for matrix"):
        sharded.load_state_dict({**full, "matrix": torch.zeros(5, 3)})
    with torch.no_grad():
        taken = sharded.state_dict()
    assert all(isinstance(value, ShardTensor) for value in taken.values())


def check_all_same(pairs: Sequence[Pair] | Any, about: str) -> None:
    for pair in pairs:
        check_same(pair.sharded, pair.plain, f"{pair.name}: {about}")
