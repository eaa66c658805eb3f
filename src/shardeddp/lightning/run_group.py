"""Run group: ranks of a run; set-up, build id, mesh of communicators, and users' communication."""

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

from shardeddp.checkpoint.full_write import whole
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
    nvlink_domain,
    reserve_open_files,
    run_rendezvous,
    stay_on_loopback,
    switches_of,
)
from shardeddp.comm.store import StoreClient
from shardeddp.config import Options, ShardSizeOption
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
from shardeddp.lightning.axes import EXPERT_PARALLEL, make_device_mesh
from shardeddp.lightning.private import (
    all_gather_ddp_if_available,
    give_device_mesh,
    init_dist_connection,
)
from shardeddp.plan.rank_info import RankInfo

# -- Build id: the version and a digest of the files

_PACKAGE = Path(__file__).resolve().parents[1]


def describe_release() -> str:
    """Return the version with a digest of the installed code; equal on ranks with equal code."""
    return f"{own_release()} (installed code {digest_of_code(_PACKAGE)})"


def digest_of_code(package: Path) -> str:
    """Return a digest of the Python files in a folder: their contents, and their paths in it."""
    digest = xxhash.xxh3_64()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


# -- Process group of a single rank


def environment_without_ranks(environment: ClusterEnvironment) -> ClusterEnvironment | None:
    """Return a substitute for a cluster environment that knows no ranks, in a run of one rank.

    SLURM's environment knows ranks only in job steps. Users also choose it for its requeue signal,
    in scripts that are run by hand or by ``sbatch`` without ``srun``; single-device strategies
    train there, as they never read ranks. A run of several ranks needs them, and keeps the error.

    Returns:
        Lightning's own environment, or None if ``environment`` knows rank and world size.
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


def set_rank(environment: ClusterEnvironment, rank: int, world_size: int) -> None:
    """Set the rank in a cluster environment, and its own rank in ``rank_zero_only``."""
    environment.set_global_rank(rank)
    environment.set_world_size(world_size)
    rank_zero_only.rank = environment.global_rank()  # pyright: ignore[reportFunctionMemberAccess]


# -- Process group of a run

T = TypeVar("T")


class Ranks(NamedTuple):
    """Ranks of a run, from a strategy and its Trainer."""

    environment: ClusterEnvironment
    """Source of ranks and addresses."""
    device: torch.device
    """Device of this rank."""
    num_nodes: int
    per_node: int


class RunGroup:
    """Ranks of a run and their communication."""

    def __init__(self, options: Options) -> None:
        self.options = options
        """Present options; replaced after a choice of ``auto`` and by ``reshard``."""
        self.device_mesh: DeviceMesh | None = None
        """Mesh of torch; None: no tensor or expert axis."""
        self._order: tuple[int, ...] | None = None  # ranks sorted by locality; None: by number
        self.reach: int | None = None
        """Number of ranks that reach each other without the network (a node); None: unknown."""
        self.current: Mesh | None = None
        """Communicators of this rank; None before set-up, and in the parent of spawned ranks."""
        self.single_rank_environment: ClusterEnvironment | None = None
        """Environment of a run of one rank whose own one knows no ranks; None: the own one."""
        self._broken = False  # True after an incomplete collective: groups cannot be used again

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without communicators: they are per process."""
        return {**vars(self), "current": None, "device_mesh": None}

    @property
    def mesh(self) -> Mesh:
        """Communicators of this rank."""
        if self.current is None:
            raise RuntimeError(
                "ShardedDP has no process group yet: it is set up when the Trainer starts to run"
            )
        return self.current

    @property
    def device(self) -> torch.device:
        """Device of this rank; the CPU before set-up."""
        return torch.device("cpu") if self.current is None else self.current.device

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer steps on the host, on copies of parameters and gradients.

        On the CPU, optimizer states are in host memory already.
        """
        return self.options.cpu_offload.optimizer_alone and self.device.type != "cpu"

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0, and before set-up."""
        return self.current is None or self.current.rank == 0

    # -- Set-up

    def set_ranks(self, environment: ClusterEnvironment, is_distributed: bool) -> None:
        """Set ``single_rank_environment`` if the environment of a run does not know ranks."""
        if self.single_rank_environment is None and not is_distributed:
            self.single_rank_environment = environment_without_ranks(environment)

    def connect(self, ranks: Ranks) -> None:
        """Initialize torch's default process group, if needed; a collective of all ranks.

        Raises:
            ConfigurationError: Ranks run different code or options, or a rank's limit of open files
                is below its number of connections.
        """
        _note_functions_of_one_rank()
        if ranks.num_nodes == 1:
            stay_on_loopback()
        if not torch.distributed.is_initialized():
            self._rendezvous(ranks)
        elif self.options.debug:
            rank_zero_warn(
                "debug=True: calls through Lightning are compared over ranks; what "
                "torch.distributed itself is asked for is not, as the process group was made "
                "before, without that. Start a new process for it"
            )

    def choose(self, sharding_strategy: str, shard_size: ShardSizeOption) -> None:
        """Replace ``auto`` in the options by a choice that is the same on all ranks."""
        self.options = self.options.with_sharding(sharding_strategy, shard_size)

    def on_rank_zero(self, topic: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a result of rank 0 on all ranks; a collective through the store, without a mesh.

        Args:
            topic: Name of the result, for its key in the store and for errors.
            make: Function that returns the result (JSON); called on rank 0 only.

        Raises:
            ConfigurationError: On other ranks: rank 0 has failed, or has taken longer than
                ``timeout``. Rank 0 raises its own error.
        """
        rank, within_s = torch.distributed.get_rank(), self.options.timeout.total_seconds()
        client = StoreClient(topic, rank, patient=True)
        if rank == 0:
            try:
                made = make()
            except Exception as error:
                client.write("answer", json.dumps(f"{type(error).__name__}: {error}"))
                raise
            client.write("answer", json.dumps(made))
            return made
        answer = client.wait_for(["answer"], within_s).get("answer")
        found: dict[str, Any] | str = (
            f"nothing within {within_s:.0f} s" if answer is None else json.loads(answer)
        )
        if isinstance(found, str):
            raise ConfigurationError(f"rank 0 could not make the {topic}: {found}")
        return found

    def begin_run(self, ranks: Ranks, module: nn.Module | None) -> None:
        """Make the mesh, if needed, and begin a run; a collective of all ranks.

        Args:
            ranks: Ranks of the run; :meth:`connect` has been called with them.
            module: Module of the run; if another Trainer has sharded it in the same way, its mesh
                is used again.
        """
        options, tensor_size = self.options, self.options.tensor_parallel_size
        expert_size = options.expert_parallel_size
        # `connect` has not checked this for a process group made by others, or after `auto`.
        problem = self._reserve_connections(ranks)
        if problem:
            raise ConfigurationError(f"rank {torch.distributed.get_rank()} {problem}")
        runtime = None if module is None else runtime_of(module)
        if (
            self.current is None
            and runtime is not None
            and runtime.sharding == options.sharding
            and runtime.mesh.compares_user_calls == options.debug
            and runtime.mesh.topology.tensor_size == tensor_size
            and runtime.mesh.expert_size == expert_size
        ):
            self.reuse(runtime.mesh)
        elif self.current is None:
            timeout, saving_timeout = self._timeouts
            self.current = Mesh(
                options.sharding.topology(
                    ranks.num_nodes, ranks.per_node, self._order, tensor_size
                ),
                ranks.device,
                timeout,
                options.sharding.regather_size,
                saving_timeout=saving_timeout,
                debug=options.debug,
                expert_size=expert_size,
            )
        assert self.current is not None
        if self.device_mesh is None:
            self.device_mesh = make_device_mesh(self.current)
        if self.device_mesh is not None and module is not None:
            give_device_mesh(module, self.device_mesh)
        self.current.begin_run()
        self._broken = False
        if ranks.environment.world_size() == 1:
            # Lightning warns wherever a process group exists, though one rank has nothing to sync.
            warnings.filterwarnings(
                "ignore", r"It is recommended to use `self\.log\(.*sync_dist=True"
            )

    def reuse(self, mesh: Mesh) -> None:
        """Use the mesh of an earlier run, to which a module's shards belong; warn of its timeouts."""
        if mesh is self.current:
            return
        self.current = mesh
        if mesh.timeouts != self._timeouts:
            (own, saving), (kept, kept_saving) = self._timeouts, mesh.timeouts
            rank_zero_warn(
                f"the timeout of {own.total_seconds():g} s ({saving.total_seconds():g} s in saves) "
                f"is not applied: the module keeps the process groups of the run that has sharded "
                f"it, which have {kept.total_seconds():g} s ({kept_saving.total_seconds():g} s in "
                f"saves). Build the module anew for other timeouts"
            )

    @property
    def _timeouts(self) -> tuple[timedelta, timedelta]:
        """Timeouts of a collective and of saves that the options ask for."""
        timeout, saving_s = self.options.timeout, self.options.checkpoint_options.timeout
        return timeout, timeout if saving_s is None else timedelta(seconds=saving_s)

    @property
    def expert_mesh(self) -> DeviceMesh:
        """Axis of the ranks that have different experts."""
        assert self.device_mesh is not None
        return self.device_mesh[EXPERT_PARALLEL]

    def renew(self, options: Options, ranks: Ranks) -> None:
        """Replace the mesh by one for other options during a run; a collective of all ranks.

        The new mesh uses process groups of the former one again; after an error the former stays.
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
        """Raise the limit of open files to this rank's needs; return a problem or an empty text."""
        made = torch.distributed.is_initialized()
        backend = torch.distributed.get_backend() if made else self.options.process_group_backend
        if backend == "fake":  # it makes no connections
            return ""
        sharding, experts = self.options.sharding, self.options.expert_parallel_size
        topology = sharding.topology(
            ranks.num_nodes, ranks.per_node, None, self.options.tensor_parallel_size, experts
        )
        rank, regather = ranks.environment.global_rank(), sharding.regather_size
        return reserve_open_files(
            count_connections(topology, rank, ranks.device, regather, experts)
        )

    def _rendezvous(self, ranks: Ranks) -> None:
        options, environment, device = self.options, ranks.environment, ranks.device
        versions = f"{describe_release()}, torch {torch.__version__}, Lightning {LIGHTNING_VERSION}"
        info = RankInfo(
            rank=environment.global_rank(),
            node=environment.node_rank(),
            host=socket.gethostname(),
            world_size=environment.world_size(),
            num_nodes=ranks.num_nodes,
            ranks_per_node=ranks.per_node,
            # Must be equal on all ranks.
            run=f"{versions}, {options.sharding_strategy} as {options.sharding}, "
            f"tensor_parallel_size={options.tensor_parallel_size}, "
            f"expert_parallel_size={options.expert_parallel_size}, debug={options.debug}",
            problem=self._reserve_connections(ranks),
            switches=switches_of(os.environ),
            domain=nvlink_domain(device),
        )
        store, found = run_rendezvous(
            environment.main_address, environment.main_port, info, options.timeout
        )
        self._order, self.reach = found.order, found.reach
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
        """Wait until all ranks have called it."""
        if self.current is not None:
            # Users may call one barrier by different names on different ranks, so names are not
            # compared without `debug`. Lightning's are equal on all ranks, and never meet a user's.
            of_lightning = lightning_calls()
            named = f"{name or ''}" if self.options.debug or of_lightning else ""
            # On the host, so the GPU is not synchronized. Ranks in another operation than this one
            # raise an error.
            self.current.user_fingerprints.call(
                f"barrier({named}){' of Lightning' if of_lightning else ''}"
            )

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src`` on all ranks.

        It is pickled: the ranks of one job trust each other.
        """
        mesh = self.current
        if mesh is None or mesh.topology.world_size == 1:
            return obj
        mesh.user_fingerprints.call(f"broadcast(src={src})")
        sent = broadcast_bytes(pickle.dumps(obj) if mesh.rank == src else b"", src, mesh.control)
        # torch's fake process group sends nothing.
        return pickle.loads(sent) if sent and mesh.rank != src else obj

    def reduce(self, tensor: Any, group: Any, kind: Any) -> Any:
        """Reduce a tensor over all ranks; return other objects unchanged.

        The tensor may be a sharded one. ``group`` is None or the default one, ``kind`` as for
        :func:`_reduce`, or None for a sum.
        """
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
        """Return the tensors of all ranks of a group, stacked in a new first dim."""
        self._compare(f"all_gather({_describe(tensor)})")
        with self.explaining():
            # With gradients, Lightning's differentiable gather unshards a sharded parameter.
            given = tensor if sync_grads else whole(tensor)
            return all_gather_ddp_if_available(given, group=group, sync_grads=sync_grads)

    def run_on_all_ranks(self, step: str, action: Callable[[], T]) -> T:
        """Run an action on all ranks and return its result; an error on one is raised on all.

        Before set-up, only this process runs it.
        """
        return (
            action()
            if self.current is None
            else run_on_all_ranks(step, action, self.current.control)
        )

    def _compare(self, operation: str) -> None:
        """With ``debug``: raise on every rank if ranks call different operations."""
        if self.current is not None and self.current.compares_user_calls:
            self.current.user_fingerprints.call(operation)

    # -- Errors

    def end_steps(self) -> None:
        """End the steps of a run: any thread may read parameters again."""
        if self.current is not None:
            self.current.end_run()
            # Also after an error that Lightning has handled, and of a run that a Tuner has ended.
            self.current.error_propagation.forget_error()

    def end_run(self) -> None:
        """End a run; its process groups serve later runs, unless a collective was incomplete."""
        if self.current is not None and not self._broken:
            self.current.give_back()

    def explain(self, error: BaseException) -> None:
        """Report this rank's error to the others, or add the cause to one from another rank."""
        if self.current is not None:
            self._broken |= has_broken_transfers(error)
            self.current.error_propagation.explain(error)

    def explain_transfer(self, error: BaseException) -> None:
        """Add the cause to an error from another rank; this rank's own errors stay unchanged."""
        if is_transfer_error(error):
            self.explain(error)

    def explain_at_exit(self, error: BaseException) -> None:
        """Report this rank's error when the process exits, unless it is reported before."""
        if self.current is not None:
            self.current.error_propagation.explain_at_exit(error)

    def explain_and_leave(self, error: BaseException) -> None:
        """Report an error that ends a forked or spawned rank; its exit handlers may not run."""
        if self.current is not None:
            self.current.error_propagation.explain_and_leave(error)

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Surround operations that other ranks may not reach, so that errors give the cause."""
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
    """Reduce a tensor over all ranks with different batches, into a new one on its device.

    The mean of integers is float32, as in Lightning.

    Args:
        mesh: Communicators of this rank.
        tensor: Tensor of any shape, on the host or on this rank's device.
        reduce_op: "mean", "avg", "sum", "max", "min" (in any case), or the ``ReduceOp`` of that
            name.

    Raises:
        ValueError: ``reduce_op`` is none of these.
    """
    name = str(reduce_op).removeprefix("RedOpType.").removeprefix("ReduceOp.").lower()
    if name not in _REDUCE_KINDS:
        raise ValueError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_REDUCE_KINDS)}")
    if torch.distributed.group.WORLD is not None:
        begin(torch.distributed.group.WORLD, "reduction for users")
    kind = _REDUCE_KINDS[name]
    integral = kind == "mean" and not tensor.is_floating_point() and not tensor.is_complex()
    reduced = (tensor.float() if integral else tensor.detach().clone()).to(mesh.device).contiguous()
    # Ranks that split layers have equal values, so the data axis alone is reduced.
    with during(mesh.run.clock, "ranks"):
        mesh.data.all_reduce_(reduced, kind).wait()
    return reduced.to(tensor.device)


@contextmanager
def torch_compares() -> Generator[None]:
    """Make torch compare collectives over ranks, for the process group initialized inside.

    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` does so for all groups.
    """
    level = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    try:
        yield
    finally:
        torch.distributed.set_debug_level(level)


def _note_functions_of_one_rank() -> None:
    """Turn collectives in functions that run on one rank into errors."""
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
