"""Swapped step: while it steps, an optimizer holds plain tensors instead of sharded parameters."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import optim

from shardeddp.engine.runtime import parameters_changed
from shardeddp.optim.late_parameters import average_late_gradients
from shardeddp.optim.scope import scope_of
from shardeddp.tensor.backward import stored_gradients
from shardeddp.tensor.shard_tensor import (
    ShardTensor,
    increment_versions,
    keep_writes,
    unreduced_of,
)
from shardeddp.tensor.unsharded import UnshardedBase, outside_of
from shardeddp.torch_private import never_traced

State = dict[str, Any]
Gradients = list[torch.Tensor | None]

outside_of_compiled_steps = never_traced(
    "ShardedDP prepares or completes a step of this optimizer here, outside of the graph. Compile "
    "optimizer.step without fullgraph=True"
)
"""Decorator for hooks of steps, which ``torch.compile(optimizer.step)`` would trace."""


class OutsideStates(MutableMapping[torch.Tensor, State]):
    """Optimizer states as seen outside of a step: by sharded parameter, as sharded tensors.

    A key that is no tensor belongs to the optimizer: its state is kept as it is.
    """

    inside: MutableMapping[Any, State]
    """The optimizer's own states, by the plain tensor that it steps on."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.inside = defaultdict(dict)

    def enter(self) -> None:
        """Give the optimizer its own states for a step."""
        self._optimizer.state = self.inside  # type: ignore[assignment]

    def leave(self) -> None:
        """Take the optimizer's own states back after a step, and show it these."""
        self.inside = self._optimizer.state
        self._optimizer.state = self  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        others = [key for key in self.inside if not isinstance(key, torch.Tensor)]
        return chain(filter(self.__contains__, self._parameters()), others)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _parameters(self) -> list[torch.Tensor]:
        return [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]

    @abstractmethod
    def take(self, parameter: Any, state: State) -> None:
        """Take a state from before the parameter was sharded anew; a collective of all ranks.

        Its tensors are released as they are taken.
        """

    def gather_forms(self) -> None:
        """Send the forms of changed states to all ranks, after a step on all of them."""


