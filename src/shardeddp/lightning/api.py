"""Lightning in this process: which of its two packages, its public names, and names of ShardedDP in it.

``lightning.pytorch`` and ``pytorch_lightning`` have the same code. A Trainer of one refuses
strategies and modules of the other, so the classes of this package subclass those of one namespace.
It is chosen once, before Lightning is imported. Private names of Lightning are in ``private.py``.
"""

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from shardeddp.errors import ConfigurationError
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES

# Other files import the names of Lightning from here.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

# -- Choice of the package

VARIABLE = "SHARDEDDP_LIGHTNING"
"""Environment variable that sets the namespace; it overrides the program's imports."""

UNIFIED = "lightning.pytorch"
STANDALONE = "pytorch_lightning"

_BY_VALUE = {"lightning": UNIFIED, UNIFIED: UNIFIED, STANDALONE: STANDALONE}


def choose_namespace(environment: Mapping[str, str], imported: Mapping[str, Any]) -> str:
    """Choose the namespace: that of the environment variable, else the one that is imported.

    If both or none are imported, it is ``lightning.pytorch``, if installed.

    Raises:
        ConfigurationError: The variable has an unknown value.
        ImportError: Neither package is installed.
    """
    asked = environment.get(VARIABLE)
    if asked:
        if asked not in _BY_VALUE:
            raise ConfigurationError(
                f"{VARIABLE}={asked!r}: expected {UNIFIED} or {STANDALONE}, or no such variable"
            )
        return _BY_VALUE[asked]
    present = [
        namespace for namespace in (UNIFIED, STANDALONE) if imported.get(namespace) is not None
    ]
    if len(present) == 1:
        return present[0]
    for namespace in (UNIFIED, STANDALONE):
        if _is_installed(namespace.partition(".")[0]):
            return namespace
    raise ImportError(
        "shardeddp needs PyTorch Lightning: pip install lightning (or pytorch-lightning)"
    )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook forbids it, or the module has no __spec__
        return False


NAMESPACE = choose_namespace(os.environ, sys.modules)
"""Namespace of Lightning in this process; it never changes."""

OTHER = STANDALONE if NAMESPACE == UNIFIED else UNIFIED
"""Other namespace; its Trainer refuses strategies of this one."""


@contextmanager
def handed_down() -> Generator[None]:
    """Set the environment variable, so that processes started inside use the same namespace."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = NAMESPACE
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


# -- Names of Lightning in the chosen package

NEEDS = ">=2.6,<2.7,!=2.6.2,!=2.6.3"
"""Releases of Lightning that the tests pass with; ``pyproject.toml`` requires the same."""

_ROOTS = {
    UNIFIED: {"pytorch": "lightning.pytorch", "fabric": "lightning.fabric"},
    STANDALONE: {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"},
}


def named(path: str, namespace: str = NAMESPACE) -> Any:
    """Import a module, or a class or function of a module, by its path.

    Raises:
        ConfigurationError: The installed release does not have the name.
    """
    module, _, name = path.partition(":")
    half, _, rest = module.partition(".")
    try:
        found = import_module(".".join(filter(None, (_ROOTS[namespace][half], rest))))
        return getattr(found, name) if name else found
    except (ImportError, AttributeError) as error:
        raise changed_release(
            [f"{path.replace(':', '.')}: expected to be there, found nothing"]
        ) from error


def changed_release(problems: Sequence[str]) -> ConfigurationError:
    """Make the error for a release of Lightning that this release of shardeddp does not support."""
    lightning = import_module(NAMESPACE).__version__
    return ConfigurationError(
        f"Lightning {lightning} has changed {'; '.join(problems)}. {own_release()} needs lightning "
        f"{NEEDS}"
    )


def own_release() -> str:
    """Return name and version of this package."""
    try:
        return "shardeddp " + version("shardeddp")
    except PackageNotFoundError:
        return "shardeddp (from its source)"


PUBLIC = {
    "fabric.plugins": "CheckpointIO ClusterEnvironment TorchCheckpointIO",
    "fabric.plugins.environments": "LightningEnvironment SLURMEnvironment",
    "fabric.strategies": "DDPStrategy",
    "fabric.utilities.data": "AttributeDict has_iterable_dataset sized_len",
    "fabric.utilities.rank_zero": "rank_zero_only",
    "fabric.utilities.seed": "reset_seed",
    "pytorch": "LightningDataModule LightningModule Trainer",
    "pytorch.accelerators": "Accelerator",
    "pytorch.callbacks": (
        "BackboneFinetuning Callback Checkpoint EarlyStopping GradientAccumulationScheduler "
        "ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint "
        "StochasticWeightAveraging Timer WeightAveraging"
    ),
    "pytorch.core.optimizer": "LightningOptimizer",
    "pytorch.loggers": "Logger",
    "pytorch.plugins.precision": "DoublePrecision HalfPrecision MixedPrecision Precision",
    "pytorch.strategies": "ParallelStrategy Strategy StrategyRegistry",
    "pytorch.trainer.states": "TrainerFn TrainerStatus",
    "pytorch.utilities": "CombinedLoader GradClipAlgorithmType",
    "pytorch.utilities.exceptions": "SIGTERMException",
    "pytorch.utilities.model_helpers": "is_overridden",
    "pytorch.utilities.model_summary.model_summary": "get_human_readable_count",
    "pytorch.utilities.rank_zero": "rank_zero_info rank_zero_warn",
}
"""Public names of Lightning in use, by module inside the package."""

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.utilities.data import AttributeDict, has_iterable_dataset, sized_len
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch import __version__ as LIGHTNING_VERSION
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import (
        BackboneFinetuning,
        Callback,
        Checkpoint,
        EarlyStopping,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        ModelPruning,
        ModelSummary,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
        Timer,
        WeightAveraging,
    )
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins.precision import (
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from lightning.pytorch.strategies import ParallelStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import CombinedLoader, GradClipAlgorithmType
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
else:
    for _module, _names in PUBLIC.items():
        globals().update((_name, named(f"{_module}:{_name}")) for _name in _names.split())
    LIGHTNING_VERSION = named("pytorch:__version__")


# -- Reading of ``load_from_checkpoint``

Reader = Callable[..., Any]
"""Function of ``(path, map_location=, weights_only=)`` that returns the checkpoint."""


def extend_reading(extended: Callable[[Reader], Reader]) -> None:
    """Extend ``load_from_checkpoint`` of all modules and data modules in this process.

    Lightning has no hook: it opens the path as a file for ``torch.load``. Its reader has one name,
    which is replaced in each of its packages that this process has imported.
    """
    for namespace in (UNIFIED, STANDALONE):
        saving = sys.modules.get(f"{namespace}.core.saving")
        if saving is not None and "pl_load" in vars(saving):
            vars(saving)["pl_load"] = extended(vars(saving)["pl_load"])


# -- Callbacks of the strategy


class SilentCallback(Callback):
    """Base class of the strategy's callbacks, without hooks inside a batch except those it defines.

    Lightning profiles each call of a callback's hook, which costs more than most hooks do. It skips
    attributes that are not callable.
    """

    on_train_batch_start: Any = None
    on_train_batch_end: Any = None
    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None
    on_validation_batch_start: Any = None
    on_validation_batch_end: Any = None
    on_test_batch_start: Any = None
    on_test_batch_end: Any = None
    on_predict_batch_start: Any = None
    on_predict_batch_end: Any = None

    def __reduce__(self) -> Any:
        """Copy as an empty callback, for example with a Trainer: it belongs to one run."""
        return Callback, ()


# -- Parts of a Trainer


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the mutable list of a Trainer's callbacks."""
    return vars(trainer)["callbacks"]


