"""Rendezvous: how the ranks of a job find each other, before there is a process group.

They meet in a store, hosted by rank 0 or by torchrun's agent. The agent's store outlives restarts:
it still holds keys of an earlier attempt, addresses among them, and nothing that torchrun gives a
rank says which attempt this is. So no key is used twice. Each rank comes with a random name, rank 0
answers each with the random name of this attempt, and all later keys have that as their prefix.

On one machine everything listens on the loopback interface alone. Across machines the store listens
on the address of rank 0 where that is numeric, else on all interfaces: a host name may resolve
differently on each machine.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import resource
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardeddp.errors import ConfigurationError
from shardeddp.plan.rank_info import RankInfo, check_infos, check_runs, node_order, reach_of

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_AGENT_TIMEOUT = timedelta(seconds=60)
_POLL_S = 0.01
_LATE_S = 2.0
"""Time for which rank 0 waits for more ranks to list, once it knows of a mismatch among them."""


class RankOrder(NamedTuple):
    """Order of a run's ranks, and their reach without the network."""

    order: tuple[int, ...] | None
    """Ranks in an order in which those near each other are adjacent; None: ascending."""
    reach: int
    """Number of ranks that reach each other without the network."""


def run_rendezvous(
    address: str, port: int, info: RankInfo, timeout: timedelta
) -> tuple[dist.Store, RankOrder]:
    """Find the other ranks; every rank calls it, once per attempt.

    Returns:
        Store under a prefix of this attempt, and the order of the ranks.

    Raises:
        ConfigurationError: The ranks do not fit together, or are about to run something else than
            rank 0; on every rank.
        TimeoutError: Some ranks have not come.
    """
    if has_agent_store():
        # The agent opens its store before it starts a rank.
        store = _join(address, port, min(timeout, _AGENT_TIMEOUT))
    else:
        address = LOOPBACK if info.num_nodes == 1 else address
        store = _host(address, port, timeout) if info.rank == 0 else _join(address, port, timeout)
    store = dist.PrefixStore("shardeddp/rendezvous", store)
    store.set_timeout(timeout)
    try:
        return _agree_on_order(store, info, timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise TimeoutError(
            f"rank {info.rank} has found the store at {address}:{port} but not rank 0 within "
            f"{timeout.total_seconds():g} s ({error}). Rank 0 has not started or has ended: look "
            f"at its output{_advice()}"
        ) from error


def switches_of(environment: Mapping[str, str]) -> str:
    """Return the network switches above this node, the outermost first, as SLURM gives them."""
    parts = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    switches = [part for part, kind in zip(parts, kinds, strict=False) if kind not in ("", "node")]
    return ".".join(switches)


def nvlink_domain(device: torch.device) -> str:
    """Return the NVLink domain of a GPU: its cluster and clique.

    Empty if NVLink does not leave its node, or NVML cannot say.
    """
    if device.type != "cuda" or find_spec("pynvml") is None:
        return ""
    nvml: Any = import_module("pynvml")
    try:
        nvml.nvmlInit()
        uuid_of_gpu = torch.cuda.get_device_properties(device).uuid
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid_of_gpu}")
        found = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(found))
        # A driver or a pynvml that is too old, or a device that NVML calls by another name: MIG.
    except (nvml.NVMLError, AttributeError):
        return ""
    cluster = bytes(found.clusterUuid).hex()
    complete = found.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED
    return f"{cluster}/{found.cliqueId}" if complete and int(cluster, 16) else ""


_FURTHER_FILES = 512
"""Open files besides the connections between ranks: of loaders, checkpoints, loggers, devices."""


def reserve_open_files(connections: int) -> str:
    """Let this process open as many files as its connections need, by raising the soft limit.

    Returns:
        Reason why that is impossible, for :attr:`RankInfo.problem`; empty on success.
    """
    needed = connections + _FURTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return ""
    if connections < hard // 2:  # other files may well need less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return ""
    return (
        f"needs {connections} connections to other ranks, and may open {hard} files. Raise the "
        f"hard limit to {needed} or more (ulimit -Hn; LimitNOFILE of slurmd or of the container's "
        f"service; DefaultLimitNOFILE of systemd)"
    )


def has_agent_store() -> bool:
    """Return whether torchrun's agent hosts the store, and not rank 0."""
    return os.environ.get(_AGENT_VARIABLE) == str(True)


_LOOPBACK_INTERFACE = "lo" if sys.platform.startswith("linux") else "lo0"
_ours: set[str] = set()  # variables that this package has set


def stay_on_loopback() -> None:
    """Let this process's gloo and NCCL listen on the loopback interface, unless the user chose one.

    They read the variables whenever a group is made or first used, so it lasts for the whole run.
    """
    for variable in INTERFACE_VARIABLES:
        if variable not in os.environ:
            os.environ[variable] = _LOOPBACK_INTERFACE
            _ours.add(variable)


def leave_loopback() -> None:
    """Undo :func:`stay_on_loopback` for processes that are started after a run."""
    for variable in _ours:
        if os.environ.get(variable) == _LOOPBACK_INTERFACE:
            del os.environ[variable]
    _ours.clear()


