"""Autocast copies: parameters gathered in autocast's dtype, for the forward of their module alone.

Under autocast a ``Linear`` casts its weight before it multiplies with it, so the cast can be made
before the gather, at half the bytes and with the same result. Whatever else reads the weight (a
penalty, a cosine head, a moving average that is written in the step) has to see the parameter
itself, in its own dtype: an unsharded run shows it nothing else. So the module keeps its sharded
parameters, and its forward runs on a shadow of it that holds the gathered ones.

The forward is a bound method, which a deep copy of the module binds to the copy, and a function
without side effects on the module's parameters: ``torch.compile`` traces it without a break, and
into one graph for all blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardeddp.tensor.unsharded import accumulate_in

if TYPE_CHECKING:
    from shardeddp.tensor.shard_tensor import ShardTensor

_COPIES = "_shardeddp_autocast_copies"  # in the dictionary of a module


class AutocastCopies:
    """What the forward of one module computes with.

    Args:
        module: The module.
        names: Of its parameters that are gathered in autocast's dtype.
        inner: By name of a child whose parameters the module's forward reads itself, the child's
            own copies.
    """

    def __init__(
        self, module: nn.Module, names: tuple[str, ...], inner: Mapping[str, AutocastCopies]
    ) -> None:
        self.active = False
        """Whether the gathered parameters are usable."""

        self.uses = 0
        """How often the forward has run, for a backward that has not begun."""

        self.sharded: dict[str, torch.Tensor | None] = dict.fromkeys(names)
        """By name, what the module holds as long as nobody has put something else there."""

        self._locals: list[torch.Tensor] = []
        self._versions: list[int] = []  # of these when they were gathered
        self.dtype = torch.float32
        self._device_type = "cpu"
        self.shadow = object.__new__(type(module))
        self._gathered: dict[str, nn.Parameter] = {}
        self._inner = dict(inner)

    def are_current(self, module: nn.Module) -> bool:
        """Whether the module's forward would make these very copies now, and they are usable."""
        if not self.active or any(
            module._parameters[name] is not it for name, it in self.sharded.items()
        ):
            return False
        device = self._device_type
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != self.dtype:
            return False  # the forward is called outside of autocast, or inside of one that the user has changed
        if (
            not torch.compiler.is_compiling()
            and [local._version for local in self._locals] != self._versions
        ):
            return False  # written to in the step; compiled code sees that when the unit is entered next
        return all(
            copies.are_current(module._modules[name])  # type: ignore[arg-type]
            for name, copies in self._inner.items()
        )

    def hold(
        self, name: str, sharded: torch.Tensor, gathered: nn.Parameter, dtype: torch.dtype
    ) -> None:
        """Compute with a gathered parameter, in its dtype, where the module holds a sharded one."""
        self.sharded[name], self._gathered[name] = sharded, gathered
        self.dtype, self._device_type = dtype, sharded.device.type

    def activate(self, module: nn.Module) -> None:
        """The gathered parameters are usable from here on."""
        state = vars(module)
        children = {name: copies.shadow for name, copies in self._inner.items()}
        vars(self.shadow).update(state, _parameters={**state["_parameters"], **self._gathered})
        vars(self.shadow)["_modules"] = {**state["_modules"], **children}
        self.note_gather()
        self.uses, self.active = 0, True

    def note_use(self) -> None:
        """Accumulate gradients of several uses in the parameters' own dtype.

        Lightning's autocast casts for each use.
        """
        self.uses += 1
        if self.uses == 2:
            for name, gathered in self._gathered.items():
                accumulate_in(gathered, cast("ShardTensor", self.sharded[name]).dtype)
        for copies in self._inner.values():
            copies.note_use()

    def note_gather(self) -> None:
        """What the copies hold is what the shards hold now."""
        self._locals = [cast("ShardTensor", sharded).raw_local for sharded in self.sharded.values()]
        self._versions = [local._version for local in self._locals]

    def __deepcopy__(self, memo: dict[int, Any]) -> AutocastCopies:
        copied = object.__new__(AutocastCopies)
        copied.__setstate__({})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.active, self.uses, self.sharded, self._gathered, self._inner = False, 0, {}, {}, {}
        self._locals, self._versions = [], []


def compute_with_copies(
    module: nn.Module, names: tuple[str, ...], inner: Mapping[str, nn.Module]
) -> None:
    """Make a module's forward compute with gathered parameters, once :func:`copies_of` has them.

    Args:
        module: Without a ``forward`` of its own in its dictionary.
        names: Of its parameters.
        inner: By name, children whose parameters its forward reads without calling them; prepared
            already.
    """
    children = {
        name: copies for name, child in inner.items() if (copies := copies_of(child)) is not None
    }
    vars(module)[_COPIES] = AutocastCopies(module, names, children)
    vars(module)["forward"] = MethodType(_forward, module)


def copies_of(module: nn.Module) -> AutocastCopies | None:
    """What a module's forward computes with, if that is not what it holds."""
    return vars(module).get(_COPIES)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    copies: AutocastCopies = self.__dict__[_COPIES]
    if not copies.are_current(self):
        return type(self).forward(self, *args, **kwargs)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        copies.note_use()
    copies.shadow.training = self.training
    return type(self).forward(copies.shadow, *args, **kwargs)
