"""Bad input is refused before any training, on every rank, with what was expected, what was found, and what to do."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardeddp import ConfigurationError, ShardedDP, ShardTensor
from support.tasks import (
    Block,
    ConvBlock,
    Recorded,
    TinyConvNet,
    TinyGpt,
    image_loader,
    token_loader,
)
from support.trainers import make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


# -- arguments, without any process


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"sharding_strategy": "ful_shard"},
            "'ful_shard' is not known; expected one of .*; did you mean 'full_shard'",
        ),
        ({"sharding_strategy": 3}, "sharding_strategy=3 is not known; expected one of full_shard"),
        ({"auto_wrap_policy": "atuo"}, "found 'atuo': did you mean \"auto\""),
        ({"auto_wrap_policy": 3}, 'expected "auto", None .* found 3 of type int'),
        (
            {"shard_size": 2},
            "shard_size=2 goes with .*'hybrid_shard', found 'full_shard'.* leave shard_size out or use",
        ),
        (
            {"sharding_strategy": "no_shard", "shard_size": 1},
            "goes with .*'hybrid_shard', found 'no_shard'",
        ),
        ({"forward_prefetch": -1}, "forward_prefetch=-1: expected 0"),
        ({"backward_prefetch": -2}, "backward_prefetch=-2: expected 0"),
        (
            {"timeout": 0},
            r"timeout=0: expected a positive number of seconds or a datetime.timedelta, for example 600.0",
        ),
        ({"timeout": -5.0}, "timeout=-5.0: expected a positive number"),
        ({"timeout": "soon"}, "timeout='soon': expected a positive number"),
        ({"timeout": timedelta(seconds=-1)}, "expected a positive number of seconds"),
        ({"timeout": float("nan")}, "timeout=nan: expected a positive number"),
    ],
)
def test_an_argument_is_refused_when_the_strategy_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedDP(**arguments)


@pytest.mark.parametrize(("devices", "shard_size", "sizes"), [(4, 3, "1, 2, 4"), (2, 4, "1, 2")])
def test_a_shard_size_that_does_not_fit_is_refused_before_any_process_starts(
    devices: int, shard_size: int, sizes: str
) -> None:
    message = rf"shard_size={shard_size} does not divide the {devices} ranks of .*; use one of \[{sizes}\]"
    with pytest.raises(ConfigurationError, match=message):
        Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=ShardedDP("hybrid_shard", shard_size),
            logger=False,
        )


def test_an_unknown_start_method_is_refused() -> None:
    with pytest.raises(ValueError, match="start_method='threads': expected one of popen, spawn"):
        ShardedDP(start_method="threads")  # type: ignore[arg-type]


def test_devices_that_are_not_there_are_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has them")
    with pytest.raises(MisconfigurationException, match="No supported gpu backend found"):
        Trainer(accelerator="gpu", devices=2, strategy=ShardedDP(), logger=False)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (
            lambda: FSDPPrecision("bf16-true"),
            "does not work with FSDPPrecision; use precision='32-true'",
        ),
    ],
)
def test_a_precision_that_cannot_be_had_is_refused(plugin: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(
            accelerator="cpu", devices=2, strategy=ShardedDP(), plugins=[plugin()], logger=False
        )
    with pytest.raises(ConfigurationError, match=message):
        ShardedDP(precision_plugin=plugin())


# -- models, on every rank


class OnlyBuffers(Recorded):
    """Keeps its layers in a plain list, where nothing finds their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 3)]

    def configure_optimizers(self) -> None:
        return None


def with_parameters_that_nothing_initialises() -> TinyGpt:
    model = TinyGpt()
    model.blocks[1].gain = nn.Parameter(torch.empty(3, device="meta"))
    return model


def with_lazy_parameters() -> TinyGpt:
    model = TinyGpt()
    model.extra = nn.LazyLinear(3)
    return model


def with_ddp_inside() -> TinyGpt:
    model = TinyGpt()
    model.blocks[0] = DistributedDataParallel(model.blocks[0])
    return model


def with_fsdp_inside() -> TinyGpt:
    model = TinyGpt()
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], device_id=torch.device("cpu"))
    return model


def with_fsdp2_inside() -> TinyGpt:
    model = TinyGpt()
    fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def with_another_size_on_rank_one() -> TinyGpt:
    return TinyGpt(dim=8 + 8 * dist.get_rank())


def with_another_depth_on_rank_one() -> TinyGpt:
    return TinyGpt(num_blocks=3 - dist.get_rank())


def with_one_frozen_on_rank_one() -> TinyGpt:
    model = TinyGpt()
    model.blocks[2].down.bias.requires_grad_(dist.get_rank() != 1)
    return model


class ReplacesAParameter(TinyGpt):
    """Assigns a new parameter once training is about to start."""

    def on_train_start(self) -> None:
        self.blocks[1].up.weight = nn.Parameter(torch.zeros_like(self.blocks[1].up.weight))


class ReplacesItsOwnParameter(TinyGpt):
    """The same in the root unit."""

    def on_train_start(self) -> None:
        self.embed.weight = nn.Parameter(torch.zeros(11, 8))


def fit_and_catch(build: Callable[[], Any], arguments: Mapping[str, Any]) -> tuple[str, str, int]:
    """Name and text of the error that training ends with, and how many steps had been taken."""
    model = None
    try:
        model = build()
        make_trainer(ShardedDP(**arguments), max_steps=2).fit(model, token_loader(16))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test compares it
        return type(error).__name__, str(error), 0 if model is None else len(model.losses)
    return "nothing", "", len(model.losses)


