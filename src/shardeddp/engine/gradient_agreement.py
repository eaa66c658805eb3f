"""Gradient agreement: all ranks set ``.grad`` of the same parameters at the end of a backward.

Ranks may use different parameters, so they take the maximum of their findings over all ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardeddp.comm import Mesh
from shardeddp.comm.agreement import agree_on_highest_alike
from shardeddp.engine.progress import GradientLevel, UnitProgress
from shardeddp.engine.reduction_queue import ReductionQueue
from shardeddp.plan.reduction import ReduceOver


@dataclass(frozen=True)
class Findings:
    """State of gradients after a backward, of one rank or the maximum over all ranks."""

    left: tuple[bool, ...]
    """Flag per unit: it has gradients that are still to be reduced."""

    reached: tuple[bool, ...]
    """Flag per unit: the backward has reached it."""

    viewed: tuple[bool, ...]
    """Flag per unit: code outside of the engine refers to gathered memory of its parameters."""

    levels: tuple[int, ...]
    """:class:`GradientLevel` of each parameter."""

    def encode(self) -> list[int]:
        """Encode the findings as integers; their element-wise maximum is that of the findings."""
        return [*map(int, (*self.left, *self.reached, *self.viewed)), *self.levels]

    @staticmethod
    def decode(values: Sequence[int], units: int) -> Findings:
        """Decode the integers of :meth:`encode`, or their maximum; ``units`` is their number."""
        left, reached, viewed = (
            tuple(map(bool, values[at * units : (at + 1) * units])) for at in range(3)
        )
        return Findings(left, reached, viewed, tuple(values[3 * units :]))


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

    def agree(self, over: ReduceOver) -> None:
        """Agree on the gradients of a backward, and install them; reductions may be in flight.

        A collective of all ranks that train one model. The host waits for the slowest of them, as
        it would before the optimizer's step; devices go on with what has been issued (docs/decisions,
        71). ``over`` is not ``NONE``.
        """
        for progress in self._progresses:
            progress.unit.keep_writes()  # on all ranks, even if some have not read their writes
        found = self._highest(self._findings(over))
        for progress, is_left in zip(self._progresses, found.left, strict=True):
            if is_left:
                self._queue.issue(progress, over)
        self._install(found, over)
        for progress, levels in self._by_unit(found.levels):
            progress.unit.run_gradient_hooks(
                [index for index, level in enumerate(levels) if level == GradientLevel.NOW]
            )

    def _findings(self, over: ReduceOver) -> Findings:
        """Return the findings of this rank."""
        # Sums of earlier micro-batches in the shard group still await the reduction across
        # replicas, even if this backward has not used their parameters.
        left = [
            any(
                group.gradients.has_waiting
                or (over is ReduceOver.ALL and group.gradients.has_partial_sums)
                for group in progress.unit.groups
            )
            for progress in self._progresses
        ]
        return Findings(
            tuple(left),
            tuple([progress.reached for progress in self._progresses]),
            tuple([progress.unit.is_viewed for progress in self._progresses]),
            tuple([each for progress in self._progresses for each in progress.gradient_levels()]),
        )

    def _highest(self, findings: Findings) -> Findings:
        """Return the maximum over all ranks; compare the values that users have written as well."""
        writes = self._mesh.run.written
        written, options = writes.take(), writes.take_changed_options()
        said = json.dumps([written, options], sort_keys=True).encode()
        checksum = zlib.crc32(said) if written or options else 0
        found = findings.encode()
        highest, same = agree_on_highest_alike(
            found,
            checksum.to_bytes(4, "big"),
            self._mesh.control,
            f"agreement on {len(found)} gradients and units at a backward's end",
        )
        if not same:
            writes.raise_differences(written, self._mesh.control)
        return Findings.decode(highest, len(self._progresses))

    def _install(self, found: Findings, over: ReduceOver) -> None:
        """Install the gradients of a backward, and update the progress of units."""
        self._queue.finish()
        if self._to_host:
            self._mesh.drain()  # readers of gradients on the host do not wait for streams
        # Partial sums await the reduction across replicas and are not visible to users.
        keeps_partial = over is not ReduceOver.ALL and self._mesh.has_replicas
        for (progress, levels), reached, viewed in zip(
            self._by_unit(found.levels), found.reached, found.viewed, strict=True
        ):
            has_any = [level > GradientLevel.NONE for level in levels]
            progress.unit.note_views(viewed)
            if not keeps_partial:
                progress.unit.install_gradients(has_any)
            progress.learn(reached, has_any)

    def _by_unit(self, levels: Sequence[int]) -> Iterator[tuple[UnitProgress, Sequence[int]]]:
        """Yield the progress of each unit, with the levels of its parameters."""
        end = 0
        for progress in self._progresses:
            begin, end = end, end + len(progress.unit.sharded_parameters())
            yield progress, levels[begin:end]
