"""Callbacks and layers that cannot do their work in a training, refused before it begins."""

from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.lightning_api import ModelPruning, Trainer, callbacks_of


def refuse_callbacks(trainer: Trainer) -> None:
    """Look through the callbacks of a training that is about to begin.

    Raises:
        ConfigurationError: One of them would fail in the middle of training, or do something else than it says.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} cannot be used with ShardedDP: ModelPruning replaces parameters while they "
                f"are sharded, and finds the smallest of whole tensors. Prune with torch.nn.utils.prune before "
                f"trainer.fit(), whose masks then hold in training, or train with strategy='ddp'"
            )


def refuse_sync_batch_norm(module: nn.Module) -> None:
    """Look for torch's synchronized BatchNorm in a module that is about to be trained on the CPU.

    Raises:
        ConfigurationError: It is there, and its forward would fail: torch computes it on accelerators only.
    """
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if names:
        raise ConfigurationError(
            f"expected no SyncBatchNorm (sync_batchnorm=True) in a training on the CPU, where torch does not compute "
            f"it, found {len(names)} layers: {', '.join(map(repr, names[:3]))}{', ...' if names[3:] else ''}. Build "
            f"the module anew and leave sync_batchnorm out, so that each rank normalizes by its own batch, or train on "
            f"GPUs"
        )