def cluster_environment_of(trainer: Any) -> Any:
    """Return the cluster environment of a Trainer; None under a single-process strategy."""
    return getattr(trainer.strategy, "cluster_environment", None)


def log_interval(trainer: Any) -> int:
    """Return the number of steps between logs of a Trainer; 0: no logging."""
    return trainer.log_every_n_steps


def reloads_dataloaders(trainer: Any) -> bool:
    """True if a Trainer reloads its training data loaders every few epochs."""
    return bool(vars(trainer).get("reload_dataloaders_every_n_epochs"))


# -- Names of ShardedDP in the registries of Lightning

# The last two are the names that LightningCLI derives from a class path.
_NAMES = ("sharded_dp", "shardeddp", "shardeddp.shardeddp")
_START_METHODS = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}


def register_names(strategy: type[Strategy]) -> None:
    """Register ``Trainer(strategy="sharded_dp")`` and its variants."""
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        **{name: ("full_shard", {}) for name in _NAMES},
        **{f"sharded_dp_{it}": (it, {"sharding_strategy": it}) for it in SHARDING_STRATEGIES},
        **{f"sharded_dp_{it}": (how, {"start_method": how}) for it, how in _START_METHODS.items()},
    }
    for name, (said, options) in variants.items():
        StrategyRegistry.register(name, strategy, f"ShardedDP, {said}", override=True, **options)
    _refuse_elsewhere([*variants])


def introduction(sharding_strategy: str) -> str:
    """Return the ``repr`` of a ShardedDP, shown when the other namespace's Trainer refuses it."""
    both = f"; for {OTHER} set {VARIABLE}={OTHER}" if OTHER in sys.modules else ""
    return f"<ShardedDP({sharding_strategy!r}) for {NAMESPACE}.Trainer{both}>"


def _refuse_elsewhere(names: list[str]) -> None:
    """Register names in the other namespace, if imported, that raise an error with advice."""
    strategies = sys.modules.get(f"{OTHER}.strategies")
    if strategies is not None:
        registry: Any = strategies.StrategyRegistry
        for name in names:
            registry.register(
                name, _refuse, f"ShardedDP, which is for {NAMESPACE} here", override=True
            )


def _refuse() -> NoReturn:
    raise ConfigurationError(
        f"this process has imported both lightning.pytorch and pytorch_lightning, and ShardedDP is "
        f"made for {NAMESPACE}.Trainer. Use that one, or set the environment variable "
        f"{VARIABLE}={OTHER} before Python starts"
    )
