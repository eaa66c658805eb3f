"""Unit progress: state of one unit in the forwards and the backward of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from torch.autograd.graph import Node

from shardeddp.engine.reduction import Reduction
from shardeddp.engine.unit import Unit
from shardeddp.plan.reduction import ReduceOver
from shardeddp.tensor.backward import graph_is_retained, is_for_inputs
from shardeddp.torch_private import current_backward, will_execute, without_torch_function


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
    its end, with gradients     ``add_use``, ``open_use``,   ``Runtime._announce_backward``
                                ``count_inputs``
    backward                    ``begin_backward``           ``Runtime._begin_backward``
    it reaches the unit         ``reach_unit``, at first     ``Reducer.reach``
                                ``reach_use``, gathered      ``Runtime._reach``
    it leaves a gradient        ``arrive``,                  ``Runtime.gradient_ready``,
                                ``arrive_from_outside``      ``outside_gradient_ready``
    it reaches unit's inputs    ``close_use``,               ``Runtime._use_finished``,
                                ``leave_input``              ``Runtime._pass_uses``
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

    accumulators: dict[int, Node] = field(default_factory=dict[int, Node])
    """Graph nodes that leave gradients on the unit's parameters, by their indices."""

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
    """Indices of trainable parameters that are here, without a gradient of this backward so far."""

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

    leaves_out: bool | None = None
    """Whether a backward of this rank has left a trainable parameter without a gradient; None: there
    was no backward yet."""

    inputs_left: dict[object, set[int]] = field(default_factory=dict[object, set[int]])
    """Numbers of the inputs that the backward has not come to yet, by token of each counted forward."""

    passed: set[object] = field(default_factory=set[object])
    """Tokens of those with an input that the backward has come to, or without any to count."""

    graph: int | None = None
    """Number of torch's run of the graph that has reached the unit in this backward, the first one
    (reentrant checkpointing runs several)."""

    is_counted: bool = True
    """This backward has come to the unit in one run of a graph, by forwards that count inputs."""

    def find_inner(self, progresses: Sequence[UnitProgress]) -> None:
        """Set ``inner`` from the list of all units."""
        inside = {id(module) for module in self.unit.spec.module.modules()}
        self.inner = frozenset(
            other.index
            for other in progresses
            if other is not self and id(other.unit.spec.module) in inside
        )

    def expect_all(self, accumulators: dict[int, Node]) -> None:
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

    @property
    def counts_inputs(self) -> bool:
        """Whether forwards count their inputs, in case that a parameter gets no gradient."""
        return self.leaves_out is not False

    def count_inputs(self, use: object, count: int) -> None:
        """Expect that the backward of a use leaves this number of inputs; none: it never does."""
        self.inputs_left[use] = set(range(count or 1))
        if not count:
            self.passed.add(use)

    def begin_backward(self) -> None:
        """Reset the counts for a backward."""
        trainable = self.unit.trainable_indices()
        self.trained = frozenset(self.expected & trainable)
        self.missing = trainable - self.absent
        self.awaiting_reduction = bool(self.trained)
        self.reached = False
        self.graph, self.is_counted = None, True
        self.arrived.clear()
        self.unit.begin_backward()

    def reach_unit(self) -> None:
        """Note that the backward has come to the unit."""
        self.reached = True

    def reach_use(self, use: object) -> None:
        """Note that the backward has reached a use, and the unit is gathered for it."""
        self.was_retained |= graph_is_retained()
        self.unreached_uses.discard(use)
        run = current_backward()
        self.graph = run if self.graph is None else self.graph
        self.is_counted &= use in self.inputs_left and run == self.graph and not self.was_retained

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

    def leave_input(self, use: object, number: int) -> bool:
        """Note that the gradient of an input is there; return whether it has come from the unit."""
        is_counted = self.is_counted and self.graph == current_backward()
        if is_counted and use in self.inputs_left:
            self.inputs_left[use].discard(number)
            self.passed.add(use)
        return is_counted

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
        self.inputs_left.clear()
        self.passed.clear()

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
        if self.reached:
            self.leaves_out = bool(self.leaves_out or self.missing)

    def gets_gradients(self) -> bool:
        """Return whether the running backward leaves gradients on the unit, judged by its graph."""
        return any(will_run(node, as_input=False) for node in self.accumulators.values())

    def is_over_at(self, entering: UnitProgress) -> bool:
        """Return whether a backward that reaches another unit has finished this one."""
        inside = entering is self or entering.index in self.inner
        return self.reached and not self.unreached_uses and not inside

    def backward_is_over(self) -> bool:
        """Return whether no node left in this backward can read the unit's parameters.

        A graph node that reads a parameter leads to a trainable parameter of the unit, counted by
        its gradient, or to the unit's inputs, which are counted if it has parameters without a
        gradient. False where a gradient is missing, and it is not certain that none will come.
        """
        return self.open_uses == 0 and (not self.missing or self._leaves_out_missing())

    def _leaves_out_missing(self) -> bool:
        """Return whether the backward has left the unit, and has none of its missing gradients.

        Decided by this rank's graph. Of a graph that runs several times, inside of another one or
        from the middle of the unit, a part may be to come. Other units may share an input, whose
        gradient comes after their backwards: if none of the missing gradients is expected, the
        others and one input are enough.
        """
        if not (self.is_counted and self.graph == current_backward()):
            return False
        if any(self.inputs_left.values()):
            reached = self.inputs_left.keys() - self.unreached_uses
            if self.missing & self.expected or is_for_inputs() or not reached <= self.passed:
                return False
        return not any(will_run(self.accumulators[it], as_input=True) for it in self.missing)


def will_run(node: Node, *, as_input: bool) -> bool:
    """Return whether the running backward will run a node; ``as_input`` for inputs of ``grad``.

    The gradient of an input of ``autograd.grad`` is returned, and not left on it.
    """
    try:
        return bool(will_execute.current(node))
    except RuntimeError:
        return as_input  # torch cannot tell for the nodes of leaves that are such inputs
