"""Mesh: the process groups of a rank, its communication streams, and its checks."""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardeddp.comm.agreement import (
    ABOUT_COLLECTIVES,
    ABOUT_PARAMETERS,
    begun,
    come_first,
    describe_mismatches,
    leave_to_parent,
    refuse_inherited,
)
from shardeddp.comm.backends import GlooCollectives, NativeCollectives
from shardeddp.comm.collectives import (
    Collectives,
    InheritedCollectives,
    SoloCollectives,
    Traffic,
)
from shardeddp.comm.desync import (
    STREAMS,
    BegunOperations,
    CallFingerprints,
    DesyncCheck,
    Watched,
    counted_by_torch,
)
from shardeddp.comm.group_pool import GroupPool
from shardeddp.comm.host_group import HostGroup, grid_of
from shardeddp.comm.liveness import LivenessProbe, place_of
from shardeddp.comm.propagation import drain_threads_at_exit
from shardeddp.comm.run_state import RunState
from shardeddp.comm.step_clock import StepClock
from shardeddp.comm.store import LostStoreError, StoreClient
from shardeddp.comm.streams import CommStream, make_stream
from shardeddp.plan.topology import Topology


def axes_of(topology: Topology, regather_size: int | None = None) -> dict[str, list[list[int]]]:
    """What a mesh has groups of its own for, and the ranks of each, over all ranks of the run.

    Args:
        topology: Which ranks share a model.
        regather_size: As of :class:`Mesh`.
    """
    shard, replicate = topology.shard_groups(), topology.replicate_groups()
    tensor = topology.tensor_groups()
    axes = {"gather": shard, "reduce": shard, "replicate": replicate, "activations": tensor}
    if regather_size is not None:
        axes["regather"] = topology.subgroups(regather_size)
    if topology.split_replicas:
        axes |= {"owners": topology.owner_groups(), "collect": replicate}
    shared = {"data": topology.data_groups(), "tensor": tensor}
    if topology.tensor_size > 1:
        shared["holders"] = topology.holder_groups()
    # One group of all ranks is that of the world.
    return axes | {purpose: groups for purpose, groups in shared.items() if len(groups) > 1}


def axes_of_experts(topology: Topology) -> dict[str, list[list[int]]]:
    """The same of a mesh of experts; the rest is that of the mesh that it is made of."""
    others = {"data", "owners", "collect"}
    return {name: groups for name, groups in axes_of(topology).items() if name not in others}


def count_connections(
    topology: Topology,
    rank: int,
    device: torch.device,
    regather_size: int | None,
    expert_size: int = 1,
) -> int:
    """Connections that a rank holds open for its groups on the host, of which gloo makes all.

    Args:
        topology: Which ranks share a model.
        rank: This one; the first may host the store.
        device: Where this rank computes; on the host, its collectives are gloo's, too.
        regather_size: As of :class:`Mesh`.
        expert_size: As of :class:`Mesh`.
    """
    world = topology.world_size
    views = [(topology, axes_of(topology, regather_size))]
    if expert_size > 1:
        of_experts = topology.over_experts(expert_size)
        views.append((of_experts, axes_of_experts(of_experts)))
    sizes = [*grid_of(world)]  # agreement
    lent = list[int]()
    for each, axes in views:
        compared = each.holder_groups()
        sizes += grid_of(len(compared[0])) if len(compared) > 1 else []  # the desync check
        if device.type == "cpu":
            sizes += [len(groups[0]) for groups in axes.values()]
            lent += [each.data_size, each.tensor_size] if each.tensor_size > 1 else []
    if device.type == "cpu":
        sizes.append(world)
    # Axes of one rank have no group, but in a device mesh.
    connected = sum(size + _OF_GLOO for size in [*(it for it in sizes if it > 1), *lent])
    return connected + (2 if rank else 2 * world)  # two connections of each rank to the store


_OF_GLOO = 3
"""Descriptors of a group that lead to no other rank; measured."""


_OTHERS_S = 3.0
"""How long ranks that have come to different operations wait to hear of each other's."""


