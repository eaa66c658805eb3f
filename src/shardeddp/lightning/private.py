"""Private names of Lightning: the only file that uses them, and a table of those relied on.

Each function wraps one private name. A release may change any of them, and some changes would fail
silently: a signal handler is never called, a checkpoint is never found. So :func:`check_lightning`
compares the table with the installed release when a strategy is created.
"""

from __future__ import annotations

import dis
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from shardeddp.checkpoint.location import is_remote
from shardeddp.checkpoint.remote import RemotePath
from shardeddp.errors import CheckpointError, ConfigurationError
from shardeddp.lightning.api import (
    NAMESPACE,
    changed_release,
    get_human_readable_count,
    named,
)
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import changed_parameters

# Other files import these names from here.
# pyright: reportUnusedImport=false


# -- Imported names

if TYPE_CHECKING:
    from lightning.fabric.utilities.device_dtype_mixin import (
        _DeviceDtypeModuleMixin as DeviceDtypeModuleMixin,
    )
    from lightning.pytorch.loops import _FitLoop as FitLoop
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
    from lightning.pytorch.loops.progress import _ProcessedTracker as ProcessedTracker
    from lightning.pytorch.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from lightning.pytorch.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from lightning.pytorch.utilities.model_summary import ModelSummary
else:
    DeviceDtypeModuleMixin = named("fabric.utilities.device_dtype_mixin:_DeviceDtypeModuleMixin")
    FitLoop = named("pytorch.loops:_FitLoop")
    PrefetchDataFetcher = named("pytorch.loops.fetchers:_PrefetchDataFetcher")
    ProcessedTracker = named("pytorch.loops.progress:_ProcessedTracker")
    MultiProcessingLauncher = named(
        "pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher"
    )
    SubprocessScriptLauncher = named(
        "pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher"
    )
    ModelSummary = named("pytorch.utilities.model_summary:ModelSummary")

all_gather_ddp_if_available: Any = named(
    "fabric.utilities.distributed:_all_gather_ddp_if_available"
)
init_dist_connection: Any = named("fabric.utilities.distributed:_init_dist_connection")
load_state: Any = named("pytorch.core.saving:_load_state")
migrate_checkpoint: Any = named("pytorch.utilities.migration.utils:_pl_migrate_checkpoint")
_call_callback_hooks: Any = named("pytorch.trainer.call:_call_callback_hooks")
_call_module_hook: Any = named("pytorch.trainer.call:_call_lightning_module_hook")


# -- Modules


def trainer_of(module: Any) -> Any:
    """Return the Trainer of a module, or None; ``module.trainer`` raises instead."""
    return module._trainer


def logged_values(trainer: Any) -> Any:
    """Return the collection in which the running loop keeps logged values."""
    return trainer._results


def set_device(module: nn.Module, device: torch.device) -> None:
    """Set ``module.device`` of a LightningModule and those inside it, without moving tensors."""
    for child in module.modules():
        if isinstance(child, DeviceDtypeModuleMixin):
            child._device = device


class ModuleEntry:
    """Descriptor of a strategy's module that clears the module's ``torch.compile`` context on set.

    Lightning reads it dozens of times per step; without ``__get__`` a read is a plain attribute
    access.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, strategy: object, module: Any) -> None:
        vars(strategy)[self._name] = module
        if module is not None:
            module._compiler_ctx = None


def give_device_mesh(module: Any, mesh: DeviceMesh) -> None:
    """Set ``module.device_mesh``, as ``ModelParallelStrategy`` does."""
    module._device_mesh = mesh


def replace_layers(strategy: Any, module: nn.Module) -> None:
    """Apply the strategy's layer sync, set by ``Trainer(sync_batchnorm=True)``, to a module."""
    if strategy._layer_sync:
        strategy._layer_sync.apply(module)


# -- Loops: fit, evaluation and prediction


def combined_loader(loop: Any) -> Any:
    """Return the data loaders of a loop; None before their setup."""
    return loop._combined_loader


def drop_combined_loader(loop: Any) -> None:
    """Drop the data loaders of a loop, so that it creates new ones."""
    loop._combined_loader = None


