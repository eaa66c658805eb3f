"""UnevenStrategy: ranks whose work differs: in the number of batches, or in the parts of the model that they use."""

from __future__ import annotations

from typing import Any

from shardeddp.lightning_api import Trainer
from shardeddp.plugins.uneven import Evenness, UnevenBatches, check_uneven_batches
from shardeddp.sharding.runtime import Runtime
from shardeddp.strategy.parameters import ParameterStrategy


class UnevenStrategy(ParameterStrategy):
    """Keeps ranks together that have different numbers of batches.

    Args:
        arguments: Of :class:`ParameterStrategy`.
        uneven_batches: What training does when a rank has no batch left and others have.
        uneven_units: Whether ranks may use different units in a step.
        options: Of :class:`ParameterStrategy`.
    """

    def __init__(
        self, *arguments: Any, uneven_batches: str = "error", uneven_units: bool = False, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.uneven_batches: UnevenBatches = check_uneven_batches(uneven_batches)
        self.uneven_units = uneven_units
        self._evenness: Evenness | None = None

    def _watch_batches(self, trainer: Trainer, runtime: Runtime) -> None:
        """To be called by ``setup``."""
        if runtime.mesh.world.size == 1:
            return
        self._evenness = Evenness(runtime.mesh, runtime.visits, self.uneven_batches)
        self._evenness.attach(trainer)

    def _begin_evaluation(self) -> None:
        """To be called when validation, test or prediction starts."""
        if self._evenness is not None:
            self._evenness.begin_evaluation(self._trainer_at_work())

    def _end_run(self) -> None:
        super()._end_run()
        if self._evenness is not None:
            self._evenness.detach(self._trainer_at_work())
            self._evenness = None