class Mesh:
    """Everything through which the engine of this rank talks to other ranks.

    Gathers and reductions have communicators and streams of their own, so neither waits behind the
    other. Building a mesh is a collective of all ranks of the default process group.

    Args:
        topology: Which ranks share a model.
        device: Where this rank computes.
        timeout: After how long a collective of these groups gives up.
        regather_size: Neighbouring ranks of a shard group that gather for the backward; None: all
            of it.
        saving_timeout: The same while checkpoints are saved; None: ``timeout``.
        debug: Whether to compare what users communicate.
        expert_size: Neighbouring ranks that each have experts of their own.
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
        expert_size: int = 1,
    ) -> None:
        if dist.group.WORLD is not None:
            refuse_inherited(dist.group.WORLD, "the setup of a run")
        drain_threads_at_exit()
        self.topology = topology
        self.device = device
        self.rank = dist.get_rank()
        self.traffic = Traffic()
        self._timeout = timeout
        self._groups = GroupPool(self.rank, timeout)
        axes = axes_of(topology, regather_size)
        make, alone = (
            partial(self._collectives, axes),
            SoloCollectives([self.rank], 0, self.traffic),
        )
        self.world = self._among(dist.group.WORLD, range(topology.world_size))
        """Among all ranks: what users ask for, whatever their ranks hold."""
        self.gather = make("gather")
        """Among the ranks that share a model: all-gathers."""
        self.regather = make("regather", self.gather)
        """Among some of them: all-gathers for the backward of what the forward's have left."""
        self.reduce = make("reduce")
        """Among the same ranks: reduce-scatters."""
        self.replicate = make("replicate")
        """Among the ranks that hold equal shards: all-reduces."""
        self.owners = make("owners", self.gather)
        """Among the ranks that together own the model: what is asked of parameters outside units.

        Used on both streams, which is safe because each use is waited for before the next is
        issued.
        """
        self.collect = make("collect", alone)
        """Among the ranks that split a shard: all-gathers of its slices."""
        self.data = make("data", self.world)
        """Among the ranks that train one model on different batches: its buffers, and what is sent
        of its parameters outside the steady state.
        """
        self.tensor = make("tensor", self.world)
        """Among the ranks that split layers: what is asked of whole parameters; the exchange of
        activations is the model's own.
        """
        self.activation_traffic = Traffic()
        """What ranks that split layers exchange of activations and their gradients."""
        self.activations = make("activations", traffic=self.activation_traffic)
        """Among the same ranks, for layers that are split as ``tensor_parallel_plan`` says."""
        self.holders = make("holders", self.owners if topology.tensor_size == 1 else self.world)
        """Among the ranks that together hold all boxes of all parameters."""
        everyone = [range(topology.world_size)]
        self.control = self._groups.host("control", everyone, timeout)
        """All ranks, on the host: errors, what users ask for, agreement on the model, and what is
        decided for all of the run; never tensors of the model.
        """
        self.saving = self._groups.host(
            "control", everyone, timeout, channel=1, patience=saving_timeout
        )
        """The same for the saving of checkpoints, which may go on behind the back of training."""
        self.run = RunState()
        """What is open between the ranks of the run."""
        self.desync = DesyncCheck.of_group()
        """Ends waits that cannot be over."""
        self.liveness_probe = self.desync.liveness_probe
        """Says where ranks are that others wait for."""
        self.error_propagation = self.desync.error_propagation
        """Where errors are left for the other ranks."""
        self.gather_stream: CommStream = make_stream(device)
        self.reduce_stream: CommStream = make_stream(device)
        self.replicate_stream: CommStream = make_stream(device)
        """Of reductions across replicas, so that those in the shard group wait for none of them."""
        self.copy_in_stream: CommStream = make_stream(device)
        """Of copies from host memory, so that the next unit's is under way during a gather."""
        self.copy_out_stream: CommStream = make_stream(device)
        """Of copies to host memory, so that the next reduction waits for none of them."""
        for group in (self.control, dist.group.WORLD):
            if group is not None:
                come_first(group, partial(_settle, weakref.ref(self)))
        self._meetings = StoreClient("meetings", self.rank)
        self._describe_mismatches(self.control, everyone[0])
        self.users = self._fingerprints("users", everyone, timeout, ABOUT_COLLECTIVES)
        """Of all ranks, before what their users communicate."""
        self.compares = debug
        """Whether everything is compared that users communicate, and not only what would hang."""
        self.fingerprints = self._fingerprints("owners", topology.holder_groups(), timeout)
        """Of the ranks that hold all of the model together."""
        self.data_fingerprints = (
            self.fingerprints
            if len(topology.holder_groups()) == 1
            else self._fingerprints("everyone", everyone, timeout)
        )
        """Of the ranks of ``data``."""
        self.is_inherited = False
        """Whether this process was forked from the rank, so that nothing can be communicated."""
        self._whole: Mesh | None = None
        self.experts: Mesh | None = None
        """The same ranks as parameters of experts see them; None: every rank has all experts.

        There, ``tensor`` are the ranks that have different ones.
        """
        if expert_size > 1:
            self.experts = self._over_experts(expert_size)
        neighbours = {
            ranks[(place + step) % len(ranks)]
            for groups in (everyone, axes["gather"], axes["replicate"])
            for ranks in groups
            if self.rank in ranks
            for place in [list(ranks).index(self.rank)]
            for step in (-1, 1)
        }
        self._watched = Watched(
            neighbours=neighbours - {self.rank},
            progress=self._progress(),
            own=self._groups.names(),
        )
        self.desync.watch(self._watched)
        _MESHES.add(self)
        if topology.world_size > 1 and dist.get_backend() != "fake":
            self.liveness_probe.start()

    def _over_experts(self, size: int) -> Mesh:
        """This mesh with other axes; streams, counts and what ranks agree on are the same."""
        made = copy.copy(self)
        made._whole, made.topology = self, self.topology.over_experts(size)
        axes = axes_of_experts(made.topology)
        make = partial(self._collectives, axes, of=" of experts")
        made.gather = made.regather = made.owners = make("gather")
        made.reduce = make("reduce")
        made.replicate = make("replicate")
        made.tensor = make("tensor", self.world)
        made.activations = make("activations", traffic=self.activation_traffic)
        made.holders = make("holders", self.world)
        made.fingerprints = made._fingerprints(
            "owners of experts", made.topology.holder_groups(), self._timeout
        )
        _MESHES.add(made)
        return made

    @property
    def expert_size(self) -> int:
        """Ranks that have different experts."""
        return 1 if self.experts is None else self.experts.tensor.size

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent so far: parameters, gradients, activations, tokens."""
        return self.traffic.total_nbytes + self.activation_traffic.total_nbytes

    @property
    def has_replicas(self) -> bool:
        """Whether gradients of the model wait to be shared across replicas.

        Those of experts wait with them, even where no other rank has the same.
        """
        return self.whole.replicate.size > 1

    @property
    def whole(self) -> Mesh:
        """The mesh of the rest of the model; of that, itself."""
        return self._whole or self

    @property
    def shard_rank(self) -> int:
        """Place of this rank among those that share a model."""
        return self.topology.shard_rank(self.rank)

    @property
    def slice_rank(self) -> int:
        """Number of the slice of every flat buffer that this rank owns."""
        return self.topology.slice_rank(self.rank)

    @cached_property
    def owner_slices(self) -> tuple[int, ...]:
        """Slice number of every rank in ``owners``."""
        return tuple(map(self.topology.slice_rank, self.owners.ranks))

    def begun_by_others(self) -> BegunOperations:
        """How many operations torch has begun, by group, in those that are not the mesh's."""
        return counted_by_torch(self._groups.names())

    def drain(self) -> None:
        """Block the host until gradients that compute has waited for are in host memory."""
        self.copy_out_stream.drain()

    def give_back(self) -> None:
        """A run has ended: later ones of this process may communicate by the same groups."""
        streams = self.gather_stream, self.reduce_stream, self.replicate_stream
        self._groups.give_back(sum(stream.issued for stream in streams))

    def device_mesh(self, names: tuple[str, str]) -> DeviceMesh:
        """The axes of ranks that hold the same part of a layer, and of those that hold its parts.

        Its groups are other than the mesh's own: users communicate in them. A collective of all
        ranks.

        Args:
            names: Of the two axes.
        """
        tensor = self.topology.tensor_groups()
        groups = [
            self._groups.lend(name, each, self._timeout)
            for name, each in zip(names, (self.topology.data_groups(), tensor), strict=True)
        ]
        return DeviceMesh.from_group(groups, self.device.type, tensor, mesh_dim_names=names)

    def measure(self, clock: StepClock | None) -> None:
        """Let a clock measure what compute waits for; None ends it."""
        self.run.clock = clock
        checks = self.users.group, self.fingerprints.group, self.data_fingerprints.group
        for group in (self.control, *checks):
            if group is not None:
                group.clock = clock
        if self.experts is not None:
            self.experts.measure(clock)

    def begin_run(self) -> None:
        """A run of a Trainer begins on the thread that calls this; all ranks call it."""
        refuse_inherited(self.control, "a run of a Trainer")
        self.desync.begin_run()
        self._let_read(threading.get_ident())

    def end_run(self) -> None:
        """End the run: any thread may read parameters again."""
        self._let_read(None)

    def _let_read(self, thread: int | None) -> None:
        self.run.thread = self.fingerprints.thread = self.data_fingerprints.thread = thread
        if self.experts is not None:
            self.experts._let_read(thread)

    def leave_to_parent(self) -> None:
        """This process was forked from the rank: refuse what the rank does with others."""
        self.is_inherited = True
        for name, former in [*vars(self).items()]:
            if isinstance(former, Collectives) and former.size > 1:
                setattr(self, name, InheritedCollectives(former.ranks, former.rank, self.traffic))
        for each in (self.users, self.fingerprints, self.data_fingerprints):
            each.leave_to_parent()
        self.error_propagation.leave_to_parent()
        for group in (self.control, self.saving, dist.group.WORLD):
            if group is not None:
                leave_to_parent(group)

    def _progress(self) -> Callable[[], BegunOperations]:
        """What tells how much this rank has begun."""
        streams = {"gathers": self.gather_stream, "reductions": self.reduce_stream}
        hosts: dict[str, HostGroup | dist.ProcessGroup] = {
            "everyone": self.control,
            "world": cast(dist.ProcessGroup, dist.group.WORLD),
        }
        if self.fingerprints.group is not None:
            hosts[f"owners {self.owners.ranks}"] = self.fingerprints.group

        def progress() -> BegunOperations:
            return {STREAMS: {name: stream.issued for name, stream in streams.items()}} | {
                name: begun(group) for name, group in hosts.items()
            }

        return progress

    def _fingerprints(
        self,
        name: str,
        groups: Sequence[Sequence[int]],
        timeout: timedelta,
        advice: str = ABOUT_PARAMETERS,
    ) -> CallFingerprints:
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        alone = len(ranks) == 1 or dist.get_backend() == "fake"
        if alone:
            group = None
        elif len(groups) == 1:
            group = self.control
        else:
            group = self._groups.host(f"desync check of {name}", groups, timeout)
        if group is not None:
            come_first(group, partial(_settle, weakref.ref(self)))
            self._describe_mismatches(group, ranks)
        return CallFingerprints(
            group,
            ranks=ranks,
            rank=self.rank,
            error_propagation=self.error_propagation,
            name=name,
            advice=advice,
        )

    def _describe_mismatches(self, group: HostGroup, ranks: Sequence[int]) -> None:
        # Torch knows a group for longer than anybody needs the liveness probe.
        liveness_probe = weakref.ref(self.liveness_probe)
        describe_mismatches(
            group, partial(_describe, self._meetings, liveness_probe, ranks, self.rank)
        )

    def _collectives(
        self,
        axes: Mapping[str, Sequence[Sequence[int]]],
        purpose: str,
        otherwise: Collectives | None = None,
        *,
        of: str = "",
        traffic: Traffic | None = None,
    ) -> Collectives:
        """Collectives of one axis of the mesh, which divides the ranks into groups of one size.

        Args:
            axes: Ranks of all groups, by purpose.
            purpose: Name of the axis.
            otherwise: Result where the mesh has no group for it.
            of: Ending of the group's name.
            traffic: Count of bytes; None: that of parameters and gradients.
        """
        if otherwise is not None and purpose not in axes:
            return otherwise
        groups = axes[purpose]
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        alone = len(ranks) == 1
        group = None if alone else self._groups.get(purpose + of, groups, self._timeout)
        return self._among(group, ranks, traffic)

    def _among(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        traffic: Traffic | None = None,
    ) -> Collectives:
        traffic = traffic or self.traffic
        if group is None or len(ranks) == 1:
            return SoloCollectives(ranks, 0, traffic)
        if self.device.type == "cpu":
            return GlooCollectives(group, ranks, traffic)
        return NativeCollectives(group, ranks, traffic)


