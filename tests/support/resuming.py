"""A training that can be cut in two anywhere: the same global batches in every world, from a checkpoint or not."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from shardeddp import ShardedDP
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import full_weights, make_trainer

Make = Callable[[], Any]
SAMPLES = 48
GLOBAL_BATCH = 12  # divides among 1, 2 and 3 ranks


def full_shard() -> ShardedDP:
    """Every block a unit."""
    return ShardedDP(auto_wrap_policy={Block}, state_dict_type="sharded")


def in_one_file() -> ShardedDP:
    """Every block a unit; checkpoints are ordinary Lightning files."""
    return ShardedDP(auto_wrap_policy={Block}, state_dict_type="full")


def one_unit() -> ShardedDP:
    """The whole model in one."""
    return ShardedDP(auto_wrap_policy=None, state_dict_type="sharded")


def shard_grad_op() -> ShardedDP:
    """Every block a unit."""
    return ShardedDP("shard_grad_op", auto_wrap_policy={Block}, state_dict_type="sharded")


def hybrid_shard() -> ShardedDP:
    """Shard groups of one rank."""
    return ShardedDP("hybrid_shard", 1, {Block}, state_dict_type="sharded")


def no_shard() -> ShardedDP:
    """Every block a unit."""
    return ShardedDP("no_shard", auto_wrap_policy={Block}, state_dict_type="sharded")


def same_batches() -> DataLoader[Tensor]:
    """This rank's part of the same global batches in every world; Lightning would shuffle among several ranks only."""
    tokens = token_loader(SAMPLES).dataset
    return DataLoader(
        tokens,
        GLOBAL_BATCH // dist.get_world_size(),
        sampler=DistributedSampler(tokens, shuffle=False),
    )


def fit(
    strategy: Any,
    epochs: int,
    path: str | None = None,
    save_to: str | None = None,
    model_type: type[TinyGpt] = TinyGpt,
    **options: Any,
) -> TinyGpt:
    """Train a model over all samples."""
    seed_everything(1, verbose=False)
    model = model_type()
    trainer = make_trainer(strategy, max_epochs=epochs, gradient_clip_val=0.5, **options)
    trainer.fit(model, same_batches(), ckpt_path=path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return model


def losses_and_weights(model: TinyGpt) -> dict[str, Any]:
    """What a rank answers."""
    return {"losses": model.losses, "weights": full_weights(model)}


def train(make: Make, epochs: int, *arguments: Any) -> dict[str, Any]:
    """Losses and weights of :func:`fit` under the strategy that ``make`` makes."""
    return losses_and_weights(fit(make(), epochs, *arguments))
