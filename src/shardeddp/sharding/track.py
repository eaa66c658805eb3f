"""UnitTrack: what the runtime counts about one unit between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import Node

from shardeddp.sharding.unit import Unit


@dataclass(kw_only=True, eq=False)
class UnitTrack:
    """Counts, so that nothing about a unit has to be guessed from a phase."""

    unit: Unit
    index: int
    """Place in the runtime's list of units; 0 is the root."""

    inner: frozenset[int] = frozenset()
    """Places of the units whose modules lie inside this one's."""

    accumulators: list[Node] = field(default_factory=list[Node])
    """The graph nodes that leave gradients on the unit's parameters."""

    active: int = 0
    """Forwards of the unit that have been entered and not left."""

    awaiting_backward: bool = False
    """A forward with gradients has ended since the last backward ended."""

    unreached_uses: set[object] = field(default_factory=set[object])
    """A token for each forward with gradients whose outputs no backward has reached yet."""

    was_retained: bool = False
    """A backward since the pass began has reached a forward and left its graph for another one."""

    is_viewed: bool = False
    """Whether something outside of the engine referred to memory of a gather when a backward ended, on any rank."""

    expected: set[int] = field(default_factory=set[int])
    """Parameters that some rank used in the last backward through the unit; all, before the first."""

    missing: set[int] = field(default_factory=set[int])
    """Expected parameters whose gradient this backward has not produced yet."""

    gradients_expected: bool = False
    """Whether there were any when this backward began."""

    entered: bool = False
    """This backward has reached the unit."""

    issued: bool = False
    """The unit's reduction has been issued in this backward."""

    open_uses: int = 0
    """Forwards whose backward has not reached the unit's inputs yet; counted for units with frozen parameters."""

    def find_inner(self, tracks: Sequence[UnitTrack]) -> None:
        """Note which of all units lie inside this one."""
        inside = {id(module) for module in self.unit.spec.module.modules()}
        self.inner = frozenset(
            other.index for other in tracks if other is not self and id(other.unit.spec.module) in inside
        )

    def begin_backward(self) -> None:
        """Start counting a backward."""
        self.missing = self.expected & self.unit.trainable()
        self.gradients_expected = bool(self.missing)
        self.entered = self.issued = False
        self.unit.begin_backward()

    def tell_of_gradients(self) -> None:
        """Call what users have set to hear of gradients, of those that this backward has added to."""
        self.unit.tell_of_gradients((self.expected & self.unit.trainable()) - self.missing)

    def forget_forwards(self) -> None:
        """Expect no backward of what has been computed so far."""
        self.awaiting_backward, self.open_uses = False, 0
        self.unreached_uses.clear()

    def learn(self, entered: bool, used: Sequence[bool]) -> None:
        """Learn what to expect of the next backward.

        Args:
            entered: Whether this backward has reached the unit on any rank.
            used: By parameter, whether any rank has a gradient.
        """
        trainable = self.unit.trainable()
        if entered or any(used):
            now = {index for index in trainable if used[index]}
            self.expected = now | (self.expected - trainable)

    def gets_gradients(self) -> bool:
        """Whether the backward that is running leaves gradients on the unit, as far as its graph shows."""
        return any(_is_to_run(node) for node in self.accumulators)

    def is_over_at(self, entering: UnitTrack) -> bool:
        """Whether a backward that reaches another unit is done with this one."""
        inside = entering is self or entering.index in self.inner
        return self.entered and not self.unreached_uses and not inside

    def gradients_complete(self) -> bool:
        """Whether every gradient that this backward is expected to produce is there."""
        return not self.missing

    def has_frozen_parameters(self) -> bool:
        """Whether some parameter requires no gradient now."""
        return len(self.unit.trainable()) < len(self.unit.unsharded_parameters())

    def backward_is_over(self) -> bool:
        """Whether nothing in this backward can read the unit's parameters any more.

        A node of the graph that reads a parameter leads to a trainable parameter of the unit, whose gradient is
        counted, or to the unit's inputs, which are counted where it has parameters without a gradient. Where a
        trainable parameter is not expected to get a gradient, neither count tells.
        """
        return self.gradients_complete() and self.open_uses == 0 and self.unit.trainable() <= self.expected


def _is_to_run(node: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[arg-type]
    except RuntimeError:
        return False  # `autograd.grad` with respect to this very parameter: the gradient is returned, not left
