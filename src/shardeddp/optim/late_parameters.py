"""Late parameters: made after their model was sharded; whole on all ranks, with averaged gradients."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import nn, optim

from shardeddp.comm import Mesh
from shardeddp.engine.runtime import all_runtimes
from shardeddp.errors import first_three
from shardeddp.tensor.shard_tensor import ShardTensor


class LateParameters:
    """Parameters of an optimizer that are in a sharded model and not sharded.

    A layer that is added in the middle of a run, or in ``configure_optimizers``, has no unit that
    would gather and reduce it. Its parameters stay plain: rank 0's values are sent to all ranks
    when an optimizer is first seen with them, and gradients are averaged over all ranks.
    """

    def __init__(self, parameters: list[nn.Parameter], names: list[str], mesh: Mesh) -> None:
        self._parameters, self._names, self._mesh = parameters, names, mesh

    @torch.no_grad()
    def take_values_of_rank_0(self) -> None:
        """Send the values; a collective of all ranks."""
        self._mesh.world_fingerprints.call(f"broadcast of {self._names[0]}, made after the setup")
        for parameter in self._parameters:
            values = parameter.data.flatten()
            self._mesh.world.broadcast_(values, 0).wait()
            parameter.copy_(values.view(parameter.shape))

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average gradients in place; a collective of all ranks.

        A parameter that some ranks have not used gets the average with zeros there. Averages may be
        averaged again: that nothing has changed since is known to each rank of itself alone.
        """
        # A later setup shards them.
        parameters = [
            it for it in self._parameters if it.requires_grad and not isinstance(it, ShardTensor)
        ]
        gradients = [it.grad for it in parameters]
        if not parameters:
            return
        self._mesh.world_fingerprints.call(f"gradient of {self._names[0]}, made after the setup")
        wide = torch.promote_types(torch.float32, parameters[0].dtype)
        parts = [
            torch.zeros(it.numel(), dtype=wide, device=it.device)
            if gradient is None
            else gradient.to_dense().to(wide).reshape(-1)
            for it, gradient in zip(parameters, gradients, strict=True)
        ]
        used = parts[0].new_tensor([gradient is not None for gradient in gradients])
        total = torch.cat([*parts, used])
        self._mesh.world.all_reduce_(total, "mean").wait()
        *averages, used = total.split([*map(len, parts), len(used)])
        for parameter, average, share in zip(parameters, averages, used.tolist(), strict=True):
            if share:
                average = average.view(parameter.shape).to(parameter.dtype)
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = average
                else:
                    parameter.grad.copy_(average)


# By optimizer: how many parameters its groups had, and which of them are late.
_found: weakref.WeakKeyDictionary[optim.Optimizer, tuple[list[int], list[LateParameters]]]
_found = weakref.WeakKeyDictionary()


def find_late_parameters(optimizers: Iterable[optim.Optimizer]) -> list[LateParameters]:
    """Return the late parameters of optimizers; new ones get rank 0's values, a collective then."""
    found: list[LateParameters] = []
    for optimizer in optimizers:
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        known = _found.get(optimizer)
        if known is None or known[0] != lengths:
            known = _found[optimizer] = lengths, _find(optimizer)
        found += known[1]
    return found


def average_late_gradients(optimizers: Iterable[optim.Optimizer]) -> None:
    """Average gradients of late parameters before a step; a collective if there are any."""
    for late in find_late_parameters(optimizers):
        late.average_gradients()


def _find(optimizer: optim.Optimizer) -> list[LateParameters]:
    held = [it for group in optimizer.param_groups for it in group["params"]]
    plain = {id(it): it for it in held if not isinstance(it, ShardTensor)}
    found: list[LateParameters] = []
    for runtime in all_runtimes() if plain else ():
        if runtime.mesh.world.size == 1:
            continue
        late = {name: it for name, it in runtime.root_module.named_parameters() if id(it) in plain}
        if late:
            found.append(LateParameters([*late.values()], [*late], runtime.mesh))
            found[-1].take_values_of_rank_0()
            _warn(runtime.mesh, [*late])
    return found


def _warn(mesh: Mesh, names: list[str]) -> None:
    if mesh.rank == 0:
        warnings.warn(
            f"{first_three(names)}: made after the model was sharded, so all ranks keep them whole, "
            f"with rank 0's values, and average their gradients. Make layers in __init__(), "
            f"configure_model() or on_fit_start() to have them sharded",
            stacklevel=2,
        )
