"""Process group of a run: set-up, build id, mesh of communicators, and users' communication."""

from __future__ import annotations

import json
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardeddp.checkpoint.full import whole
from shardeddp.checkpoint.interop import lightning_meta
from shardeddp.checkpoint.items import DataFile
from shardeddp.comm import Mesh, during, run_on_all_ranks
from shardeddp.comm.agreement import begin, broadcast_bytes
from shardeddp.comm.collectives import ReduceKind
from shardeddp.comm.desync import note_that_runs_alone
from shardeddp.comm.liveness import lightning_calls
from shardeddp.comm.mesh import count_connections
from shardeddp.comm.propagation import has_broken_transfers, is_transfer_error
from shardeddp.comm.rendezvous import (
    meet,
    nvlink_domain,
    reserve_open_files,
    stay_on_loopback,
    switches_of,
)
from shardeddp.comm.store import StoreClient
from shardeddp.config import Options
from shardeddp.engine.runtime import runtime_of
from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    LIGHTNING_VERSION,
    ClusterEnvironment,
    LightningEnvironment,
    own_release,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from shardeddp.lightning.expert_parallel import EXPERT_PARALLEL, make_expert_mesh
from shardeddp.lightning.private import all_gather_ddp_if_available, init_dist_connection
from shardeddp.lightning.tensor_parallel import make_device_mesh
from shardeddp.plan.rank_info import RankInfo

# -- Build id: the version and a digest of the files

_PACKAGE = Path(__file__).resolve().parents[1]


def describe_release(package: Path = _PACKAGE) -> str:
    """Version and installed code; equal where ranks run the same, wherever it is installed."""
    return f"{own_release()} (installed code {_digest(package)})"


def _digest(package: Path) -> str:
    digest = xxhash.xxh3_64()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


# -- Process group of a single rank


def environment_without_ranks(environment: ClusterEnvironment) -> ClusterEnvironment | None:
    """Environment to use for the only rank of a run if that of the cluster knows no ranks.

    That of SLURM knows all of them in steps of jobs only. It is chosen as a plugin as well, for its
    requeue signal, and the script may then be run by hand, or by ``sbatch`` without ``srun``, where
    strategies of one device train: they never ask. Several ranks have to be told apart, and are
    left its error.

    Returns:
        Lightning's own, or None if the cluster's knows all that is asked of it.
    """
    ranks = (environment.global_rank, environment.local_rank, environment.node_rank)
    try:
        for ask in (*ranks, environment.world_size):
            ask()
    except KeyError as error:  # a variable that `srun` sets
        rank_zero_info(
            f"ShardedDP: {type(environment).__name__} misses {error}, so this process trains alone"
        )
        return LightningEnvironment()
    return None


# -- Process group of a run

T = TypeVar("T")


class Ranks(NamedTuple):
    """Ranks of a run, as a strategy and its Trainer have them."""

    environment: ClusterEnvironment
    """Source of ranks and addresses."""
    device: torch.device
    """Of this rank."""
    num_nodes: int
    per_node: int