def data_fetcher(loop: Any) -> Any:
    """Return the data fetcher of a loop."""
    return loop._data_fetcher


def replace_data_fetcher(loop: Any, fetcher: PrefetchDataFetcher) -> None:
    """Set the data fetcher of a loop."""
    loop._data_fetcher = fetcher


def _patched(owner: Any, **functions: Any) -> Callable[[], None]:
    """Set functions on an object, in place of methods of its class; return a function that undoes it."""
    vars(owner).update(functions)

    def undo() -> None:
        for name in functions:
            vars(owner).pop(name, None)

    return undo


def surround_fetches(
    trainer: Any, before: Callable[[], object], after: Callable[[], object]
) -> Callable[[], None]:
    """Call functions before and after each fetch of a training batch.

    Returns:
        Function that undoes it; both take effect with the next epoch.
    """
    loop = trainer.fit_loop.epoch_loop

    def begin() -> None:
        before()
        type(loop)._on_before_fetch(loop)

    def end() -> None:
        type(loop)._on_after_fetch(loop)
        after()

    return _patched(loop, _on_before_fetch=begin, _on_after_fetch=end)


def surround_validation(
    trainer: Any, context: Callable[[], AbstractContextManager[object]]
) -> Callable[[], None]:
    """Run the validation of a fit, with all of its hooks, inside a context.

    Returns:
        Function that undoes it.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop

    def run() -> Any:
        with context():
            return type(loop).run(loop)

    return _patched(loop, run=run)


def show_in_progress_bar(trainer: Any, name: str, value: float) -> None:
    """Give progress bars an entry; what is logged under the same name takes its place.

    A log of the module would refuse the user's own with other arguments.
    """
    trainer._logger_connector._progress_bar_metrics[name] = value


def accumulates(loop: Any) -> bool:
    """True if the current batch of a fit loop does not end with an optimizer step."""
    return loop._should_accumulate()


def zero_gradients(trainer: Any) -> None:
    """Call the hooks between the forward and the backward of a step; the loop does not count it."""
    optimizer = trainer.optimizers[0]  # the one of automatic optimization
    for call in (_call_callback_hooks, _call_module_hook):
        call(trainer, "on_before_zero_grad", optimizer)
    numbers = trainer.current_epoch, trainer.fit_loop.batch_idx
    _call_module_hook(trainer, "optimizer_zero_grad", *numbers, optimizer)


def end_restart(loop: Any) -> None:
    """Clear a loaded loop's restart flag; its own property is always True with ``max_steps``."""
    loop._restarting = False


def end_resume(loop: Any) -> None:
    """Clear a loaded loop's resume flag, so that the epoch's start creates its iterator."""
    loop._resuming_from_checkpoint = False


def delay_ends(loop: Any, delay: Callable[[Callable[[], Any]], Any]) -> Callable[[], None]:
    """Delay the end of each loader in an evaluation loop, and the end of a prediction.

    Hooks that follow a reduction of metrics or the collection of predictions run afterwards.
    ``delay`` gets the original end and calls it. Return a function that undoes it.
    """
    kind = type(loop)
    ends = {"_store_dataloader_outputs", "_on_predict_epoch_end"} & {*dir(kind)}
    own = {name: partial(delay, partial(getattr(kind, name), loop)) for name in ends}
    return _patched(loop, **own)


# -- Signals


def replace_signal_handlers(
    trainer: Any, end: Callable[..., None], requeue: Callable[..., None]
) -> None:
    """Replace the handlers that a Trainer will register, and its broadcast before each batch."""
    vars(trainer._signal_connector).update(
        _sigterm_notifier_fn=end, _slurm_sigusr_handler_fn=requeue
    )
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = _nothing


def restore_broadcast(trainer: Any) -> None:
    """Restore the broadcast; the handlers of :func:`replace_signal_handlers` end with the run."""
    vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def register_signal(trainer: Any, signum: signal.Signals, handler: Callable[..., None]) -> None:
    """Register a signal handler until the end of the Trainer's run."""
    trainer._signal_connector._register_signal(signum, handler)


def note_sigterm(trainer: Any) -> None:
    """Set a Trainer's flag for a received SIGTERM, which ends its run."""
    trainer._signal_connector.received_sigterm = True


