"""Writes checkpoints with the tools that others use, on ranks of the pool: plain, as DTensors, through Lightning."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import mse_loss

from support.trainers import make_trainer


def tensors() -> dict[str, torch.Tensor]:
    """Shapes that ranks divide unevenly, dtypes of each width, tensors without dims, and without elements."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(7, 5, 3, generator=generator)
    return {
        "cube": numbers,
        "rows": numbers[:, :, 0].contiguous().bfloat16(),
        "turned": numbers[:, :, 1].t(),
        "one": numbers[0, 0, :1].double(),
        "eight": (numbers.flatten() * 4).to(torch.float8_e4m3fn),
        "flags": numbers.flatten() > 0,
        "waves": torch.complex(numbers, numbers + 1),
        "scalar": torch.tensor(5),
        "nothing": torch.empty(0, 3),
    }


def save_tensors(folder: str, root: str | None, dim: int | None) -> None:
    """Save :func:`tensors` from all ranks.

    Args:
        folder: Where to.
        root: The key that they are under; None puts them at the root.
        dim: Shard along it, where a tensor has it; None saves plain tensors.
    """
    state: dict[str, Any] = tensors()
    if dim is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {
            name: distribute_tensor(it, mesh, [Shard(dim)]) if can_shard(it, dim) else it
            for name, it in state.items()
        }
    state = (
        {root: state, "optimizer_0": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}}
        if root
        else state
    )
    dcp.save(state, checkpoint_id=folder)


def can_shard(tensor: torch.Tensor, dim: int) -> bool:
    """Whether it has the dim, and gloo knows its type."""
    return tensor.dim() > dim and tensor.dtype is not torch.float8_e4m3fn


class Small(LightningModule):
    """Two layers whose rows two ranks divide unevenly, trained with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 5, "names": ["a"]})
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
        )

    def configure_model(self) -> None:
        """Shard with the engine of torch, as a user of `ModelParallelStrategy` does."""
        assert self.device_mesh is not None
        if not isinstance(self.layers[0].weight, DTensor):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """A loss that the callbacks see."""
        loss = mse_loss(self.layers(batch), batch.sum(1, keepdim=True))
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """State with two moments and a step."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_model_parallel(folder: str) -> dict[str, torch.Tensor]:
    """Train with Lightning and torch's own engine, save; returns whole weights and first moments by our names."""
    torch.manual_seed(1)
    model = Small()
    callbacks = [
        EarlyStopping("loss"),
        ModelCheckpoint(dirpath=Path(folder).parent / "top", monitor="loss"),
    ]
    trainer = make_trainer(
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=callbacks,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(16, 3), batch_size=4))
    trainer.save_checkpoint(folder)
    whole = {f"model.{name}": full(parameter) for name, parameter in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in trainer.optimizers[0].state.items():
        whole[f"optimizer_0.state.{names[parameter]}.exp_avg"] = full(state["exp_avg"])
    return copy.deepcopy(whole)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
