"""Recording of a model's construction on the meta device; replayed on the host for wanted tensors.

On the meta device tensors have shapes and no values. A recording keeps the operations that would
have given them values: the constructors' own, those of initializers, conversions to another dtype.
Repeated on the host, they give the values of an eager construction to the last bit, one parameter
after the other.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import math
import sys
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, cast

import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from shardeddp.tensor.operations import is_random, tells_what_it_writes, written
from shardeddp.torch_private import (
    DispatchMode,
    HigherOrderOperator,
    OpOverload,
    leave_mode,
    neg_view,
    parse_to,
    pytree,
    storage_use_count,
    without_torch_function,
)

HOST = torch.device("cpu")

# -- Recorded operations: call, storages and random numbers


@dataclass(frozen=True, slots=True)
class MetaView:
    """Place of a meta tensor: a storage, and how it lies in there."""

    storage: int
    """Its number in the recording, the same on every rank that builds the same model."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    def over(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that lies there in real memory."""
        found = torch.empty(0, dtype=self.dtype, device=HOST)
        found.set_(cast(Any, memory), self.offset, self.shape, self.stride)
        found = found.conj() if self.conjugated else found
        return neg_view(found) if self.negated else found

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether elements lie in the order of their indices, without gaps."""
        return _is_dense(reversed([*zip(self.stride, self.shape, strict=True)]))

    def covers(self, nbytes: int) -> bool:
        """Whether it has each byte of a storage exactly once."""
        is_dense = _is_dense(sorted(zip(self.stride, self.shape, strict=True)))
        return is_dense and self.offset == 0 and self.numel * self.dtype.itemsize == nbytes


def _is_dense(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether strides and sizes, from the innermost dimension on, leave no gap."""
    reach = 1
    for stride, size in dims:
        if size != 1 and stride != reach:
            return False
        reach *= size
    return True


def storage_of(tensor: torch.Tensor) -> int:
    """Common part of all strided tensors over the same memory."""
    return tensor.untyped_storage()._cdata


def _lying(tensor: torch.Tensor, storage: int) -> MetaView:
    """How a strided tensor lies in a storage of this number."""
    geometry = tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return MetaView(storage, *geometry, tensor.is_conj(), tensor.is_neg())


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers that an operation takes from a generator."""

    generator: torch.Generator | None
    """None: the one of the host that ``torch.manual_seed`` seeds."""

    before: bytes
    """Digest of the generator's state in front of the operation."""

    after: bytes
    """Digest of the generator's state after the operation."""


