"""A sharded parameter is to all who ask the whole parameter, and where autograd records, the gathered one."""

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.tensor.shard_tensor import ShardTensor
from shards import SIZES, Pair, check_same, counted, make_mesh, make_pairs, warned
from training import Sharding
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
    "class": lambda p: (
        isinstance(p, nn.Parameter),
        isinstance(p, torch.Tensor),
        torch.is_tensor(p),
    ),
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
    bounds = [
        (interval.start, interval.stop)
        for interval in pairs["cube"].sharded.spec.intervals
        if interval.numel
    ]
    assert bounds[0][0] == 0 and bounds[-1][1] == 24
    assert all(before[1] == after[0] for before, after in pairwise(bounds))


@on_all_sizes
def test_it_answers_as_the_whole_parameter_without_asking_other_ranks(
    world: Worlds, size: int
) -> None:
    world(size).run(check_answers)


def check_elements() -> None:
    for name, pair in make_pairs(make_mesh()).items():
        local, interval = pair.sharded.to_local(), pair.sharded.spec.interval
        assert local.shape == (interval.numel,)
        assert torch.equal(local, pair.plain.detach().view(-1)[interval.start : interval.stop]), (
            name
        )
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
    assert f"elements {interval.start}..{interval.stop} of 24 on rank {dist.get_rank()}" in text
    assert str(nn.ParameterList([cube])) and not calls
    plain = cube.full_tensor()
    with torch.no_grad():
        assert (
            f"{cube.detach()[0, 0, 0]:.2f} {cube.norm():.3f}"
            == f"{plain[0, 0, 0]:.2f} {plain.norm():.3f}"
        )


@on_ranks(2)
def test_memory_of_the_whole_is_refused_instead_of_that_of_a_temporary_copy() -> None:
    mesh = make_mesh()
    matrix = make_pairs(mesh)["matrix"].sharded
    with counted(mesh) as calls:
        for ask in (matrix.data_ptr, matrix.untyped_storage):
            with pytest.raises(
                RuntimeError, match=r"matrix is sharded.*to_local\(\).*save_pretrained"
            ):
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
def test_what_all_ranks_pickle_is_the_whole_parameter() -> None:
    pair = make_pairs(make_mesh())["matrix"]
    file = io.BytesIO()
    torch.save({"state": pair.sharded.detach()}, file)
    file.seek(0)
    parameter = pickle.loads(pickle.dumps(pair.sharded))
    module = pickle.loads(pickle.dumps(nn.ParameterList([pair.sharded, pair.sharded])))
    assert (
        type(parameter) is type(module[0]) is nn.Parameter
        and module[0] is module[1]
        and parameter.requires_grad
    )
    for found in (parameter, module[0], torch.load(file, weights_only=True)["state"]):
        assert torch.equal(found, pair.plain)


@on_ranks(2)
def test_a_shallow_copy_shares_the_shard() -> None:
    matrix = make_pairs(make_mesh())["matrix"].sharded
    copied = copy.copy(matrix)
    assert isinstance(copied, ShardTensor) and copied is not matrix and copied.requires_grad
    with torch.no_grad():
        copied.zero_()
    assert not matrix.to_local().any()


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
            assert (
                isinstance(tensor, ShardTensor)
                and tensor.shape == pair.plain.shape
                and not tensor.requires_grad
            )
        assert halves.dtype == halves.to_local().dtype == torch.float16 and moved.is_meta
        with warned():
            assert (
                pair.sharded.to(torch.float32) is pair.sharded
                and pair.sharded.contiguous() is pair.sharded
            )
        detached.mul_(2)
        cloned.zero_()
        check_same(pair.sharded, pair.plain.detach() * 2, name)
        check_same(halves, pair.plain.detach().half(), name)


@on_ranks(2)
def test_requires_grad_is_set_on_the_unsharded_parameter_as_well() -> None:
    matrix = make_pairs(make_mesh())["matrix"].sharded
    for change in (
        lambda: matrix.requires_grad_(False),
        lambda: setattr(matrix, "requires_grad", False),
    ):
        for wanted, set_it in ((True, matrix.requires_grad_), (False, change)):
            set_it()
            with torch._C.DisableTorchFunctionSubclass():  # to look at it while it is released
                assert matrix.requires_grad == matrix.unsharded.requires_grad == wanted


# -- other memory


@on_ranks(2)
def test_data_is_the_shard_without_history_and_takes_values_but_no_other_memory() -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh)
    matrix, plain = pairs["matrix"].sharded, pairs["matrix"].plain
    with counted(mesh) as calls:
        assert isinstance(matrix.data, ShardTensor) and not matrix.data.requires_grad
        matrix.data.mul_(3)
        plain.data.mul_(3)
    assert not calls
    matrix.data = matrix.data  # which changes nothing
    for other in (torch.zeros(5, 3), matrix.data.half(), matrix.data.to("meta")):
        with pytest.raises(
            RuntimeError, match="matrix is sharded and cannot be given other memory"
        ):
            matrix.data = other
    check_same(matrix, plain, "after all")
    for p in (matrix, plain):
        p.data = torch.ones(3, 5)
    check_same(matrix, plain, "a tensor whose values were taken")
    for p in (matrix, plain):
        p.data = p.data * 2
    check_same(matrix, plain, "a sharded one")


@on_ranks(2)
def test_a_module_cannot_be_converted_once_it_is_sharded() -> None:
    pairs = make_pairs(make_mesh())
    module = nn.ParameterList([pairs["matrix"].sharded])
    module.to("cpu").to(torch.float32).float()  # nothing to do
    assert module[0] is pairs["matrix"].sharded
    for convert in (module.half, module.double, lambda: module.to(torch.bfloat16)):
        with pytest.raises(
            RuntimeError, match=r"matrix is sharded .* expected it to stay .*torch.float32 on cpu"
        ):
            convert()
    check_same(module[0], pairs["matrix"].plain, "after all")


@on_ranks(2)
def test_a_module_that_was_moved_elsewhere_is_noticed_in_its_next_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    runtime = Sharding().apply(model)
    model.to("meta")
    with (
        pytest.raises(ConfigurationError, match=r"Linear.weight .* was replaced after sharding"),
        runtime.step("step"),
    ):
        model(torch.ones(1, 3))


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
