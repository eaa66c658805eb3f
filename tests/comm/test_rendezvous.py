"""Ranks find each other under names that nobody has used, and listen no further than they have to."""

import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardeddp.comm.rendezvous import (
    INTERFACE_VARIABLES,
    RankOrder,
    leave_loopback,
    nvlink_domain,
    reserve_open_files,
    run_rendezvous,
    stay_on_loopback,
    switches_of,
)
from shardeddp.errors import ConfigurationError
from shardeddp.plan.rank_info import RankInfo
from support.ports import free_port
from support.sockets import listening

pytestmark = pytest.mark.timeout(60)

PATIENCE = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("TORCHELASTIC_USE_AGENT_STORE", *INTERFACE_VARIABLES):
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    yield


def info(rank: int, num_nodes: int = 2, ranks_per_node: int = 2) -> RankInfo:
    size = num_nodes * ranks_per_node
    return RankInfo(
        rank=rank,
        node=rank // ranks_per_node,
        host=f"h{rank // ranks_per_node}",
        world_size=size,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
    )


def all_meet(
    port: int, infos: list[RankInfo], patience: timedelta = PATIENCE, address: str = "127.0.0.1"
) -> list[Any]:
    """What each rank gets, or the error that it gets."""

    def one(own: RankInfo) -> Any:
        try:
            return run_rendezvous(address, port, own, patience)
        except (ConfigurationError, TimeoutError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(len(infos)) as pool:
        return list(pool.map(one, infos))


def test_every_rank_learns_where_all_are_and_they_share_a_store() -> None:
    met = all_meet(free_port(), [info(rank) for rank in range(4)])
    assert [found.order for _, found in met] == [None] * 4
    met[2][0].set("key", "value")
    assert [store.get("key") for store, _ in met] == [b"value"] * 4


def test_every_rank_learns_which_nodes_are_near_each_other() -> None:
    infos = [
        RankInfo(**{**vars(info(rank, 4, 1)), "switches": "ab"[rank in (1, 2)], "domain": "u"})
        for rank in range(4)
    ]
    met = [found for _, found in all_meet(free_port(), infos)]
    assert met == [RankOrder(order=(0, 3, 1, 2), reach=4)] * 4


@pytest.mark.parametrize(
    ("environment", "switches"),
    [
        ({}, ""),
        ({"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, ""),
        (
            {
                "SLURM_TOPOLOGY_ADDR": "s[0-1].s7.n1",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
            },
            "s[0-1].s7",
        ),
        ({"SLURM_TOPOLOGY_ADDR": "s0.n1"}, ""),
    ],
)
def test_slurm_says_which_switches_are_above_a_node(
    environment: dict[str, str], switches: str
) -> None:
    assert switches_of(environment) == switches


class Fabric:
    """As NVML describes a GPU's NVLink."""

    def __init__(self, cluster: bytes, clique: int, state: int) -> None:
        self.clusterUuid, self.cliqueId, self.state = list(cluster), clique, state


@pytest.mark.parametrize(
    ("fabric", "domain"),
    [
        (Fabric(b"u" * 16, 3, 3), f"{'75' * 16}/3"),
        (Fabric(bytes(16), 0, 3), ""),  # NVLink inside of a node
        (Fabric(b"u" * 16, 3, 2), ""),  # not ready
        (None, ""),  # NVML does not know the GPU
    ],
)
def test_nvml_says_which_gpus_nvlink_connects_across_nodes(
    monkeypatch: pytest.MonkeyPatch, fabric: Fabric | None, domain: str
) -> None:
    class NVMLError(Exception):
        """Of NVML."""

    def get(gpu: str, found: Any) -> None:
        if fabric is None:
            raise NVMLError
        assert gpu == "GPU-1-2"
        vars(found).update(vars(fabric))

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_GPU_FABRIC_STATE_COMPLETED=3,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        c_nvmlGpuFabricInfoV_t=SimpleNamespace,
        nvmlDeviceGetGpuFabricInfoV=get,
        __spec__=SimpleNamespace(),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("ctypes.byref", lambda it: it)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))
    assert nvlink_domain(torch.device("cuda", 0)) == domain
    assert nvlink_domain(torch.device("cpu")) == ""


def test_ranks_that_are_dealt_out_to_nodes_like_cards_learn_their_order() -> None:
    infos = [RankInfo(**{**vars(info(rank)), "node": rank % 2}) for rank in range(4)]
    assert [found.order for _, found in all_meet(free_port(), infos)] == [(0, 2, 1, 3)] * 4


def test_what_a_rank_reads_of_the_others_does_not_grow_with_their_number() -> None:
    lengths: set[int] = set()
    for num_nodes in (2, 8):
        infos = [info(rank, num_nodes) for rank in range(2 * num_nodes)]
        met = all_meet(free_port(), infos)
        lengths.add(len(met[-1][0].underlying_store.get("verdict")))
    assert len(lengths) == 1 and max(lengths) < 100


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_cannot_take_part_is_an_error_on_all_ranks_at_once(rank: int) -> None:
    began = time.monotonic()
    problem = {"problem": "may open 3 files"}
    infos = [RankInfo(**{**vars(info(it)), **(problem if it == rank else {})}) for it in range(4)]
    found = all_meet(free_port(), infos)
    assert time.monotonic() - began < 10
    assert {type(each) for each in found} == {ConfigurationError}
    assert {str(each) for each in found} == {f"rank {rank} (on h{rank // 2}) may open 3 files"}


@pytest.mark.parametrize(
    ("connections", "limits", "set_to", "refused"),
    [
        (500, (1024, 1024), None, False),
        (2000, (1024, 4096), (2512, 4096), False),
        (2000, (1024, resource.RLIM_INFINITY), (2512, resource.RLIM_INFINITY), False),
        (400, (700, 900), (900, 900), False),
        (600, (1024, 1024), None, True),
        (1800, (1024, 2048), None, True),
    ],
)
def test_the_limit_of_open_files_is_raised_where_connections_need_it_and_else_they_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    connections: int,
    limits: tuple[int, int],
    set_to: tuple[int, int] | None,
    refused: bool,
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: found.append(to))
    problem = reserve_open_files(connections)
    assert found == ([] if set_to is None else [set_to])
    assert bool(problem) == refused
    if refused:
        assert (
            f"needs {connections} connections to other ranks, and may open {limits[1]}" in problem
        )


