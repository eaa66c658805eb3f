"""Reducer: which unit's gradients are reduced when, in one order on all ranks."""

from __future__ import annotations

import json
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, takewhile
from operator import or_

import torch

from shardeddp.comm import Mesh, all_gather_bytes, during
from shardeddp.comm.agreement import ABOUT_TRAINED, ask_for_highest_alike
from shardeddp.engine.gradients import GroupGradients, Reduction
from shardeddp.engine.unit import GradientLevel, UnitProgress
from shardeddp.plan.memory import WAITING_UNITS
from shardeddp.plan.sharding_strategy import Reshard, ShardingStrategy
from shardeddp.tensor.backward import store_gradients, stored_gradients
from shardeddp.tensor.shard_tensor import any_completion_hooks


class Reduced(IntEnum):
    """How far the gradients of a unit are on one rank; the highest of all ranks holds for all."""

    NOTHING = 0
    """It has none to reduce, in this backward or any more."""

    DUE = 1
    """Its backward is done with the unit."""

    COMING = 2
    """It is in the unit, or will come to it; after that it is done with it."""

    OPEN = 3
    """It may come to the unit more often than it says."""


_Kind = tuple[str, bool]
"""Of backwards that are expected to be alike: which of a step, and whether they synchronise."""


@dataclass
class _Open:
    """The last backward, while nobody has looked at what all ranks have found in it."""

    kind: _Kind
    expected: tuple[int, ...] | None
    """What all ranks have found in the last of its kind; None: that is not known."""

    answer: Callable[[], tuple[list[int], bool]] | None
    """Returns what all ranks have found in this one; None: nobody has asked."""

    written: dict[str, int]
    """What the question tells of values that users have written."""

    is_applied: bool = False
    """Whether gradients are as expected already."""