@dataclass(slots=True, eq=False)
class Operation:
    """A call that gives values to meta tensors.

    Memory of the meta device is told by numbers of storages.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[MetaView | None]
    """Places of the tensors in what it returns; None for what is no meta tensor."""

    reads: frozenset[int]
    writes: frozenset[int]
    """Storages that it changes or makes."""

    replaces: frozenset[int]
    """Storages that it overwrites as a whole; their former values do not matter."""

    draws: tuple[Draw, ...]
    only_fills: bool
    """Whether the count of random numbers it draws depends on shapes alone."""

    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)


# -- Recording: the operations of a construction, in order

_REPLACING = {
    *("normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "bernoulli_"),
    *("exponential_", "geometric_", "log_normal_", "cauchy_"),
}
_WITHOUT_VALUES = {
    *("empty", "empty_like", "empty_strided", "empty_permuted"),
    *("new_empty", "new_empty_strided"),
}

# Functions that make tensors on the meta device past all dispatch.
_CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)

# Functions of torch.nn.init that return at once for tensors on the meta device.
_INITIALIZERS = {"_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_"}

_LOADING = "_load_from_state_dict"  # of nn.Module

# Functions that make an index of a list, on the device of the tensor.
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)

# Functions that need values and are no operations.
_READING = (torch.Tensor.tolist, torch.Tensor.__format__)
_ARRAYS = (torch.Tensor.numpy, torch.Tensor.__array__)

# Conversions, which leave a tensor where it is that an eager construction has on the host.
_MOVING = (torch.Tensor.to, torch.Tensor.cpu)

_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_PICKLING = "_reduce_ex_internal"  # of torch.Tensor

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Recording:
    """Operations on the meta device, from all the times when this was :meth:`active`."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        # By number; held, so that none has another's address.
        self._storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._unknown: set[int] = set()  # numbers of what was made unseen, or from such
        self._set_aside: set[int] = set()  # numbers of those that somebody else gives values
        self._seeded: set[bytes] = set()  # digests of states that generators were given here
        self._states: dict[bytes, torch.Tensor] = {}  # others in which they were found, by digest
        self._generators: dict[int, torch.Generator] = {}
        self._draws = 0  # number of them
        self._caught_up = 0  # number of operations whose draws generators have been brought behind
        self._is_active = self._is_paused = False
        self.builds = True
        """Whether what is made on the meta device now is of a model that gets values."""

        # Tensors that were on the meta device before the first of them, by address.
        self._former: dict[int, weakref.ref[torch.Tensor]] | None = None
        # Of tensors as they were recorded; a write increases it.
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.written: set[int] = set()
        """Storages that something was written to while nothing was recorded: on meta, that is lost."""

        self.reset_names: set[str] = set()
        """Tensors of models that were built unseen; what is recorded of them are resets."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle knows of no tensors: those of a copied model are others."""
        return type(self), ()

    @contextmanager
    def active(self, *, builds: bool = True) -> Generator[None]:
        """Record what this thread does to meta tensors; compiled code runs as it is written.

        Args:
            builds: Whether what is made under ``torch.device("meta")`` is of a model that gets
                values. Hooks have models there for their shapes: to count FLOPs.
        """
        former, self.builds = self.builds, builds
        modes = () if self._is_active else (_Functions(self), _Operations(self))
        self._is_active = True
        for mode in modes:
            mode.__enter__()
        try:
            # Under these modes torch.compile would mark code to be skipped, for good.
            with torch.compiler.set_stance("force_eager") if modes else nullcontext():
                yield
        finally:
            self.builds = former
            for mode in reversed(modes):  # the user's may have been entered since, and go on
                leave_mode(mode)
            if modes:
                self._is_active = False

    @contextmanager
    def watched(self, *, builds: bool = True) -> Generator[None]:
        """Record, as :meth:`active` does; what is written to its tensors afterwards is noticed."""
        if self._is_active:
            with self.active(builds=builds):
                yield
            return
        self.notice_writes()
        if self._former is None:
            self._former = {id(it): weakref.ref(it) for it in tensors_on_meta()}
        try:
            with self.active(builds=builds):
                yield
        finally:
            if self.is_used:
                known = [it for it in tensors_on_meta() if self.has(it) and not it.is_inference()]
                self._versions = [(weakref.ref(it), it._version) for it in known]
                for it in known:
                    if type(it) is nn.Parameter:
                        it.__class__ = _HandsOutData

    def notice_writes(self) -> None:
        """Note which tensors something was written to since, which was not recorded."""
        for held, version in self._versions:
            tensor = held()
            if tensor is None:
                continue
            handed_out = list[tuple[torch.Tensor, int]]()
            if isinstance(tensor, _HandsOutData):
                tensor.__class__ = nn.Parameter  # pyright: ignore[reportAttributeAccessIssue]
                handed_out = vars(tensor).pop(_HANDED_OUT, [])
            if is_strided_meta(tensor) and any(
                it._version != before for it, before in ((tensor, version), *handed_out)
            ):
                self.written.add(self._number(tensor))
        self._versions = []

    def place_of(self, tensor: torch.Tensor) -> MetaView:
        """The place of a strided meta tensor; if it was made unseen, its values are unknown."""
        return _lying(tensor, self._number(tensor))

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take tensors that were made unseen for empty ones."""
        self._unknown -= {self._number(tensor) for tensor in tensors}

    def set_aside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the values of some tensors, parameters of averages, to who is going to shard them."""
        self._set_aside |= {self._number(tensor) for tensor in filter(is_strided_meta, tensors)}

    def is_set_aside(self, tensor: torch.Tensor) -> bool:
        """Whether somebody else gives a tensor that was seen its values."""
        return self._numbers[storage_of(tensor)] in self._set_aside

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether anything was seen of the memory of a tensor."""
        return storage_of(tensor) in self._numbers

    def has_missed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made later than the first that were recorded, and past this."""
        held = (self._former or {}).get(id(tensor))
        return not (self.has(tensor) or (held is not None and held() is tensor))

    def knows(self, storage: int) -> bool:
        """Whether all that has given a storage its values was seen."""
        return storage not in self._unknown

    @property
    def is_used(self) -> bool:
        """Whether tensors still lie in memory that was recorded."""
        return any(storage_use_count(storage._cdata) > 1 for storage in self._storages)

    def forget_values(self) -> None:
        """Keep what generators need alone, if no recorded tensor is left: values take memory."""
        if not self.is_used:
            behind = {id(it) for it in self._operations[: self._caught_up]}
            self._operations = [it.operation for it in _needed(self._operations, frozenset())]
            self._caught_up = sum(id(it) in behind for it in self._operations)

    def nbytes(self, storage: int) -> int:
        """Size of a storage."""
        return self._storages[storage].nbytes()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Run what is called inside, and keep nothing of it."""
        former, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = former

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch, and keep it if it concerns the meta device."""
        if self._is_paused:
            return function(*args, **kwargs)
        involved = _meta_tensors((args, kwargs))
        if isinstance(function, HigherOrderOperator):
            if not involved:
                return function(*args, **kwargs)
            # What it calls may read truth values, and is in no record: it runs at once.
            args, kwargs = self.values((args, kwargs))
            return pytree.tree_map(self.moved, function(*args, **kwargs))
        name = function.overloadpacket.__name__
        draws_now = not _is_made_on_meta(kwargs) if not involved else _is_made_off_meta(kwargs)
        if draws_now and is_random(function):
            self._catch_up(_generator_in(args, kwargs))
        if involved and not self.builds and not any(map(self.has, involved)):
            return function(*args, **kwargs)
        is_read = name == "_to_copy" and _is_made_off_meta(kwargs)
        if involved and (is_read or _answers_python(function)):
            args, kwargs = self.values((args, kwargs))
            return function(*args, **kwargs)
        # In front of the call, which may change geometry. Without meta tensors the call comes
        # first: it changes nothing of what it is given, and most calls then stay on the host.
        kept = (self._kept(args), self._kept(kwargs)) if involved else None
        given = args, kwargs
        if kept and any(map(_is_strided_host, pytree.tree_leaves((args, kwargs)))):
            # Torch computes some mixtures from memory that is not there, and refuses others.
            changed = written(function, args, kwargs)
            if not (tells_what_it_writes(function) and all(it.is_meta for it in changed)):
                return self._run_at_once(function, args, kwargs)
            args, kwargs = _moved_beside(name, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except NotImplementedError:
            args, kwargs = given
            if written(function, args, kwargs) or kwargs.get("device") is not None:
                raise
            if is_random(function):
                self._catch_up(_generator_in(args, kwargs))
            # torch does not know the shapes of what it returns (geqrf): it runs at once, and its
            # values are kept.
            args, kwargs = self.values((args, kwargs))
            return pytree.tree_map(self.moved, function(*args, **kwargs))
        outputs = _meta_tensors(result)
        if not involved and not outputs:
            return result
        kept = kept or (self._kept(args), self._kept(kwargs))
        made = {self._number(tensor) for tensor in outputs if not self.has(tensor)}
        self._unknown -= made
        if name in _WITHOUT_VALUES:
            return result
        changed = written(function, *given) if tells_what_it_writes(function) else involved
        writes = made.union(self._number(tensor) for tensor in changed if tensor.is_meta)
        if writes:
            places = [
                self.place_of(it) if is_strided_meta(it) else None
                for it in pytree.tree_leaves(result)
            ]
            target = kept[0][0] if name in _REPLACING and isinstance(kept[0][0], MetaView) else None
            draws = self._draw(_generator_in(*given)) if is_random(function) else ()
            self._add(function, *kept, places, frozenset(made), frozenset(writes), target, draws)
        return result

    def _run_at_once(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes to host tensors; what it writes on the meta device is kept."""
        if is_random(function):
            self._catch_up(_generator_in(args, kwargs))
        tells = tells_what_it_writes(function)
        leaves = pytree.tree_leaves((args, kwargs))
        changed = written(function, args, kwargs) if tells else leaves
        changed = {id(it) for it in changed if is_strided_meta(it)}
        args, kwargs = self.values((args, kwargs))
        result = function(*args, **kwargs)
        for leaf, values in zip(leaves, pytree.tree_leaves((args, kwargs)), strict=True):
            if id(leaf) not in changed:
                continue
            if values.shape != leaf.shape:
                raise RuntimeError(
                    f"{function.overloadpacket.__name__} resizes its output, of shape "
                    f"{tuple(leaf.shape)} on the meta device, to {tuple(values.shape)}: give it one "
                    f"of that shape"
                )
            self.run(torch.ops.aten.copy_.default, (leaf, values), {})
        return result

    def add_constant(self, values: torch.Tensor, made: torch.Tensor) -> None:
        """Keep that a tensor was made of values."""
        self.adopt([made])
        place = self.place_of(made)
        only = frozenset((place.storage,))
        self._add(torch.clone, (values.detach().clone(),), {}, [place], only, only, None, ())

    def moved(self, values: Any) -> Any:
        """A tensor on the meta device that gets the values of one on the host; else the same."""
        if not isinstance(values, torch.Tensor):
            return values
        made = values.to("meta")
        self.add_constant(values, made)
        return made

    def add_initializer(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Keep a call of a function of ``torch.nn.init``, which fills its argument ``tensor``."""
        target = self.place_of(arguments["tensor"])
        kept = self._kept(arguments)
        # The generator that is given may not be the only one: sparse_ draws its permutations
        # elsewhere.
        given = arguments.get("generator")
        draws = self._draw(None) + (() if given is None else self._draw(given))
        self._add(function, (), kept, [], frozenset(), frozenset((target.storage,)), target, draws)

    def _add(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[MetaView | None],
        made: frozenset[int],
        writes: frozenset[int],
        target: MetaView | None,
        draws: tuple[Draw, ...],
    ) -> None:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, MetaView)]
        replaces = made
        if target is not None and target.covers(self.nbytes(target.storage)):
            is_read = sum(view.storage == target.storage for view in given) > 1
            replaces |= set() if is_read else {target.storage}
        reads = frozenset(view.storage for view in given) - replaces
        if self._unknown.isdisjoint(reads):
            self._unknown -= replaces
        else:
            self._unknown |= writes
        fills = len(given) == (target is not None)
        self._operations.append(
            Operation(function, args, kwargs, outputs, reads, writes, replaces, draws, fills)
        )

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
            self._unknown.add(number)
        return number

    def _kept(self, arguments: Any) -> Any:
        """Arguments as given later: meta tensors by place, host tensors with present values."""

        def keep(leaf: Any) -> Any:
            if is_strided_meta(leaf):
                return self.place_of(leaf)
            if isinstance(leaf, torch.Tensor):
                return leaf.detach().clone()
            return HOST if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        return pytree.tree_map(keep, arguments)

    def _catch_up(self, generator: torch.Generator | None) -> None:
        """Bring generators to where an eager construction has them by now.

        The host is about to draw numbers.
        """
        generator = generator or torch.default_generator
        digest = _digest(generator.get_state())
        if digest not in self._seeded:
            return
        self._generators[id(generator)] = generator
        steps = _needed(self._operations, frozenset())
        latest = self._operations[self._caught_up :]
        # Only the draws since the last time, unless the program has gone back, or they depend on
        # values.
        if digest in {draw.after for it in latest for draw in it.draws} and not any(
            step.is_wanted for step in steps
        ):
            steps = [
                ReplayStep(operation, is_wanted=False) for operation in latest if operation.draws
            ]
        list(self.repeat(ReplayPlan(steps, frozenset()), move_generators=True))
        self._caught_up = len(self._operations)

    def _draw(self, given: torch.Generator | None) -> tuple[Draw, ...]:
        """Reseed a generator in place of an operation's draw.

        No other program comes to that state.
        """
        generator = given or torch.default_generator
        self._generators[id(generator)] = generator
        state = generator.get_state()
        before = _digest(state)
        if before not in self._seeded:
            self._states.setdefault(before, state)
        # Not by the state alone: another draw from the same one may leave the generator elsewhere.
        self._draws += 1
        seed = hashlib.blake2b(before + self._draws.to_bytes(8, "little"), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(seed, "little"))
        after = _digest(generator.get_state())
        self._seeded.add(after)
        return (Draw(given, before, after),)

    def values(self, arguments: Any) -> Any:
        """Arguments of a call that needs values at once: ``item()``, ``allclose()``.

        Raises:
            RuntimeError: The making of one of them is not recorded.
        """
        needed = {self._number(it) for it in _meta_tensors(arguments)}
        if not needed.isdisjoint(self._unknown):
            raise RuntimeError(
                "expected a tensor with values, found one on the meta device that was made "
                "unrecorded"
            )
        found = dict(self.repeat(self.plan(needed)))
        for storage in needed - found.keys():
            found[storage] = torch.UntypedStorage(self.nbytes(storage), device=HOST)

        def real(leaf: Any) -> Any:
            if is_strided_meta(leaf):
                place = self.place_of(leaf)
                return place.over(found[place.storage])
            return HOST if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        return pytree.tree_map(real, arguments)

    # -- Replay

    def plan(self, wanted: Iterable[int]) -> ReplayPlan:
        """Operations, in order, for the final values of some storages."""
        kept = frozenset(wanted)
        return ReplayPlan(_needed(self._operations, kept) if kept else [], kept)

    def repeat(
        self, plan: ReplayPlan, move_generators: bool = False
    ) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Run operations on the host; yields each wanted storage with its memory once complete.

        Args:
            plan: Operations to run.
            move_generators: Whether generators that have not moved since are left where an eager
                construction leaves them; without it they stay as they are.
        """
        states = _GeneratorStates(
            self._states, [step.operation for step in plan.steps], self._generators.values()
        )
        memory: dict[int, torch.UntypedStorage] = {}
        with states.kept(move_generators):
            for step in plan.steps:
                with torch.no_grad(), HOST, states.around(step.operation) as generators:
                    self._run(step, memory, generators)
                for storage in step.ends:
                    held = memory.pop(storage)
                    if storage in plan.wanted:
                        yield storage, held
                    del held  # while the next operation runs

    def rewind(self) -> None:
        """Leave generators that have not moved since where they stood before the recording."""
        states = _GeneratorStates(self._states, self._operations, self._generators.values())
        with states.kept(move=True):
            for operation in self._operations:
                states.skip(operation)

    def _run(
        self,
        step: ReplayStep,
        memory: dict[int, torch.UntypedStorage],
        generators: dict[int, torch.Generator],
    ) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return generators.get(id(leaf), leaf)
            if not isinstance(leaf, MetaView):
                return leaf
            if not step.is_wanted:
                return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=HOST)
            if leaf.storage not in memory:
                memory[leaf.storage] = torch.UntypedStorage(self.nbytes(leaf.storage), device=HOST)
            return leaf.over(memory[leaf.storage])

        operation = step.operation
        part = step.part if step.is_wanted else (0, 0)
        if part is not None and _draws_in_order(operation):
            target = operation.args[0]
            tensor = real(target) if step.is_wanted else None
            generator = real(_generator_in(operation.args, operation.kwargs))
            _draw_part(operation, target.numel, tensor, part, generator)
            return
        args, kwargs = pytree.tree_map(real, (operation.args, operation.kwargs))
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(operation.default_dtype)
        try:
            result = operation.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(default_dtype)
        if not step.is_wanted:
            return
        held = {
            storage_of(it)
            for it in pytree.tree_leaves((args, kwargs))
            if isinstance(it, torch.Tensor)
        }
        for place, found in zip(operation.outputs, pytree.tree_leaves(result), strict=False):
            if place is None or place.storage in memory or not isinstance(found, torch.Tensor):
                continue
            nbytes = self.nbytes(place.storage)
            as_planned = _lying(found, place.storage) == place
            own = found.untyped_storage()
            if as_planned and own.nbytes() == nbytes and storage_of(found) not in held:
                memory[place.storage] = own
            else:
                memory[place.storage] = torch.UntypedStorage(nbytes, device=HOST)
                # Statistics that a batch norm saves for its backward have other shapes on meta.
                if found.shape == place.shape:
                    place.over(memory[place.storage]).copy_(found)


class _Operations(DispatchMode):
    """Hears of every operation."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._recording.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Records Python calls that dispatch no operation on the meta device."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = cast(Any, args[0] if args else None)
        is_made = func in _CONSTANTS and not isinstance(first, torch.Tensor)
        if not self._recording.builds and _is_meant_for_meta(args, kwargs):
            with self._recording.paused():
                return func(*args, **kwargs)
        if func in _MOVING and self._has(first):
            return _stay(func, args, kwargs)
        if func in _ARRAYS and first.is_meta:
            array = func(*self._recording.values(args), **kwargs)
            array.setflags(write=False)  # what is written there would reach nobody
            return array
        if func == _SET_DATA and first.is_meta != args[1].is_meta:
            if not first.is_meta:
                raise RuntimeError(
                    f"expected `.data` of a tensor with values, found one of shape "
                    f"{tuple(args[1].shape)} that gets them as its model is sharded: copy_() them"
                )
            args = first, self._recording.moved(args[1])
        elif func in _INDEXING and first.is_meta:
            args = (first, _with_index_on_host(args[1]), *args[2:])
        elif func in _READING or (is_made and _meta_tensors(first)):
            args = self._recording.values(args)
        elif is_made and type(first) is list and not first and _is_asked_by_transformers(kwargs):
            # On which device models are being built; it initialises none on the meta device.
            kwargs = {"device": HOST}
        result = func(*args, **kwargs)
        if func in _CONSTANTS and is_strided_meta(result) and not self._recording.has(result):
            self._recording.add_constant(func(*args, **{**kwargs, "device": HOST}), result)
        elif func == _DEVICE and self._has(first):
            _refuse_pickle(_caller(sys._getframe(1)), args[0])
        elif func == _IS_META and self._has(first, or_is_built=True):
            self._note_initializer(frame := _caller(sys._getframe(1)), args[0])
            # load_state_dict would warn that its copies are lost.
            return frame is None or frame.f_code.co_name != _LOADING
        return result

    def _has(self, leaf: Any, or_is_built: bool = False) -> bool:
        """Whether a tensor waits for values that were recorded, or that are while a model is built."""
        if not is_strided_meta(leaf):
            return False
        return (or_is_built and self._recording.builds) or self._recording.has(leaf)

    def _note_initializer(self, frame: FrameType | None, tensor: torch.Tensor) -> None:
        """Note a ``torch.nn.init`` function that asks whether its tensor is meta, then returns."""
        if frame is None or frame.f_globals.get("__name__") != nn.init.__name__:
            return
        if frame.f_code.co_name not in _INITIALIZERS:
            return
        given = inspect.getargvalues(frame)
        if given.locals["tensor"] is tensor:
            function = vars(nn.init)[frame.f_code.co_name]
            self._recording.add_initializer(
                function, {name: given.locals[name] for name in given.args}
            )


