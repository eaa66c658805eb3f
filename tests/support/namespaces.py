"""One small training program for either of Lightning's packages, run where the other one cannot be imported.

Usage: TESTED=pytorch_lightning namespaces.py OUT   (or TESTED=lightning.pytorch)

Two spawned ranks train and save, one rank resumes as a YAML file says, and the checkpoint is loaded and converted. What
it found is said in one JSON line.
"""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTED = os.environ["TESTED"]
STANDALONE = ("pytorch_lightning", "lightning_fabric")
FORBIDDEN = ("lightning",) if TESTED in STANDALONE else STANDALONE


class Forbids:
    """Makes packages unimportable, as if they were not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Refuse a module of a forbidden package; know nothing of any other."""
        if name.partition(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


# Before everything else, in spawned ranks too: they import this file as their main module.
sys.meta_path.insert(0, Forbids())  # type: ignore[arg-type]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import shardeddp  # noqa: E402
import shardeddp.lightning.api  # noqa: E402
import shardeddp_cli  # noqa: E402

pl: Any = importlib.import_module(TESTED)
cli: Any = importlib.import_module(f"{TESTED}.cli")
callbacks: Any = importlib.import_module(f"{TESTED}.callbacks")

YAML = """
trainer:
  accelerator: cpu
  devices: 1
  strategy:
    class_path: shardeddp.ShardedDP
    init_args: {sharding_strategy: shard_grad_op, auto_wrap_policy: [torch.nn.Linear], state_dict_type: sharded}
  precision: bf16-mixed
  max_epochs: 3
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  gradient_clip_val: 1.0
"""


class Regression(pl.LightningModule):  # type: ignore[misc]
    """Two layers, and the steps that a run needs."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """Learn the sum of the inputs."""
        loss = F.mse_loss(self.layers(batch).float(), batch.sum(1, keepdim=True))
        self.log("train", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        """The same loss."""
        self.log(
            "val",
            F.mse_loss(self.layers(batch).float(), batch.sum(1, keepdim=True)),
            sync_dist=True,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam has states to save."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> torch.utils.data.DataLoader[Tensor]:
        """16 samples."""
        samples: Any = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(samples, batch_size=4)

    val_dataloader = train_dataloader


def fit_on_two_ranks(folder: Path) -> dict[str, float]:
    """Train two epochs by the registered name, and leave ``last.ckpt`` behind."""
    keeper = callbacks.ModelCheckpoint(folder, monitor="val", save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="sharded_dp_spawn",
        max_epochs=2,
        callbacks=[keeper, callbacks.EarlyStopping("val")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(1, verbose=False)
    trainer.fit(Regression())
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def resume_by_yaml(folder: Path) -> dict[str, float]:
    """Train the third epoch on one rank, from the command line's Trainer."""
    file = folder / "run.yaml"
    file.write_text(YAML)
    line = cli.LightningCLI(
        Regression, args=[f"--config={file}"], run=False, save_config_callback=None
    )
    line.trainer.fit(line.model, ckpt_path=str(folder / "last.ckpt"))
    line.trainer.validate(line.model, verbose=False)
    line.trainer.save_checkpoint(folder / "directory.ckpt")
    return {name: value.item() for name, value in line.trainer.callback_metrics.items()}


def convert(folder: Path) -> bool:
    """Whether a directory, and a file of it, load alike, by this package and by Lightning."""
    source, target = folder / "directory.ckpt", folder / "plain.ckpt"
    assert source.is_dir()
    if shardeddp_cli.main(["consolidate", str(source), "-o", str(target)]):
        return False
    loaded = [Regression.load_from_checkpoint(path).state_dict() for path in (source, target)]
    loaded += [
        shardeddp.load_from_checkpoint(Regression, path).state_dict() for path in (source, target)
    ]
    return all(torch.equal(each[name], loaded[0][name]) for each in loaded for name in loaded[0])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1])
    said = {
        "namespace": shardeddp.lightning.api.NAMESPACE,
        "fitted": fit_on_two_ranks(out),
        "resumed": resume_by_yaml(out),
        "converts": convert(out),
        "trespasses": sorted(name for name in sys.modules if name.partition(".")[0] in FORBIDDEN),
    }
    print("said " + json.dumps(said), flush=True)
