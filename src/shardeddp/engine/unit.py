"""Unit: parameters that are gathered and reduced together, and their state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardeddp.comm import Mesh, StreamHandle, during
from shardeddp.comm.propagation import is_transfer_error
from shardeddp.engine.flat_group import FlatGroup
from shardeddp.engine.forward_copies import ForwardCopies, copies_of
from shardeddp.engine.reduction import Reduction
from shardeddp.engine.states import UNIT_VERBS, BufferState, UnitState, state_after
from shardeddp.engine.storage import GatheredBuffer
from shardeddp.errors import ConfigurationError
from shardeddp.plan.memory import GroupCost, HeldMemory
from shardeddp.plan.reduction import ReduceOver
from shardeddp.tensor.backward import stored_gradients
from shardeddp.tensor.shard_tensor import ShardTensor, gradients_complete
from shardeddp.tensor.unsharded import accumulate_in
from shardeddp.torch_private import without_torch_function
from shardeddp.wrap.flat_buffers import UnitPlan, require_gradients
from shardeddp.wrap.tree import ParameterSpec, has_forward

# -- Unit: parameters gathered together


@dataclass(kw_only=True, eq=False)
class _Registration:
    """Registration of a parameter of the unit in a module."""

    module: nn.Module
    attribute: str
    sharded: ShardTensor
    when_sharded: torch.Tensor
    """Tensor registered while the unit is sharded; a whole one during ``summon_full_params``."""

    unsharded: torch.Tensor | None
    """Tensor registered while the unit is unsharded: the parameter, or its wrapper while usable.

    None: ``when_sharded``, because the module's forward computes with forward copies.
    """

    layer: nn.Module | None
    """Split layer whose forward alone computes with ``unsharded``; None: no such limit."""

    layer_runs: bool
    """Whether the forward of ``layer`` runs; True without one."""


class Unit:
    """Parameters of one unit, with the operations that gather, release and reduce them.

    Its callers decide when: the runtime gathers and releases it, the order agreement does if ranks
    use different units (``order.py``), the reducer reduces its gradients (``reducer.py``), and
    ``summon_full_params`` borrows its parameters (``summon.py``). They change its state by the
    transitions of ``states.py``. Two operations change none: reductions, and a write to a parameter
    outside of a step, which refills gathered memory that users hold (``FlatGroup.refill_views``).
    """

    def __init__(self, plan: UnitPlan, mesh: Mesh) -> None:
        self.spec, self._plan, self._mesh = plan.spec, plan, mesh
        self.label = plan.spec.label
        """Name of the unit in messages."""

        self.state = UnitState.SHARDED
        # Whole parameters that modules hold during summon_full_params.
        self._summoned: list[torch.Tensor] = []
        self._summoned_version = 0
        self.registration_pending = False
        """Whether other code had replaced parameters at the last change of state."""

        self.groups = _make_groups(plan, mesh)
        self._registrations: list[_Registration] = []
        self._copies: dict[int, tuple[nn.Module, ForwardCopies]] = {}
        # Registrations and copies that compute with wrappers of parameters: the buffer that makes
        # them, and the index of the parameter in it.
        self._wrapped: list[tuple[_Registration, GatheredBuffer, int]] = []
        self._wrapped_copies: list[tuple[ForwardCopies, str, GatheredBuffer, int]] = []
        for group in self.groups:
            for index, (parameter, sharded, unsharded) in enumerate(
                zip(group.planned.parameters, group.sharded, group.unsharded, strict=True)
            ):
                self._add(parameter, group.buffer, index, sharded, unsharded)
        self._handle: list[StreamHandle] = []  # all-gathers in flight -> wait()
        self._by_layer: dict[int, list[_Registration]] = {}
        for registration in self._registrations:
            register(registration.module, registration.attribute, registration.sharded)
            if registration.layer is not None:
                self._by_layer.setdefault(id(registration.layer), []).append(registration)

    def _add(
        self,
        parameter: ParameterSpec,
        buffer: GatheredBuffer,
        index: int,
        sharded: ShardTensor,
        unsharded: nn.Parameter,
    ) -> None:
        """Add the registrations of a parameter in all of its modules."""
        for module, attribute in parameter.registrations:
            copies = copies_of(module) if parameter.is_forward_copy else None
            layer = _layer_of(parameter, module) if copies is None else None
            registration = _Registration(
                module=module,
                attribute=attribute,
                sharded=sharded,
                when_sharded=sharded,
                unsharded=unsharded if copies is None else None,
                layer=layer,
                layer_runs=layer is None,
            )
            self._registrations.append(registration)
            if copies is None:
                if parameter.is_wrapped:
                    self._wrapped.append((registration, buffer, index))
            else:
                split = parameter.distribution
                wrapper = None if split is None else split.wrapper
                copies.hold(attribute, sharded, unsharded, parameter.compute_in, wrapper)
                if wrapper is not None:
                    self._wrapped_copies.append((copies, attribute, buffer, index))
                if len(parameter.registrations) > 1:
                    # Gradients of several modules' uses add up in the parameter's dtype.
                    accumulate_in(unsharded, parameter.dtype)
                self._copies[id(module)] = module, copies

    @property
    def stale(self) -> bool:
        """Whether the parameters have changed since they were last gathered."""
        return any(group.stale for group in self.groups)

    @property
    def needs_all_gather(self) -> bool:
        """Whether unsharding has to fill a buffer."""
        return any(group.needs_all_gather for group in self.groups)

    @property
    def is_viewed(self) -> bool:
        """Whether code outside of the engine refers to gathered memory on this rank."""
        return any(group.buffer.is_viewed() for group in self.groups)

    @property
    def has_views(self) -> bool:
        """Whether ``is_viewed`` was True on any rank at the end of the last backward."""
        return any(group.has_views for group in self.groups)

    def note_views(self, has_views: bool) -> None:
        """Set ``has_views`` to the maximum over all ranks."""
        for group in self.groups:
            group.note_views(has_views)

    def costs(self) -> list[GroupCost]:
        """Return the costs of the flat buffers; passthrough parameters count as if in buffers."""
        return [
            *(group.planned.cost(trainable=group.trainable) for group in self.groups),
            *(
                planned.cost(trainable=require_gradients(planned.parameters))
                for planned in self._plan.passthrough
            ),
        ]

    def held(self) -> HeldMemory:
        """Return the bytes now held on the device, passthrough parameters included."""
        own = [it.parameter for it in self.spec.passthrough]
        grads = [it for it in stored_gradients(own) if it is not None]
        passed = HeldMemory(
            main_nbytes=sum(it.nbytes for it in own),
            gradient_nbytes=sum(it.nbytes for it in grads),
        )
        return sum((group.held() for group in self.groups), passed)

    def unshard(self) -> None:
        """Allocate the gathered buffers and issue the all-gathers; :meth:`wait` completes it."""
        if self._summoned and self._version_of_summoned() != self._summoned_version:
            raise RuntimeError(
                f"parameters of unit {self.label} were written to inside of summon_full_params and "
                f"the unit is run before the context has ended, which brings them to the shards. "
                f"Run the model after it"
            )
        self._move("unshard")
        self._handle = []
        try:
            for group in self.groups:
                self._handle.append(group.unshard())
        except BaseException as error:
            # After a transfer error no collective completes, so none is waited for.
            if not is_transfer_error(error):
                self.abandon()
            raise

    def abandon(self) -> None:
        """Complete and release what a failed :meth:`unshard` has issued: memory may have run out."""
        self._finish_all_gathers()
        for group in self.groups:
            if group.buffer.state is not BufferState.RELEASED:
                group.release(before_backward=False)
        self._move("abandon")

    def wait(self) -> None:
        """Complete the all-gathers and register the unsharded parameters with the modules."""
        self._move("wait")
        self._finish_all_gathers()
        for group in self.groups:
            group.activate()
        for registration, buffer, index in self._wrapped:
            registration.unsharded = buffer.wrapped[index]
        for copies, attribute, buffer, index in self._wrapped_copies:
            copies.compute_with(attribute, buffer.wrapped[index])
        self._register_unsharded()
        for module, copies in self._copies.values():
            copies.activate(module)

    def _register_unsharded(self) -> None:
        """Register the unsharded parameters with the modules; refuse new parameters there."""
        for registration in self._registrations:
            found = registration.module._parameters.get(registration.attribute)
            if found is None:
                found = self._moved(registration)
            if registration.unsharded is None or found is registration.unsharded:
                continue
            if found is registration.when_sharded:
                if registration.layer_runs:
                    register(registration.module, registration.attribute, registration.unsharded)
            elif found is None or _is_temporary(found, registration.when_sharded):
                self.registration_pending = True
            else:
                raise ConfigurationError(
                    f"parameter {registration.sharded.spec.fqn} "
                    f"({type(registration.module).__name__}.{registration.attribute} of unit {self.label}) was "
                    f"replaced after sharding: expected the parameter that was there at setup. "
                    f"Change a parameter's values in place (copy_) instead of assigning another "
                    f"one; replace or tie parameters before the Trainer sets the model up"
                )

    def refresh(self) -> None:
        """Gather changed parameters into buffers that are already in use."""
        self._move("refresh")
        self._handle = [group.unshard() for group in self.groups]
        self._finish_all_gathers()
        for _, copies in self._copies.values():
            copies.note_all_gather()

    def make_unsharded(self) -> None:
        """Go through the states up to unsharded: :meth:`unshard`, :meth:`wait`, or neither."""
        if self.state is UnitState.SHARDED:
            self.unshard()
        if self.state is UnitState.UNSHARDING:
            self.wait()

    def renew_views(self) -> None:
        """Gather into memory that views hold; a collective. A sharded unit is sharded afterwards."""
        was_sharded = self.state is UnitState.SHARDED
        self.make_unsharded()
        if self.stale:
            self.refresh()
        if was_sharded:
            self.reshard()

    def unshard_with_others(self) -> None:
        """Gather all of the unit with ranks that need it, even if this rank holds it already.

        The unit is unsharded afterwards.
        """
        if self.state is UnitState.UNSHARDING:
            self.wait()
        for group in self.groups:
            group.forget()
        if self.state is UnitState.SHARDED:
            self.make_unsharded()
        else:
            self.refresh()

    def reshard(self, before_backward: bool = False) -> None:
        """Register the sharded parameters with the modules and release the gathered buffers.

        ``before_backward``: the unit will be gathered again for the backward of its last forward.
        """
        self._move("reshard")
        self.restore_registration()
        for registration, buffer, index in self._wrapped:
            registration.unsharded = buffer.parameters[index]
        for module, copies in self._copies.values():
            copies.deactivate(module)
        for group in self.groups:
            group.release(before_backward)

    def restore_registration(self) -> None:
        """Register the parameters that match the unit's state with its modules.

        ``torch.func.functional_call`` restores the parameters that it found, which may be those of
        a former state.
        """
        self.registration_pending = False
        self._restore(self._registrations)

    def _restore(self, registrations: Iterable[_Registration]) -> None:
        for registration in registrations:
            wanted, other = registration.when_sharded, registration.unsharded
            if other is not None and self.state is UnitState.UNSHARDED and registration.layer_runs:
                wanted, other = other, wanted
            found = registration.module._parameters.get(registration.attribute)
            if found is None:
                found = self._moved(registration)
            if other is not None and found is other:
                register(registration.module, registration.attribute, wanted)
            elif found is not wanted:
                self.registration_pending = True

    def split_layers(self) -> list[nn.Module]:
        """Return the modules whose forwards alone compute with some of the parameters.

        Experts of other ranks are left out: they have no elements, and are not called.
        """
        return [
            layer
            for registrations in self._by_layer.values()
            if (layer := registrations[0].layer) is not None
            and any(
                registration.unsharded is not None and registration.unsharded.numel()
                for registration in registrations
            )
        ]

    def set_running(self, layer: nn.Module, runs: bool) -> None:
        """Register the parameters of a split layer, as its forward runs or not."""
        registrations = self._by_layer.get(id(layer), [])
        for registration in registrations:
            registration.layer_runs = runs
        self._restore(registrations)

    def _moved(self, registration: _Registration) -> torch.Tensor | None:
        """Find a parameter under a new module or name in the unit, and move its registration there.

        Pruning and parametrizations register a parameter elsewhere and compute with it from there.
        None: the parameter was removed, or is registered outside of the unit.
        """
        places = {(id(each.module), each.attribute) for each in self._registrations}
        for module in self.spec.module.modules():
            for attribute, other in module._parameters.items():
                is_own = other is not None and (
                    other is registration.when_sharded or other is registration.unsharded
                )
                if is_own and (id(module), attribute) not in places:
                    registration.module, registration.attribute = module, attribute
                    return other
        return None

    def tensors_when_sharded(self) -> list[tuple[nn.Module, torch.Tensor]]:
        """Return modules with their tensors while the unit is sharded; an entry per parameter."""
        return [
            (registration.module, registration.when_sharded) for registration in self._registrations
        ]

    def register_sharded(self, sharded: ShardTensor, tensor: torch.Tensor) -> None:
        """Let modules hold another tensor for a sharded parameter while the unit is sharded.

        To undo this, pass the sharded parameter itself.
        """
        for registration in self._registrations:
            if registration.sharded is sharded:
                former, registration.when_sharded = registration.when_sharded, tensor
                if registration.module._parameters.get(registration.attribute) is former:
                    register(registration.module, registration.attribute, tensor)
        self._summoned = [
            registration.when_sharded
            for registration in self._registrations
            if not isinstance(registration.when_sharded, ShardTensor)
        ]
        self._summoned_version = self._version_of_summoned()

    def overrides(self) -> Iterator[tuple[torch.Tensor, ShardTensor]]:
        """Yield the tensors that modules hold for sharded parameters, each with its parameter."""
        for registration in self._registrations:
            yield registration.when_sharded, registration.sharded
            if registration.unsharded is not None:
                yield registration.unsharded, registration.sharded

    @property
    def is_overridden(self) -> bool:
        """Whether modules hold whole parameters during ``summon_full_params``."""
        return bool(self._summoned)

    def dissolve(self) -> None:
        """Dissolve the unit: modules keep sharded parameters, each with a copy of its shard."""
        self.keep_writes()
        memory: dict[int, torch.Tensor] = {}  # parameters that share memory go on sharing it
        for group in self.groups:
            for spec, sharded in zip(group.planned.parameters, group.sharded, strict=True):
                local = memory.setdefault(spec.memory, sharded.raw_local.clone())
                sharded.leave_unit(local)
        # Freed here or with their last views. Compute allocated shards; of gathers that read them
        # it has waited for the last. The gather stream allocated retained buffers and may reuse
        # them: it follows compute's reads first.
        self._mesh.gather_stream.follow_compute()
        self.groups, self._registrations = [], []
        self._copies, self._by_layer = {}, {}
        self._wrapped, self._wrapped_copies = [], []

    def _version_of_summoned(self) -> int:
        return sum(each._version for each in self._summoned)

    def reduce_gradients(self, over: ReduceOver) -> list[Reduction]:
        """Pack the unsharded gradients and issue their reduction; legal in any state."""
        return [group.gradients.reduce(over) for group in self.groups if group.was_trained]

    def install_gradients(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` of the sharded parameters that any rank has used; in `used()` order."""
        flags = iter(used)
        for group in self.groups:
            group.install_gradients([next(flags) for _ in group.sharded])

    def unsharded_parameters(self) -> list[nn.Parameter]:
        """Return the unsharded parameters of all groups, usable or not."""
        return [parameter for group in self.groups for parameter in group.unsharded]

    def used(self) -> list[bool]:
        """Return per parameter whether this rank has a gradient, of this backward or before."""
        return [flag for group in self.groups for flag in group.gradients.used()]

    def run_gradient_hooks(self, indices: Iterable[int]) -> None:
        """Call users' gradient hooks of the parameters that got a gradient in the backward."""
        sharded = self.sharded_parameters()
        gradients_complete([sharded[index] for index in sorted(indices)])

    def sharded_parameters(self) -> list[ShardTensor]:
        """Return the sharded parameters, in the order of the unsharded ones."""
        return [each for group in self.groups for each in group.sharded]

    def begin_backward(self) -> None:
        """Reset the counts of used parameters and forward copies for a backward."""
        for _, copies in self._copies.values():
            copies.begin_backward()
        for group in self.groups:
            group.begin_backward()

    def keep_writes(self) -> None:
        """Copy in-place writes to main shards; see :meth:`FlatGroup.keep_writes`."""
        for group in self.groups:
            group.keep_writes()

    def add_up_gradients(self) -> None:
        """Let autograd sum gradients of several backwards in their reduce dtype."""
        for group in self.groups:
            group.gradients.add_up()

    def trainable_indices(self) -> set[int]:
        """Return the indices of the unsharded parameters that require a gradient now."""
        with without_torch_function():
            return {
                i
                for i, parameter in enumerate(self.unsharded_parameters())
                if parameter.requires_grad
            }

    def _finish_all_gathers(self) -> None:
        with during(self._mesh.run.clock, "gather", self.label):
            for handle in self._handle:
                handle.wait()
            self._handle = []
            for group in self.groups:
                group.finish_copies()

    def _move(self, verb: str) -> None:
        self.state = state_after(UNIT_VERBS, verb, self.state, self)

    @override
    def __str__(self) -> str:
        return f"unit {self.label}"


