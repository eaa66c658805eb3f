"""Callbacks and data loaders beside a sharded model.

Averages (EMA, SWA), summaries, refused callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shardeddp.checkpoint.restore import load_model
from shardeddp.comm import Mesh
from shardeddp.config import UnevenBatches
from shardeddp.engine.buffers import BufferSync
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
    get_human_readable_count,
)
from shardeddp.lightning.uneven_data import EvenTraining, UnevenEvaluation
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import IncompatibleKeys, parse_to

# -- Model summary: Lightning's table with the column for sharded models

COLUMN = "Params per Device"
"""As Lightning calls it; ``RichModelSummary`` shows no other."""


def _summaries(trainer: Trainer) -> list[ModelSummary]:
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, ModelSummary)]


def _summarize(module: nn.Module, max_depth: int) -> Any:
    """Summary with the number of elements of each layer that a rank holds on average."""
    return private.SummaryWithCounts(module, max_depth, title=COLUMN, count=_held, show=_show)


def _show(count: float) -> str:
    return get_human_readable_count(round(count))


def _held(module: nn.Module) -> float:
    return sum(
        it.numel() / (it.spec.num_parts if isinstance(it, ShardTensor) else 1)
        for it in module.parameters()
    )


# -- Averages (EMA, SWA): copies of a model in shards


class _Average(NamedTuple):
    # The callback's attribute: an AveragedModel around the copy, or the copy itself
    holder: nn.Module
    copy: nn.Module
    device: torch.device | None  # where the callback wants it; None: where the model is


class Averages:
    """Averages that a Trainer's callbacks keep of its module, from reading a checkpoint on.

    Callbacks copy the module before it is sharded, and then go through the parameters of both side
    by side. When the elements of both lie alike, that is arithmetic on shards: nothing is gathered
    to average, to swap or to save.
    """

    def __init__(self) -> None:
        self._loads: list[Callable[[], None]] = []
        # Replaced methods: owner, name, and the user's own on the instance, if any.
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._buffers: list[BufferSync] = []

    def keep_on_host(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep the copy that a callback is about to take where the module is.

        The callback would move the whole copy to the device.

        Args:
            trainer: Whose callbacks are about to be set up.
            module: Theirs; a method that its copies take over waits in it until it is sharded.
        """
        averages = any(isinstance(each, WeightAveraging) for each in callbacks_of(trainer))
        if averages and runtime_of(module) is None:
            self._replace(module, "to", MethodType(_stay, module))

    def defer_loads(self, trainer: Trainer, module: LightningModule, cast: bool) -> None:
        """Postpone loads of callbacks, into the module and its averages, until there are shards.

        Args:
            trainer: Whose callbacks are about to take their part of a checkpoint.
            module: Theirs, whose own part waits already.
            cast: Whether dtypes may differ.
        """
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

    def end_deferral(self, module: LightningModule) -> None:
        """Let loads reach the module at once again.

        Callbacks have had their part, and the module is about to be sharded.

        Raises:
            ConfigurationError: A callback has written to the module in a way that its checkpoint is
                going to undo.
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
            Action that makes the postponed loads; None without any.

        Raises:
            ConfigurationError: An average is of another model than is trained.
        """
        for average in _averages(trainer, module):
            vars(average.copy).pop("to", None)
            _check_same(average.copy, module)
            _shard_like(average, module, mesh)
            self._buffers.append(BufferSync(average.copy, mesh))
        loads, self._loads = self._loads, []
        return partial(_run_all, loads) if loads else None

    def reshard(self, trainer: Trainer, module: LightningModule, mesh: Mesh) -> None:
        """Shard averages as the module has been sharded anew; a collective of all ranks."""
        for average in _averages(trainer, module):
            _shard_like(average, module, mesh)
        for buffers in self._buffers:
            buffers.mesh = mesh

    def sync_buffers(self) -> None:
        """Give rank 0's averaged buffers to all ranks, which are about to evaluate the average."""
        for buffers in self._buffers:
            buffers.sync()

    def forget(self, module: LightningModule) -> None:
        """Let everything go that a run of a module has left; averages stay with their callbacks."""
        self._versions = []
        self.end_deferral(module)
        self._loads, self._buffers = [], []


def _stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """In the place of ``Module.to``: converts, and does not move."""
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
def _shard_like(average: _Average, module: LightningModule, mesh: Mesh) -> None:
    # The whole parameter is kept, so that its id is not reused.
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
    # It takes no gradient: callbacks read it where gradients are recorded, and would gather it
    # there.
    sharded = ShardTensor(local, theirs.spec)
    vars(sharded).update(mine.__dict__, _is_param=True)  # isinstance(p, nn.Parameter) holds
    return sharded


