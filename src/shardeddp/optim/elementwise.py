"""Element-wise optimizers: they step on this rank's elements, in plain 1D tensors."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import optim
from torch.utils.weak import WeakTensorKeyDictionary

from shardeddp.engine.storage import empty_on_host
from shardeddp.optim.scope import SCALAR_STATES, scope_of
from shardeddp.optim.segments import (
    Segment,
    Slices,
    chains,
    gradient_of,
    join,
    references,
    signature,
    split,
)
from shardeddp.optim.swap import Gradients, OutsideStates, State, SwappedStep
from shardeddp.tensor.shard_tensor import ShardTensor, is_same_memory, local_or_whole
from shardeddp.tensor.unsharded import outside_of

# -- Copies in host memory, for an offloaded optimizer


class HostCopies:
    """Copies in host memory: gradients are copied there before a step, parameters back after it.

    DeepSpeed's ZeRO-Offload (https://arxiv.org/abs/2101.06840) keeps the states there in the same
    way. Copies are pinned if a device copies from them, and all copies of a step are enqueued
    before one wait for them.
    """

    def __init__(self) -> None:
        self._segments: list[
            tuple[Segment, torch.Tensor]
        ] = []  # with their gradients on the device
        # Versions of local parameters at the last update of each copy.
        self._versions: dict[torch.Tensor, list[int]] = {}

    def tensor_for(self, segment: Segment) -> torch.Tensor:
        """Return the tensor stepped on for a segment; the same until the segment changes."""
        if segment.tensor is segment.shard:
            return empty_on_host(segment.shard, segment.shard.device)
        return segment.tensor

    def follow(self, segments: Sequence[tuple[Segment, torch.Tensor]]) -> None:
        """Allocate gradients for the tensors of these segments, and of no others."""
        self._segments = list(segments)
        copies = {segment.tensor for segment, _ in segments}
        self._versions = {
            copy: versions for copy, versions in self._versions.items() if copy in copies
        }
        for segment, gradient in segments:
            if segment.tensor.grad is None:
                segment.tensor.grad = empty_on_host(gradient, gradient.device)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Copy the values and gradients of a step to the host."""
        for segment, gradient in self._segments:
            copy = segment.tensor
            if copy.grad is not None:
                copy.grad.copy_(gradient, non_blocking=True)
            versions = _versions(segment)
            if self._versions.get(copy) != versions:  # changed by something else than a step
                copy.copy_(segment.shard, non_blocking=True)
                self._versions[copy] = versions
        for device in {
            segment.shard.device for segment, _ in self._segments if segment.shard.is_cuda
        }:
            torch.cuda.current_stream(device).synchronize()

    @torch.no_grad()
    def end_step(self) -> None:
        """Copy the new values to the shards."""
        for segment, _ in self._segments:
            # The copy reads host memory in compute's stream. The next `begin_step` synchronizes
            # that stream before the optimizer writes there again; memory that `follow` drops
            # meanwhile is pinned, and its allocator waits for the copy before it is used anew.
            segment.shard.copy_(segment.tensor, non_blocking=True)
            # `parameters_changed` counts one more version.
            self._versions[segment.tensor] = [version + 1 for version in _versions(segment)]


def _versions(segment: Segment) -> list[int]:
    return [shard._version for shard in segment.shards]


# -- LocalStep: an element-wise optimizer on this rank's elements
#
# Its update of an element depends on that element alone, so all ranks' steps together are the step
# on the parameters. It steps on the *local parameter* of a sharded one, a 1D view of the main
# shard, or on a *segment* of neighbours (`segments.py`), there or in a copy in host memory. A step
# on a thousand small tensors costs as much as its calls, and a segment is one call.

_MOST_PATIENCE = 256

# Optimizers with a fused kernel for the CPU, several times as fast as their other kernels there.
_FUSED_ON_HOST = {optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad}


