"""The only place that issues collectives: groups of ranks, collectives per backend, lanes, agreement."""

from shardeddp.comm.agreement import (
    agree_on_any,
    agree_on_any_alike,
    agree_on_highest,
    agree_on_layout,
    exchange,
    gather_results,
    together,
)
from shardeddp.comm.collectives import Collectives, Pending, Traffic
from shardeddp.comm.mesh import Mesh, barrier, broadcast_object, reduce_tensor
from shardeddp.comm.streams import Lane, Ticket

__all__ = [
    "Collectives",
    "Lane",
    "Mesh",
    "Pending",
    "Ticket",
    "Traffic",
    "agree_on_any",
    "agree_on_any_alike",
    "agree_on_highest",
    "agree_on_layout",
    "barrier",
    "broadcast_object",
    "exchange",
    "gather_results",
    "reduce_tensor",
    "together",
]
