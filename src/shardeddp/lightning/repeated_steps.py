"""Repeated steps: a training step for which memory ran out on all ranks runs again, sharded deeper."""

from __future__ import annotations

import gc
import json
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch

from shardeddp.checkpoint.random_state import capture_random_state, restore_random_state
from shardeddp.comm import Mesh
from shardeddp.comm.store import StoreBarrier
from shardeddp.engine.flat_group import FlatGroup
from shardeddp.engine.runtime import Runtime, runtime_of
from shardeddp.errors import errors_behind
from shardeddp.lightning.api import LightningModule, Trainer
from shardeddp.lightning.held_state import HeldState, set_hooks
from shardeddp.lightning.out_of_memory import is_out_of_memory
from shardeddp.lightning.private import logged_values, zero_gradients
from shardeddp.torch_private import pytree

log = logging.getLogger(__name__)

Deepen = Callable[[BaseException], Callable[[], None] | None]
"""See :class:`RepeatedSteps`."""


class RepeatedSteps:
    """Training steps of a run, each repeated if all ranks run out of memory at the same place.

    The same place is the same number of operations that a rank has begun and of collectives that it
    has launched: then no rank waits for another, and nothing that is in flight is of some ranks
    only. A repeated step begins with the random states, buffers and metrics of the failed one, and
    values that this one has logged are not logged twice.

    All ranks make one for a run.

    Args:
        deepen: Function that is called with the error and returns a function that shards deeper, to
            be called on all ranks; None: it is as deep as it can be, and the error is raised.
        patience_s: Maximum wait for other ranks to run out of memory too, in seconds.
        mesh: Communicators of the ranks.
    """

    def __init__(self, deepen: Deepen, patience_s: float, mesh: Mesh) -> None:
        self._deepen, self._patience_s = deepen, patience_s
        self._barrier = StoreBarrier(mesh.rank, mesh.topology.world_size, "out of memory")
        self._attempt: _Attempt | None = None
        self._batch: int | None = None  # number of the last one

    def run_forward(self, step: Callable[[], Any], trainer: Trainer) -> Any:
        """Run the forward of a training step; ``step`` returns its output."""
        former, self._batch = self._batch, trainer.fit_loop.total_batch_idx
        self._attempt = None
        # In later micro-batches gradients of the first would be lost, and so would be what an
        # optimizer that calls its closure several times has computed from the first call.
        begins_step = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        runtime = runtime_of(trainer.lightning_module)
        if not begins_step or former == self._batch or runtime is None or runtime.is_passthrough:
            return step()
        self._attempt = _Attempt(step, trainer)
        return self._run(self._attempt)

    def run_backward(
        self, backward: Callable[[torch.Tensor], torch.Tensor], loss: torch.Tensor
    ) -> torch.Tensor:
        """Run the backward of the last step of :meth:`run_forward`; ``backward`` takes its loss."""
        attempt = self._attempt
        if attempt is None:
            return backward(loss)
        if kept := attempt.parameter_with_gradient():
            self._attempt = None  # it holds the batch
            with _explaining(
                f"step {attempt.trainer.global_step} is not repeated with deeper sharding: {kept} had a "
                f"gradient before its backward, which would be lost (an optimizer_zero_grad that "
                f"keeps zeros, or a gradient that accumulates over steps)"
            ):
                return backward(loss)
        while True:
            try:
                with attempt.logging_once("backward"):
                    scaled = backward(loss)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failed = error
            else:
                self._attempt = None  # it holds the batch
                return scaled
            # Callers hold the loss and the output: without its graph, the activations can be freed.
            for tensor in (loss, *pytree.tree_leaves(attempt.output)):
                if isinstance(tensor, torch.Tensor) and not tensor.is_leaf:  # no parameter
                    with suppress(RuntimeError):  # of a view, which torch does not detach
                        tensor.detach_()
            attempt.output = None
            self._recover(attempt, failed, has_gradients=True)
            loss = _loss_of(self._run(attempt)) / attempt.trainer.accumulate_grad_batches
            with attempt.logging_once("zero_grad"):
                zero_gradients(attempt.trainer)  # their effects were those of the failed forward

    def _run(self, attempt: _Attempt) -> Any:
        while True:
            try:
                with attempt.logging_once("forward"):
                    attempt.output = attempt.step()
                    return attempt.output
            except Exception as error:
                if not is_out_of_memory(error):
                    if attempt.is_repeated:
                        log.error(
                            f"step {attempt.trainer.global_step} has failed in its repetition with "
                            f"deeper sharding: a training_step that changes its batch, or a state of its "
                            f"own, cannot be repeated"
                        )
                    raise
                failed = error
            self._recover(attempt, failed)

    def _recover(
        self, attempt: _Attempt, failed: Exception, *, has_gradients: bool = False
    ) -> None:
        """Bring all ranks back to the begin of the step, sharded deeper; else raise the error."""
        deepen = self._deepen(failed)
        if deepen is None:
            raise failed
        runtime, step = attempt.runtime, attempt.trainer.global_step
        if obstacle := attempt.obstacle():
            log.error(f"step {step} is not repeated with deeper sharding: {obstacle}")
            raise failed
        if not self._barrier.wait_for_all(f"step {step}: {attempt.place()}", self._patience_s):
            log.error(
                f"rank {runtime.mesh.rank}: step {step} cannot be repeated with deeper sharding: not "
                f"all ranks have run out of memory at the same place within {self._patience_s:g} s, "
                f"so some wait for others in a collective"
            )
            raise failed
        _forget_frames(failed)
        try:
            _free_memory(runtime.mesh.device)  # graphs too, before units are resharded around them
            runtime.start_over(buffers_are_due=attempt.buffers_are_due)
            if has_gradients:  # of a part of the backward
                for parameter in attempt.parameters():
                    parameter.grad = None
            attempt.restore()
            attempt.is_repeated = True
            deepen()
            attempt.note_writes()
            _free_memory(runtime.mesh.device)
        except BaseException as error:
            raise error from failed


