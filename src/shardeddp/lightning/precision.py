"""Precision: Lightning's plugins with global gradient clipping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from shardeddp.errors import ConfigurationError
from shardeddp.lightning.api import (
    DoublePrecision,
    GradClipAlgorithmType,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from shardeddp.optim.clip import clip_grad_norm_, clip_grad_value_

# -- Plugins: stock precisions with global gradient clipping

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Dtype of the autocast by the Trainer's precision."""


class ShardedPrecision(Precision):
    """Lightning's precision plugin that clips sharded gradients by their global norm.

    By itself it computes in float32; other precisions inherit from this class and the stock one, so
    that code that asks for the stock class finds it.
    """

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of the autocast around every step; None: no autocast."""
        return AUTOCAST.get(str(self.precision))

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm_(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value_(self.main_params(optimizer), clip_val)


class _HalfPrecision(ShardedPrecision, HalfPrecision):
    """``bf16-true`` and ``16-true``."""


class _DoublePrecision(ShardedPrecision, DoublePrecision):
    """``64-true``."""


class ShardedMixedPrecision(ShardedPrecision, MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``: autocast around every step, and a loss scaler for float16.

    Main shards, gradients and optimizer states stay in float32. All ranks skip a step together: the
    scaler's search for infinities is global if gradients are sharded.
    """

    # Lightning saves the scaler's state under this name. The stock plugin's name lets a run under
    # one strategy resume under another.
    __qualname__ = "MixedPrecision"

    @override
    def __reduce__(self) -> Any:
        """Pickle without that name, under which the module has the stock class."""
        return _sharded, (MixedPrecision, vars(self))

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
        # The stock class refuses fused optimizers without a scaler, too.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


SHARDED: Mapping[type[Precision], type[ShardedPrecision]] = {
    Precision: ShardedPrecision,
    HalfPrecision: _HalfPrecision,
    DoublePrecision: _DoublePrecision,
    MixedPrecision: ShardedMixedPrecision,
}
"""Plugins of a sharded run by the stock plugin."""


def shard_precision(plugin: Precision | None) -> Precision:
    """Return the plugin of a sharded run in which Lightning has chosen ``plugin``.

    It has the attributes of the stock plugin. Plugins that Lightning does not ship are returned
    unchanged.

    Raises:
        ConfigurationError: ShardedDP does not support the precision.
    """
    if plugin is None:
        return ShardedPrecision()
    if type(plugin) in SHARDED:
        return _sharded(type(plugin), vars(plugin))
    if type(plugin).__module__.startswith(("lightning.", "pytorch_lightning.")):
        raise ConfigurationError(
            f"ShardedDP does not work with {type(plugin).__name__}; use precision='32-true', "
            f"'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true'"
        )
    return plugin


def _sharded(stock: type[Precision], attributes: Mapping[str, Any]) -> ShardedPrecision:
    made = SHARDED[stock].__new__(SHARDED[stock])
    vars(made).update(attributes)
    return made
