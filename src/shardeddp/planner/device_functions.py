"""Functions of torch as GPUs compute them, on tensors of the host without memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from shardeddp.torch_private import FakeTensor, HigherOrderOperator, flex_attention_device, pytree

_IN_FLOAT32 = {
    "cdist", "exp", "expm1", "group_norm", "layer_norm", "log", "log10", "log1p", "log2", "norm", "normalize", "pow",
    "__pow__", "reciprocal", "renorm", "rsqrt", "softplus",
}  # fmt: skip
"""Functions that autocast computes in float32 on GPUs, and not on the host (torch.amp's lists)."""

_TO_FLOAT32 = {"cumprod", "cumsum", "log_softmax", "prod", "softmax", "softmin", "sum"}
"""The same, with operands in their own dtype and float32 results."""


class DeviceFunctions(TorchFunctionMode):
    """Mode in which functions of torch compute as on GPUs; it opens higher-order operators.

    On the host an RMS norm of vectors and weights of one dtype is seven kernels, and saves copies
    in float32; and autocast leaves norms and softmax in bfloat16.
    """

    def __init__(self, before_gradients: Callable[[Any, Any], None]) -> None:
        """``before_gradients`` is called with the outputs and inputs of ``torch.autograd.grad``."""
        super().__init__()
        self._before_gradients = before_gradients

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            self._before_gradients(*args[:2])
        if func in _READS and isinstance(args[0], FakeTensor):
            return _READS[func](*args, **kwargs)
        if func is _ATTENTION:
            return _without_dropout(*args, **kwargs)
        if func in (torch.rms_norm, F.rms_norm):
            given = inspect.signature(F.rms_norm).bind(*args, **kwargs).arguments
            x, weight = given["input"], given.get("weight")
            if weight is None or weight.dtype == x.dtype:
                return _RmsNorm.apply(x, weight, len(given["normalized_shape"]))
        name = getattr(func, "__name__", "")
        if name in _IN_FLOAT32 | _TO_FLOAT32 and torch.is_autocast_enabled("cpu"):
            if name in _IN_FLOAT32:
                args, kwargs = pytree.tree_map(_in_float32, (args, kwargs))
            elif kwargs.get("dtype") is None and _is_low(args[0]):
                kwargs = {**kwargs, "dtype": torch.float32}
        if isinstance(func, HigherOrderOperator) and func.name() in _WHAT_IT_CALLS:
            with self:
                return _WHAT_IT_CALLS[func.name()](*args, **kwargs)
        return func(*args, **kwargs)


def _formatted(tensor: torch.Tensor, spec: str) -> str:
    return format(str(tensor) if tensor.ndim else tensor.item(), spec)


def _numpy(tensor: torch.Tensor, *_: Any, dtype: Any = None, **__: Any) -> np.ndarray[Any, Any]:
    if not tensor.is_floating_point():
        return np.array(tensor.tolist(), dtype)  # as far as its values are known
    # Numpy has no bfloat16, and torch refuses it, too.
    known = {torch.float64: np.float64, torch.float16: np.float16}
    value = torch.ops.aten._local_scalar_dense(tensor.detach())  # read as item() reads one
    one = np.full((), value, dtype or known.get(tensor.dtype, np.float32))
    ones = np.broadcast_to(one, tensor.shape)
    return ones.copy() if tensor.numel() <= _COPIED else ones


def _array(tensor: torch.Tensor, dtype: Any = None) -> np.ndarray[Any, Any]:
    return _numpy(tensor, dtype=dtype)


_COPIED = 1 << 20
"""Largest number of ones that take memory; more of them cannot be written to."""

_READS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__array__: _array,
    torch.Tensor.__format__: _formatted,
    torch.Tensor.numpy: _numpy,
}
"""Functions that read values of a tensor as they are known; floating-point numbers are taken as 1."""


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16


def _in_float32(value: Any) -> Any:
    return value.float() if _is_low(value) else value


def _cond(predicate: Any, first: Any, second: Any, operands: Sequence[Any]) -> Any:
    return first(*operands)


def _while_loop(condition: Any, body: Any, carried: Sequence[Any], others: Sequence[Any]) -> Any:
    return body(*carried, *others)


def _scan(combine: Any, carried: Sequence[Any], xs: Sequence[Any], others: Sequence[Any]) -> Any:
    count, made = len(carried), list[Any]()
    for step in zip(*xs, strict=True):
        out = combine(*carried, *step, *others)
        carried, made = out[:count], [*made, out[count:]]
    return [*carried, *map(torch.stack, zip(*made, strict=True))]


def _flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> Any:
    shape = query.shape[:-1]
    rest = (torch.empty(shape, dtype=torch.float32) for _ in range(2))
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True), *rest


def _allow(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    pass


_ATTENTION = F.scaled_dot_product_attention


def _without_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute attention without dropout: GPUs draw it in the kernel, the host keeps all scores."""
    return _ATTENTION(query, key, value, attn_mask, 0.0, *args, **kwargs)


@contextmanager
def attention_of_devices() -> Generator[None]:
    """Let functions of torch call attention as GPUs do; a mode sees only what users call."""
    F.scaled_dot_product_attention = _without_dropout
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _ATTENTION


@contextmanager
def flex_attention_on_host() -> Generator[None]:
    """Disable torch's check that refuses its backward on the host; no backward runs here."""
    check = flex_attention_device.current
    flex_attention_device.replace(_allow)
    try:
        yield
    finally:
        flex_attention_device.replace(check)


_WHAT_IT_CALLS: dict[str, Callable[..., Any]] = {
    "cond": _cond,  # the first branch
    "flex_attention": _flex_attention,  # attention to all keys
    "scan": _scan,
    "while_loop": _while_loop,  # one iteration
}


class _RmsNorm(torch.autograd.Function):
    """RMS norm with correct shapes, dtypes and saved tensors: input, weight, scale per vector."""

    @staticmethod
    @override
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        scales = torch.empty(*x.shape[:-dims], *[1] * dims, dtype=torch.float32)
        ctx.save_for_backward(x, scales, weight)
        return x.clone() if weight is None else x * weight

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None
