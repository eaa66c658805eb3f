"""A script with a LightningCLI, run in this process as far as its Trainer."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from shardeddp import ShardedDP
from support.tasks import TinyGpt

STRATEGY = "--trainer.strategy"


def command_line(*arguments: str) -> LightningCLI:
    """What a script with a LightningCLI does, without training."""
    trainer = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    with mock.patch.object(sys, "argv", ["script.py", *trainer, *arguments]):
        return LightningCLI(
            TinyGpt, run=False, seed_everything_default=False, save_config_callback=None
        )


def strategy_of(*arguments: str) -> ShardedDP:
    strategy = command_line(*arguments).trainer.strategy
    assert isinstance(strategy, ShardedDP)
    return strategy


def write(folder: Path, init_args: dict[str, Any]) -> str:
    """A configuration file."""
    path = folder / "config.yaml"
    strategy = {"class_path": "shardeddp.ShardedDP", "init_args": init_args}
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return f"--config={path}"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command line prints that is well, and does nothing else."""
    with pytest.raises(SystemExit) as ended:
        command_line(*arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command line ends with that is not: while it is parsed, or when the strategy is made."""
    try:
        command_line(*arguments)
    except SystemExit as ended:
        assert ended.code != 0
        return capsys.readouterr().err
    except ValueError as error:
        return str(error)
    pytest.fail(f"{arguments} was accepted")
