"""ProcessStrategy: ranks, process group and the communication that users ask a strategy for, whatever it trains."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from typing_extensions import override

from shardeddp.checkpoint.writing.full import gather_full, whole
from shardeddp.comm import Mesh, Traffic, barrier, broadcast_object, reduce_tensor
from shardeddp.comm.failures import is_transfer_error
from shardeddp.comm.lookout import lightning_calls
from shardeddp.comm.rendezvous import meet, stay_on_loopback
from shardeddp.errors import ConfigurationError
from shardeddp.lightning_api import (
    LIGHTNING_VERSION,
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    Precision,
    Trainer,
    all_gather_ddp_if_available,
    check_lightning,
    init_dist_connection,
    private,
    rank_zero_only,
    rank_zero_warn,
    reset_seed,
)
from shardeddp.plan.placement import Placement
from shardeddp.plan.seats import Seat, check_runs, node_order
from shardeddp.plan.topology import Topology
from shardeddp.plugins.compiled import AcceptsCompiled
from shardeddp.plugins.last import ShardedScriptLauncher
from shardeddp.plugins.launcher import ShardedMultiProcessingLauncher
from shardeddp.plugins.precision import shard_precision
from shardeddp.plugins.timeout import collective_timeout
from shardeddp.sharding.hooks import runtime_of
from shardeddp.strategy.release import describe_release

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ProcessStrategy(AcceptsCompiled):
    """Starts ranks, sets up their process group and mesh, and communicates for users.

    Args:
        placement: Which ranks share a model.
        process_group_backend: Of the default process group; None: the device's own.
        timeout: After how long a collective gives up.
        start_method: How ranks are started where the cluster environment does not.
        debug: Whether what users communicate is compared over ranks before it happens.
        accelerator: Set by the Trainer, as all that follow may be.
        parallel_devices: One per rank of this machine.
        cluster_environment: Where ranks and addresses come from.
        checkpoint_io: How files are written and read.
        precision_plugin: In which dtypes to compute.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        process_group_backend: str | None,
        timeout: float | timedelta,
        start_method: StartMethod,
        debug: bool,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        check_lightning()
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.placement = placement
        self._process_group_backend = _check_backend(process_group_backend)
        self.timeout = collective_timeout(timeout)
        self._start_method: StartMethod = start_method
        self.debug = debug
        self.num_nodes = 1  # set by the Trainer
        self._order: tuple[int, ...] | None = None  # of ranks node by node; None: as they count
        self._mesh: Mesh | None = None

    @property
    def trainer(self) -> Trainer | None:
        """Whose runs these are; None before it has connected a module, and in a process that has spawned the ranks."""
        module = self.lightning_module
        return None if module is None else private.trainer_of(module)

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank; Lightning then injects samplers and syncs logged values."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError("ShardedDP has no devices yet: the Trainer assigns them when it is made")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks per machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    @override
    def precision_plugin(self) -> Precision:
        return shard_precision(self._precision_plugin)

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # None has to stay None: the Trainer takes anything else as the user's choice, over its own precision argument.
        self._precision_plugin = None if precision_plugin is None else shard_precision(precision_plugin)

    @property
    def mesh(self) -> Mesh:
        """The communicators of this rank; exists from ``setup_environment`` on."""
        if self._mesh is None:
            raise RuntimeError("ShardedDP has no process group yet: it is set up when the Trainer starts to run")
        return self._mesh

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has communicated for the engine, by kind."""
        return self.mesh.traffic

    # -- processes

    @property
    def _environment(self) -> ClusterEnvironment:
        if self.cluster_environment is None:
            raise RuntimeError("ShardedDP has no cluster environment: the Trainer finds one when it is made")
        return self.cluster_environment

    @override
    def _configure_launcher(self) -> None:
        # A shard_size that does not fit fails here, before any process is started.
        self.placement.topology(self.num_nodes, self.num_processes)
        if self._start_method == "popen":
            self._launcher = ShardedScriptLauncher(self._environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = ShardedMultiProcessingLauncher(
                self, self._start_method, gather_full, self._explain_and_leave
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if self.num_nodes == 1:
            stay_on_loopback()
        self._make_process_group()
        if self._mesh is None:
            # A module that another Trainer has sharded brings its communicators along.
            sharded = None if self.lightning_module is None else runtime_of(self.lightning_module)
            topology = self.placement.topology(self.num_nodes, self.num_processes, self._order)
            self._mesh = self._make_mesh(topology) if sharded is None else sharded.mesh
        if self.debug and not self._mesh.compares:
            raise ConfigurationError(
                "debug=True comes too late for this module: it was sharded without it, and keeps its communicators. "
                "Build it anew, or start a new process"
            )
        self._mesh.begin_run()
        if self.world_size == 1:
            # Said wherever a process group exists; Lightning itself leaves the synchronisation of one rank out.
            warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")

    def _make_process_group(self) -> None:
        if torch.distributed.is_initialized():
            if self.debug:
                rank_zero_warn(
                    "debug=True: what Lightning is asked for is compared over ranks; what torch.distributed itself is "
                    "asked for is not, as the process group was made before, without that. Start a new process for it"
                )
            return
        environment, device = self._environment, self.root_device
        seat = Seat(
            rank=self.global_rank,
            node=self.node_rank,
            local_rank=self.local_rank,
            host=socket.gethostname(),
            world_size=self.world_size,
            num_nodes=self.num_nodes,
            ranks_per_node=self.num_processes,
            run=self._describe_run(),
        )
        store, seats = meet(environment.main_address, environment.main_port, seat, self.timeout)
        check_runs(seats)
        self._order = node_order(seats)
        with torch_compares() if self.debug else nullcontext():
            init_dist_connection(
                environment,
                self._process_group_backend or torch.distributed.get_default_backend_for_device(device),
                timeout=self.timeout,
                device_id=None if device.type == "cpu" else device,
                store=store,
            )

    def _describe_run(self) -> str:
        """What has to be the same on all ranks for them to find each other."""
        versions = f"{describe_release()}, torch {torch.__version__}, Lightning {LIGHTNING_VERSION}"
        return f"{versions}, {self.placement}, debug={self.debug}"

    def _make_mesh(self, topology: Topology) -> Mesh:
        return Mesh(
            topology,
            self.root_device,
            self.timeout,
            self.placement.regather_size,
            saving_timeout=self._saving_timeout,
            debug=self.debug,
        )

    @property
    def _saving_timeout(self) -> timedelta:
        """How long a rank waits for others that are still writing."""
        return self.timeout

    def set_world_ranks(self) -> None:
        """Tell the cluster environment, and everything that acts on rank 0 alone, which rank this is."""
        self._environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self._environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # pyright: ignore[reportFunctionMemberAccess]

    # -- communication for users

    def _compare(self, operation: str) -> None:
        """With ``debug``: raise on every rank if one of them has come to another operation."""
        if self._mesh is not None and self._mesh.compares:
            self._mesh.users.call(operation)

    def _explain_and_leave(self, error: BaseException) -> None:
        """Say what a rank ends with that was forked or spawned: such a process may end without coming to its end."""
        if self._mesh is not None:
            self._mesh.failures.explain(error)
            self._mesh.failures.leave()

    @contextmanager
    def _explaining(self) -> Generator[None]:
        """Surround what other ranks may not come to, so that errors say why they have not."""
        try:
            yield
        except RuntimeError as error:
            if self._mesh is not None and is_transfer_error(error):
                self._mesh.failures.explain(error)
            raise

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._mesh is not None:
            # Users may give one barrier several names. Lightning does not, and never means one of theirs.
            of_lightning = lightning_calls()
            named = f"{name or ''}" if self.debug or of_lightning else ""
            barrier(self._mesh, f"barrier({named}){' of Lightning' if of_lightning else ''}")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._mesh is None:
            return obj
        return broadcast_object(self._mesh, obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor) or self._mesh is None:
            return tensor
        if group is not None and group is not torch.distributed.group.WORLD:
            raise NotImplementedError("reduce() is over all ranks; for other groups use torch.distributed")
        kind = "sum" if reduce_op is None else reduce_op
        self._compare(f"reduce({_describe(tensor)}, {kind})")
        with self._explaining():
            return reduce_tensor(self._mesh, whole(tensor), kind)

    @override
    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        self._compare(f"all_gather({_describe(tensor)})")
        with self._explaining():
            return all_gather_ddp_if_available(whole(tensor), group=group, sync_grads=sync_grads)


@contextmanager
def torch_compares() -> Generator[None]:
    """Let the process group that is made inside compare what is asked of it by calling torch, with torch's own means.

    See ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which does that for all groups.
    """
    level = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    try:
        yield
    finally:
        torch.distributed.set_debug_level(level)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _check_backend(name: str | None) -> str | None:
    known = sorted(set(torch.distributed.Backend.backend_list) - {"undefined"})
    parts = [] if name is None else [part.rpartition(":")[2].lower() for part in name.split(",")]
    if not set(parts) <= set(known):
        raise ConfigurationError(
            f"process_group_backend={name!r}: expected one of {', '.join(known)}, or one for each kind of device "
            f"(cpu:gloo,cuda:nccl); a backend of a package of its own is known once that package is imported"
        )
    return name