def test_ranks_that_run_something_else_are_an_error_on_all_ranks() -> None:
    infos = [RankInfo(**{**vars(info(rank)), "run": "ab"[rank == 3]}) for rank in range(4)]
    found = all_meet(free_port(), infos)
    assert {type(each) for each in found} == {ConfigurationError}
    assert {str(each) for each in found} == {str(found[0])} and "rank 3 (on h1) has b" in str(
        found[0]
    )


def test_a_store_that_outlives_attempts_shows_none_of_them_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt in range(3):
        # Ranks that came and were killed before anybody had answered them.
        left = dist.PrefixStore("shardeddp/rendezvous", agent)
        left.set(f"arrival/{left.add('arrival', 1)}", f"gone-{attempt}")
        left.add("arrival", 1)  # by one who was killed before it could say its name
        store, other = (store for store, _ in all_meet(agent.port, [info(0, 2, 1), info(1, 2, 1)]))
        assert not store.check(["address"]), "what the attempt before has left"
        store.set("address", str(attempt))
        assert other.get("address") == str(attempt).encode()


@pytest.mark.slow
def test_nodes_with_different_numbers_of_ranks_are_an_error_on_all_ranks_at_once() -> None:
    began = time.monotonic()
    infos = [info(0), info(1), RankInfo(**{**vars(info(2)), "world_size": 2, "ranks_per_node": 1})]
    found = all_meet(free_port(), infos)
    assert time.monotonic() - began < 10
    assert {type(each) for each in found} == {ConfigurationError}
    assert {str(each) for each in found} == {str(found[0])}
    assert "node 0 (h0) with 2 ranks (0, 1)" in str(found[0])
    assert "node 1 (h1) with 1 rank (2)" in str(found[0])


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named() -> None:
    found = all_meet(free_port(), [info(0), info(2)], timedelta(seconds=1))
    assert {type(each) for each in found} == {TimeoutError}
    assert "ranks [1, 3] of 4 have not come within 1 s" in str(found[0])


@pytest.mark.slow
def test_a_rank_0_that_does_not_come_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = all_meet(free_port(), [info(1)], timedelta(seconds=1))
    assert "no answer at 127.0.0.1" in str(found)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    (found,) = all_meet(agent.port, [info(1)], timedelta(seconds=1))
    assert "has found the store" in str(found) and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(
        found
    )


def test_a_port_that_somebody_has_is_an_error_that_names_the_variable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (found,) = all_meet(taken.getsockname()[1], [info(0)], timedelta(seconds=1))
    assert isinstance(found, RuntimeError) and "MASTER_PORT" in str(found)


def listeners(action: Callable[[], object]) -> tuple[object, set[str]]:
    """Where this process listens only since something was done."""
    before = listening(os.getpid())
    kept = action()
    return kept, {address for address, _ in listening(os.getpid()) - before}


def test_on_one_machine_nothing_listens_beyond_loopback() -> None:
    port = free_port()
    _, found = listeners(
        lambda: all_meet(port, [info(0, 1, 2), info(1, 1, 2)], address=socket.gethostname())
    )
    assert found == {"127.0.0.1"}


def test_interfaces_are_those_of_loopback_for_a_run_and_as_they_were_after_it() -> None:
    stay_on_loopback()
    stay_on_loopback()
    assert [os.environ[variable] for variable in INTERFACE_VARIABLES] == ["lo", "lo"]
    leave_loopback()
    assert [variable for variable in INTERFACE_VARIABLES if variable in os.environ] == []


def test_across_machines_the_store_listens_on_the_address_that_was_given() -> None:
    port = free_port()
    _, found = listeners(
        lambda: all_meet(port, [info(0, 2, 1), info(1, 2, 1)], address="127.0.0.2")
    )
    assert found == {"127.0.0.2"}
    assert [variable for variable in INTERFACE_VARIABLES if variable in os.environ] == []


def test_an_interface_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLES[0], "eth7")
    stay_on_loopback()
    assert os.environ[INTERFACE_VARIABLES[0]] == "eth7"
    leave_loopback()
    assert os.environ[INTERFACE_VARIABLES[0]] == "eth7" and INTERFACE_VARIABLES[1] not in os.environ
