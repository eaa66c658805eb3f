"""The only issuer of collectives: groups of ranks, collectives per backend, streams, agreement."""

from shardeddp.comm.agreement import (
    agree_on_any,
    agree_on_highest_alike,
    agree_on_layout,
    all_gather_bytes,
    gather_results,
    gather_to_first,
    run_on_all_ranks,
)
from shardeddp.comm.collectives import CollectiveHandle, Collectives, Traffic
from shardeddp.comm.mesh import Mesh
from shardeddp.comm.step_clock import StepClock, during
from shardeddp.comm.streams import CommStream, StreamHandle

__all__ = [
    "CollectiveHandle",
    "Collectives",
    "CommStream",
    "Mesh",
    "StepClock",
    "StreamHandle",
    "Traffic",
    "agree_on_any",
    "agree_on_highest_alike",
    "agree_on_layout",
    "all_gather_bytes",
    "during",
    "gather_results",
    "gather_to_first",
    "run_on_all_ranks",
]