def _refuse_pickle(frame: FrameType | None, tensor: torch.Tensor) -> None:
    """Raise if it is for a pickle that torch asks for the device of a tensor without values."""
    if frame is not None and frame.f_code.co_name == _PICKLING:
        raise RuntimeError(
            f"expected a tensor with values to pickle or save, found one of shape "
            f"{tuple(tensor.shape)} on the meta device, of a model that gets its values as it is "
            f"sharded. Copy it by deepcopy() or clone(), which get them, too; save it in "
            f"on_fit_start()"
        )


def _caller(frame: FrameType | None) -> FrameType | None:
    """The frame that has called a function of torch, behind those of modes."""
    while frame is not None and frame.f_globals.get("__name__") in (
        "torch.utils._device",
        "torch.overrides",
    ):
        frame = frame.f_back
    return frame


def _is_asked_by_transformers(kwargs: Mapping[str, Any]) -> bool:
    # A device context inside of the recording has named the device.
    caller = _caller(sys._getframe(2))
    name = "" if caller is None else caller.f_globals.get("__name__", "")
    return kwargs.keys() <= {"device"} and name.startswith("transformers.")


def _with_index_on_host(index: Any) -> Any:
    """An index with its lists of numbers, ranges and arrays as host tensors, which have values."""
    if type(index) is tuple:
        return tuple(map(_with_index_on_host, index))
    is_list = type(index) is list and not any(
        isinstance(it, torch.Tensor) for it in pytree.tree_leaves(index)
    )
    is_array = isinstance(index, range) or hasattr(index, "__array_interface__")
    return torch.as_tensor(index, device=HOST) if is_list or is_array else index