def _settle(mesh: weakref.ref[Mesh]) -> None:
    if (found := mesh()) is not None:
        found.run.settle()


_MESHES: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    if dist.is_initialized():
        # A process group that was garbage in the parent would wait, where this process frees it,
        # for threads that only the parent has.
        gc.freeze()
    for mesh in list(_MESHES):
        mesh.leave_to_parent()


# At fork alone, so that collectives need not compare process ids in every step.
os.register_at_fork(after_in_child=_leave_all_to_parent)


def _describe(
    client: StoreClient,
    alive: weakref.ref[LivenessProbe],
    ranks: Sequence[int],
    rank: int,
    meeting: str,
    operation: str,
) -> str:
    """Operations that the ranks reached at a sync point; called by all ranks that reached it."""
    place = f"{operation} at {place_of(sys._getframe())}"
    others = {other: f"{meeting}/{other}" for other in ranks if other != rank}
    listed: dict[int, str] = {}
    with suppress(LostStoreError):
        client.write(f"{meeting}/{rank}", place)
        texts = client.wait_for([*others.values()], _OTHERS_S)
        listed = {
            other: f"rank {other} has come to {texts[name]}"
            for other, name in others.items()
            if name in texts
        }
        # Who has only begun it, and waits for something else, does not know of the meeting.
        liveness_probe = alive()
        answers = (
            liveness_probe.ask_now(others.keys() - listed.keys(), _OTHERS_S)
            if liveness_probe is not None
            else {}
        )
        for other, answer in answers.items():
            listed[other] = (
                f"rank {other} is in "
                f"{answer['reports'].get('desync', {}).get('what', answer['where'])}"
            )
    elsewhere = "; ".join(listed[other] for other in sorted(listed)) or "nobody knows what"
    return f"{place} on rank {rank} needs ranks {[*others]} to do the same, and others do something else: {elsewhere}"
