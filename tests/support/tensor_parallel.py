"""Models of transformers, tiny and with random weights, split over tensor-parallel ranks and beside one process."""

import sys
import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

from shardeddp import ShardedDP, ShardTensor
from support.trainers import full_weights, make_trainer
from world import Pool

VOCABULARY, BATCH, LENGTH = 96, 4, 12

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
COMPRESSED = {  # multi-head latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def make_model(kind: str, **options: Any) -> nn.Module:
    """A causal language model of a family, of two small layers."""
    default = AutoConfig.for_model(kind)
    sizes = {**SIZES, **EXPERTS, **COMPRESSED}
    if hasattr(default, "qk_rope_head_dim"):
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    known = {name: value for name, value in sizes.items() if hasattr(default, name)}
    config = type(default)(**{**known, **options})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def tokens(count: int) -> torch.Tensor:
    """(count, LENGTH)."""
    drawn = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (count, LENGTH), generator=drawn)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two decay groups by ``ndim``."""
    every = [it for it in module.parameters() if it.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [it for it in every if it.ndim > 1], "weight_decay": 0.1},
            {"params": [it for it in every if it.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        eps=1e-4,  # so that rounding of tiny gradients does not decide on steps
    )


class Family(LightningModule):
    """Trains a model on random tokens; knows nothing about how it is split."""

    def __init__(self, kind: str, options: dict[str, Any], steps: int) -> None:
        super().__init__()
        self.kind, self.options, self.steps = kind, options, steps
        self.model: Any = None
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] | None = None
        """Gets the gradients of the last step."""

    def configure_model(self) -> None:
        """Build the model, once."""
        if self.model is None:
            self.model = make_model(self.kind, **self.options)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """What the model says of its own prediction of the batch."""
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss, averaged over ranks where it is logged."""
        loss = self.loss(batch[0])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        """Keep the average."""
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_before_optimizer_step(self, *args: Any) -> None:
        """Keep whole gradients, before they are clipped; 0 for a parameter that has none."""
        if self.gradients is None:
            return
        for name, parameter in self.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, ShardTensor):
                gradient = gradient.full_tensor()
            none = torch.zeros(parameter.shape)
            self.gradients[name] = none if gradient is None else gradient.clone()

    def train_dataloader(self) -> Any:
        """Each batch of one process, divided among ranks with different data."""
        ranks = self.trainer.strategy.distributed_sampler_kwargs
        dataset = TensorDataset(tokens(self.steps * BATCH))
        own = DistributedSampler(dataset, shuffle=False, **ranks)
        return DataLoader(dataset, batch_size=BATCH // ranks["num_replicas"], sampler=own)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return optimizer_of(self)


def train_alone(
    kind: str,
    options: dict[str, Any],
    steps: int,
    family: type[Family] = Family,
    weights: dict[str, torch.Tensor] | None = None,
    gradients: dict[str, torch.Tensor] | None = None,
) -> list[float]:
    """The losses of one process on whole batches; ``weights`` get what it ends with, ``gradients`` the last."""
    module = family(kind, options, steps)
    module.gradients = gradients
    module.configure_model()
    module.train()
    optimizer, losses = optimizer_of(module), list[float]()
    for batch in tokens(steps * BATCH).split(BATCH):
        loss = module.loss(batch)
        losses.append(loss.item())
        loss.backward()
        module.on_before_optimizer_step()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if weights is not None:
        weights.update(module.state_dict())
    return losses


def train_split(
    kind: str,
    options: dict[str, Any],
    steps: int,
    size: int,
    plan: Any = "auto",
    weights: dict[str, torch.Tensor] | None = None,
    gradients: dict[str, torch.Tensor] | None = None,
) -> list[float]:
    """The same, of ranks that split layers."""
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "unit .* holds .* of .* parameters")
    strategy = ShardedDP("full_shard", tensor_parallel_size=size, tensor_parallel_plan=plan)
    trainer = make_trainer(
        strategy, max_steps=steps, gradient_clip_val=1.0, use_distributed_sampler=False
    )
    module = Family(kind, options, steps)
    module.gradients = gradients
    trainer.fit(module)
    assert dist.get_world_size() % size == 0
    if weights is not None:
        weights.update(full_weights(module))
    return module.losses


def difference(found: list[float], expected: list[float]) -> float:
    """The largest of losses."""
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def main() -> None:
    """Print, for families by name, how far two ranks are from one process after three steps."""
    pool = Pool()
    for kind in sys.argv[1:]:
        try:
            expected = train_alone(kind, {}, 3)
            found = pool(2).run(train_split, kind, {}, 3, 2)
            text = f"{max(difference(each, expected) for each in found):.1e}"
        except Exception as error:  # noqa: BLE001  # whatever keeps a family from training is told
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
        print(f"{kind:20} {text}", flush=True)
    pool.close()


if __name__ == "__main__":  # under its own name, by which ranks find its functions
    import_module("support.tensor_parallel").main()
