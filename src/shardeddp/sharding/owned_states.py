"""OwnedStates: what owners keep of whole parameters, seen by every rank as sharded tensors that lie with one rank.

Values never travel for that. What a rank has to know of another's states is how they are called, their shapes and
dtypes, and what is a number; owners tell it after a step that has changed any of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import optim
from torch.utils import _pytree as pytree

from shardeddp.comm import Mesh, agree_on_any, gather_results
from shardeddp.plan.intervals import Interval
from shardeddp.sharding.gathered import gather
from shardeddp.sharding.shard_tensor import ShardSpec, ShardTensor
from shardeddp.sharding.swapped_step import OutsideStates, State

if TYPE_CHECKING:
    from shardeddp.sharding.owned_step import Whole, Wholes


class OwnedStates(OutsideStates):
    """The states of an optimizer by sharded parameter; held by whole parameter, where that is.

    A state that is read becomes part of ``_shown`` and is what the next step goes on with, so that whatever is
    assigned, removed or changed in between reaches the optimizer. So does what comes from a checkpoint.

    Args:
        optimizer: Whose parameters they belong to.
        wholes: Who owns those.
        mesh: Of the sharded parameters.
    """

    def __init__(self, optimizer: optim.Optimizer, wholes: Wholes, mesh: Mesh) -> None:
        super().__init__()
        self._optimizer, self._wholes, self._mesh = optimizer, wholes, mesh
        self._shown: dict[torch.Tensor, State] = {}
        self._told: dict[torch.Tensor, Any] = {}  # by parameter, how its states were described
        self._specs: dict[tuple[torch.Tensor, str], ShardSpec] = {}

    # -- as others see them

    def __getitem__(self, parameter: torch.Tensor) -> State:
        if not isinstance(parameter, ShardTensor):
            return self.inside[parameter]
        if parameter not in self._shown:
            self._shown[parameter] = self._show(parameter)
        return self._shown[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        if isinstance(parameter, ShardTensor):
            self._shown[parameter] = dict(state)
        else:
            self.inside[parameter] = dict(state)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        place = self._wholes.of(parameter)
        self.inside.pop(parameter if place is None else place.tensor, None)
        self._shown.pop(parameter, None)
        self._told.pop(parameter, None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter in self._parameters() if parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        known = self._shown.keys() | self._told.keys() if isinstance(parameter, ShardTensor) else self.inside.keys()
        return parameter in known

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    # -- before and after a step

    def settle(self) -> None:
        """Bring what has been assigned since the last step to the owners."""
        for parameter in [it for it in self._parameters() if it in self._shown]:
            state, place = self._shown.pop(parameter), self._wholes.of(parameter)
            if place is None:
                raise RuntimeError("states are settled for parameters that have an owner")
            settled = pytree.tree_map_only(torch.Tensor, partial(_whole_of, place.owner), state)
            if place.tensor is not None:
                self.inside[place.tensor] = settled

    def tell(self) -> None:
        """Let all ranks know what owners have: an agreement of one byte on the host if nothing is new.

        Shapes of tensors rarely are. A number that an optimizer counts in Python is new in every step.
        """
        parameters = self._parameters()
        mine: list[tuple[int, Any]] = []
        failure: Exception | None = None
        try:
            mine = list(self._describe(parameters))
        except TypeError as error:
            failure = error
        changed = any(self._told.get(parameters[number]) != described for number, described in mine)
        if not agree_on_any([changed or failure is not None], self._mesh.control)[0]:
            return

        def answer() -> bytes:
            if failure is not None:
                raise failure
            return json.dumps(mine).encode()

        answers = gather_results("describing the optimizer's states", answer, self._mesh.control)
        for rank in self._mesh.owners.ranks:
            for number, described in json.loads(answers[rank]):
                self._told[parameters[number]] = described
        self._told = {parameter: described for parameter, described in self._told.items() if described is not None}

    def _describe(self, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[int, Any]]:
        """What this rank keeps, by number of the parameter; None where it keeps nothing."""
        for number, parameter in enumerate(parameters):
            place = self._wholes.of(parameter)
            if place is not None and place.tensor is not None:
                state = self.inside.get(place.tensor)
                yield number, None if state is None else _describe(state, type(self._optimizer).__name__)

    def _show(self, parameter: ShardTensor) -> State:
        place = self._wholes.of(parameter)
        described = self._told.get(parameter)
        if place is None or described is None:
            return {}
        held = None if place.tensor is None else self.inside.get(place.tensor)
        return self._build(described, held, place, "")

    def _build(self, described: Any, held: Any, place: Whole, path: str) -> Any:
        kind, content = described
        if kind == "tensor":
            return self._sharded(content, held, place, path)
        if kind == "value":
            return content
        if kind == "dict":
            return {
                key: self._build(item, None if held is None else held[key], place, f"{path}.{key}")
                for key, item in content
            }
        items = [
            self._build(item, None if held is None else held[index], place, f"{path}.{index}")
            for index, item in enumerate(content)
        ]
        return tuple(items) if kind == "tuple" else items

    def _sharded(self, content: Sequence[Any], held: torch.Tensor | None, place: Whole, path: str) -> ShardTensor:
        shape, dtype, device = torch.Size(content[0]), _dtype(content[1]), content[2]
        spec = self._specs.get((place.parameter, path))
        if spec is None or spec.shape != shape:
            spec = self._specs[place.parameter, path] = self._spec(shape, place, path)
        local = torch.empty(0, dtype=dtype, device=device) if held is None else held.detach().reshape(-1)
        return ShardTensor(local, spec)

    def _spec(self, shape: torch.Size, place: Whole, path: str) -> ShardSpec:
        if place.at_home and shape == place.parameter.shape:
            return place.parameter.spec
        whole, nothing = Interval(0, shape.numel()), Interval(0, 0)
        return ShardSpec(
            fqn=f"{place.parameter.spec.fqn}{path}",
            shape=shape,
            intervals=tuple(whole if rank == place.owner else nothing for rank in range(self._mesh.owners.size)),
            mesh=self._mesh,
        )


def _whole_of(owner: int, value: torch.Tensor) -> torch.Tensor | None:
    """A state as its owner keeps it; None elsewhere, where that can be told without asking others."""
    if not isinstance(value, ShardTensor):
        return value
    if value.spec.intervals[owner].numel == value.spec.numel:
        local = value.to_local()
        return local.view(value.shape) if local.numel() == value.spec.numel else None
    return gather(value)


def _describe(value: Any, optimizer: str) -> Any:
    """A state as JSON, with shapes and dtypes in place of tensors."""
    if isinstance(value, torch.Tensor):
        return ["tensor", [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]]
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return ["dict", [[key, _describe(item, optimizer)] for key, item in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_describe(item, optimizer) for item in value]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    raise TypeError(
        f"{optimizer} keeps a {type(value).__name__} as a state of a parameter: expected numbers, text, tensors and "
        f"lists, tuples and dicts (by text or number) of them, which other ranks can be told of. Say "
        f"ShardedDP(optimizer_scope={{'{optimizer}': 'model'}}) to have it step on all ranks"
    )


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