def save_and_requeue(trainer: Any) -> None:
    """Call Lightning's handler of SLURM's requeue signal: save, then ``scontrol requeue``."""
    connector = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)


def _nothing() -> None:
    return None


# -- Checkpoints

Lookup = Callable[[Callable[[Any], Any], Any], Any]
"""Function of Lightning's own lookup and the user's ``ckpt_path`` that returns a path or None."""


def replace_checkpoint_lookup(trainer: Any, look_up: Lookup, agree: Callable[[Any], Any]) -> None:
    """Replace a Trainer's lookup of the checkpoint to resume from.

    Args:
        trainer: Trainer of the run.
        look_up: Function that finds the path, called on each rank separately.
        agree: Function of that path that returns the path to open, called on all ranks.
    """
    connector = trainer._checkpoint_connector
    connector._parse_ckpt_path = partial(_parse, trainer, look_up)
    connector.resume_start = partial(_resume_start, trainer, agree)


def _parse(
    trainer: Any,
    look_up: Lookup,
    state_fn: Any,
    ckpt_path: Any,
    model_provided: bool,
    model_connected: bool,
) -> Any:
    connector = trainer._checkpoint_connector

    def parse(path: Any) -> Any:
        return type(connector)._parse_ckpt_path(
            connector, state_fn, path, model_provided, model_connected
        )

    return look_up(parse, ckpt_path)


def _resume_start(
    trainer: Any,
    agree: Callable[[Any], Any],
    checkpoint_path: Any = None,
    weights_only: bool | None = None,
) -> None:
    connector = trainer._checkpoint_connector
    type(connector).resume_start(connector, agree(checkpoint_path), weights_only)


def requeue_checkpoint(trainer: Any) -> str | None:
    """Return the newest checkpoint in the Trainer's root folder from before a requeue, or None."""
    return trainer._checkpoint_connector._hpc_resume_path


def find_last_checkpoints(callback: Any, trainer: Any) -> set[str]:
    """Return the "last" checkpoints of a ``ModelCheckpoint``.

    Lightning omits the protocol of an object store; it is added here.
    """
    folder = str(getattr(callback, "dirpath", None) or "")  # Lightning's own tests have mocks
    if not is_remote(folder):
        return callback._find_last_checkpoints(trainer)
    try:
        found = callback._find_last_checkpoints(trainer)
    except Exception as error:  # store clients raise any class
        raise CheckpointError(
            f"looking for checkpoints in {folder} failed: {type(error).__name__}: {error}"
        ) from error
    return {str(RemotePath(folder) / os.path.basename(path)) for path in found}


def save_last_checkpoint(callback: Any, trainer: Any) -> None:
    """Save the "last" checkpoint of a ``ModelCheckpoint``."""
    callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))


def saves_on_exception(callback: Any, trainer: Any) -> bool:
    """True if a ``ModelCheckpoint`` would save now on an exception."""
    return callback._should_save_on_exception(trainer)


# -- Callbacks


def averaging_device(callback: Any) -> torch.device | None:
    """Return the device that a callback sets for its average; None if it sets none."""
    device = vars(callback).get("_device")
    return None if device is None else torch.device(device)


def replace_summary(callback: Any) -> None:
    """Let a ``ModelSummary`` print a :class:`DeviceSummary`, unless its class has its own summary."""
    if type(callback)._summary is named("pytorch.callbacks:ModelSummary")._summary:
        vars(callback)["_summary"] = partial(_summarize, callback._max_depth)


def restore_summary(callback: Any) -> None:
    """Undo :func:`replace_summary`."""
    vars(callback).pop("_summary", None)


def _summarize(depth: int, trainer: Any, pl_module: Any) -> ModelSummary:
    return DeviceSummary(pl_module, depth)


class DeviceSummary(ModelSummary):
    """Summary of a module with the average number of elements per rank of each layer.

    The column has Lightning's own title, because ``RichModelSummary`` shows no other.
    """

    @override
    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        columns = super()._get_summary_data()
        place = [name for name, _ in columns].index("Params") + 1
        counts = [_held(layer._module) for layer in self._layer_summary.values()]
        # Parameters outside of layers have a row of their own.
        if len(columns[place - 1][1]) > len(counts):
            counts.append(max(0.0, _held(self._model) - sum(counts)))
        shown = [get_human_readable_count(round(count)) for count in counts]
        columns.insert(place, ("Params per Device", shown))
        return columns


