"""UnitHook: what a unit's module calls when its forward is entered and left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from shardeddp.sharding.track import UnitTrack

if TYPE_CHECKING:
    from shardeddp.sharding.runtime import Runtime


class UnitHook:
    """Tells the runtime when a unit's module is entered and left.

    Args:
        runtime: Whom to tell.
        track: The unit.
    """

    def __init__(self, runtime: Runtime, track: UnitTrack) -> None:
        self.runtime = runtime
        self._track = track

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        if self.belongs_to(module):
            self.runtime.enter(self._track)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook, called after an exception as well."""
        if self.belongs_to(module):
            self.runtime.leave(self._track, (args, kwargs), output)

    def belongs_to(self, module: nn.Module) -> bool:
        """False for a deep copy, which keeps the hook and computes with sharded parameters of its own."""
        return module is self._track.unit.spec.module

    def __deepcopy__(self, memo: Any) -> UnitHook:
        return self
