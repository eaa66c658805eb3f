"""Options that are more than a number or a name, as frozen dataclasses that YAML can write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from shardeddp.errors import ConfigurationError

DTypeLike: TypeAlias = torch.dtype | str | None
"""A dtype, or its name: ``bfloat16``, also ``bf16``, ``fp16``, ``fp32``, ``fp64``."""

ModuleClasses: TypeAlias = Sequence[type[nn.Module] | str]
"""Module classes, or their names or import paths."""


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """In which dtypes parameters travel and compute, and gradients are reduced; main shards keep their own dtype.

    A dtype is written as ``torch.bfloat16`` or as the name ``bfloat16`` (also ``bf16``, ``fp16``, ``fp32``, ``fp64``).
    """

    param_dtype: DTypeLike = None
    """Of gathered parameters, in which modules compute. None: each parameter's own."""

    reduce_dtype: DTypeLike = None
    """Of gradients while they are averaged. None: float32 for parameters of at most that width, else their own."""

    output_dtype: DTypeLike = None
    """Of floating-point tensors that the model's outermost modules return. None: as they come."""

    buffer_dtype: DTypeLike = None
    """Of floating-point buffers. None: each buffer's own."""

    cast_forward_inputs: bool = True
    """Cast floating-point inputs of units and of the model's outermost modules to ``param_dtype``."""

    keep_fp32: ModuleClasses = ()
    """Classes of modules whose parameters and computation stay in the parameters' own dtype: norms, routers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Which modules keep only their inputs in forward and are computed again in backward.

    Args:
        modules: Written as ``auto_wrap_policy`` is: ``auto`` (the repeated blocks of the model), classes or their
            names, a policy (in YAML ``class_path`` and ``init_args``), a function of (name, module). Of modules inside
            each other the outermost is taken.
        every: Every n-th of those modules, in module order, beginning with the first.
        save_ops: Selective: operations whose results are kept instead of computed again, as names (``matmul`` and
            ``attention`` for all of their kind, ``aten.mm.default``, ``aten.mm``, ``mm``) or objects of ``torch.ops``;
            or a policy function, as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it, or its
            import path. Nothing: everything is computed again.
        cpu_offload: Keep the inputs of those modules in host memory between forward and backward. What ``save_ops``
            keeps stays on the device.
    """

    modules: Any = "auto"
    every: int = 1
    save_ops: str | Sequence[Any] | Callable[..., Any] = ()
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ConfigurationError(
                f"ActivationCheckpointing.every: expected 1 (each) or another number above it, found {self.every!r}."
            )
        if type(self.cpu_offload) is not bool:
            raise ConfigurationError(
                f"ActivationCheckpointing.cpu_offload: expected true or false, found {self.cpu_offload!r}."
            )


@dataclass(frozen=True, kw_only=True)
class CPUOffload:
    """What lives in host memory instead of on the device."""

    params: bool = False
    """Main shards, gradient shards and optimizer states; the optimizer steps on the host."""

    optimizer: bool = False
    """Optimizer states alone; the optimizer steps on the host, on copies of parameters and gradients."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How sharded checkpoints are written, and what may be read."""

    asynchronous: bool = False
    """Write in a thread while training goes on, from one copy of the shards in host memory."""

    durability: Literal["disk", "process"] = "disk"
    """``disk``: a save that has returned survives a power loss. ``process``: nothing is synced; it survives the end of
    the process only."""

    permissions: Literal["private", "umask"] = "private"
    """``private``: files are for their owner alone (0600, directories 0700). ``umask``: as the umask has it."""

    zip_crc: bool = True
    """Write the checksums that tools other than this package look for. Costs about 0.4 s of a core per GB."""

    cast: bool = False
    """Load tensors of another dtype than the model's by casting them."""

    foreign: bool = False
    """Also load directories that other tools wrote (FSDP, FSDP2, plain ``torch.distributed.checkpoint``): their indexes
    are pickles, which are read by a reader that knows a few harmless types only."""

    trust_pickle: bool = False
    """Unpickle foreign indexes as they are: whoever wrote them can run code here."""

    def __post_init__(self) -> None:
        for name, known in (("durability", ("disk", "process")), ("permissions", ("private", "umask"))):
            if getattr(self, name) not in known:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")
        if self.trust_pickle and not self.foreign:
            raise ConfigurationError("trust_pickle=True goes with foreign=True: no pickle of our own is ever read")
