"""Values: the whole numbers of a step without memory that are known, so that shapes may depend on them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardeddp.errors import ConfigurationError
from shardeddp.tensor.operations import written
from shardeddp.torch_private import FakeTensor, pytree, storage_of, unset_fake_temporarily

_MOST = 1 << 24
"""Largest number of elements of a tensor with known values; indices of a router have fewer."""

_OF_SHAPES = {
    "arange", "eye", "full", "lift_fresh", "ones", "scalar_tensor", "zeros", "full_like", "new_full",
    "new_ones", "new_zeros", "ones_like", "zeros_like",
}  # fmt: skip
"""Operations with results that depend on shapes of tensors alone."""

_CHOOSE = {"topk", "sort", "argmax", "max", "multinomial"}
"""Operations of routers that choose the experts of tokens by scores."""

_DEPENDS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_KNOWN = "_known_values"


MOST_READ = 4096
"""Largest number of unknown values that one line of a step may read; a loop that never ends has more."""

_NO_STEPS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
"""Folders of files that are no code of a step."""


def is_of_step(file: str) -> bool:
    """Return whether a file has code of a step, and not of torch or of this package."""
    return not file.startswith(_NO_STEPS)


class Reads:
    """Unknown values that a step has read and that were assumed, by the line that reads them."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def note(self) -> None:
        """Count a value that is read now.

        Raises:
            ConfigurationError: The same line has read too many.
        """
        frame = sys._getframe(1)
        while frame.f_back and not is_of_step(frame.f_code.co_filename):
            frame = frame.f_back
        place = frame.f_code.co_filename, frame.f_lineno
        self._counts[place] += 1
        if self._counts[place] > MOST_READ:
            raise ConfigurationError(
                f"the step cannot be planned because line {place[1]} of {place[0]} has read more than "
                f"{MOST_READ:,} values that are not known: a plan takes truth values as false and "
                f"numbers as 1, so a loop that ends by what it has computed does not end. Give it a "
                f"largest number of rounds (for _ in range(...))"
            )


