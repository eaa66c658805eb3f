"""Replay of recorded operations on the host: values of wanted tensors, with little memory."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
import xxhash

from shardeddp.torch_private import OpOverload, neg_view, pytree, storage_of

HOST = torch.device("cpu")

# -- Recorded operations: call, storages and random numbers


@dataclass(frozen=True, slots=True)
class MetaView:
    """View geometry of a meta tensor in its storage."""

    storage: int
    """Index of the storage in the recording; the same on every rank that builds the same model."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> MetaView:
        """Return the view geometry of a strided tensor in the storage with this index."""
        geometry = tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return cls(storage, *geometry, tensor.is_conj(), tensor.is_neg())

    def over(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this geometry over real memory."""
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
        """Whether elements are contiguous in memory, in the order of their indices."""
        return _is_dense(reversed([*zip(self.stride, self.shape, strict=True)]))

    def covers(self, nbytes: int) -> bool:
        """Return whether the view has each byte of a storage of this size exactly once."""
        is_dense = _is_dense(sorted(zip(self.stride, self.shape, strict=True)))
        return is_dense and self.offset == 0 and self.numel * self.dtype.itemsize == nbytes


def _is_dense(dims: Iterable[tuple[int, int]]) -> bool:
    """Return whether strides and sizes of dims, the innermost first, leave no gap."""
    reach = 1
    for stride, size in dims:
        if size != 1 and stride != reach:
            return False
        reach *= size
    return True


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers that an operation takes from a generator."""

    generator: torch.Generator | None
    """Generator; None: the default one of the host, seeded by ``torch.manual_seed``."""

    before: bytes
    """Digest of the generator's state before the operation."""

    after: bytes
    """Digest of the generator's state after the operation."""


@dataclass(slots=True, eq=False)
class Operation:
    """Call that gives values to meta tensors; their storages are known by index."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[MetaView | None]
    """View geometry of each leaf of the result; None for leaves that are not meta tensors."""

    reads: frozenset[int]
    writes: frozenset[int]
    """Storages that the operation changes or makes."""

    replaces: frozenset[int]
    """Storages that the operation overwrites as a whole; their former values do not matter."""

    draws: tuple[Draw, ...]
    only_fills: bool
    """Whether the count of drawn random numbers depends on shapes only."""

    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)


def generator_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """Return the generator among the arguments of an operation; None: the default one."""
    return next(
        (it for it in (kwargs.get("generator"), *args) if isinstance(it, torch.Generator)), None
    )


def digest_of(state: torch.Tensor) -> bytes:
    """Return a digest of a generator's state."""
    return hashlib.blake2b(cast(Any, state.numpy()), digest_size=16).digest()


# -- Plan: operations of a replay, ordered for little memory

_GENERATORS = -1  # pseudo index of a storage that all draws use, so that they keep their order


@dataclass(slots=True, eq=False)
class ReplayStep:
    """Operation of a replay."""

    operation: Operation
    is_wanted: bool
    """Whether its values are needed; if not, it only moves generators."""

    ends: list[int] = field(default_factory=list[int])
    """Storages that no later step needs."""

    part: tuple[int, int] | None = None
    """Interval of needed elements in the flat tensor that it fills, end exclusive; None: all."""

    def resources(self) -> Iterator[int]:
        """Yield the storages of the step, and ``_GENERATORS`` if it draws."""
        if self.is_wanted:
            yield from sorted(self.operation.reads | self.operation.writes)
        if self.operation.draws:
            yield _GENERATORS


class ReplayPlan:
    """Operations for wanted storages, in the order of a replay.

    An operation runs as soon as all earlier operations on its memory have run; only draws keep the
    order of the recording. So a parameter that its constructor draws, and that a parent scales at
    the very end, is complete at once.
    """

    def __init__(self, steps: list[ReplayStep], wanted: frozenset[int]) -> None:
        self.wanted = wanted
        self.steps = _in_order(steps)
        last = {resource: step for step in self.steps for resource in step.resources()}
        for resource, step in last.items():
            if resource != _GENERATORS:
                step.ends.append(resource)

    @property
    def completed(self) -> list[int]:
        """Wanted storages that get values, in the order of completion."""
        return [storage for step in self.steps for storage in step.ends if storage in self.wanted]

    def narrow(self, parts: Mapping[MetaView, tuple[int, int]]) -> None:
        """Restrict tensors to some elements if a single draw makes them.

        Args:
            parts: Interval of needed flat elements by view geometry, end exclusive.
        """
        views = {view.storage: view for view in parts}
        users: dict[int, list[ReplayStep]] = defaultdict(list)
        for step in self.steps:
            for storage in step.operation.reads | step.operation.writes if step.is_wanted else ():
                if storage in views:
                    users[storage].append(step)
        for storage, view in views.items():
            (step, *more) = users[storage]
            operation = step.operation
            if not more and storage in operation.replaces and operation.args[:1] == (view,):
                step.part = parts[view]

    def digest(self) -> bytes:
        """Return a digest, 16 bytes, of operations, arguments and generator states.

        Ranks with equal digests get the same values. Arguments that cannot be compared make
        digests differ.
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


def needed_steps(operations: Sequence[Operation], wanted: frozenset[int]) -> list[ReplayStep]:
    """Return the steps that later steps read, or that draw; searched from the last to the first."""
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
    resources = [tuple(step.resources()) for step in steps]
    waiting: dict[int, deque[int]] = defaultdict(deque)
    for index, needed in enumerate(resources):
        for resource in needed:
            waiting[resource].append(index)
    order: list[int] = []
    is_done = [False] * len(steps)

    def emit(index: int) -> list[int]:
        """Append a step; return the next steps of its storages."""
        is_done[index] = True
        order.append(index)
        for resource in resources[index]:
            waiting[resource].popleft()
        return [
            waiting[resource][0]
            for resource in resources[index]
            if resource != _GENERATORS and waiting[resource]
        ]

    def pull(index: int) -> list[int]:
        """Append a step early unless it waits for a draw; return the next steps, as `emit` does."""
        following: list[int] = []
        stack = [index]
        while stack:
            blocker = next(
                (
                    waiting[resource][0]
                    for resource in resources[stack[-1]]
                    if waiting[resource][0] != stack[-1]
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


# -- Partial draws
#
# A generator of the host draws numbers one by one, so a rank must also draw the numbers of all
# other ranks. It need not convert these to floats, which takes most of the time.

_IN_ORDER = {torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default}
_BLOCK = 16
"""Elements of a block, which `normal_` makes of equally many random numbers."""


def _draws_in_order(operation: Operation) -> bool:
    """Return whether single blocks of an operation's target can be drawn separately."""
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
    """Fill the blocks of a tensor that have wanted elements, and skip the draws of others."""
    start, stop = part[0] // _BLOCK * _BLOCK, -(-part[1] // _BLOCK) * _BLOCK
    start = min(start, stop)
    _pass_by(start, generator)
    if tensor is not None and start < stop:
        more = {key: it for key, it in operation.kwargs.items() if key != "generator"}
        values = tensor.view(-1)[start:stop]
        operation.function(values, *operation.args[1:], **more, generator=generator)
    _pass_by(numel - stop, generator)


def _pass_by(count: int, generator: torch.Generator | None) -> None:
    """Skip 32-bit numbers of a generator of the host."""
    scratch = torch.empty(min(count, 2**16), dtype=torch.uint8, device=HOST)
    for passed in range(0, count, 2**16):
        scratch[: count - passed].random_(generator=generator)


@cache
def _draws_by_block(function: Any, dtype: torch.dtype) -> bool:
    """Return whether this torch draws one 32-bit number per element, block after block."""
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


# -- Generator states before each operation


class _GeneratorStates:
    """States of generators during a replay.

    A recorded draw replaces its generator's state by a seeded one. The next draw starts from this
    state, and a program may save and restore it. In the replay it maps to the true state after the
    draw.
    """

    def __init__(
        self,
        known: dict[bytes, torch.Tensor],
        operations: Sequence[Operation],
        generators: Iterable[torch.Generator],
    ) -> None:
        self._known = known
        self._behind: dict[bytes, torch.Tensor] = {}
        self._now = {generator: digest_of(generator.get_state()) for generator in generators}
        self._uses = Counter(draw.before for operation in operations for draw in operation.draws)
        # A state takes 5 KB: it is dropped after its last use.
        self._uses.update(self._now.values())

    @contextmanager
    def kept(self, move: bool) -> Generator[None]:
        """Restore the program's generators at the end.

        If they ``move``, those in a recorded state get the true state instead.
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
        """Set generators for an operation that draws; yield substitutes of generator arguments."""
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
        """Skip an operation, as if it had drawn nothing."""
        for draw in operation.draws:
            self._behind[draw.after] = self._before(draw)

    def _before(self, draw: Draw) -> torch.Tensor:
        state = self._behind.get(draw.before)
        self._uses[draw.before] -= 1
        if not self._uses[draw.before]:
            self._behind.pop(draw.before, None)
        return self._known[draw.before] if state is None else state


# -- Replay


def replay(
    plan: ReplayPlan,
    nbytes_of: Callable[[int], int],
    known: dict[bytes, torch.Tensor],
    generators: Iterable[torch.Generator],
    *,
    move_generators: bool = False,
) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Run operations on the host; yield each wanted storage with its memory once complete.

    Args:
        plan: Operations to run.
        nbytes_of: Function that returns the bytes of a storage.
        known: States of generators that the program set itself, by digest.
        generators: All generators of recorded draws.
        move_generators: True to move generators to their states after an eager construction,
            unless the program has moved them since; False to restore their states.
    """
    states = _GeneratorStates(known, [step.operation for step in plan.steps], generators)
    memory: dict[int, torch.UntypedStorage] = {}
    with states.kept(move_generators):
        for step in plan.steps:
            with torch.no_grad(), HOST, states.around(step.operation) as substitutes:
                _run(step, memory, nbytes_of, substitutes)
            for storage in step.ends:
                held = memory.pop(storage)
                if storage in plan.wanted:
                    yield storage, held
                del held  # while the next operation runs


def rewind_generators(
    operations: Sequence[Operation],
    known: dict[bytes, torch.Tensor],
    generators: Iterable[torch.Generator],
) -> None:
    """Restore the states before operations of generators that have not moved since.

    Arguments as in :func:`replay`.
    """
    states = _GeneratorStates(known, operations, generators)
    with states.kept(move=True):
        for operation in operations:
            states.skip(operation)


def _run(
    step: ReplayStep,
    memory: dict[int, torch.UntypedStorage],
    nbytes_of: Callable[[int], int],
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
            memory[leaf.storage] = torch.UntypedStorage(nbytes_of(leaf.storage), device=HOST)
        return leaf.over(memory[leaf.storage])

    operation = step.operation
    part = step.part if step.is_wanted else (0, 0)
    if part is not None and _draws_in_order(operation):
        target = operation.args[0]
        tensor = real(target) if step.is_wanted else None
        generator = real(generator_in(operation.args, operation.kwargs))
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
        storage_of(it) for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)
    }
    for view, found in zip(operation.outputs, pytree.tree_leaves(result), strict=False):
        if view is None or view.storage in memory or not isinstance(found, torch.Tensor):
            continue
        nbytes = nbytes_of(view.storage)
        as_planned = MetaView.of(found, view.storage) == view
        own = found.untyped_storage()
        if as_planned and own.nbytes() == nbytes and storage_of(found) not in held:
            memory[view.storage] = own
        else:
            memory[view.storage] = torch.UntypedStorage(nbytes, device=HOST)
            # Statistics that a batch norm saves for backward have other shapes on meta.
            if found.shape == view.shape:
                view.over(memory[view.storage]).copy_(found)
