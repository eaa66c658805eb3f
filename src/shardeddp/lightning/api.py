"""Lightning in this process: which of its two packages, its public names, and names of ShardedDP in it.

``lightning.pytorch`` and ``pytorch_lightning`` hold the same code twice. A Trainer of one refuses
strategies and modules of the other, so the classes of this package are made for one of them. The
choice falls once, before Lightning is imported. Private names of Lightning are in ``private.py``.
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
"""Environment variable that decides where imports do not."""

UNIFIED = "lightning.pytorch"
STANDALONE = "pytorch_lightning"

_BY_VALUE = {"lightning": UNIFIED, UNIFIED: UNIFIED, STANDALONE: STANDALONE}


def choose_namespace(environment: Mapping[str, str], imported: Mapping[str, Any]) -> str:
    """The namespace to use: the one that is asked for, else the one that the program has imported.

    A program that has imported both, or none yet, gets ``lightning.pytorch`` where it is installed.

    Args:
        environment: Variables of the process.
        imported: Modules by name, as ``sys.modules`` has them.

    Raises:
        ConfigurationError: The variable asks for something else.
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
    except (ImportError, ValueError):  # somebody forbids it
        return False


NAMESPACE = choose_namespace(os.environ, sys.modules)
"""Of this process; it never changes."""

OTHER = STANDALONE if NAMESPACE == UNIFIED else UNIFIED
"""Namespace whose Trainer refuses strategies of this one."""


@contextmanager
def handed_down() -> Generator[None]:
    """Surround the start of processes that use the same namespace, whatever they import first."""
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
    """A module, or a class or function of a module.

    Raises:
        ConfigurationError: The installed release does not have it.
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
    """Error about a release of Lightning that is not as this one of shardeddp expects."""
    lightning = import_module(NAMESPACE).__version__
    return ConfigurationError(
        f"Lightning {lightning} has changed {'; '.join(problems)}. {own_release()} needs lightning "
        f"{NEEDS}"
    )


def own_release() -> str:
    """Name and version of this package."""
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
    "fabric.utilities.types": "Optimizable Steppable",
    "pytorch": "LightningDataModule LightningModule Trainer",
    "pytorch.accelerators": "Accelerator",
    "pytorch.callbacks": (
        "BackboneFinetuning Callback Checkpoint EarlyStopping GradientAccumulationScheduler "
        "ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint "
        "StochasticWeightAveraging Timer WeightAveraging"
    ),
    "pytorch.core.optimizer": "LightningOptimizer",
    "pytorch.plugins.precision": "DoublePrecision HalfPrecision MixedPrecision Precision",
    "pytorch.strategies": "ParallelStrategy Strategy StrategyRegistry",
    "pytorch.trainer.states": "TrainerFn TrainerStatus",
    "pytorch.utilities": "CombinedLoader GradClipAlgorithmType",
    "pytorch.utilities.exceptions": "SIGTERMException",
    "pytorch.utilities.model_helpers": "is_overridden",
    "pytorch.utilities.model_summary.model_summary": "get_human_readable_count",
    "pytorch.utilities.rank_zero": "rank_zero_info rank_zero_warn",
}
"""Public names of Lightning in use, by module below the package."""

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.utilities.data import AttributeDict, has_iterable_dataset, sized_len
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.fabric.utilities.types import Optimizable, Steppable
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
"""``(path, map_location=, weights_only=)`` to the checkpoint."""


def extend_reading(extended: Callable[[Reader], Reader]) -> None:
    """Let ``load_from_checkpoint`` read more than files.

    This holds for all modules and data modules of this process.

    Lightning has no hook there: it opens the path as a file and hands that to ``torch.load``. It
    reads through one name, which is replaced in each of its packages that this process has
    imported.

    Args:
        extended: Makes the new reader of Lightning's own, for it to go on with.
    """
    for namespace in (UNIFIED, STANDALONE):
        saving = sys.modules.get(f"{namespace}.core.saving")
        if saving is not None and "pl_load" in vars(saving):
            vars(saving)["pl_load"] = extended(vars(saving)["pl_load"])


# -- Callbacks of the strategy's own


class SilentCallback(Callback):
    """A callback of the strategy's own, that has no hooks within a batch but those it defines.

    Lightning times each call of a hook of a callback, which takes longer than most of them do, and
    passes by what is not callable.
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
        """In the copy of a Trainer it does nothing: it belongs to a run."""
        return Callback, ()


# -- Parts that a Trainer makes


def callbacks_of(trainer: Any) -> list[Any]:
    """The list of a Trainer's callbacks, which may be changed."""
    return vars(trainer)["callbacks"]


def cluster_environment_of(trainer: Any) -> Any:
    """The cluster environment of a Trainer's ranks; None under a strategy of one process."""
    return getattr(trainer.strategy, "cluster_environment", None)


def log_interval(trainer: Any) -> int:
    """Steps of a Trainer from one log to the next; 0: it logs none."""
    return trainer.log_every_n_steps


def reloads_dataloaders(trainer: Any) -> bool:
    """Whether a Trainer makes its training data loaders anew now and then."""
    return bool(vars(trainer).get("reload_dataloaders_every_n_epochs"))


# -- Names of ShardedDP in the registries of Lightning

# The last two are what the command line makes of a bare class path.
_NAMES = ("sharded_dp", "shardeddp", "shardeddp.shardeddp")
_START_METHODS = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}


def register_names(strategy: type[Strategy]) -> None:
    """Make ``Trainer(strategy="sharded_dp")`` and its variants known."""
    register = StrategyRegistry.register
    for name in _NAMES:
        register(name, strategy, "ShardedDP, full_shard", override=True)
    for name in SHARDING_STRATEGIES:
        register(
            f"sharded_dp_{name}",
            strategy,
            f"ShardedDP, {name}",
            override=True,
            sharding_strategy=name,
        )
    for name, method in _START_METHODS.items():
        register(
            f"sharded_dp_{name}",
            strategy,
            f"ShardedDP by {method}",
            override=True,
            start_method=method,
        )
    _refuse_elsewhere(
        [name for name, entry in StrategyRegistry.items() if entry["strategy"] is strategy]
    )


def introduction(sharding_strategy: str) -> str:
    """Attributes of a ShardedDP that a Trainer of the other namespace shows when it refuses it."""
    both = f"; for {OTHER} set {VARIABLE}={OTHER}" if OTHER in sys.modules else ""
    return f"<ShardedDP({sharding_strategy!r}) for {NAMESPACE}.Trainer{both}>"


def _refuse_elsewhere(names: list[str]) -> None:
    """Make a Trainer of the other namespace, if imported, say why it has no such strategy."""
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
