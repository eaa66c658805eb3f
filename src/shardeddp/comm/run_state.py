"""Run state: agreements in flight and other state of a run that parameters and gradients read."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from shardeddp.comm.consistency import WriteDigest
from shardeddp.comm.step_clock import StepClock
from shardeddp.torch_private import is_in_backward


class _Unsettled(Protocol):
    """Agreement of ranks that has been started, and whose result nobody has read."""

    def settle(self, *, stepping: bool = False, reading: bool = False) -> None: ...


class RunState:
    """State of one run on one rank; parameters of experts and all others share it."""

    def __init__(self) -> None:
        self.written = WriteDigest()
        """User writes to sharded parameters; compared when ranks agree at a backward's end."""

        # Not owned: gradients lead to the mesh, and from there they must not lead to the model,
        # since Python's collector does not see that a parameter leads to its gradient.
        self.unsettled: weakref.WeakValueDictionary[int, _Unsettled] = weakref.WeakValueDictionary()
        """Agreements whose result is still to be read, by identity, in order."""

        self.incomplete: set[int] = set()
        """Identities of reducers whose last backward has left gradients for a later one to complete."""

        self.untied: dict[str, str] = {}
        """Parameters that were assigned the memory of another one, by name, since the last step began."""

        self.in_step = False
        """Whether a step of the user's module runs."""

        self.observed: dict[str, torch.Tensor] | None = None
        """Descriptions of whole gradients: of split parameters used elsewhere, and of layers' outputs.

        By name, summed over the uses of a backward, for a comparison of the ranks that split layers.
        None: they are not observed.
        """

        self.cut: set[str] = set()
        """Split parameters that were gathered for their own layer in this backward's forward.

        Their gradient is a rank's own: zero outside of its part.
        """

        self.clock: StepClock | None = None
        """Measures steps; None: no measurement."""

        self.thread: int | None = None
        """Thread that trains; None: no run of a Trainer is under way."""

    def observe(self, name: str, gradient: torch.Tensor) -> None:
        """Add the whole gradient of a use of a split parameter, or of a layer's output."""
        if self.observed is not None:
            found = describe(gradient)
            self.observed[name] = (
                found if name not in self.observed else self.observed[name] + found
            )

    def settle(self, *, stepping: bool = False, reading: bool = False) -> None:
        """Read the results of agreements that nobody has waited for yet.

        Ranks come here before anything else that they do together, so that corrections, for which
        they may have to communicate, are in one order on all of them. On other threads than the one
        that trains nothing happens.

        Args:
            stepping: Whether all ranks come here before a step: agreements not started yet are.
            reading: Whether somebody looks at gradients, on this rank at least.
        """
        if not self.unsettled:
            return
        trains = self.thread in (None, threading.get_ident())
        if trains or is_in_backward():
            for each in list(self.unsettled.values()):
                each.settle(stepping=stepping, reading=reading)


def describe(gradient: torch.Tensor) -> torch.Tensor:
    """Return norm and a projection of a plain tensor, (2,) float32: different tensors differ in them."""
    flat = gradient.detach().reshape(-1).float()
    direction = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
    return torch.stack([flat.norm(), flat @ direction.mul_(12.9898).sin_()])
