"""Takeover: sharding of parameters that an earlier setup has sharded.

A module is set up again with new layers, under other options, or as a submodule of another module;
or it is a deep copy of a sharded one. Runtimes of its parts are dissolved, and their parameters are
sharded like those of a new module. No rank ever has the whole model: each parameter is a plain one
on the meta device until its new shard exists, and its values are gathered then, one parameter at a
time. Shards are in memory twice until all parameters have their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardeddp.engine.hooks import drop_forward_hooks, is_unit_hook
from shardeddp.engine.runtime import runtimes_around
from shardeddp.engine.unit import Unit, register
from shardeddp.errors import ConfigurationError, listing
from shardeddp.tensor.gradient_hooks import take_hooks
from shardeddp.tensor.shard_tensor import ShardTensor, gather
from shardeddp.tensor.unsharded import swap_bodies
from shardeddp.torch_private import storage_of, without_torch_function
from shardeddp.wrap.tree import registry_of

_FORMER = "_shardeddp_former"  # attribute of a parameter: its former sharded parameter
_AWAITED = "_shardeddp_awaits_values"  # attribute of a parameter: its shards have no values yet


def await_values(parameters: Iterable[torch.Tensor]) -> None:
    """Mark sharded parameters as awaiting their values."""
    for parameter in parameters:
        vars(parameter)[_AWAITED] = True


def note_values(parameters: Iterable[torch.Tensor]) -> None:
    """Remove the mark of :func:`await_values`."""
    for parameter in parameters:
        vars(parameter).pop(_AWAITED, None)


def is_taken_over(tensor: torch.Tensor) -> bool:
    """Return whether a tensor on the meta device is a parameter with values in earlier shards."""
    return _FORMER in vars(tensor)


class Takeover:
    """Replaces a module's sharded parameters by plain ones on the meta device, until it is sharded anew.

    All ranks do so with the same module.
    """

    def __init__(self, root: nn.Module) -> None:
        lost = [name for name, it in root.named_parameters() if _AWAITED in vars(it)]
        if lost:
            raise ConfigurationError(
                f"an earlier setup of this module has failed before {listing(lost)} had values "
                f"(they were built on the meta device): build the module anew"
            )
        runtimes = runtimes_around(root)
        self.roots = [root, *(it.root_module for it in runtimes if it.root_module is not root)]
        """Root modules of the former runtimes, this root first."""

        memory = {
            id(spec.parameter): spec.memory
            for runtime in runtimes
            for progress in runtime.progresses
            for spec in progress.unit.spec.parameters
        }
        held = list(_held_shards(root))
        for runtime in runtimes:
            runtime.dissolve()
        for module in (each for it in self.roots for each in it.modules()):
            drop_forward_hooks(module, is_unit_hook)
        self._parameters = [it for it in root.parameters() if isinstance(it, ShardTensor)]
        self._scripted = [
            (registry_of(module), name, parameter)
            for module in root.modules()
            if isinstance(module, torch.jit.ScriptModule)
            for name, parameter in module.named_parameters(recurse=False)
        ]
        places: dict[int, torch.Tensor] = {}  # by memory, which parameters will share again
        for parameter in self._parameters:
            origin = id(parameter.origin)
            key = memory.get(origin, origin)
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            self._meta_placeholder(parameter, places.setdefault(key, meta))
        self._register_scripted()
        for attributes, name, value in held:
            # A view of a parameter follows it, as in a module that was not sharded before.
            attributes[name] = value.detach() if isinstance(value, nn.Parameter) else value

    def __len__(self) -> int:
        return len(self._parameters)

    @torch.no_grad()
    def fill(self, units: Sequence[Unit]) -> None:
        """Fill new shards with the values of the former ones; a collective of all ranks."""
        for unit in units:
            for sharded in unit.sharded_parameters():
                former = vars(sharded).pop(_FORMER, None)
                if former is not None:
                    sharded.take_over(former)
        self._parameters.clear()

    @torch.no_grad()
    def make_plain(self) -> None:
        """Turn the parameters into whole plain ones, for a run of a single rank."""
        for parameter in self._parameters:
            former: ShardTensor = vars(parameter).pop(_FORMER)
            values = gather(former).to(parameter.dtype)
            self._replace(parameter, nn.Parameter(values, parameter.requires_grad))
            if former.grad is not None:
                whole = former.grad
                parameter.grad = whole.full_tensor() if isinstance(whole, ShardTensor) else whole
        self._register_scripted()
        self._parameters.clear()

    def restore_values(self) -> None:
        """Restore the former sharded parameters, without units, after a failed setup."""
        for parameter in self._parameters:
            former = vars(parameter).pop(_FORMER, None)
            if former is not None:
                former.forget_route()
                self._replace(parameter, former)
            else:  # it has its new shard already
                parameter.leave_unit(parameter.raw_local.clone())
        self._register_scripted()
        self._parameters.clear()

    def _meta_placeholder(self, parameter: ShardTensor, meta: torch.Tensor) -> None:
        plain = parameter.parameter_over(meta)
        self._replace(parameter, plain)
        vars(parameter)[_FORMER] = plain  # has the body of the sharded parameter now

    def _register_scripted(self) -> None:
        """Register parameters of scripted modules anew: C++ holds their bodies, not the objects."""
        for module, name, parameter in self._scripted:
            register(module, name, parameter)

    def _replace(self, parameter: torch.Tensor, body: torch.Tensor) -> None:
        # Hooks that route gradients of outside uses belong to the object, not to its body; they can
        # only be set at the swap.
        if isinstance(parameter, ShardTensor):
            parameter.route_gradient()
        with without_torch_function():
            take_hooks(parameter)  # type: ignore[arg-type]
            swap_bodies(parameter, body)


def _held_shards(root: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Find sharded tensors among a module's buffers and attributes; a collective of all ranks.

    Yields:
        Dictionary that holds the tensor, its name, and the parameter that it is a view of. A tensor
        computed from a parameter (an anchor, a Fisher information) is not sharded anew: its whole
        values are returned instead.
    """
    by_name = {it.spec.fqn: it for it in root.parameters() if isinstance(it, ShardTensor)}
    for module in root.modules():
        for attributes in (vars(module), module._buffers):
            for name, value in list(attributes.items()):
                if not isinstance(value, ShardTensor) or isinstance(value, nn.Parameter):
                    continue
                seen = by_name.get(value.spec.fqn)
                if seen is not None and storage_of(value.raw_local) == storage_of(seen.raw_local):
                    yield attributes, name, seen
                else:
                    yield attributes, name, value.full_tensor()
