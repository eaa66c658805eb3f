"""Restoring a sharded model: read into shards before anything of the model is changed.

The way back is here too: what the model was before can be put back.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn, optim

from shardeddp.checkpoint.read import LazyTensor
from shardeddp.checkpoint.safetensors import names_in_model
from shardeddp.checkpoint.state_codec import tensors_in, versions_of, with_versions
from shardeddp.errors import CheckpointError, printable
from shardeddp.optim.scope import ELEMENTWISE, SCALAR_STATES
from shardeddp.tensor.operations import overlaps_itself
from shardeddp.tensor.shard_tensor import ShardSpec, ShardTensor
from shardeddp.wrap.tree import first_three

# -- Rollback of a load that does not fit


class Replaced:
    """What the parameters and buffers of a model were before a load: this rank's part of them."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def keep(
        self,
        module: nn.Module,
        own: Mapping[str, Any],
        parts: dict[str, Any],
        read: Collection[str],
    ) -> None:
        """Keep them, just before parts of a checkpoint are loaded.

        What was read for this load alone changes places with what it replaces: a third of the
        memory of a load under AdamW, and a pass over it. That is done on the host, for parameters
        with one name, and where no module may do anything else with the parts than load them.

        Args:
            module: The model.
            own: Its state dict of parameters and buffers themselves.
            parts: What is about to be loaded, by fqn. A part that is loaded by this already is
                replaced by the parameter, which is loaded into itself then.
            read: The names of parts whose memory nobody else has.
        """
        places = Counter(map(id, own.values()))
        kept: dict[int, torch.Tensor] = {}
        for name in () if _loads_in_its_own_way(module) else read:
            target, part = own.get(name), parts[name]
            if (
                isinstance(target, ShardTensor)
                and isinstance(part, ShardTensor)
                and places[id(target)] == 1
                and _exchange(target.to_local(), part.to_local())
            ):
                kept[id(target)], parts[name] = part, target
        self._kept = [
            (tensor, kept[id(tensor)] if id(tensor) in kept else tensor.detach().clone())
            for tensor in chain(module.parameters(), module.buffers())
        ]

    @torch.no_grad()
    def restore_values(self) -> None:
        """Make the model what it was, without communication."""
        for tensor, was in self._kept:
            tensor.copy_(was)