BLOCKS = {"auto_wrap_policy": {Block}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "arguments", "name", "words"),
    [
        (TinyGpt, {"auto_wrap_policy": {nn.Conv2d}}, "ConfigurationError", ["Conv2d", "Block"]),
        (
            TinyGpt,
            {"auto_wrap_policy": "Blokc"},
            "ConfigurationError",
            ["Blokc", "did you mean", "Block"],
        ),
        (
            OnlyBuffers,
            {},
            "ConfigurationError",
            ["Expected a model with parameters, found none in OnlyBuffers"],
        ),
        (
            with_parameters_that_nothing_initialises,
            {},
            "ConfigurationError",
            [
                "found 1 on the meta device",
                "blocks.1.gain",
                "Fill them in the constructors of Block",
            ],
        ),
        (
            with_lazy_parameters,
            {},
            "ConfigurationError",
            ["found 2 uninitialized: 'extra.weight'", "Run one forward"],
        ),
        (
            with_ddp_inside,
            {},
            "ConfigurationError",
            ["found 'blocks.0' wrapped by", "DistributedDataParallel", "bare"],
        ),
        (
            with_fsdp_inside,
            {},
            "ConfigurationError",
            ["found 'blocks.0' wrapped by FSDP1", "bare module"],
        ),
        (
            with_fsdp2_inside,
            {},
            "ConfigurationError",
            ["found 'blocks.0' wrapped by FSDP2", "bare module"],
        ),
        (
            with_another_size_on_rank_one,
            BLOCKS,
            "LayoutMismatchError",
            [
                "parameter embed.weight",
                "(11, 8)",
                "(11, 16)",
                "differ from rank 0: [1]",
                "Build the same model",
            ],
        ),
        (
            with_another_depth_on_rank_one,
            BLOCKS,
            "LayoutMismatchError",
            ["unit blocks.2", "nothing more"],
        ),
        (
            with_one_frozen_on_rank_one,
            BLOCKS,
            "LayoutMismatchError",
            ["blocks.2.down.bias", "trainable", "frozen"],
        ),
        (
            ReplacesAParameter,
            BLOCKS,
            "ConfigurationError",
            ["Linear.weight of unit blocks.1) was replaced", "copy_"],
        ),
        (
            ReplacesItsOwnParameter,
            BLOCKS,
            "ConfigurationError",
            ["Embedding.weight of unit (root)) was replaced"],
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_on_every_rank(
    world: Worlds, build: Callable[[], Any], arguments: dict[str, Any], name: str, words: list[str]
) -> None:
    answers = world(2).run(fit_and_catch, build, arguments)
    assert [(found, steps) for found, _, steps in answers] == [(name, 0)] * 2, answers
    for _, message, _ in answers:
        for word in words:
            assert word in message, message


def with_synchronized_layers() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(TinyConvNet())


@pytest.mark.parametrize(
    ("build", "options"), [(TinyConvNet, {"sync_batchnorm": True}), (with_synchronized_layers, {})]
)
@on_ranks(1)
def test_sync_batchnorm_on_the_cpu_is_refused_before_training(
    build: Callable[[], Any], options: dict[str, Any]
) -> None:
    model = build()
    message = r"no SyncBatchNorm \(sync_batchnorm=True\) .* found 2 layers: 'blocks.0.norm', 'blocks.1.norm'"
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(ShardedDP(), max_steps=2, **options).fit(model, image_loader(16))
    assert not model.losses and not any(
        isinstance(value, ShardTensor) for value in model.parameters()
    )


@on_ranks(2)
def test_sync_batchnorm_is_that_of_torch_and_does_not_disturb_evaluation() -> None:
    model = TinyConvNet()
    model.validation_step = lambda batch: model.loss(batch)
    trainer = make_trainer(
        ShardedDP(auto_wrap_policy={ConvBlock}), max_steps=2, sync_batchnorm=True
    )
    trainer.validate(model, image_loader(16), verbose=False)
    assert [type(block.norm) for block in model.blocks] == [nn.SyncBatchNorm] * 2
    with pytest.raises(ConfigurationError, match="expected no SyncBatchNorm"):
        trainer.fit(model, image_loader(16))


class Refuses:
    """A predicate that fails on one rank."""

    def __call__(self, name: str, module: nn.Module) -> bool:
        if dist.get_rank() == 1 and name == "blocks.1":
            raise KeyError("only here")
        return isinstance(module, Block)


def test_a_policy_that_fails_on_one_rank_stops_all(world: Worlds) -> None:
    for name, message, steps in world(2).run(
        fit_and_catch, TinyGpt, {"auto_wrap_policy": Refuses()}
    ):
        assert (name, steps) == ("RankError", 0)
        assert "preparing units failed on rank 1; every rank stops here" in message
        assert "KeyError: 'only here'" in message


class FailsOnce(TinyGpt):
    """Raises in the middle of its second step, the first time."""

    failed = False

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        if len(self.losses) == 1 and not self.failed:
            self.failed = True
            raise LookupError("a bad batch")
        return loss


def fail_and_fit_again() -> tuple[str, int]:
    model = FailsOnce()
    try:
        make_trainer(ShardedDP(**BLOCKS), max_steps=4).fit(model, token_loader(32))
    except LookupError as error:
        make_trainer(ShardedDP(**BLOCKS), max_steps=4).fit(model, token_loader(32))
        return str(error), len(model.losses)
    return "nothing", 0


def test_a_module_can_be_trained_again_after_its_step_has_failed(world: Worlds) -> None:
    assert world(2).run(fail_and_fit_again) == [("a bad batch", 1 + 4)] * 2
