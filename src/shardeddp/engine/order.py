"""Execution order: the next unit, whether all ranks agree on it, and what happens if not."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum

import torch

from shardeddp.comm import Mesh
from shardeddp.comm.agreement import ABOUT_UNITS, HostReduction
from shardeddp.engine.progress import UnitProgress
from shardeddp.engine.reducer import Reduced, Reducer
from shardeddp.engine.unit import UnitState
from shardeddp.plan.sharding_strategy import Reshard, ShardingStrategy

# -- ExecutionOrder: the order of units in a pass, recorded once


@dataclass(frozen=True)
class OrderChange:
    """A visit that the recorded order did not expect.

    ``expected`` is None where the recorded pass had ended.
    """

    expected: int | None
    found: int


class ExecutionOrder:
    """Predicts which units come next in a pass.

    The first pass is recorded: the unit numbers in the order of their visits, repeats included. In
    later passes each visit is matched against the record. A visit that is not the expected one is
    reported, and the record is taken up again at that unit's next occurrence, so one skipped unit
    costs one late gather and nothing more.
    """

    def __init__(self) -> None:
        self._record: list[int] = []
        self._recording = True
        self._position = 0

    @property
    def record(self) -> tuple[int, ...]:
        """The visits of the recorded pass."""
        return tuple(self._record)

    def begin(self) -> None:
        """Start a pass; what the first pass has recorded stands from here on."""
        if self._record:
            self._recording = False
        self._position = 0

    def visit(self, unit: int) -> OrderChange | None:
        """Note a visit; returns what was wrong with it, if anything."""
        if self._recording:
            self._record.append(unit)
            self._position = len(self._record)
            return None
        expected = self._record[self._position] if self._position < len(self._record) else None
        if expected == unit:
            self._position += 1
            return None
        later = self._find(unit, self._position)
        if later is not None:
            self._position = later + 1
        return OrderChange(expected, unit)

    def upcoming(self, depth: int) -> list[int]:
        """The next ``depth`` different units that the record expects after the last visit."""
        found: list[int] = []
        for unit in self._record[self._position :]:
            if len(found) == depth:
                break
            if unit not in found:
                found.append(unit)
        return found

    def next(self) -> int | None:
        """The unit that a recorded pass expects next; None at its end, and while recording."""
        return None if self._recording or self.at_end() else self._record[self._position]

    def at_end(self) -> bool:
        """Whether a recorded pass ends with the last visit; False while recording."""
        return not self._recording and self._position == len(self._record)

    def _find(self, unit: int, start: int) -> int | None:
        for position in (*range(start, len(self._record)), *range(start)):
            if self._record[position] == unit:
                return position
        return None


# -- ForwardRecord: from the forwards of all ranks, the order of their backwards


class ForwardRecord:
    """Forwards of units in one pass of all ranks, in the order in which ranks have agreed on them.

    A forward of several ranks is one. Autograd comes to units in the opposite order of the ends of
    their forwards: where unit 0 holds all others and unit 1 holds unit 2, forwards ``0 1 2 3`` have
    backwards ``0 3 1 2``. So each rank comes to its own units in the order of :meth:`backwards`,
    of which it leaves out those of others.
    """

    def __init__(self, progresses: Sequence[UnitProgress]) -> None:
        self._progresses = progresses
        self.units: list[int] = []
        """Unit of each forward; the same on all ranks."""
        self._own: defaultdict[int, list[int]] = defaultdict(list)  # by unit, places in `units`

    def clear(self) -> None:
        """Another pass begins."""
        self.units.clear()
        self._own.clear()

    def note_own(self, unit: int) -> None:
        """The last forward is one of this rank's."""
        self._own[unit].append(len(self.units) - 1)

    def awaited(self) -> dict[int, list[int]]:
        """By unit, forwards of this rank that no backward has reached yet; in their order."""
        left = {unit: len(self._progresses[unit].unreached_uses) for unit in self._own}
        return {unit: self._own[unit][-count:] for unit, count in left.items() if count}

    def backwards(self) -> list[int]:
        """All forwards, by their place, in the order in which backwards come to them."""
        return sorted(range(len(self.units)), key=lambda place: (-self._end(place), place))

    def _end(self, place: int) -> int:
        """The last forward inside of another one: up to the next of the same unit."""
        unit, end = self.units[place], place
        inner = self._progresses[unit].inner
        for later in range(place + 1, len(self.units) if inner else 0):
            if self.units[later] == unit:
                break
            if self.units[later] in inner:
                end = later
        return end


# -- OrderAgreement: agreement of all ranks on the next units

_BACKWARD = "backward"


def backward_kind(number: int) -> str:
    """The kind of pass that a backward is; other kinds are those of steps.

    Args:
        number: Of backwards before it since its step began. The second of a step (a gradient
            penalty, a generator's after a discriminator's) uses other units than the first.
    """
    return f"{_BACKWARD} {number}"


