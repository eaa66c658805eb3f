"""Every hook of module, callback and data module is called in the order of DDP, and sees its device and dtype."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from shardeddp import ShardedDP
from support.tasks import Block, EvaluatedGpt, token_loader
from support.trainers import make_trainer
from world import Worlds

pytestmark = pytest.mark.timeout(60)

Calls = list[str]
# What Lightning calls that does not begin with "on_".
OTHERS = {
    "setup",
    "teardown",
    "prepare_data",
    "state_dict",
    "load_state_dict",
    "configure_model",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "backward",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "transfer_batch_to_device",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
}
# Called by torch too, or by whoever wants to know something: not a hook of the module.
NOT_HERE = {
    "LightningModule.state_dict",
    "LightningModule.load_state_dict",
    "LightningModule.on_gpu",
}


def recording(base: type, kind: type, calls: Calls) -> type:
    """A subclass of ``base`` that notes every call of a hook of ``kind``, and what a module then says of itself."""
    names = {name for name in dir(kind) if name in OTHERS or name.startswith("on_")}
    names = {
        name
        for name in names
        if f"{kind.__name__}.{name}" not in NOT_HERE and callable(getattr(kind, name))
    }

    def note(name: str) -> Callable[..., Any]:
        original = getattr(base, name)

        @functools.wraps(original)
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            place = f" on {self.device} in {self.dtype}" if kind is LightningModule else ""
            calls.append(f"{kind.__name__}.{name}{place}")
            return original(self, *args, **kwargs)

        return hook

    return type(f"Recording{kind.__name__}", (base,), {name: note(name) for name in names})


class Tokens(LightningDataModule):
    def loader(self) -> DataLoader[Tensor]:
        return token_loader(24)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"state": 1}


class Remembers(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"state": 1}


class FailsAtLast(EvaluatedGpt):
    def test_step(self, batch: Tensor, batch_index: int) -> None:
        raise LookupError("a bad batch")


def call_everything(make: Callable[[], Any], folder: str) -> dict[str, Calls]:
    """By what was asked of the Trainer, the hooks that it has called."""
    calls, found = Calls(), dict[str, Calls]()

    def parts(model: type[LightningModule] = EvaluatedGpt) -> tuple[Any, Any, Any]:
        bases = [(model, LightningModule), (Tokens, LightningDataModule), (Remembers, Callback)]
        module, data, callback = (recording(base, kind, calls)() for base, kind in bases)
        keeper = ModelCheckpoint(folder, "{epoch}", monitor="val", save_last=True)
        trainer = make_trainer(
            make(),
            max_epochs=2,
            callbacks=[callback, keeper],
            enable_checkpointing=True,
            num_sanity_val_steps=1,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            precision="bf16-true",  # so that there is something to be seen in `dtype`
        )
        return module, data, trainer

    def take(name: str) -> None:
        found[name] = list(calls)
        calls.clear()

    module, data, trainer = parts()
    trainer.fit(module, data)
    take("fit")
    for stage in ("validate", "test", "predict"):
        getattr(trainer, stage)(module, data, **({} if stage == "predict" else {"verbose": False}))
        take(stage)
    trainer.test(module, data, ckpt_path="best", verbose=False)
    take("test from a checkpoint")
    module, data, trainer = parts()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data, ckpt_path=f"{folder}/last.ckpt")
    take("resumed fit")
    module, data, trainer = parts(FailsAtLast)
    with pytest.raises(LookupError):
        trainer.test(module, data, verbose=False)
    take("a test that fails")
    return found


@pytest.mark.long
@pytest.mark.slow
def test_hooks_are_called_in_the_order_of_ddp_and_see_its_device_and_dtype(
    world: Worlds, tmp_path: Path
) -> None:
    found = world(2).run(call_everything, sharded, str(tmp_path / "sharded"))
    expected = world(2).run(call_everything, DDPStrategy, str(tmp_path / "ddp"))
    for ours, theirs in zip(found, expected, strict=True):
        for name, calls in theirs.items():
            assert ours[name] == calls, name
    assert "LightningModule.on_fit_start on cpu in torch.bfloat16" in expected[0]["fit"]
    assert (
        len(set(expected[0]["fit"])) > 60
        and "Callback.on_exception" in expected[0]["a test that fails"]
    )


def sharded() -> ShardedDP:
    return ShardedDP(auto_wrap_policy={Block})
