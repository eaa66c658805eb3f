"""Every precision of the Trainer trains as under DDP, in the dtypes that its name says, with global clipping."""

import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from shardeddp import ConfigurationError, ShardedDP, ShardTensor
from shardeddp.lightning.precision import ShardedMixedPrecision, ShardedPrecision, shard_precision
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES
from support.parity import Run, assert_same_training
from support.tasks import Block, TinyGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

UNITS = {"auto_wrap_policy": {Block}}
STRATEGIES = [{"sharding_strategy": name, **UNITS} for name in SHARDING_STRATEGIES]


def trainer_of(**options: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=2, logger=False, **options)


@pytest.mark.parametrize("strategy", ["an object", "sharded_dp"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_the_trainers_precision_reaches_the_strategy(strategy: str, precision: Any) -> None:
    trainer = trainer_of(
        strategy=ShardedDP() if strategy == "an object" else strategy, precision=precision
    )
    assert trainer.precision == precision
    assert isinstance(trainer.precision_plugin, ShardedPrecision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_lightning_takes_the_plugin_for_what_it_is_under_ddp(precision: Any) -> None:
    """``ThroughputMonitor`` has the peak of a GPU from the class of the plugin."""
    plugins = [
        trainer_of(strategy=strategy, precision=precision).precision_plugin
        for strategy in (ShardedDP(), DDPStrategy())
    ]
    assert _plugin_to_compute_dtype(plugins[0]) == _plugin_to_compute_dtype(plugins[1])
    assert isinstance(plugins[0], type(plugins[1]))


def test_a_sharded_plugin_can_be_pickled_with_a_trainer_for_spawned_ranks() -> None:
    plugin = pickle.loads(pickle.dumps(shard_precision(MixedPrecision("bf16-mixed", "cpu"))))
    assert type(plugin) is ShardedMixedPrecision and plugin.autocast is torch.bfloat16


@pytest.mark.parametrize("given_to", ["trainer", "strategy"])
def test_a_plugin_can_be_given_to_the_trainer_or_to_the_strategy(given_to: str) -> None:
    plugin = MixedPrecision("bf16-mixed", "cpu")
    if given_to == "trainer":
        trainer = trainer_of(strategy=ShardedDP(), plugins=[plugin])
    else:
        trainer = trainer_of(strategy=ShardedDP(precision_plugin=plugin))
    assert trainer.precision == "bf16-mixed"
    assert isinstance(trainer.precision_plugin, ShardedPrecision)


class UsersPrecision(Precision):
    """One that Lightning does not ship."""


def test_a_precision_of_the_users_is_taken_as_it_is() -> None:
    plugin = UsersPrecision()
    assert shard_precision(plugin) is plugin
    assert trainer_of(strategy=ShardedDP(), plugins=[plugin]).precision_plugin is plugin


@pytest.mark.parametrize(
    "stock",
    [
        Precision(),
        HalfPrecision("bf16-true"),
        DoublePrecision(),
        MixedPrecision("bf16-mixed", "cpu"),
    ],
)
def test_a_sharded_precision_converts_as_the_stock_one_does(stock: Precision) -> None:
    ours = shard_precision(stock)
    assert ours.precision == stock.precision
    assert (
        ours.convert_module(nn.Linear(2, 2)).weight.dtype
        == stock.convert_module(nn.Linear(2, 2)).weight.dtype
    )
    assert ours.convert_input(torch.ones(2)).dtype == stock.convert_input(torch.ones(2)).dtype
    assert ours.convert_output(torch.ones(2)).dtype == stock.convert_output(torch.ones(2)).dtype
    for name in ("tensor_init_context", "module_init_context", "forward_context"):
        with getattr(ours, name)():
            found = torch.ones(2).dtype, torch.is_autocast_enabled("cpu")
        with getattr(stock, name)():
            assert found == (torch.ones(2).dtype, torch.is_autocast_enabled("cpu")), name


# -- training


@pytest.mark.loop(1)
@pytest.mark.parametrize(
    "arguments", STRATEGIES, ids=lambda arguments: arguments["sharding_strategy"]
)
@pytest.mark.parametrize(
    ("precision", "rtol"), [("bf16-mixed", 1e-5), ("bf16-true", 1e-2), ("64-true", 1e-13)]
)
def test_training_equals_ddp(
    world: Worlds,
    reference: Callable[..., list[Any]],
    precision: str,
    rtol: float,
    arguments: dict[str, Any],
) -> None:
    run = Run(
        model=TinyGpt,
        loader=token_loader,
        options={"precision": precision, "gradient_clip_val": 0.5},
    )
    assert_same_training(world(2).run(run.sharded_by, arguments), reference(2, run.under_ddp), rtol)


@pytest.mark.parametrize("name", ["no_shard", "shard_optimizer"])
def test_gradients_of_micro_batches_add_up_in_float32_as_under_ddp(
    world: Worlds, reference: Callable[..., list[Any]], name: str
) -> None:
    options = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    run = Run(model=TinyGpt, loader=token_loader, options=options)
    arguments = {"sharding_strategy": name, **UNITS}
    assert_same_training(world(2).run(run.sharded_by, arguments), reference(2, run.under_ddp), 1e-5)


SKIPPED_FIRST = "Detected call of `lr_scheduler.step"
"""What torch says when the scaler skips the very first step."""


def scaled(precision: str = "16-mixed") -> dict[str, Any]:
    """The Trainer turns 16-mixed into bf16-mixed on CPUs, but for a plugin of the user's."""
    return {
        "plugins": [
            MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))
        ]
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", STRATEGIES, ids=lambda arguments: arguments["sharding_strategy"]
)
def test_training_with_a_loss_scaler_equals_ddp_with_the_steps_that_it_skips(
    world: Worlds, reference: Callable[..., list[Any]], arguments: dict[str, Any]
) -> None:
    options = {**scaled(), "gradient_clip_val": 0.5}
    run = Run(model=TinyGpt, loader=token_loader, steps=12, options=options, warns=SKIPPED_FIRST)
    expected = reference(2, run.under_ddp)
    assert_same_training(world(2).run(run.sharded_by, arguments), expected, rtol=1e-5)
    losses = expected[0].losses
    assert losses[0] != losses[-1] and all(map(math.isfinite, losses))


def scaler_states(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], float]:
    """What a run under DDP saves of its scaler, what a sharded one that resumes it saves, and its scale meanwhile."""
    path = tmp_path / "ddp.ckpt"
    warnings.filterwarnings("ignore", SKIPPED_FIRST)
    trainer = make_trainer(DDPStrategy(), max_steps=4, **scaled())
    trainer.fit(TinyGpt(), token_loader(32))
    trainer.save_checkpoint(path)
    trainer = make_trainer(ShardedDP(**UNITS), max_steps=5, **scaled())
    trainer.fit(TinyGpt(), token_loader(32), ckpt_path=path)
    trainer.save_checkpoint(tmp_path / "sharded.ckpt")
    plugin = trainer.precision_plugin
    assert isinstance(plugin, ShardedMixedPrecision) and plugin.scaler is not None
    saved = [torch.load(each, weights_only=True) for each in (path, tmp_path / "sharded.ckpt")]
    states = [checkpoint["MixedPrecision"] for checkpoint in saved]
    return states[0], states[1], plugin.scaler.get_scale()


