"""Whole-parameter optimizers (Muon, Shampoo): each parameter is stepped on one rank, its owner."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import optim

from shardeddp.comm import Mesh, agree_on_any, all_gather_bytes, gather_results
from shardeddp.comm.desync import BegunOperations
from shardeddp.engine.storage import allocate_storage, release_storage
from shardeddp.errors import ConfigurationError
from shardeddp.optim.swap import Gradients, OutsideStates, State, SwappedStep
from shardeddp.plan.layout import Interval
from shardeddp.tensor.shard_tensor import ShardSpec, ShardTensor, gather, local_or_whole
from shardeddp.tensor.unsharded import outside_of
from shardeddp.torch_private import pytree

# -- Ownership: the rank that steps each whole parameter, by load


def assign_owners(shapes: Sequence[Sequence[int]], costs: list[int]) -> list[int]:
    """Assign further parameters to ranks; the same on every rank, since only shapes and order count.

    The most costly comes first, each goes to the rank with the least cost so far (R. L. Graham
    1969: at most 4/3 of the best possible). A parameter is never moved to another owner.

    Args:
        shapes: Shapes of the parameters.
        costs: Sum of :func:`step_cost` over each rank's parameters; theirs are added.
    """
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: -step_cost(shapes[index])):
        owners[index] = min(range(len(costs)), key=costs.__getitem__)
        costs[owners[index]] += step_cost(shapes[index])
    return owners


def step_cost(shape: Sequence[int]) -> int:
    """Return the cost of a step on a matrix, up to a factor: of products along its shorter side.

    A tensor with more dims counts as the matrix of its rows.

    >>> step_cost((4, 8)), step_cost((8, 4)), step_cost((10,)), step_cost((2, 2, 2))
    (128, 128, 10, 16)
    """
    numel = math.prod(shape)
    if numel == 0 or len(shape) < 2:
        return numel
    return numel * min(shape[0], numel // shape[0])


# -- Owner transfers: shards to whole tensors on the owner, and back


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnerTransfer:
    """One sharded tensor to be transferred between its shards and a whole tensor at its owner."""

    sharded: ShardTensor
    owner: int
    """Rank within ``mesh.slices``."""

    whole: torch.Tensor | None
    """Tensor of the parameter's shape and dtype; at the owner only."""


