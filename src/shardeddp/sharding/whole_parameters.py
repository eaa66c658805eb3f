"""WholeParameters: which rank owns which parameter of an optimizer, and the whole tensor that it steps on there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardeddp.comm import Mesh
from shardeddp.plan.ownership import Ownership
from shardeddp.sharding.memory import allocate, release
from shardeddp.sharding.relocation import Relocated
from shardeddp.sharding.shard_tensor import ShardTensor


@dataclass(kw_only=True, eq=False)
class WholeParameter:
    """A parameter as its owner steps on it; on other ranks only who that is."""

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


class WholeParameters:
    """The sharded parameters of an optimizer, dealt out to owners.

    Args:
        mesh: Among whose owners of shards parameters are dealt out.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._ownership = Ownership(mesh.owners.size)
        self._known: dict[torch.Tensor, WholeParameter] = {}

    def of(self, parameter: object) -> WholeParameter | None:
        """The whole of a sharded parameter that has been dealt out; None for what every rank has."""
        return self._known.get(parameter) if isinstance(parameter, torch.Tensor) else None

    def follow(self, parameters: list[torch.Tensor]) -> None:
        """Deal out those that are new; called with the same parameters on every rank."""
        new = [it for it in parameters if isinstance(it, ShardTensor) and it not in self._known]
        for parameter, owner in zip(new, self._ownership.deal([tuple(it.shape) for it in new]), strict=True):
            self._known[parameter] = self._assign(parameter, owner)

    def _assign(self, parameter: ShardTensor, owner: int) -> WholeParameter:
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
        return WholeParameter(parameter=parameter, owner=owner, at_home=at_home, tensor=tensor)
