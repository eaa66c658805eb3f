"""ModelStrategy: what users ask of a sharded model at any time of a run, and no rank left waiting for an answer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from shardeddp.checkpoint.format.interop import lightning_meta
from shardeddp.comm.attendance import note_that_runs_alone
from shardeddp.config import CPUOffload
from shardeddp.lightning_api import rank_zero_info, rank_zero_only
from shardeddp.monitor.units import describe_units, print_units
from shardeddp.plan.memory import MemoryPlan, plan_memory
from shardeddp.sharding.hooks import runtime_of
from shardeddp.sharding.runtime import Prefetch, Runtime
from shardeddp.sharding.summoning import summon
from shardeddp.strategy.continuing import ContinuingStrategy


class ModelStrategy(ContinuingStrategy):
    """Gives out whole parameters, describes units, and watches over operations that need all ranks.

    Args:
        arguments: Of :class:`ContinuingStrategy`.
        offload: What lives in host memory.
        prefetch: How far ahead units are gathered.
        options: Of :class:`ContinuingStrategy`.
    """

    def __init__(self, *arguments: Any, offload: CPUOffload, prefetch: Prefetch, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.offload = offload
        self.prefetch = prefetch
        self._runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime:
        """The engine of the model; exists from ``setup`` on."""
        if self._runtime is None:
            raise RuntimeError("ShardedDP has not sharded a model yet: the Trainer does so when it starts to run")
        return self._runtime

    @property
    def memory_plan(self) -> MemoryPlan:
        """Predicted bytes of this rank, without activations, for an optimizer with two states per element."""
        units = [track.unit.costs() for track in self.runtime.tracks]
        return plan_memory(
            units,
            self.placement,
            prefetch=self.prefetch.backward,
            staged=self.root_device.type == "cpu",
            accumulates=self._accumulates(),
            offload_optimizer=self._offloads_optimizer,
        )

    @property
    def _offloads_optimizer(self) -> bool:
        # Where the host is the device, its states are there already.
        return self.offload.optimizer and not self.offload.params and self.root_device.type != "cpu"

    def _accumulates(self) -> bool:
        return self.trainer is not None and self.trainer.accumulate_grad_batches > 1

    def _introduce(self, runtime: Runtime) -> None:
        """Tell people once what has become of their model."""
        if self.is_global_zero:
            rank_zero_info(f"ShardedDP: {describe_units(self._sharding_strategy, runtime)}")

    def print_units(self) -> None:
        """Print what is gathered together, and what each rank stores of it; from ``on_fit_start`` on, on any rank."""
        runtime = None if self.lightning_module is None else runtime_of(self.lightning_module)
        if runtime is None:
            raise RuntimeError("ShardedDP has no units yet: the Trainer shards the model when it starts to run")
        print_units(self._sharding_strategy, runtime)

    def _watch(self) -> None:
        """To be called by ``setup``: from here on a rank that waits in vain for others is told so."""
        note_that_runs_alone(rank_zero_only(print), "{name}, which rank_zero_only runs on one rank")
        note_that_runs_alone(
            lightning_meta,
            "what rank 0 saves of hyper-parameters and callbacks. Leave modules out of it, their parameters are saved "
            "as the model's: save_hyperparameters(ignore=[...])",
        )

    @contextmanager
    def summon_full_params(
        self,
        module: nn.Module | None = None,
        *,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
    ) -> Generator[None]:
        """Surround code that wants whole parameters; all ranks enter it, and what they do inside is up to each.

        Inside, modules hold plain parameters of full shape and of the model's own dtype: they can be read, saved,
        pickled, handed to other libraries, and written to. What rank 0 writes in place is what all ranks have
        afterwards; what other ranks write is dropped. References that were taken before (by an optimizer) are to the
        sharded parameters still, and a ``backward()`` to whole ones is an error.

        It takes memory for all parameters of ``module`` on every rank, and gathers each once. It may be nested, used
        in any hook, and after a run. Before the model is sharded it does nothing, as parameters are whole then. Inside
        of a step, modules whose forward is under way hold what they compute with: write to parameters outside of steps.

        Args:
            module: The model, a part of it, or a deep copy of either; None: the LightningModule.
            writeback: False drops what was written.
            rank0_only: Only rank 0 has whole parameters inside; the others hold one at a time while it is gathered.
            offload_to_cpu: Whole parameters are in host memory.
        """
        model = self.lightning_module
        runtime = None if model is None else runtime_of(model)
        target = model if module is None else module
        with (
            nullcontext()
            if runtime is None or target is None
            else summon(runtime, target, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
        ):
            yield
