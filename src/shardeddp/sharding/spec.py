"""What a unit is before it is sharded: a module and the parameters that will be gathered together."""

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """A module whose parameters are gathered and released together; the root's spec holds what no inner unit took."""

    name: str
    """The module's fqn, ``""`` for the root."""

    module: nn.Module

    parameters: tuple[ParameterSpec, ...]
    """In module order, without those that an inner unit holds."""

    @property
    def label(self) -> str:
        """The name as people read it."""
        return self.name or "(root)"

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(spec.parameter.numel() for spec in self.parameters)
