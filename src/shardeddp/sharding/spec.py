"""What a unit is before it is sharded: a module and the parameters that will be gathered together."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter object and every place of the model where it is registered.

    A tied parameter has several owners and still one spec: it is sharded, gathered and reduced once.
    """

    fqn: str
    """The first name that ``named_parameters`` gives it, seen from the root module."""

    parameter: nn.Parameter
    """The object itself; its identity survives sharding."""

    owners: tuple[tuple[nn.Module, str], ...]
    """Every (module, attribute name) under which the object is registered, in module order."""

    shares_memory_with: nn.Parameter | None = None
    """An earlier parameter, another object, whose memory it has (``head.weight.data = embedding.weight.data``)."""

    compute_in: torch.dtype | None = None
    """Dtype that the parameter is gathered in and computes with; None: its own."""

    is_autocast_copy: bool = False
    """Whether it is gathered for the forward of its owners alone; see ``autocast_copies.py``."""

    reduce_in: torch.dtype | None = None
    """Dtype that its gradient is reduced in; None: float32, or its own where that is wider."""

    @property
    def memory(self) -> int:
        """Equal for parameters that have the same memory."""
        return id(self.parameter if self.shares_memory_with is None else self.shares_memory_with)

    @property
    def dtype(self) -> torch.dtype:
        """Of the main shard, the gradient that the user sees and the optimizer's states."""
        return self.parameter.dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """Of the gathered parameter."""
        return self.compute_in or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of the gradient while it is reduced."""
        if self.reduce_in is not None or not (self.dtype.is_floating_point or self.dtype.is_complex):
            return self.reduce_in or self.dtype
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """A module whose parameters are gathered and released together; the root's spec holds what no inner unit took."""

    name: str
    """The module's fqn, ``""`` for the root."""

    module: nn.Module

    parameters: tuple[ParameterSpec, ...]
    """In module order, without those that an inner unit holds."""

    idle: tuple[ParameterSpec, ...] = ()
    """Parameters of a single rank that would neither be cut nor gathered nor cast: they stay what they are."""

    @property
    def label(self) -> str:
        """The name as people read it."""
        return self.name or "(root)"

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(spec.parameter.numel() for spec in self.parameters)


def join(prefix: str, name: str) -> str:
    """The fqn of the child ``name`` of the module ``prefix``, which is ``""`` for the root."""
    return f"{prefix}.{name}" if prefix else name
