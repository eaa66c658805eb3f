"""Averages: the copies of a model that callbacks keep (EMA, SWA) are sharded like the model, and loaded like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim.swa_utils import AveragedModel

from shardeddp.checkpoint.reading.restore import load_model
from shardeddp.comm import Mesh
from shardeddp.errors import ConfigurationError
from shardeddp.lightning_api import Callback, LightningModule, StochasticWeightAveraging, Trainer, callbacks_of, private
from shardeddp.sharding.buffers import BufferSync
from shardeddp.sharding.hooks import runtime_of
from shardeddp.sharding.shard_tensor import ShardTensor


class _Average(NamedTuple):
    holder: nn.Module  # what a callback has: an AveragedModel around the copy, or the copy itself
    copy: nn.Module
    device: torch.device | None  # where the callback wants it; None: where the model is


class Averages:
    """The averages that the callbacks of a Trainer keep of its module, from the reading of a checkpoint on.

    Callbacks copy the module before it is sharded, and then go through the parameters of both side by side. When the
    elements of both lie alike, that is arithmetic on shards: nothing is gathered to average, to swap or to save.
    """

    def __init__(self) -> None:
        self._loads: list[Callable[[], None]] = []
        self._replaced: list[
            tuple[nn.Module, str, Any]
        ] = []  # methods of instances, with those that users have put there
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._buffers: list[BufferSync] = []

    def keep_in_place(self, trainer: Trainer, module: LightningModule) -> None:
        """Let the copy that a callback is about to take, and to move to the device whole, stay where the module is.

        Args:
            trainer: Whose callbacks are about to be set up.
            module: Theirs; a method that its copies take over waits in it until it is sharded.
        """
        if runtime_of(module) is None and any(_moves_its_copy(callback) for callback in callbacks_of(trainer)):
            self._replace(module, "to", MethodType(_stay, module))

    def await_shards(self, trainer: Trainer, module: LightningModule, cast: bool) -> None:
        """Let what callbacks load into a module and its averages wait until there are shards to load it into.

        Args:
            trainer: Whose callbacks are about to take their part of a checkpoint.
            module: Theirs, whose own part waits already.
            cast: Whether dtypes may differ.
        """
        if runtime_of(module) is not None:
            return
        for loads in {id(each): each for it in _averages(trainer, module) for each in (it.holder, it.copy)}.values():
            self._postpone(loads, cast)
        self._postpone(module, cast)
        self._versions = [(name, parameter, parameter._version) for name, parameter in module.named_parameters()]

    def _postpone(self, module: nn.Module, cast: bool) -> None:
        def remember(state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
            self._loads.append(partial(load_model, module, state_dict, strict, cast))
            return _IncompatibleKeys([], [])

        self._replace(module, "load_state_dict", remember)

    def _replace(self, module: nn.Module, name: str, method: Any) -> None:
        self._replaced.append((module, name, vars(module).get(name)))
        vars(module)[name] = method

    def meet_shards(self, module: LightningModule) -> None:
        """Callbacks have had their part, and the module is about to be sharded: loads reach it at once again.

        Args:
            module: The one.

        Raises:
            ConfigurationError: A callback has written to the module in a way that its checkpoint is going to undo.
        """
        while self._replaced:
            each, name, own = self._replaced.pop()
            if own is None:
                vars(each).pop(name, None)
            else:
                vars(each)[name] = own
        written = [name for name, parameter, version in self._versions if parameter._version != version]
        self._versions = []
        if written:
            raise ConfigurationError(
                f"a callback has written to parameter {written[0]} in on_load_checkpoint() or load_state_dict(), where "
                f"the checkpoint's own values are still to be loaded over it. Use pl_module.load_state_dict() there, "
                f"or write in on_fit_start()"
            )

    def shard(self, trainer: Trainer, module: LightningModule, mesh: Mesh) -> Callable[[], None] | None:
        """Shard the averages of a module that has just been sharded; a collective of all ranks.

        Args:
            trainer: Whose callbacks keep them.
            module: The sharded module.
            mesh: Its ranks.

        Returns:
            What loads into module and averages what had to wait; None if there is nothing.

        Raises:
            ConfigurationError: An average is of another model than is trained.
        """
        for average in _averages(trainer, module):
            vars(average.copy).pop("to", None)
            _check_same(average.copy, module)
            _shard_like(average, module, mesh)
            self._buffers.append(BufferSync(average.copy, mesh))
        loads, self._loads = self._loads, []
        return partial(_run_all, loads) if loads else None

    def sync_buffers(self) -> None:
        """Give rank 0's averaged buffers to all ranks, as all of them are about to evaluate the average."""
        for buffers in self._buffers:
            buffers.sync()

    def forget(self, module: LightningModule) -> None:
        """Let everything go that a run of a module has left; averages stay with their callbacks."""
        self._versions = []
        self.meet_shards(module)
        self._loads, self._buffers = [], []


