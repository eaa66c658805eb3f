"""Mesh: process groups, communication streams and desync checks of a rank."""

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
from shardeddp.comm.liveness import LivenessProbe, code_line_of
from shardeddp.comm.propagation import drain_threads_at_exit
from shardeddp.comm.run_state import RunState
from shardeddp.comm.step_clock import StepClock
from shardeddp.comm.store import LostStoreError, StoreClient
from shardeddp.comm.streams import CommStream, make_stream
from shardeddp.plan.topology import Topology


def axes_of(topology: Topology, regather_size: int | None = None) -> dict[str, list[list[int]]]:
    """Return the ranks of all process groups of a mesh, by axis."""
    shard, replicate = topology.shard_groups(), topology.replicate_groups()
    tensor = topology.tensor_groups()
    axes = {"gather": shard, "reduce": shard, "replicate": replicate, "activations": tensor}
    if regather_size is not None:
        axes["regather"] = topology.subgroups(regather_size)
    if topology.split_replicas:
        axes |= {"slices": topology.slice_groups(), "gather_slices": replicate}
    shared = {"data": topology.data_groups(), "tensor": tensor}
    if topology.tensor_size > 1:
        shared["holders"] = topology.holder_groups()
    # An axis with one group of all ranks uses the world group.
    return axes | {purpose: groups for purpose, groups in shared.items() if len(groups) > 1}


def axes_of_experts(topology: Topology) -> dict[str, list[list[int]]]:
    """Return the axes of a mesh of experts; other axes come from the mesh that it is made of."""
    others = {"data", "slices", "gather_slices"}
    return {name: groups for name, groups in axes_of(topology).items() if name not in others}


def count_connections(
    topology: Topology,
    rank: int,
    device: torch.device,
    regather_size: int | None,
    expert_size: int = 1,
) -> int:
    """Count the connections that a rank keeps open for its gloo groups and the store.

    Args:
        topology: Ranks and the axes that divide them.
        rank: Rank of this process; rank 0 may host the store.
        device: Compute device; collectives of the model use gloo, too, if it is the CPU.
        regather_size: Ranks of a regather group; see :class:`Mesh`.
        expert_size: Ranks with different experts; see :class:`Mesh`.
    """
    world = topology.world_size
    views = [(topology, axes_of(topology, regather_size))]
    if expert_size > 1:
        of_experts = topology.over_experts(expert_size)
        views.append((of_experts, axes_of_experts(of_experts)))
    sizes = [*grid_of(world)]  # agreement
    of_users = list[int]()
    for each, axes in views:
        compared = each.holder_groups()
        sizes += grid_of(len(compared[0])) if len(compared) > 1 else []  # the desync check
        if device.type == "cpu":
            sizes += [len(groups[0]) for groups in axes.values()]
            of_users += [each.data_size, each.tensor_size] if each.tensor_size > 1 else []
    if device.type == "cpu":
        sizes.append(world)
    # Axes of one rank have a group in a device mesh only.
    connected = sum(size + _OF_GLOO for size in [*(it for it in sizes if it > 1), *of_users])
    return connected + (2 if rank else 2 * world)  # two connections of each rank to the store


_OF_GLOO = 3
"""File descriptors of a gloo group besides its connections to other ranks; measured."""


_OTHERS_S = 3.0
"""Timeout in which ranks at different operations describe them to each other."""


