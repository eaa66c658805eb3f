"""State of a custom loop: modules, optimizers and values by key, and the checkpoint that holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import permutations
from typing import Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from shardeddp.checkpoint.load_states import (
    load_optimizer,
    parameter_names,
    read_and_load_model,
    read_shards_ahead,
)
from shardeddp.checkpoint.schema import KEY, NAMES, OPTIMIZERS, VERSION, WEIGHTS
from shardeddp.checkpoint.snapshot import ParameterNames
from shardeddp.checkpoint.state_codec import versions_of, with_versions, without_prefix
from shardeddp.errors import ConfigurationError

_FABRIC = "fabric"  # entry of a checkpoint: keys of the objects, and the state without tensors


class LoopState:
    """Modules, optimizers and values of a loop by key, as ``fabric.save`` takes them."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = entries
        self._modules = [key for key, it in entries.items() if isinstance(it, nn.Module)]
        self._optimizers = [key for key, it in entries.items() if isinstance(it, Optimizer)]

    def plain(
        self, keeps: Mapping[str, Callable[[str, Any], bool]] | None = None
    ) -> dict[str, Any]:
        """Return the entries, with state dicts instead of stateful objects.

        ``keeps`` filters the state dict of each key, as in ``fabric.save(filter=...)``.
        """
        plain = {
            key: it.state_dict() if isinstance(it, Stateful) else it
            for key, it in self.entries.items()
        }
        for key, keep in (keeps or {}).items():
            kept = {name: it for name, it in plain[key].items() if keep(name, it)}
            plain[key] = with_versions(kept, versions_of(plain[key]))
        return plain

    def names(self) -> ParameterNames:
        """Return the fqns of each optimizer's parameters."""
        return parameter_names(self._root, [self.entries[key] for key in self._optimizers])

    def checkpoint(self, version: str) -> dict[str, Any]:
        """Return a checkpoint in the Trainer's form, of this version of Lightning."""
        plain = self.plain()
        rest = {k: it for k, it in plain.items() if k not in (*self._modules, *self._optimizers)}
        return {
            **{key: it for key, it in rest.items() if key in ("epoch", "global_step")},
            VERSION: version,
            WEIGHTS: self._root.state_dict(),
            OPTIMIZERS: [plain[key] for key in self._optimizers],
            "lr_schedulers": [],
            KEY: {NAMES: self.names()},
            _FABRIC: {"modules": self._modules, "optimizers": self._optimizers, "state": rest},
        }

    def found_in(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's entries by key; one of the Trainer gets the keys of this state."""
        if not {WEIGHTS, VERSION} <= checkpoint.keys():
            return checkpoint
        rest = {key: it for key, it in checkpoint.items() if key not in (WEIGHTS, OPTIMIZERS, KEY)}
        own = {"modules": self._modules, "optimizers": self._optimizers, "state": rest}
        saved = checkpoint.get(_FABRIC, own)
        weights, several = checkpoint[WEIGHTS], len(saved["modules"]) > 1
        modules = {key: _below(f"{key}." * several, weights) for key in saved["modules"]}
        optimizers = zip(saved["optimizers"], checkpoint.get(OPTIMIZERS, ()), strict=False)
        return {**saved["state"], **modules, **dict(optimizers)}

    def load(
        self,
        found: dict[str, Any],
        checkpoint: Mapping[str, Any],
        *,
        strict: bool,
        cast: bool,
    ) -> dict[str, Any]:
        """Load the entries of a checkpoint into modules, optimizers and stateful objects.

        Return new values of all other keys. Each loaded or returned entry is removed from
        ``found``.
        """
        root, saved = self._root, _saved_names(checkpoint)
        values: dict[str, Any] = {}
        for key, it in self.entries.items():
            if key not in found:
                continue
            value = found.pop(key)
            if isinstance(it, nn.Module):
                read_and_load_model(it, value, strict, cast)
            elif isinstance(it, Optimizer):
                read_shards_ahead([value], root)
                load_optimizer(it, value, saved.get(key), parameter_names(root, [it])[0])
            elif isinstance(it, Stateful):
                it.load_state_dict(value)
            else:
                values[key] = value
        return values

    @cached_property
    def _root(self) -> nn.Module:
        """Only module, or a parent of all modules with their keys as names."""
        modules = {key: self.entries[key] for key in self._modules}
        if len(modules) == 1:
            return next(iter(modules.values()))
        for key, other in permutations(modules, 2):
            if other.startswith(f"{key}."):
                raise ConfigurationError(
                    f"modules {key!r} and {other!r} would be saved under the same names: call one "
                    f"of them otherwise"
                )
        root = nn.Module()
        root._modules.update(modules)  # any key is fine; nn.ModuleDict refuses dots and methods
        return root


def _saved_names(checkpoint: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return the parameter names of each optimizer saved by Fabric, by key."""
    keys, names = checkpoint.get(_FABRIC, {}).get("optimizers", ()), checkpoint.get(KEY, {})
    return dict(zip(keys, names.get(NAMES, ()), strict=False))


def _below(prefix: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: it for name, it in weights.items() if name.startswith(prefix)}
    return without_prefix(with_versions(own, versions_of(weights)), prefix)
