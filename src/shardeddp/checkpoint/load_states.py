"""Model and optimizer states: loaded into shards, read before anything of the model is changed.

The values that a load replaces can be restored as well.
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
from shardeddp.checkpoint.state_codec import tensors_with_paths, versions_of, with_versions
from shardeddp.errors import CheckpointError, first_three, printable
from shardeddp.optim.scope import ELEMENTWISE, SCALAR_STATES
from shardeddp.tensor.operations import overlaps_itself
from shardeddp.tensor.shard_tensor import ShardSpec, ShardTensor

# -- Rollback of a load that does not fit


class Replaced:
    """Values of a model's parameters and buffers before a load, as this rank holds them."""

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
        """Keep the values just before a state dict is loaded.

        Values that were read for this load alone are swapped with those that they replace: this
        saves a third of the memory of a load under AdamW, and a pass over it. Only parameters on
        the host with one name are swapped, and only if no module may use the state dict otherwise.

        Args:
            module: The model.
            own: The model's state dict, with the parameters and buffers themselves.
            parts: The state dict about to be loaded, by fqn. A swapped entry is replaced by the
                parameter itself, which is then loaded into itself.
            read: Names in ``parts`` of tensors that nothing else references.
        """
        uses = Counter(map(id, own.values()))
        kept: dict[int, torch.Tensor] = {}
        for name in () if _loads_in_its_own_way(module) else read:
            target, part = own.get(name), parts[name]
            if (
                isinstance(target, ShardTensor)
                and isinstance(part, ShardTensor)
                and uses[id(target)] == 1
                and _swap(target.to_local(), part.to_local())
            ):
                kept[id(target)], parts[name] = part, target
        self._kept = [
            (tensor, kept[id(tensor)] if id(tensor) in kept else tensor.detach().clone())
            for tensor in chain(module.parameters(), module.buffers())
        ]

    @torch.no_grad()
    def restore_values(self) -> None:
        """Restore the kept values, without communication."""
        for tensor, was in self._kept:
            tensor.copy_(was)


def _swap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Swap the values of two tensors on the host; False if they cannot be swapped in place."""
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
"""Elements swapped at a time, few enough to stay in the processor's cache."""


# -- Loading into a sharded model

_COMPILED = "_orig_mod."
"""Prefix that ``torch.compile`` puts into parameter names."""

_SHOWN = 20
"""Problems listed in an error message at most; also characters shown of a wrong value."""

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""Keys that torch's schedulers write into an optimizer's parameter groups."""

_FLAGS = {"fused", "capturable", "foreach"}
"""Options of torch's optimizers that change the implementation of a step, not its result."""


def read_shards_ahead(state: Any, module: nn.Module) -> None:
    """Read and check the elements that this rank needs of each lazy tensor in a state.

    For a tensor of a sharded parameter's shape, this rank's shard alone is read.
    """
    named = module.named_parameters(remove_duplicate=False)
    specs = {
        name: parameter.spec for name, parameter in named if isinstance(parameter, ShardTensor)
    }
    for lazy in (it for it, _ in tensors_with_paths(state) if isinstance(it, LazyTensor)):
        spec = next((specs[key] for key in lazy.path if key in specs), None)  # type: ignore[index]
        if spec is None or spec.shape != lazy.shape:
            lazy.read_ahead(lazy.all_of_it)
        else:
            for box, interval in spec.pieces:
                lazy.read_ahead(interval, box)