class LocalStep(SwappedStep):
    """Lets an element-wise optimizer step on local parameters and segments of them.

    With ``offload`` it steps in host memory, on copies, and keeps the states there.
    """

    _states: LocalStates

    def __init__(self, optimizer: optim.Optimizer, offload: bool = False) -> None:
        self._copies = HostCopies() if offload else None
        self._slices = Slices()
        self._seen: list[Sequence[object]] = []  # sources of the tensors below
        self._tensors: list[list[torch.Tensor]] = []  # tensors of the step, by group
        self._marked: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their parameters
        self._joins = True  # whether neighbours were joined in the last arrangement
        self._patience = 1  # steps between two attempts to join segments that were left apart
        self._may_join = False  # neighbours are apart that a later attempt may join
        self._waited = 0  # steps since the last attempt
        # Steps of torch's own are known: a state is a tensor with one element per element, or one
        # number per parameter. Others may keep anything, and skip tensors without requires_grad.
        self._is_known = scope_of(type(optimizer)) == "element"
        super().__init__(optimizer)

    def _forget(self) -> None:
        self._copies = None if self._copies is None else HostCopies()
        self._seen, self._tensors, self._marked = [], [], []

    def _pre_step(
        self, groups: list[list[torch.Tensor]], gradients: list[Gradients]
    ) -> list[list[torch.Tensor]]:
        if len(self._tensors) != len(groups):
            self._prefer_fused()
        parts = [[local_or_whole(gradient) for gradient in each] for each in gradients]
        seen = self._made_from(groups, parts)
        if self._is_to_be_arranged(seen):
            self._seen = []  # until it has succeeded
            self._arrange(groups, parts)
            self._seen = seen
        if self._copies is not None:
            self._copies.begin_step()
        if not self._is_known:
            for tensor, parameter in self._marked:
                tensor.requires_grad_(parameter.requires_grad)
        return [list(each) for each in self._tensors]

    def _post_step(self) -> None:
        if self._copies is not None:
            self._copies.end_step()

    def _release(self) -> None:
        for tensor, _ in self._marked:
            tensor.requires_grad_(False)

    def _outside(self, optimizer: optim.Optimizer) -> LocalStates:
        return LocalStates(optimizer, self._copies, self._slices)

    # -- Tensors of a step
    #
    # In the steady state every parameter, gradient and segment is the same object as in the step
    # before, and following a thousand parameters costs a few thousand comparisons.

    def _made_from(
        self, groups: list[list[torch.Tensor]], parts: list[Gradients]
    ) -> list[Sequence[object]]:
        """Return everything that determines the tensors of a step, except states."""
        shards = [
            [it.raw_local if isinstance(it, ShardTensor) else it for it in each] for each in groups
        ]
        options = [group.get("differentiable") for group in self._optimizer.param_groups]
        # Parts of gradients, and not the gradients themselves: see `GroupGradients`. Those of plain
        # parameters are new in each backward, and would be held until the next step.
        known = [
            [
                part if isinstance(it, ShardTensor) else part is not None
                for it, part in zip(*each, strict=True)
            ]
            for each in zip(groups, parts, strict=True)
        ]
        return [*shards, *known, [self._states, *options]]

    def _is_to_be_arranged(self, seen: list[Sequence[object]]) -> bool:
        """Return whether to arrange the tensors again; sets whether neighbours are joined then.

        A segment whose states are read as soon as it has been joined (by a callback that logs
        states in every step) waits for twice as many steps each time, as does a refused join.
        """
        self._waited += 1
        if not (len(seen) == len(self._seen) and all(map(_same_objects, seen, self._seen))):
            self._joins, self._patience = True, 1
            return True
        if self._states.changed:
            self._joins = self._waited > self._patience
            self._patience = 1 if self._joins else min(2 * self._patience, _MOST_PATIENCE)
            return True
        self._joins = self._may_join and self._waited >= self._patience
        return self._joins

    def _arrange(self, groups: list[list[torch.Tensor]], parts: list[Gradients]) -> None:
        """Find the segments for the step, and give them their gradients."""
        parts = [
            [_localized(*pair) for pair in zip(*each, strict=True)]
            for each in zip(groups, parts, strict=True)
        ]
        found = [
            chains(parameters, known)
            if self._joins
            and self._is_known
            and not group.get("differentiable")
            # Torch steps on a parameter as often as it is in the group, with a warning.
            and len({*map(id, parameters)}) == len(parameters)
            else [[index] for index in range(len(parameters))]
            for group, parameters, known in zip(
                self._optimizer.param_groups, groups, parts, strict=True
            )
        ]
        are_apart = self._states.arrange(groups, found)
        self._may_join = are_apart if self._joins else self._is_known
        if self._joins:
            self._waited = 0
            if are_apart:
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._tensors, self._marked = [], []
        stepped: list[tuple[Segment, torch.Tensor]] = []
        for parameters, known, each in zip(groups, parts, found, strict=True):
            tensors: list[torch.Tensor] = []
            for members in (
                segment for it in each for segment in self._states.segments(parameters, it)
            ):
                parameter, gradients = parameters[members[0]], [known[it] for it in members]
                if not isinstance(parameter, ShardTensor):
                    tensors.append(parameter)
                    continue
                segment = self._states.segment_of(parameter)
                tensors.append(segment.tensor)
                self._marked += [] if self._is_known else [(segment.tensor, parameter)]
                if (gradient := gradient_of(gradients)) is not None:
                    stepped.append((segment, gradient))
            self._tensors.append(tensors)
        if self._copies is not None:
            self._copies.follow(stepped)
        else:
            for segment, gradient in stepped:
                segment.tensor.grad = gradient

    def _prefer_fused(self) -> None:
        """Use torch's fused host kernel for an offloaded optimizer, unless the user chose one."""
        for group in self._optimizer.param_groups:
            is_unset = (
                group.get("foreach") is None
                and not group.get("fused")
                and not group.get("differentiable")
            )
            taken_off = self._copies is not None or any(
                parameter.device != parameter.raw_local.device
                for parameter in group["params"]
                if isinstance(parameter, ShardTensor)
            )
            if type(self._optimizer) in _FUSED_ON_HOST and is_unset and taken_off:
                group["fused"] = True


