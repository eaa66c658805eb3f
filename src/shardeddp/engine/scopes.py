"""Scopes: modules whose forwards alone compute with this rank's parts of parameters.

Where ranks divide a layer, its forward computes with a part of its weight, and all other code (a
penalty, a logged norm, a hook) must see the whole weight, as in one process. So modules hold the
sharded parameter, and the part only while the forward of its scope runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from shardeddp.engine.calls import CallHook, Listener, compiled_call
from shardeddp.engine.unit import Unit, UnitState


class Scope:
    """Registers parameters of a unit with their modules for the forward of one module alone.

    Within compiled code modules cannot change what they hold: there the parts are registered for
    the whole call of the outermost compiled module, of the unit's module at most.

    Args:
        unit: Unit with the parameters.
        path: Modules from the root to the scope, both included.
        name: Name of the scope, for messages.
    """

    def __init__(self, unit: Unit, path: list[nn.Module], name: str) -> None:
        self._unit, self._path, self._name = unit, path, name
        self._listener = Listener(self._enter, self._leave)
        self._hook: CallHook | None = None
        self._calls = 0  # that have not returned

    def follow(self, hooks: dict[int, CallHook]) -> None:
        """Attach to the call that the parts are registered for; users may compile modules any time.

        Args:
            hooks: Hooks of units' modules and of scopes, by the module's identity; gets that of this
                scope. A unit is gathered before its scopes are entered.
        """
        boundary = self._boundary()
        if boundary is self._path[0]:  # the root's call is not a module's: its step
            self.detach()
            self._unit.set_scope(self._path[-1], True)
            return
        hook = hooks.get(id(boundary))
        if hook is None:
            hook = hooks[id(boundary)] = CallHook(boundary)
            hook.follow()
        if hook is not self._hook:
            self.detach()
            self._hook = hook
            hook.listeners.append(self._listener)

    def reset(self) -> None:
        """Drop calls that have not returned: torch calls no hook after a KeyboardInterrupt."""
        if self._hook is not None:
            self._calls = 0
            self._unit.set_scope(self._path[-1], False)

    def detach(self) -> None:
        """Remove the hook; the parts are not registered."""
        if self._hook is not None:
            self._hook.listeners.remove(self._listener)
        self._hook = None
        self._calls = 0
        self._unit.set_scope(self._path[-1], False)

    def _boundary(self) -> nn.Module:
        """Return the scope, or the compiled module around it."""
        numbers = range(len(self._path))
        of_unit = next((it for it in numbers if self._path[it] is self._unit.spec.module), 0)
        for number in numbers:
            if compiled_call(self._path[number]) is not None:
                return self._path[max(number, of_unit)]
        return self._path[-1]

    def _enter(self) -> None:
        if self._unit.state is not UnitState.UNSHARDED:
            raise RuntimeError(
                f"{self._name!r} was called where its unit is not gathered: outside of a step, or in "
                f"summon_full_params. Ranks divide its parameters (tensor_parallel_plan, experts), "
                f"and it needs this rank's part of them. Call it in training_step, validation_step, "
                f"test_step or predict_step, or in the forward of its unit, {self._unit.label}"
            )
        self._calls += 1
        self._unit.set_scope(self._path[-1], True)

    def _leave(self, inputs: Any, output: Any) -> None:
        self._calls -= 1
        self._unit.set_scope(self._path[-1], self._calls > 0)


def scopes_of(root: nn.Module, units: Iterable[Unit]) -> Iterator[Scope]:
    """Yield the scopes of units of a model."""
    parents = {id(child): parent for parent in root.modules() for child in parent.children()}
    names = {id(module): name for name, module in root.named_modules()}
    for unit in units:
        for scope in unit.scopes():
            path = [scope]
            while path[0] is not root:
                path.insert(0, parents[id(path[0])])
            yield Scope(unit, path, names[id(scope)])
