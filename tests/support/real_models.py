"""LightningModules around models that people train: of transformers from small configs, with peft, and of torch."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from support.tasks import Recorded

DEPRECATED = "`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated"
"""What releases of transformers say of names that older ones, and peft, know."""

VOCABULARY = 64
LENGTH = 12
PROMPT = 4
DIM = 32


class LanguageModel(Recorded):
    """A model of transformers as its users wrap it; validation generates and keeps the tokens.

    Args:
        model: Called with ``input_ids`` and ``labels``, it returns an output with a ``loss``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.generated: list[list[int]] = []

    def loss(self, batch: Tensor) -> Tensor:
        """What the model says of its own prediction of the batch."""
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        """Continue the beginning of every sequence, greedily."""
        self.log("val", self.loss(batch), sync_dist=True)
        self.generated += self.generate(batch[:, :PROMPT]).tolist()

    def generate(self, prompts: Tensor) -> Tensor:
        """Tokens (batch, length) of prompts (batch, PROMPT)."""
        return self.model.generate(
            prompts, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on whatever can be trained."""
        return torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1
        )


def llama(**options: Any) -> LlamaForCausalLM:
    """Two layers of a Llama."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=2 * DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **options,
    )
    return LlamaForCausalLM(config)


class TiedLlama(LanguageModel):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__(llama(tie_word_embeddings=True))


class CheckpointedLlama(LanguageModel):
    """Recomputes its layers as transformers does it."""

    def __init__(self) -> None:
        super().__init__(llama(use_cache=False))
        self.model.gradient_checkpointing_enable()


class LoraLlama(LanguageModel):
    """Everything is frozen but the adapters."""

    def __init__(self) -> None:
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        super().__init__(get_peft_model(llama(tie_word_embeddings=True), adapters))


class T5(LanguageModel):
    """Encoder, decoder and head share one embedding; without dropout, to be comparable."""

    def __init__(self) -> None:
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=DIM,
            d_kv=8,
            d_ff=2 * DIM,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        super().__init__(T5ForConditionalGeneration(config))


class Mixtral(LanguageModel):
    """Every token goes to one of eight experts, which are slices of two weights; with the loss of the router."""

    def __init__(self) -> None:
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=DIM,
            intermediate_size=DIM,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=1,
            output_router_logits=True,
        )
        super().__init__(MixtralForCausalLM(config))


class Switch(LanguageModel):
    """Sixteen experts per layer, each a module with weights of its own, most of which a batch does not use."""

    def __init__(self) -> None:
        config = SwitchTransformersConfig(
            vocab_size=VOCABULARY,
            d_model=DIM,
            d_kv=8,
            d_ff=DIM,
            num_layers=2,
            num_sparse_encoder_layers=1,
            num_decoder_layers=2,
            num_sparse_decoder_layers=1,
            num_heads=4,
            num_experts=16,
            expert_capacity=8,
            router_jitter_noise=0.0,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        super().__init__(SwitchTransformersForConditionalGeneration(config))


class LstmLanguageModel(Recorded):
    """Two layers on the flat weights that cuDNN wants, between an embedding and a head that are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, VOCABULARY) of tokens (batch, length)."""
        return self.head(self.lstm(self.embed(tokens))[0])

    def loss(self, batch: Tensor) -> Tensor:
        """Cross-entropy of every next token."""
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class ConvStage(nn.Module):
    """A residual convolution with BatchNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, channels, height, width) to the same."""
        return x + F.relu(self.norm(self.conv(x)))


class BatchNormCnn(Recorded):
    """A small residual network that classifies what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.stages = nn.Sequential(ConvStage(8), ConvStage(8))
        self.head = nn.Linear(8, 4)

    def loss(self, batch: Tensor) -> Tensor:
        """Cross-entropy of a label that lies in the tokens."""
        images = batch.view(-1, 1, 3, LENGTH // 3).float().repeat(1, 1, 2, 2) / VOCABULARY
        return F.cross_entropy(
            self.head(self.stages(self.stem(images)).mean((2, 3))), batch[:, 0] % 4
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Gan(LightningModule):
    """Generator and discriminator take turns, each with an optimizer and the other one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(4, DIM, bias=False), nn.BatchNorm1d(DIM), nn.ReLU(), nn.Linear(DIM, LENGTH)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(LENGTH, DIM), nn.LeakyReLU(0.2), nn.Linear(DIM, 1)
        )
        self.losses: list[float] = []

    def judge(self, samples: Tensor, truth: float) -> Tensor:
        """How far the discriminator is from saying ``truth``."""
        verdict = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, truth))

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        """One step of each."""
        real = batch.float() / VOCABULARY
        noise = real[:, :4].flip(0)
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]  # there are two
        self.toggle_optimizer(of_generator)
        self.minimize(of_generator, self.judge(self.generator(noise), 1.0))
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_discriminator)
        fake = self.generator(noise).detach()
        self.minimize(of_discriminator, (self.judge(real, 1.0) + self.judge(fake, 0.0)) / 2)
        self.untoggle_optimizer(of_discriminator)

    def minimize(self, optimizer: Any, loss: Tensor) -> None:
        """One step of an optimizer."""
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One Adam each."""
        return [
            torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999))
            for part in (self.generator, self.discriminator)
        ]


def sequences(num_samples: int) -> Tensor:
    """Tokens (num_samples, LENGTH) that mostly count up, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
    noise = torch.randint(2, (num_samples, LENGTH), generator=generator)
    return 1 + (start + torch.arange(LENGTH) + noise) % (VOCABULARY - 1)


def sequence_loader(num_samples: int, batch_size: int = 4) -> DataLoader[Tensor]:
    """Batches of :func:`sequences`; a step's samples are the same over any number of ranks."""
    dataset: Any = sequences(num_samples)  # a tensor is a sequence of samples
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, shuffle=False))
