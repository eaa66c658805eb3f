"""Views of sharded parameters: they show the elements as they are now, and what is written to them is not lost."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.tensor.views import GatheredView
from shards import SIZES, check_same, counted, make_mesh, make_pairs, shard
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


def assign(p: torch.Tensor, index: Any, value: Any) -> None:
    p[index] = value


def write_through_two_views(p: torch.Tensor) -> None:
    first, second = p.view(-1), p.t()
    first[:2] = 1.0
    second[0] += 10.0
    first.mul_(2)


def write_between(p: torch.Tensor) -> torch.Tensor:
    view = p[1]
    p.mul_(2)
    view.add_(1)
    p.zero_()
    return view + 1


# By name: a function that writes to a matrix, by way of a view of it. What it returns is compared as well.
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "row": lambda p: assign(p, 0, 1.0),
    "element": lambda p: assign(p, (2, 3), 5.0),
    "slice": lambda p: assign(p, slice(1, None), torch.ones(5)),
    "mask": lambda p: assign(p, torch.arange(15).view(3, 5) % 2 == 0, 3.0),
    "indices": lambda p: assign(p, torch.tensor([0, 2]), torch.zeros(2, 5)),
    "everything": lambda p: assign(p, ..., torch.arange(15.0).view(3, 5)),
    "row in place": lambda p: p[1].zero_(),
    "row by operator": lambda p: p[1].__imul__(3),
    "flat": lambda p: p.view(-1).fill_(2.0),
    "element of flat": lambda p: assign(p.view(-1), 7, 5.0),
    "transposed": lambda p: p.t()[0].sub_(1),
    "data": lambda p: assign(p.data, 0, 1.0),
    "data of a view": lambda p: p[0].data.mul_(2),
    "detached": lambda p: p.detach()[2].neg_(),
    "copy": lambda p: p[0].copy_(torch.arange(5)),
    "random": lambda p: p[0].uniform_(),
    "sorted": lambda p: p[0].copy_(p[0].sort().values),
    "swapped": lambda p: assign(p, [0, 1], p[[1, 0]]),
    "itself": lambda p: p.copy_(p.t().reshape(3, 5)),
    "unbound": lambda p: [row.add_(i) for i, row in enumerate(p.unbind())],
    "split": lambda p: [part.mul_(i) for i, part in enumerate(p.split(2, dim=1))],
    "foreach": lambda p: torch._foreach_add_([p[0]], 1.0),
    "foreach over rows": lambda p: torch._foreach_add_(p.unbind(), 1.0),
    "out": lambda p: torch.add(torch.ones(5), 1, out=p[1]),
    "accumulated": lambda p: p.view(-1).index_add_(0, torch.tensor([1, 1]), torch.ones(2)),
    "diagonal": lambda p: p.fill_diagonal_(7.0),
    "diagonal view": lambda p: p.diagonal().zero_(),
    "as strided": lambda p: p.as_strided((3,), (5,)).fill_(4.0),
    "triangle": lambda p: p.tril_(),
    "index_fill_": lambda p: p.index_fill_(0, torch.tensor([1]), 3.0),
    "scatter_": lambda p: p.scatter_(0, torch.zeros(1, 5, dtype=torch.int64), 9.0),
    "masked_fill_": lambda p: p.masked_fill_(torch.eye(3, 5, dtype=torch.bool), 1.0),
    "renorm_": lambda p: p.renorm_(2, 0, 0.5),
    "addmm_": lambda p: p.addmm_(torch.ones(3, 2), torch.ones(2, 5)),
    "two views": write_through_two_views,
    "between": write_between,
    "orthogonal": lambda p: nn.init.orthogonal_(p),
    "sparse": lambda p: nn.init.sparse_(p, 0.5),
    "dirac": lambda p: nn.init.dirac_(p.view(3, 5, 1)),
    "padding": lambda p: nn.Embedding(3, 5, padding_idx=1, _weight=p)._fill_padding_idx_with_zero(),
    "rotated": lambda p: p.view(-1).copy_(p.view(-1).roll(1)),
    "norm of a view": lambda p: p.view(-1).div_(p.view(-1).norm()),
}


def run_writes() -> None:
    mesh = make_mesh()
    with torch.no_grad():
        for name, write in WRITES.items():
            pair = make_pairs(mesh)["matrix"]
            torch.manual_seed(3)
            found = write(pair.sharded)
            torch.manual_seed(3)
            expected = write(pair.plain)
            check_same(pair.sharded, pair.plain, f"the parameter after {name}")
            check_same(plain(found), plain(expected), f"result of {name}")


def plain(value: Any) -> Any:
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_to_a_view_reaches_the_parameter_on_every_rank(
    world: Worlds, size: int
) -> None:
    world(size).run(run_writes)


@on_ranks(3)
def test_a_view_follows_its_parameter() -> None:
    mesh = make_mesh()
    pairs = make_pairs(mesh)
    with torch.no_grad():
        views = {name: pair.sharded.view(-1) for name, pair in pairs.items()}
        twins = {name: pair.plain.view(-1) for name, pair in pairs.items()}
        for pair in pairs.values():
            pair.sharded.mul_(3), pair.plain.mul_(3)
        for name in pairs:
            check_same(
                views[name] * 1, twins[name], f"view of {name} after a write to the parameter"
            )
        for name in pairs:
            views[name][:1] += 1
            twins[name][:1] += 1
        for pair in pairs.values():
            pair.sharded.to_local().add_(2), pair.plain.add_(2)  # as an optimizer does
        for name, pair in pairs.items():
            assert views[name].tolist() == pytest.approx(twins[name].tolist())
            check_same(pair.sharded, pair.plain, name)
        with counted(mesh) as calls:
            views["matrix"].sum(), views["matrix"].tolist()
        assert not calls  # nothing has changed since


@on_ranks(2)
def test_views_of_gradients_and_of_results_write_through_as_well() -> None:
    pair = make_pairs(make_mesh())["matrix"]
    pair.sharded.grad = ShardTensor(pair.sharded.to_local().clone(), pair.sharded.spec)
    pair.plain.grad = pair.plain.detach().clone()
    pair.sharded.grad[0] = 0.0
    pair.plain.grad[0] = 0.0
    check_same(pair.sharded.grad, pair.plain.grad, "gradient")
    doubled, twin = pair.sharded.detach() * 2, pair.plain.detach() * 2
    doubled[:, 1] = 5.0
    twin[:, 1] = 5.0
    check_same(doubled, twin, "result")
    check_same(pair.sharded, pair.plain, "parameter")


@on_ranks(2)
def test_a_view_that_autograd_recorded_computes_and_is_written_through_without_gradients() -> None:
    pair = make_pairs(make_mesh())["matrix"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="parameter matrix is used outside")
        views = [p.view(-1) for p in (pair.sharded, pair.plain)]
    assert (
        isinstance(views[0], GatheredView)
        and views[0].requires_grad
        and views[0].grad_fn is not None
    )
    with torch.no_grad():
        for view in views:
            view[3] = 17.0
    check_same(pair.sharded, pair.plain, "after a write without gradients")
    for view in views:
        (view * view.detach()).sum().backward()
    check_same(pair.sharded.grad, pair.plain.grad, "gradient")


@on_ranks(2)
def test_a_graph_whose_view_has_changed_fails_as_that_of_a_plain_view_and_with_the_name() -> None:
    pair = make_pairs(make_mesh())["matrix"]
    texts = "parameter matrix was written to between", "modified by an inplace operation"
    for p, text in zip((pair.sharded, pair.plain), texts, strict=True):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="parameter matrix is used outside")
            view = p.view(-1)
        loss = view.square().sum()
        with torch.no_grad():
            p.mul_(2)
            view.sum()
        with pytest.raises(RuntimeError, match=text):
            loss.backward()


@on_ranks(2)
def test_other_forms_of_a_view_are_copies_that_say_so() -> None:
    matrix = make_pairs(make_mesh())["matrix"].sharded
    expected = matrix.full_tensor()[1]
    with torch.no_grad():
        row = matrix[1]
        copied = copy.deepcopy(row)
        loaded = pickle.loads(pickle.dumps(row))
        saved = io.BytesIO()
        torch.save({"row": row}, saved)
        saved.seek(0)
        arrays = [
            row.numpy(),
            numpy.asarray(row),
            matrix.detach().numpy()[1],
            matrix.numpy(force=True)[1],
        ]
        assert repr(row) == repr(expected)
    for copy_ in (copied, loaded, torch.load(saved, weights_only=True)["row"]):
        assert type(copy_) is torch.Tensor and torch.equal(copy_, expected)
    for array in arrays:
        assert array.tolist() == expected.tolist()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0


@on_ranks(2)
def test_a_view_cannot_be_given_another_shape_or_other_memory_in_place() -> None:
    matrix = make_pairs(make_mesh())["matrix"].sharded
    with torch.no_grad():
        view = matrix[1:]
        for change in (view.t_, lambda: view.unsqueeze_(0), lambda: view.set_(torch.zeros(2))):
            with pytest.raises(NotImplementedError, match="reshape a view of matrix in place"):
                change()
        with pytest.raises(NotImplementedError, match="other memory"):
            view.data = torch.zeros(2, 5)
        assert view.shape == (2, 5)


@on_ranks(2)
def test_views_that_were_taken_one_by_one_cannot_be_written_to_at_once() -> None:
    pair = make_pairs(make_mesh())["matrix"]
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match="several views of matrix at once"),
    ):
        torch._foreach_add_([pair.sharded[0], pair.sharded.data[1]], 1.0)
    check_same(pair.sharded, pair.plain, "after the error")


@on_ranks(2)
def test_results_of_reads_are_plain_tensors() -> None:
    matrix = make_pairs(make_mesh())["matrix"].sharded
    with torch.no_grad():
        view = matrix.t()
        for result in (
            view * 1,
            view @ matrix,
            view.clone(),
            view.sum(),
            torch.cat([view, view]),
            matrix.reshape(5, 3) + 0,
        ):
            assert type(result) is torch.Tensor
        assert isinstance(view[0], GatheredView) and isinstance(view.t(), GatheredView)
        assert isinstance(matrix.add_(view.t()), ShardTensor)


@on_ranks(2)
def test_gathered_memory_goes_with_the_last_view() -> None:
    pair = shard(make_mesh(), {"large": torch.zeros(100, 100)})["large"]
    with torch.no_grad():
        view = pair.sharded[0]
        memory = view.plain().untyped_storage()
        assert memory.nbytes() == 4 * 100 * 100
        gathered = StorageWeakRef(memory)
        del view, memory
    assert gathered.expired()
