"""Unit progress: state of one unit in the forwards and the backward of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from torch.autograd.graph import Node

from shardeddp.engine.reduction import Reduction
from shardeddp.engine.unit import Unit
from shardeddp.plan.reduction import ReduceOver
from shardeddp.tensor.backward import graph_is_retained
from shardeddp.torch_private import will_execute, without_torch_function


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
    """Runtime state of a unit, by counts instead of guesses from the phase.

    Other files read it, and change it by these verbs alone:

    ==========================  ===========================  ================================
    moment                      verb                         called by
    ==========================  ===========================  ================================
    set-up                      ``find_inner``               ``Runtime``
                                ``expect_all``               ``attach_hooks``
    forward of the root         ``begin_pass``               ``Runtime._begin_pass``
    forward of the unit         ``begin_forward``,           ``Runtime._count``, ``_uncount``
                                ``end_forward``
    its end, with gradients     ``add_use``, ``open_use``    ``Runtime._announce_backward``
    backward                    ``begin_backward``           ``Runtime._begin_backward``
    it reaches the unit         ``reach_unit``, at first     ``Reducer.reach``
                                ``reach_use``, gathered      ``Runtime._reach``
    it leaves a gradient        ``arrive``,                  ``Runtime.gradient_ready``,
                                ``arrive_from_outside``      ``outside_gradient_ready``
    it reaches unit's inputs    ``close_use``                ``Runtime._use_finished``
    reduction of the unit       ``reduce_gradients``         ``ReductionQueue.issue``
    agreement of ranks          ``learn``                    ``GradientAgreement``
    end of the backward         ``forget_forwards``          ``Runtime._end_backward``
    failure                     ``reset``                    ``Runtime.reset``
    ==========================  ===========================  ================================
    """

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

    absent: frozenset[int] = frozenset()
    """Indices of parameters of experts of other ranks: without elements here, and never used."""

    trained: frozenset[int] = frozenset()
    """Indices of parameters that were expected when this backward began; the same on all ranks."""

    missing: set[int] = field(default_factory=set[int])
    """Indices of those that are here, without a gradient of this backward so far."""

    arrived: set[int] = field(default_factory=set[int])
    """Indices of parameters with a gradient of this backward, expected or not, of any use."""

    awaiting_reduction: bool = False
    """Gradients were expected when this backward began, and no reduction is issued since."""

    reached: bool = False
    """This backward has reached the unit."""

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

    def expect_all(self, accumulators: list[Node]) -> None:
        """Expect gradients of all parameters in the first backward, left by these nodes."""
        self.accumulators = accumulators
        sharded, unsharded = self.unit.sharded_parameters(), self.unit.unsharded_parameters()
        self.expected = set(range(len(unsharded)))
        with without_torch_function():
            self.absent = frozenset(
                i for i in self.expected if sharded[i].spec.boxes and not unsharded[i].numel()
            )

    def begin_pass(self) -> None:
        """Forget that backwards of the last pass were retained."""
        self.was_retained = False

    def begin_forward(self) -> None:
        """Count a forward as running."""
        self.active += 1

    def end_forward(self) -> None:
        """Count a forward as ended."""
        self.active -= 1

    def add_use(self) -> object:
        """Expect a backward of a forward that ends; return the token of this use."""
        if self.unreached_uses or self.was_retained:
            self.unit.add_up_gradients()
        self.awaiting_backward = True
        use = object()
        self.unreached_uses.add(use)
        return use

    def open_use(self) -> None:
        """Expect that the backward of a forward that ends reaches the unit's inputs."""
        self.open_uses += 1

    def begin_backward(self) -> None:
        """Reset the counts for a backward."""
        self.trained = frozenset(self.expected & self.unit.trainable_indices())
        self.missing = set(self.trained - self.absent)
        self.awaiting_reduction = bool(self.trained)
        self.reached = False
        self.arrived.clear()
        self.unit.begin_backward()

    def reach_unit(self) -> None:
        """Note that the backward has come to the unit."""
        self.reached = True

    def reach_use(self, use: object) -> None:
        """Note that the backward has reached a use, and the unit is gathered for it."""
        self.was_retained |= graph_is_retained()
        self.unreached_uses.discard(use)

    def arrive(self, index: int) -> None:
        """Note the gradient of a parameter."""
        self.missing.discard(index)
        self.arrived.add(index)

    def arrive_from_outside(self, index: int) -> None:
        """Note the gradient of a parameter's use outside of the unit."""
        self.arrived.add(index)

    def close_use(self) -> None:
        """Note that the backward has reached the unit's inputs."""
        self.open_uses -= 1

    def reduce_gradients(self, over: ReduceOver) -> list[Reduction]:
        """Issue the reductions of the unit's gradients."""
        self.awaiting_reduction = False
        return self.unit.reduce_gradients(over)

    def gradient_levels(self) -> list[GradientLevel]:
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

    def reset(self) -> None:
        """Forget all forwards, running ones too."""
        self.active = 0
        self.forget_forwards()

    def learn(self, reached: bool, used: Sequence[bool]) -> None:
        """Update the parameters expected in the next backward, by what any rank has used."""
        trainable = self.unit.trainable_indices()
        if reached or any(used):
            now = {index for index in trainable if used[index]}
            self.expected = now | (self.expected - trainable)

    def gets_gradients(self) -> bool:
        """Return whether the running backward leaves gradients on the unit, judged by its graph."""
        return any(will_run(node, as_input=False) for node in self.accumulators)

    def is_over_at(self, entering: UnitProgress) -> bool:
        """Return whether a backward that reaches another unit has finished this one."""
        inside = entering is self or entering.index in self.inner
        return self.reached and not self.unreached_uses and not inside

    def backward_is_over(self) -> bool:
        """Return whether no node left in this backward can read the unit's parameters.

        A graph node that reads a parameter leads to a trainable parameter of the unit, counted by
        its gradient, or to the unit's inputs, which are counted if it has parameters without a
        gradient. False if a trainable parameter is not expected to get a gradient: neither count
        covers it.
        """
        here = self.unit.trainable_indices() - self.absent
        return not self.missing and self.open_uses == 0 and here <= self.expected


def will_run(node: Node, *, as_input: bool) -> bool:
    """Return whether the running backward will run a node; ``as_input`` for inputs of ``grad``.

    The gradient of an input of ``autograd.grad`` is returned, and not left on it.
    """
    try:
        return bool(will_execute.current(node))
    except RuntimeError:
        return as_input  # torch cannot tell for the nodes of leaves that are such inputs