def _localized(parameter: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor | None:
    """Return this rank's part of a gradient that a user has assigned whole."""
    if not isinstance(parameter, ShardTensor) or part is None or part.shape != parameter.shape:
        return part
    return part if part.shape == parameter.raw_local.shape else parameter.spec.localize(part)


def _same_objects(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


# -- LocalStates: optimizer states by sharded parameter


class LocalStates(OutsideStates):
    """States of an optimizer by sharded parameter, held by segment.

    Access to the state of a parameter finds one of its own: its segment is divided into parameters
    then, and joined again before the next step, unless the state differs from the neighbours' by
    then, or is still held.
    """

    def __init__(
        self, optimizer: optim.Optimizer, copies: HostCopies | None, slices: Slices
    ) -> None:
        super().__init__(optimizer)
        self._slices = slices
        self._copies = copies
        self._segments: dict[torch.Tensor, Segment] = {}  # by local parameter
        self._of_aliases = WeakTensorKeyDictionary()  # their local parameters
        self.changed = False
        """True if segments have been divided since they were arranged."""

    def __getitem__(self, parameter: Any) -> State:
        if not isinstance(parameter, torch.Tensor):
            return self.inside[parameter]
        parameter = outside_of(parameter)
        return _StateView(self.inside[self._alone(parameter)], parameter)

    def __setitem__(self, parameter: Any, state: Mapping[str, Any]) -> None:
        self.take(parameter, dict(state))

    def take(self, parameter: Any, state: State) -> None:
        """Take a state, and leave none: each former tensor is released before the next is made."""
        if not isinstance(parameter, torch.Tensor):
            self.inside[parameter] = state
            return
        parameter = outside_of(parameter)
        local = parameter.raw_local if isinstance(parameter, ShardTensor) else parameter
        device = local.device if self._copies is None else torch.device("cpu")
        self.inside[self._alone(parameter)] = {
            name: _as_local(name, state.pop(name), parameter, device) for name in [*state]
        }

    def __delitem__(self, parameter: Any) -> None:
        known = isinstance(parameter, torch.Tensor)
        del self.inside[self._alone(outside_of(parameter)) if known else parameter]

    def __contains__(self, parameter: object) -> bool:
        if not isinstance(parameter, torch.Tensor):
            return parameter in self.inside
        parameter = outside_of(parameter)
        if isinstance(parameter, ShardTensor):
            return self.segment_of(parameter).tensor in self.inside
        return parameter in self.inside

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Give a copy or a pickle of the optimizer states by parameter, as any optimizer has."""
        states = ((parameter, dict(state)) for parameter, state in self.items())
        return defaultdict, (dict,), None, None, states

    # -- Segments

    def segment_of(self, parameter: ShardTensor) -> Segment:
        """Return the segment that a parameter is in now."""
        shard = self._local(parameter)
        if shard not in self._segments:
            self._segments[shard] = Segment([shard])
        return self._segments[shard]

    def _local(self, parameter: ShardTensor) -> torch.Tensor:
        """Return the local parameter; of an alias, one of its own, as it has a state of its own.

        ``nn.Parameter(weight)`` is an alias, which parametrizations register in its place.
        """
        if parameter.origin is parameter:
            return parameter.raw_local
        found, own = parameter.raw_local, self._of_aliases.get(parameter)
        if own is None or not is_same_memory(own, found):
            own = self._of_aliases[parameter] = found.detach()
        return own

    def segments(self, parameters: Sequence[torch.Tensor], chain: Sequence[int]) -> list[list[int]]:
        """Divide a chain of parameters into those of one segment each."""
        if len(chain) == 1:
            return [list(chain)]
        segments = [self.segment_of(parameters[index]) for index in chain]  # type: ignore[arg-type]
        grouped = groupby(zip(segments, chain, strict=True), key=lambda pair: id(pair[0]))
        return [[index for _, index in group] for _, group in grouped]

    def arrange(
        self, groups: Sequence[Sequence[torch.Tensor]], found: Sequence[Sequence[Sequence[int]]]
    ) -> bool:
        """Divide segments that are in no chain; join neighbours in chains with equal signatures.

        Returns:
            True if neighbours in a chain are left apart because of their states.
        """
        are_apart = False
        together = [
            [it for index in indices if isinstance(it := parameters[index], ShardTensor)]
            for parameters, each in zip(groups, found, strict=True)
            for indices in each
        ]
        numbers = {self._local(it): number for number, each in enumerate(together) for it in each}
        for segment in set(self._segments.values()):
            segment.tensor.grad = None  # `begin_step` has waited for the last copy to it
            pairs = pairwise(map(numbers.get, segment.shards))
            self._divide(segment, [place for place, (a, b) in enumerate(pairs, 1) if a != b])
        for each in together:
            if len(segments := list(dict.fromkeys(map(self.segment_of, each)))) > 1:
                are_apart |= self._join(segments)
        for segment in {self.segment_of(it) for each in together for it in each}:
            copies = self._copies
            self._give(segment, segment.shard if copies is None else copies.tensor_for(segment))
        self.changed = False
        return are_apart

    def _alone(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a parameter, which is stepped on by itself from here on."""
        if not isinstance(parameter, ShardTensor):
            return parameter
        segment = self.segment_of(parameter)
        self._divide(segment, range(1, len(segment.shards)))
        return self.segment_of(parameter).tensor

    def _divide(self, segment: Segment, cuts: Sequence[int]) -> None:
        if not cuts:
            return
        self.changed = True
        for part, state in split(
            segment, self.inside.pop(segment.tensor, None), cuts, self._slices
        ):
            self._add(part, state)

    def _join(self, segments: Sequence[Segment]) -> bool:
        """Join neighbours with equal signatures; return whether the state of one forbids that."""
        signatures: list[Any] = []
        for segment in segments:
            known = segment.tensor in self.inside
            held = references(self.inside, segment.tensor) if known else []
            state = self.inside.get(segment.tensor)
            signatures.append(signature(segment, state, held, self._slices))

        for common, pairs in groupby(zip(signatures, segments, strict=True), key=itemgetter(0)):
            parts = [(segment, self.inside.get(segment.tensor)) for _, segment in pairs]
            if common is not None and len(parts) > 1:
                joined = join(parts, self._slices)
                for segment, _ in parts:
                    self.inside.pop(segment.tensor, None)
                self._add(*joined)
        return None in signatures

    def _add(self, segment: Segment, state: State | None) -> None:
        self._segments.update(dict.fromkeys(segment.shards, segment))
        if state is not None:
            self.inside[segment.tensor] = state

    def _give(self, segment: Segment, tensor: torch.Tensor) -> None:
        if tensor is not segment.tensor:
            state = self.inside.pop(segment.tensor, None)
            segment.step_on(tensor)
            self._add(segment, state)


class _StateView(dict[str, Any]):
    """One parameter's states as sharded tensors, always up to date.

    Assignments and removals reach the optimizer. It is a dict because users expect one
    (``isinstance``, a copy, a pickle). A key that is the user's own has no parameter.
    """

    def __init__(self, state: Mapping[str, Any], parameter: torch.Tensor | None = None) -> None:
        super().__init__()
        self._state = state
        self._parameter = parameter
        self._seen: dict[str, Any] = {}  # sources of the present content
        self._follow()

    def _follow(self) -> None:
        """Take over changes that the optimizer has made since."""
        seen, self._seen = self._seen, dict(self._state)
        for name in [name for name in super().__iter__() if name not in self._seen]:
            super().__delitem__(name)
        for name, value in self._seen.items():
            if name not in seen or seen[name] is not value:
                super().__setitem__(name, _as_sharded(value, self._parameter))

    def __getitem__(self, name: str) -> Any:
        self._follow()
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        self._follow()
        return super().__iter__()

    def __len__(self) -> int:
        self._follow()
        return super().__len__()

    def __repr__(self) -> str:
        return repr(dict(self))

    def __setitem__(self, name: str, value: Any) -> None:
        self._follow()
        super().__setitem__(name, value)
        if isinstance(self._state, dict):
            former = self._state.get(name)
            device = former.device if isinstance(former, torch.Tensor) else None
            self._state[name] = _as_local(name, value, self._parameter, device)
            self._seen[name] = self._state[name]

    def __delitem__(self, name: str) -> None:
        self._follow()
        super().__delitem__(name)
        if isinstance(self._state, dict):
            del self._state[name]
            del self._seen[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # `torch.load(weights_only=True)` accepts this as a dict.
        return OrderedDict, (), None, None, iter(self.items())

    # A dict's own versions of these bypass those above.
    get = MutableMapping.get  # type: ignore[assignment]
    keys = MutableMapping.keys  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    __contains__ = MutableMapping.__contains__
    __eq__ = MutableMapping.__eq__  # type: ignore[assignment]
    clear = MutableMapping.clear
    pop = MutableMapping.pop  # type: ignore[assignment]
    popitem = MutableMapping.popitem
    setdefault = MutableMapping.setdefault  # type: ignore[assignment]
    update = MutableMapping.update  # type: ignore[assignment]


def _as_sharded(value: Any, parameter: torch.Tensor | None) -> Any:
    """Return a state of a local parameter as a state of the sharded parameter."""
    if (
        not isinstance(parameter, ShardTensor)
        or not isinstance(value, torch.Tensor)
        or isinstance(value, ShardTensor)
    ):
        return value
    is_local = value.dim() == 1 and value.numel() == parameter.spec.interval.numel
    return ShardTensor(value, parameter.spec) if is_local else value


def _as_local(
    name: str, value: Any, parameter: torch.Tensor | None, device: torch.device | None = None
) -> Any:
    """Return a state of a sharded parameter, sharded or full, as a state of its local parameter.

    It comes to the device on which the optimizer steps, if one is given.
    """
    if (
        not isinstance(parameter, ShardTensor)
        or not isinstance(value, torch.Tensor)
        or name in SCALAR_STATES
    ):
        return value
    if isinstance(value, ShardTensor):
        if value.shape == parameter.shape and not value.spec.lies_like(parameter.spec):
            operation = f"{name}, kept from before the parameter was sharded anew, of"
            return value.part_for(parameter.spec, operation).to(device, copy=True)
        return value.to_local().to(device)
    if value.shape == parameter.shape:
        return parameter.spec.localize(value).to(device, copy=True)
    return value
