"""The engines of `benchmarks/checkpoint.py`: ShardedDP, torch.distributed.checkpoint over FSDP2, and bare files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from shardeddp import ShardedDP
from shardeddp.config import CheckpointOptions


class Engine(Protocol):
    """Something that saves and loads."""

    def save(self, path: Path) -> None:
        """Save; may return before it is done."""

    def wait(self) -> None:
        """Return when it is done."""

    def forget(self) -> None:
        """Drop the optimizer's state: a run that resumes has none."""

    def load(self, path: Path) -> None:
        """Load into the same model and optimizer."""

    def shards(self) -> list[torch.Tensor]:
        """What this rank holds of parameters and optimizer state."""


class Layers(L.LightningModule):
    """Square linear layers, and AdamW."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Of no interest."""
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two moments for each parameter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Ours:
    """ShardedDP behind a Trainer, after one step.

    Args:
        ranks: Of the world.
        layers: Of the model.
        width: Of each layer.
        asynchronous: Whether to save in a thread.
    """

    def __init__(self, ranks: int, layers: int, width: int, asynchronous: bool) -> None:
        self._strategy = ShardedDP(
            auto_wrap_policy={nn.Linear},
            state_dict_type="sharded",
            checkpoint_options=CheckpointOptions(asynchronous=asynchronous),
        )
        self._module = Layers(layers, width)
        self._trainer = L.Trainer(
            accelerator="cpu", devices=ranks, strategy=self._strategy, max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data: Any = torch.randn(ranks, width)
        self._trainer.fit(self._module, torch.utils.data.DataLoader(data, batch_size=1))

    def save(self, path: Path) -> None:
        """As a callback would."""
        self._trainer.save_checkpoint(path)

    def wait(self) -> None:
        """Until the thread is done."""
        self._strategy.wait_for_checkpoint()
        dist.barrier()

    def forget(self) -> None:
        """As before the first step."""
        self._trainer.optimizers[0].state.clear()

    def load(self, path: Path) -> None:
        """As a resuming Trainer would."""
        checkpoint = self._strategy.load_checkpoint(path)
        self._strategy.load_model_state_dict(checkpoint)
        self._strategy.load_optimizer_state_dict(checkpoint)

    def shards(self) -> list[torch.Tensor]:
        """Local parts."""
        state = self._trainer.optimizers[0].state_dict()["state"]
        tensors = [
            *self._module.parameters(),
            *(it[name] for it in state.values() for name in ("exp_avg", "exp_avg_sq")),
        ]
        return [tensor.to_local().detach() for tensor in tensors]  # type: ignore[attr-defined]


class Stock:
    """torch's fully_shard and torch.distributed.checkpoint, as their documentation has it; after one step.

    Args:
        ranks: Of the world.
        layers: Of the model.
        width: Of each layer.
    """

    def __init__(self, ranks: int, layers: int, width: int) -> None:
        dist.init_process_group("gloo")
        self._model = Layers(layers, width).layers
        for layer in self._model:
            fully_shard(layer)
        fully_shard(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._model(torch.randn(1, width)).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, path: Path) -> None:
        """Its file system writer flushes every file."""
        dcp.save(self._state(), checkpoint_id=path)

    def wait(self) -> None:
        """Nothing: it has waited."""

    def forget(self) -> None:
        """As before the first step."""
        self._optimizer.state.clear()

    def load(self, path: Path) -> None:
        """In place, then back into the optimizer."""
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def shards(self) -> list[torch.Tensor]:
        """Local parts."""
        state = self._optimizer.state.values()
        tensors = [
            *self._model.parameters(),
            *(it[name] for it in state for name in ("exp_avg", "exp_avg_sq")),
        ]
        return [tensor.to_local().detach() for tensor in tensors]  # type: ignore[attr-defined]


class Floor:
    """As many bytes as the others save and load, in one bare file a rank, without names or checksums.

    Args:
        ranks: Of the world.
        layers: Of the model.
        width: Of each layer.
    """

    def __init__(self, ranks: int, layers: int, width: int) -> None:
        dist.init_process_group("gloo")
        self._sizes = [(width * width + width) // ranks] * layers
        self._parameters = [torch.rand(size) for size in self._sizes]
        self._moments = [torch.rand(size) for size in self._sizes * 2]

    def save(self, path: Path) -> None:
        """Tensor by tensor, then flushed."""
        path.mkdir(exist_ok=True)
        with self._file(path).open("wb", buffering=0) as file:
            for tensor in self.shards():
                file.write(tensor.numpy())
            os.fsync(file.fileno())

    def wait(self) -> None:
        """For the other ranks."""
        dist.barrier()

    def forget(self) -> None:
        """Moments are new tensors in a run that resumes."""
        self._moments = []

    def load(self, path: Path) -> None:
        """Parameters in place, moments into new memory."""
        self._moments = [torch.empty(size) for size in self._sizes * 2]
        with self._file(path).open("rb", buffering=0) as file:
            for tensor in self.shards():
                assert file.readinto(tensor.numpy()) == tensor.nbytes

    def _file(self, path: Path) -> Path:
        return path / f"{dist.get_rank()}.bin"

    def shards(self) -> list[torch.Tensor]:
        """All of them."""
        return [*self._parameters, *self._moments]


ENGINES: dict[str, Callable[[int, int, int], Engine]] = {
    "floor": Floor,
    "stock": Stock,
    "shardeddp": lambda *sizes: Ours(*sizes, asynchronous=False),
    "shardeddp, in a thread": lambda *sizes: Ours(*sizes, asynchronous=True),
}
