"""Split layers: modules whose forwards alone compute with this rank's parts of parameters.

Where ranks divide a layer, its forward computes with a part of its weight, and all other code (a
penalty, a logged norm, a hook) must see the whole weight, as in one process. So modules hold the
sharded parameter, and the part only while the layer's forward runs. Code of the layer may be
anything; ``forward_copies.py`` does the same for torch's own forwards, where it costs less.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardeddp.engine.calls import CallHook, Listener, compiled_call
from shardeddp.engine.states import UnitState
from shardeddp.engine.unit import Unit
from shardeddp.tensor.module_hooks import ModuleHook, state_of

_LAYERS = "_shardeddp_split_layers"  # attribute of a module: those that its forward runs


class SplitLayer(ModuleHook):
    """Registers parameters of a unit with their modules for the forward of one module alone.

    So it does with attributes that ranks divide, such as a number of experts.

    Within compiled code modules cannot change what they hold: there the parts are registered for
    the whole call of the outermost compiled module, of the unit's module at most. Stacked experts
    are an exception, whose call is a graph break: it is between exchanges of tokens. A call from
    elsewhere, past that compiled module, enters the layer as well.

    ``path`` are the modules from the root to the layer, both included.
    """

    def __init__(self, unit: Unit, path: list[nn.Module], name: str) -> None:
        self._unit, self._path, self._name = unit, path, name
        self.module = path[-1]
        self._state = state_of(self.module)
        changed = () if self._state is None else self._state.attributes
        self._whole = {name: vars(self.module)[name] for name in changed}
        self._listener = Listener(self.enter, self.leave)
        self._hook: CallHook | None = None
        self._within: list[nn.Module] = []  # modules with this one in their dictionaries
        self._handles: list[RemovableHandle] = []  # hooks of calls past the compiled module
        self._calls = 0  # that have not returned

    def follow(self, hooks: dict[int, CallHook]) -> None:
        """Attach to the call that the parts are registered for; users may compile modules any time.

        Args:
            hooks: Hooks of units' modules and of split layers, by the module's identity; gets that
                of this layer. A unit is gathered before its layers are entered.
        """
        boundary = self._boundary()
        if self._state is not None:
            self._state.count_calls(within_compiled=boundary is not self.module)
        hook = hooks.get(id(boundary))
        if hook is None:
            hook = hooks[id(boundary)] = CallHook(boundary)
            hook.follow()
        if hook is not self._hook:
            self._leave_call()
            self._hook = hook
            hook.listen(self._listener)
            self._within = self._path[self._path.index(boundary) :]
            for module in self._within:
                module.__dict__.setdefault(_LAYERS, []).append(self)
            if boundary is not self.module:
                self._handles = [
                    self.module.register_forward_pre_hook(self._enter_past, prepend=True),
                    self.module.register_forward_hook(self._leave_past, always_call=True),
                ]

    def reset(self) -> None:
        """Drop calls that have not returned: torch calls no hook after a KeyboardInterrupt."""
        if self._hook is not None:
            self._calls = 0
            self._set(False)

    def detach(self) -> None:
        """Detach from the call; the parts are not registered."""
        self._leave_call()

    def _leave_call(self) -> None:
        if self._hook is not None:
            self._hook.ignore(self._listener)
        for module in self._within:
            of_module = vars(module)[_LAYERS]
            of_module.remove(self)
            if not of_module:
                del module.__dict__[_LAYERS]
        for handle in self._handles:
            handle.remove()
        self._within, self._handles = [], []
        self._hook = None
        self._calls = 0
        self._set(False)

    def _set(self, runs: bool) -> None:
        self._unit.set_running(self.module, runs)
        if self._state is not None:
            self._state.set_running(runs)
            self.module.__dict__.update(self._state.attributes if runs else self._whole)

    def _boundary(self) -> nn.Module:
        """Return the layer, or the compiled module around it."""
        if self._state is not None and self._state.breaks_graphs:
            return self.module
        numbers = range(len(self._path))
        of_unit = next((it for it in numbers if self._path[it] is self._unit.spec.module), 0)
        for number in numbers:
            if compiled_call(self._path[number]) is not None:
                return self._path[max(number, of_unit)]
        return self._path[-1]

    def enter(self) -> None:
        """Register the parts; the unit must be gathered."""
        if self._unit.state is not UnitState.UNSHARDED:
            raise RuntimeError(
                f"{self._name!r} was called where its unit is not gathered: outside of a step, or in "
                f"summon_full_params. Ranks divide its parameters (tensor_parallel_plan, experts), "
                f"and it needs this rank's part of them. Call it in training_step, validation_step, "
                f"test_step or predict_step, or in the forward of its unit, {self._unit.label}"
            )
        self._calls += 1
        self._set(True)
        if self._state is not None:
            self._state.begin_call()

    def _enter_past(self, module: nn.Module, args: Any) -> None:
        # Traced: in compiled code the layer is entered already.
        if not torch.compiler.is_compiling() and self.is_of(module):
            self.enter()

    def _leave_past(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self.is_of(module):
            self.leave()

    def leave(self, inputs: Any = None, output: Any = None) -> None:
        """Register the sharded parameters after the outermost call."""
        self._calls = max(0, self._calls - 1)  # a reset has dropped the call
        if not self._calls:
            self._set(False)


def has_split_layers(module: nn.Module) -> bool:
    """Return whether a module's forward runs split layers; in compiled code, too."""
    return bool(getattr(module, _LAYERS, ()))


@contextmanager
def entered(module: nn.Module) -> Generator[None]:
    """Enter the split layers of a module for code of its forward that runs without its call.

    A recomputation of the forward in backward does so.
    """
    with ExitStack() as stack:
        for layer in vars(module).get(_LAYERS, ()):
            if isinstance(layer, SplitLayer) and not layer.is_copy:
                layer.enter()
                stack.callback(layer.leave)
        yield


def split_layers_of(root: nn.Module, units: Iterable[Unit]) -> Iterator[SplitLayer]:
    """Yield the split layers in units of a model."""
    parents: dict[int, list[nn.Module]] = {}
    for parent in root.modules():
        for child in parent.children():
            parents.setdefault(id(child), []).append(parent)
    names = {id(module): name for name, module in root.named_modules()}
    for unit in units:
        for layer in unit.split_layers():
            path = [layer]
            while path[0] is not root and len(parents[id(path[0])]) == 1:
                path.insert(0, parents[id(path[0])][0])
            if path[0] is not root:  # called in several places: compiled code in one of them
                path = [root, layer]
            yield SplitLayer(unit, path, names[id(layer)])
