"""Unit progress: state of one unit in the forwards and the backward of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from torch.autograd.graph import Node

from shardeddp.engine.unit import Unit
from shardeddp.torch_private import will_execute


class GradientLevel(IntEnum):
    """State of a parameter's gradient on one rank after backward; the maximum over ranks holds."""

    NONE = 0
    """There is no gradient."""

    EARLIER = 1
    """The gradient is of earlier micro-batches; this backward has added nothing."""

    NOW = 2
    """This backward has added to the gradient."""


@dataclass(kw_only=True, eq=False)
class UnitProgress:
    """Runtime state of a unit, by counts instead of guesses from the phase."""

    unit: Unit
    index: int
    """Index in the runtime's list of units; 0 is the root unit."""

    inner: frozenset[int] = frozenset()
    """Indices of the units of inner modules."""

    accumulators: list[Node] = field(default_factory=list[Node])
    """Graph nodes that leave gradients on the unit's parameters."""

    active: int = 0
    """Number of running forwards of the unit."""

    awaiting_backward: bool = False
    """A forward with gradients has ended since the last backward ended."""

    unreached_uses: set[object] = field(default_factory=set[object])
    """Token for each forward with gradients that no backward has reached yet."""

    was_retained: bool = False
    """A backward of this pass has reached the unit with ``retain_graph``, for another backward."""

    expected: set[int] = field(default_factory=set[int])
    """Indices of parameters that any rank used in the unit's last backward; initially all."""

    missing: set[int] = field(default_factory=set[int])
    """Indices of expected parameters without a gradient of this backward so far."""

    arrived: set[int] = field(default_factory=set[int])
    """Indices of parameters with a gradient of this backward, expected or not, of any use."""

    gradients_expected: bool = False
    """Whether any gradients were missing when this backward began."""

    entered: bool = False
    """This backward has reached the unit."""

    issued: bool = False
    """The unit's reduction has been issued in this backward."""

    open_uses: int = 0
    """Number of forwards with a backward that has not reached the unit's inputs yet.

    Counted for units with frozen parameters.
    """

    def find_inner(self, progresses: Sequence[UnitProgress]) -> None:
        """Set ``inner`` from the list of all units."""
        inside = {id(module) for module in self.unit.spec.module.modules()}
        self.inner = frozenset(
            other.index
            for other in progresses
            if other is not self and id(other.unit.spec.module) in inside
        )

    def begin_backward(self) -> None:
        """Reset the counts for a backward."""
        self.missing = self.expected & self.unit.trainable()
        self.gradients_expected = bool(self.missing)
        self.entered = self.issued = False
        self.arrived.clear()
        self.unit.begin_backward()

    def gradients(self) -> list[GradientLevel]:
        """Return the level of each parameter's gradient on this rank."""
        used = self.unit.used()
        levels = [GradientLevel.EARLIER if each else GradientLevel.NONE for each in used]
        for index in self.arrived:
            levels[index] = GradientLevel.NOW
        return levels

    def forget_forwards(self) -> None:
        """Expect no backward of the forwards so far."""
        self.awaiting_backward, self.open_uses = False, 0
        self.unreached_uses.clear()

    def learn(self, entered: bool, used: Sequence[bool]) -> None:
        """Update the parameters expected in the next backward.

        Args:
            entered: True if this backward has reached the unit on any rank.
            used: Flag per parameter: True if any rank has a gradient.
        """
        trainable = self.unit.trainable()
        if entered or any(used):
            now = {index for index in trainable if used[index]}
            self.expected = now | (self.expected - trainable)

    def gets_gradients(self) -> bool:
        """Return whether the running backward leaves gradients on the unit, judged by its graph."""
        return any(_is_to_run(node) for node in self.accumulators)

    def is_over_at(self, entering: UnitProgress) -> bool:
        """Return whether a backward that reaches another unit has finished this one."""
        inside = entering is self or entering.index in self.inner
        return self.entered and not self.unreached_uses and not inside

    def backward_is_over(self) -> bool:
        """Return whether no node left in this backward can read the unit's parameters.

        A graph node that reads a parameter leads to a trainable parameter of the unit, counted by
        its gradient, or to the unit's inputs, which are counted if it has parameters without a
        gradient. False if a trainable parameter is not expected to get a gradient: neither count
        covers it.
        """
        return not self.missing and self.open_uses == 0 and self.unit.trainable() <= self.expected


def _is_to_run(node: Node) -> bool:
    try:
        return bool(will_execute.current(node))
    except RuntimeError:
        return False  # an input of `autograd.grad`: its gradient is returned, not left on it
