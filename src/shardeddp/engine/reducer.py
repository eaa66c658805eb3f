"""Reducer: time and order of the reductions of a backward, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import takewhile

from shardeddp.comm import Mesh, all_gather_bytes
from shardeddp.comm.agreement import ABOUT_TRAINED
from shardeddp.engine.gradient_agreement import GradientAgreement
from shardeddp.engine.gradients import GroupGradients
from shardeddp.engine.progress import UnitProgress
from shardeddp.engine.reduction_queue import ReductionQueue
from shardeddp.plan.reduction import ReduceOver
from shardeddp.plan.sharding_strategy import ShardingStrategy


class Reduced(IntEnum):
    """State of a unit's gradients on one rank; the maximum over ranks holds for all."""

    NOTHING = 0
    """The rank has no gradients to reduce, or has reduced them."""

    DUE = 1
    """The rank's backward has finished the unit."""

    COMING = 2
    """The rank's backward is in the unit or will visit it; it is finished afterwards."""

    OPEN = 3
    """The rank's backward may visit the unit more often than it has announced."""


class Reducer:
    """Issues the reductions of one backward.

    Ranks may use different parameters, so the arrival of gradients must not decide when a unit is
    reduced: one rank would wait for a reduction that another has deferred, which itself waits for
    the first one in a gather. Instead, an event that all ranks share decides. Autograd runs the
    nodes of a unit before those of any unit that was entered earlier. So a unit is finished when
    the backward has reached all its uses and then reaches a unit outside of it. The finished unit
    is reduced then, before the other one is gathered, with zeros for parameters without a gradient.
    Gradients that arrive later are reduced with the leftovers, on which all ranks agree at the end.

    This needs equal units on all ranks. If ranks use different units, they agree on the point after
    which no rank reaches a unit (:class:`OrderAgreement`) and reduce it there; ranks that have not
    reached it contribute zeros.

    If gathered buffers are retained, no gathers keep ranks together, and they may even reach
    different units. Then all units are reduced in one order, that of rank 0's first backward,
    including units that this rank does not reach.
    """

    def __init__(
        self, progresses: Sequence[UnitProgress], mesh: Mesh, sharding: ShardingStrategy
    ) -> None:
        self._progresses = progresses
        self._mesh = mesh
        self._retains = sharding.retains
        # Order if buffers are retained: inner units before outer ones.
        self._order = list(reversed(progresses))
        self._order_is_agreed = not self._retains
        self.leaves_gradients = False
        """Whether the running backward leaves gradients on parameters; `autograd.grad` does not."""

        self._accumulates_sharded = sharding.reduce_every_backward
        # Ranks over which the running backward averages; None between backwards.
        self._averages_over: ReduceOver | None = None
        self._reached: list[UnitProgress] = []  # in this backward, in order
        # Trainable parameters by unit; None: no backward yet.
        self._trained: list[frozenset[int]] | None = None
        self._queue = ReductionQueue(mesh)
        self._agreement = GradientAgreement(
            progresses, mesh, self._queue, to_host=sharding.offload_params
        )

    def begin(self, sync_gradients: bool) -> None:
        """Begin a backward.

        Without ``sync_gradients``, a later micro-batch completes the gradients. Until then they are
        reduced in the shard group, or stay on their ranks.
        """
        self._reached = []
        self._agree_on_trained()
        early = ReduceOver.SHARD_GROUP if self._accumulates_sharded else ReduceOver.NONE
        self._averages_over = ReduceOver.ALL if sync_gradients else early
        self.leaves_gradients = False
        if any(progress.gets_gradients() for progress in self._progresses):
            self.note_gradient()

    def _agree_on_trained(self) -> None:
        """Compare changes of ``requires_grad`` between ranks, which decide on the reduced units."""
        former, self._trained = (
            self._trained,
            [progress.trained for progress in self._progresses],
        )
        if former is None or former == self._trained or self._mesh.data.size == 1:
            return
        changed = [
            progress.unit.sharded_parameters()[index].spec.fqn
            for progress, before, now in zip(self._progresses, former, self._trained, strict=True)
            for index in sorted(before ^ now)
        ]
        operation = f"the first backward since requires_grad of {changed[0]} and {len(changed) - 1} more has changed"
        self._mesh.world_fingerprints.call(operation, ABOUT_TRAINED)

    def note_gradient(self) -> None:
        """Record that this backward leaves gradients.

        :meth:`begin` cannot see that in the graph of reentrant checkpointing.
        """
        if not self.leaves_gradients:
            self.leaves_gradients = True
            for gradients in self._gradients():
                gradients.take_assigned(self._over)

    def reduce_finished(self, entering: UnitProgress) -> None:
        """Reduce finished units when the backward reaches a use of another one, before its gather.

        Not called if ranks agree on reductions, by :meth:`reduction_states` and :meth:`issue`.
        """
        waiting = self._waiting()
        finished = [other for other in waiting if other.is_over_at(entering)]
        if self._retains:
            # One order for all ranks: an unfinished unit holds back later ones.
            finished = list(takewhile(lambda other: other in finished, waiting))
        for due in finished:
            self._queue.issue(due, self._over)

    def reach(self, progress: UnitProgress) -> None:
        """Record that the backward has reached a unit."""
        if not progress.reached:
            progress.reach_unit()
            self._reached.append(progress)

    def reduction_states(
        self, entering: UnitProgress | None, ahead: Mapping[int, int]
    ) -> list[Reduced]:
        """Return the state of each unit's gradients on this rank.

        The backward enters a unit next (None: it ends), and ``ahead`` has the number of announced
        visits from there on, by unit.
        """
        if self._averages_over is None:
            return [Reduced.OPEN] * len(self._progresses)
        if self._retains or not self._reduces:
            return [Reduced.NOTHING] * len(self._progresses)
        return [
            self._reduction_state(progress, entering, ahead.get(progress.index, 0))
            for progress in self._progresses
        ]

    def issue(self, indices: Sequence[int]) -> None:
        """Reduce units that all ranks have finished, even if this rank has not reached them."""
        for index in reversed(indices):
            self._queue.issue(self._progresses[index], self._over)

    def _reduction_state(
        self, progress: UnitProgress, entering: UnitProgress | None, ahead: int
    ) -> Reduced:
        if not progress.awaiting_reduction:
            return Reduced.NOTHING
        if entering is None:
            return Reduced.DUE if progress.reached else Reduced.NOTHING
        if len(progress.unreached_uses) > ahead:
            return Reduced.OPEN
        if ahead:
            return Reduced.COMING
        if not progress.reached:
            return Reduced.NOTHING
        return Reduced.DUE if progress.is_over_at(entering) else Reduced.COMING

    def end(self) -> None:
        """End the backward: reduce the remaining units and install the gradients."""
        if self._reduces:
            for progress in self._waiting():
                self._queue.issue(progress, self._over)
            self._agreement.agree(self._over)
            if not self._order_is_agreed:
                self._agree_on_order()
        elif self.leaves_gradients:
            for progress in self._progresses:
                progress.unit.run_gradient_hooks(progress.arrived)
        if self._over is not ReduceOver.ALL:
            self._mesh.run.leave_incomplete(self)
            if self.leaves_gradients:
                for gradients in self._gradients():
                    gradients.leave_incomplete(self._over)
        elif self.leaves_gradients and self._mesh.run.complete(self):
            for gradients in self._gradients():
                gradients.complete()
        self._averages_over = None

    def abort(self) -> None:
        """Finish the reductions that a failed backward has issued."""
        self._averages_over = None
        self._mesh.run.leave_incomplete(self)
        self._queue.finish()

    def close(self) -> None:
        """Forget that gradients are incomplete, where nothing will complete them."""
        self._mesh.run.complete(self)

    @property
    def _over(self) -> ReduceOver:
        """Ranks over which the running backward averages."""
        assert self._averages_over is not None
        return self._averages_over

    @property
    def _reduces(self) -> bool:
        """Whether the running backward reduces gradients."""
        return self.leaves_gradients and self._over is not ReduceOver.NONE

    def _gradients(self) -> Iterator[GroupGradients]:
        for progress in self._progresses:
            for group in progress.unit.groups:
                yield group.gradients

    def _waiting(self) -> list[UnitProgress]:
        """Return the units still to be reduced, in order."""
        if not self._reduces:
            return []
        candidates = self._order if self._retains else self._reached
        return [progress for progress in candidates if progress.awaiting_reduction]

    def _agree_on_order(self) -> None:
        """Adopt the order in which rank 0's backward finished units: outer after inner ones."""
        position = {progress.index: at for at, progress in enumerate(self._reached)}
        done = {
            progress.index: max(position.get(i, -1) for i in (progress.index, *progress.inner))
            for progress in self._reached
        }
        mine = sorted(done, key=lambda index: (done[index], len(self._progresses[index].inner)))
        agreed: list[int] = json.loads(
            all_gather_bytes(json.dumps(mine).encode(), self._mesh.control)[0]
        )
        rest = [progress for progress in self._order if progress.index not in agreed]
        # The root unit is last, even if it was not reached.
        self._order = sorted(
            [*(self._progresses[index] for index in agreed), *rest],
            key=lambda progress: progress.index == 0,
        )
        self._order_is_agreed = True