class ProcessGroup:
    """Ranks of a run and their communication.

    Args:
        options: Which ranks share a model and which split layers, by which backend they
            communicate, for how long they wait, and whether calls of users are compared.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        """Others where ``auto`` has chosen since, or the run goes on with another strategy."""
        self.device_mesh: DeviceMesh | None = None
        """Axes of ranks as torch has them; None: there is no tensor axis."""
        self._order: tuple[int, ...] | None = None  # of ranks near each other; None: as they count
        self.reach: int | None = None
        """Ranks that reach each other without the network, as those of a node do; None: unknown."""
        self.current: Mesh | None = None
        """The communicators of this rank.

        None before set-up, and in a process that has spawned the ranks.
        """
        self._broken = False  # whether the run has ended in a transfer that others were not in

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy or a pickle: communicators belong to a process."""
        return {**vars(self), "current": None, "device_mesh": None}

    @property
    def mesh(self) -> Mesh:
        """The communicators of this rank.

        Raises:
            RuntimeError: There is no process group yet.
        """
        if self.current is None:
            raise RuntimeError(
                "ShardedDP has no process group yet: it is set up when the Trainer starts to run"
            )
        return self.current

    @property
    def device(self) -> torch.device:
        """Device of this rank; the host where there are no ranks yet."""
        return torch.device("cpu") if self.current is None else self.current.device

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, or a process without ranks."""
        return self.current is None or self.current.rank == 0

    # -- Set-up

    def connect(self, ranks: Ranks) -> None:
        """Make the process group where there is none; a collective of all ranks.

        Raises:
            ConfigurationError: Ranks run different code or options, or one may not open as many
                files as it has connections.
        """
        _note_functions_of_one_rank()
        if ranks.num_nodes == 1:
            stay_on_loopback()
        if not torch.distributed.is_initialized():
            self._meet(ranks)
        elif self.options.debug:
            rank_zero_warn(
                "debug=True: calls through Lightning are compared over ranks; what "
                "torch.distributed itself is asked for is not, as the process group was made "
                "before, without that. Start a new process for it"
            )

    def on_rank_zero(self, topic: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What rank 0 makes, on all ranks; a collective that needs no mesh yet.

        Args:
            topic: What it is.
            make: Makes it; other ranks do not call it.

        Raises:
            ConfigurationError: Rank 0 failed, whose own error is raised there, or took longer than
                ``timeout``.
        """
        rank, within_s = torch.distributed.get_rank(), self.options.timeout.total_seconds()
        notes = StoreClient(topic, rank, patient=True)
        if rank == 0:
            try:
                made = make()
            except Exception as error:
                notes.write("answer", json.dumps(f"{type(error).__name__}: {error}"))
                raise
            notes.write("answer", json.dumps(made))
            return made
        answer = notes.wait_for(["answer"], within_s).get("answer")
        found: dict[str, Any] | str = (
            f"nothing within {within_s:.0f} s" if answer is None else json.loads(answer)
        )
        if isinstance(found, str):
            raise ConfigurationError(f"rank 0 could not make the {topic}: {found}")
        return found

    def begin_run(self, ranks: Ranks, module: nn.Module | None) -> None:
        """Make the mesh where there is none, and begin a run; a collective of all ranks.

        Args:
            ranks: As for :meth:`connect`, which has been called.
            module: Module of the run; one that another Trainer has sharded in the same way brings
                its communicators along.

        Raises:
            ConfigurationError: This rank may not open as many files as it has connections.
        """
        options, tensor_size = self.options, self.options.tensor_parallel_size
        expert_size = options.expert_parallel_size
        # Of a process group that was made before, or of a strategy that was chosen since.
        problem = self._reserve_connections(ranks)
        if problem:
            raise ConfigurationError(f"rank {torch.distributed.get_rank()} {problem}")
        runtime = None if module is None else runtime_of(module)
        if (
            self.current is None
            and runtime is not None
            and runtime.sharding == options.sharding
            and runtime.mesh.compares == options.debug
            and runtime.mesh.topology.tensor_size == tensor_size
            and runtime.mesh.expert_size == expert_size
        ):
            self.current = runtime.mesh
        elif self.current is None:
            saving_s = options.checkpoint_options.timeout
            self.current = Mesh(
                options.sharding.topology(
                    ranks.num_nodes, ranks.per_node, self._order, tensor_size
                ),
                ranks.device,
                options.timeout,
                options.sharding.regather_size,
                saving_timeout=options.timeout if saving_s is None else timedelta(seconds=saving_s),
                debug=options.debug,
                expert_size=expert_size,
            )
        if tensor_size > 1 and self.device_mesh is None:
            self.device_mesh = make_device_mesh(self.current)
        if expert_size > 1 and self.device_mesh is None:
            self.device_mesh = make_expert_mesh(self.current)
        self.current.begin_run()
        self._broken = False
        if ranks.environment.world_size() == 1:
            # Said wherever a process group exists; Lightning itself leaves the synchronisation of
            # one rank out.
            warnings.filterwarnings(
                "ignore", r"It is recommended to use `self\.log\(.*sync_dist=True"
            )

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The ranks that have different experts."""
        assert self.device_mesh is not None
        return self.device_mesh[EXPERT_PARALLEL]

    def renew(self, options: Options, ranks: Ranks) -> None:
        """Make the mesh of other options in the middle of a run; a collective of all ranks.

        Groups that both have serve both.
        """
        former, own = self.mesh, self.options
        former.give_back()
        self.options, self.current = options, None
        try:
            self.begin_run(ranks, None)
        except BaseException:
            self.options, self.current = own, former
            raise
        former.end_run()
        self.mesh.measure(former.run.clock)
        self.mesh.traffic.go_on_from(former.traffic)

    def _reserve_connections(self, ranks: Ranks) -> str:
        """Let this process open as many files as it needs; why it cannot, or empty."""
        made = torch.distributed.is_initialized()
        backend = torch.distributed.get_backend() if made else self.options.process_group_backend
        if backend == "fake":  # which connects to nobody
            return ""
        sharding, tensor_size = self.options.sharding, self.options.tensor_parallel_size
        topology = sharding.topology(ranks.num_nodes, ranks.per_node, None, tensor_size)
        experts = self.options.expert_parallel_size
        if topology.world_size % experts:
            return (
                f"has expert_parallel_size={experts}, which does not divide the "
                f"{topology.world_size} ranks of this run"
            )
        rank, regather = ranks.environment.global_rank(), sharding.regather_size
        return reserve_open_files(
            count_connections(topology, rank, ranks.device, regather, experts)
        )

    def _meet(self, ranks: Ranks) -> None:
        options, environment, device = self.options, ranks.environment, ranks.device
        versions = f"{describe_release()}, torch {torch.__version__}, Lightning {LIGHTNING_VERSION}"
        info = RankInfo(
            rank=environment.global_rank(),
            node=environment.node_rank(),
            host=socket.gethostname(),
            world_size=environment.world_size(),
            num_nodes=ranks.num_nodes,
            ranks_per_node=ranks.per_node,
            # The same on all ranks that may meet.
            run=f"{versions}, {options.sharding_strategy} as {options.sharding}, "
            f"tensor_parallel_size={options.tensor_parallel_size}, "
            f"expert_parallel_size={options.expert_parallel_size}, debug={options.debug}",
            problem=self._reserve_connections(ranks),
            switches=switches_of(os.environ),
            domain=nvlink_domain(device),
        )
        store, placement = meet(
            environment.main_address, environment.main_port, info, options.timeout
        )
        self._order, self.reach = placement.order, placement.reach
        with torch_compares() if options.debug else nullcontext():
            init_dist_connection(
                environment,
                options.process_group_backend
                or torch.distributed.get_default_backend_for_device(device),
                timeout=options.timeout,
                device_id=None if device.type == "cpu" else device,
                store=store,
            )

    # -- Communication

    def barrier(self, name: str | None = None) -> None:
        """Return when all ranks have come."""
        if self.current is not None:
            # Users may give one barrier several names. Lightning does not, and never means one of
            # theirs.
            of_lightning = lightning_calls()
            named = f"{name or ''}" if self.options.debug or of_lightning else ""
            # On the host, so no device is drained. The operation tells ranks that have come to
            # another one apart; those that have come to this one meet.
            self.current.users.call(f"barrier({named}){' of Lightning' if of_lightning else ''}")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank ``src``, on all ranks; pickled, for the ranks of one job trust each other."""
        mesh = self.current
        if mesh is None or mesh.topology.world_size == 1:
            return obj
        mesh.users.call(f"broadcast(src={src})")
        sent = broadcast_bytes(pickle.dumps(obj) if mesh.rank == src else b"", src, mesh.control)
        # On torch's fake process group nothing is sent.
        return pickle.loads(sent) if sent and mesh.rank != src else obj

    def reduce(self, tensor: Any, group: Any, kind: Any) -> Any:
        """The sum or mean of a tensor over all ranks; anything else as it is."""
        if not isinstance(tensor, torch.Tensor) or self.current is None:
            return tensor
        if group is not None and group is not torch.distributed.group.WORLD:
            raise NotImplementedError(
                "reduce() is over all ranks; for other groups use torch.distributed"
            )
        kind = "sum" if kind is None else kind
        self._compare(f"reduce({_describe(tensor)}, {kind})")
        with self.explaining():
            return _reduce(self.current, whole(tensor), kind)

    def gather(self, tensor: torch.Tensor, group: Any, sync_grads: bool) -> torch.Tensor:
        """The tensors of all ranks, stacked."""
        self._compare(f"all_gather({_describe(tensor)})")
        if self.current is not None:
            self.current.run.settle()
        with self.explaining():
            # A parameter whose gradient is asked for is gathered by the function that asks.
            given = tensor if sync_grads else whole(tensor)
            return all_gather_ddp_if_available(given, group=group, sync_grads=sync_grads)

    def run_on_all_ranks(self, step: str, action: Callable[[], T]) -> T:
        """Result of an action on all ranks, each of which hears of errors.

        Without ranks, it is the result of this process alone.
        """
        return (
            action()
            if self.current is None
            else run_on_all_ranks(step, action, self.current.control)
        )

    def _compare(self, operation: str) -> None:
        """With ``debug``: raise on every rank if one of them has come to another operation."""
        if self.current is not None and self.current.compares:
            self.current.users.call(operation)

    # -- Errors

    def end_run(self) -> None:
        """A run has ended; what it has communicated by serves later ones, unless it has broken."""
        if self.current is not None and not self._broken:
            self.current.give_back()

    def explain(self, error: BaseException) -> None:
        """Tell the other ranks of an error, or let one that comes from another rank say so."""
        if self.current is not None:
            self._broken |= has_broken_transfers(error)
            self.current.error_propagation.explain(error)

    def explain_transfer(self, error: BaseException) -> None:
        """Make an error that comes from another rank say so; this rank's own stay unchanged."""
        if is_transfer_error(error):
            self.explain(error)

    def explain_and_leave(self, error: BaseException) -> None:
        """Tell other ranks of an error that ends a forked or spawned rank.

        The exit handlers of such a rank may not run.
        """
        if self.current is not None:
            self.current.error_propagation.explain(error)
            self.current.error_propagation.leave()

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Surround operations that other ranks may not reach, so that errors give the reason."""
        try:
            yield
        except RuntimeError as error:
            self.explain_transfer(error)
            raise


_REDUCE_KINDS: dict[str, ReduceKind] = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "max": "max",
    "min": "min",
}


def _reduce(mesh: Mesh, tensor: torch.Tensor, reduce_op: object) -> torch.Tensor:
    """Reduce a tensor over all ranks with different batches into a new one.

    An average of integers is a float, as Lightning has it.

    Args:
        mesh: The ranks.
        tensor: Any shape, on the host or on this rank's device.
        reduce_op: "mean", "avg", "sum", "max", "min" (in any case), or the ``ReduceOp`` of that
            name.
    """
    name = str(reduce_op).removeprefix("RedOpType.").removeprefix("ReduceOp.").lower()
    if name not in _REDUCE_KINDS:
        raise ValueError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_REDUCE_KINDS)}")
    if torch.distributed.group.WORLD is not None:
        begin(torch.distributed.group.WORLD, "reduction for users")
    kind = _REDUCE_KINDS[name]
    integral = kind == "mean" and not tensor.is_floating_point() and not tensor.is_complex()
    reduced = (tensor.float() if integral else tensor.detach().clone()).to(mesh.device).contiguous()
    # Ranks that split layers have the same values.
    with during(mesh.run.clock, "ranks"):
        mesh.data.all_reduce_(reduced, kind).wait()
    return reduced.to(tensor.device)


@contextmanager
def torch_compares() -> Generator[None]:
    """Make torch compare the calls of ranks on the process group that is made inside.

    See ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which does that for all groups.
    """
    level = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    try:
        yield
    finally:
        torch.distributed.set_debug_level(level)


def _note_functions_of_one_rank() -> None:
    """Let collectives inside of these functions be errors: other ranks never come to them."""
    note_that_runs_alone(rank_zero_only(print), "{name}, which rank_zero_only runs on one rank")
    note_that_runs_alone(
        lightning_meta,
        "what rank 0 saves of hyper-parameters and callbacks. Leave modules out of it, their "
        "parameters are saved as the model's: save_hyperparameters(ignore=[...])",
    )
    note_that_runs_alone(
        DataFile.put_object,
        "what rank 0 saves of a module's extra state and of optimizers beside tensors. Keep tensors "
        "in dicts, lists and tuples there",
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
