"""Callbacks and data loaders beside a sharded model.

Averages (EMA, SWA), summaries, refusal of unsupported callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shardeddp.checkpoint.load_states import load_model
from shardeddp.comm import Mesh
from shardeddp.config import UnevenBatches
from shardeddp.engine.buffers import BufferBroadcast
from shardeddp.engine.runtime import Runtime, runtime_of
from shardeddp.errors import ConfigurationError
from shardeddp.lightning import private
from shardeddp.lightning.api import (
    LightningModule,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    Trainer,
    TrainerFn,
    WeightAveraging,
    callbacks_of,
)
from shardeddp.lightning.uneven_data import EvenTraining, UnevenEvaluation
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import IncompatibleKeys, parse_to

# -- Averages (EMA, SWA): copies of a model in shards


class _Average(NamedTuple):
    # Attribute of the callback: an AveragedModel around the copy, or the copy itself
    holder: nn.Module
    copy: nn.Module
    device: torch.device | None  # device that the callback asks for; None: that of the model


class Averages:
    """Averaged copies of the module in a Trainer's callbacks.

    Callbacks copy the module before it is sharded, and later iterate over the parameters of both.
    If both have the same layout, averaging, swapping and saving work on shards without a gather.
    """

    def __init__(self) -> None:
        self._loads: list[Callable[[], None]] = []
        # Replaced methods: owner, name, and the previous instance attribute, if any.
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._buffers: list[BufferBroadcast] = []
        self._mesh: Mesh | None = None  # of the ranks that share the averaged module, once sharded

    def keep_on_host(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep the copy that a callback is about to make on the module's device.

        The callback would move the whole copy to the compute device. ``module.to`` is replaced,
        also in copies, until sharding.
        """
        averages = any(isinstance(each, WeightAveraging) for each in callbacks_of(trainer))
        if averages and runtime_of(module) is None:
            self._replace(module, "to", MethodType(_stay, module))

    def defer_loads(self, trainer: Trainer, module: LightningModule, cast: bool) -> None:
        """Postpone loads of callbacks, into the module and its averages, until they are sharded."""
        if runtime_of(module) is not None:
            return
        for loads in {
            id(each): each for it in _averages(trainer, module) for each in (it.holder, it.copy)
        }.values():
            self._postpone(loads, cast)
        self._postpone(module, cast)
        self._versions = [
            (name, parameter, parameter._version) for name, parameter in module.named_parameters()
        ]

    def _postpone(self, module: nn.Module, cast: bool) -> None:
        def remember(
            state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
        ) -> IncompatibleKeys:
            self._loads.append(partial(load_model, module, state_dict, strict, cast))
            return IncompatibleKeys([], [])

        self._replace(module, "load_state_dict", remember)

    def _replace(self, module: nn.Module, name: str, method: Any) -> None:
        self._replaced.append((module, name, vars(module).get(name)))
        vars(module)[name] = method

    def end_deferral(self) -> None:
        """Restore ``load_state_dict``, after callbacks have loaded and before sharding.

        Raises:
            ConfigurationError: A callback has written to parameters that the checkpoint is about to
                overwrite.
        """
        while self._replaced:
            each, name, own = self._replaced.pop()
            if own is None:
                vars(each).pop(name, None)
            else:
                vars(each)[name] = own
        written = [
            name for name, parameter, version in self._versions if parameter._version != version
        ]
        self._versions = []
        if written:
            raise ConfigurationError(
                f"a callback has written to parameter {written[0]} in on_load_checkpoint() or "
                f"load_state_dict(), where the checkpoint's own values are still to be loaded over "
                f"it. Use pl_module.load_state_dict() there, or write in on_fit_start()"
            )

    def shard(
        self, trainer: Trainer, module: LightningModule, mesh: Mesh
    ) -> Callable[[], None] | None:
        """Shard the averages of a module that has just been sharded; a collective of all ranks.

        Returns:
            Function that runs the postponed loads; None if there are none.
        """
        self._mesh = mesh
        for average in _averages(trainer, module):
            vars(average.copy).pop("to", None)
            _check_same(average.copy, module)
            _shard_average(average, module, mesh)
            self._buffers.append(BufferBroadcast(average.copy))
        loads, self._loads = self._loads, []
        return partial(_run_all, loads) if loads else None

    def shard_anew(self, trainer: Trainer, module: LightningModule, mesh: Mesh) -> None:
        """Shard averages anew after their module; a collective of all ranks."""
        for average in _averages(trainer, module):
            _shard_average(average, module, mesh)
        self._mesh = mesh

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's averaged buffers before an evaluation of the average."""
        for buffers in self._buffers:
            assert self._mesh is not None
            buffers.broadcast(self._mesh)

    def forget(self) -> None:
        """Drop all state of a run; averages stay with their callbacks."""
        self._versions, self._mesh = [], None
        self.end_deferral()
        self._loads, self._buffers = [], []


