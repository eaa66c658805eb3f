"""Scripted and traced modules: their parameters live in C++, where they can be read and replaced like any other's."""

from __future__ import annotations

import torch
from torch import nn


class ScriptedParameters(dict[str, torch.Tensor | None]):
    """The parameters of one scripted module, by name; nothing is kept here.

    Args:
        module: The scripted module.
    """

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        super().__init__()
        self._module = module

    def get(self, name: str, default: torch.Tensor | None = None) -> torch.Tensor | None:  # type: ignore[override]  # noqa: D102
        parameters = self._module._parameters
        return parameters[name] if name in parameters else default  # noqa: SIM401  # what torch has here has no get()

    def __getitem__(self, name: str) -> torch.Tensor | None:
        return self._module._parameters[name]

    def __setitem__(self, name: str, parameter: torch.Tensor | None) -> None:
        self._module._parameters[name] = parameter  # type: ignore[assignment]


class ScriptedRegistry(nn.Module):
    """Stands for a scripted module where parameters are registered.

    Args:
        module: The scripted module.
    """

    scripted: torch.jit.ScriptModule

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        super().__init__()
        vars(self).update(_parameters=ScriptedParameters(module), scripted=module)


def module_behind(owner: nn.Module) -> nn.Module:
    """The module of the model that an owner of parameters stands for, or is."""
    return owner.scripted if isinstance(owner, ScriptedRegistry) else owner


def registry_of(module: nn.Module) -> nn.Module:
    """The object whose ``_parameters`` decide what a module computes with."""
    return ScriptedRegistry(module) if isinstance(module, torch.jit.ScriptModule) else module