class OwnerTransfers:
    """All-to-all between shards and owners, in bytes, so that dtypes can mix.

    Transfers are the same on every rank of ``mesh.slices``, in the same order.
    """

    def __init__(self, tensors: Sequence[OwnerTransfer], mesh: Mesh) -> None:
        self._group, self._stream = mesh.slices, mesh.gather_stream
        me, size = self._group.rank, self._group.size
        # By peer: this rank's parts of the peer's tensors, and the peer's parts of this rank's.
        self._here: list[list[torch.Tensor]] = [[] for _ in range(size)]
        self._there: list[list[torch.Tensor]] = [[] for _ in range(size)]
        # Pairs (part of a shard, part of a whole parameter), both on this rank.
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._locals = [each.sharded.to_local() for each in tensors]
        for each, local in zip(tensors, self._locals, strict=True):
            if each.owner != me:
                self._here[each.owner].append(local)
                continue
            assert each.whole is not None
            flat = each.whole.detach().view(-1)
            for peer, interval in enumerate(each.sharded.spec.intervals):
                part = flat[interval.start : interval.stop]
                if peer != me:
                    self._there[peer].append(part)
                elif part.data_ptr() != local.data_ptr():
                    self._own.append((local, part))

    @torch.no_grad()
    def gather_to_owners(self) -> None:
        """Fill the whole tensors from the shards, with one all-to-all."""
        self._run(self._here, self._there)
        for local, part in self._own:
            part.copy_(local)

    @torch.no_grad()
    def scatter_from_owners(self) -> None:
        """Send the owners' results in the whole tensors to the shards: the inverse."""
        self._run(self._there, self._here)
        for local, part in self._own:
            local.copy_(part)

    def _run(
        self, sources: Sequence[Sequence[torch.Tensor]], targets: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        device = self._locals[0].device if self._locals else torch.device("cpu")
        leaving = [_joined(pieces, device) for pieces in sources]
        arriving = [
            torch.empty(sum(it.nbytes for it in pieces), dtype=torch.uint8, device=device)
            for pieces in targets
        ]
        # Compute allocates both, and waits for the transfer in the other stream before it reads
        # what arrived: memory freed at the end of this function is written after both reads.
        self._stream.issue(lambda: self._group.all_to_all(arriving, leaving)).wait()
        for buffer, pieces in zip(arriving, targets, strict=True):
            for arrived, piece in zip(
                buffer.split([piece.nbytes for piece in pieces]), pieces, strict=True
            ):
                _bytes_of(piece).copy_(arrived)


def _joined(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return (
        torch.cat([_bytes_of(piece) for piece in pieces])
        if pieces
        else torch.empty(0, dtype=torch.uint8, device=device)
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


# -- WholeParameters: owners and whole tensors of one optimizer


@dataclass(kw_only=True, eq=False)
class OwnedParameter:
    """A parameter on its owner, where it is stepped on; other ranks only know the owner."""

    parameter: ShardTensor
    owner: int
    """Rank within ``mesh.slices``."""

    owner_has_all: bool
    """True if the owner's shard is the whole parameter, so that no transfer is needed."""

    tensor: torch.Tensor | None
    """Tensor of the parameter's shape, at the owner; None elsewhere.

    It is a view of the shard, or has memory of its own during a step only.
    """

    @property
    def values(self) -> OwnerTransfer:
        """Transfer of the parameter's values, for immediate use; allocates the whole tensor."""
        if self.tensor is not None and not self.owner_has_all:
            allocate_storage(self.tensor)
        return OwnerTransfer(sharded=self.parameter, owner=self.owner, whole=self.tensor)

    def take_gradient(self, gradient: torch.Tensor) -> list[OwnerTransfer]:
        """Set the whole parameter's gradient; return the transfers that this needs."""
        travels = isinstance(gradient, ShardTensor) and not self.owner_has_all
        if self.tensor is not None:
            here = local_or_whole(gradient)
            self.tensor.grad = (
                torch.empty_like(self.tensor.detach())
                if travels
                else here.reshape(self.tensor.shape)
            )
        if not isinstance(gradient, ShardTensor) or self.owner_has_all:
            return []
        return [
            OwnerTransfer(
                sharded=gradient,
                owner=self.owner,
                whole=None if self.tensor is None else self.tensor.grad,
            )
        ]

    def release(self) -> None:
        """Free the memory of a step.

        Transfers copy from and to it in compute's stream, which allocated it and alone reads it.
        """
        if self.tensor is not None:
            self.tensor.grad = None
            if not self.owner_has_all:
                release_storage(self.tensor)


class WholeParameters:
    """Sharded parameters of an optimizer, with their owners."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._costs = [0] * mesh.slices.size  # of each rank's parameters
        self._known: dict[torch.Tensor, OwnedParameter] = {}

    def of(self, parameter: object) -> OwnedParameter | None:
        """Return the owned form of a sharded parameter; None for one that every rank has whole."""
        return self._known.get(parameter) if isinstance(parameter, torch.Tensor) else None

    def follow(self, parameters: list[torch.Tensor]) -> None:
        """Assign new parameters to owners; called with the same parameters on every rank."""
        new = [it for it in parameters if isinstance(it, ShardTensor) and it not in self._known]
        owners = assign_owners([it.shape for it in new], self._costs)
        for parameter, owner in zip(new, owners, strict=True):
            self._known[parameter] = self._assign(parameter, owner)

    def _assign(self, parameter: ShardTensor, owner: int) -> OwnedParameter:
        spec, local = parameter.spec, parameter.to_local()
        owner_has_all = spec.intervals[owner].numel == spec.numel
        tensor = None
        if owner == self._mesh.slices.rank:
            tensor = (
                local.detach().view(spec.shape)
                if owner_has_all
                else torch.empty(spec.shape, dtype=local.dtype, device=local.device)
            )
            # As a trainable one: an optimizer may skip a parameter without requires_grad.
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
            if not owner_has_all:
                release_storage(tensor)
        return OwnedParameter(
            parameter=parameter, owner=owner, owner_has_all=owner_has_all, tensor=tensor
        )


# -- State form: structure of a state without its elements and numbers, as JSON
#
# Numbers are left out because an optimizer that counts in Python has new ones in every step. A
# number of another rank that is not known is represented by a :class:`RemoteScalar`.

Number = bool | int | float


def state_structure(value: Any, optimizer: str) -> Any:
    """Return the form of a state, or of a part of one.

    Raises:
        TypeError: It holds an object that cannot be described to other ranks.
    """
    if isinstance(value, torch.Tensor):
        return [
            "tensor",
            [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type],
        ]
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return ["dict", [[key, state_structure(item, optimizer)] for key, item in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [state_structure(item, optimizer) for item in value]]
    if isinstance(value, Number):
        return ["number", None]
    if value is None or isinstance(value, str):
        return ["value", value]
    raise TypeError(
        f"{optimizer} keeps a {type(value).__name__} as a state of a parameter: expected numbers, "
        f"text, tensors and lists, tuples and dicts (by text or number) of them, which can be sent "
        f"to other ranks. Set ShardedDP(optimizer_scope={{'{optimizer}': 'model'}}) to have it "
        f"step on all ranks"
    )


def has_number(form: Any) -> bool:
    """Return whether there is a number in states of a form."""
    kind, content = form
    if kind == "dict":
        return any(has_number(item) for _, item in content)
    return kind == "number" or (kind in ("list", "tuple") and any(map(has_number, content)))


def numbers_in(value: Any, path: str = "") -> Iterator[tuple[str, Number]]:
    """Yield the numbers of a state by path: keys and indices, with a dot before each."""
    if isinstance(value, Number):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from numbers_in(item, f"{path}.{key}")


class RemoteScalar:
    """A number among the states of a parameter that another rank owns; unknown to this rank.

    Every use raises RuntimeError: no value would be right.
    """

    def __init__(self, fqn: str, path: str) -> None:
        self._fqn = fqn
        self.path = path

    def __repr__(self) -> str:
        return f"<{self.path.removeprefix('.')} of {self._fqn}: a number of another rank>"

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"{self.path.removeprefix('.')!r}, a state of {self._fqn}, is a number that only the "
            f"rank which steps this parameter counts: call optimizer.state_dict() on all ranks, "
            f"which sends such numbers to all of them; they are valid until the next step"
        )

    __hash__ = object.__hash__
    __bool__ = __int__ = __float__ = __index__ = __format__ = __reduce_ex__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __neg__ = __pos__ = __abs__ = __round__ = __invert__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse


# -- OwnedStates: states of owners as sharded tensors with all elements on one rank
#
# Ranks that do not own a parameter know the form of its states: names, shapes, dtypes, and which of
# them are numbers. Owners send forms after a step that has changed them. Elements of tensors never
# travel for that; numbers travel when all ranks read the whole states.


class OwnedStates(OutsideStates):
    """States of an optimizer by sharded parameter; the owner holds them by whole parameter.

    A state that was read is kept in ``_shown``. The next step writes it back to the owner, so that
    values assigned, removed or changed in between reach the optimizer. So do states of a
    checkpoint.
    """

    def __init__(self, optimizer: optim.Optimizer, wholes: WholeParameters, mesh: Mesh) -> None:
        super().__init__(optimizer)
        self._wholes, self._mesh = wholes, mesh
        self._shown: dict[torch.Tensor, State] = {}
        self._forms: dict[torch.Tensor, Any] = {}  # as sent by owners; the same on all ranks
        self._have_numbers = False  # whether states of those forms have numbers
        # Numbers by path, valid from their gather to the next step.
        self._numbers: dict[torch.Tensor, dict[str, Number]] | None = None
        self._specs: dict[tuple[torch.Tensor, str], ShardSpec] = {}

    # -- Mapping of parameters to states

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

    def __contains__(self, parameter: object) -> bool:
        parameter = outside_of(parameter)
        if isinstance(parameter, ShardTensor):
            return parameter in self._shown or parameter in self._forms
        return parameter in self.inside

    def _owned(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the parameters that this rank steps on: index, sharded parameter, whole one."""
        for number, parameter in enumerate(self._parameters()):
            whole = self._wholes.of(parameter)
            if whole is not None and whole.tensor is not None:
                yield number, parameter, whole.tensor

    # -- Before and after a step

    def send_to_owners(self) -> None:
        """Send states that were assigned since the last step to their owners.

        They remain in ``_shown`` until :meth:`gather_forms`.
        """
        for parameter in [it for it in self._parameters() if it in self._shown]:
            self._send_to_owner(parameter, dict(self._shown[parameter]))

    def _send_to_owner(self, parameter: torch.Tensor, state: State) -> None:
        """Send a state, and leave none: each former tensor is released before the next one."""
        whole = self._wholes.of(parameter)
        if whole is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has optimizer states, and no "
                f"rank that owns it: a fault of shardeddp, please report it with the "
                f"optimizer's class and groups"
            )
        complete: State = {}
        for name in [*state]:
            value = pytree.tree_map_only(torch.Tensor, partial(_whole_of, whole), state.pop(name))
            if whole.tensor is not None:
                complete[name] = value
        if whole.tensor is not None:
            self.inside[whole.tensor] = complete

    def take(self, parameter: torch.Tensor, state: State) -> None:
        """Send a state from before the parameter was sharded anew to the owner."""
        if not isinstance(parameter, ShardTensor):
            self.inside[parameter] = state
            return
        self._wholes.follow(self._parameters())
        self._send_to_owner(parameter, state)

    def gather_forms(self) -> None:
        """Send the forms of the owners' states to all ranks.

        If none is new, it is an agreement of one byte on the host.
        """
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
        changed = {parameters[number]: form for number, form in self._from_owners(answers)}
        self._forms = {
            parameter: form
            for parameter, form in {**self._forms, **changed}.items()
            if form is not None
        }
        self._have_numbers = any(map(has_number, self._forms.values()))

    def _form_of(self, whole: torch.Tensor) -> Any:
        """Return the form of this rank's state of a parameter; None without any."""
        state = self.inside.get(whole)
        return None if state is None else state_structure(state, type(self._optimizer).__name__)

    def _from_owners(self, answers: Sequence[bytes]) -> Iterator[tuple[int, Any]]:
        for rank in self._mesh.slices.ranks:
            yield from json.loads(answers[rank])

    # -- Numbers of other ranks

    def gather_numbers(self) -> None:
        """Send all numbers among the states to all ranks.

        A collective, unless all ranks know them or there are none.
        """
        if not self._have_numbers or self._numbers is not None or self._mesh.slices.size == 1:
            return
        self._mesh.world_fingerprints.call(
            f"state_dict of {type(self._optimizer).__name__}, which has states that are numbers,"
        )
        mine = [
            (number, dict(numbers_in(self._shown.get(parameter) or self.inside.get(whole))))
            for number, parameter, whole in self._owned()
        ]
        answers = all_gather_bytes(json.dumps(mine).encode(), self._mesh.control)
        parameters = self._parameters()
        self._numbers = {parameters[number]: found for number, found in self._from_owners(answers)}
        for parameter, state in self._shown.items():
            number_at = partial(_number_at, self._numbers.get(parameter, {}))
            state.update(pytree.tree_map_only(RemoteScalar, number_at, dict(state)))

    # -- Shown states

    def _show(self, parameter: ShardTensor) -> State:
        whole = self._wholes.of(parameter)
        form = self._forms.get(parameter)
        if whole is not None and whole.tensor is not None and self._form_of(whole.tensor) != form:
            raise RuntimeError(
                f"a step of {type(self._optimizer).__name__} has failed and left states of "
                f"{parameter.spec.fqn} on this rank of which the others do not know: expected none "
                f"to be read before a step has succeeded. Step again, or load the optimizer's "
                f"state of before (load_state_dict)"
            )
        if whole is None or form is None:
            return {}
        held = None if whole.tensor is None else self.inside.get(whole.tensor)
        return self._build(form, held, whole, "")

    def _build(self, form: Any, held: Any, whole: OwnedParameter, path: str) -> Any:
        """Return a state as it is shown, from its form and, on the owner, from its own state."""
        kind, content = form
        if kind == "tensor":
            return self._sharded(content, held, whole, path)
        if kind == "number":
            known = (self._numbers or {}).get(whole.parameter, {})
            return (
                _number_at(known, RemoteScalar(whole.parameter.spec.fqn, path))
                if held is None
                else held
            )
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

    def _sharded(
        self, content: Sequence[Any], held: torch.Tensor | None, whole: OwnedParameter, path: str
    ) -> Any:
        shape, dtype, device = torch.Size(content[0]), getattr(torch, content[1]), content[2]
        spec = self._specs.get((whole.parameter, path))
        if spec is None or spec.shape != shape:
            spec = self._specs[whole.parameter, path] = self._spec(shape, whole, path)
        local = (
            torch.empty(0, dtype=dtype, device=device)
            if held is None
            else held.detach().reshape(-1)
        )
        return ShardTensor(local, spec)

    def _spec(self, shape: torch.Size, whole: OwnedParameter, path: str) -> ShardSpec:
        if whole.owner_has_all and shape == whole.parameter.shape:
            return whole.parameter.spec
        everything, nothing = Interval(0, shape.numel()), Interval(0, 0)
        return ShardSpec(
            fqn=f"{whole.parameter.spec.fqn}{path}",
            shape=shape,
            intervals=tuple(
                everything if rank == whole.owner else nothing
                for rank in range(self._mesh.slices.size)
            ),
            mesh=self._mesh,
        )


def _whole_of(parameter: OwnedParameter, value: torch.Tensor) -> torch.Tensor | None:
    """Return a state as its owner keeps it; None elsewhere if that needs no communication."""
    if not isinstance(value, ShardTensor):
        return value
    slices = parameter.parameter.spec.mesh.slices
    if value.spec.mesh.slices.size == 1:
        return value.to_local().view(value.shape)
    together = value.spec.mesh.slices.ranks == slices.ranks
    if together and value.spec.intervals[parameter.owner].numel == value.spec.numel:
        local = value.to_local()
        return local.view(value.shape) if local.numel() == value.spec.numel else None
    return gather(value)


def _number_at(numbers: Mapping[str, Number], elsewhere: RemoteScalar) -> Number | RemoteScalar:
    return numbers.get(elsewhere.path, elsewhere)


# -- OwnedStep: each whole parameter is stepped on its owner
#
# Before a step, every rank sends its shards of values and gradients to their owners, and the new
# values return after it: each rank sends and receives its own shards three times. That is the
# traffic of one all-gather of the model for three ranks, and less for more. States remain with the
# owners.


class OwnedStep(SwappedStep):
    """Lets an optimizer step on the whole parameters that this rank owns.

    Its new values depend only on the same parameter, its gradient and its states.
    """

    _states: OwnedStates

    def __init__(self, optimizer: optim.Optimizer, mesh: Mesh) -> None:
        self._mesh = mesh
        self.wholes = WholeParameters(mesh)
        # Parameters with a gradient; their memory is released after the step.
        self._moved: list[OwnedParameter] = []
        self._begun: BegunOperations = {}  # outside of the mesh, before the optimizer's own step
        super().__init__(optimizer)
        optimizer.register_state_dict_pre_hook(lambda _: self._states.gather_numbers())

    def _pre_step(
        self, groups: list[list[torch.Tensor]], gradients: list[Gradients]
    ) -> list[list[torch.Tensor]]:
        self.wholes.follow([it for group in groups for it in group])
        self._states.send_to_owners()
        found: list[list[torch.Tensor]] = []
        moved: list[OwnerTransfer] = []
        for group in zip(groups, gradients, strict=True):
            mine: list[torch.Tensor] = []
            for parameter, gradient in zip(*group, strict=True):
                whole = self.wholes.of(parameter)
                if whole is None:
                    mine.append(parameter)
                elif gradient is not None:
                    self._moved.append(whole)
                    moved += whole.take_gradient(gradient)
                    if whole.tensor is not None:
                        mine.append(whole.tensor)
            found.append(mine)
        # One after the other: a tensor in transfer is in memory twice.
        OwnerTransfers(self._values(), self._mesh).gather_to_owners()
        OwnerTransfers(moved, self._mesh).gather_to_owners()
        if self._mesh.slices.size > 1:
            self._begun = self._mesh.begun_by_others()
        return found

    def _post_step(self) -> None:
        if self._mesh.slices.size > 1 and self._begun != self._mesh.begun_by_others():
            kind = type(self._optimizer)
            raise ConfigurationError(
                f"{kind.__module__}.{kind.__qualname__} communicates in its step, with the scope "
                f"'parameter', where each rank steps on other parameters: ranks would mix them. If "
                f"it divides its work over ranks itself, take its form for one device, which "
                f"ShardedDP divides; else leave it out of optimizer_scope"
            )
        OwnerTransfers(self._values(), self._mesh).scatter_from_owners()

    def _values(self) -> list[OwnerTransfer]:
        return [whole.values for whole in self._moved if not whole.owner_has_all]

    def _release(self) -> None:
        for whole in self._moved:
            whole.release()
        self._moved = []

    def _forget(self) -> None:
        self.wholes = WholeParameters(self._mesh)

    def _outside(self, optimizer: optim.Optimizer) -> OwnedStates:
        held = [it for group in optimizer.param_groups for it in group["params"]]
        mesh = next((it.spec.mesh for it in held if isinstance(it, ShardTensor)), self._mesh)
        if mesh is not self._mesh:
            self._mesh, self.wholes = mesh, WholeParameters(mesh)
        return OwnedStates(optimizer, self.wholes, self._mesh)
