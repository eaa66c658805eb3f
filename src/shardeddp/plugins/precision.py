"""ShardedPrecision: a stock Lightning precision whose gradient clipping is global."""

from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from shardeddp.errors import ConfigurationError
from shardeddp.sharding.gradients import clip_grad_norm_, clip_grad_value_


class ShardedPrecision(Precision):
    """Does what a stock precision plugin does, and clips sharded gradients by their global norm.

    Under ``bf16-mixed`` parameters, gradients and optimizer states are fp32, and operations run under autocast.

    Args:
        stock: The plugin that decides on dtypes.
    """

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


def shard_precision(plugin: Precision | None) -> Precision:
    """The plugin that a sharded run uses where Lightning has chosen ``plugin``.

    Plugins that Lightning does not ship are taken as they are.

    Raises:
        ConfigurationError: The precision cannot be had.
    """
    if plugin is None or type(plugin) in (Precision, DoublePrecision, HalfPrecision):
        return ShardedPrecision(plugin)
    if type(plugin) is MixedPrecision:
        if plugin.precision == "bf16-mixed":
            return ShardedPrecision(plugin)
        raise ConfigurationError(
            f"precision={plugin.precision!r} needs a loss scaler that all ranks share, which ShardedDP does not have "
            f"yet; use 'bf16-mixed', 'bf16-true', '32-true' or '64-true'"
        )
    if type(plugin).__module__.startswith(("lightning.", "pytorch_lightning.")):
        raise ConfigurationError(
            f"ShardedDP does not work with {type(plugin).__name__}; use precision='32-true', 'bf16-mixed', 'bf16-true' "
            f"or '64-true'"
        )
    return plugin
