"""Execution order: prediction of the next units, and agreement of all ranks on them.

A pass is the forward of a step or a backward. It visits a unit when it reaches the unit's module or
gradients.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NoReturn

import torch

from shardeddp.comm import Mesh
from shardeddp.comm.agreement import ABOUT_EXPERTS, ABOUT_UNITS, HostReduction
from shardeddp.engine.progress import UnitProgress
from shardeddp.engine.reducer import Reduced, Reducer
from shardeddp.engine.states import (
    FORESIGHT_EVENTS,
    ORDER_EVENTS,
    Foresight,
    OrderState,
    UnitState,
    state_after,
)
from shardeddp.plan.backward_order import backward_order
from shardeddp.plan.sharding_strategy import ShardingStrategy

# -- ExecutionOrder: order of units in a pass, recorded once


class ExecutionOrder:
    """Prediction of the next units in a pass.

    The first pass is recorded: unit indices in the order of their visits, repeats included. In
    later passes each visit is matched against the record. An unexpected visit is reported, and
    matching continues at that unit's next occurrence, so one skipped unit costs one late gather.
    """

    def __init__(self) -> None:
        self._record: list[int] = []
        self._recording = True
        self._position = 0

    @property
    def record(self) -> tuple[int, ...]:
        """Unit indices of the recorded pass."""
        return tuple(self._record)

    def begin(self) -> None:
        """Start a pass; the record of the first pass is complete from now on."""
        if self._record:
            self._recording = False
        self._position = 0

    def visit(self, unit: int) -> bool:
        """Record or match a visit; return whether it was the :meth:`next` one of the record."""
        if self._recording:
            self._record.append(unit)
            self._position = len(self._record)
            return True
        is_expected = self.next() == unit
        position = self._find(unit, self._position)
        if position is not None:
            self._position = position + 1
        return is_expected

    def upcoming(self, depth: int) -> list[int]:
        """Return the next ``depth`` different units in the record after the last visit."""
        found: list[int] = []
        for unit in self._record[self._position :]:
            if len(found) == depth:
                break
            if unit not in found:
                found.append(unit)
        return found

    def next(self) -> int | None:
        """Return the next unit in the record; None at its end, and while recording."""
        return None if self._recording or self.at_end() else self._record[self._position]

    def at_end(self) -> bool:
        """Return whether the last visit ends the recorded pass; False while recording."""
        return not self._recording and self._position == len(self._record)

    def _find(self, unit: int, start: int) -> int | None:
        for position in (*range(start, len(self._record)), *range(start)):
            if self._record[position] == unit:
                return position
        return None


# -- ForwardRecord: order of backwards, from the forwards of all ranks


class ForwardRecord:
    """Forwards of units in one pass of all ranks, in the agreed order.

    A forward that several ranks run together is one entry. Each rank visits its own units in the
    order of :meth:`backwards`, and skips those of other ranks.
    """

    def __init__(self, progresses: Sequence[UnitProgress]) -> None:
        self._progresses = progresses
        self.units: list[int] = []
        """Unit index of each forward; the same on all ranks."""
        self._own: defaultdict[int, list[int]] = defaultdict(list)  # unit -> positions in `units`
        self._is_over = False  # all ranks have ended their passes

    def add(self, *units: int) -> None:
        """Add the next forward of some rank, or none of an evaluation; drop those of a former pass."""
        if self._is_over:
            self.units.clear()
            self._own.clear()
        self.units.extend(units)

    def note_end(self, is_over: bool) -> None:
        """Note whether all ranks have ended their passes."""
        self._is_over = is_over

    def note_own(self, unit: int) -> None:
        """Mark the last forward as one of this rank."""
        self._own[unit].append(len(self.units) - 1)

    def awaited(self) -> dict[int, list[int]]:
        """Return the positions of this rank's forwards that no backward has reached, by unit."""
        left = {unit: len(self._progresses[unit].unreached_uses) for unit in self._own}
        return {unit: self._own[unit][-count:] for unit, count in left.items() if count}

    def backwards(self) -> list[int]:
        """Return the positions of all forwards, in the order of their backwards."""
        return backward_order(self.units, [progress.inner for progress in self._progresses])


