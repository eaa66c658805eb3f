"""UnitTrack: what the runtime counts about one unit between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardeddp.sharding.unit import Unit


@dataclass(kw_only=True, eq=False)
class UnitTrack:
    """Counts, so that nothing about a unit has to be guessed from a phase."""

    unit: Unit
    index: int
    """Place in the runtime's list of units; 0 is the root."""

    active: int = 0
    """Forwards of the unit that have been entered and not left."""

    awaiting_backward: bool = False
    """A forward with gradients has ended since the last backward ended."""

    forward_version: int = -1
    """Version of the unit's parameters that its last forward with gradients used."""

    pinned: bool = False
    """Never resharded: some output cannot be seen, so its backward could come unannounced."""

    expected: set[int] = field(default_factory=set)
    """Parameters that some rank used in the last backward through the unit; all, before the first."""

    missing: set[int] = field(default_factory=set)
    """Expected parameters whose gradient this backward has not produced yet."""

    entered: bool = False
    """This backward has reached the unit."""

    issued: bool = False
    """The unit's reduction has been issued in this backward."""

    open_uses: int = 0
    """Forwards whose backward has not reached the unit's inputs yet; counted for units with frozen parameters."""

    def begin_backward(self) -> None:
        """Start counting a backward."""
        self.missing = self.expected & self.unit.trainable()
        self.entered = self.issued = False
        self.unit.begin_backward()

    def end_backward(self, used: Sequence[bool]) -> None:
        """Learn what to expect of the next backward from what all ranks used in this one."""
        trainable = self.unit.trainable()
        if self.entered or any(used):
            now = {index for index in trainable if used[index]}
            self.expected = now | (self.expected - trainable)

    def gradients_complete(self) -> bool:
        """Whether every gradient that this backward is expected to produce is there."""
        return not self.missing

    def has_frozen_parameters(self) -> bool:
        """Whether some parameter requires no gradient now."""
        return len(self.unit.trainable()) < len(self.unit.unsharded_parameters())

    def backward_is_over(self) -> bool:
        """Whether nothing in this backward can read the unit's parameters any more.

        A node of the graph that reads a parameter leads to a trainable parameter of the unit, whose gradient is counted,
        or to the unit's inputs, which are counted where it has parameters without a gradient. Where a trainable
        parameter is not expected to get a gradient, neither count tells.
        """
        return self.gradients_complete() and self.open_uses == 0 and self.unit.trainable() <= self.expected