def _moves_its_copy(callback: Callback) -> bool:
    # By name: older releases of Lightning do not have it.
    return any(base.__name__ == "WeightAveraging" for base in type(callback).__mro__)


def _stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """In the place of ``Module.to``: converts, and does not move."""
    dtype = torch._C._nn._parse_to(*args, **kwargs)[1]  # type: ignore[attr-defined]  # as Module.to reads its arguments
    return module if dtype is None else type(module).to(module, dtype)


def _averages(trainer: Trainer, module: LightningModule) -> Iterator[_Average]:
    for callback in callbacks_of(trainer):
        where = private.averaging_device(callback)
        for value in vars(callback).values():
            if isinstance(value, AveragedModel) and type(value.module) is type(module):
                yield _Average(value, value.module, where)
            elif isinstance(callback, StochasticWeightAveraging) and type(value) is type(module):
                yield _Average(value, value, where)


def _check_same(copy: nn.Module, module: LightningModule) -> None:
    mine, theirs = (
        {name: parameter.shape for name, parameter in each.named_parameters(remove_duplicate=False)}
        for each in (copy, module)
    )
    if mine != theirs:
        name = next(name for name in (*theirs, *mine) if mine.get(name) != theirs.get(name))
        raise ConfigurationError(
            f"a callback averages a copy of {type(module).__name__} that is not like the module: expected {name} of "
            f"shape {tuple(theirs.get(name, ()))}, found {tuple(mine[name]) if name in mine else 'nothing'}. The copy "
            f"is taken in the callback's setup(): build all layers before that, in __init__ instead of "
            f"configure_model(), or use WeightAveraging, which calls configure_model() first"
        )


@torch.no_grad()
def _shard_like(average: _Average, module: LightningModule, mesh: Mesh) -> None:
    done: dict[int, tuple[torch.Tensor, ShardTensor]] = {}  # with the whole parameter, whose id is not to be reused
    for path, owner in average.copy.named_modules(remove_duplicate=False):
        for name, mine in owner._parameters.items():
            theirs = module.get_submodule(path)._parameters[name]
            if mine is None or not isinstance(theirs, ShardTensor):
                continue
            if isinstance(mine, ShardTensor):  # a copy of a module that was sharded before
                mine.requires_grad_(False)
                continue
            if id(mine) not in done:
                done[id(mine)] = (mine, _shard(mine, theirs, average.device, mesh))
            owner._parameters[name] = done[id(mine)][1]  # type: ignore[assignment]  # a Parameter to isinstance


def _shard(mine: nn.Parameter, theirs: ShardTensor, device: torch.device | None, mesh: Mesh) -> ShardTensor:
    where = theirs.to_local().device if device is None else device
    if mine.is_meta:
        local = theirs.to_local().to(where, mine.dtype, copy=True)
    else:
        values = mine.detach().to(mesh.device).contiguous()
        if mesh.world.size > 1:
            mesh.world.broadcast_(values, 0).wait()
        local = theirs.spec.localize(values).to(where, copy=True)
    # It takes no gradient: callbacks read it where gradients are recorded, and would gather it there.
    sharded = ShardTensor(local, theirs.spec)
    vars(sharded).update(mine.__dict__, _is_param=True)  # isinstance(p, nn.Parameter) holds
    return sharded


def _run_all(loads: list[Callable[[], None]]) -> None:
    for load in loads:
        load()