class SwappedStep(ABC):
    """Swaps an optimizer's parameters, gradients and states while it steps.

    The swapped ones are not visible outside of the step.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        # The groups' own lists, while lists of plain tensors replace them.
        self._sharded: list[list[torch.Tensor]] | None = None
        self._stepped: list[ShardTensor] = []  # parameters that the current step changes
        # Plain tensors of the current step, each with an alias of its memory.
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._may_assign = scope_of(type(optimizer)) is None  # torch's own assign no memory
        self._adopt_state(optimizer)
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        # Before hooks of users, which are to see the sharded parameters.
        others = dict(optimizer._optimizer_step_post_hooks)
        optimizer._optimizer_step_post_hooks.clear()
        optimizer.register_step_post_hook(self._after_step)
        optimizer._optimizer_step_post_hooks.update(others)
        optimizer.register_state_dict_post_hook(_plain_state_dict)
        optimizer.register_load_state_dict_post_hook(self._adopt_state)
        self._surround_step(optimizer)

    def suspend(self) -> None:
        """Keep states as they are seen outside, before the parameters get another sharding.

        :meth:`resume` or the next step takes them over.
        """
        self._rollback()
        seen = {parameter: dict(state) for parameter, state in self._optimizer.state.items()}
        self._optimizer.state = defaultdict(dict, seen)
        self._forget()
        self._states = self._outside(self._optimizer)  # the former one holds memory of the states

    def resume(self) -> None:
        """Take over the kept states, one tensor at a time; a collective of all ranks."""
        kept, adopted = self._optimizer.state, self._outside(self._optimizer)
        if kept is self._states:
            return
        for parameter in [*kept]:
            adopted.take(parameter, kept.pop(parameter))
        adopted.gather_forms()
        self._states = adopted
        self._optimizer.state = adopted  # type: ignore[assignment]

    @abstractmethod
    def _forget(self) -> None:
        """Release everything that was made from the parameters in their present sharding."""

    @abstractmethod
    def _pre_step(
        self, groups: list[list[torch.Tensor]], gradients: list[Gradients]
    ) -> list[list[torch.Tensor]]:
        """Return the filled plain tensors for the parameters of every group, with gradients."""

    @abstractmethod
    def _post_step(self) -> None:
        """Bring new values of plain tensors to the sharded parameters."""

    @abstractmethod
    def _release(self) -> None:
        """Release tensors that were made for the step, also after a failed step.

        The step may have failed at any point, perhaps on this rank alone.
        """

    @abstractmethod
    def _outside(self, optimizer: optim.Optimizer) -> OutsideStates:
        """Return an empty mapping of states."""

    @outside_of_compiled_steps
    def _before_step(
        self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if _is_inner_step(optimizer):
            return None
        closure = kwargs.pop("closure", None) or (args[1] if len(args) > 1 else None)
        loss = None
        if closure is not None:
            # Before the swap: clipping and user hooks in the closure are to see the sharded
            # parameters.
            with torch.enable_grad():
                loss = closure()
        self._enter()
        return None if closure is None else ((optimizer, lambda: loss), kwargs)

    @outside_of_compiled_steps
    def _after_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _is_inner_step(optimizer):
            return
        self._restore_memory(keep=True)
        self._leave()
        self._post_step()
        self._release()
        stepped, self._stepped = self._stepped, []
        _keep_gradients(optimizer, stepped)
        if stepped and stepped[0].spec.mesh.slices.size > 1:
            stepped[0].spec.mesh.run.written.note_options(
                type(optimizer).__name__, optimizer.param_groups
            )
        parameters_changed(stepped)
        self._states.gather_forms()

    def _surround_step(self, optimizer: optim.Optimizer) -> None:
        """Swap after the hooks that users have set by now; undo the swap if the step fails.

        Torch calls no hook after a failure.
        """
        step: Any = optimizer.step

        @functools.wraps(step.__func__ if isinstance(step, MethodType) else step)
        def surrounded(_: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            hooks = optimizer._optimizer_step_pre_hooks
            hooks[self._hook.id] = hooks.pop(self._hook.id)
            try:
                return step(*args, **kwargs)
            except BaseException:
                self._rollback()
                raise

        optimizer.step = MethodType(surrounded, optimizer)  # type: ignore[method-assign]

    def _rollback(self) -> None:
        """Leave a failed step: values already written to shards remain, as without sharding.

        Writes to copies are lost.
        """
        if self._sharded is not None:
            self._leave()
            # The same on all ranks, whichever of them have written to their shards: gathered
            # parameters are gathered again.
            held = [it for group in self._optimizer.param_groups for it in group["params"]]
            increment_versions(it for it in held if isinstance(it, ShardTensor))
        self._restore_memory(keep=False)
        self._release()

    def _enter(self) -> None:
        self._rollback()  # an earlier step may have failed without `optimizer.step`'s wrapper
        if self._optimizer.state is not self._states:
            self._adopt_state(self._optimizer)  # another mapping has been assigned
        take_sharded(self._optimizer)  # the closure may have added some
        groups = [group["params"] for group in self._optimizer.param_groups]
        average_late_gradients([self._optimizer])
        _refuse_unreduced(chain.from_iterable(groups))
        keep_writes(chain.from_iterable(groups))  # or the step would change shards that lack them
        gradients = [stored_gradients(parameters) for parameters in groups]
        self._stepped = _with_gradient(chain.from_iterable(groups), chain.from_iterable(gradients))
        plain = self._pre_step(groups, gradients)
        if self._may_assign:
            given = {*map(id, chain.from_iterable(groups))}
            stepped = [it for it in chain.from_iterable(plain) if id(it) not in given]
            self._memory = [(tensor, tensor.detach()) for tensor in stepped]
        self._sharded = groups
        for group, parameters in zip(self._optimizer.param_groups, plain, strict=True):
            group["params"] = parameters
        self._states.enter()

    def _leave(self) -> None:
        if self._sharded is None:
            return
        for group, sharded in zip(self._optimizer.param_groups, self._sharded, strict=True):
            group["params"] = sharded
        self._sharded = None
        self._states.leave()

    @torch.no_grad()
    def _restore_memory(self, *, keep: bool) -> None:
        """Give the plain tensors back the memory that a step has replaced, by ``p.data = x`` or ``set_``.

        With ``keep``, the values that it has assigned are copied there, as outside of a step.
        """
        memory, self._memory = self._memory, []
        assigned = [
            (tensor, own)
            for tensor, own in memory
            if tensor.dtype is not own.dtype or not tensor.is_set_to(own)
        ]
        # Copies: tensors may have swapped their memory.
        values = [tensor.detach().clone() for tensor, _ in assigned] if keep else []
        for tensor, own in assigned:
            tensor.data = own
        for value, (_, own) in zip(values, assigned, strict=False):
            if value.shape != own.shape:
                raise ValueError(
                    f"{type(self._optimizer).__name__} assigns a tensor of shape "
                    f"{tuple(value.shape)} to a parameter whose tensor in its step has the shape "
                    f"{tuple(own.shape)}: expected equal shapes"
                )
            own.copy_(value)

    def _adopt_state(self, optimizer: optim.Optimizer) -> None:
        """Take over a mapping of states: sharded ones, or full ones from a checkpoint."""
        adopted = self._outside(optimizer)
        for parameter, state in optimizer.state.items():
            adopted[parameter] = state
        self._states = adopted
        optimizer.state = adopted  # type: ignore[assignment]


@outside_of_compiled_steps
def take_sharded(optimizer: optim.Optimizer, *_: Any) -> None:
    """Replace an optimizer's unsharded parameters by the sharded ones.

    Also a hook before steps.
    """
    for group in optimizer.param_groups:
        if any(issubclass(kind, UnshardedBase) for kind in set(map(type, group["params"]))):
            former = group["params"]
            group["params"] = [outside_of(each) for each in former]
            if isinstance(optimizer.state, OutsideStates):
                continue  # it finds the state by either of them
            for before, after in zip(former, group["params"], strict=True):
                if before is not after and before in optimizer.state:
                    optimizer.state[after] = optimizer.state.pop(before)


def stepped_parameters(optimizer: optim.Optimizer) -> list[ShardTensor]:
    """Return the sharded parameters with a gradient, changed by the step; the same on all ranks."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _refuse_unreduced(held)
    stepped = _with_gradient(held, stored_gradients(held))
    _keep_gradients(optimizer, stepped)
    return stepped


