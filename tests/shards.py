"""Sharded parameters without a model around them, each beside the plain parameter that it stands for.

Everything here runs on a rank. The shapes are small enough that, on any number of ranks, some of them lie on one rank
alone and others are cut in odd places.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from shardeddp.comm import Mesh
from shardeddp.engine.flat_group import FlatGroup
from shardeddp.plan.topology import Topology
from shardeddp.tensor.autograd import patch_functions
from shardeddp.tensor.collectives import patch_collectives
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.wrap.flat_buffers import plan_unit
from shardeddp.wrap.tree import ParameterSpec, UnitSpec

SHAPES = {
    "matrix": (3, 5),
    "bias": (5,),
    "scalar": (),
    "single": (1,),
    "cube": (2, 3, 4),
    "empty": (0, 4),
}
SIZES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Pair:
    """A sharded parameter and its plain twin."""

    name: str
    sharded: ShardTensor
    plain: nn.Parameter


def make_mesh(shard_size: int | None = None) -> Mesh:
    """The mesh of all ranks; a collective."""
    world_size = dist.get_world_size()
    topology = Topology(world_size=world_size, shard_size=shard_size or world_size)
    return Mesh(topology, torch.device("cpu"), timedelta(seconds=20))


def make_pairs(
    mesh: Mesh, dtype: torch.dtype = torch.float32, requires_grad: bool = True
) -> dict[str, Pair]:
    """A parameter of every shape with the same random content on all ranks, sharded as one flat buffer."""
    random = torch.Generator().manual_seed(1)
    values = {
        name: (torch.randn(shape, generator=random) * 3).to(dtype) for name, shape in SHAPES.items()
    }
    return shard(mesh, values, requires_grad)


def shard(
    mesh: Mesh, values: dict[str, torch.Tensor], requires_grad: bool = True
) -> dict[str, Pair]:
    """Turn tensors of one dtype into the parameters of a flat buffer, as the engine does."""
    patch_functions()  # on all ranks alike: some may have trained a model before
    patch_collectives()
    parameters = {
        name: nn.Parameter(value.clone(), requires_grad) for name, value in values.items()
    }
    twins = {name: nn.Parameter(value.clone(), requires_grad) for name, value in values.items()}
    specs = [
        ParameterSpec(fqn=name, parameter=parameter, registrations=())
        for name, parameter in parameters.items()
    ]
    unit = UnitSpec(name="", module=nn.Module(), parameters=tuple(specs))
    (planned,) = plan_unit(unit, mesh.topology).groups
    FlatGroup(planned, mesh)
    pairs: dict[str, Pair] = {}
    for name, parameter in parameters.items():
        assert isinstance(parameter, ShardTensor)
        pairs[name] = Pair(name, parameter, twins[name])
    return pairs


def whole(value: Any) -> Any:
    """The same with every sharded tensor gathered; whatever else there is stays."""
    return pytree.tree_map_only(ShardTensor, lambda sharded: sharded.full_tensor(), value)


def check_same(found: Any, expected: Any, about: str, **tolerances: float) -> None:
    """The same structure, shapes, dtypes and values, whether sharded or not."""
    found, expected = (
        pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), whole(value))
        for value in (found, expected)
    )
    message: Callable[[str], str] = lambda text: f"{about}, rank {dist.get_rank()}: {text}"  # noqa: E731
    torch.testing.assert_close(found, expected, equal_nan=True, msg=message, **tolerances)


@contextmanager
def counted(mesh: Mesh) -> Iterator[Counter[str]]:
    """The collectives that are issued inside, by kind; filled when it ends."""
    mesh.traffic.reset()
    calls: Counter[str] = Counter()
    yield calls
    calls.update(mesh.traffic.calls)


def plain_operand(pair: Pair) -> torch.Tensor:
    """A plain tensor of the parameter's shape, the same on all ranks and at every call."""
    return torch.randn(pair.plain.shape, generator=torch.Generator().manual_seed(2))


Case = Callable[[torch.Tensor, torch.Tensor], Any]


@torch.no_grad()
def compare(
    cases: dict[str, Case], *, sharded: bool | None, calls: str | None = None, empty: bool = True
) -> None:
    """Run every case on every shape, with the sharded parameter and with the plain one; a collective.

    Args:
        cases: By name, functions of a parameter and a plain tensor of its shape.
        sharded: Whether results are sharded tensors; None: some are.
        calls: The kinds of collectives that each case issues; None: any.
        empty: Whether the cases make sense for a parameter without elements.
    """
    mesh = make_mesh()
    for case, function in cases.items():
        for name, pair in make_pairs(mesh).items():
            if not (pair.plain.numel() or empty):
                continue
            about = f"{case} of {name}"
            with counted(mesh) as issued:
                found = function(pair.sharded, plain_operand(pair))
            if calls is not None and mesh.topology.shard_size > 1:
                assert [*issued.elements()] == calls.split(), f"{about} issued {dict(issued)}"
            if sharded is not None:
                assert isinstance(found, ShardTensor) == sharded, (
                    f"{about} is a {type(found).__name__}"
                )
            check_same(found, function(pair.plain, plain_operand(pair)), about)
            check_same(pair.sharded, pair.plain, f"{name} after {case}")


@contextmanager
def warned(times: int | None = None) -> Iterator[list[warnings.WarningMessage]]:
    """Collects the warnings about uses outside a unit; anything else stays an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message="parameter .* is used outside the forward")
        yield caught
    assert times is None or len(caught) == times