# -- OrderAgreement: agreement of all ranks on the next units


class PassKind(NamedTuple):
    """Passes through the units that are expected to visit them in the same order."""

    step: str = ""
    """Name of the step, of a forward."""

    backward: int | None = None
    """Number of earlier backwards in the step; None: a forward.

    The second of a step (a gradient penalty, a generator's after a discriminator's) uses other
    units than the first.
    """

    @property
    def is_backward(self) -> bool:
        """Whether the passes are backwards."""
        return self.backward is not None


class PassOrder:
    """Order of the passes of one kind, and what is known of the next one: `states.py`."""

    def __init__(self) -> None:
        self.visits = ExecutionOrder()
        self.state = OrderState.AGREED
        self.foresight = Foresight.OBSERVED
        self._position = -1  # of the last visit in the order of backwards

    def begin(self) -> None:
        """Begin a pass."""
        if self.state is OrderState.AGREED:
            # An order predicts the visits of all ranks only after all have agreed on it.
            self.visits = ExecutionOrder()
        self.visits.begin()
        if self.foresight is Foresight.PLANNED:
            self.enter("another backward")
        self._position = -1

    def observe(self, position: int) -> None:
        """Compare a visit with the order of a plan, in which it has a position; -1: none."""
        if position <= self._position:
            self.enter("a visit in another order than a plan's")
        self._position = position

    def end(self, *, is_observed: bool) -> None:
        """End a pass, or a backward whose visits ranks have agreed on and observed."""
        # If all ranks have changed together, the next pass is the first of its kind once more.
        is_changed = self.state is OrderState.CHANGED
        self.enter("the end of a changed pass" if is_changed else "the end of a pass")
        if is_observed and self.foresight is Foresight.OBSERVED:
            self.enter("the end of an observed backward")

    def enter(self, event: str) -> None:
        """Enter the state that an event leads to."""
        if event in ORDER_EVENTS:
            self.state = state_after(ORDER_EVENTS, event, self.state, "a pass")
        else:
            self.foresight = state_after(FORESIGHT_EVENTS, event, self.foresight, "a backward")


_END = "the end of the pass"


class _Field(IntEnum):
    """Rows of a message, of one byte per unit.

    The rows are followed by a byte for each recorded forward: 1 if this rank's backward will visit
    it, 2 if it also needs a gather for the visit.
    """

    FORWARD = 0
    """This rank's forward visits the unit next."""

    BACKWARD = 1
    """This rank's backward does: 1 if the bytes per forward list all its visits, 2 if not."""

    UNSHARD = 2
    """The visit needs the unit's parameters, and it is sharded."""

    REDUCED = 3
    """State of the unit's gradients: a :class:`Reduced`."""


@dataclass(frozen=True)
class _NextVisit:
    """Next visit of some rank."""

    unit: int
    unshards: bool
    """Whether all ranks unshard the unit, because one needs it."""

    reduced: Sequence[int] = ()
    """Units whose gradients are reduced before the visit."""


