"""Gradient agreement: all ranks set ``.grad`` of the same parameters at the end of a backward.

Ranks may use different parameters, so they take the maximum of their findings over all ranks. Each
rank installs gradients by the maximum of the last backward of the same kind, and does not wait for
that of this one: it reads the result when gradients are read, and at the latest before the
optimizer steps, another pass begins, or ranks agree on anything else. If the result differs, all
ranks make the same corrections (docs/decisions, 71).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import or_
from typing import NamedTuple

import torch

from shardeddp.comm import Mesh
from shardeddp.comm.agreement import ask_for_highest_alike
from shardeddp.engine.gradients import GroupGradients
from shardeddp.engine.progress import GradientLevel, UnitProgress
from shardeddp.engine.reduction import ReduceOver
from shardeddp.engine.reduction_queue import ReductionQueue
from shardeddp.tensor.backward import store_gradients, stored_gradients
from shardeddp.tensor.shard_tensor import any_completion_hooks


class BackwardKind(NamedTuple):
    """Backwards that are expected to have equal findings."""

    number: int
    """Number of earlier backwards in the step."""

    over: ReduceOver
    """Ranks over which gradients are averaged; not ``NONE``."""


@dataclass(frozen=True)
class Findings:
    """State of gradients after a backward, of one rank or the maximum over all ranks."""

    are_read: bool
    """Whether gradients are read between micro-batches."""

    left: tuple[bool, ...]
    """Flag per unit: it has gradients that are still to be reduced."""

    entered: tuple[bool, ...]
    """Flag per unit: the backward has entered it."""

    viewed: tuple[bool, ...]
    """Flag per unit: code outside of the engine refers to gathered memory of its parameters."""

    codes: tuple[int, ...]
    """Twice the gradient's level per parameter, plus 1 if earlier micro-batches used it.

    Earlier ones are those since the last maximum: other ranks do not know their findings.
    """

    @property
    def levels(self) -> list[int]:
        """:class:`GradientLevel` of each parameter."""
        return [each // 2 for each in self.codes]

    @property
    def used(self) -> list[bool]:
        """Flag per parameter: it gets a gradient."""
        return [bool(each) for each in self.codes]

    def encode(self) -> list[int]:
        """Encode the findings as integers; their element-wise maximum is that of the findings."""
        return [*map(int, (self.are_read, *self.left, *self.entered, *self.viewed)), *self.codes]

    @staticmethod
    def decode(values: Sequence[int], units: int) -> Findings:
        """Decode the integers of :meth:`encode`, or their maximum; ``units`` is their number."""
        left, entered, viewed = (
            tuple(map(bool, values[1 + at * units : 1 + (at + 1) * units])) for at in range(3)
        )
        return Findings(bool(values[0]), left, entered, viewed, tuple(values[1 + 3 * units :]))


@dataclass
class _Unsettled:
    """State of the last backward until its result is read."""

    kind: BackwardKind
    expected: Findings | None
    """Result of the previous backward of this kind; None: there was none."""

    result: Callable[[], tuple[list[int], bool]] | None
    """Function that waits for the maximum and for the comparison of writes; None: not started."""

    written: dict[str, int]
    """Checksums of values that users have written, compared together with the maximum."""

    is_applied: bool = False
    """Whether gradients are installed by the expectation."""


class GradientAgreement:
    """Installs the gradients of all units at the end of a backward."""

    def __init__(
        self,
        progresses: Sequence[UnitProgress],
        mesh: Mesh,
        queue: ReductionQueue,
        *,
        to_host: bool,
    ) -> None:
        self._progresses = progresses
        self._mesh = mesh
        self._queue = queue
        self._to_host = to_host
        self._over = ReduceOver.ALL
        self._sharded = [
            sharded for progress in progresses for sharded in progress.unit.sharded_parameters()
        ]
        self._expected: dict[BackwardKind, Findings] = {}
        self._open: _Unsettled | None = None
        # Since the last result: indices of parameters that this rank has used, and gradients
        # installed on parameters that had none before.
        self._earlier: set[int] = set()
        self._installed: dict[int, torch.Tensor] = {}
        self._are_read = False

    def forget_expectations(self) -> None:
        """Drop all expectations, because ranks train other parameters from now on."""
        self._expected.clear()

    def agree(self, kind: BackwardKind) -> None:
        """Agree on the gradients of a backward and install them; reductions may be in flight."""
        self._close()
        for progress in self._progresses:
            progress.unit.keep_writes()  # on all ranks, even if some have not read their writes
        self._over = kind.over
        expected, opened = self._expected.get(kind), _Unsettled(kind, None, None, {})
        if expected is None:
            opened.result = self._start(opened, ahead=False)
            self._take_result(opened)
            return
        opened.expected = expected
        if self._over is ReduceOver.ALL:
            opened.result = self._start(opened, ahead=True)
        else:
            levels = self._findings().levels
            self._earlier.update(index for index, level in enumerate(levels) if level)
        self._reduce(expected.left)
        added_to = [each for gradients in self._gradients() for each in gradients.added_to()]
        # Sums and hooks cannot be undone: they wait for the result.
        if opened.result is not None and (any(added_to) or self._has_hooks()):
            self._take_result(opened)
            return
        before = stored_gradients(self._sharded)
        self._apply(expected, also=added_to)
        opened.is_applied = True
        for index, gradient in enumerate(stored_gradients(self._sharded)):
            if gradient is not None and before[index] is None:
                self._installed[index] = gradient
        if opened.result is None:
            self._run_hooks(expected)
            for gradients in self._gradients():
                gradients.keep_sums()
        self._open = opened
        self._mesh.run.unsettled[id(self)] = self

    def settle(self, *, stepping: bool = False, reading: bool = False) -> None:
        """Correct gradients that were installed by expectation to the result of all ranks.

        Args:
            stepping: True if all ranks call this before a step; starts the maximum if necessary.
            reading: True if a gradient is read on this rank.
        """
        opened = self._open
        if opened is None:
            return
        if opened.result is None:
            self._are_read |= reading
            if not stepping:
                return
            opened.result = self._start(opened, ahead=False)
        self._take_result(opened, within_backward=False)

    def _start(self, opened: _Unsettled, *, ahead: bool) -> Callable[[], tuple[list[int], bool]]:
        """Start the maximum over all ranks, and the comparison of values written by users."""
        opened.written, options = (
            self._mesh.run.written.take(),
            self._mesh.run.written.take_changed_options(),
        )
        said = json.dumps([opened.written, options], sort_keys=True).encode()
        checksum = zlib.crc32(said) if opened.written or options else 0
        found = self._findings().encode()
        return ask_for_highest_alike(
            found,
            checksum.to_bytes(4, "big"),
            self._mesh.control,
            f"agreement on {len(found)} flags",
            ahead=ahead,
        )

    def _take_result(self, opened: _Unsettled, *, within_backward: bool = True) -> None:
        """Install the gradients of all ranks' findings; a collective if any rank has some left."""
        assert opened.result is not None
        self._close()
        highest, same = opened.result()
        found, expected = Findings.decode(highest, len(self._progresses)), opened.expected
        if not same:
            self._mesh.run.written.tell_of_differences(opened.written, self._mesh.control)
        if self._mesh.control.size > 1:
            self._expected[opened.kind] = found
        if found.are_read:  # micro-batches that do not synchronise agree at once, too
            self._expected = {
                kind: each for kind, each in self._expected.items() if kind.over is ReduceOver.ALL
            }
        self._remove_unused_gradients(found.used)
        if not opened.is_applied or found != expected:
            left = found.left
            if expected is not None:
                left = [now and not then for now, then in zip(left, expected.left, strict=True)]
            self._reduce(left)
            self._apply(found)
        self._earlier, self._installed = set(), {}
        for gradients in self._gradients():
            gradients.forget_sums()
        if within_backward:
            self._run_hooks(found)

    def _remove_unused_gradients(self, used: Sequence[bool]) -> None:
        """Remove gradients of parameters that no rank has used."""
        gradients = stored_gradients(self._sharded)
        in_vain = [
            self._sharded[index]
            for index, installed in self._installed.items()
            if not used[index] and gradients[index] is installed
        ]
        store_gradients(in_vain, [None] * len(in_vain))
        self._installed = {}

    def _close(self) -> None:
        self._open = None
        self._mesh.run.unsettled.pop(id(self), None)

    def _findings(self) -> Findings:
        """Return the findings of this rank."""
        # Sums of earlier micro-batches in the shard group still await the reduction across
        # replicas, even if this backward has not used their parameters.
        left = [
            any(
                group.gradients.waiting()
                or (self._over is ReduceOver.ALL and group.gradients.has_partial_sums)
                for group in progress.unit.groups
            )
            for progress in self._progresses
        ]
        sums = chain.from_iterable(gradients.sums() for gradients in self._gradients())
        levels = chain.from_iterable(progress.gradient_levels() for progress in self._progresses)
        return Findings(
            self._are_read or self._has_hooks(),
            tuple(left),
            tuple([progress.entered for progress in self._progresses]),
            tuple([progress.unit.is_viewed for progress in self._progresses]),
            tuple(
                [  # a generator would be entered for each parameter
                    2 * level + (there and index in self._earlier)
                    for index, (level, there) in enumerate(zip(levels, sums, strict=True))
                ]
            ),
        )

    def _gradients(self) -> Iterator[GroupGradients]:
        return gradients_of(self._progresses)

    def _has_hooks(self) -> bool:
        return any_completion_hooks(self._sharded)

    def _reduce(self, left: Sequence[bool]) -> None:
        for progress, is_left in zip(self._progresses, left, strict=True):
            if is_left:
                self._queue.issue(progress, self._over)

    def _apply(self, found: Findings, also: Sequence[bool] = ()) -> None:
        """Install the gradients of a backward, and update the progress of units.

        Parameters flagged in ``also`` get their gradient in any case.
        """
        self._queue.finish()
        if self._to_host:
            self._mesh.drain()  # readers of gradients on the host do not wait for streams
        installed = [*map(or_, found.used, also)] if also else found.used
        has_any = [level > GradientLevel.NONE for level in found.levels]
        # Partial sums await the reduction across replicas and are not visible to users.
        keeps_partial = self._over is not ReduceOver.ALL and self._mesh.has_replicas
        end = 0
        for progress, entered, viewed in zip(
            self._progresses, found.entered, found.viewed, strict=True
        ):
            begin, end = end, end + len(progress.unit.sharded_parameters())
            progress.unit.note_views(viewed)
            if not keeps_partial:
                progress.unit.install_gradients(installed[begin:end])
            progress.learn(entered, has_any[begin:end])

    def _run_hooks(self, found: Findings) -> None:
        levels = iter(found.levels)
        for progress in self._progresses:
            each = [next(levels) for _ in progress.unit.sharded_parameters()]
            progress.unit.run_gradient_hooks(
                [index for index, level in enumerate(each) if level == GradientLevel.NOW]
            )


def gradients_of(progresses: Sequence[UnitProgress]) -> Iterator[GroupGradients]:
    """Yield the gradients of all flat groups, in the order of their parameters."""
    for progress in progresses:
        for group in progress.unit.groups:
            yield group.gradients