class Reducer:
    """Issues the reductions of one backward.

    Ranks may use different parameters, so the arrival of gradients must not decide when a unit is
    reduced: one rank would wait for a reduction that another has put off, which itself waits for
    the first one's part in a gather. What decides has to happen alike on all ranks. Autograd runs
    the nodes of a unit before those of any unit that was entered before it, so a unit is over when
    the backward has reached all its uses and then reaches a unit outside of it. There it is
    reduced, before the other one is gathered, with zeros for what has no gradient. A gradient that
    arrives later than that is reduced with the leftovers, on which all ranks agree at the end.

    That holds where all ranks use the same units. Where they do not, they agree on where no rank is
    going to reach a unit any more (:class:`OrderAgreement`), and reduce it there, with zeros of
    those that have not reached it.

    Where nothing is gathered in a backward, nothing else keeps ranks together, and they may even
    reach different units. Then all units are reduced in one order, that of rank 0's first backward,
    also those that this rank does not reach.

    Args:
        progresses: All units, the root first.
        mesh: Through which ranks agree.
        sharding: Whether anything is gathered in a backward.
    """

    def __init__(
        self, progresses: Sequence[UnitProgress], mesh: Mesh, sharding: ShardingStrategy
    ) -> None:
        self._progresses = progresses
        self._mesh = mesh
        self._gathers = sharding.reshard is not Reshard.NEVER
        # Order without gathers: inner units before outer ones.
        self._order = list(reversed(progresses))
        self._order_is_agreed = self._gathers
        self.leaves_gradients = False
        """Whether the running backward leaves gradients on parameters; `autograd.grad` does not."""

        self._to_host = sharding.offload_params
        self._accumulates_sharded = sharding.reduce_every_backward
        self._across_replicas = True
        self._sync = True
        self._running = False  # between begin() and end()
        self._reached: list[UnitProgress] = []  # in this backward, in order
        # Trainable parameters by unit; None: no backward yet.
        self._trained: list[frozenset[int]] | None = None
        # With the label of their unit; issued -> finished before the next unit packs
        self._in_flight: deque[tuple[str, Reduction]] = deque()
        # Those that are on their way by themselves, the earliest first; bytes that they hold.
        self._queued: deque[tuple[str, Reduction]] = deque()
        self._queued_nbytes = self._most_nbytes = 0
        self._sharded = [
            sharded for progress in progresses for sharded in progress.unit.sharded_parameters()
        ]
        self._kind = ""
        # What all ranks have found in the last backward of each kind that they agreed on.
        self._expected: dict[_Kind, tuple[int, ...]] = {}
        self._open: _Open | None = None
        # Since ranks were asked last: parameters that this one has used, by place, and gradients
        # that some have got who had none.
        self._earlier: set[int] = set()
        self._installed: dict[int, torch.Tensor] = {}
        self._is_watched = False  # whether anybody has looked at gradients between micro-batches

    def begin(self, kind: str, sync_gradients: bool) -> None:
        """A backward begins.

        Args:
            kind: Which of a step.
            sync_gradients: False if a later micro-batch is to complete the gradients. Until then
                they are reduced in the shard group, or stay on their ranks.
        """
        self._reached = []
        self._running = True
        self._kind = kind
        self._agree_on_trained()
        self._across_replicas = sync_gradients
        self._sync = sync_gradients or self._accumulates_sharded
        self.leaves_gradients = False
        if any(progress.gets_gradients() for progress in self._progresses):
            self.note_gradient()

    def _agree_on_trained(self) -> None:
        """Compare what ranks froze or unfroze: with differences, they would reduce other units."""
        former, self._trained = (
            self._trained,
            [frozenset(progress.missing) for progress in self._progresses],
        )
        if former is None or former == self._trained or self._mesh.data.size == 1:
            return
        changed = [
            progress.unit.sharded_parameters()[index].spec.fqn
            for progress, before, now in zip(self._progresses, former, self._trained, strict=True)
            for index in sorted(before ^ now)
        ]
        self._expected.clear()
        operation = f"the first backward since requires_grad of {changed[0]} and {len(changed) - 1} more has changed"
        self._mesh.data_fingerprints.call(operation, ABOUT_TRAINED)

    def note_gradient(self) -> None:
        """Note that this backward leaves gradients.

        The graph of reentrant checkpointing may have hidden that.
        """
        if not self.leaves_gradients:
            self.leaves_gradients = True
            for gradients in self._gradients():
                gradients.take_assigned(self._sync)

    def reach(self, progress: UnitProgress, *, agreed: bool) -> None:
        """The backward reaches a use of a unit, which is not gathered for it yet.

        Args:
            progress: The unit.
            agreed: Whether ranks agree on what is reduced, by :meth:`progress` and :meth:`issue`.
        """
        waiting = [] if agreed else self._waiting()
        over = [other for other in waiting if other.is_over_at(progress)]
        # One order for all ranks: an unfinished unit holds back those behind it.
        for due in over if self._gathers else list(takewhile(lambda other: other in over, waiting)):
            self._issue(due)
        if not progress.entered:
            progress.entered = True
            self._reached.append(progress)

    def progress(self, entering: UnitProgress | None, ahead: Mapping[int, int]) -> list[Reduced]:
        """How far this rank is with each unit.

        Args:
            entering: The unit that its backward comes to; None: it has come to its end.
            ahead: By unit, how often it will come to it from there on, as far as it says so.
        """
        if not self._running:
            return [Reduced.OPEN] * len(self._progresses)
        if not (self._gathers and self._sync and self.leaves_gradients):
            return [Reduced.NOTHING] * len(self._progresses)
        return [
            self._progress(progress, entering, ahead.get(progress.index, 0))
            for progress in self._progresses
        ]

    def issue(self, indices: Sequence[int]) -> None:
        """Reduce units that all ranks are done with, whether this one has reached them or not."""
        for index in reversed(indices):
            self._issue(self._progresses[index])

    def _progress(
        self, progress: UnitProgress, entering: UnitProgress | None, ahead: int
    ) -> Reduced:
        if progress.issued or not progress.gradients_expected:
            return Reduced.NOTHING
        if entering is None:
            return Reduced.DUE if progress.entered else Reduced.NOTHING
        if len(progress.unreached_uses) > ahead:
            return Reduced.OPEN
        if ahead:
            return Reduced.COMING
        if not progress.entered:
            return Reduced.NOTHING
        return Reduced.DUE if progress.is_over_at(entering) else Reduced.COMING

    def end(self) -> None:
        """The backward ends: reduce what remains, and give the parameters their gradients."""
        if self._sync and self.leaves_gradients:
            for progress in self._waiting():
                self._issue(progress)
            self._settle()
        elif self.leaves_gradients:
            for progress in self._progresses:
                progress.unit.run_gradient_hooks(progress.arrived)
        if not self._across_replicas:
            self._mesh.incomplete.add(id(self))
            if self.leaves_gradients:
                for gradients in self._gradients():
                    gradients.leave_incomplete(reduces=self._sync)
        elif self.leaves_gradients and id(self) in self._mesh.incomplete:
            self._mesh.incomplete.discard(id(self))
            for gradients in self._gradients():
                gradients.complete()
        self._running = False

    def abort(self) -> None:
        """Finish what a backward that has failed has issued."""
        self._running = False
        self._mesh.incomplete.add(id(self))
        self._finish()

    def _gradients(self) -> Iterator[GroupGradients]:
        """Those of all groups, in the order of their parameters."""
        for progress in self._progresses:
            for group in progress.unit.groups:
                yield group.gradients

    def _keeps_partial(self) -> bool:
        """Whether gradients wait to be shared with replicas, so that nobody is to see them yet."""
        return not self._across_replicas and self._mesh.has_replicas

    def _waiting(self) -> list[UnitProgress]:
        """Units still to be reduced, in order."""
        if not (self._sync and self.leaves_gradients):
            return []
        candidates = self._reached if self._gathers else self._order
        return [
            progress
            for progress in candidates
            if progress.gradients_expected and not progress.issued
        ]

    @torch.no_grad()  # a backward that keeps its graph for another one enables gradients
    def _issue(self, progress: UnitProgress) -> None:
        # One unit's gradients are in each collective at a time: that bounds memory, and one unit's
        # backward hides it.
        for _ in range(len(self._in_flight)):
            unit, reduction = self._in_flight[0]
            with during(self._mesh.clock, "reduction", unit):
                is_done = reduction.advance()
            self._in_flight.popleft()
            if reduction.is_queued and not is_done:
                self._queue(unit, reduction)
            elif not is_done:
                self._in_flight.append((unit, reduction))
        progress.issued = True
        issued = progress.unit.reduce_gradients(self._across_replicas)
        self._in_flight.extend((progress.unit.label, reduction) for reduction in issued)

    def _queue(self, unit: str, reduction: Reduction) -> None:
        """Leave a reduction to its streams, and wait for the first where too much memory waits there.

        Without a bound that is a copy of all gradients. A network that has some of the largest units
        before it is busy all the same.
        """
        self._queued.append((unit, reduction))
        self._queued_nbytes += reduction.waiting_nbytes
        self._most_nbytes = max(self._most_nbytes, reduction.waiting_nbytes)
        while self._queued_nbytes > WAITING_UNITS * self._most_nbytes:
            self._finish_first()

    def _finish_first(self) -> None:
        unit, reduction = self._queued.popleft()
        self._queued_nbytes -= reduction.waiting_nbytes
        with during(self._mesh.clock, "reduction", unit):
            reduction.finish()

    @torch.no_grad()
    def _finish(self) -> None:
        while self._queued:
            self._finish_first()
        for unit, reduction in self._in_flight:
            with during(self._mesh.clock, "reduction", unit):
                reduction.finish()
        self._in_flight.clear()

    # -- Agreement at the end of a backward
    #
    # Ranks may use different parameters, so they agree on what any of them has found in a backward.
    # It is expected to be what they found in the last of its kind: each rank goes on with that at
    # once, asks behind its own back, and looks at the answer when somebody looks at gradients, and
    # at the latest before the optimizer steps, another pass begins, or anything else is agreed on.
    # Where the answer is another one, all ranks come to the same corrections. A micro-batch that
    # does not synchronise asks nothing: what it finds is told with the one that does.

    def settle(self, *, stepping: bool = False, reading: bool = False) -> None:
        """Let gradients be what ranks agree on, where this rank has gone on with what it expects.

        Args:
            stepping: All ranks come here, to step: they agree now if they have not asked.
            reading: Somebody looks at a gradient, on this rank at least.
        """
        opened = self._open
        if opened is None:
            return
        if opened.answer is None:
            self._is_watched |= reading
            if not stepping:
                return
            opened.answer = self._ask(opened, ahead=False)
        self._take_answer(opened, within_backward=False)

    def _settle(self) -> None:
        """The gradients of a backward are there, or on their way: agree on what it has found."""
        self._close()
        for progress in self._progresses:
            progress.unit.keep_writes()  # on all ranks alike, whichever have read what they have written
        kind = self._kind, self._across_replicas
        expected, opened = self._expected.get(kind), _Open(kind, None, None, {})
        if expected is None:
            opened.answer = self._ask(opened, ahead=False)
            self._take_answer(opened)
            if not self._order_is_agreed:
                self._agree_on_order()
            return
        opened.expected = expected
        if self._across_replicas:
            opened.answer = self._ask(opened, ahead=True)
        else:
            told = self._levels(self._findings())
            self._earlier.update(place for place, level in enumerate(told) if level)
        self._reduce(self._left(expected))
        added_to = [each for gradients in self._gradients() for each in gradients.added_to()]
        # What cannot be taken back waits for the answer.
        if opened.answer is not None and (any(added_to) or self._has_hooks()):
            self._take_answer(opened)
            return
        before = stored_gradients(self._sharded)
        self._apply(expected, also=added_to)
        opened.is_applied = True
        for place, gradient in enumerate(stored_gradients(self._sharded)):
            if gradient is not None and before[place] is None:
                self._installed[place] = gradient
        if opened.answer is None:
            self._run_hooks(expected)
            self._keep_sums(True)
        self._open = opened
        self._mesh.unsettled[id(self)] = self

    def _ask(self, opened: _Open, *, ahead: bool) -> Callable[[], tuple[list[int], bool]]:
        """Ask what all ranks have found, and whether they have written the same."""
        opened.written, options = (
            self._mesh.written.take(),
            self._mesh.written.take_changed_options(),
        )
        said = json.dumps([opened.written, options], sort_keys=True).encode()
        checksum = zlib.crc32(said) if opened.written or options else 0
        found = self._findings()
        return ask_for_highest_alike(
            found,
            checksum.to_bytes(4, "big"),
            self._mesh.control,
            f"agreement on {len(found)} flags",
            ahead=ahead,
        )

    def _take_answer(self, opened: _Open, *, within_backward: bool = True) -> None:
        """Let gradients be what all ranks have found; a collective where any has left some."""
        assert opened.answer is not None
        self._close()
        highest, same = opened.answer()
        found = tuple(highest)
        if not same:
            self._tell_of_differences(opened.written)
        expected = opened.expected
        if self._mesh.control.size > 1:
            self._expected[opened.kind] = found
        if found[0]:  # in each micro-batch somebody looks at gradients
            self._expected = {kind: each for kind, each in self._expected.items() if kind[1]}
        self._take_back(self._used(found))
        if not opened.is_applied or found != expected:
            left = self._left(found)
            if expected is not None:
                before = self._left(expected)
                left = [now and not then for now, then in zip(left, before, strict=True)]
            self._reduce(left)
            self._apply(found)
        self._forget_earlier()
        if within_backward:
            self._run_hooks(found)

    def _take_back(self, used: Sequence[bool]) -> None:
        """Remove gradients of what no rank has used."""
        gradients = stored_gradients(self._sharded)
        in_vain = [
            self._sharded[place]
            for place, installed in self._installed.items()
            if not used[place] and gradients[place] is installed
        ]
        store_gradients(in_vain, [None] * len(in_vain))
        self._installed = {}

    def _close(self) -> None:
        self._open = None
        self._mesh.unsettled.pop(id(self), None)

    def _forget_earlier(self) -> None:
        self._earlier, self._installed = set(), {}
        self._keep_sums(False)

    # What a rank finds: whether somebody looks at each micro-batch; by unit, whether gradients are
    # left, the backward has entered it, and something refers to its memory; by parameter, twice its
    # gradient's level, and one more if an earlier micro-batch that nobody was told of has used it.

    def _findings(self) -> tuple[int, ...]:
        progresses = self._progresses
        # What earlier micro-batches have summed up in the shard group waits for the replicas, used
        # this time or not.
        left = [
            any(
                group.gradients.waiting() or (self._across_replicas and group.gradients.partial)
                for group in progress.unit.groups
            )
            for progress in progresses
        ]
        entered = [progress.entered for progress in progresses]
        viewed = [progress.unit.is_viewed for progress in progresses]
        sums = chain.from_iterable(gradients.sums() for gradients in self._gradients())
        levels = chain.from_iterable(progress.gradients() for progress in progresses)
        gradients = [
            2 * level + (there and place in self._earlier)
            for place, (level, there) in enumerate(zip(levels, sums, strict=True))
        ]
        watched = self._is_watched or self._has_hooks()
        return (watched, *left, *entered, *viewed, *gradients)

    def _left(self, found: Sequence[int]) -> list[bool]:
        return [bool(flag) for flag in found[1 : 1 + len(self._progresses)]]

    def _levels(self, found: Sequence[int]) -> list[int]:
        return [each // 2 for each in found[1 + 3 * len(self._progresses) :]]

    def _used(self, found: Sequence[int]) -> list[bool]:
        return [bool(each) for each in found[1 + 3 * len(self._progresses) :]]

    def _has_hooks(self) -> bool:
        return any_completion_hooks(self._sharded)

    def _keep_sums(self, keep: bool) -> None:
        for gradients in self._gradients():
            gradients.keep_sums(keep)

    def _reduce(self, left: Sequence[bool]) -> None:
        for progress, is_left in zip(self._progresses, left, strict=True):
            if is_left:
                self._issue(progress)

    def _apply(self, found: Sequence[int], also: Sequence[bool] = ()) -> None:
        """Give parameters the gradients that a backward has brought; units learn from it.

        Args:
            found: On all ranks.
            also: By parameter, whether it gets its gradient in any case.
        """
        self._finish()
        if self._to_host:
            self._mesh.drain()  # what reads the gradients next, on the host, does not wait for streams
        units = len(self._progresses)
        entered, viewed = found[1 + units :][:units], found[1 + 2 * units :][:units]
        used = self._used(found)
        installed = [*map(or_, used, also)] if also else used
        has_any = [level > GradientLevel.NONE for level in self._levels(found)]
        end = 0
        for progress, by_any, is_viewed in zip(self._progresses, entered, viewed, strict=True):
            begin, end = end, end + len(progress.unit.sharded_parameters())
            progress.unit.note_views(bool(is_viewed))
            if not self._keeps_partial():
                progress.unit.install_gradients(installed[begin:end])
            progress.learn(bool(by_any), has_any[begin:end])

    def _run_hooks(self, found: Sequence[int]) -> None:
        levels = iter(self._levels(found))
        for progress in self._progresses:
            each = [next(levels) for _ in progress.unit.sharded_parameters()]
            progress.unit.run_gradient_hooks(
                [index for index, level in enumerate(each) if level == GradientLevel.NOW]
            )

    def _tell_of_differences(self, written: dict[str, int]) -> None:
        """Name what differs between ranks: written values or step options; all ranks come here."""
        digest = self._mesh.written
        mine = json.dumps([written, digest.end_options(), ", ".join(digest.optimizers)]).encode()
        said = [json.loads(text) for text in all_gather_bytes(mine, self._mesh.control)]
        names = _differing([each for each, _, _ in said])
        if names:
            raise RuntimeError(
                f"parameter {', '.join(names)}: ranks have written different values to it since "
                f"the last backward (this is rank {self._mesh.rank}), and each has kept its part "
                f"of its own: a sharded parameter has one value for all ranks. Write what all of "
                f"them get alike: average it first (all_reduce), draw it with torch.randn_like() "
                f"of the parameter, or keep it in a buffer, of which each rank has its own. An "
                f"embedding's max_norm writes to the rows that its rank has looked up: limit all "
                f"rows after the optimizer's step instead"
            )
        options, optimizers = [each for _, each, _ in said], [each for _, _, each in said]
        if len(set(optimizers)) > 1:
            if self._mesh.rank == 0:
                steps = ", ".join(
                    f"rank {rank} {it or 'none'}" for rank, it in enumerate(optimizers[:8])
                )
                warnings.warn(
                    f"ranks step with different optimizers: {steps}. Each steps on its part of the "
                    f"parameters, so parts are trained differently: make the same in "
                    f"configure_optimizers() on all ranks",
                    stacklevel=2,
                )
            return
        for name in _differing(options) if self._mesh.rank == 0 else ():
            values = ", ".join(
                f"{each.get(name, 'none')} on rank {rank}" for rank, each in enumerate(options[:8])
            )
            warnings.warn(
                f"the ranks' optimizers step with different options: {name} is {values}. Each rank "
                f"steps on its part of the parameters, so parts are trained differently. "
                f"Schedulers that follow a metric need the same on all ranks: self.log(..., "
                f"sync_dist=True)",
                stacklevel=2,
            )

    def _agree_on_order(self) -> None:
        """Adopt the order in which rank 0's backward finished units: outer after inner ones."""
        place = {progress.index: place for place, progress in enumerate(self._reached)}
        done = {
            progress.index: max(place.get(i, -1) for i in (progress.index, *progress.inner))
            for progress in self._reached
        }
        mine = sorted(done, key=lambda index: (done[index], len(self._progresses[index].inner)))
        agreed: list[int] = json.loads(
            all_gather_bytes(json.dumps(mine).encode(), self._mesh.control)[0]
        )
        rest = [progress for progress in self._order if progress.index not in agreed]
        # The root is over last, whether it was reached or not.
        self._order = sorted(
            [*(self._progresses[index] for index in agreed), *rest],
            key=lambda progress: progress.index == 0,
        )
        self._order_is_agreed = True


def _differing(said: Sequence[Mapping[str, object]]) -> list[str]:
    """The names of which ranks do not all say the same."""
    names = {name for each in said for name in each}
    return sorted(
        name for name in names if any(each.get(name) != said[0].get(name) for each in said)
    )
