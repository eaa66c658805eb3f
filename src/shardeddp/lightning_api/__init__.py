"""Everything of Lightning that this package uses, from the namespace that the process uses: the only imports of it.

The two halves say the same, and a test compares them. Private names of Lightning are in ``private.py``.
"""

from typing import TYPE_CHECKING

from shardeddp.lightning_api.choice import NAMESPACE, OTHER, UNIFIED, VARIABLE, handed_down
from shardeddp.lightning_api.private import (
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
from shardeddp.lightning_api.reading import extend_reading
from shardeddp.lightning_api.trainer import callbacks_of, cluster_environment_of, reloads_dataloaders

if TYPE_CHECKING or NAMESPACE == UNIFIED:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.plugins.environments import SLURMEnvironment
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
    from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import ParallelStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
else:
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning_fabric.plugins.environments import SLURMEnvironment
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
    from pytorch_lightning.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
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
