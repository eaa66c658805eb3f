"""Mesh: the communicators of one rank on a mesh of ``replicate x shard`` ranks."""

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from shardeddp.comm.attendance import Attendance
from shardeddp.comm.collectives import Collectives, SoloCollectives
from shardeddp.comm.desync import LANES, DesyncCheck, Progress
from shardeddp.comm.ending import end_quietly
from shardeddp.comm.failures import Failures
from shardeddp.comm.gloo import GlooCollectives
from shardeddp.comm.groups import Groups
from shardeddp.comm.lanes import Lane, make_lane
from shardeddp.comm.lookout import Lookout, place_of
from shardeddp.comm.native import NativeCollectives
from shardeddp.comm.notes import LostStoreError, Notes
from shardeddp.comm.sequence import ABOUT_COLLECTIVES, ABOUT_PARAMETERS, begun, describe_mismatches
from shardeddp.comm.traffic import Traffic
from shardeddp.comm.written import Written
from shardeddp.plan.topology import Topology

_OTHERS_S = 3.0
"""How long ranks that have come to different operations wait to hear of each other's."""


class Mesh:
    """Everything through which the engine of this rank talks to other ranks.

    Gathers and reductions have communicators and lanes of their own, so neither waits behind the other. Building a mesh
    is a collective of all ranks of the default process group.

    Args:
        topology: Which ranks share a model.
        device: Where this rank computes.
        timeout: After how long a collective of these groups gives up.
        regather_size: Neighbouring ranks of a shard group that gather for the backward; None: all of it.
        saving_timeout: The same while checkpoints are saved; None: ``timeout``.
        debug: Whether to compare what users communicate.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        timeout: timedelta,
        regather_size: int | None = None,
        *,
        saving_timeout: timedelta | None = None,
        debug: bool = False,
    ) -> None:
        end_quietly()
        self.topology = topology
        self.device = device
        self.rank = dist.get_rank()
        self.traffic = Traffic()
        shard_groups, replicate_groups = topology.shard_groups(), topology.replicate_groups()
        self._groups = Groups(self.rank, timeout)
        gather_group = self._groups.get("gather", shard_groups, timeout)
        replicate_group = self._groups.get("replicate", replicate_groups, timeout)
        self.gather = self._collectives(gather_group, shard_groups)
        """Among the ranks that share a model: all-gathers."""
        self.regather = self.gather if regather_size is None else self._regather(regather_size, timeout)
        """Among some of them: all-gathers for the backward of what the forward's have left."""
        self.reduce = self._collectives(self._groups.get("reduce", shard_groups, timeout), shard_groups)
        """Among the same ranks: reduce-scatters."""
        self.replicate = self._collectives(replicate_group, replicate_groups)
        """Among the ranks that hold equal shards: all-reduces."""
        owner_groups = topology.owner_groups()
        split = topology.split_replicas
        self.owners = (
            self._collectives(self._groups.get("owners", owner_groups, timeout), owner_groups) if split else self.gather
        )
        """Among the ranks that own all of the model together: what is asked of a parameter outside its unit. Used on
        both lanes, which is safe because each use is waited for before the next is issued."""
        self.collect = (
            self._collectives(self._groups.get("collect", replicate_groups, timeout), replicate_groups)
            if split
            else SoloCollectives([self.rank], 0, self.traffic)
        )
        """Among the ranks that split a shard: all-gathers of its slices."""
        self.world = self._collectives(dist.group.WORLD, [list(range(topology.world_size))])
        """Among all ranks: buffers, and everything outside the steady state."""
        # On torch's fake process group, which stands for ranks that are not there, gloo finds no peers.
        backend = "fake" if dist.get_backend() == "fake" else "gloo"
        everyone = [range(topology.world_size)]
        self.control = self._groups.get("control", everyone, timeout, backend)
        """All ranks, on the host: agreement, never tensors of the model."""
        self.saving = self._groups.get("saving", everyone, saving_timeout or timeout, backend)
        """The same for the saving of checkpoints, which may go on behind the back of training."""
        self.written = Written()
        """What users write to sharded parameters; compared when the ranks agree at the end of a backward."""
        self.lookout = Lookout(self.rank)
        """Says where ranks are that others wait for."""
        self.failures = Failures(self.rank, topology.world_size, self.lookout)
        """Where errors are left for the other ranks."""
        self.gather_lane: Lane = make_lane(device)
        self.reduce_lane: Lane = make_lane(device)
        self._meetings = Notes("meetings", self.rank)
        self._describe_mismatches(self.control, everyone[0])
        self.users = self._attendance("users", everyone, timeout, ABOUT_COLLECTIVES)
        """Of all ranks, before what their users communicate."""
        self.compares = debug
        """Whether everything is compared that users communicate, and not only what would hang."""
        self.attendance = self._attendance("owners", owner_groups, timeout)
        """Of the ranks that own all of the model together."""
        self.assembly = self.attendance if len(owner_groups) == 1 else self._attendance("everyone", everyone, timeout)
        """Of all ranks."""
        neighbours = {
            ranks[(place + step) % len(ranks)]
            for groups in (everyone, shard_groups, replicate_groups)
            for ranks in groups
            if self.rank in ranks
            for place in [list(ranks).index(self.rank)]
            for step in (-1, 1)
        }
        self.desync = DesyncCheck(
            self.rank,
            sorted(neighbours),
            self._progress(),
            self._groups.names(),
            self.lookout,
            self.failures,
        )
        """Ends waits that cannot be over."""
        if topology.world_size > 1 and backend != "fake":
            self.lookout.start()

    @property
    def shard_rank(self) -> int:
        """Place of this rank among those that share a model."""
        return self.topology.shard_rank(self.rank)

    @property
    def slice_rank(self) -> int:
        """Number of the slice of every flat buffer that this rank owns."""
        return self.topology.slice_rank(self.rank)

    def drain(self) -> None:
        """Block the host until both lanes have done what they were given, for what they copied to host memory."""
        self.gather_lane.drain()
        self.reduce_lane.drain()

    def give_back(self) -> None:
        """A run has ended well: later ones of this process may communicate by the same groups."""
        self._groups.give_back()

    def begin_run(self) -> None:
        """A run of a Trainer begins on the thread that calls this; all ranks call it."""
        self.lookout.begin_run()
        self.failures.begin_run()

    def _progress(self) -> Callable[[], Progress]:
        """What tells how much this rank has begun."""
        lanes = {"gathers": self.gather_lane, "reductions": self.reduce_lane}
        hosts = {"everyone": self.control, "world": cast(dist.ProcessGroup, dist.group.WORLD)}
        if self.attendance.group is not None:
            hosts[f"owners {self.owners.ranks}"] = self.attendance.group

        def progress() -> Progress:
            return {LANES: {name: lane.issued for name, lane in lanes.items()}} | {
                name: begun(group) for name, group in hosts.items()
            }

        return progress

    def _attendance(
        self, name: str, groups: Sequence[Sequence[int]], timeout: timedelta, advice: str = ABOUT_PARAMETERS
    ) -> Attendance:
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        alone = len(ranks) == 1 or dist.get_backend() == "fake"
        if alone:
            group = None
        elif len(groups) == 1:
            group = self.control
        else:
            group = self._groups.get(f"roll call of {name}", groups, timeout, "gloo")
        if group is not None:
            self._describe_mismatches(group, ranks)
        return Attendance(group, ranks=ranks, rank=self.rank, failures=self.failures, name=name, advice=advice)

    def _describe_mismatches(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        # Torch knows a group for longer than anybody needs the lookout.
        lookout = weakref.ref(self.lookout)
        describe_mismatches(group, partial(_describe, self._meetings, lookout, ranks, self.rank))

    def _regather(self, size: int, timeout: timedelta) -> Collectives:
        groups = self.topology.subgroups(size)
        return self._collectives(self._groups.get("regather", groups, timeout), groups)

    def _collectives(self, group: dist.ProcessGroup | None, groups: Sequence[Sequence[int]]) -> Collectives:
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        if group is None or len(ranks) == 1:
            return SoloCollectives(ranks, 0, self.traffic)
        if self.device.type == "cpu":
            return GlooCollectives(group, ranks, self.traffic)
        return NativeCollectives(group, ranks, self.traffic)


def _describe(
    notes: Notes, alive: weakref.ref[Lookout], ranks: Sequence[int], rank: int, meeting: str, operation: str
) -> str:
    """Who has come to what, where that is not the same; all ranks that have come to a meeting call it."""
    place = f"{operation} at {place_of(sys._getframe())}"
    others = {other: f"{meeting}/{other}" for other in ranks if other != rank}
    listed: dict[int, str] = {}
    with suppress(LostStoreError):
        notes.write(f"{meeting}/{rank}", place)
        texts = notes.wait_for([*others.values()], _OTHERS_S)
        listed = {other: f"rank {other} has come to {texts[name]}" for other, name in others.items() if name in texts}
        # Who has only begun it, and waits for something else, does not know of the meeting.
        lookout = alive()
        answers = lookout.ask_now(others.keys() - listed.keys(), _OTHERS_S) if lookout is not None else {}
        for other, answer in answers.items():
            listed[other] = f"rank {other} is in {answer['reports'].get('desync', {}).get('what', answer['where'])}"
    elsewhere = "; ".join(listed[other] for other in sorted(listed)) or "nobody knows what"
    return f"{place} on rank {rank} needs ranks {[*others]} to do the same, and others do something else: {elsewhere}"
