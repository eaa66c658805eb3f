"""Files in `configs/` train: the example's own command line, a tiny model, two ranks (four for several nodes)."""

import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml

import shardeddp
from gpt.data import PydocText
from gpt.lora import LoRAGPTModule, LoRALinear
from gpt.mixture import MixtureGPTModule
from gpt.model import GPTModule
from support.trainers import PoolEnvironment, make_trainer
from train_gpt import TrainGPT
from world import Worlds

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
OF_TRANSFORMERS = ("llama_70b", "mixtral_8x7b")
"""Files for many machines: `tests/models/test_large_configs.py` plans them and trains."""
END = "end.ckpt"
TINY = {
    "trainer.accelerator": "cpu",
    "trainer.devices": "2",
    "trainer.max_epochs": "1",
    "trainer.limit_train_batches": "2",
    "trainer.limit_val_batches": "1",
    "trainer.num_sanity_val_steps": "0",
    "model.dim": "32",
    "model.num_layers": "2",
    "model.num_heads": "2",
    "data.block_size": "64",
    "data.batch_size": "2",
    "sample.num_tokens": "2",
}

pytestmark = pytest.mark.timeout(120)


class InThePool(TrainGPT):
    """The example's command line, on ranks that exist already."""

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Give the Trainer the pool's environment."""
        return super().instantiate_trainer(plugins=[PoolEnvironment(ranks_per_node=2)], **kwargs)


def model_class(name: str) -> type[GPTModule]:
    """What the script that the file names trains."""
    kinds = {"lora": LoRAGPTModule, "experts": MixtureGPTModule}
    return kinds.get(name, GPTModule)


def train(name: str, folder: str, **more: str) -> dict[str, Any]:
    """Two steps as the file says; only the sizes are others."""
    make_trainer("auto")  # quiet
    # As in pyproject.toml, which the ranks do not read.
    warnings.filterwarnings("ignore", r"\s*skip_none parameter was deprecated", DeprecationWarning)
    overrides = TINY | {"trainer.default_root_dir": folder, "trainer.logger": "false"} | more
    line = [
        f"--config={CONFIGS[name]}",
        *(f"--{option}={value}" for option, value in overrides.items()),
    ]
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of LightningCLI about jsonargparse, and about a line that is not sys.argv
        cli = InThePool(model_class(name), PydocText, args=line, run=False)
    checkpoint: Any = cli.trainer.checkpoint_callback
    checkpoint.dirpath = folder
    cli.trainer.fit(cli.model, cli.datamodule)
    cli.trainer.save_checkpoint(Path(folder) / END)
    strategy: Any = cli.trainer.strategy
    strategy.wait_for_checkpoint()
    return {
        "steps": cli.trainer.global_step,
        "loss": cli.trainer.callback_metrics["train/loss"].item(),
        "shards": strategy.options.sharding.topology(cli.trainer.num_nodes, 2).shard_size,
        "trained": [n for n, p in cli.model.named_parameters() if p.requires_grad],
    }


def test_each_use_has_its_file() -> None:
    assert sorted(CONFIGS) == [
        "experts",
        "laptop",
        "llama_70b",
        "long_context",
        "lora",
        "mixtral_8x7b",
        "offload",
        "one_node",
        "several_nodes",
        "tensor_parallel",
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_says_how_it_is_run_and_what_its_options_are_for(name: str) -> None:
    text = CONFIGS[name].read_text(encoding="utf-8")
    (script,) = set(re.findall(r"(examples/\w+\.py) fit --config configs/" + name, text))
    assert (ROOT / script).is_file()
    options = yaml.safe_load(text)["trainer"]["strategy"]["init_args"]
    options.pop("backward_prefetch", None)  # said with forward_prefetch
    head, _, block = text.partition("init_args:")
    silent = [
        option
        for option in options
        if not re.search(rf"(#.*\n +{option}:|{option}:.*#|{option}:\n.*#)", block)
    ]
    assert silent == [], "options without a comment"
    assert head.startswith("# ")


@pytest.fixture(scope="module")
def pretrained(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with `one_node.yaml`, which finetuning begins with."""
    folder = tmp_path_factory.mktemp("pretrained")
    found = world(2).run(train, "one_node", str(folder))
    check(found)
    check_saved("one_node", folder)
    return folder


def check_saved(name: str, folder: Path) -> None:
    """The configuration that a run leaves behind has all that the file says about the strategy."""
    saved, written = (
        yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in (folder / "config.yaml", CONFIGS[name])
    )
    options, wanted = (each["trainer"]["strategy"]["init_args"] for each in (saved, written))
    for option, value in wanted.items():
        found = options[option]
        assert found == value or (isinstance(value, dict) and value.items() <= found.items()), (
            option
        )


def check(found: list[dict[str, Any]], steps: int = 2) -> None:
    """A byte-level model that has not learnt much yet, after one or two steps."""
    assert all(each["steps"] == steps for each in found)
    assert all(4.5 < each["loss"] < 6.5 and each["trained"] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [it for it in CONFIGS if it not in ("several_nodes", "one_node", "lora", *OF_TRANSFORMERS)],
)
def test_a_file_for_one_machine_trains(world: Worlds, tmp_path: Path, name: str) -> None:
    found = world(2).run(train, name, str(tmp_path))
    check(found, steps=1 if "accumulate" in CONFIGS[name].read_text(encoding="utf-8") else 2)
    assert {each["shards"] for each in found} == {2}
    check_saved(name, tmp_path)


@pytest.mark.slow
def test_the_file_for_several_machines_has_one_copy_of_the_model_per_machine(
    world: Worlds, tmp_path: Path
) -> None:
    found = world(4).run(train, "several_nodes", str(tmp_path))
    check(found)
    assert {each["shards"] for each in found} == {2}
    check_saved("several_nodes", tmp_path)


@pytest.mark.slow
def test_the_file_for_finetuning_trains_adapters_on_the_weights_of_a_checkpoint(
    world: Worlds, tmp_path: Path, pretrained: Path
) -> None:
    start = pretrained / END
    arguments = {"model.pretrained": str(start)}
    found = world(2).run(finetune, str(tmp_path), arguments)
    check(found)
    check_saved("lora", tmp_path)
    assert all(name.endswith((".up", ".down")) for name in found[0]["trained"])
    before = shardeddp.load_from_checkpoint(GPTModule, start).state_dict()
    tuned = shardeddp.load_from_checkpoint(LoRAGPTModule, tmp_path / END)
    after = {name.replace(".base.", "."): value for name, value in tuned.state_dict().items()}
    assert all(
        torch.equal(after[name], value) for name, value in before.items() if name.startswith("gpt.")
    )
    adapters = [module for module in tuned.modules() if isinstance(module, LoRALinear)]
    assert len(adapters) == 4
    assert all(adapter.up.abs().sum() > 0 for adapter in adapters), "an adapter has learnt nothing"


def finetune(folder: str, arguments: dict[str, str]) -> dict[str, Any]:
    return train("lora", folder, **arguments)