def _stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Replace ``Module.to``: convert the dtype, but do not move."""
    dtype = parse_to(*args, **kwargs)[1]  # as Module.to reads its arguments
    return module if dtype is None else type(module).to(module, dtype)


def _averages(trainer: Trainer, module: LightningModule) -> Iterator[_Average]:
    for callback in callbacks_of(trainer):
        where = private.averaging_device(callback)
        for value in vars(callback).values():
            if isinstance(value, AveragedModel) and type(value.module) is type(module):
                yield _Average(value, value.module, where)
            elif isinstance(callback, StochasticWeightAveraging) and type(value) is type(module):
                yield _Average(value, value, where)


def _check_same(copy: nn.Module, module: LightningModule) -> None:
    mine, theirs = (
        {name: parameter.shape for name, parameter in each.named_parameters(remove_duplicate=False)}
        for each in (copy, module)
    )
    if mine != theirs:
        name = next(name for name in (*theirs, *mine) if mine.get(name) != theirs.get(name))
        raise ConfigurationError(
            f"a callback averages a copy of {type(module).__name__} that is not like the module: "
            f"expected {name} of shape {tuple(theirs.get(name, ()))}, found "
            f"{tuple(mine[name]) if name in mine else 'nothing'}. The copy is taken in the "
            f"callback's setup(): build all layers before that, in __init__ instead of "
            f"configure_model(), or use WeightAveraging, which calls configure_model() first"
        )


@torch.no_grad()
def _shard_average(average: _Average, module: LightningModule, mesh: Mesh) -> None:
    # The whole parameter is kept alive, so that its id is not reused.
    done: dict[int, tuple[torch.Tensor, ShardTensor]] = {}
    for path, owner in average.copy.named_modules(remove_duplicate=False):
        for name, mine in owner._parameters.items():
            theirs = module.get_submodule(path)._parameters[name]
            if mine is None or not isinstance(theirs, ShardTensor):
                continue
            if isinstance(mine, ShardTensor) and mine.spec.lies_like(theirs.spec):
                mine.requires_grad_(False)  # a copy of a module that was sharded before
                continue
            if id(mine) not in done:
                whole: Any = mine.whole("averaging") if isinstance(mine, ShardTensor) else mine
                done[id(mine)] = (mine, _shard(whole, theirs, average.device, mesh))
            owner._parameters[name] = done[id(mine)][1]  # type: ignore[assignment]  # a Parameter to isinstance


def _shard(
    mine: nn.Parameter, theirs: ShardTensor, device: torch.device | None, mesh: Mesh
) -> ShardTensor:
    where = theirs.to_local().device if device is None else device
    if mine.is_meta:
        local = theirs.to_local().to(where, mine.dtype, copy=True)
    else:
        values = mine.detach().to(mesh.device).contiguous()
        if mesh.data.size > 1:
            mesh.data.broadcast_(values, 0).wait()
        local = theirs.spec.localize(values).to(where, copy=True)
    # It requires no gradient: callbacks read it in grad mode, which would gather it.
    sharded = ShardTensor(local, theirs.spec)
    vars(sharded).update(mine.__dict__, _is_param=True)  # isinstance(p, nn.Parameter) holds
    return sharded


def _run_all(loads: list[Callable[[], None]]) -> None:
    for load in loads:
        load()


# -- CallbackAdapters: stock callbacks and loaders around a sharded model


class CallbackAdapters:
    """Adapters for a Trainer's runs: averages and summaries of callbacks, uneven data loaders."""

    def __init__(self, uneven_batches: UnevenBatches) -> None:
        self._averages = Averages()
        self.uneven_batches: UnevenBatches = uneven_batches
        self._training: EvenTraining | None = None  # both are set in runs of several ranks only
        self._evaluation: UnevenEvaluation | None = None

    def __reduce__(self) -> Any:
        """Copy without the state of a run, for example with a Trainer."""
        return type(self), (self.uneven_batches,)

    def keep_averages_on_host(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep the copy that a callback is about to average on the module's device."""
        self._averages.keep_on_host(trainer, module)

    def defer_loads(self, trainer: Trainer, module: LightningModule, cast: bool) -> None:
        """Postpone loads of callbacks, into the module and its averages, until they are sharded."""
        self._averages.defer_loads(trainer, module, cast)

    def before_sharding(self, trainer: Trainer, module: LightningModule) -> list[nn.Parameter]:
        """Prepare callbacks for the sharding of the module.

        Returns:
            Parameters of all averages; those on the meta device get values during sharding.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_callbacks(trainer)
        self._averages.end_deferral()
        averages = _averages(trainer, module)
        return [it for each in averages for it in each.copy.parameters()]

    def after_sharding(
        self, trainer: Trainer, module: LightningModule, runtime: Runtime
    ) -> Callable[[], None] | None:
        """Adapt callbacks and loops to the sharded module; a collective of all ranks.

        Returns:
            Function that runs the postponed loads of callbacks; None if there are none.
        """
        if runtime.mesh.world.size > 1:
            self._training = EvenTraining(runtime.mesh, self.uneven_batches)
            self._evaluation = UnevenEvaluation(runtime.mesh, runtime.agreement)
        for summary in _summaries(trainer):  # show the elements that a rank holds
            private.replace_summary(summary)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # what it makes could not be used in a later training
        return self._averages.shard(trainer, module, runtime.mesh)

    def after_resharding(self, trainer: Trainer, module: LightningModule, runtime: Runtime) -> None:
        """Adapt callbacks to a module that was sharded anew in a run; a collective of all ranks."""
        if self._training is not None:
            self._training.continue_on(runtime.mesh)
            self._evaluation = UnevenEvaluation(runtime.mesh, runtime.agreement)
        self._averages.shard_anew(trainer, module, runtime.mesh)

    def align_loaders(self, trainer: Trainer) -> bool:
        """Align training loaders that a query of the number of steps created before training.

        Returns:
            True if the returned number was wrong, because ranks have different numbers of batches.
        """
        if self._training is None or private.combined_loader(trainer.fit_loop) is None:
            return False
        return self._training.align(trainer)

    def begin_training(self, trainer: Trainer) -> None:
        """Prepare the start of training."""
        if self._training is not None:
            self._training.begin(trainer)

    def begin_batch(self, trainer: Trainer) -> None:
        """Prepare a training batch."""
        if self._training is not None:
            self._training.begin_batch(trainer)

    def begin_evaluation(self, trainer: Trainer) -> None:
        """Prepare validation, test or prediction."""
        self._averages.broadcast_buffers()
        if self._evaluation is not None:
            self._evaluation.begin(trainer)

    def end_evaluation(self) -> None:
        """End validation, test or prediction."""
        if self._evaluation is not None:
            self._evaluation.end()

    @property
    def repeats_batch(self) -> bool:
        """True if the current training batch is a repeated one; see ``uneven_batches``."""
        return self._training is not None and self._training.repeats

    def zero_repeated_loss(self, loss: torch.Tensor) -> None:
        """Zero the gradients of a repeated batch; see ``uneven_batches``."""
        if self._training is not None:
            self._training.zero_repeated_loss(loss)

    def end_run(self, trainer: Trainer | None) -> None:
        """Drop the state of a run that has ended or failed."""
        self.end_evaluation()
        self._training = self._evaluation = None
        # The next run may use another strategy.
        for summary in () if trainer is None else _summaries(trainer):
            private.restore_summary(summary)
        self._averages.forget()


def _summaries(trainer: Trainer) -> list[ModelSummary]:
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, ModelSummary)]


def _refuse_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that do not work with a sharded module."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} cannot be used with ShardedDP: ModelPruning replaces "
                f"parameters while they are sharded, and finds the smallest of whole tensors. "
                f"Prune with torch.nn.utils.prune before trainer.fit(), whose masks then hold in "
                f"training, or train with strategy='ddp'"
            )
