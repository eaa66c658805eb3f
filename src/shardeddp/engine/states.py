"""States: of a unit, of its gathered buffers and of a model, with all transitions between them.

=================  ======================================  ==========  =========================
from               verb or event                           to          called by
=================  ======================================  ==========  =========================
sharded            unshard                                 unsharding  _visit, make_unsharded
unsharding         wait                                    unsharded   make_unsharded,
                                                                       _reshard_unused,
                                                                       gather_with_others
unsharding         abandon                                 sharded     unshard
unsharded          refresh                                 unsharded   _ensure_unsharded,
                                                                       refresh, renew_views,
                                                                       gather_with_others
unsharded          reshard                                 sharded     _leave, refresh,
                                                                       _leave_transformed,
                                                                       _reshard_after_backward,
                                                                       _reshard_unused, _gather,
                                                                       renew_views
released           allocate                                allocated   _gather, activate
allocated, bound   bind                                    bound       activate
allocated, bound   unbind                                  allocated   release
any                release                                 released    release
forward, idle      the root's forward                      forward     _begin_pass
backward, forward  the end of the root's forward           idle        _leave
forward, idle      a backward                              backward    _begin_backward
backward           the end of a backward inside of a step  forward     _end_backward
backward           the end of a backward                   idle        _end_backward
backward           a failed backward inside of a step      forward     _abort_backward
backward           a failed backward                       idle        _abort_backward
any                a failure                               idle        reset
=================  ======================================  ==========  =========================

Verbs of a unit (the first five) are called by ``Runtime``, and by ``Unit.make_unsharded``,
``Unit.renew_views``, ``Unit.gather_with_others`` and ``OrderAgreement._gather``; a unit abandons a
gather of its own that it could not issue. Verbs of a buffer are called by ``FlatGroup``. A resident
buffer is bound when it is made, for good. Events are of ``Runtime``.

A forward that raises is a failure at once. That a backward has failed is noticed by the next
forward or backward. After a transfer error all states stay, for good: to leave them takes
collectives, and none would complete.
"""

from collections.abc import Mapping, Set
from enum import Enum
from typing import TypeVar


class UnitState(Enum):
    """Parameters that a unit's modules hold, and memory of its gathered buffer."""

    SHARDED = "sharded"
    """Modules hold the sharded parameters; the gathered buffer has no memory, or is retained."""

    UNSHARDING = "unsharding"
    """Modules hold the sharded parameters; the gather stream is filling the gathered buffer."""

    UNSHARDED = "unsharded"
    """Modules hold the unsharded parameters, views of the gathered buffer."""


class BufferState(Enum):
    """Memory of a gathered buffer, and tensors that unsharded parameters stand for."""

    RELEASED = "released"
    """No memory; unsharded parameters forward to the sharded ones."""

    ALLOCATED = "allocated"
    """Memory that a gather fills, or that is retained; the parameters forward as before."""

    BOUND = "bound"
    """Unsharded parameters are views of the memory."""


class Phase(Enum):
    """Phase of a model; only its runtime has this state."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


State = TypeVar("State", bound=Enum)

# verb or event -> (states in which it may happen, resulting state)
UNIT_VERBS: Mapping[str, tuple[Set[UnitState], UnitState]] = {
    "unshard": ({UnitState.SHARDED}, UnitState.UNSHARDING),
    "wait": ({UnitState.UNSHARDING}, UnitState.UNSHARDED),
    "abandon": ({UnitState.UNSHARDING}, UnitState.SHARDED),
    "refresh": ({UnitState.UNSHARDED}, UnitState.UNSHARDED),
    "reshard": ({UnitState.UNSHARDED}, UnitState.SHARDED),
}
BUFFER_VERBS: Mapping[str, tuple[Set[BufferState], BufferState]] = {
    "allocate": ({BufferState.RELEASED}, BufferState.ALLOCATED),
    # BOUND: a reshard has failed before it reached this buffer.
    "bind": ({BufferState.ALLOCATED, BufferState.BOUND}, BufferState.BOUND),
    # ALLOCATED: the gather has failed.
    "unbind": ({BufferState.ALLOCATED, BufferState.BOUND}, BufferState.ALLOCATED),
    "release": (set(BufferState), BufferState.RELEASED),
}
EVENTS: Mapping[str, tuple[Set[Phase], Phase]] = {
    "the root's forward": ({Phase.IDLE, Phase.FORWARD}, Phase.FORWARD),
    # BACKWARD: the step has run a backward itself, and went on after its error.
    "the end of the root's forward": ({Phase.FORWARD, Phase.BACKWARD}, Phase.IDLE),
    # FORWARD: manual optimization, or a step that calls `autograd.grad`.
    "a backward": ({Phase.IDLE, Phase.FORWARD}, Phase.BACKWARD),
    "the end of a backward inside of a step": ({Phase.BACKWARD}, Phase.FORWARD),
    "the end of a backward": ({Phase.BACKWARD}, Phase.IDLE),
    "a failed backward inside of a step": ({Phase.BACKWARD}, Phase.FORWARD),
    "a failed backward": ({Phase.BACKWARD}, Phase.IDLE),
    "a failure": (set(Phase), Phase.IDLE),
}


def state_after(
    table: Mapping[str, tuple[Set[State], State]], verb: str, state: State, of: object
) -> State:
    """Return the state that a verb or an event of a table leads to.

    Raises:
        RuntimeError: It may not happen in the present state of what ``str(of)`` names.
    """
    sources, target = table[verb]
    if state not in sources:
        expected = " or ".join(sorted(it.value for it in sources))
        raise RuntimeError(
            f"{verb} of {of}: expected it {expected}, found it {state.value} (a bug of shardeddp; "
            f"please report it)"
        )
    return target