def _join(address: str, port: int, timeout: timedelta) -> dist.Store:
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise TimeoutError(
            f"no answer at {address}:{port} within {timeout.total_seconds():g} s ({error}). "
            f"Rank 0 hosts the store at this address: it has not started, or MASTER_ADDR and MASTER_PORT "
            f"lead elsewhere, or a firewall is between{_advice()}"
        ) from error


def _advice() -> str:
    if not has_agent_store():
        return ""
    return (
        ". When torchrun has replaced the machine of rank 0, agents that stay may still send "
        "their ranks to its old store: start all of them with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )


def _host(address: str, port: int, timeout: timedelta) -> dist.Store:
    """Host the store in this process."""
    listener = _bind(address, port) if _is_chosen(address) else None
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # a process that has hosted the store before uses the same one
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"rank 0 cannot listen on {address}:{port} ({error}). If another program has the port, "
            f"choose a free one with MASTER_PORT"
        ) from error


def _is_chosen(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _bind(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens on one interface.

    None if the address is not of this machine (a forwarded one), or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError:
        listener.close()
        return None
    return listener


def _agree_on_order(
    store: dist.Store, info: RankInfo, timeout: timedelta
) -> tuple[dist.Store, RankOrder]:
    """Return a store under a prefix of this attempt, and the order of the ranks.

    Rank 0 alone reads the infos of all ranks; the others read its verdict.
    """
    if info.rank == 0:
        name = uuid.uuid4().hex
        names = dist.PrefixStore(name, store)
        verdict = _compare(*_gather(store, name, info, timeout), info, timeout)
        names.set("verdict", json.dumps(verdict))
    else:
        names = dist.PrefixStore(_ask_for_name(store), store)
        _Inbox(names, "info").put(json.dumps(asdict(info)))
        verdict = json.loads(names.get("verdict"))
    if "order" not in verdict:
        _leave(names, info.rank)
        raise (
            TimeoutError(verdict["late"])
            if "late" in verdict
            else ConfigurationError(verdict["wrong"])
        )
    order = verdict["order"]
    found = RankOrder(None if order is None else tuple(order), verdict["reach"])
    return dist.PrefixStore("group", names), found


def _ask_for_name(store: dist.Store) -> str:
    own = uuid.uuid4().hex
    _Inbox(store, "arrival").put(own)
    return store.get(f"answer/{own}").decode()


def _gather(
    store: dist.Store, name: str, own: RankInfo, timeout: timedelta
) -> tuple[list[RankInfo], bool]:
    """Answer all arrivals, of earlier attempts too, until all ranks have sent their info.

    Returns the infos, and whether some do not agree.
    """
    arrivals, sitting = _Inbox(store, "arrival"), _Inbox(dist.PrefixStore(name, store), "info")
    deadline = time.monotonic() + timeout.total_seconds()
    infos, odd = [own], bool(own.problem)
    deadline = time.monotonic() + _LATE_S if odd else deadline
    while len(infos) < own.world_size and time.monotonic() < deadline:
        arrived, known = arrivals.collect(), [*map(_info_of, sitting.collect())]
        for each in arrived:
            store.set(f"answer/{each}", name)
        infos += known
        if not odd and any(info.problem or not info.agrees_with(own) for info in known):
            odd, deadline = True, time.monotonic() + _LATE_S
        if not arrived and not known:
            time.sleep(_POLL_S)
    return infos, odd


def _info_of(text: str) -> RankInfo:
    """Return a rank info from its text; another version of this package may send other fields."""
    values = json.loads(text)
    return RankInfo(**{it.name: values.get(it.name) for it in fields(RankInfo)})


class _Inbox:
    """Texts from many ranks, numbered under one name.

    A rank that is killed between number and text holds up no other rank.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store, name
        self._given = 0
        self._open: list[int] = []  # numbers that were taken and have no text yet

    def put(self, text: str) -> None:
        self._store.set(f"{self._name}/{self._store.add(self._name, 1)}", text)

    def collect(self) -> list[str]:
        """Return the texts that have arrived since the last call."""
        given = self._store.add(self._name, 0)
        self._open += range(self._given + 1, given + 1)
        self._given = given
        here = [number for number in self._open if self._store.check([f"{self._name}/{number}"])]
        self._open = [number for number in self._open if number not in here]
        return [self._store.get(f"{self._name}/{number}").decode() for number in here]


def _compare(infos: list[RankInfo], odd: bool, own: RankInfo, timeout: timedelta) -> dict[str, Any]:
    """Return the verdict: the order and reach of the ranks, or their mismatch."""
    if len(infos) < own.world_size and not odd:
        missing = sorted(set(range(own.world_size)) - {info.rank for info in infos})
        return {
            "late": f"ranks {missing} of {own.world_size} have not come within {timeout.total_seconds():g} s. They "
            f"have not started, or cannot reach rank 0 ({own.host}): look at their output"
        }
    try:
        check_infos(infos)
        check_runs(sorted(infos, key=lambda info: info.rank))
    except ConfigurationError as error:
        return {"wrong": str(error)}
    order = node_order(infos)
    natural = order == tuple(range(own.world_size))
    return {"order": None if natural else order, "reach": reach_of(infos)}


def _leave(names: dist.Store, rank: int) -> None:
    """Wait on rank 0 until the others have read the verdict: the store may end with rank 0."""
    if rank != 0:
        names.add("left", 1)
        return
    deadline = time.monotonic() + _LATE_S
    while names.add("left", 0) < names.add("info", 0) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