def is_strided_meta(leaf: Any) -> bool:
    """Whether it is a tensor on the meta device that has a place; a lazy parameter has none yet."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
        return False
    return leaf.layout is torch.strided and not is_lazy(leaf)


_HANDED_OUT = "_shardeddp_handed_out"


class _HandsOutData(nn.Parameter):
    """A parameter between its recording and the next: keeps what ``.data`` gives, which has its own version."""

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tensor without a graph; one on the meta device is kept until the next recording."""
        data: torch.Tensor = _GET_DATA(self)
        if _IS_META(self):
            vars(self).setdefault(_HANDED_OUT, []).append((data, data._version))
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _SET_DATA(self, value)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An ordinary parameter."""
        copied = super().__deepcopy__(memo)  # pyright: ignore[reportAttributeAccessIssue]
        copied.__class__ = nn.Parameter
        return copied


def tensors_on_meta() -> list[torch.Tensor]:
    """The strided tensors that exist on the meta device, whatever refers to them."""
    tensors = [it for it in gc.get_objects() if issubclass(type(it), torch.Tensor)]
    with without_torch_function():
        return [it for it in tensors if is_strided_meta(it) and _has_memory(it)]


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except NotImplementedError:  # a wrapper of torch.func
        return False
    return True


def _meta_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if is_strided_meta(leaf)]


def _is_strided_host(leaf: Any) -> bool:
    """Whether it is a tensor with values."""
    is_host = isinstance(leaf, torch.Tensor) and not leaf.is_meta
    return is_host and leaf.layout is torch.strided


def _moved_beside(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments with all tensors on the meta device, but for indices, whose values count."""

    def move(leaf: Any) -> Any:
        return leaf.to("meta") if _is_strided_host(leaf) else leaf

    moved = pytree.tree_map(move, (args, kwargs))
    if "index" in name and isinstance(args[1], (list, tuple)):
        return (moved[0][0], args[1], *moved[0][2:]), moved[1]
    return moved


