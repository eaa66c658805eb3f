"""Everything of Lightning that this package uses, from the namespace that the process uses: the only imports of it.

The two halves say the same, and a test compares them. Lightning's private names lose their underscore here; what is
private to it can change with any of its releases, and this list is where to look then.
"""

from typing import TYPE_CHECKING

from shardeddp.lightning_api.choice import NAMESPACE, OTHER, UNIFIED, VARIABLE, handed_down
from shardeddp.lightning_api.reading import extend_reading
from shardeddp.lightning_api.trainer import callbacks_of, reloads_dataloaders

if TYPE_CHECKING or NAMESPACE == UNIFIED:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from lightning.fabric.utilities.data import AttributeDict, has_iterable_dataset, sized_len
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin as DeviceDtypeModuleMixin
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available as all_gather_ddp_if_available
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device as default_backend_for_device,
    )
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
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
    from lightning.pytorch.core.saving import _load_state as load_state
    from lightning.pytorch.loops import _FitLoop as FitLoop
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
    from lightning.pytorch.loops.progress import _ProcessedTracker as ProcessedTracker
    from lightning.pytorch.plugins import LayerSync
    from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import ParallelStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from lightning.pytorch.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint as migrate_checkpoint
    from lightning.pytorch.utilities.model_summary import ModelSummary as LightningModuleSummary
    from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
else:
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning_fabric.plugins.environments import SLURMEnvironment
    from lightning_fabric.utilities.data import AttributeDict, has_iterable_dataset, sized_len
    from lightning_fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin as DeviceDtypeModuleMixin
    from lightning_fabric.utilities.distributed import _all_gather_ddp_if_available as all_gather_ddp_if_available
    from lightning_fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device as default_backend_for_device,
    )
    from lightning_fabric.utilities.distributed import _init_dist_connection as init_dist_connection
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
    from pytorch_lightning.core.saving import _load_state as load_state
    from pytorch_lightning.loops import _FitLoop as FitLoop
    from pytorch_lightning.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
    from pytorch_lightning.loops.progress import _ProcessedTracker as ProcessedTracker
    from pytorch_lightning.plugins import LayerSync
    from pytorch_lightning.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from pytorch_lightning.strategies import ParallelStrategy, Strategy, StrategyRegistry
    from pytorch_lightning.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from pytorch_lightning.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
    from pytorch_lightning.utilities import GradClipAlgorithmType
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.migration.utils import _pl_migrate_checkpoint as migrate_checkpoint
    from pytorch_lightning.utilities.model_summary import ModelSummary as LightningModuleSummary
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
    "DeviceDtypeModuleMixin",
    "DoublePrecision",
    "FitLoop",
    "GradClipAlgorithmType",
    "GradientAccumulationScheduler",
    "HalfPrecision",
    "LayerSync",
    "LightningModule",
    "LightningModuleSummary",
    "LightningOptimizer",
    "MixedPrecision",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "MultiProcessingLauncher",
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
    "default_backend_for_device",
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
