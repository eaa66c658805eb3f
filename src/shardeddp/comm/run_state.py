"""Run state: what parameters, gradients and layers of one run share on a rank."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from shardeddp.comm.consistency import WriteDigest
from shardeddp.comm.step_clock import StepClock


class RunState:
    """State of one run on one rank; parameters of experts and all others share it."""

    def __init__(self) -> None:
        self.written = WriteDigest()
        """User writes to sharded parameters; compared when ranks agree at a backward's end."""

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

    @contextmanager
    def step(self) -> Generator[None]:
        """Surround a step of the user's module; may be nested."""
        former, self.in_step = self.in_step, True
        try:
            yield
        finally:
            self.in_step = former

    def observe(self, name: str, gradient: torch.Tensor) -> None:
        """Add the whole gradient of a use of a split parameter, or of a layer's output."""
        if self.observed is not None:
            found = describe(gradient)
            self.observed[name] = (
                found if name not in self.observed else self.observed[name] + found
            )


def describe(gradient: torch.Tensor) -> torch.Tensor:
    """Return norm and a projection of a plain tensor, (2,) float32: different tensors differ in them."""
    flat = gradient.detach().reshape(-1).float()
    direction = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
    return torch.stack([flat.norm(), flat @ direction.mul_(12.9898).sin_()])
