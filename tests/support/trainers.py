"""Trainers that run inside the pool's ranks: the process group is there already, so no process is started per case."""

import logging
import warnings
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import ClusterEnvironment

from shardeddp import ShardTensor
from world import DEVICE

EXPECTED_WARNINGS = (
    # As in pyproject.toml, which the ranks do not read: what Lightning and torch say of each other or of tests.
    (".*does not have many workers", UserWarning),
    ("The number of training batches .* is smaller than the logging interval", UserWarning),
    ("Using `DistributedSampler` with the dataloaders", UserWarning),
    (".*isinstance.treespec, LeafSpec.* is deprecated", FutureWarning),
    ("torch.distributed.nn.functional.all_gather is deprecated", FutureWarning),
    ("You defined a `validation_step` but have no `val_dataloader`", UserWarning),
    ("The `srun` command is available", UserWarning),
    ("GPU available but not used", UserWarning),
    ("Your `IterableDataset` has `__len__` defined", UserWarning),
    ("Length of IterableDataset .* was reported to be", UserWarning),
    ("debug=True: calls through Lightning", UserWarning),  # the pool has made the process group
    ("The dirpath has changed from", UserWarning),
    ("Checkpoint directory .* exists and is not empty", UserWarning),
    ("nothing is known about the optimizer support.tasks.NormalizedDescent", UserWarning),
    ("the checkpoint has the random states of . rank", UserWarning),  # resuming in another world
)


class PoolEnvironment(ClusterEnvironment):
    """Ranks as ``torch.distributed`` has them; several "nodes" of a machine where a test asks for them.

    Args:
        ranks_per_node: Consecutive ranks that pretend to share a machine.
    """

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__()
        self._ranks_per_node = ranks_per_node

    @property
    def creates_processes_externally(self) -> bool:
        """The pool has started them."""
        return True

    @property
    def main_address(self) -> str:
        """Nobody connects: the process group exists."""
        return "localhost"

    @property
    def main_port(self) -> int:
        """Nobody connects: the process group exists."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Only where a test hands it to its Trainer."""
        return False

    def world_size(self) -> int:
        """Ranks of the world that the test asked for."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Refuse another size than the pool's."""
        if size != dist.get_world_size():
            raise ValueError(
                f"the Trainer has {size} ranks, the pool's world {dist.get_world_size()}"
            )

    def global_rank(self) -> int:
        """Rank in the pool's world."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Refuse another rank than the pool's."""
        if rank != dist.get_rank():
            raise ValueError(
                f"the Trainer takes this for rank {rank}, the pool for {dist.get_rank()}"
            )

    def local_rank(self) -> int:
        """Rank on the pretended machine."""
        return dist.get_rank() % self._ranks_per_node

    def node_rank(self) -> int:
        """Number of the pretended machine."""
        return dist.get_rank() // self._ranks_per_node


class OneGpu(CUDAAccelerator):
    """One GPU that all ranks of a machine share."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """The number of ranks, as it is."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The same for each rank."""
        return [DEVICE] * devices


def make_trainer(strategy: Any, **options: Any) -> Trainer:
    """A quiet Trainer over all ranks of the pool's world.

    Args:
        strategy: As the Trainer takes it.
        options: More of the Trainer's arguments; ``plugins`` may have another environment than the pool's.
    """
    for message, category in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    devices = dist.get_world_size() // options.get("num_nodes", 1)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": gettempdir(),  # pictures of memory that ran out go there
    }
    plugins = [*options.pop("plugins", [])]
    if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        plugins.append(PoolEnvironment(devices))
    return Trainer(
        accelerator="cpu" if DEVICE.type == "cpu" else OneGpu(),
        devices=devices,
        strategy=strategy,
        plugins=plugins,
        **{**quiet, **options},
    )


def precision_options(precision: str) -> dict[str, Any]:
    """A Trainer's options for a precision; Lightning itself has no ``16-mixed`` on CPUs."""
    if precision != "16-mixed":
        return {"precision": precision}
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=256.0)
    return {"plugins": [MixedPrecision(precision, DEVICE.type, scaler)]}


def full_weights(module: LightningModule) -> dict[str, torch.Tensor]:
    """The whole state dict of a module, sharded or not, on the host; every rank calls it."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor)
        .detach()
        .to("cpu", copy=True)
        for name, tensor in module.state_dict().items()
    }


def assert_same_weights(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-5
) -> None:
    """Every tensor of both within ``rtol`` of the other, relative to its norm."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        difference = (found[name].to(wide) - tensor.to(wide)).norm()
        assert difference <= rtol * tensor.to(wide).norm(), (
            f"{name} differs by {difference:.3g} of {tensor.to(wide).norm():.3g}"
        )