class Values:
    """Known values of fake tensors.

    Known are integers that depend on shapes alone (``arange``), and results computed from known
    values alone. Choices by scores (``topk``) are assumed to be even: tokens get experts in turn.
    """

    def __init__(self) -> None:
        self.were_read = False
        """True if known values have become shapes or numbers of Python."""

        self.were_chosen = False
        """True if some values are choices by scores."""

        self.are_even = True
        """True if every choice by scores could be spread evenly without a remainder."""

        self._lost: dict[int, torch.Tensor] = {}  # by storage: unknown values were written to it

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor; None: they are not known."""
        if not isinstance(tensor, FakeTensor):
            return None if tensor.is_floating_point() or tensor.is_meta else tensor
        found: torch.Tensor | None = vars(tensor).get(_KNOWN)
        return None if found is None or storage_of(found) in self._lost else found

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on fake tensors, and record the values of its results if known."""
        name = func.name().partition("::")[2].partition(".")[0]
        if name in ("index", "index_put", "index_put_"):
            args = (args[0], self._as_numbers(args[1]), *args[2:])
        leaves, form = pytree.tree_flatten((args, kwargs))
        given = [it for it in leaves if isinstance(it, torch.Tensor)]
        known = [it for it in map(self.of, given) if it is not None]
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        are_known = len(known) == len(given) and not is_drawn

        def computed(tensors: Sequence[torch.Tensor]) -> Any:
            rest = iter(tensors)
            own = [next(rest) if isinstance(it, torch.Tensor) else it for it in leaves]
            own_args, own_kwargs = pytree.tree_unflatten(own, form)
            with unset_fake_temporarily():
                return func(*own_args, **own_kwargs)

        if given and are_known and not _DEPENDS.isdisjoint(func.tags):
            self.were_read |= name != "index"
            return pytree.tree_map(_without_memory, computed(known))
        if is_grouped(func, given):
            return given[0].new_empty(given[0].shape[0], given[1].shape[2])  # of any dtype
        if func.namespace == "c10d":
            return _without_ranks(func, args, kwargs, given)
        out = func(*args, **kwargs)
        made = _tensors(out)
        is_small = made and max(it.numel() for it in made) <= _MOST
        if given and are_known and is_small:
            if func.namespace == "aten":
                reals = _tensors(computed(known))
            elif name == "all_to_all":
                # Each rank is assumed to send to the first one, this one, as it sends to itself.
                with unset_fake_temporarily():
                    reals = [known[0][: args[1][0]].tile(len(args[1]))]
            else:
                reals = []
            for fake, real in zip(made, reals, strict=False):
                _keep(fake, real)
            return out
        self._lose(written(func, tuple(args), dict(kwargs)))
        if is_small and name in _OF_SHAPES and not made[0].is_floating_point():
            shape = made[0].shape if name.endswith("_like") else (0,)
            _keep(made[0], computed([torch.empty(shape, dtype=it.dtype) for it in given]))
        elif is_small and name in _CHOOSE and given[0].is_floating_point():
            self._choose(func, args, kwargs, made[-1])
        return out

    def _lose(self, tensors: Sequence[torch.Tensor]) -> None:
        for it in tensors:
            values = self.of(it)
            if values is not None:
                self._lost[storage_of(values)] = values

    def _as_numbers(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replace known boolean masks among indices by the indices of their True elements."""
        found: list[torch.Tensor | None] = []
        for it in indices:
            mask = None if it is None or it.dtype is not torch.bool else self.of(it)
            if mask is None:
                found.append(it)
            else:
                self.were_read = True
                with unset_fake_temporarily():
                    chosen = mask.nonzero(as_tuple=True)
                found += map(_without_memory, chosen)
        return found

    def _choose(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], chosen: torch.Tensor
    ) -> None:
        """Record an even choice along the dim of the scores as the values of ``chosen``."""
        if chosen.is_floating_point():
            return
        settings = {it.name: value for it, value in _bound(func, args, kwargs)}
        scores, dim = args[0], settings.get("dim", None if "max" in func.name() else -1)
        if dim is None:  # a choice among all scores
            return
        count = scores.shape[dim]
        with unset_fake_temporarily():
            numbers = torch.arange(chosen.numel()) % count
            if chosen.ndim == scores.ndim:
                others = [size for it, size in enumerate(chosen.shape) if it != dim % chosen.ndim]
                numbers = numbers.view(*others, -1).movedim(-1, dim)
            numbers = numbers.reshape(chosen.shape)
        _keep(chosen, numbers)
        self.were_chosen = True
        self.are_even &= chosen.numel() % count == 0


def _without_ranks(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
) -> Any:
    """Run a collective of the user on fake tensors; their known values are taken to be of all ranks.

    Torch runs an operation on constants (``torch.tensor(3)``) for real, and no other rank would
    take part.
    """
    fakes = [it for it in given if isinstance(it, FakeTensor)]
    if len(fakes) < len(given):
        raise ConfigurationError(
            f"the step cannot be planned because it communicates ({func.name()}) with a tensor that "
            f"was made outside of it, and no other rank takes part in a plan. Make the tensor in the "
            f"step, or keep it in the module"
        )
    constants = [it.constant for it in fakes]
    try:
        for it in fakes:
            it.constant = None
        return func(*args, **kwargs)
    finally:
        for it, constant in zip(fakes, constants, strict=True):
            it.constant = constant


def is_grouped(func: Any, operands: Sequence[torch.Tensor]) -> bool:
    """Return whether an operation is a grouped matmul: rows (2D) by a matrix per group (3D)."""
    return "grouped_mm" in func.name() and [it.ndim for it in operands[:2]] == [2, 3]


def _bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the given arguments of an operation with their values."""
    known = func._schema.arguments
    named = [(it, kwargs[it.name]) for it in known if it.name in kwargs]
    return [*zip(known, args, strict=False), *named]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [it for it in pytree.tree_leaves(value) if isinstance(it, torch.Tensor)]


def _without_memory(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _keep(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype), value)


def _keep(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    vars(fake)[_KNOWN] = real
    return fake
