"""States: of units, their gathered buffers, a model and orders of passes, with all transitions.

=================  ======================================  ==========  =========================
from               verb or event                           to          called by
=================  ======================================  ==========  =========================
sharded            unshard                                 unsharding  _visit, make_unsharded
unsharding         wait                                    unsharded   make_unsharded,
                                                                       _reshard_unused,
                                                                       unshard_with_others
unsharding         abandon                                 sharded     unshard
unsharded          refresh                                 unsharded   _ensure_unsharded,
                                                                       follow_step, renew_views,
                                                                       unshard_with_others
unsharded          reshard                                 sharded     _leave, follow_step,
                                                                       _leave_transformed,
                                                                       _reshard_after_backward,
                                                                       _reshard_unused, _unshard,
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
agreed, alike      the end of a pass                       alike       end
alike, changed     a visit out of order                    changed     visit, end
changed            the end of a changed pass               agreed      end
observed           a visit in another order than a plan's  unforeseen  observe
observed           the end of an observed backward         foreseen    end
foreseen           a plan                                  planned     _ask
foreseen, planned  a visit that was not announced          unforeseen  _send
planned            another backward                        foreseen    begin
=================  ======================================  ==========  =========================

Verbs of a unit (the first five) are called by ``Runtime``, and by ``Unit.make_unsharded``,
``Unit.renew_views``, ``Unit.unshard_with_others`` and ``OrderAgreement._unshard``; a unit abandons
an all-gather of its own that it could not issue. Those of a buffer are called by ``FlatGroup``. A
resident buffer is bound when it is made, for good. ``FlatGroup.refill_views`` allocates and
releases a buffer of which something holds views, while the unit stays sharded. Events from the
root's forward to a failure are of ``Runtime``, the others of ``OrderAgreement`` and its
``PassOrder``.

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
    """No step, or between a step's forward and backward."""

    FORWARD = "forward"
    """The root's forward has begun, in which backwards may run."""

    BACKWARD = "backward"
    """Autograd runs through units."""


class OrderState(Enum):
    """Order of the visits of one kind of pass, as all ranks know it."""

    AGREED = "agreed"
    """Ranks agree on each visit, and record them."""

    ALIKE = "alike"
    """All ranks have made the recorded visits: no messages, unless the model's units differ."""

    CHANGED = "changed"
    """All ranks have left the record together; the next pass is recorded anew."""


class Foresight(Enum):
    """Order of a rank's visits in one kind of backward, as its forwards announce it.

    It matters where ranks use different units.
    """

    OBSERVED = "observed"
    """No backward has ended: its visits are compared with what would have been announced."""

    FORESEEN = "foreseen"
    """The next backward announces all its visits when it begins."""

    PLANNED = "planned"
    """The running backward follows a plan with the announced visits of all ranks."""

    UNFORESEEN = "unforeseen"
    """Backwards announce one visit at a time, for good."""


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
ORDER_EVENTS: Mapping[str, tuple[Set[OrderState], OrderState]] = {
    "the end of a pass": ({OrderState.AGREED, OrderState.ALIKE}, OrderState.ALIKE),
    "a visit out of order": ({OrderState.ALIKE, OrderState.CHANGED}, OrderState.CHANGED),
    "the end of a changed pass": ({OrderState.CHANGED}, OrderState.AGREED),
}
FORESIGHT_EVENTS: Mapping[str, tuple[Set[Foresight], Foresight]] = {
    "a visit in another order than a plan's": ({Foresight.OBSERVED}, Foresight.UNFORESEEN),
    "the end of an observed backward": ({Foresight.OBSERVED}, Foresight.FORESEEN),
    "a plan": ({Foresight.FORESEEN}, Foresight.PLANNED),
    "a visit that was not announced": (
        {Foresight.FORESEEN, Foresight.PLANNED},
        Foresight.UNFORESEEN,
    ),
    "another backward": ({Foresight.PLANNED}, Foresight.FORESEEN),
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
