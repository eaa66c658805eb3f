"""Train a small GPT on Python's own documentation, under the strategy that a YAML file names.

    python examples/train_gpt.py fit --config configs/laptop.yaml
    python examples/train_gpt.py fit --config configs/laptop.yaml --trainer.strategy=ddp
    python examples/train_gpt.py fit --help

Model (`gpt/model.py`) and data (`gpt/data.py`) are ordinary Lightning code. What shards them is an entry of the YAML
file; the one line about it here is the import.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import rich
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only

import shardeddp  # noqa: F401  (its strategies become known to the Trainer by name)
from gpt.data import PydocText
from gpt.model import GPTModule
from gpt.progress import StepsBar
from gpt.report import Figures, StepMeter, middle, print_closing_table
from gpt.sampling import TextSampler


class TrainGPT(LightningCLI):
    """Fit the model, sample from it, and report what a step costs here and under DDP."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Those of Lightning's that this model has steps for."""
        skipped_arguments = LightningCLI.subcommands()
        return {name: skipped_arguments[name] for name in ("fit", "validate")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what a run does besides training."""
        parser.add_lightning_class_args(TextSampler, "sample")
        parser.link_arguments("data.block_size", "sample.context")
        parser.add_argument(
            "--report.steps", type=int, default=30, help="How many optimizer steps are measured."
        )
        parser.add_argument(
            "--report.ddp",
            type=bool,
            default=True,
            help="Measure them under DDP too, after the fit.",
        )

    def before_fit(self) -> None:
        """Have the fit measured."""
        self.meter = StepMeter(
            strategy_label(self.config.fit.trainer.strategy), self.config.fit.report.steps
        )
        self.trainer.callbacks.insert(
            0, self.meter
        )  # first, so that no other callback's time is measured
        num_parameters = sum(p.numel() for p in self.model.parameters())
        ranks = f"{self.trainer.world_size} {self.trainer.accelerator.name()} rank{'s' * (self.trainer.world_size > 1)}"
        say(
            f"[bold]{self.meter.label}[/] on {ranks}, GPT with {num_parameters / 1e6:.1f} M parameters"
        )

    def after_fit(self) -> None:
        """Report what the fit left behind and what it cost."""
        say(f"Log and checkpoints: {self.trainer.log_dir}")
        if self.meter.figures is None:
            say(
                f"Nothing was measured: the fit ended before step {self.meter.last_step} (see --report.steps)."
            )
            return
        # A single rank draws its batches in another order than DDP's sampler would, and has nobody to talk to.
        compares = self.config.fit.report.ddp and self.trainer.world_size > 1
        figures = self.compare_with_ddp() if compares else (self.meter.figures, None)
        folder = self.trainer.log_dir if self.trainer.loggers else None
        print_closing_table(*figures, folder and Path(folder))

    def compare_with_ddp(self) -> tuple[Figures | None, Figures | None]:
        """Measure the same steps under both in turn, so that a drift of the machine meets both."""
        strategy = self.config.fit.trainer.strategy
        steps = self.config.fit.report.steps
        say(
            f"[dim]Measuring the same {steps} steps under DDP and here, {ROUNDS} times in turn ...[/]"
        )
        ours, ddp = [self.meter.figures], list[Figures | None]()
        with StepsBar((2 * ROUNDS - 1) * self.meter.last_step) as bar:
            for number in range(ROUNDS):
                if number:
                    ours.append(self.fit_again(self.meter.label, strategy, bar))
                ddp.append(self.fit_again("DDP", DDP, bar))
        return middle(ours), middle(ddp)

    def fit_again(self, label: str, strategy: str | Namespace, bar: StepsBar) -> Figures | None:
        """Train the same model from the same weights on the same batches, until all steps are measured."""
        config = self.config.fit
        meter = StepMeter(label, config.report.steps, stop=True)
        bar.begin(label)
        changed: dict[str, Any] = {
            "strategy": strategy if isinstance(strategy, str) else instantiate(strategy),
            "callbacks": [meter, bar],
            "logger": False,
            "limit_val_batches": 0,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
        }
        trainer = L.Trainer(**{**self.config_init.fit.trainer, **changed})
        L.seed_everything(config.seed_everything, workers=True, verbose=False)
        trainer.fit(type(self.model)(**config.model), PydocText(**config.data))
        return meter.figures


ROUNDS = 3
DDP = Namespace(
    class_path="lightning.pytorch.strategies.DDPStrategy",
    init_args=Namespace(gradient_as_bucket_view=True),  # the gradients once in memory, not twice
)


def instantiate(strategy: Namespace) -> Strategy:
    """A new strategy: each belongs to one Trainer."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(Strategy, "strategy")
    return parser.instantiate_classes(Namespace(strategy=strategy)).strategy


def strategy_label(strategy: str | Namespace) -> str:
    """How the closing table names the strategy of a configuration.

    >>> strategy_label(Namespace(class_path="shardeddp.ShardedDP", init_args=Namespace(sharding_strategy="no_shard")))
    'ShardedDP no_shard'
    """
    if isinstance(strategy, str):
        return strategy
    kind = strategy.get("init_args", Namespace()).get("sharding_strategy", "")
    return f"{strategy.class_path.rpartition('.')[2]} {kind}".strip()


def loggers() -> list[dict[str, Any]]:
    """CSV files, and TensorBoard where it is installed."""
    csv = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "runs", "name": "gpt"},
    }
    board = {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {"save_dir": "runs", "name": "tensorboard", "default_hp_metric": False},
    }
    return [csv, board] if importlib.util.find_spec("tensorboard") else [csv]


def quieten() -> None:
    """Keep the terminal for what this run has to say."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(
            logging.WARNING
        )  # which accelerators exist, tips, one line per process
    # A batch is a slice of a text in memory: worker processes would only cost time.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Raised by every Lightning up to 2.6 on torch 2.13, inside Lightning.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")


@rank_zero_only
def say(text: str) -> None:
    """Print one line on rank 0."""
    rich.print(text)


def main(model_class: type[GPTModule]) -> None:
    """Run the command line for a model."""
    quieten()
    TrainGPT(
        model_class,
        PydocText,
        trainer_defaults={"logger": loggers()},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
    )


if __name__ == "__main__":
    main(GPTModule)