def test_the_loss_scale_goes_on_where_a_run_under_ddp_has_left_it(
    world: Worlds, tmp_path: Path
) -> None:
    for under_ddp, sharded, scale in world(2).run(scaler_states, tmp_path):
        assert (
            under_ddp["scale"] < 2.0**23
        )  # further than one step from the scale that a run begins with
        assert sharded["scale"] == scale and under_ddp["scale"] / scale in (1, 2)


def test_a_fused_optimizer_cannot_be_clipped_under_a_loss_scaler() -> None:
    plugin = shard_precision(scaled()["plugins"][0])
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    with pytest.raises(ConfigurationError, match=r"gradient_clip_val=0\.5 .*AdamW\(fused=True\)"):
        plugin.clip_gradients(optimizer, 0.5)


class NotesDtypes(TinyGpt):
    """What each kind of tensor is made of, when an optimizer is about to step and in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3))
        self.dtypes: dict[str, str] = {}

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.blocks[0].up(self.embed(batch))
        self.dtypes["unsharded"] = str(self.embed.weight.dtype)
        self.dtypes["compute"] = str(hidden.dtype)
        self.dtypes["buffer"] = str(self.table.dtype)
        return super().loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        weight = self.blocks[0].up.weight
        assert isinstance(weight, ShardTensor)
        assert weight.grad is not None
        self.dtypes["parameter"] = str(weight.dtype)
        self.dtypes["gradient"] = str(weight.grad.dtype)
        self.dtypes["state"] = str(self.optimizers().state[weight]["exp_avg"].dtype)
        self.dtypes["module"] = str(self.dtype)


def note_dtypes(precision: str) -> dict[str, str]:
    model = NotesDtypes()
    make_trainer(ShardedDP(auto_wrap_policy=None), max_steps=1, precision=precision).fit(
        model, token_loader(8)
    )
    return model.dtypes


@pytest.mark.parametrize(
    ("precision", "stored", "compute"),
    [
        ("32-true", "float32", "float32"),
        ("bf16-mixed", "float32", "bfloat16"),
        ("bf16-true", "bfloat16", "bfloat16"),
        ("16-true", "float16", "float16"),
        ("64-true", "float64", "float64"),
    ],
)
def test_tensors_have_the_dtypes_of_the_precisions_name(
    world: Worlds, precision: str, stored: str, compute: str
) -> None:
    kinds = ("parameter", "gradient", "state", "unsharded", "buffer", "module")
    expected = {kind: f"torch.{stored}" for kind in kinds} | {"compute": f"torch.{compute}"}
    assert world(2).run(note_dtypes, precision) == [expected] * 2


class InsistsOnItsDtype(TinyGpt):
    """Casts a layer in its forward to what it is already, as routers of experts do."""

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            block.up = block.up.to(torch.float32)
        return super().forward(tokens)


@pytest.mark.parametrize("units", [{Block}, None])
def test_a_module_that_is_cast_in_a_step_to_the_dtype_it_has_trains_as_under_ddp(
    world: Worlds, reference: Callable[..., list[Any]], units: Any
) -> None:
    run = Run(model=InsistsOnItsDtype, loader=token_loader, options={"precision": "bf16-mixed"})
    assert_same_training(
        world(2).run(run.sharded_by, {"auto_wrap_policy": units}), reference(2, run.under_ddp)
    )
