"""The only imports of Lightning: names that this package uses, from the process's namespace."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardeddp.lightning.namespace import (
    NAMESPACE,
    OTHER,
    STANDALONE,
    UNIFIED,
    VARIABLE,
    handed_down,
)
from shardeddp.lightning.private import (
    FitLoop,
    PrefetchDataFetcher,
    ProcessedTracker,
    SubprocessScriptLauncher,
    all_gather_ddp_if_available,
    check_lightning,
    init_dist_connection,
    load_state,
    migrate_checkpoint,
)

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


# -- Parts that a Trainer makes


def callbacks_of(trainer: Any) -> list[Any]:
    """The list of a Trainer's callbacks, which may be changed.

    Args:
        trainer: Of either namespace.
    """
    return vars(trainer)["callbacks"]


def cluster_environment_of(trainer: Any) -> Any:
    """The cluster environment of a Trainer's ranks; None under a strategy of one process.

    Args:
        trainer: Of either namespace.
    """
    return getattr(trainer.strategy, "cluster_environment", None)


def reloads_dataloaders(trainer: Any) -> bool:
    """Whether a Trainer makes its training data loaders anew now and then.

    Args:
        trainer: Of either namespace.
    """
    return bool(vars(trainer).get("reload_dataloaders_every_n_epochs"))


# -- Names of Lightning in the namespace of the process
#
# The two halves say the same, and a test compares them. Private names of Lightning are in
# ``private.py``.

if TYPE_CHECKING or NAMESPACE == UNIFIED:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
    from lightning.fabric.utilities.data import AttributeDict, has_iterable_dataset, sized_len
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.fabric.utilities.types import Optimizable, Steppable
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch import __version__ as LIGHTNING_VERSION
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import (
        Callback,
        Checkpoint,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        ModelPruning,
        ModelSummary,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
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
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
else:
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
    from lightning_fabric.utilities.data import AttributeDict, has_iterable_dataset, sized_len
    from lightning_fabric.utilities.rank_zero import rank_zero_only
    from lightning_fabric.utilities.seed import reset_seed
    from lightning_fabric.utilities.types import Optimizable, Steppable
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning import __version__ as LIGHTNING_VERSION
    from pytorch_lightning.accelerators import Accelerator
    from pytorch_lightning.callbacks import (
        Callback,
        Checkpoint,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        ModelPruning,
        ModelSummary,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
    )
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.plugins.precision import (
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from pytorch_lightning.strategies import ParallelStrategy, Strategy, StrategyRegistry
    from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
    from pytorch_lightning.utilities import GradClipAlgorithmType
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.model_summary.model_summary import get_human_readable_count
    from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

__all__ = [
    "LIGHTNING_VERSION",
    "NAMESPACE",
    "OTHER",
    "VARIABLE",
    "Accelerator",
    "AttributeDict",
    "Callback",
    "Checkpoint",
    "CheckpointIO",
    "ClusterEnvironment",
    "DoublePrecision",
    "FitLoop",
    "GradClipAlgorithmType",
    "GradientAccumulationScheduler",
    "HalfPrecision",
    "LightningEnvironment",
    "LightningModule",
    "LightningOptimizer",
    "MixedPrecision",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "Optimizable",
    "ParallelStrategy",
    "Precision",
    "PrefetchDataFetcher",
    "ProcessedTracker",
    "SIGTERMException",
    "SLURMEnvironment",
    "Steppable",
    "StochasticWeightAveraging",
    "Strategy",
    "StrategyRegistry",
    "SubprocessScriptLauncher",
    "TorchCheckpointIO",
    "Trainer",
    "TrainerFn",
    "TrainerStatus",
    "all_gather_ddp_if_available",
    "callbacks_of",
    "check_lightning",
    "cluster_environment_of",
    "extend_reading",
    "get_human_readable_count",
    "handed_down",
    "has_iterable_dataset",
    "init_dist_connection",
    "load_state",
    "migrate_checkpoint",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "reloads_dataloaders",
    "reset_seed",
    "sized_len",
]