def is_backward(kind: str) -> bool:
    """Whether a kind of pass is one of backwards."""
    return kind.startswith(_BACKWARD)


_END = "the end of the pass"


class _Field(IntEnum):
    """Fields of a message: a row of one byte per unit for each.

    After them comes a byte for each forward that is recorded: 1 if this rank's backward will come to
    it, 2 if it has to gather the unit for that.
    """

    FORWARD = 0
    """This rank's forward comes to the unit next."""

    BACKWARD = 1
    """This rank's backward does: 1 if it says below what it will come to, 2 if it cannot."""

    GATHER = 2
    """It needs the unit's parameters for that, and does not have them."""

    REDUCED = 3
    """How far the unit's gradients are: a :class:`Reduced`."""


@dataclass(frozen=True)
class _Planned:
    """A unit to which some rank comes next."""

    unit: int
    gathered: bool
    """Whether all ranks gather it, because one needs it."""

    reduced: Sequence[int] = ()
    """Units whose gradients are reduced before that."""


class OrderAgreement:
    """Keeps ranks together where they gather and reduce units.

    Nothing tells a rank which unit another one gathers: collectives meet in the order in which they
    are issued. So ranks have to issue them in one order, although they may use different units
    (experts without a token, batches without an image), or, in evaluation, have different numbers
    of batches.

    The first pass of each kind is agreed on, visit by visit: each rank says on the host which unit
    it comes to. Where that is the same on all ranks, later passes go on without asking. Where it is
    not, the first of those units is gathered by all ranks, also by those that do not need it, and
    those that wait for another one ask again; from then on every pass of this model is agreed on.
    Gradients are reduced between two visits, when no rank needs a unit any more, with zeros of the
    ranks that have not used it.

    Nobody knows where a forward will go. A backward comes to what forwards have announced, in the
    opposite order. So ranks agree on all of a backward when it begins: each says which of the
    forwards of all ranks (:class:`ForwardRecord`) it will come back to, and what any has said is
    planned. All ranks carry out all of the plan and nothing else, each up to the unit to which it
    comes. A rank that comes to anything else, as in reentrant checkpointing, carries out the rest
    of the plan and asks again. That gathers in vain, and others may wait in a collective of the
    user's meanwhile. So the first backward of a kind, and all of a kind in which that has happened,
    are agreed on visit by visit.

    A rank that finds, in a pass that has been alike so far, that it uses other units than before,
    asks whether all do. They may change together, alone it is an error: what the others have issued
    cannot be taken back.

    Args:
        progresses: All units, the root first.
        mesh: Through which ranks agree.
        sharding: Whether anything is gathered, in forward and in backward.
        reducer: Of the gradients.
        apart: Whether ranks are known to use different units.
    """

    def __init__(
        self,
        progresses: Sequence[UnitProgress],
        mesh: Mesh,
        sharding: ShardingStrategy,
        reducer: Reducer,
        *,
        apart: bool = False,
    ) -> None:
        self._progresses = progresses
        self._mesh = mesh
        self._reducer = reducer
        self._apart = apart
        # In an evaluation, where each rank has its own number of passes.
        self._open = False
        self._orders: defaultdict[str, ExecutionOrder] = defaultdict(ExecutionOrder)  # by kind
        self._alike: set[str] = set()  # kinds of passes that all ranks have been through alike
        # Kinds of passes that have just left their recorded order.
        self._changed: set[str] = set()
        self._warned = False
        self.gathers: bool = mesh.gather.size > 1 and any(
            progress.unit.groups for progress in progresses
        )
        """Whether forwards need other ranks."""

        self._gathers_in_backward = mesh.data.size > 1 and sharding.reshard is not Reshard.NEVER
        # The same on all ranks, but for how far each has carried out the plan.
        self._forwards = ForwardRecord(progresses)
        self._all_have_ended = False  # their passes
        self._plan: deque[_Planned] = deque()
        self._left_out = 0  # visits of plans, after failures
        # Kinds of backwards that this rank has been through, and those of them in which it has come
        # to anything else than its forwards have announced, or in another order.
        self._known: set[str] = set()
        self._unforeseen: set[str] = set()
        self._is_planned = False  # its backward
        self._place = -1  # of its last visit, in the order of backwards

    # -- Evaluation

    def open(self) -> None:
        """From here on each rank may run any number of passes, until all come to :meth:`close`."""
        self._open = self.gathers

    def wait(self) -> None:
        """End this rank's passes for now; take part in those of others until all are here."""
        if self._open:
            self._serve()

    def close(self) -> None:
        """From here on all ranks run the same passes again.

        Call it after :meth:`wait`, or after a failure.
        """
        self._open = False

    # -- Passes

    def begin(self, kind: str) -> None:
        """A pass of this rank begins."""
        if kind not in self._alike:
            # Only an order that all ranks have agreed on predicts what all will do.
            self._orders[kind] = ExecutionOrder()
        self._orders[kind].begin()
        self._is_planned, self._place = False, -1

    def visit(self, progress: UnitProgress, kind: str) -> None:
        """Return when it is this rank's turn to come to a unit, with what it needs of others.

        Raises:
            RuntimeError: This rank uses other units than in former passes, and not all ranks do.
        """
        # The root is where a forward begins; a backward comes to it as to any other.
        change = (
            self._orders[kind].visit(progress.index)
            if is_backward(kind) or progress.index
            else None
        )
        if self.agrees(kind):
            self._await_turn(progress, kind)
        elif change is not None:
            found, expected = self._progresses[change.found].unit.label, _END
            if change.expected is not None:
                expected = self._progresses[change.expected].unit.label
            if self._involves_others(kind):
                self._confirm(found, expected)
                self._changed.add(kind)
            # Evaluation without gradients is not warned about: no reduction waits for it.
            if is_backward(kind) or torch.is_grad_enabled():
                self._warn_once(found, expected)

    def revisit(self, progress: UnitProgress, kind: str) -> None:
        """The same within a visit to an outer unit, which recomputes its forward."""
        if self.agrees(kind) and self._needs(progress):
            self._await_turn(progress, kind)

    def upcoming(self, kind: str, depth: int) -> list[int]:
        """The units that all ranks will come to next."""
        return [] if self._apart or self.agrees(kind) else self._orders[kind].upcoming(depth)

    def at_end(self, kind: str) -> bool:
        """Whether the unit that was visited last ends the pass, on all ranks."""
        return not self.agrees(kind) and self._orders[kind].at_end()

    def end(self, kind: str) -> None:
        """A pass of this rank ends; where ranks agree, return when all ranks have ended theirs.

        Raises:
            RuntimeError: This rank has not used all units of former passes, and other ranks do.
        """
        expected = self._orders[kind].next()
        if self.agrees(kind):
            if self._open:
                return
            self._serve()
            if is_backward(kind):
                self._known.add(kind)
        elif expected is not None and self._involves_others(kind):
            self._confirm(_END, self._progresses[expected].unit.label)
            self._changed.add(kind)
        # Where all have changed together, the next pass is the first of its kind once more.
        (self._alike.discard if kind in self._changed else self._alike.add)(kind)
        self._changed.discard(kind)

    def agrees(self, kind: str) -> bool:
        """Whether ranks agree on the visits of a pass of this kind."""
        return self._involves_others(kind) and (
            self._apart or self._open or kind not in self._alike
        )

    def _involves_others(self, kind: str) -> bool:
        return self._gathers_in_backward if is_backward(kind) else self.gathers

    def _needs(self, progress: UnitProgress) -> bool:
        """Whether the unit's parameters have to be gathered before this rank can use them."""
        unit = progress.unit
        return (
            unit.gathers
            if unit.state is UnitState.SHARDED
            else unit.state is UnitState.UNSHARDED and unit.stale
        )

    def _await_turn(self, progress: UnitProgress, kind: str) -> None:
        if is_backward(kind) and kind not in self._known and not self._open:
            self._observe(progress, kind)
        while not self._follow(progress):
            self._ask(progress, kind)
        if not (is_backward(kind) or self._open):
            self._forwards.note_own(progress.index)

    def _observe(self, progress: UnitProgress, kind: str) -> None:
        """Note whether a backward that is not planned comes to a unit as a plan would have it."""
        places, place = self._forwards.awaited().get(progress.index), -1
        if places is not None:
            place = self._forwards.backwards().index(places[-1])
        if place <= self._place:
            self._unforeseen.add(kind)
        self._place = place

    def _serve(self) -> None:
        self._carry_out(len(self._plan))
        while self._ask(None):
            self._carry_out(len(self._plan))

    # -- Plans

    def reset(self) -> None:
        """Forget a plan after a failure.

        Ranks that have carried out different parts of it hear so when they ask next.
        """
        self._left_out += len(self._plan)
        self._plan.clear()

    def _follow(self, progress: UnitProgress) -> bool:
        """Carry out the plan up to a unit; all of it, and False, where it does not hold the unit."""
        needed = self._needs(progress)
        for count, planned in enumerate(self._plan, 1):
            if planned.unit == progress.index and planned.gathered >= needed:
                self._carry_out(count, wanted=progress)
                return True
        self._carry_out(len(self._plan))
        return False

    @torch.no_grad()
    def _carry_out(self, count: int, wanted: UnitProgress | None = None) -> None:
        """Carry out the first visits of the plan, of which the last may be this rank's own."""
        for left in reversed(range(count)):
            planned = self._plan.popleft()
            self._reducer.issue(planned.reduced)
            if planned.gathered:
                self._gather(self._progresses[planned.unit], keep=wanted is not None and not left)

    def _ask(self, wanted: UnitProgress | None, kind: str = "") -> bool:
        """Ask where all ranks are, reduce what is over, and plan what comes next.

        Args:
            wanted: The unit to which this rank has come; None: the end of its pass.
            kind: Of that pass.

        Returns:
            Whether any rank has come to a unit.
        """
        rows, announced = self._exchange(wanted, kind)
        forward, backward, gather, reduced = rows.tolist()
        self._apart |= not self._open and sum(map(bool, (*forward, *backward))) > 1
        with torch.no_grad():
            self._reducer.issue(
                [index for index, state in enumerate(reduced[:-1]) if state == Reduced.DUE]
            )
        # As units were found, and back: most ranks wait least where that is the order in which they
        # are used.
        forwards = [index for index, flag in enumerate(forward[:-1]) if flag]
        backwards = [index for index, flag in enumerate(backward[:-1]) if flag]
        if forwards:
            self._plan.append(_Planned(forwards[0], bool(gather[forwards[0]])))
            if self._all_have_ended:
                self._forwards.clear()
            if not self._open:
                self._forwards.units.append(forwards[0])
        elif max(backward) == 1:
            coming = {i for i, state in enumerate(reduced[:-1]) if state == Reduced.COMING}
            self._plan.extend(self._planned(announced.tolist(), coming))
            self._is_planned = True
        elif backwards:
            self._plan.append(_Planned(backwards[-1], bool(gather[backwards[-1]])))
        self._all_have_ended = not (forwards or backwards)
        return not self._all_have_ended

    def _exchange(
        self, wanted: UnitProgress | None, kind: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest that any rank says: rows of :class:`_Field`, and of each recorded forward."""
        in_backward, awaited = is_backward(kind), dict[int, list[int]]()
        if wanted is not None and kind in self._known and self._apart and not self._open:
            awaited = self._forwards.awaited()
            if self._is_planned or wanted.index not in awaited:
                self._unforeseen.add(kind)
            if kind in self._unforeseen:
                awaited = {}
        # The last column stands for the end of the pass.
        rows = torch.zeros(len(_Field), len(self._progresses) + 1, dtype=torch.uint8, device="cpu")
        announced = torch.zeros(len(self._forwards.units), dtype=torch.uint8, device="cpu")
        if wanted is None:
            rows[_Field.FORWARD, -1] = 1
        else:
            field = _Field.BACKWARD if in_backward else _Field.FORWARD
            rows[field, wanted.index] = 2 if in_backward and not awaited else 1
            rows[_Field.GATHER, wanted.index] = self._needs(wanted)
        for unit, places in awaited.items():
            announced[places] = 1
            announced[places[-1]] += self._needs(self._progresses[unit])
        ahead = {unit: len(places) for unit, places in awaited.items()}
        reduced = self._reducer.progress(wanted, ahead)
        rows[_Field.REDUCED, :-1] = torch.tensor(reduced, dtype=torch.uint8, device="cpu")
        message = torch.cat([rows.view(-1), announced])
        left_out = f" after {self._left_out} that were left out" if self._left_out else ""
        HostReduction(message, f"agreement on units{left_out}", self._mesh.control).wait()
        return message[: rows.numel()].view_as(rows), message[rows.numel() :]

    def _planned(self, announced: Sequence[int], coming: Set[int]) -> Iterator[_Planned]:
        """A backward of all ranks.

        Args:
            announced: See :class:`_Field`.
            coming: Units that are reduced where ranks leave them behind for good.
        """
        places = [place for place in self._forwards.backwards() if announced[place]]
        left = Counter(self._forwards.units[place] for place in places)
        over = [unit for unit in coming if not left[unit]]
        for place in places:
            unit = self._forwards.units[place]
            inside = [it for it in over if it == unit or unit in self._progresses[it].inner]
            yield _Planned(unit, announced[place] > 1, sorted({*over}.difference(inside)))
            left[unit] -= 1
            over = [*inside, unit] if unit in coming and not left[unit] else inside

    def _gather(self, progress: UnitProgress, *, keep: bool) -> None:
        unit = progress.unit
        rested = unit.state is UnitState.SHARDED
        unit.gather_with_others()
        if rested and not keep:
            unit.reshard()

    # -- Passes without agreement

    def _confirm(self, found: str, expected: str) -> None:
        """Go on if all ranks come to something that no pass of this kind has come to here."""
        self._mesh.data_fingerprints.call(f"{found} instead of {expected}", ABOUT_UNITS)

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