def _run_all(loads: list[Callable[[], None]]) -> None:
    for load in loads:
        load()


# -- CallbackAdapters: stock callbacks and loaders around a sharded model


class CallbackAdapters:
    """Accompanies the runs of a Trainer: averages and summaries of callbacks, numbers of batches.

    Args:
        uneven_batches: Behaviour of training when a rank has no batch left and others have.
    """

    def __init__(self, uneven_batches: UnevenBatches) -> None:
        self.averages = Averages()
        self.uneven_batches: UnevenBatches = uneven_batches
        self._training: EvenTraining | None = None  # both: in a run of several ranks
        self._evaluation: UnevenEvaluation | None = None

    def __reduce__(self) -> Any:
        """A copy, of a Trainer for instance, accompanies no run yet."""
        return type(self), (self.uneven_batches,)

    def before_sharding(self, trainer: Trainer, module: LightningModule) -> list[nn.Parameter]:
        """The module of a run is about to be sharded.

        Returns:
            The parameters of its averages; those on the meta device get values as they are sharded.

        Raises:
            ConfigurationError: A callback cannot do its work on a sharded module.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_callbacks(trainer)
        self.averages.end_deferral(module)
        averages = _averages(trainer, module)
        return [it for each in averages for it in each.copy.parameters()]

    def after_sharding(
        self, trainer: Trainer, module: LightningModule, runtime: Runtime
    ) -> Callable[[], None] | None:
        """The module has been sharded; a collective of all ranks.

        Returns:
            Action that makes the loads that callbacks had postponed; None if there is
            nothing.
        """
        if runtime.mesh.world.size > 1:
            self._training = EvenTraining(runtime.mesh, self.uneven_batches)
            self._evaluation = UnevenEvaluation(runtime.mesh, runtime.agreement)
        for summary in _summaries(trainer):  # shows what a rank holds
            private.replace_summary(summary, _summarize)
        return self.averages.shard(trainer, module, runtime.mesh)

    def after_resharding(self, trainer: Trainer, module: LightningModule, runtime: Runtime) -> None:
        """The module was sharded anew in the middle of a run; a collective of all ranks."""
        if self._training is not None:
            self._training.mesh = runtime.mesh
            self._evaluation = UnevenEvaluation(runtime.mesh, runtime.agreement)
        self.averages.reshard(trainer, module, runtime.mesh)

    def align_loaders(self, trainer: Trainer) -> bool:
        """Training loaders exist before training starts: someone has asked for the number of steps.

        Returns:
            Whether the answer was wrong: ranks have different numbers of batches.
        """
        return self._training is not None and self._training.align(trainer)

    def begin_training(self, trainer: Trainer) -> None:
        """Training starts."""
        if self._training is not None:
            self._training.begin(trainer)

    def begin_batch(self, trainer: Trainer) -> None:
        """A batch is about to be trained on."""
        if self._training is not None:
            self._training.begin_batch(trainer)

    def begin_evaluation(self, trainer: Trainer) -> None:
        """Validation, test or prediction starts."""
        self.averages.sync_buffers()
        if self._evaluation is not None:
            self._evaluation.begin(trainer)

    def end_evaluation(self) -> None:
        """It ends."""
        if self._evaluation is not None:
            self._evaluation.end()

    def zero_repeated_loss(self, loss: torch.Tensor) -> None:
        """Zero the gradients of a repeated batch; see ``uneven_batches``."""
        if self._training is not None:
            self._training.zero_repeated_loss(loss)

    def end_run(self, trainer: Trainer, module: LightningModule) -> None:
        """The run is over, or has failed."""
        self.end_evaluation()
        self._training = self._evaluation = None
        for summary in _summaries(trainer):  # its next run may be under another strategy
            private.restore_summary(summary)
        self.averages.forget(module)


def _refuse_callbacks(trainer: Trainer) -> None:
    """Look through the callbacks of a training that is about to begin.

    Raises:
        ConfigurationError: One of them would fail in the middle of training, or do something else
            than it says.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} cannot be used with ShardedDP: ModelPruning replaces "
                f"parameters while they are sharded, and finds the smallest of whole tensors. "
                f"Prune with torch.nn.utils.prune before trainer.fit(), whose masks then hold in "
                f"training, or train with strategy='ddp'"
            )