def _refuse_unreduced(parameters: Iterable[torch.Tensor]) -> None:
    found = unreduced_of(parameters)
    if found is not None:
        raise RuntimeError(
            f"an optimizer steps on {found.spec.fqn}, whose gradient ranks have not averaged: its "
            f"backward was inside of block_backward_sync() (Fabric: no_backward_sync()). A sharded "
            f"parameter has one value for all ranks, and no rank can step by itself. Let the last "
            f"backward before a step be outside of it"
        )


def _with_gradient(
    parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> list[ShardTensor]:
    pairs = zip(parameters, gradients, strict=True)
    return [it for it, gradient in pairs if gradient is not None and isinstance(it, ShardTensor)]


def _keep_gradients(optimizer: optim.Optimizer, stepped: list[ShardTensor]) -> None:
    """Keep the gradients of an optimizer that is not torch's: its states may refer to them."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        for parameter in stepped:
            parameter.keep_gradient()


# torch wraps the `step` of every optimizer, to call hooks before and after it.
_HOOKED_STEP = optim.Optimizer.profile_hook_step(optim.Optimizer.step).__code__


def _is_inner_step(optimizer: optim.Optimizer) -> bool:
    """Return whether the hooked step was called by a subclass's step of the same optimizer.

    The stack shows it; a flag would not be reset by a step that fails.
    """
    frame, steps = sys._getframe(), 0
    while frame is not None and steps < 2:
        steps += frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps == 2


def _plain_state_dict(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {
        **state_dict,
        "state": {index: dict(state) for index, state in state_dict["state"].items()},
    }