def _held(module: nn.Module) -> float:
    return sum(
        it.numel() / (it.spec.num_parts if isinstance(it, ShardTensor) else 1)
        for it in module.parameters()
    )


# -- Table of private names


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """Private name of Lightning with its expected kind and parameters."""

    owner: str  # a module, class or function below the namespace, as in "pytorch.loops:_FitLoop"
    name: str
    # Parameters in use, separated by blanks, without self; None: an attribute.
    parameters: str | None = None
    # True if our function replaces it, so that Lightning must not pass other parameters.
    replaced: bool = False

    def problem(self, namespace: str = NAMESPACE) -> str | None:
        """Describe the difference between the installed release and the expectation, or None."""
        try:
            owner = named(self.owner, namespace)
        except ConfigurationError:
            return f"{self.owner.replace(':', '.')}: expected to be there, found nothing"
        place = f"{owner.__name__.rpartition('.')[2]}.{self.name}"
        member = inspect.getattr_static(owner, self.name, None)
        if self.parameters is None:
            known = member is not None or (
                isinstance(owner, type) and self.name in _attributes(owner)
            )
            return None if known else f"{place}: expected an attribute, found none"
        if member is None:
            return f"{place}: expected a method, found none"
        function = getattr(owner, self.name)
        if not callable(function):
            return f"{place}: expected a method, found {type(function).__name__}"
        found = list(inspect.signature(function).parameters.values())
        if isinstance(owner, type) and isinstance(member, FunctionType):
            found = found[1:]  # self
        difference = changed_parameters(found, self.parameters, exactly=self.replaced)
        return difference and f"{place}: {difference}"


@cache
def _attributes(kind: type) -> frozenset[str]:
    """Return the attributes that a class and its bases declare, or assign in constructors."""
    return frozenset(name for base in kind.__mro__ for name in _assigned(base))


def _assigned(kind: type) -> Iterator[str]:
    yield from vars(kind).get("__annotations__", ())
    constructor = inspect.unwrap(vars(kind).get("__init__", _nothing))
    if isinstance(constructor, FunctionType):
        yield from (
            step.argval for step in dis.get_instructions(constructor) if step.opname == "STORE_ATTR"
        )


BEFORE_SETUP = "pre_setup"
"""Name of the strategy's barrier after which the Trainer calls setup hooks."""

_TRAINER = "pytorch.trainer.trainer:Trainer"
_SIGNALS = "pytorch.trainer.connectors.signal_connector:_SignalConnector"
_LOGGERS = "pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector"
_CHECKPOINTS = "pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector"
_FIT = "pytorch.loops.fit_loop:_FitLoop"
_EPOCH = "pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
_EVALUATION = "pytorch.loops.evaluation_loop:_EvaluationLoop"
_PREDICTION = "pytorch.loops.prediction_loop:_PredictionLoop"
_MODEL_CHECKPOINT = "pytorch.callbacks:ModelCheckpoint"
_SUMMARY = "pytorch.utilities.model_summary.model_summary"
_LAUNCHER = "pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher"
_STRATEGY = "pytorch.strategies:ParallelStrategy"
_DISTRIBUTED = "fabric.utilities.distributed"

_ATTRIBUTES = {
    "pytorch:LightningModule": "_trainer _compiler_ctx _device _device_mesh",
    _FIT: "_combined_loader _data_fetcher _restarting _resuming_from_checkpoint is_resuming",
    _EPOCH: "_restarting batch_progress val_loop",
    _EVALUATION: "_restarting _combined_loader _data_fetcher",
    _PREDICTION: "_combined_loader _data_fetcher",
    "pytorch.loops.fetchers:_PrefetchDataFetcher": "batches combined_loader",
    _TRAINER: "_signal_connector _checkpoint_connector _logger_connector _results",
    _SIGNALS: "received_sigterm",
    _LOGGERS: "_progress_bar_metrics",
    _CHECKPOINTS: "_hpc_resume_path",
    "pytorch.callbacks:WeightAveraging": "_device",
    "pytorch.callbacks:StochasticWeightAveraging": "_device",
    "pytorch.callbacks:ModelSummary": "_max_depth",
    f"{_SUMMARY}:ModelSummary": "_layer_summary _model",
    f"{_SUMMARY}:LayerSummary": "_module",
    _STRATEGY: "_layer_sync _launcher _lightning_module _precision_plugin",
}