class OrderAgreement:
    """Agreement of all ranks on the order in which they gather and reduce units.

    Collectives match in the order in which they are issued, and a rank cannot see which unit
    another one gathers. So ranks must issue them in one order, although they may use different
    units (experts without a token, batches without an image), or, in evaluation, have different
    numbers of batches.

    Ranks agree on the first pass of each kind visit by visit: each sends its next unit in a message
    on the host. If all ranks visit the same units, later passes need no messages. If not, all ranks
    gather the first of the different units, even those that do not need it, and ranks that wait for
    another one ask again; from then on ranks agree on every pass of this model. Gradients are
    reduced between two visits, when no rank needs the unit any more; ranks that have not used it
    contribute zeros.

    Ranks agree on a whole backward when it begins: each announces its visits among the forwards of
    all ranks (:class:`ForwardRecord`), and all carry out the plan with all of them, each up to its
    own next unit. Visit by visit they agree on the first backward of a kind, and on all backwards
    of a kind in which a rank has visited another unit than it had announced (docs/decisions, 73).

    If a rank leaves the recorded order in a pass without messages, it asks whether all ranks do. It
    is an error if only some do: collectives that the others have issued cannot be undone.
    """

    def __init__(
        self,
        progresses: Sequence[UnitProgress],
        mesh: Mesh,
        sharding: ShardingStrategy,
        reducer: Reducer,
        *,
        uses_different_units: bool = False,
    ) -> None:
        self._progresses = progresses
        self._mesh = mesh
        self._reducer = reducer
        self._uses_different_units = uses_different_units
        self._is_evaluation = False  # each rank has its own number of passes
        self._orders: defaultdict[PassKind, PassOrder] = defaultdict(PassOrder)
        self._warned = False
        self.has_all_gathers: bool = mesh.gather.size > 1 and any(
            progress.unit.groups for progress in progresses
        )
        """Whether forwards communicate with other ranks."""

        self._backwards_need_others = mesh.data.size > 1 and not sharding.retains
        # The same on all ranks, except for the progress of each in the plan.
        self._forwards = ForwardRecord(progresses)
        self._plan: deque[_NextVisit] = deque()
        self._left_out = 0  # number of planned visits that were dropped after failures

    # -- Evaluation

    def begin_evaluation(self) -> None:
        """Allow each rank any number of passes until :meth:`end_evaluation`."""
        self._is_evaluation = self.has_all_gathers

    def await_others(self) -> None:
        """Take part in the passes of other ranks until all ranks call this."""
        if self._is_evaluation:
            self._serve()

    def end_evaluation(self) -> None:
        """Expect the same passes on all ranks again; called after :meth:`await_others` or a failure."""
        self._is_evaluation = False

    # -- Passes

    def begin(self, kind: PassKind) -> None:
        """Begin a pass of this rank."""
        self._orders[kind].begin()

    def visit(self, progress: UnitProgress, kind: PassKind) -> None:
        """Wait for this rank's turn to visit a unit, and gather it if ranks agree on this pass."""
        # A forward begins with the root; a backward visits it like any other unit.
        order, is_expected = self._orders[kind], True
        recorded = order.visits.next()
        if kind.is_backward or progress.index:
            is_expected = order.visits.visit(progress.index)
        if self.agrees(kind):
            self._await_turn(progress, kind)
        elif not is_expected:
            found = progress.unit.label
            expected = _END if recorded is None else self._progresses[recorded].unit.label
            if self._involves_others(kind):
                self._confirm(found, expected)
                order.enter("a visit out of order")
            # No warning in evaluation without gradients: no reduction waits for it.
            if kind.is_backward or torch.is_grad_enabled():
                self._warn_once(found, expected)

    def revisit(self, progress: UnitProgress, kind: PassKind) -> None:
        """Visit a unit for a recomputed forward, within a visit to an outer unit."""
        if self.agrees(kind) and self._needs(progress):
            self._await_turn(progress, kind)

    def upcoming(self, kind: PassKind, depth: int) -> list[int]:
        """Return the next ``depth`` units of all ranks; empty if ranks agree visit by visit."""
        return (
            []
            if self._uses_different_units or self.agrees(kind)
            else self._orders[kind].visits.upcoming(depth)
        )

    def at_end(self, kind: PassKind) -> bool:
        """Return whether the last visit ends the pass on all ranks."""
        return not self.agrees(kind) and self._orders[kind].visits.at_end()

    def end(self, kind: PassKind) -> None:
        """End a pass of this rank; if ranks agree on it, wait until all have ended theirs."""
        order, agrees = self._orders[kind], self.agrees(kind)
        expected = order.visits.next()
        if agrees:
            if self._is_evaluation:
                return
            self._serve()
        elif expected is not None and self._involves_others(kind):
            self._confirm(_END, self._progresses[expected].unit.label)
            order.enter("a visit out of order")
        order.end(is_observed=agrees and kind.is_backward)

    def agrees(self, kind: PassKind) -> bool:
        """Return whether ranks send messages about the visits of a pass of this kind."""
        return self._involves_others(kind) and (
            self._uses_different_units
            or self._is_evaluation
            or self._orders[kind].state is OrderState.AGREED
        )

    def _involves_others(self, kind: PassKind) -> bool:
        return self._backwards_need_others if kind.is_backward else self.has_all_gathers

    def _needs(self, progress: UnitProgress) -> bool:
        """Return whether this rank must gather the unit's parameters before it can use them."""
        unit = progress.unit
        return (
            unit.needs_all_gather
            if unit.state is UnitState.SHARDED
            else unit.state is UnitState.UNSHARDED and unit.stale
        )

    def _await_turn(self, progress: UnitProgress, kind: PassKind) -> None:
        order = self._orders[kind]
        observes = kind.is_backward and order.foresight is Foresight.OBSERVED
        if observes and not self._is_evaluation:
            positions = self._forwards.awaited().get(progress.index)
            order.observe(
                -1 if positions is None else self._forwards.backwards().index(positions[-1])
            )
        while not self._follow(progress):
            self._ask(progress, kind)
        if not (kind.is_backward or self._is_evaluation):
            self._forwards.note_own(progress.index)

    def _serve(self) -> None:
        self._carry_out(len(self._plan))
        while self._ask(None):
            self._carry_out(len(self._plan))

    # -- Plans

    def reset(self) -> None:
        """Drop the plan after a failure.

        If ranks have carried out different numbers of its visits, their next message fails.
        """
        self._left_out += len(self._plan)
        self._plan.clear()

    def _follow(self, progress: UnitProgress) -> bool:
        """Carry out the plan up to a unit; if it lacks the unit, all of it, and return False."""
        needed = self._needs(progress)
        for count, planned in enumerate(self._plan, 1):
            if planned.unit == progress.index and planned.unshards >= needed:
                self._carry_out(count, wanted=progress)
                return True
        self._carry_out(len(self._plan))
        return False

    @torch.no_grad()
    def _carry_out(self, count: int, wanted: UnitProgress | None = None) -> None:
        """Carry out the first visits of the plan; the last one may be this rank's own."""
        for left in reversed(range(count)):
            planned = self._plan.popleft()
            self._reducer.issue(planned.reduced)
            if planned.unshards:
                self._unshard(self._progresses[planned.unit], keep=wanted is not None and not left)

    def _ask(self, wanted: UnitProgress | None, kind: PassKind | None = None) -> bool:
        """Agree with all ranks on next visits, reduce finished units, and plan further visits.

        ``wanted`` is None at the end of this rank's pass. Returns whether any rank has a next unit.
        """
        rows, announced = self._send(wanted, kind)
        forward, backward, unshard, reduced = rows.tolist()
        if not self._is_evaluation and sum(map(bool, (*forward, *backward))) > 1:
            self._uses_different_units = True
            if self._mesh.experts is not None:
                self._refuse_different_units(forward, backward)
        with torch.no_grad():
            self._reducer.issue(
                [index for index, state in enumerate(reduced[:-1]) if state == Reduced.DUE]
            )
        # Forwards in the order of unit indices, backwards in reverse: ranks wait least if that is
        # the order of use.
        forwards = [index for index, flag in enumerate(forward[:-1]) if flag]
        backwards = [index for index, flag in enumerate(backward[:-1]) if flag]
        if forwards:
            self._plan.append(_NextVisit(forwards[0], bool(unshard[forwards[0]])))
            self._forwards.add(*(() if self._is_evaluation else forwards[:1]))
        elif max(backward) == 1:
            coming = {i for i, state in enumerate(reduced[:-1]) if state == Reduced.COMING}
            self._plan.extend(self._planned(announced.tolist(), coming))
            if kind is not None:
                self._orders[kind].enter("a plan")
        elif backwards:
            self._plan.append(_NextVisit(backwards[-1], bool(unshard[backwards[-1]])))
        self._forwards.note_end(is_over=not (forwards or backwards))
        return bool(forwards or backwards)

    def _refuse_different_units(self, *visits: Sequence[int]) -> NoReturn:
        """Refuse different units on ranks that divide experts: they send tokens in every layer."""
        labels = [*(it.unit.label for it in self._progresses), _END]
        reached = [labels[index] for each in visits for index, flag in enumerate(each) if flag]
        raise RuntimeError(f"ranks have reached {' and '.join(reached)} at a time. {ABOUT_EXPERTS}")

    def _send(
        self, wanted: UnitProgress | None, kind: PassKind | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send a message; return the maximum over all ranks.

        Rows of :class:`_Field`, and bytes of forwards.
        """
        in_backward, awaited = kind is not None and kind.is_backward, dict[int, list[int]]()
        if wanted is not None and kind is not None and self._announces(kind):
            order, visits = self._orders[kind], self._forwards.awaited()
            if order.foresight is Foresight.PLANNED or wanted.index not in visits:
                order.enter("a visit that was not announced")
            else:
                awaited = visits
        # The last column is the end of the pass.
        rows = torch.zeros(len(_Field), len(self._progresses) + 1, dtype=torch.uint8, device="cpu")
        announced = torch.zeros(len(self._forwards.units), dtype=torch.uint8, device="cpu")
        if wanted is None:
            rows[_Field.FORWARD, -1] = 1
        else:
            field = _Field.BACKWARD if in_backward else _Field.FORWARD
            rows[field, wanted.index] = 2 if in_backward and not awaited else 1
            rows[_Field.UNSHARD, wanted.index] = self._needs(wanted)
        for unit, positions in awaited.items():
            announced[positions] = 1
            announced[positions[-1]] += self._needs(self._progresses[unit])
        ahead = {unit: len(positions) for unit, positions in awaited.items()}
        reduced = self._reducer.reduction_states(wanted, ahead)
        rows[_Field.REDUCED, :-1] = torch.tensor(reduced, dtype=torch.uint8, device="cpu")
        message = torch.cat([rows.view(-1), announced])
        left_out = f" after {self._left_out} that were left out" if self._left_out else ""
        HostReduction(message, f"agreement on units{left_out}", self._mesh.control).wait()
        return message[: rows.numel()].view_as(rows), message[rows.numel() :]

    def _announces(self, kind: PassKind) -> bool:
        """Return whether this rank announces all visits of a backward when it begins."""
        return (
            self._orders[kind].foresight in (Foresight.FORESEEN, Foresight.PLANNED)
            and self._uses_different_units
            and not self._is_evaluation
        )

    def _planned(self, announced: Sequence[int], coming: Set[int]) -> Iterator[_NextVisit]:
        """Yield the planned visits of a backward of all ranks.

        ``announced`` has a byte for each recorded forward, see :class:`_Field`; units that are
        ``coming`` are reduced after their last visit.
        """
        positions = [position for position in self._forwards.backwards() if announced[position]]
        left = Counter(self._forwards.units[position] for position in positions)
        over = [unit for unit in coming if not left[unit]]
        for position in positions:
            unit = self._forwards.units[position]
            inside = [it for it in over if it == unit or unit in self._progresses[it].inner]
            yield _NextVisit(unit, announced[position] > 1, sorted({*over}.difference(inside)))
            left[unit] -= 1
            over = [*inside, unit] if unit in coming and not left[unit] else inside

    def _unshard(self, progress: UnitProgress, *, keep: bool) -> None:
        unit = progress.unit
        was_sharded = unit.state is UnitState.SHARDED
        unit.unshard_with_others()
        if was_sharded and not keep:
            unit.reshard()

    # -- Passes without agreement

    def _confirm(self, found: str, expected: str) -> None:
        """Check that all ranks leave the recorded order with the same visit."""
        advice = ABOUT_UNITS if self._mesh.experts is None else ABOUT_EXPERTS
        self._mesh.world_fingerprints.call(f"{found} instead of {expected}", advice)

    def _warn_once(self, found: str, expected: str) -> None:
        if self._warned or self._mesh.rank:
            return
        self._warned = True
        warnings.warn(
            f"units run in another order than in the first pass: expected {expected}, found "
            f"{found}. The result is right; gathers that could not be foreseen are not overlapped. "
            f"To make it fast, let one unit hold the parts whose order changes (auto_wrap_policy), "
            f"or keep parameters gathered between forward and backward "
            f"(reshard_after_forward=False). Said once, on rank 0",
            stacklevel=2,
        )
