"""The host group of all ranks of a test."""

from datetime import timedelta

import torch.distributed as dist

from shardeddp.comm.host_group import HostGroup

_TIMEOUT = timedelta(seconds=20)


def all_ranks(timeout: timedelta = _TIMEOUT) -> HostGroup:
    """All ranks of a test, on its own default process group; nobody else, without one."""
    if not dist.is_initialized():
        return HostGroup([], [0], name="test", timeout=timeout)
    world = dist.group.WORLD
    assert world is not None
    return HostGroup([world], range(dist.get_world_size()), name="test", timeout=timeout)
