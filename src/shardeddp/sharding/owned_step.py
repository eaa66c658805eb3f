"""OwnedStep: an optimizer that looks at parameters as wholes steps on whole ones, each on one rank, its owner.

Before a step, every rank sends its shards of values and gradients to their owners, and the new values travel back after
it: each rank sends and receives its own shards three times, which is what one all-gather of the model moves for three
ranks, and less for more. States stay with the owners.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import optim

from shardeddp.comm import Mesh
from shardeddp.plan.ownership import Ownership
from shardeddp.sharding.memory import allocate, release
from shardeddp.sharding.owned_states import OwnedStates
from shardeddp.sharding.relocation import Relocated, bring, take_back
from shardeddp.sharding.shard_tensor import ShardTensor
from shardeddp.sharding.swapped_step import SwappedStep


class OwnedStep(SwappedStep):
    """Lets an optimizer step on the whole parameters that this rank owns.

    Args:
        optimizer: One whose new value of a parameter depends on that parameter alone, with its gradient and states.
        on_step: Called after each step.
        mesh: Of the sharded parameters.
    """

    _states: OwnedStates

    def __init__(self, optimizer: optim.Optimizer, on_step: Callable[[], None], mesh: Mesh) -> None:
        self._mesh = mesh
        self._wholes = Wholes(mesh)
        self._moved: list[Whole] = []  # brought here for the step at work -> taken back
        super().__init__(optimizer, on_step)

    def _swap_in(self, groups: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        self._wholes.follow([it for group in groups for it in group])
        self._states.settle()
        self._moved = []
        found: list[list[torch.Tensor]] = []
        gradients: list[Relocated] = []
        for parameters in groups:
            mine: list[torch.Tensor] = []
            for parameter in parameters:
                place = self._wholes.of(parameter)
                if place is None:
                    mine.append(parameter)
                elif (gradient := _gradient_of(parameter)) is not None:
                    self._moved.append(place)
                    gradients += place.take_gradient(gradient)
                    if place.tensor is not None:
                        mine.append(place.tensor)
            found.append(mine)
        # One after the other: what travels is in memory twice.
        bring([place.values for place in self._moved if not place.at_home], self._mesh)
        bring(gradients, self._mesh)
        return found

    def _bring_back(self) -> None:
        moved, self._moved = self._moved, []
        take_back([place.values for place in moved if not place.at_home], self._mesh)
        for place in moved:
            place.release()
        self._states.tell()

    def _outside(self, optimizer: optim.Optimizer) -> OwnedStates:
        return OwnedStates(optimizer, self._wholes, self._mesh)


@dataclass(kw_only=True, eq=False)
class Whole:
    """A parameter as its owner steps on it; elsewhere only who that is."""

    parameter: ShardTensor
    owner: int
    """Among ``mesh.owners``."""

    at_home: bool
    """Whether the owner's shard is all of it, so that nothing travels."""

    tensor: torch.Tensor | None
    """Of the parameter's shape, at the owner; has memory of its own only during a step, or is a view of the shard."""

    @property
    def values(self) -> Relocated:
        """The parameter on its way to the owner; whoever asks is about to use it."""
        if self.tensor is not None and not self.at_home:
            allocate(self.tensor)
        return Relocated(sharded=self.parameter, owner=self.owner, whole=self.tensor)

    def take_gradient(self, gradient: torch.Tensor) -> list[Relocated]:
        """Give the whole parameter its gradient; what has to travel for that."""
        travels = isinstance(gradient, ShardTensor) and not self.at_home
        if self.tensor is not None:
            here = gradient.to_local() if isinstance(gradient, ShardTensor) else gradient
            self.tensor.grad = torch.empty_like(self.tensor.detach()) if travels else here.reshape(self.tensor.shape)
        if not isinstance(gradient, ShardTensor) or self.at_home:
            return []
        return [Relocated(sharded=gradient, owner=self.owner, whole=None if self.tensor is None else self.tensor.grad)]

    def release(self) -> None:
        """Give back the memory of a step."""
        if self.tensor is not None:
            self.tensor.grad = None
            if not self.at_home:
                release(self.tensor)


class Wholes:
    """All the parameters of an optimizer as wholes, and who owns them.

    Args:
        mesh: Among whose owners of shards parameters are dealt out.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._ownership = Ownership(mesh.owners.size)
        self._places: dict[torch.Tensor, Whole] = {}

    def of(self, parameter: object) -> Whole | None:
        """The whole of a sharded parameter that has been dealt out; None for what every rank has."""
        return self._places.get(parameter) if isinstance(parameter, torch.Tensor) else None

    def follow(self, parameters: list[torch.Tensor]) -> None:
        """Deal out those that are new; called with the same parameters on every rank."""
        new = [it for it in parameters if isinstance(it, ShardTensor) and it not in self._places]
        for parameter, owner in zip(new, self._ownership.deal([tuple(it.shape) for it in new]), strict=True):
            self._places[parameter] = self._place(parameter, owner)

    def _place(self, parameter: ShardTensor, owner: int) -> Whole:
        spec, local = parameter.spec, parameter.to_local()
        at_home = spec.intervals[owner].numel == spec.numel
        tensor = None
        if owner == self._mesh.owners.rank:
            tensor = (
                local.detach().view(spec.shape)
                if at_home
                else torch.empty(spec.shape, dtype=local.dtype, device=local.device)
            )
            # As the user's: an optimizer may leave out a parameter that says that it is not trained.
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
            if not at_home:
                release(tensor)
        return Whole(parameter=parameter, owner=owner, at_home=at_home, tensor=tensor)


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad
