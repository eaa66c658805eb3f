"""Execution order: the next unit, whether all ranks agree on it, and what happens if not."""

from __future__ import annotations

import warnings
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from shardeddp.comm import Mesh
from shardeddp.comm.agreement import ABOUT_UNITS, reduce_highest
from shardeddp.engine.reducer import Reduced, Reducer
from shardeddp.engine.unit import UnitProgress, UnitState
from shardeddp.engine.visits import Coming, Forecast, VisitOrder
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


@dataclass(frozen=True)
class _Planned:
    """A visit of a plan, which all ranks carry out alike, whether they make it or not."""

    visit: int
    unit: int
    gathered: bool
    """Whether some rank has to gather the unit for it."""

    reduced: tuple[int, ...]
    """Units whose gradients are reduced first."""


_FORWARD = max(Coming)
"""Is added to what a rank says of a forward: ranks that are in one go first."""


class _Answer:
    """What all ranks have said when they asked."""

    def __init__(self, numbers: bytes, units: int, repeats: int) -> None:
        strayed, ended, *codes = numbers[:6]
        self.strayed, self.ended = bool(strayed), bool(ended)
        self.reduced = numbers[6 : 6 + units]
        """By unit, a :class:`Reduced`."""

        coming, gathered = numbers[6 + units :], numbers[6 + units + units * (1 + repeats) :]
        self.forward = max(coming[: len(gathered)]) > _FORWARD
        """Whether any rank is in a forward; what the others say waits, if so."""

        base = _FORWARD if self.forward else 0
        self.said = {
            visit: Coming(level - base)
            for visit, level in enumerate(coming[: len(gathered)])
            if level > base
        }
        self.gathered = {
            visit for visit, level in enumerate(gathered) if level == (2 if self.forward else 1)
        }
        code, complement = codes[:2] if self.forward else codes[2:]
        self.code = code if code + complement == 255 else None
        """Of the kind of pass; None: ranks are in different ones."""


def _code_of(kind: str) -> int:
    """A number from 1 to 255; kinds that share one share an order of visits."""
    return zlib.crc32(kind.encode()) % 255 + 1


class OrderAgreement:
    """Keeps ranks together where they gather and reduce units.

    Nothing tells a rank which unit another one gathers: collectives meet in the order in which they
    are issued. So ranks have to issue them in one order, although they may use different units
    (experts without a token, batches without an image), or, in evaluation, have different numbers
    of batches.

    The first pass of each kind is agreed on, visit by visit: each rank says on the host which unit
    it comes to. Where that is the same on all ranks, later passes go on without asking. Where it is
    not, every pass of this model is agreed on from then on, by plans.

    A rank that asks says where it is, and which visits it expects after that. What all ranks have
    said makes the plan: visits in one order, each with whether the unit is gathered for it and which
    units are reduced before. All ranks carry out all of it, and nothing else in between: a rank that
    comes to a visit of the plan first carries out what is before it, with zeros for what it has not
    used; one that comes to anything else, or to the end of its pass, carries out the rest of the plan
    and asks again. So the order is the same on all ranks, whatever each of them does. A plan usually
    holds the whole pass: ranks ask when a pass begins, and when it ends.

    Gradients that arrive after a plan has reduced their unit wait for the end of the backward, as
    others that are late do. What no plan reduces is reduced where ranks ask, when no rank needs the
    unit any more.

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
        self._begun = 0  # passes
        self._forecasts: defaultdict[str, Forecast] = defaultdict(
            lambda: Forecast(len(progresses))
        )  # by kind
        # The same on all ranks: what they have planned and not carried out all of, the order of
        # visits by code of the kind, how often the unit with the most visits has been visited in a
        # pass, and a checksum of all that they have agreed on.
        self._plan: deque[_Planned] = deque()
        self._visits: defaultdict[int, VisitOrder] = defaultdict(VisitOrder)
        self._repeats = 1
        self._history = 0
        self._strayed = False  # whether this rank could not follow the last plan

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
        self._carry_out()
        self._begun += 1
        self._forecasts[kind].begin(self._begun, self._uses if is_backward(kind) else None)
        if kind not in self._alike:
            # Only an order that all ranks have agreed on predicts what all will do.
            self._orders[kind] = ExecutionOrder()
        self._orders[kind].begin()

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

    def reuse(self, progress: UnitProgress, kind: str) -> None:
        """The same for another use of a unit that is gathered: after the last it may be reduced."""
        if self.agrees(kind):
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
                self._carry_out()
                return
            self._serve()
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

    def _uses(self, unit: int) -> int:
        return len(self._progresses[unit].unreached_uses)

    def _needs(self, progress: UnitProgress) -> bool:
        """Whether the unit's parameters have to be gathered before this rank can use them."""
        unit = progress.unit
        return (
            unit.gathers
            if unit.state is UnitState.SHARDED
            else unit.state is UnitState.UNSHARDED and unit.stale
        )

    # -- Plans

    def settle(self, *, stepping: bool = False, reading: bool = False) -> None:
        """Carry out what is planned, before ranks do anything else together."""
        if not reading:
            self._carry_out()

    def reset(self) -> None:
        """Forget, after a failure, what has been planned.

        Ranks that have carried out different parts of it find that out when they ask again.
        """
        if self._plan:
            self._history = zlib.crc32(bytes([len(self._plan) % 256]), self._history)
            self._plan.clear()
            self._note_plan()

    def _await_turn(self, progress: UnitProgress, kind: str) -> None:
        forecast, needed = self._forecasts[kind], self._needs(progress)
        visit, was_planned = forecast.next(progress.index), bool(self._plan)
        if not self._reach(visit, needed):
            self._strayed = was_planned
            self._ask(kind, progress)
            while not self._reach(visit, needed):
                self._ask(kind, progress)
        forecast.note(visit, needed=needed, begun=self._begun)

    def _serve(self) -> None:
        self._carry_out()
        while self._ask():
            self._carry_out()

    def _reach(self, visit: int, needed: bool) -> bool:
        """Carry out the plan up to a visit; all of it, if this visit is not in it."""
        for count, planned in enumerate(self._plan, 1):
            if planned.visit == visit and planned.gathered >= needed:
                self._carry_out(count, visit)
                return True
        self._carry_out()
        return False

    @torch.no_grad()
    def _carry_out(self, count: int | None = None, visit: int | None = None) -> None:
        """Carry out the first visits of the plan, or all of it.

        Args:
            count: How many; None: all.
            visit: The one that this rank makes itself.
        """
        for _ in range(len(self._plan) if count is None else count):
            planned = self._plan.popleft()
            self._reducer.issue(planned.reduced)
            if planned.gathered:
                self._gather(self._progresses[planned.unit], keep=planned.visit == visit)
        self._note_plan()

    def _note_plan(self) -> None:
        """Let :meth:`settle` be called as long as something is planned."""
        is_noted = self in self._mesh.unsettled
        if is_noted and not self._plan:
            self._mesh.unsettled.remove(self)
        elif self._plan and not is_noted:
            self._mesh.unsettled.append(self)

    def _gather(self, progress: UnitProgress, *, keep: bool) -> None:
        unit = progress.unit
        rested = unit.state is UnitState.SHARDED
        unit.gather_with_others()
        if rested and not keep:
            unit.reshard()

    @torch.no_grad()
    def _ask(self, kind: str = "", wanted: UnitProgress | None = None) -> bool:
        """Ask where all ranks are, reduce what is over, and plan.

        Args:
            kind: Of the pass that this rank is in.
            wanted: The unit that it has come to; None: the end of the pass.

        Returns:
            Whether any rank has come to a unit.
        """
        answer = self._exchange(self._message(kind, wanted))
        self._reducer.issue(
            [index for index, state in enumerate(answer.reduced) if state == Reduced.DUE]
        )
        said, forward = answer.said, answer.forward
        come = [visit for visit, coming in said.items() if coming > Coming.LATER]
        self._apart |= not self._open and len(come) + answer.ended > 1
        if not come:
            return False
        # As units were found, and back: most ranks wait least where that is the order in which they
        # are used.
        come.sort(key=self._unit_of, reverse=not forward)
        if answer.code is None:  # ranks are in passes of different kinds
            visits, length = come[:1], 1
        else:
            order = self._visits[answer.code]
            newest = [visit for visit in come if said[visit] is Coming.OUT_OF_ORDER]
            visits = order.plan(said, newest)
            length = order.length(strayed=answer.strayed)
        self._repeats = max(self._repeats, 1 + max(come) // len(self._progresses))
        due = {i for i, state in enumerate(answer.reduced) if state == Reduced.COMING}
        self._plan.extend(
            self._planned(visits, answer.gathered, due if not forward else set())[:length]
        )
        self._note_plan()
        return True

    def _unit_of(self, visit: int) -> int:
        return visit % len(self._progresses)

    def _planned(self, visits: Sequence[int], gathered: Set[int], due: Set[int]) -> list[_Planned]:
        """Let units that are to be reduced be so at the first visit outside of them after their last."""
        ahead = Counter(map(self._unit_of, visits))
        due, found = {*due}, list[_Planned]()
        over = [unit for unit in due if unit not in ahead]
        for visit in visits:
            unit = self._unit_of(visit)
            reduced = [
                other
                for other in over
                if other != unit and unit not in self._progresses[other].inner
            ]
            over = [other for other in over if other not in reduced]
            found.append(_Planned(visit, unit, visit in gathered, tuple(sorted(reduced))))
            ahead[unit] -= 1
            if not ahead[unit] and unit in due:
                over.append(unit)
        return found

    # What a rank says: whether it could not follow the last plan, whether it has come to its end; a
    # code of the kind of its pass and what is missing to 255, of forwards, then the same of
    # backwards; by unit, how far its gradients are; by visit, a `Coming`, then whether the unit is
    # gathered for it (1 in a backward, 2 in a forward). One visit more to each unit than any rank
    # has made may be said.

    def _message(self, kind: str, wanted: UnitProgress | None) -> torch.Tensor:
        units = len(self._progresses)
        visits = units * (1 + self._repeats)
        coming, gathered, codes = bytearray(visits), bytearray(visits), [0] * 4
        ahead: Counter[int] = Counter()
        if wanted is not None:
            backward, code = is_backward(kind), _code_of(kind)
            codes[2 * backward : 2 * backward + 2] = code, 255 - code
            order, forecast = self._visits[code], self._forecasts[kind]
            visit = forecast.next(wanted.index)
            base, in_order = 0 if backward else _FORWARD, forecast.is_in_order(visit, order)
            coming[visit] = base + (Coming.NOW if in_order else Coming.OUT_OF_ORDER)
            needs = {visit: self._needs(wanted)}
            if in_order:
                for later, needed in forecast.expected(visit, order, self._begun).items():
                    coming[later] = base + Coming.LATER
                    progress = self._progresses[self._unit_of(later)]
                    needs[later] = self._needs(progress) if needed is None else needed
                    ahead[progress.index] += 1
            for each, needed in needs.items():
                gathered[each] = needed * (1 if backward else 2)
        head = [self._strayed, wanted is None, *codes]
        return torch.frombuffer(
            bytearray([*head, *self._reducer.progress(wanted, ahead), *coming, *gathered]),
            dtype=torch.uint8,
        )

    def _exchange(self, message: torch.Tensor) -> _Answer:
        reduce_highest(
            message,
            f"agreement on units after {self._history:08x}",
            self._mesh.control,
            kind="agreement on units",
        ).wait()
        said = bytes(message.tolist())
        self._history = zlib.crc32(said, self._history)
        self._strayed = False
        return _Answer(said, len(self._progresses), self._repeats)

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