def parameter_names(
    module: nn.Module | None, optimizers: Sequence[optim.Optimizer]
) -> list[list[str]]:
    """Return the fqns in ``module`` of each optimizer's parameters, in the order of its groups."""
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
    """Replace expanded buffers by contiguous copies to load into: their elements share memory."""
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

    ``strict`` requires the same names, ``cast`` allows other dtypes, and ``replaced`` keeps the
    model's values of before the load.

    Raises:
        CheckpointError: Names, shapes or dtypes differ; lists them. Nothing has been changed.
    """
    own = module.state_dict(keep_vars=True)
    _check_fit(module, own, state, strict, cast)
    parts = {name: _value_to_load(value, own.get(name)) for name, value in state.items()}
    if replaced is not None:
        read = [name for name, value in state.items() if isinstance(value, LazyTensor)]
        replaced.keep(module, own, parts, read)
    module.load_state_dict(with_versions(parts, versions_of(state)), strict=strict)


def rename_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the weights of a file under the model's names for them.

    The file may be of a submodule, and may have tied tensors once. Names that the model does not
    have stay as they are.
    """
    own = module.state_dict(keep_vars=True)
    new_names = names_in_model(weights, own)
    placed = {new_names.get(name, name): weight for name, weight in weights.items()}
    tied = {id(own[name]): weight for name, weight in placed.items() if name in own}
    for name, value in own.items():
        if name not in placed and id(value) in tied:
            placed[name] = tied[id(value)]
    return placed


