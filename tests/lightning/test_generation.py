"""Models that generate as those of transformers do: ranks that end at different lengths stay in step."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardeddp import ShardedDP
from shardeddp.lightning.model_sharding import MARK, synchronize_generation
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES
from support.tasks import VOCABULARY, Block, TinyGpt, token_loader
from support.trainers import make_trainer
from world import on_ranks

pytestmark = pytest.mark.timeout(60)


class GenerationMixin:
    """As in transformers, which asks a model whether it is sharded and then lets no rank end before the others."""

    def generate(self, tokens: Tensor, length: int) -> Tensor:
        synced = bool(getattr(self, MARK, False))
        while synced or length > 0:
            going_on = torch.tensor(float(length > 0))
            if synced:
                dist.all_reduce(going_on)
            if going_on == 0:
                break
            following = self(tokens)[:, -1].argmax(-1, keepdim=True)
            if length > 0:
                tokens = torch.cat([tokens, following], 1)
            length -= 1
        return tokens


class Generator(nn.Module, GenerationMixin):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Generates(TinyGpt):
    """Every rank has a length of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Generator()
        self.tokens: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens) + super().forward(tokens)

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.tokens += self.model.generate(batch[:, :3], 1 + 3 * dist.get_rank()).tolist()


@on_ranks(2)
def test_ranks_that_end_at_different_lengths_generate_what_one_process_does() -> None:
    module = Generates()
    trainer = make_trainer(ShardedDP(auto_wrap_policy={Block}), max_epochs=1)
    trainer.fit(module, token_loader(16), token_loader(16))
    alone = Generator()
    # What was generated was computed after the last step, so with these weights.
    alone.load_state_dict(
        {name: weight.full_tensor() for name, weight in module.model.state_dict().items()}
    )
    prompts = torch.tensor(module.tokens)[:, :3]
    assert module.tokens == alone.generate(prompts, 1 + 3 * dist.get_rank()).tolist()
    assert prompts.shape[0] == 8


def test_only_models_that_gather_for_each_forward_are_marked() -> None:
    for strategy, marked in {
        "full_shard": True,
        "shard_grad_op": True,
        "shard_optimizer": False,
    }.items():
        module = nn.Sequential(Generator(), nn.Linear(2, 2))
        synchronize_generation(module, SHARDING_STRATEGIES[strategy])
        assert [hasattr(child, MARK) for child in module] == [marked, False]


def test_dynamo_does_not_take_a_marked_model_for_one_of_fsdp() -> None:
    model = Generator()
    synchronize_generation(model, SHARDING_STRATEGIES["full_shard"])
    tokens = torch.zeros(1, 3, dtype=torch.long)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model(tokens))