def _exchange(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Let the values of two tensors on the host change places; whether they could."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    if one.device.type != "cpu" or not (one.is_contiguous() and other.is_contiguous()):
        return False
    pairs = zip(one.view(-1).split(_BLOCK_NUMEL), other.view(-1).split(_BLOCK_NUMEL), strict=True)
    for block, other_block in pairs:
        was = block.clone()
        block.copy_(other_block)
        other_block.copy_(was)
    return True


_BLOCK_NUMEL = 2**16
"""Elements that are exchanged at a time, so that they stay in the processor's cache."""


# -- Restoring of a sharded model

_COMPILED = "_orig_mod."
"""What ``torch.compile`` puts into the names of a module's parameters."""

_SHOWN = 20
"""Of the lines that say what does not fit."""

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""What schedulers of torch write into the groups of an optimizer."""

_FLAGS = {"fused", "capturable", "foreach"}
"""Options of optimizers of torch that change how they compute, and not what."""


def read_shards_ahead(state: Any, module: nn.Module) -> None:
    """Read, and so check, what this rank needs of each lazy tensor in a model or optimizer state.

    What is stored for a parameter of the sharded model is read for this rank's shard.
    """
    named = module.named_parameters(remove_duplicate=False)
    specs = {
        name: parameter.spec for name, parameter in named if isinstance(parameter, ShardTensor)
    }
    for lazy in (it for it, _ in tensors_in(state) if isinstance(it, LazyTensor)):
        spec = next((specs[key] for key in lazy.path if key in specs), None)  # type: ignore[index]
        if spec is None or spec.shape != lazy.shape:
            lazy.read_ahead(lazy.all_of_it)
        else:
            for box, interval in spec.pieces:
                lazy.read_ahead(interval, box)


def parameter_names(
    module: nn.Module | None, optimizers: Sequence[optim.Optimizer]
) -> list[list[str]]:
    """Names in the module of the parameters of each optimizer."""
    if module is None:
        raise RuntimeError("ShardedDP has no module to save: the Trainer connects it")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [
            names.get(id(parameter), f"parameter_{index}")
            for index, parameter in enumerate(
                it for group in optimizer.param_groups for it in group["params"]
            )
        ]
        for optimizer in optimizers
    ]


def materialize_expanded_buffers(module: nn.Module) -> None:
    """Let buffers whose elements share memory (expanded ones) have their own, to load into."""
    for owner in module.modules():
        for name, buffer in [*owner._buffers.items()]:
            if isinstance(buffer, torch.Tensor) and overlaps_itself(buffer):
                owner._buffers[name] = buffer.contiguous()


def load_model(
    module: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    cast: bool,
    replaced: Replaced | None = None,
) -> None:
    """Load a state dict of whole, lazy or sharded tensors into a sharded model.

    Args:
        module: The model.
        state: By fqn.
        strict: Whether both have to have the same names.
        cast: Whether dtypes may differ.
        replaced: Keeps what the model was before.

    Raises:
        CheckpointError: Names, shapes or dtypes differ; lists what. Nothing has been changed.
    """
    own = module.state_dict(keep_vars=True)
    _check_fit(module, own, state, strict, cast)
    parts = {name: _shard_like(value, own.get(name)) for name, value in state.items()}
    if replaced is not None:
        read = [name for name, value in state.items() if isinstance(value, LazyTensor)]
        replaced.keep(module, own, parts, read)
    module.load_state_dict(with_versions(parts, versions_of(state)), strict=strict)


def place_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The weights of a file under the names that a model has for them.

    The file may be of a submodule, and tensors that the model has twice are once in it. Those that
    have no place in the model keep their names.
    """
    own = module.state_dict(keep_vars=True)
    places = names_in_model(weights, own)
    placed = {places.get(name, name): weight for name, weight in weights.items()}
    tied = {id(own[name]): weight for name, weight in placed.items() if name in own}
    for name, value in own.items():
        if name not in placed and id(value) in tied:
            placed[name] = tied[id(value)]
    return placed


def load_module(module: nn.Module, state: Mapping[str, Any], strict: bool, cast: bool) -> None:
    """Load as :func:`load_model` does, when all that this rank needs has been read and checked."""
    read_shards_ahead([state], module)
    materialize_expanded_buffers(module)
    load_model(module, state, strict, cast)


def load_optimizer(
    optimizer: optim.Optimizer,
    state: Mapping[str, Any],
    saved: Sequence[str] | None = None,
    names: Sequence[str] = (),
) -> None:
    """Load a state dict of whole, lazy or sharded tensors into an optimizer of sharded parameters.

    States belong to parameters by name, and by number where they have none.

    Args:
        optimizer: Any.
        state: As ``Optimizer.state_dict()`` has it.
        saved: The names of the parameters when it was saved, in the order of its groups; None:
            those that lazy tensors know.
        names: The same of the optimizer's parameters now.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if missing := {"state", "param_groups"} - state.keys():
        raise CheckpointError(
            f"the state of an optimizer in the checkpoint is damaged: expected state and "
            f"param_groups in it, {' and '.join(sorted(missing))} is missing"
        )
    _check_groups(optimizer, state["param_groups"])
    state = _by_place(state)
    saved = _names_in(state) if saved is None else saved
    if saved is not None and names and optimizer.param_groups:
        state = _by_name(state, saved, names)
    if type(optimizer) in ELEMENTWISE:
        _check_states(optimizer, parameters, state)
    states = {
        index: {name: _state_like(name, value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
        if _is_place(index, parameters)
    }
    others = {key: it for key, it in state["state"].items() if not _is_place(key, parameters)}
    try:
        optimizer.load_state_dict({**state, "state": {**states, **others}})
    except ValueError as error:
        raise CheckpointError(
            f"the state of an optimizer does not fit {type(optimizer).__name__}: {error}"
        ) from error


def _is_place(key: object, parameters: Sequence[torch.Tensor]) -> bool:
    return isinstance(key, int) and 0 <= key < len(parameters)


def _by_place(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose parameters are numbered by their places in the groups, as torch numbers them."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    places = {number: place for place, number in enumerate(numbers)}
    unknown = [
        number for number in state["state"] if isinstance(number, int) and number not in places
    ]
    # An optimizer may keep states under any key. Where only that of some parameter is missing, it may
    # be under another number.
    have = {number in state["state"] for number in numbers}
    if len(places) < len(numbers) or (unknown and len(have) > 1):
        what = (
            f"of parameter {unknown[0]}, which is in no group"
            if unknown
            else "of a group with a parameter twice"
        )
        raise CheckpointError(
            f"the state of an optimizer in the checkpoint is damaged: it is {what}"
        )
    for number, values in state["state"].items():
        if number in places and not isinstance(values, Mapping):
            raise CheckpointError(
                f"the state of an optimizer in the checkpoint is damaged: that of parameter "
                f"{number} is a {type(values).__name__}, expected a mapping"
            )
    groups, first = list[dict[str, Any]](), 0
    for group in state["param_groups"]:
        last = first + len(group["params"])
        groups.append({**group, "params": list(range(first, last))})
        first = last
    states = {places.get(number, number): values for number, values in state["state"].items()}
    return {**state, "param_groups": groups, "state": states}


def _names_in(state: Mapping[str, Any]) -> list[str] | None:
    """Names of parameters by what is stored for them; None: nothing is under a name."""
    names: dict[int, str] = {}
    for index, values in state["state"].items():
        paths = [
            it.path
            for it, _ in tensors_in(values)
            if isinstance(it, LazyTensor) and it.path[1:2] == ("state",)
        ]
        if paths and len(paths[0]) > 3:
            names[index] = str(paths[0][2])
    count = sum(len(group["params"]) for group in state["param_groups"])
    return [names.get(index, "") for index in range(count)] if names else None


def _by_name(
    state: Mapping[str, Any], saved: Sequence[str], names: Sequence[str]
) -> Mapping[str, Any]:
    """A state with the numbers that parameters have now; groups keep their options."""
    saved, names = ([name.replace(_COMPILED, "") for name in each] for each in (saved, names))
    if saved == names or len(saved) != len(names):
        return state
    places = {name: place for place, name in enumerate(names)}
    found = {index: places[name] for index, name in enumerate(saved) if name in places}
    taken = set(found.values())
    unknown = [index for index in range(len(saved)) if index not in found]
    left = (place for place in range(len(names)) if place not in taken)
    by_number = dict(zip(unknown, left, strict=True))
    if renamed := [index for index in unknown if saved[index] and index in state["state"]]:
        pairs = (f"{printable(saved[index])} to {names[by_number[index]]}" for index in renamed)
        warnings.warn(
            f"the states of an optimizer are of parameters with other names: {first_three(pairs)}. "
            f"They were loaded by number",
            stacklevel=2,
        )
    found |= by_number
    return {**state, "state": {found.get(i, i): values for i, values in state["state"].items()}}


def _check_groups(optimizer: optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Groups are matched by number.

    One that lacks what the optimizer has, and has what it lacks, is of another optimizer.
    """
    kind = type(optimizer).__name__
    advice = "train with the optimizer that it was saved with, or load its weights alone"
    counts, expected = (
        [len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups)
    )
    # Lightning has an optimizer without groups where the module configures none.
    if counts != expected and expected:
        raise CheckpointError(
            f"the state of an optimizer does not fit {kind}: expected {len(expected)} groups of "
            f"{expected} parameters, found {len(counts)} of {counts}: {advice}"
        )
    for found, own in zip(saved, optimizer.param_groups, strict=False):
        lacks = sorted(optimizer.defaults.keys() - found.keys())
        has = sorted(found.keys() - own.keys() - _OF_SCHEDULERS)
        if lacks and has:
            raise CheckpointError(
                f"the state of an optimizer is not one of {kind}: expected {', '.join(lacks)} in "
                f"each group, found {', '.join(has)}: {advice}"
            )
        _check_flags(kind, found, own)


def _check_flags(kind: str, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """How a step is computed, which decides at the first one whether it can be."""
    for name in sorted(found.keys() & own.keys() & _FLAGS):
        value, device = found[name], next((it.device.type for it in own["params"]), "cpu")
        if value is not None and type(value) is not bool:
            problem = "expected True, False or None"
        elif name == "capturable" and value and device == "cpu":
            problem = (
                "parameters are on the CPU, where torch has no such step. Set it to False in "
                "checkpoint['optimizer_states'] in on_load_checkpoint"
            )
        else:
            continue
        raise CheckpointError(
            f"the options of an optimizer in the checkpoint make no {kind}: {name} is "
            f"{printable(repr(value)[:_SHOWN])}: {problem}"
        )


def _check_states(
    optimizer: optim.Optimizer, parameters: Sequence[torch.Tensor], saved: Mapping[str, Any]
) -> None:
    """States are those that a step makes: one number, or elements of the parameter's shape."""
    kept: list[Mapping[str, Any]] = []
    for group in saved["param_groups"]:
        states = _after_a_step(type(optimizer), group)
        kept += [states] * len(group["params"])
    problems: list[str] = []
    for index, state in saved["state"].items():
        if not _is_place(index, parameters[: len(kept)]) or not state:
            continue
        missing = kept[index].keys() - state.keys()
        problems += [f"{name} of parameter {index} is missing" for name in sorted(missing)]
        for name, value in state.items():
            wrong = _wrong_state(name, value, kept[index].get(name), parameters[index].shape)
            problems += [f"{name} of parameter {index} {wrong}"] if wrong else []
    if problems:
        raise CheckpointError(f"the state of an optimizer does not fit:\n{_listed(problems)}")


def _wrong_state(name: str, value: Any, like: Any, shape: torch.Size) -> str:
    """What is wrong with a state, given what a step has made under its name; nothing if it fits."""
    if not isinstance(value, torch.Tensor):
        fits = not isinstance(like, torch.Tensor) or (
            name in SCALAR_STATES and type(value) in (int, float)
        )
        if fits and name == "step" and type(value) in (int, float) and value < 0:
            return "is below 0"
        return "" if fits else f"is a {type(value).__name__}, expected a tensor"
    if name in SCALAR_STATES:
        if value.numel() != 1 or value.is_complex():
            return f"has shape {tuple(value.shape)} and {value.dtype}, expected one number"
        return "is below 0" if name == "step" and float(value) < 0 else ""
    if value.shape != shape:
        return f"has shape {tuple(value.shape)}, expected {tuple(shape)}"
    if isinstance(like, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return f"is {value.dtype}, expected {like.dtype}"
    return ""


def _after_a_step(kind: type[optim.Optimizer], group: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an optimizer with these options keeps of a parameter of one element."""
    parameter = torch.zeros(1, requires_grad=True, device="cpu")
    parameter.grad = torch.zeros(1, device="cpu")
    try:
        probe: Any = kind([parameter])  # type: ignore[call-arg]
        probe.load_state_dict({"state": {}, "param_groups": [{**group, "params": [0]}]})
        own = probe.param_groups[0]
        own.update(dict.fromkeys(own.keys() & _FLAGS, False))
        probe.step()
    except Exception as error:
        raise CheckpointError(
            f"the options of an optimizer in the checkpoint make no {kind.__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return probe.state[parameter]


def _check_fit(
    module: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any], strict: bool, cast: bool
) -> None:
    problems: list[str] = []
    if strict and not _loads_in_its_own_way(module):
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
        for which, names in (("Missing", missing), ("Unexpected", unexpected)):
            quoted = ", ".join(f'"{name}"' for name in names)
            problems += [f"{which} key(s) in the checkpoint: {quoted}"] * bool(names)
    for name, value in state.items():
        target = own.get(name)
        if not isinstance(target, torch.Tensor):
            continue
        if not isinstance(value, torch.Tensor):
            problems.append(f"{name} is of type {type(value).__name__}, expected a tensor")
        elif value.shape != target.shape and not nn.parameter.is_lazy(target):
            problems.append(
                f"{name} has shape {tuple(value.shape)}, expected {tuple(target.shape)}"
            )
        elif value.dtype != target.dtype and not cast:
            problems.append(
                f"{name} is {value.dtype}, expected {target.dtype} (checkpoint_options: cast=True "
                f"converts it)"
            )
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit {type(module).__name__}, nothing was "
            f"loaded:\n{_listed(problems)}"
        )


def _loads_in_its_own_way(module: nn.Module) -> bool:
    """Whether a module may rename or invent entries while it loads, so that names say nothing."""
    known = ("torch.", "torchmetrics.", "lightning.", "lightning_fabric.", "pytorch_lightning.")
    if "load_state_dict" in vars(module) or not type(module).load_state_dict.__module__.startswith(
        known
    ):
        return True
    return any(
        child._load_state_dict_pre_hooks
        or not type(child)._load_from_state_dict.__module__.startswith(known)
        for child in module.modules()
    )


def _listed(problems: Sequence[str]) -> str:
    more = len(problems) - _SHOWN
    return "\n".join(
        f"  {line}" for line in (*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else []))
    )


def _shard_like(value: Any, target: Any) -> Any:
    """Part of a stored tensor to load into a target; reads no more than this rank holds of that.

    The rank that loads decides which: the interval of its layout now (``spec.interval``). The reader
    copies it from whichever files have it, as many ranks as have written them.
    """
    if not isinstance(value, LazyTensor):
        return value
    if isinstance(target, ShardTensor) and target.shape == value.shape:
        spec: ShardSpec = target.spec
        return ShardTensor(spec.read(value.elements), spec)
    return value.whole()


def _state_like(name: str, value: Any, parameter: torch.Tensor) -> Any:
    """The same for optimizer state of a parameter.

    Whole tensors are cut before they reach a device.
    """
    if name in SCALAR_STATES:
        return value.whole() if isinstance(value, LazyTensor) else value
    if (
        type(value) is torch.Tensor
        and isinstance(parameter, ShardTensor)
        and value.shape == parameter.shape
    ):
        return ShardTensor(parameter.spec.localize(value).clone(), parameter.spec)
    return _shard_like(value, parameter)
