"""shardeddp: sharded training for PyTorch Lightning, of unmodified LightningModules."""

from shardeddp.config import ActivationCheckpointing, CheckpointOptions, CPUOffload, MixedPrecision
from shardeddp.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedCheckpointError,
    LayoutMismatchError,
    RankError,
)
from shardeddp.lightning.load import load_from_checkpoint, read_directories_too
from shardeddp.lightning.reshard_callbacks import ReshardOnOutOfMemory, ReshardSchedule
from shardeddp.lightning.step_monitor import StepMonitor
from shardeddp.lightning.strategy import ShardedDP
from shardeddp.optim.clip import clip_grad_norm_, clip_grad_value_
from shardeddp.tensor.expert_dispatch import TokenDispatch
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.wrap import AutoPolicy, ClassPolicy, NamePolicy, Policy, PredicatePolicy, SizePolicy

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "AutoPolicy",
    "CPUOffload",
    "CheckpointError",
    "CheckpointOptions",
    "ClassPolicy",
    "ConfigurationError",
    "DamagedCheckpointError",
    "LayoutMismatchError",
    "MixedPrecision",
    "NamePolicy",
    "Policy",
    "PredicatePolicy",
    "RankError",
    "ReshardOnOutOfMemory",
    "ReshardSchedule",
    "ShardTensor",
    "ShardedDP",
    "SizePolicy",
    "StepMonitor",
    "TokenDispatch",
    "clip_grad_norm_",
    "clip_grad_value_",
    "load_from_checkpoint",
]

read_directories_too()