def _is_temporary(found: torch.Tensor | None, sharded: torch.Tensor) -> bool:
    """Return whether a module's tensor is temporary, as under ``torch.func.functional_call``.

    A plain ``nn.Parameter``, or one that requires a gradient, is a permanent replacement.
    """
    if found is None or found.device != sharded.device:
        return False
    return not (
        isinstance(found, nn.Parameter)
        and (found.requires_grad or not isinstance(found, ShardTensor))
    )


def _layer_of(parameter: ParameterSpec, module: nn.Module) -> nn.Module | None:
    """Return the split layer whose forward alone computes with a parameter of a module."""
    layer = None if parameter.distribution is None else parameter.distribution.layer
    is_shared = len(parameter.registrations) > 1
    return module if layer is not None and is_shared and has_forward(module) else layer


def _make_groups(plan: UnitPlan, mesh: Mesh) -> list[FlatGroup]:
    groups: list[FlatGroup] = []
    for planned in plan.groups:
        own = mesh.experts if planned.parameters[0].is_of_experts else mesh
        assert own is not None
        lender = None if planned.lender is None else groups[planned.lender]
        groups.append(FlatGroup(planned, own, lender))
    return groups


def register(module: nn.Module, attribute: str, parameter: nn.Parameter | torch.Tensor) -> None:
    """Register a parameter as ``module.attribute``."""
    if type(module).__setattr__ is _MODULE_SETATTR:
        module._parameters[attribute] = parameter  # type: ignore[assignment]
    else:
        # Modules that keep lists of their own weights update them in __setattr__ (nn.LSTM).
        setattr(module, attribute, parameter)


_MODULE_SETATTR: Any = nn.Module.__setattr__
