"""Unit progress: how far forwards and the backward of a step are with one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from torch.autograd.graph import Node

from shardeddp.engine.unit import Unit
from shardeddp.torch_private import will_execute


class GradientLevel(IntEnum):
    """State of a parameter's gradient on one rank after backward; the ranks' highest one holds."""

    NONE = 0
    """There is none."""

    EARLIER = 1
    """Gradients of earlier micro-batches, to which this backward has added nothing."""

    NOW = 2
    """This backward has added to it."""


@dataclass(kw_only=True, eq=False)
class UnitProgress:
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

    expected: set[int] = field(default_factory=set[int])
    """Parameters that some rank used in the unit's last backward; all, before the first."""

    missing: set[int] = field(default_factory=set[int])
    """Expected parameters whose gradient this backward has not produced yet."""

    arrived: set[int] = field(default_factory=set[int])
    """Parameters whose gradient this backward produced, expected or not, in or outside the unit."""

    gradients_expected: bool = False
    """Whether there were any when this backward began."""

    entered: bool = False
    """This backward has reached the unit."""

    issued: bool = False
    """The unit's reduction has been issued in this backward."""

    open_uses: int = 0
    """Forwards whose backward has not reached the unit's inputs yet.

    Counted for units with frozen parameters.
    """

    def find_inner(self, progresses: Sequence[UnitProgress]) -> None:
        """Note which of all units lie inside this one."""
        inside = {id(module) for module in self.unit.spec.module.modules()}
        self.inner = frozenset(
            other.index
            for other in progresses
            if other is not self and id(other.unit.spec.module) in inside
        )

    def begin_backward(self) -> None:
        """Start counting a backward."""
        self.missing = self.expected & self.unit.trainable()
        self.gradients_expected = bool(self.missing)
        self.entered = self.issued = False
        self.arrived.clear()
        self.unit.begin_backward()

    def gradients(self) -> list[GradientLevel]:
        """By parameter, what there is of its gradient on this rank."""
        used = self.unit.used()
        levels = [GradientLevel.EARLIER if each else GradientLevel.NONE for each in used]
        for index in self.arrived:
            levels[index] = GradientLevel.NOW
        return levels

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
        """Whether the running backward leaves gradients on the unit, as far as its graph shows."""
        return any(_is_to_run(node) for node in self.accumulators)

    def is_over_at(self, entering: UnitProgress) -> bool:
        """Whether a backward that reaches another unit is done with this one."""
        inside = entering is self or entering.index in self.inner
        return self.entered and not self.unreached_uses and not inside

    def backward_is_over(self) -> bool:
        """Whether nothing in this backward can read the unit's parameters any more.

        A node of the graph that reads a parameter leads to a trainable parameter of the unit, whose
        gradient is counted, or to the unit's inputs, which are counted where it has parameters
        without a gradient. Where a trainable parameter is not expected to get a gradient, neither
        count tells.
        """
        return not self.missing and self.open_uses == 0 and self.unit.trainable() <= self.expected


def _is_to_run(node: Node) -> bool:
    try:
        return bool(will_execute.current(node))
    except RuntimeError:
        return False  # `autograd.grad` with respect to this very parameter: the gradient is returned, not left
