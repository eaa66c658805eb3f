"""Optimizers as Lightning modules use them: unfrozen mid-training, refused at setup, with a stated scope."""

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import Tensor, nn

from shardeddp import ShardedDP
from shardeddp.errors import ConfigurationError
from shardeddp.optim import elementwise
from support.optimizers import stepped_on
from support.parity import Run, assert_same_training
from support.tasks import (
    VOCABULARY,
    Block,
    EvaluatedGpt,
    HasAnOptimizerOfItsOwn,
    Recorded,
    TinyGpt,
    token_loader,
    tokens_in_order,
)
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


class Finetuned(Recorded):
    """A frozen backbone under a head; a callback unfreezes it and adds it to the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Embedding(VOCABULARY, 8), Block(8), Block(8))
        self.head = nn.Linear(8, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.backbone(batch[:, :-1])).flatten(0, 1), batch[:, 1:].flatten()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01)


class FactoredFinetuned(Finetuned):
    """The same with an optimizer that steps on whole parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor([it for it in self.parameters() if it.requires_grad], lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Finetuned, FactoredFinetuned])
def test_a_backbone_is_unfrozen_and_added_to_the_optimizer_mid_training(
    world: Worlds, model: type[Recorded]
) -> None:
    run = Run(
        model=model,
        loader=tokens_in_order,
        batches=2,
        steps=6,
        options={
            "callbacks": [
                BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
            ]
        },
        warns="find_unused_parameters|The dirpath|Could not find",
    )
    # Not against DDP, which never averages the gradients of what was frozen when it was made.
    expected = world(1).run(run.alone, 2)[0]
    for strategy in ("full_shard", "shard_optimizer"):
        found = world(2).run(run.sharded, strategy)
        for ours in zip(*(each.losses for each in found), expected.losses, strict=True):
            torch.testing.assert_close(sum(ours[:2]) / 2, ours[2], rtol=1e-4, atol=0)
        for each in found:
            assert_same_weights(each.weights, expected.weights, rtol=1e-4)


class DividesItsStates(TinyGpt):
    """An optimizer that shards by itself."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on import
            from torch.distributed.optim import ZeroRedundancyOptimizer
        warnings.filterwarnings("ignore", "parameter .* is used outside")  # by its constructor
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)


class WantsSparseGradients(TinyGpt):
    """An optimizer for embeddings with ``sparse=True``."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.01)


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_work_is_refused_on_all_ranks_before_training() -> None:
    for model, reason in (
        (DividesItsStates, "which ShardedDP does already"),
        (WantsSparseGradients, "dense ones"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            make_trainer(ShardedDP(), max_steps=1).fit(model(), token_loader(16))


def test_a_stated_scope_reaches_the_optimizer(world: Worlds) -> None:
    run = Run(model=HasAnOptimizerOfItsOwn, loader=token_loader)
    arguments = {"optimizer_scope": {"NormalizedDescent": "parameter"}}
    assert_same_training(
        world(2).run(run.sharded_by, arguments), world(2).run(run.under_ddp), rtol=1e-4
    )
    with pytest.raises(ConfigurationError, match="expected one of element, parameter, model"):
        ShardedDP(optimizer_scope={"Lion": "elementwise"})  # type: ignore[dict-item]


class HandsOutOneOptimizer(EvaluatedGpt):
    """The same optimizer for every fit, with counts of the tensors that its steps are made on."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Any = None
        self.counts: list[int] = []

    def configure_optimizers(self) -> Any:
        if self.made is None:
            self.made = torch.optim.AdamW(self.parameters(), lr=0.01)
            self.stepped = stepped_on(self.made)
        return self.made

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.stepped:
            self.counts.append(len(self.stepped))
        self.stepped.clear()


def fit_twice_and_resume(folder: Path, joins: bool) -> tuple[dict[str, Tensor], list[int]]:
    def trainer_for(epochs: int) -> Trainer:
        return make_trainer(
            ShardedDP(auto_wrap_policy={Block}, state_dict_type="sharded"),
            max_epochs=epochs,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)],
            enable_checkpointing=True,
        )

    apart = {} if joins else {"side_effect": _singles}
    with mock.patch.object(elementwise, "chains", wraps=elementwise.chains, **apart):
        torch.manual_seed(1)
        model, resumed = HandsOutOneOptimizer(), HandsOutOneOptimizer()
        for epochs in (1, 2):
            trainer = trainer_for(epochs)
            trainer.fit(model, token_loader(32))
        trainer.save_checkpoint(folder / "between")
        trainer_for(3).fit(resumed, token_loader(32), ckpt_path=folder / "between")
    return full_weights(resumed), [*model.counts, *resumed.counts]


def _singles(parameters: Any, parts: Any) -> list[list[int]]:
    return [[index] for index, part in enumerate(parts) if part is not None]


@pytest.mark.long
@pytest.mark.slow
def test_segments_of_neighbours_go_on_over_checkpoints_fits_and_resumes(
    world: Worlds, tmp_path: Path
) -> None:
    both = [
        world(2).run(fit_twice_and_resume, tmp_path / str(joins), joins) for joins in (True, False)
    ]
    for (found, counts), (expected, all_counts) in zip(*both, strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert len(set(all_counts)) == 1
        assert len(counts) == len(all_counts) > 0
        assert max(counts) < all_counts[0], str(counts)
