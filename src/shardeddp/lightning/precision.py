"""Precision plugins: a stock Lightning precision whose gradient clipping is global."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    DoublePrecision,
    GradClipAlgorithmType,
    HalfPrecision,
    LightningModule,
    MixedPrecision,
    Optimizable,
    Precision,
    Steppable,
)
from shardeddp.optim.clip import clip_grad_norm_, clip_grad_value_


class ShardedPrecision(Precision):
    """Stock precision plugin that clips sharded gradients by their global norm.

    Args:
        stock: The plugin that decides on dtypes.
    """

    autocast: torch.dtype | None = None
    """Dtype of the autocast that surrounds every step, if there is one."""

    def __init__(self, stock: Precision | None = None) -> None:
        super().__init__()
        self._stock = Precision() if stock is None else stock
        self.precision = self._stock.precision

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return self._stock.convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return self._stock.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self._stock.convert_output(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._stock.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._stock.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self._stock.forward_context()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm_(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value_(self.main_params(optimizer), clip_val)


class ShardedMixedPrecision(ShardedPrecision):
    """``bf16-mixed`` and ``16-mixed``: autocast around every step, and a loss scaler for float16.

    Main shards, gradients and optimizer states stay in float32. Whether a step is skipped is
    decided by all ranks: the scaler's search for infinities is a global one wherever gradients are
    sharded.

    Args:
        stock: Lightning's plugin, with its scaler.
    """

    # The key under which Lightning saves the scaler's state, so that runs under other strategies
    # can be resumed.
    __qualname__ = "MixedPrecision"

    def __init__(self, stock: MixedPrecision) -> None:
        super().__init__(stock)
        self._mixed = stock
        self.autocast = torch.bfloat16 if stock.precision == "bf16-mixed" else torch.float16

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler; None for ``bf16-mixed``."""
        return self._mixed.scaler

    @override
    def pre_backward(self, tensor: torch.Tensor, module: LightningModule) -> torch.Tensor:
        return self._mixed.pre_backward(tensor, module)

    @override
    def optimizer_step(
        self,
        optimizer: Steppable,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        return self._mixed.optimizer_step(cast(Optimizable, optimizer), model, closure, **kwargs)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if (
            self.scaler is not None
            and clip_val > 0
            and vars(optimizer).get("_step_supports_amp_scaling")
        ):
            raise ConfigurationError(
                f"gradient_clip_val={clip_val} with precision='16-mixed': "
                f"{type(optimizer).__name__}(fused=True) divides gradients by the loss scale "
                f"inside its step, after they would have been clipped; make it with fused=False"
            )
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._mixed.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._mixed.load_state_dict(state_dict)


def shard_precision(plugin: Precision | None) -> Precision:
    """The plugin that a sharded run uses where Lightning has chosen ``plugin``.

    Plugins that Lightning does not ship are taken as they are.

    Raises:
        ConfigurationError: The precision cannot be had.
    """
    if plugin is None or type(plugin) in (Precision, DoublePrecision, HalfPrecision):
        return ShardedPrecision(plugin)
    if type(plugin) is MixedPrecision:
        return ShardedMixedPrecision(plugin)
    if type(plugin).__module__.startswith(("lightning.", "pytorch_lightning.")):
        raise ConfigurationError(
            f"ShardedDP does not work with {type(plugin).__name__}; use precision='32-true', "
            f"'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true'"
        )
    return plugin
