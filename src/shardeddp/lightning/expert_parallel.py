"""Expert parallelism under Lightning: checks that all ranks use the same layers of experts."""

from __future__ import annotations

from torch import nn

from shardeddp.engine.runtime import Runtime
from shardeddp.errors import first_three
from shardeddp.lightning.api import rank_zero_warn
from shardeddp.tensor.expert_dispatch import DividedExperts, divided_experts, end_forward


class ExpertRankChecks:
    """Checks that all ranks of a run send tokens to the same layers of experts, and to some."""

    def __init__(self) -> None:
        self._experts: list[DividedExperts] = []
        self._is_first_backward = False

    def begin_run(self, root: nn.Module) -> None:
        """Find the experts that ranks have divided; none without expert parallelism."""
        self._experts, self._is_first_backward = divided_experts(root), True

    def end_step(self, runtime: Runtime) -> None:
        """End the forward of the step; a collective of the expert ranks.

        While ranks agree on units, that agreement finds ranks that have not ended theirs.
        """
        if self._experts and not runtime.agrees_on_units:
            end_forward(self._experts[0])

    def begin_backward(self, runtime: Runtime) -> None:
        """End a forward whose backward runs within the step (manual optimization)."""
        if not runtime.optimizes_after_step:
            self.end_step(runtime)

    def end_backward(self) -> None:
        """Warn of stacked experts that the first step has used without a :class:`TokenDispatch`.

        A rank's tokens then reach only its own experts, unless the model sends them itself.
        """
        unsent = [it.name for it in self._experts if not it.is_sent]
        if unsent and self._is_first_backward:
            rank_zero_warn(
                f"ranks have divided the experts of {first_three(unsent)} among them, and the first "
                f"step has made no TokenDispatch(index, experts) with them: tokens meet the experts "
                f"of their own rank alone, unless the model sends them in another way"
            )
        self._is_first_backward = False
