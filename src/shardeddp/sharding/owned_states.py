"""OwnedStates: what owners keep of whole parameters, seen by every rank as sharded tensors that lie with one rank.

What a rank knows of another's states is their form: how they are called, their shapes and dtypes, and where there is a
number. Owners tell it after a step that has changed it. Elements of tensors never travel for that, and numbers when all
ranks ask for the states as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import optim
from torch.utils import _pytree as pytree

from shardeddp.comm import Mesh, agree_on_any, exchange, gather_results
from shardeddp.plan.intervals import Interval
from shardeddp.sharding.shard_tensor import ShardSpec, ShardTensor, gather
from shardeddp.sharding.state_forms import Number, NumberElsewhere, form_of, has_number, numbers_in
from shardeddp.sharding.swapped_step import OutsideStates, State
from shardeddp.sharding.unsharded import outside_of
from shardeddp.sharding.whole_parameters import WholeParameter, WholeParameters


class OwnedStates(OutsideStates):
    """The states of an optimizer by sharded parameter; held by whole parameter, where that is.

    A state that is read becomes part of ``_shown`` and is what the next step goes on with, so that whatever is
    assigned, removed or changed in between reaches the optimizer. So does what comes from a checkpoint.

    Args:
        optimizer: Whose parameters they belong to.
        wholes: Who owns those.
        mesh: Of the sharded parameters.
    """

    def __init__(self, optimizer: optim.Optimizer, wholes: WholeParameters, mesh: Mesh) -> None:
        super().__init__()
        self._optimizer, self._wholes, self._mesh = optimizer, wholes, mesh
        self._shown: dict[torch.Tensor, State] = {}
        self._forms: dict[torch.Tensor, Any] = {}  # as told by owners; alike on all ranks
        self._have_numbers = False  # states of those forms
        self._numbers: dict[torch.Tensor, dict[str, Number]] | None = None  # by path; brought -> the next step
        self._specs: dict[tuple[torch.Tensor, str], ShardSpec] = {}

    # -- as others see them

    def __getitem__(self, parameter: torch.Tensor) -> State:
        parameter = outside_of(parameter)
        if not isinstance(parameter, ShardTensor):
            return self.inside[parameter]
        if parameter not in self._shown:
            self._shown[parameter] = self._show(parameter)
        return self._shown[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        parameter = outside_of(parameter)
        if isinstance(parameter, ShardTensor):
            self._shown[parameter] = dict(state)
        else:
            self.inside[parameter] = dict(state)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        parameter = outside_of(parameter)
        if parameter not in self:
            raise KeyError(parameter)
        whole = self._wholes.of(parameter)
        self.inside.pop(parameter if whole is None else whole.tensor, None)
        self._shown.pop(parameter, None)
        self._forms.pop(parameter, None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter in self._parameters() if parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        parameter = outside_of(parameter)
        if isinstance(parameter, ShardTensor):
            return parameter in self._shown or parameter in self._forms
        return parameter in self.inside

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _owned(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """What this rank steps on: number of the parameter, the parameter, the whole one."""
        for number, parameter in enumerate(self._parameters()):
            whole = self._wholes.of(parameter)
            if whole is not None and whole.tensor is not None:
                yield number, parameter, whole.tensor

    # -- before and after a step

    def settle(self) -> None:
        """Bring what has been assigned since the last step to the owners; it stays shown until :meth:`tell`."""
        for parameter in [it for it in self._parameters() if it in self._shown]:
            whole = self._wholes.of(parameter)
            if whole is None:
                raise RuntimeError("states are settled for parameters that have an owner")
            settled = pytree.tree_map_only(torch.Tensor, partial(_whole_of, whole.owner), self._shown[parameter])
            if whole.tensor is not None:
                self.inside[whole.tensor] = settled

    def tell(self) -> None:
        """Let all ranks know the forms of what owners have: an agreement of one byte on the host if none is new."""
        parameters = self._parameters()
        self._numbers = None
        for parameter in parameters:
            self._shown.pop(parameter, None)
        mine: dict[int, Any] = {}
        failure: Exception | None = None
        try:
            mine = {number: self._form_of(whole) for number, _, whole in self._owned()}
        except TypeError as error:
            failure = error
        changed = any(self._forms.get(parameters[number]) != form for number, form in mine.items())
        if not agree_on_any([changed or failure is not None], self._mesh.control)[0]:
            return

        def answer() -> bytes:
            if failure is not None:
                raise failure
            return json.dumps(list(mine.items())).encode()

        answers = gather_results("describing the optimizer's states", answer, self._mesh.control)
        told = {parameters[number]: form for number, form in self._from_owners(answers)}
        self._forms = {parameter: form for parameter, form in {**self._forms, **told}.items() if form is not None}
        self._have_numbers = any(map(has_number, self._forms.values()))

    def _form_of(self, whole: torch.Tensor) -> Any:
        """Of what this rank keeps of a parameter; None if that is nothing."""
        state = self.inside.get(whole)
        return None if state is None else form_of(state, type(self._optimizer).__name__)

    def _from_owners(self, answers: Sequence[bytes]) -> Iterator[tuple[int, Any]]:
        for rank in self._mesh.owners.ranks:
            yield from json.loads(answers[rank])

    # -- numbers of others

    def bring_numbers(self) -> None:
        """Let all ranks know all numbers among the states: a collective, unless they do or there are none."""
        if not self._have_numbers or self._numbers is not None or self._mesh.owners.size == 1:
            return
        self._mesh.assembly.call(f"state_dict of {type(self._optimizer).__name__}, which has states that are numbers,")
        mine = [
            (number, dict(numbers_in(self._shown.get(parameter) or self.inside.get(whole))))
            for number, parameter, whole in self._owned()
        ]
        answers = exchange(json.dumps(mine).encode(), self._mesh.control)
        parameters = self._parameters()
        self._numbers = {parameters[number]: found for number, found in self._from_owners(answers)}
        for parameter, state in self._shown.items():
            brought = partial(_brought, self._numbers.get(parameter, {}))
            state.update(pytree.tree_map_only(NumberElsewhere, brought, dict(state)))

    # -- what is shown

    def _show(self, parameter: ShardTensor) -> State:
        whole = self._wholes.of(parameter)
        form = self._forms.get(parameter)
        if whole is not None and whole.tensor is not None and self._form_of(whole.tensor) != form:
            raise RuntimeError(
                f"a step of {type(self._optimizer).__name__} has failed and left states of {parameter.spec.fqn} on "
                f"this rank of which the others do not know: expected none to be read before a step has succeeded. "
                f"Step again, or load the optimizer's state of before (load_state_dict)"
            )
        if whole is None or form is None:
            return {}
        held = None if whole.tensor is None else self.inside.get(whole.tensor)
        return self._build(form, held, whole, "")

    def _build(self, form: Any, held: Any, whole: WholeParameter, path: str) -> Any:
        """A state as it is shown, from its form and, at the owner, from what is held there."""
        kind, content = form
        if kind == "tensor":
            return self._sharded(content, held, whole, path)
        if kind == "number":
            known = (self._numbers or {}).get(whole.parameter, {})
            return _brought(known, NumberElsewhere(whole.parameter.spec.fqn, path)) if held is None else held
        if kind == "value":
            return content
        if kind == "dict":
            return {
                key: self._build(item, None if held is None else held[key], whole, f"{path}.{key}")
                for key, item in content
            }
        items = [
            self._build(item, None if held is None else held[index], whole, f"{path}.{index}")
            for index, item in enumerate(content)
        ]
        return tuple(items) if kind == "tuple" else items

    def _sharded(self, content: Sequence[Any], held: torch.Tensor | None, whole: WholeParameter, path: str) -> Any:
        shape, dtype, device = torch.Size(content[0]), _dtype(content[1]), content[2]
        spec = self._specs.get((whole.parameter, path))
        if spec is None or spec.shape != shape:
            spec = self._specs[whole.parameter, path] = self._spec(shape, whole, path)
        local = torch.empty(0, dtype=dtype, device=device) if held is None else held.detach().reshape(-1)
        return ShardTensor(local, spec)

    def _spec(self, shape: torch.Size, whole: WholeParameter, path: str) -> ShardSpec:
        if whole.at_home and shape == whole.parameter.shape:
            return whole.parameter.spec
        everything, nothing = Interval(0, shape.numel()), Interval(0, 0)
        return ShardSpec(
            fqn=f"{whole.parameter.spec.fqn}{path}",
            shape=shape,
            intervals=tuple(everything if rank == whole.owner else nothing for rank in range(self._mesh.owners.size)),
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


def _brought(numbers: Mapping[str, Number], elsewhere: NumberElsewhere) -> Number | NumberElsewhere:
    return numbers.get(elsewhere.path, elsewhere)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