# Functions called by this package, with the parameters in use.
_CALLED = (
    (_FIT, "_should_accumulate", ""),
    (_EVALUATION, "run", ""),  # replaced; its decorator takes and passes on all arguments
    ("pytorch.trainer.call", "_call_callback_hooks", "trainer hook_name args"),
    ("pytorch.trainer.call", "_call_lightning_module_hook", "trainer hook_name args"),
    (_SIGNALS, "_register_signal", "signum handlers"),
    (_MODEL_CHECKPOINT, "_find_last_checkpoints", "trainer"),
    (_MODEL_CHECKPOINT, "_monitor_candidates", "trainer"),
    (_MODEL_CHECKPOINT, "_save_last_checkpoint", "trainer monitor_candidates"),
    (_MODEL_CHECKPOINT, "_should_save_on_exception", "trainer"),
    ("pytorch.core.saving", "_load_state", "cls checkpoint strict cls_kwargs_new"),
    ("pytorch.core.saving", "pl_load", "path_or_url map_location weights_only"),
    ("pytorch.utilities.migration.utils", "_pl_migrate_checkpoint", "checkpoint checkpoint_path"),
    (
        _LAUNCHER,
        "_wrapping_function",
        "process_idx trainer function args kwargs return_queue global_states",
    ),
    (_DISTRIBUTED, "_all_gather_ddp_if_available", "tensor group sync_grads"),
    (_DISTRIBUTED, "_init_dist_connection", "cluster_environment torch_distributed_backend"),
)

# Functions replaced by ours, so that Lightning must not pass other parameters.
_REPLACED = (
    ("pytorch.loops.fetchers:_PrefetchDataFetcher", "__next__", ""),
    ("pytorch.loops.fetchers:_PrefetchDataFetcher", "reset", ""),
    (_EVALUATION, "_store_dataloader_outputs", ""),
    (_PREDICTION, "_on_predict_epoch_end", ""),
    (_SIGNALS, "_sigterm_notifier_fn", "signum _"),
    (_SIGNALS, "_slurm_sigusr_handler_fn", "signum _"),
    (_EPOCH, "_broadcast_sigterm_tensor", ""),
    (_EPOCH, "_on_before_fetch", ""),
    (_EPOCH, "_on_after_fetch", ""),
    (_CHECKPOINTS, "_parse_ckpt_path", "state_fn ckpt_path model_provided model_connected"),
    (_CHECKPOINTS, "resume_start", "checkpoint_path weights_only"),
    ("pytorch.callbacks:ModelSummary", "_summary", "trainer pl_module"),
    (f"{_SUMMARY}:ModelSummary", "_get_summary_data", ""),
    (_LAUNCHER, "_collect_rank_zero_results", "trainer results"),
    (_LAUNCHER, "_recover_results_in_main_process", "worker_output trainer"),
    (_STRATEGY, "_configure_launcher", ""),
)

RELIANCES = (
    *(PrivateName(owner=it, name=name) for it in _ATTRIBUTES for name in _ATTRIBUTES[it].split()),
    *(PrivateName(owner=it, name=name, parameters=names) for it, name, names in _CALLED),
    *(PrivateName(owner=it, name=n, parameters=p, replaced=True) for it, n, p in _REPLACED),
)
"""All private names in use, including replaced methods of private classes."""


@cache
def check_lightning() -> None:
    """Compare the table with the installed release; once per process.

    Raises:
        ConfigurationError: A name has changed or is missing; the error lists it and the supported
            releases.
    """
    problems = [problem for reliance in RELIANCES if (problem := reliance.problem())]
    if problems:
        raise changed_release(problems)