def _stay(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor on the meta device, converted, if it is to go to the host, where it is said to be."""
    tensor, *others = args
    if func is torch.Tensor.cpu:
        others = [HOST, *others]
    flags = [it for it in others if isinstance(it, bool)]  # non_blocking, copy
    copy = kwargs.pop("copy", flags[1:] == [True])
    device, dtype, _, memory_format = parse_to(
        *[it for it in others if not isinstance(it, bool)], **kwargs
    )
    if device is not None and device.type != "cpu":
        return func(*args, copy=copy, **kwargs)
    layout = {} if memory_format is None else {"memory_format": memory_format}
    return torch.Tensor.to(tensor, dtype or tensor.dtype, copy=copy, **layout)


def _is_meant_for_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a new tensor is on meta by its name or a context, and not by another's device."""
    by_context = sys._getframe(2).f_globals.get("__name__") == "torch.utils._device"
    is_named = by_context or kwargs.get("device") == "meta"
    return is_named and _is_made_on_meta(kwargs) and not _meta_tensors(args)


def _generator_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    return next(
        (it for it in (kwargs.get("generator"), *args) if isinstance(it, torch.Generator)), None
    )


def _is_made_on_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _is_made_off_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and not _is_made_on_meta(kwargs)


@cache
def _answers_python(function: Any) -> bool:
    """Whether an operation returns a number or a truth: ``item()``, ``allclose()``."""
    returns = [str(it.type) for it in function._schema.returns]
    return bool(returns) and set(returns) <= {"bool", "int", "float", "number"}


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(cast(Any, state.numpy()), digest_size=16).digest()


# -- Plan: the operations that a replay needs, ordered for little memory

_GENERATORS = -1  # a number that no storage has: operations that draw keep their order


@dataclass(slots=True, eq=False)
class ReplayStep:
    """An operation that is going to be repeated."""

    operation: Operation
    is_wanted: bool
    """Whether its values matter; otherwise it moves generators and no more."""

    ends: list[int] = field(default_factory=list[int])
    """Storages that no later step needs."""

    part: tuple[int, int] | None = None
    """First and last element, of those that it draws into a flat tensor, that matter; None: all do."""

    def places(self) -> Iterator[int]:
        """Storages to be used in the order of the recording."""
        if self.is_wanted:
            yield from sorted(self.operation.reads | self.operation.writes)
        if self.operation.draws:
            yield _GENERATORS


class ReplayPlan:
    """Order of operations for what is wanted.

    An operation runs as soon as all has run that touched its memory earlier; only draws keep the
    order of the recording. So a parameter that its constructor draws and a parent scales at the
    very end is complete at once.
    """

    def __init__(self, steps: list[ReplayStep], wanted: frozenset[int]) -> None:
        self.wanted = wanted
        self.steps = _in_order(steps)
        last = {place: step for step in self.steps for place in step.places()}
        for place, step in last.items():
            if place != _GENERATORS:
                step.ends.append(place)

    @property
    def completed(self) -> list[int]:
        """The wanted storages that get values, in the order in which they do."""
        return [storage for step in self.steps for storage in step.ends if storage in self.wanted]

    def narrow(self, parts: Mapping[MetaView, tuple[int, int]]) -> None:
        """Let tensors get the values of some elements alone, where no more than a draw makes them.

        Args:
            parts: By place, the flat elements that matter: the first, and that behind the last.
        """
        places = {place.storage: place for place in parts}
        users: dict[int, list[ReplayStep]] = defaultdict(list)
        for step in self.steps:
            for storage in step.operation.reads | step.operation.writes if step.is_wanted else ():
                if storage in places:
                    users[storage].append(step)
        for storage, place in places.items():
            (step, *more) = users[storage]
            operation = step.operation
            if not more and storage in operation.replaces and operation.args[:1] == (place,):
                step.part = parts[place]

    def digest(self) -> bytes:
        """Digest, in 16 bytes, of operations, arguments and generator states.

        Ranks with equal ones get the same values. Arguments that cannot be compared make them
        differ.
        """
        found = xxhash.xxh3_128()
        for step in self.steps:
            operation = step.operation
            leaves, structure = pytree.tree_flatten((operation.args, operation.kwargs))
            for each in (
                _name_of(operation.function),
                structure,
                [(draw.before, draw.after) for draw in operation.draws],
                operation.outputs,
                operation.default_dtype,
                step.is_wanted,
                step.ends,
                *leaves,
            ):
                _update(found, each)
        return found.digest()


def _name_of(function: Callable[..., Any]) -> str:
    is_operation = isinstance(function, OpOverload)
    return str(function) if is_operation else getattr(function, "__qualname__", repr(function))


def _update(found: xxhash.xxh3_128, each: Any) -> None:
    if isinstance(each, torch.Generator):
        each = each.device  # its states are among the draws
    if isinstance(each, torch.Tensor) and each.layout is torch.strided:
        plain = each.detach().cpu().resolve_conj().resolve_neg().contiguous()
        found.update(repr((each.dtype, each.shape)).encode())
        found.update(cast(Any, plain.reshape(-1).view(torch.uint8).numpy()))
    else:
        found.update(repr(each).encode())


def _needed(operations: Sequence[Operation], wanted: frozenset[int]) -> list[ReplayStep]:
    """Steps, from the last to the first, that are read later or draw."""
    live = set(wanted)
    steps: list[ReplayStep] = []
    for operation in reversed(operations):
        is_wanted = not live.isdisjoint(operation.writes) or bool(
            operation.draws and not operation.only_fills
        )
        if is_wanted:
            live -= operation.replaces
            live |= operation.reads
        if is_wanted or operation.draws:
            steps.append(ReplayStep(operation, is_wanted))
    return steps[::-1]


def _in_order(steps: list[ReplayStep]) -> list[ReplayStep]:
    places = [tuple(step.places()) for step in steps]
    waiting: dict[int, deque[int]] = defaultdict(deque)
    for index, needed in enumerate(places):
        for place in needed:
            waiting[place].append(index)
    order: list[int] = []
    is_done = [False] * len(steps)

    def emit(index: int) -> list[int]:
        """Run one; returns what comes next to its memory."""
        is_done[index] = True
        order.append(index)
        for place in places[index]:
            waiting[place].popleft()
        return [
            waiting[place][0] for place in places[index] if place != _GENERATORS and waiting[place]
        ]

    def pull(index: int) -> list[int]:
        """Run a step early unless it waits for a draw; returns what comes next to all that ran."""
        following: list[int] = []
        stack = [index]
        while stack:
            blocker = next(
                (
                    waiting[place][0]
                    for place in places[stack[-1]]
                    if waiting[place][0] != stack[-1]
                ),
                None,
            )
            if blocker is None:
                following += emit(stack.pop())
            elif steps[blocker].operation.draws:
                break
            else:
                stack.append(blocker)
        return following

    for index in range(len(steps)):
        following = [] if is_done[index] else emit(index)
        while following:
            early = following.pop()
            if not is_done[early]:
                following += pull(early)
    return [steps[index] for index in order]


# -- Draws of which a part is wanted
#
# A generator of the host gives one number after the other, so a rank has to come past the numbers of
# all others. It need not turn them into floats: that is most of the time.

_IN_ORDER = {torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default}
_BLOCK = 16
"""Elements that `normal_` makes of as many random numbers, and of no others."""


def _draws_in_order(operation: Operation) -> bool:
    """Whether any blocks of what an operation fills can be drawn by themselves."""
    target = operation.args[0] if operation.args else None
    return (
        operation.function in _IN_ORDER
        and isinstance(target, MetaView)
        and target.is_contiguous
        and target.numel % _BLOCK == 0
        and _draws_by_block(operation.function, target.dtype)
    )


def _draw_part(
    operation: Operation,
    numel: int,
    tensor: torch.Tensor | None,
    part: tuple[int, int],
    generator: torch.Generator | None,
) -> None:
    """Fill the blocks of a tensor that have the wanted elements, and come past all others."""
    start, stop = part[0] // _BLOCK * _BLOCK, -(-part[1] // _BLOCK) * _BLOCK
    start = min(start, stop)
    _pass_by(start, generator)
    if tensor is not None and start < stop:
        more = {key: it for key, it in operation.kwargs.items() if key != "generator"}
        values = tensor.view(-1)[start:stop]
        operation.function(values, *operation.args[1:], **more, generator=generator)
    _pass_by(numel - stop, generator)


def _pass_by(count: int, generator: torch.Generator | None) -> None:
    """Bring a generator of the host behind as many 32-bit numbers."""
    scratch = torch.empty(min(count, 2**16), dtype=torch.uint8, device=HOST)
    for passed in range(0, count, 2**16):
        scratch[: count - passed].random_(generator=generator)


@cache
def _draws_by_block(function: Any, dtype: torch.dtype) -> bool:
    """Whether this release of torch takes one 32-bit number for each element, block after block."""
    if not dtype.is_floating_point:
        return False
    whole, parts = (torch.zeros(6 * _BLOCK, dtype=dtype, device=HOST) for _ in range(2))
    one, other = (torch.Generator(HOST).manual_seed(0) for _ in range(2))
    function(whole, generator=one)
    _pass_by(2 * _BLOCK, other)
    function(parts[2 * _BLOCK : 5 * _BLOCK], generator=other)
    whole[: 2 * _BLOCK], whole[5 * _BLOCK :] = 0, 0
    _pass_by(_BLOCK, other)
    return torch.equal(whole, parts) and torch.equal(one.get_state(), other.get_state())


# -- Generator states in front of each operation


class _GeneratorStates:
    """States of generators while operations are repeated.

    While it is recorded, an operation that draws seeds its generator by the state that it finds.
    The state behind it is found again in front of the next, or wherever a program has saved and set
    it: it stands for the one behind the draw.

    Args:
        known: States to which a program has brought generators itself, by digest.
        operations: Operations to repeat.
        generators: All that were drawn from.
    """

    def __init__(
        self,
        known: dict[bytes, torch.Tensor],
        operations: Sequence[Operation],
        generators: Iterable[torch.Generator],
    ) -> None:
        self._known = known
        self._behind: dict[bytes, torch.Tensor] = {}
        self._now = {generator: _digest(generator.get_state()) for generator in generators}
        self._uses = Counter(draw.before for operation in operations for draw in operation.draws)
        # A state takes 5 KB: it is let go of behind its last use.
        self._uses.update(self._now.values())

    @contextmanager
    def kept(self, move: bool) -> Generator[None]:
        """Keep the program's generators.

        In the end, move those that stand where an operation has left them.
        """
        states = {generator: generator.get_state() for generator in self._now}
        try:
            yield
        finally:
            for generator, digest in self._now.items():
                generator.set_state(
                    self._behind.get(digest, states[generator]) if move else states[generator]
                )

    @contextmanager
    def around(self, operation: Operation) -> Generator[dict[int, torch.Generator]]:
        """Surround an operation that draws; yields what replaces the generators given to it."""
        standing: list[tuple[Draw, torch.Generator]] = []
        for draw in operation.draws:
            generator = draw.generator
            own = (
                torch.default_generator if generator is None else torch.Generator(generator.device)
            )
            own.set_state(self._before(draw))
            standing.append((draw, own))
        yield {id(draw.generator): own for draw, own in standing if draw.generator is not None}
        for draw, own in standing:
            self._behind[draw.after] = own.get_state()

    def skip(self, operation: Operation) -> None:
        """Go past an operation that is not repeated, and draws nothing."""
        for draw in operation.draws:
            self._behind[draw.after] = self._before(draw)

    def _before(self, draw: Draw) -> torch.Tensor:
        state = self._behind.get(draw.before)
        self._uses[draw.before] -= 1
        if not self._uses[draw.before]:
            self._behind.pop(draw.before, None)
        return self._known[draw.before] if state is None else state
