"""Recording of a model's construction on the meta device.

Tensors on the meta device have shapes but no values. A recording keeps the operations that would
have given them values: those of constructors and initializers, and conversions to another dtype.
Replayed on the host (``replay.py``), they give the values of an eager construction, bit for bit,
one parameter after the other.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from shardeddp.engine.replay import (
    HOST,
    Draw,
    MetaView,
    Operation,
    ReplayPlan,
    ReplayStep,
    digest_of,
    generator_in,
    needed_steps,
    replay,
    rewind_generators,
)
from shardeddp.tensor.operations import is_random, names_its_writes, written
from shardeddp.torch_private import (
    DispatchMode,
    HigherOrderOperator,
    leave_mode,
    parse_to,
    pytree,
    storage_of,
    storage_use_count,
    without_torch_function,
)

# -- Recording: operations of a construction, in order

_REPLACING = {
    *("normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "bernoulli_"),
    *("exponential_", "geometric_", "log_normal_", "cauchy_"),
}
_WITHOUT_VALUES = {
    *("empty", "empty_like", "empty_strided", "empty_permuted"),
    *("new_empty", "new_empty_strided"),
}

# Functions that make tensors on the meta device without dispatch.
_CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)

# Functions of torch.nn.init that return at once for tensors on the meta device.
_INITIALIZERS = {"_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_"}

_LOADING = "_load_from_state_dict"  # of nn.Module

# Functions that turn a list into an index tensor, on the device of the indexed tensor.
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)

# Functions that need values and are not operations.
_READING = (torch.Tensor.tolist, torch.Tensor.__format__)
_ARRAYS = (torch.Tensor.numpy, torch.Tensor.__array__)

# Conversions; to the host they do not move a tensor, since an eager construction has it there.
_MOVING = (torch.Tensor.to, torch.Tensor.cpu)

_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_PICKLING = "_reduce_ex_internal"  # of torch.Tensor

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Recording:
    """Operations on the meta device, recorded while :meth:`active`."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        # By index; kept alive, so that no address is used again.
        self._storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}  # index of each storage, by address
        self._unknown: set[int] = set()  # storages made unrecorded, or from unrecorded values
        self._set_aside: set[int] = set()  # storages that get values elsewhere
        self._seeded: set[bytes] = set()  # digests of generator states that the recording set
        self._states: dict[bytes, torch.Tensor] = {}  # states that the program set, by digest
        self._generators: dict[int, torch.Generator] = {}
        self._draws = 0  # number of draws so far
        self._caught_up = 0  # number of operations with draws that generators have passed
        self._is_active = self._is_paused = False
        self.builds = True
        """Whether new meta tensors are of a model that gets values."""

        # Tensors that were on the meta device before the first recording, by address.
        self._former: dict[int, weakref.ref[torch.Tensor]] | None = None
        # Version counters of recorded tensors; a write increases them.
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.written: set[int] = set()
        """Storages with unrecorded writes, which are lost on the meta device."""

        self.reset_names: set[str] = set()
        """Names of tensors of models built unrecorded; only their resets are recorded."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as an empty recording, because a copied model has other tensors."""
        return type(self), ()

    @contextmanager
    def active(self, *, builds: bool = True) -> Generator[None]:
        """Record this thread's operations on meta tensors; compiled code runs eagerly.

        Args:
            builds: True if tensors made under ``torch.device("meta")`` are of a model that gets
                values; False in hooks, which make models there to count FLOPs by shapes.
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
            for mode in reversed(modes):  # modes of the user, entered since, stay active
                leave_mode(mode)
            if modes:
                self._is_active = False

    @contextmanager
    def watched(self, *, builds: bool = True) -> Generator[None]:
        """Record, as :meth:`active` does, and detect later writes to the recorded tensors."""
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
        """Add storages with unrecorded writes since :meth:`watched` to ``written``."""
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

    def view_of(self, tensor: torch.Tensor) -> MetaView:
        """Return the view geometry of a strided meta tensor; an unrecorded one has no values."""
        return MetaView.of(tensor, self._number(tensor))

    def adopt(self, tensors: Iterable[torch.Tensor], names: Iterable[str] = ()) -> None:
        """Treat tensors that were made unrecorded as uninitialised ones; ``names`` in their model."""
        self.reset_names.update(names)
        self._unknown -= {self._number(tensor) for tensor in tensors}

    def set_aside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark tensors that get values elsewhere: parameters of weight averages, sharded later."""
        self._set_aside |= {self._number(tensor) for tensor in filter(is_strided_meta, tensors)}

    def is_set_aside(self, tensor: torch.Tensor) -> bool:
        """Return whether a recorded tensor gets its values elsewhere."""
        return self._numbers[storage_of(tensor)] in self._set_aside

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether any operation on the memory of a tensor was recorded."""
        return storage_of(tensor) in self._numbers

    def has_missed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was made unrecorded, after the first recording."""
        held = (self._former or {}).get(id(tensor))
        return not (self.has(tensor) or (held is not None and held() is tensor))

    def knows(self, storage: int) -> bool:
        """Return whether all operations that gave a storage its values were recorded."""
        return storage not in self._unknown

    @property
    def is_used(self) -> bool:
        """Whether any tensor still refers to recorded storages."""
        return any(storage_use_count(storage._cdata) > 1 for storage in self._storages)

    def forget_values(self) -> None:
        """Drop all operations but draws if no recorded tensor is left, to free their constants."""
        if not self.is_used:
            behind = {id(it) for it in self.operations[: self._caught_up]}
            self.operations = [it.operation for it in needed_steps(self.operations, frozenset())]
            self._caught_up = sum(id(it) in behind for it in self.operations)

    def nbytes(self, storage: int) -> int:
        """Return the size of a storage in bytes."""
        return self._storages[storage].nbytes()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the recording: operations inside run unrecorded."""
        former, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = former

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch, and record it if it involves the meta device."""
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
            self._catch_up(generator_in(args, kwargs))
        if involved and not self.builds and not any(map(self.has, involved)):
            return function(*args, **kwargs)
        is_read = name == "_to_copy" and _is_made_off_meta(kwargs)
        if involved and (is_read or _answers_python(function)):
            args, kwargs = self.values((args, kwargs))
            return function(*args, **kwargs)
        # Arguments are kept before the call, which may change their geometry. Without meta tensors
        # the call comes first: it does not change its arguments, and most stay on the host.
        kept = (self._kept(args), self._kept(kwargs)) if involved else None
        given = args, kwargs
        if kept and any(map(_is_strided_host, pytree.tree_leaves((args, kwargs)))):
            # Torch reads invalid memory for some mixtures of meta and host, and refuses others.
            changed = written(function, args, kwargs)
            if not (names_its_writes(function) and all(it.is_meta for it in changed)):
                return self._run_at_once(function, args, kwargs)
            args, kwargs = _moved_beside(name, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except NotImplementedError:
            args, kwargs = given
            if written(function, args, kwargs) or kwargs.get("device") is not None:
                raise
            if is_random(function):
                self._catch_up(generator_in(args, kwargs))
            # torch cannot infer the shapes of its results (geqrf): it runs at once, and its values
            # are kept.
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
        changed = written(function, *given) if names_its_writes(function) else involved
        writes = made.union(self._number(tensor) for tensor in changed if tensor.is_meta)
        if writes:
            views = [
                self.view_of(it) if is_strided_meta(it) else None
                for it in pytree.tree_leaves(result)
            ]
            target = kept[0][0] if name in _REPLACING and isinstance(kept[0][0], MetaView) else None
            draws = self._draw(generator_in(*given)) if is_random(function) else ()
            self._add(function, *kept, views, frozenset(made), frozenset(writes), target, draws)
        return result

    def _run_at_once(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes to host tensors; record its writes to meta tensors."""
        if is_random(function):
            self._catch_up(generator_in(args, kwargs))
        tells = names_its_writes(function)
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
        """Record that a meta tensor was made of values on the host."""
        self.adopt([made])
        view = self.view_of(made)
        only = frozenset((view.storage,))
        self._add(torch.clone, (values.detach().clone(),), {}, [view], only, only, None, ())

    def moved(self, values: Any) -> Any:
        """Return a meta tensor that gets the values of a host tensor; other objects unchanged."""
        if not isinstance(values, torch.Tensor):
            return values
        made = values.to("meta")
        self.add_constant(values, made)
        return made

    def add_initializer(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Record a call of a ``torch.nn.init`` function, which fills its argument ``tensor``."""
        target = self.view_of(arguments["tensor"])
        kept = self._kept(arguments)
        # The given generator may not be the only one: sparse_ draws its permutations from the
        # default one.
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
        self.operations.append(
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
        """Return arguments for the replay: geometry of meta tensors, copies of host tensors."""

        def keep(leaf: Any) -> Any:
            if is_strided_meta(leaf):
                return self.view_of(leaf)
            if isinstance(leaf, torch.Tensor):
                return leaf.detach().clone()
            return HOST if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        return pytree.tree_map(keep, arguments)

    def _catch_up(self, generator: torch.Generator | None) -> None:
        """Move generators to their states in an eager construction, before a draw on the host."""
        generator = generator or torch.default_generator
        digest = digest_of(generator.get_state())
        if digest not in self._seeded:
            return
        self._generators[id(generator)] = generator
        steps = needed_steps(self.operations, frozenset())
        latest = self.operations[self._caught_up :]
        # Only the draws since the last time, unless the program has restored an earlier state, or
        # the draws depend on values.
        if digest in {draw.after for it in latest for draw in it.draws} and not any(
            step.is_wanted for step in steps
        ):
            steps = [
                ReplayStep(operation, is_wanted=False) for operation in latest if operation.draws
            ]
        list(self.repeat(ReplayPlan(steps, frozenset()), move_generators=True))
        self._caught_up = len(self.operations)

    def _draw(self, given: torch.Generator | None) -> tuple[Draw, ...]:
        """Reseed a generator instead of an operation's draw, to a state unique to this draw."""
        generator = given or torch.default_generator
        self._generators[id(generator)] = generator
        state = generator.get_state()
        before = digest_of(state)
        if before not in self._seeded:
            self._states.setdefault(before, state)
        # The seed includes the draw's number: draws from equal states may end in different states.
        self._draws += 1
        seed = hashlib.blake2b(before + self._draws.to_bytes(8, "little"), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(seed, "little"))
        after = digest_of(generator.get_state())
        self._seeded.add(after)
        return (Draw(given, before, after),)

    def values(self, arguments: Any) -> Any:
        """Return arguments with values, for a call that needs them now: ``item()`` say."""
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
                view = self.view_of(leaf)
                return view.over(found[view.storage])
            return HOST if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        return pytree.tree_map(real, arguments)

    # -- Replay

    def plan(self, wanted: Iterable[int]) -> ReplayPlan:
        """Plan the operations, in order, for the final values of some storages."""
        kept = frozenset(wanted)
        return ReplayPlan(needed_steps(self.operations, kept) if kept else [], kept)

    def repeat(
        self, plan: ReplayPlan, move_generators: bool = False
    ) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Run operations on the host; see :func:`replay`, which says what the arguments mean."""
        generators = self._generators.values()
        return replay(plan, self.nbytes, self._states, generators, move_generators=move_generators)

    def rewind(self) -> None:
        """Restore the states before the recording of generators that have not moved since."""
        rewind_generators(self.operations, self._states, self._generators.values())


class _Operations(DispatchMode):
    """Passes every operation to the recording."""

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
            array.setflags(write=False)  # writes would be lost
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
            # transformers asks for the device of construction, and skips initialisation on meta.
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
        """Return whether a meta tensor is recorded, or (``or_is_built``) a model is being built."""
        if not is_strided_meta(leaf):
            return False
        return (or_is_built and self._recording.builds) or self._recording.has(leaf)

    def _note_initializer(self, frame: FrameType | None, tensor: torch.Tensor) -> None:
        """Record a ``torch.nn.init`` function that returns early because its tensor is meta."""
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
    """Raise an error if torch reads the device of a tensor without values to pickle it."""
    if frame is not None and frame.f_code.co_name == _PICKLING:
        raise RuntimeError(
            f"expected a tensor with values to pickle or save, found one of shape "
            f"{tuple(tensor.shape)} on the meta device, of a model that gets its values as it is "
            f"sharded. Copy it by deepcopy() or clone(), which get them, too; save it in "
            f"on_fit_start()"
        )


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called a function of torch, skipping frames of modes."""
    while frame is not None and frame.f_globals.get("__name__") in (
        "torch.utils._device",
        "torch.overrides",
    ):
        frame = frame.f_back
    return frame


def _is_asked_by_transformers(kwargs: Mapping[str, Any]) -> bool:
    # A device context inside of the recording may have set the device.
    caller = _caller(sys._getframe(2))
    name = "" if caller is None else caller.f_globals.get("__name__", "")
    return kwargs.keys() <= {"device"} and name.startswith("transformers.")


def _with_index_on_host(index: Any) -> Any:
    """Convert lists of numbers, ranges and arrays in an index to host tensors, with values."""
    if type(index) is tuple:
        return tuple(map(_with_index_on_host, index))
    is_list = type(index) is list and not any(
        isinstance(it, torch.Tensor) for it in pytree.tree_leaves(index)
    )
    is_array = isinstance(index, range) or hasattr(index, "__array_interface__")
    return torch.as_tensor(index, device=HOST) if is_list or is_array else index


def is_strided_meta(leaf: Any) -> bool:
    """Return whether it is a strided tensor on the meta device, and not a lazy parameter."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
        return False
    return leaf.layout is torch.strided and not is_lazy(leaf)


_HANDED_OUT = "_shardeddp_handed_out"


class _HandsOutData(nn.Parameter):
    """Parameter between recordings; keeps results of ``.data``, which have their own versions."""

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tensor without a graph; a meta tensor is kept until the next recording."""
        data: torch.Tensor = _GET_DATA(self)
        if _IS_META(self):
            vars(self).setdefault(_HANDED_OUT, []).append((data, data._version))
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _SET_DATA(self, value)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as a plain parameter."""
        copied = super().__deepcopy__(memo)  # pyright: ignore[reportAttributeAccessIssue]
        copied.__class__ = nn.Parameter
        return copied


def tensors_on_meta() -> list[torch.Tensor]:
    """Return all strided tensors of this process on the meta device."""
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
    """Return whether it is a strided tensor with values."""
    is_host = isinstance(leaf, torch.Tensor) and not leaf.is_meta
    return is_host and leaf.layout is torch.strided


def _moved_beside(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move all tensors of the arguments to the meta device, except for indices."""

    def move(leaf: Any) -> Any:
        return leaf.to("meta") if _is_strided_host(leaf) else leaf

    moved = pytree.tree_map(move, (args, kwargs))
    if "index" in name and isinstance(args[1], (list, tuple)):
        return (moved[0][0], args[1], *moved[0][2:]), moved[1]
    return moved


def _stay(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert a meta tensor without moving it to the host; other conversions are unchanged."""
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
    """Return whether a new tensor is on meta by an explicit name or a context, not by a tensor."""
    by_context = sys._getframe(2).f_globals.get("__name__") == "torch.utils._device"
    is_named = by_context or kwargs.get("device") == "meta"
    return is_named and _is_made_on_meta(kwargs) and not _meta_tensors(args)


def _is_made_on_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _is_made_off_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and not _is_made_on_meta(kwargs)


@cache
def _answers_python(function: Any) -> bool:
    """Return whether an operation returns Python numbers or bools: ``item()``, ``allclose()``."""
    returns = [str(it.type) for it in function._schema.returns]
    return bool(returns) and set(returns) <= {"bool", "int", "float", "number"}
