"""Files of `configs/` for many machines fit these by their plan, and train with small layers."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from gpt.data import PydocText
from pretrain_hf import CausalLM
from support.trainers import PoolEnvironment, make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(120)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY: dict[str, Any] = {
    "trainer.accelerator": "cpu",
    "trainer.devices": 2,
    "trainer.num_nodes": 1,
    "trainer.max_steps": 2,
    "trainer.accumulate_grad_batches": 2,
    "trainer.logger": False,
    "trainer.limit_val_batches": 1,
    "data.block_size": 64,
    "data.batch_size": 2,
}
AXES = {"llama_70b": "tensor_parallel_size", "mixtral_8x7b": "expert_parallel_size"}


class InThePool(LightningCLI):
    """The example's command line, on ranks that exist already."""

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Give the Trainer the pool's environment."""
        return super().instantiate_trainer(plugins=[PoolEnvironment(ranks_per_node=2)], **kwargs)


def parsed(kind: type[LightningCLI], name: str, options: dict[str, Any]) -> Any:
    """The command line of `examples/pretrain_hf.py` with a file, before it runs."""
    line = [f"--config={CONFIGS / name}.yaml", *(f"--{key}={it}" for key, it in options.items())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of LightningCLI about a line that is not sys.argv
        return kind(
            CausalLM, PydocText, args=line, run=False, auto_configure_optimizers=False,
            save_config_callback=None,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    ("name", "parameters", "units", "settings"),
    [
        (
            "llama_70b",
            70_553_706_496,
            "(root), model.model.layers.0 ... model.model.layers.79 (80x)",
            "full_shard over 8, micro-batch 1 x 16",
        ),
        (
            "mixtral_8x7b",
            46_702_792_704,
            "(root), model.model.layers.0 ... model.model.layers.31 (32x)",
            "full_shard over 64, micro-batch 2 x 4",
        ),
    ],
)
def test_a_dry_run_says_that_a_file_fits_its_machines(
    capsys: pytest.CaptureFixture[str], name: str, parameters: int, units: str, settings: str
) -> None:
    options = {"trainer.accelerator": "cpu", "trainer.strategy.init_args.plan_only": "H100-80"}
    cli = parsed(LightningCLI, name, {**options, "trainer.logger": False})
    cli.trainer.fit(cli.model, cli.datamodule)
    text = " ".join(capsys.readouterr().out.split())
    assert f"CausalLM ({parameters:,} parameters) on 64 x H100-80 (8 x 8)" in text
    assert f"Units: {units}." in text
    (line,) = [it for it in text.split("As configured (")[1:] if it.startswith(settings)]
    assert ", fits." in line
    written = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["trainer"]["strategy"]
    (size,) = {vars(it.choice)[AXES[name]] for it in cli.trainer.strategy.planned.plans}
    assert size == written["init_args"][AXES[name]] == 8
    assert all(it.is_meta for it in cli.model.parameters()), "the model takes memory"


def train(name: str, folder: str) -> list[Any]:
    """Two steps as a file says; only sizes are others."""
    make_trainer("auto")  # quiet
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
    torch.set_num_threads(1)
    sizes = {f"model.config.{key}": it for key, it in SIZES.items()}
    options = {**TINY, **sizes, f"trainer.strategy.init_args.{AXES[name]}": 2}
    cli = parsed(InThePool, name, {**options, "trainer.default_root_dir": folder})
    cli.trainer.checkpoint_callback.dirpath = folder
    cli.trainer.fit(cli.model, cli.datamodule)
    cli.trainer.save_checkpoint(Path(folder) / "end.ckpt")
    cli.trainer.strategy.wait_for_checkpoint()
    return [cli.trainer.global_step, cli.trainer.callback_metrics["train/loss"].item()]


@pytest.mark.parametrize("name", AXES)
def test_a_file_trains(world: Worlds, tmp_path: Path, name: str) -> None:
    found = world(2).run(train, name, str(tmp_path))
    assert all(steps == 2 and 4.5 < loss < 6.5 for steps, loss in found)
    assert (tmp_path / "end.ckpt").is_dir(), "it is sharded"
