"""Replay: draw the random numbers of a deferred initialization where the eager one would have drawn them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the host's random number generator stood when the constructors of some deferred tensors began."""

    state: torch.Tensor
    """As ``torch.get_rng_state`` gives it."""

    earlier: Sequence[torch.Tensor] = ()
    """Deferred tensors that were there already."""

    reseeded: bool = False
    """The generator has been seeded anew since, so these draws do not move what comes after them."""


def origin_of(tensor: torch.Tensor, origins: Sequence[Origin]) -> int:
    """Index of the origin under which a tensor was made: the last that did not find it there."""
    younger = [i for i, origin in enumerate(origins) if not any(tensor is other for other in origin.earlier)]
    return younger[-1] if younger else 0


def replay(origins: Sequence[Origin], draw: Callable[[int], None]) -> None:
    """Draw from each origin in turn, and leave the generator where eager constructors would have left it.

    A generator that has not moved since an origin continues behind what was drawn from it. One that has moved, or was
    seeded anew, stays as it is.

    Args:
        origins: Oldest first; none is the state of now.
        draw: Draws what belongs to the origin of this index.
    """
    now = torch.get_rng_state()
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, origin in enumerate(origins or [Origin(state=now)]):
        start = _follow(origin.state, moves)
        torch.set_rng_state(start)
        draw(index)
        if not origin.reseeded:
            moves.append((start, torch.get_rng_state()))
    torch.set_rng_state(_follow(now, moves))


def _follow(state: torch.Tensor, moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    for before, after in moves:
        if torch.equal(state, before):
            state = after
    return state