class _Attempt:
    """A training step with the state that it may change: random states, held state, logs."""

    def __init__(self, step: Callable[[], Any], trainer: Trainer) -> None:
        self.step, self.trainer = step, trainer
        self.module: LightningModule = trainer.lightning_module
        self.output: Any = None
        """Output of the step's last forward."""
        self.is_repeated = False
        self.buffers_are_due = self.runtime.buffers_are_due
        self._begun = self._begun_by_others()
        self._random = capture_random_state(self.runtime.mesh.device)
        self.note_writes()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        groups = self._groups()
        self._hooks = {key: {**hooks} for key, hooks in self._parameter_hooks().items()}
        self.held = HeldState(
            [
                self.module,
                data,
                *vars(trainer).values(),  # callbacks, and what users set on it
                *trainer.optimizers,
                *(it.scheduler for it in trainer.lr_scheduler_configs),
                *chain.from_iterable(hooks.values() for hooks in self._hooks.values()),
            ],
            managed=[it for group in groups for it in (*group.sharded, *group.unsharded)],
        )
        # Logged values in the attempt that has come farthest, by part of the step.
        # Before a backward fails, the hooks that zero gradients have logged all of theirs.
        self._logged = Counter({"zero_grad": sys.maxsize})

    @property
    def runtime(self) -> Runtime:
        """Present engine of the module."""
        runtime = runtime_of(self.module)
        assert runtime is not None
        return runtime

    def note_writes(self) -> None:
        """Note the versions of parameters, which are not copied."""
        self._writes = [group.writes() for group in self._groups()]

    def obstacle(self) -> str:
        """Return why the state from before the step cannot be restored; empty: it can."""
        for group, before in zip(self._groups(), self._writes, strict=True):
            if group.writes() != before:
                names = [slot.fqn for slot in group.layout.slots]
                return (
                    f"it has written to {names[0]}, or a parameter beside it ({len(names)} in all), of "
                    f"which there is no copy"
                )
        return self.held.obstacle()

    def _groups(self) -> list[FlatGroup]:
        return [group for each in self.runtime.progresses for group in each.unit.groups]

    def _parameter_hooks(self) -> dict[tuple[str, int], dict[int, Any]]:
        """Return the users' hooks of each parameter, by name and kind of hook."""
        sharded = [it for group in self._groups() for it in group.sharded]
        return {
            (it.spec.fqn, kind): hooks
            for it in sharded
            for kind, hooks in enumerate(it.hooks_of_users())
            if hooks is not None
        }

    def parameters(self) -> dict[torch.Tensor, str]:
        """Return the parameters of the module and of the optimizers, with names."""
        found: dict[torch.Tensor, str] = {it: name for name, it in self.module.named_parameters()}
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found.setdefault(parameter, f"a parameter of {type(optimizer).__name__}")
        return found

    def parameter_with_gradient(self) -> str:
        """Return the name of a parameter with a gradient of an earlier step; empty: there is none."""
        names = (name for it, name in self.parameters().items() if it.grad is not None)
        return next(names, "")

    def place(self) -> str:
        """Return the numbers of operations and collectives so far, without names of groups.

        In groups that are not the engine's: since the step began, as messages between two ranks,
        which torch counts as well, may differ before.
        """
        mesh = self.runtime.mesh
        # Begun before their memory is allocated; `traffic` counts those that are launched.
        ours = [counts for _, counts in sorted(mesh.begun().items())]
        since = Counter(self._begun_by_others())
        since.subtract(self._begun)
        launched = sorted(mesh.traffic.calls.items())
        return json.dumps([ours, launched, sorted(filter(None, since.values()))])

    def _begun_by_others(self) -> dict[str, int]:
        groups = self.runtime.mesh.begun_by_others()
        return {name: counts["operations"] for name, counts in groups.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state from before the step."""
        restore_random_state(self._random, self.runtime.mesh.device)
        self.held.restore()
        for key, hooks in self._parameter_hooks().items():
            set_hooks(hooks, self._hooks.get(key, {}))

    @contextmanager
    def logging_once(self, part: str) -> Generator[None]:
        """Leave out as many logged values as an earlier attempt at this part has logged."""
        # Not the module's `log`, of which there may be bound copies, and which copies of the module
        # would take along.
        values, calls = logged_values(self.trainer), 0
        log_value, reset = values.log, values.reset

        def log_once(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > self._logged[part]:
                log_value(*args, **kwargs)
                self._logged[part] = calls

        # In an epoch's first batch Lightning resets what a hook has logged before, at its first log.
        def reset_once(*args: Any, **kwargs: Any) -> None:
            if calls >= self._logged[part]:
                reset(*args, **kwargs)

        vars(values).update(log=log_once, reset=reset_once)
        try:
            yield
        finally:
            for name in ("log", "reset"):
                vars(values).pop(name)


def _loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output["loss"]


@contextmanager
def _explaining(text: str) -> Generator[None]:
    """Log a text if memory runs out inside."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            log.error(text)
        raise


def _forget_frames(failed: BaseException) -> None:
    """Drop the tracebacks of an error: their frames hold activations, also after a frame's clear()."""
    for error in errors_behind(failed):
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None


def _free_memory(device: torch.device) -> None:
    """Free cycles of what nobody holds, and the blocks that the device's allocator keeps."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
