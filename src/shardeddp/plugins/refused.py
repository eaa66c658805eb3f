"""Stock callbacks that cannot do their work on sharded parameters, refused before any training."""

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