def read_and_load_model(
    module: nn.Module, state: Mapping[str, Any], strict: bool, cast: bool
) -> None:
    """Load as :func:`load_model` does, after this rank's elements have been read and checked."""
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

    States belong to parameters by name, and by index where they have no names. Names of the
    parameters at the time of saving and now are in the order of the groups; None: the saved ones
    are those in the paths of lazy tensors.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if missing := {"state", "param_groups"} - state.keys():
        raise CheckpointError(
            f"the state of an optimizer in the checkpoint is damaged: expected state and "
            f"param_groups in it, {' and '.join(sorted(missing))} is missing"
        )
    _check_groups(optimizer, state["param_groups"])
    state = _by_index(state)
    saved = _names_in(state) if saved is None else saved
    if saved is not None and names and optimizer.param_groups:
        state = _by_name(state, saved, names)
    if type(optimizer) in ELEMENTWISE:
        _check_states(optimizer, parameters, state)
    states = {
        index: {name: _state_like(name, value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
        if _is_index(index, parameters)
    }
    others = {key: it for key, it in state["state"].items() if not _is_index(key, parameters)}
    try:
        optimizer.load_state_dict({**state, "state": {**states, **others}})
    except ValueError as error:
        raise CheckpointError(
            f"the state of an optimizer does not fit {type(optimizer).__name__}: {error}"
        ) from error


def _is_index(key: object, parameters: Sequence[torch.Tensor]) -> bool:
    return isinstance(key, int) and 0 <= key < len(parameters)


def _by_index(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with parameters numbered by position in the groups, as torch does it."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    indices = {number: index for index, number in enumerate(numbers)}
    unknown = [
        number for number in state["state"] if isinstance(number, int) and number not in indices
    ]
    # An optimizer may keep states under any key. Where only some parameters lack a state, theirs
    # may be under another number.
    have = {number in state["state"] for number in numbers}
    if len(indices) < len(numbers) or (unknown and len(have) > 1):
        what = (
            f"of parameter {unknown[0]}, which is in no group"
            if unknown
            else "of a group with a parameter twice"
        )
        raise CheckpointError(
            f"the state of an optimizer in the checkpoint is damaged: it is {what}"
        )
    for number, values in state["state"].items():
        if number in indices and not isinstance(values, Mapping):
            raise CheckpointError(
                f"the state of an optimizer in the checkpoint is damaged: that of parameter "
                f"{number} is a {type(values).__name__}, expected a mapping"
            )
    groups, first = list[dict[str, Any]](), 0
    for group in state["param_groups"]:
        last = first + len(group["params"])
        groups.append({**group, "params": list(range(first, last))})
        first = last
    states = {indices.get(number, number): values for number, values in state["state"].items()}
    return {**state, "param_groups": groups, "state": states}


def _names_in(state: Mapping[str, Any]) -> list[str] | None:
    """Return parameter names from the paths of lazy tensors; None if no path has one."""
    names: dict[int, str] = {}
    for index, values in state["state"].items():
        paths = [
            it.path
            for it, _ in tensors_with_paths(values)
            if isinstance(it, LazyTensor) and it.path[1:2] == ("state",)
        ]
        if paths and len(paths[0]) > 3:
            names[index] = str(paths[0][2])
    count = sum(len(group["params"]) for group in state["param_groups"])
    return [names.get(index, "") for index in range(count)] if names else None


def _by_name(
    state: Mapping[str, Any], saved: Sequence[str], names: Sequence[str]
) -> Mapping[str, Any]:
    """Return a state renumbered for the parameters of the same names; groups keep their options."""
    saved, names = ([name.replace(_COMPILED, "") for name in each] for each in (saved, names))
    if saved == names or len(saved) != len(names):
        return state
    indices = {name: index for index, name in enumerate(names)}
    found = {index: indices[name] for index, name in enumerate(saved) if name in indices}
    taken = set(found.values())
    unknown = [index for index in range(len(saved)) if index not in found]
    left = (index for index in range(len(names)) if index not in taken)
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
    """Compare saved groups with the optimizer's, by index.

    A group that both lacks keys of the optimizer and has unknown ones is of another optimizer.
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
    """Check the flags of the implementation, which could make the first step fail."""
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
    """Check that states are such as a step makes: one number, or the parameter's shape."""
    kept: list[Mapping[str, Any]] = []
    for group in saved["param_groups"]:
        states = _after_a_step(type(optimizer), group)
        kept += [states] * len(group["params"])
    problems: list[str] = []
    for index, state in saved["state"].items():
        if not _is_index(index, parameters[: len(kept)]) or not state:
            continue
        missing = kept[index].keys() - state.keys()
        problems += [f"{name} of parameter {index} is missing" for name in sorted(missing)]
        for name, value in state.items():
            wrong = _wrong_state(name, value, kept[index].get(name), parameters[index].shape)
            problems += [f"{name} of parameter {index} {wrong}"] if wrong else []
    if problems:
        raise CheckpointError(f"the state of an optimizer does not fit:\n{_listed(problems)}")


def _wrong_state(name: str, value: Any, like: Any, shape: torch.Size) -> str:
    """Return the problem of a state compared with one made by a step; "" if it fits."""
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
    """Return the state that an optimizer with these options keeps of a parameter of one element."""
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
    """True if a module may rename or add entries while it loads; names prove nothing then."""
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


def _value_to_load(value: Any, target: Any) -> Any:
    """Return the value to load into a target; of a lazy tensor this rank's shard alone is read.

    Nobody plans for others: each rank asks for the interval of its own, new layout, and reads it
    from the files that have its elements. Of 96 float32 elements that 8 ranks have saved, 12 each,
    rank 2 of 6 loads [32, 48):

    ====================================  ======================================================
    call                                  result
    ====================================  ======================================================
    ``ShardSpec.interval``                [32, 48), by the layout of 6 ranks
    ``LazyTensor.elements`` (``read``)    a 1D tensor of 16 elements, from:
    ``Pieces.of`` (``pieces``)            data file 2: [32, 36) of [24, 36); file 3: [36, 48)
    ====================================  ======================================================

    Each piece is read, and verified by its checksum, once. Boxes of tensor-parallel ranks are
    several such intervals (``ShardSpec.read``).
    """
    if not isinstance(value, LazyTensor):
        return value
    if isinstance(target, ShardTensor) and target.shape == value.shape:
        spec: ShardSpec = target.spec
        return ShardTensor(spec.read(value.elements), spec)
    return value.whole()


def _state_like(name: str, value: Any, parameter: torch.Tensor) -> Any:
    """Return the value to load as state of a parameter; whole tensors are cut on the host."""
    if name in SCALAR_STATES:
        return value.whole() if isinstance(value, LazyTensor) else value
    if (
        type(value) is torch.Tensor
        and isinstance(parameter, ShardTensor)
        and value.shape == parameter.shape
    ):
        return ShardTensor(parameter.spec.localize(value).clone(), parameter.spec)
    return _value_to_load(value, parameter)
