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

        # Parameters that were assigned the memory of another one, by name, since the last step began.
        self._untied: dict[str, str] = {}

        self.in_step = False
        """Whether a step of the user's module runs."""

        # Descriptions of whole gradients, by name and summed over the uses of a backward: of split
        # parameters used elsewhere, and of layers' outputs. None: they are not observed.
        self._observed: dict[str, torch.Tensor] | None = None

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

    def measure(self, clock: StepClock | None) -> None:
        """Let a clock measure steps; None ends the measurement."""
        self.clock = clock

    def leave_incomplete(self, reducer: object) -> None:
        """Note that a reducer's last backward has left gradients for a later one to complete."""
        self.incomplete.add(id(reducer))

    def complete(self, reducer: object) -> bool:
        """Note that a reducer's gradients are complete; return whether they were not."""
        was_incomplete = id(reducer) in self.incomplete
        self.incomplete.discard(id(reducer))
        return was_incomplete

    def note_memory(self, fqn: str, other: str | None) -> None:
        """Note whose memory a parameter was assigned, and that nothing is left of its former one."""
        for name in [it for it, its_other in self._untied.items() if fqn in (it, its_other)]:
            del self._untied[name]
        if other is not None:
            self._untied[fqn] = other

    def take_untied(self) -> dict[str, str]:
        """Return, once, the parameters that were assigned the memory of another one, by name."""
        untied, self._untied = self._untied, {}
        return untied

    def begin_step(self) -> None:
        """Forget which parameters were cut, unless a backward of their forward is observed."""
        if self._observed is None:
            self.cut.clear()

    def note_cut(self, fqn: str) -> None:
        """Note that a split parameter was gathered for its own layer."""
        self.cut.add(fqn)

    def begin_observation(self) -> None:
        """Observe whole gradients from now on; go on if they are observed already."""
        if self._observed is None:
            self._observed = {}

    def observe(self, name: str, gradient: torch.Tensor) -> None:
        """Add the whole gradient of a use of a split parameter, or of a layer's output."""
        if self._observed is not None:
            found = describe(gradient)
            former = self._observed.get(name)
            self._observed[name] = found if former is None else former + found

    def end_observation(self) -> dict[str, torch.Tensor]:
        """Return the descriptions of the gradients that were observed, and observe no more."""
        observed, self._observed = self._observed, None
        return observed or {}


def describe(gradient: torch.Tensor) -> torch.Tensor:
    """Return norm and a projection of a plain tensor, (2,) float32: different tensors differ in them."""
    flat = gradient.detach().reshape(-1).float()
    direction = torch.arange(flat.numel(), device=flat.device, dtype=flat.dtype)
    return torch.stack([flat.norm(), flat @ direction.mul_(12.9898).sin_()])