class Mesh:
    """Communication of one rank: process groups, streams, and state shared by all ranks.

    Gathers and reductions have communicators and streams of their own, so neither waits for the
    other. Building a mesh is a collective of all ranks of the default process group.

    Args:
        topology: Ranks and the axes that divide them.
        device: Compute device of this rank.
        timeout: Timeout of a collective in these groups.
        regather_size: Number of neighbouring ranks of a shard group that gather for the backward;
            None: the whole shard group.
        saving_timeout: Timeout of host messages while checkpoints are saved; None: ``timeout``.
        debug: True to compare all collectives that users call.
        expert_size: Number of neighbouring ranks with different experts; 1: no expert mesh.
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
        self.timeouts = timeout, saving_timeout or timeout
        """Timeouts of a collective, and of host messages while checkpoints are saved."""
        self._groups = GroupPool(self.rank, timeout)
        axes = axes_of(topology, regather_size)
        self._make_collectives(axes)
        everyone = [range(topology.world_size)]
        self.control = self._groups.host("control", everyone, timeout)
        """Host group of all ranks: errors, requests of users, agreement on the model and on
        decisions of the run; never tensors of the model.
        """
        self.saving = self._groups.host(
            "control", everyone, timeout, channel=1, patience=saving_timeout
        )
        """Channel of the host group for saving checkpoints, which may overlap with training."""
        self.run = RunState()
        """State of the run that parameters, gradients and layers share."""
        self.desync = DesyncCheck.of_group()
        """Check that ends waits that cannot complete."""
        self.liveness_probe = self.desync.liveness_probe
        """Probe that reports where a rank is that others wait for."""
        self.error_propagation = self.desync.error_propagation
        """Channel by which errors of one rank reach the others."""
        self.gather_stream: CommStream = make_stream(device)
        """Stream of gathers, and of the copies into their buffers; compute waits for it."""
        self.reduce_stream: CommStream = make_stream(device)
        """Stream of reductions of what compute has packed; compute and replicas wait for it."""
        self.replicate_stream: CommStream = make_stream(device)
        """Stream of reductions across replicas; those in the shard group do not wait for it."""
        self.copy_in_stream: CommStream = make_stream(device)
        """Stream of copies from host memory; the next unit's copy overlaps with a gather."""
        self.copy_out_stream: CommStream = make_stream(device)
        """Stream of copies to host memory; the next reduction does not wait for it."""
        self._make_fingerprints()
        self.compares_user_calls = debug
        """Whether all collectives of users are compared, and not only those that could hang."""
        self.is_inherited = False
        """Whether this process was forked from the rank, and so cannot communicate."""
        self._dense: Mesh | None = None
        self._progress = self._count_begun()
        self._watched: Watched | None = None
        """State for the desync check; None: the mesh of experts, for which ``dense`` has it."""
        self.experts: Mesh | None = None
        """Mesh of the same ranks for parameters of experts; None: every rank has all experts.

        Its ``tensor`` group has the ranks with different experts.
        """
        if expert_size > 1:
            self.experts = self._over_experts(expert_size)
        self._watched = Watched(
            neighbours=_neighbours(self.rank, [*everyone, *axes["gather"], *axes["replicate"]]),
            progress=self._progress,
            own=self._groups.names(),  # those of the mesh of experts, too
        )
        self.desync.watch(self._watched)
        _MESHES.add(self)
        if topology.world_size > 1 and dist.get_backend() != "fake":
            self.liveness_probe.start()

    def _make_collectives(self, axes: Mapping[str, Sequence[Sequence[int]]]) -> None:
        make = partial(self._collectives, axes)
        self.world = self._among(dist.group.WORLD, range(self.topology.world_size))
        """Collectives of all ranks, as users call them."""
        self.gather = make("gather")
        """All-gathers in the shard group, on the gather stream.

        Without split replicas ``slices`` is the same communicator, without tensor parallelism
        ``holders`` is ``slices``, and ``data`` and ``tensor`` may be ``world``: one communicator
        is used on several streams, while an earlier collective in it may still be under way (a
        prefetched gather). That is safe because the hosts of all ranks issue the collectives of a
        communicator in one order, and it keeps that order: NCCL lets each kernel wait for the one
        before, on whatever stream that is, and gloo matches the messages of two ranks in order.
        """
        self.regather = make("regather", self.gather)
        """All-gathers in a part of the shard group, for the backward, of parts kept by forwards."""
        self.reduce = make("reduce")
        """Reduce-scatters in the shard group."""
        self.replicate = make("replicate")
        """Reductions in the replicate group: the ranks that hold equal shards."""
        self.slices = make("slices", self.gather)
        """Collectives of the ranks with the slices of a flat buffer: whole parameters outside of
        their units, on the gather stream. It is ``gather`` unless replicas split shards.
        """
        self.gather_slices = make("gather_slices", SoloCollectives([self.rank], 0, self.traffic))
        """All-gathers of the slices of a shard, among the replicas that split it."""
        self.data = make("data", self.world)
        """Collectives of the ranks that train one model on different batches: buffers of the model,
        and parameters outside of the steady state.
        """
        self.tensor = make("tensor", self.world)
        """Collectives of the ranks that split layers, for whole parameters; activations have
        communicators of their own.
        """
        self.activation_traffic = Traffic()
        """Bytes of activations and their gradients, sent between ranks that split layers."""
        self.activations = make("activations", traffic=self.activation_traffic)
        """Collectives of the ranks that split layers, for layers in ``tensor_parallel_plan``."""
        self.holders = make(
            "holders", self.slices if self.topology.tensor_size == 1 else self.world
        )
        """Collectives of the ranks that together hold all boxes of all parameters: partial results,
        on the reduce stream. It is ``slices`` without tensor parallelism, and ``world`` if these are
        all ranks.
        """

    def _make_fingerprints(self) -> None:
        everyone, holders = [self.control.ranks], self.topology.holder_groups()
        self._mismatch_store = StoreClient("mismatches", self.rank)
        self._follow_operations(self.control)
        self.user_fingerprints = self._fingerprints("users", everyone, ABOUT_COLLECTIVES)
        """Call fingerprints of all ranks, before collectives that users call."""
        self.fingerprints = self._fingerprints("holders", holders)
        """Call fingerprints of the ranks that together hold all of the model."""
        self.world_fingerprints = (
            self.fingerprints if len(holders) == 1 else self._fingerprints("everyone", everyone)
        )
        """Call fingerprints of all ranks."""

    def _over_experts(self, size: int) -> Mesh:
        """Make the mesh of experts, which shares the parts of this mesh that have no axis.

        These are the device, the streams, the byte counters, the pool of groups, the host groups,
        the state of the run, the desync check, the call fingerprints of users and of all ranks, and
        the collectives ``world``, ``data`` and ``gather_slices``.
        """
        made = copy.copy(self)
        made._dense, made.topology = self, self.topology.over_experts(size)
        axes = axes_of_experts(made.topology)
        make = partial(self._collectives, axes, of=" of experts")
        made.gather = made.regather = made.slices = make("gather")
        made.reduce = make("reduce")
        made.replicate = make("replicate")
        made.tensor = make("tensor", self.world)
        made.activations = make("activations", traffic=self.activation_traffic)
        made.holders = make("holders", self.world)
        made.fingerprints = made._fingerprints("holders of experts", made.topology.holder_groups())
        _MESHES.add(made)
        return made

    @property
    def expert_size(self) -> int:
        """Number of ranks that have different experts."""
        return 1 if self.experts is None else self.experts.tensor.size

    @property
    def sent_nbytes(self) -> int:
        """Bytes sent by this rank so far: parameters, gradients, activations, tokens."""
        return self.traffic.total_nbytes + self.activation_traffic.total_nbytes

    @property
    def has_replicas(self) -> bool:
        """Whether gradients are reduced across replicas after the shard group.

        Gradients of experts follow the model's, even if no other rank has the same experts.
        """
        return self.dense.replicate.size > 1

    @property
    def dense(self) -> Mesh:
        """Mesh of the parameters outside of experts: this mesh, or the one that it was made of."""
        return self._dense or self

    @property
    def shard_rank(self) -> int:
        """Rank within the shard group."""
        return self.topology.shard_rank(self.rank)

    @property
    def slice_rank(self) -> int:
        """Index of the slice that this rank owns in every flat buffer."""
        return self.topology.slice_rank(self.rank)

    @cached_property
    def slice_ranks(self) -> tuple[int, ...]:
        """Slice index of every rank in ``slices``."""
        return tuple(map(self.topology.slice_rank, self.slices.ranks))

    def broadcast_whole_(self, values: torch.Tensor) -> None:
        """Overwrite the values of a whole tensor with those of rank 0, on all ranks.

        A collective of all ranks: of those that train one model on different batches, then of those
        that split layers.

        Args:
            values: Contiguous tensor on the mesh's device; of equal shape and dtype on all ranks.
        """
        self.data.broadcast_(values, 0).wait()
        self.tensor.broadcast_(values, 0).wait()

    def begun(self) -> BegunOperations:
        """Count the operations that this rank has begun in groups of the mesh, by group."""
        return self.dense._progress()

    def begun_by_others(self) -> BegunOperations:
        """Count the operations that torch has begun in groups outside of the mesh, by group."""
        return counted_by_torch(self._groups.names())

    def drain(self) -> None:
        """Block the host until gradients that compute has waited for are in host memory."""
        self.copy_out_stream.drain()

    def give_back(self) -> None:
        """Return the process groups to the pool at the end of a run, for later runs."""
        streams = self.gather_stream, self.reduce_stream, self.replicate_stream
        self._groups.give_back(sum(stream.issued for stream in streams))

    def device_mesh(self, names: tuple[str, str]) -> DeviceMesh:
        """Make torch's mesh of two axes: data parallel, and tensor parallel.

        Users communicate in its groups, so they are separate from those of this mesh. A collective
        of all ranks.
        """
        tensor = self.topology.tensor_groups()
        groups = [
            self._groups.get_for_users(name, each, self._timeout)
            for name, each in zip(names, (self.topology.data_groups(), tensor), strict=True)
        ]
        return DeviceMesh.from_group(groups, self.device.type, tensor, mesh_dim_names=names)

    def measure(self, clock: StepClock | None) -> None:
        """Let a step clock measure the waits of compute; None ends the measurement."""
        self.run.measure(clock)
        checks = (
            self.user_fingerprints.group,
            self.fingerprints.group,
            self.world_fingerprints.group,
        )
        for group in (self.control, *checks):
            if group is not None:
                group.measure(clock)
        if self.experts is not None:
            self.experts.measure(clock)

    def begin_run(self) -> None:
        """Begin a run of a Trainer on the calling thread; called on all ranks."""
        refuse_inherited(self.control, "a run of a Trainer")
        self.desync.begin_run()
        self._let_read(threading.get_ident())

    def end_run(self) -> None:
        """End the run: any thread may read parameters again."""
        self._let_read(None)

    def _let_read(self, thread: int | None) -> None:
        for each in (self.fingerprints, self.world_fingerprints):
            each.restrict_to(thread)
        if self.experts is not None:
            self.experts._let_read(thread)

    def leave_to_parent(self) -> None:
        """Refuse all communication in this process, which was forked from the rank."""
        self.is_inherited = True
        for name, former in [*vars(self).items()]:
            if isinstance(former, Collectives) and former.size > 1:
                setattr(self, name, InheritedCollectives(former.ranks, former.rank, self.traffic))
        for each in (self.user_fingerprints, self.fingerprints, self.world_fingerprints):
            each.leave_to_parent()
        self.error_propagation.leave_to_parent()
        for group in (self.control, self.saving, dist.group.WORLD):
            if group is not None:
                leave_to_parent(group)

    def _count_begun(self) -> Callable[[], BegunOperations]:
        """Return a function that counts the operations begun by this rank."""
        streams = {"gathers": self.gather_stream, "reductions": self.reduce_stream}
        hosts: dict[str, HostGroup | dist.ProcessGroup] = {
            "everyone": self.control,
            "world": cast(dist.ProcessGroup, dist.group.WORLD),
        }
        if self.fingerprints.group is not None:
            hosts[f"holders {self.slices.ranks}"] = self.fingerprints.group

        def progress() -> BegunOperations:
            return {STREAMS: {name: stream.issued for name, stream in streams.items()}} | {
                name: begun(group) for name, group in hosts.items()
            }

        return progress

    def _fingerprints(
        self,
        name: str,
        groups: Sequence[Sequence[int]],
        advice: str = ABOUT_PARAMETERS,
    ) -> CallFingerprints:
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        alone = len(ranks) == 1 or dist.get_backend() == "fake"
        if alone:
            group = None
        elif len(groups) == 1:
            group = self.control
        else:
            group = self._groups.host(f"desync check of {name}", groups, self._timeout)
            self._follow_operations(group)
        return CallFingerprints(
            group,
            ranks=ranks,
            rank=self.rank,
            error_propagation=self.error_propagation,
            name=name,
            advice=advice,
        )

    def _follow_operations(self, group: HostGroup) -> None:
        """Describe the mismatches of a group's operations."""
        # Weak: torch keeps a group for longer than the liveness probe is needed.
        liveness_probe = weakref.ref(self.liveness_probe)
        describe_mismatches(
            group, partial(_describe, self._mismatch_store, liveness_probe, group.ranks, self.rank)
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
        """Make the collectives of one axis of the mesh, whose groups are of equal size.

        Without such an axis, return ``otherwise``.
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


def _neighbours(rank: int, groups: Sequence[Sequence[int]]) -> set[int]:
    """Return the ranks before and after a rank in its groups; the first follows the last."""
    found = set[int]()
    for ranks in groups:
        if rank in ranks:
            place = ranks.index(rank)
            found |= {ranks[place - 1], ranks[(place + 1) % len(ranks)]}
    return found - {rank}


_MESHES: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    if dist.is_initialized():
        # Freeing a process group that was garbage in the parent would wait in this process for
        # threads that only the parent has.
        gc.freeze()
    for mesh in list(_MESHES):
        mesh.leave_to_parent()


# Registered for forks, so that collectives need not compare process ids in every step.
os.register_at_fork(after_in_child=_leave_all_to_parent)


def _describe(
    client: StoreClient,
    weak_probe: weakref.ref[LivenessProbe],
    ranks: Sequence[int],
    rank: int,
    sync_point: str,
    operation: str,
) -> str:
    """Describe the operations of the ranks at a sync point; called by all ranks that reach it."""
    place = f"{operation} at {code_line_of(sys._getframe())}"
    others = {other: f"{sync_point}/{other}" for other in ranks if other != rank}
    listed: dict[int, str] = {}
    with suppress(LostStoreError):
        client.write(f"{sync_point}/{rank}", place)
        texts = client.wait_for([*others.values()], _OTHERS_S)
        listed = {
            other: f"rank {other} has come to {texts[name]}"
            for other, name in others.items()
            if name in texts
        }
        # Ranks that wait in another operation do not know that others describe theirs.
        liveness_probe = weak_probe()
        answers = (
            liveness_probe.ask_now(others.keys() - listed.keys(), _OTHERS_S)
            if liveness_probe is not None
            else {}
        )
        for other, answer in answers.items():
            operation = answer["reports"].get("desync", {}).get("operation")
            listed[other] = f"rank {other} is in {operation or answer['where']}"
    elsewhere = "; ".join(listed[other] for other in sorted(listed)) or "at an unknown place"
    return f"{place} on rank {rank} needs ranks {[*others]} to do the same, and others do something else: {elsewhere}"
