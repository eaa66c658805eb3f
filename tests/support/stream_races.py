"""Happens-before checker of CUDA streams, on a machine without a GPU.

The real engine runs on CPU tensors that say ``cuda:0``, as one rank of a world of which the other ranks do not exist.
Streams and events are virtual: each stream has a vector clock, an event is a copy of one, and a wait is their maximum.
Every operation reads and writes byte ranges of storages at the clock of the current stream; two accesses of one range,
of which one writes, have to be ordered. The host is a thread like a stream: it launches, and is behind a stream once
it has waited for it.

The allocator is the caching one with ``expandable_segments:True``, its strictest mode: memory belongs to the stream on
which it was allocated. When it is freed it may be unmapped, behind that stream alone, so that stream has to be behind
all that anybody does with it. Memory of the host is pinned or pageable: a copy from or to pageable memory holds the
host up, whatever ``non_blocking`` says.

A collective reads and writes at its place in the current stream. Other ranks are taken to hold what this one holds, so
numbers stay finite. What is found is a :class:`Violation`, with the lines of the package where both accesses were made.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardeddp
from shardeddp.checkpoint import snapshot
from shardeddp.engine import storage as engine_storage
from shardeddp.tensor import shard_tensor
from shardeddp.tensor.shard_tensor import ShardTensor
from shardeddp.torch_private import slice_storage

DEVICE = torch.device("cuda", 0)
HOST_DEVICE = torch.device("cpu")
PACKAGE = str(Path(shardeddp.__file__).parent) + "/"

Clock = dict[str, int]
"""By stream, how many of its operations are known to be done."""

HOST = "host"
COMPUTE = "compute"


@dataclass(frozen=True, kw_only=True)
class Access:
    """An operation's use of a byte range of a storage."""

    start: int
    stop: int
    writes: bool
    stream: str
    place: int
    """Number of the operation on that stream."""

    operation: str
    site: str
    """File and line of the package, and function."""

    def __str__(self) -> str:
        return f"{self.operation} on {self.stream} at {self.site} {'writes' if self.writes else 'reads'}"


@dataclass(frozen=True)
class Violation:
    """Two accesses without an order, or an access that may come after the memory is gone."""

    kind: str
    """race, or use after unmap."""

    earlier: str
    later: str
    memory: str
    """Where the memory comes from."""

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.earlier}; not ordered before: {self.later}; memory {self.memory}"
        )


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A collective of one communicator."""

    communicator: str
    ranks: tuple[int, ...]
    kind: str
    nbytes: int
    transfers: dict[tuple[int, bool], int]
    """Bytes by peer and whether they are sent, of transfers between two."""


def issued_in(
    group: Any, kind: str, nbytes: int, transfers: dict[tuple[int, bool], int] | None = None
) -> Issued:
    """What this rank issues in a group."""
    return Issued(
        communicator=group.group_name,
        ranks=tuple(dist.get_process_group_ranks(group)),
        kind=kind,
        nbytes=nbytes,
        transfers=dict(transfers or {}),
    )


@dataclass(kw_only=True)
class Memory:
    """What is known of a storage."""

    on_device: bool
    pinned: bool
    stream: str
    site: str
    accesses: list[Access] = field(default_factory=list[Access])
    recorded: dict[str, Any] = field(default_factory=dict[str, Any])
    reference: Any = None
    parts: list[Any] = field(default_factory=list[Any])


class VirtualStream:
    """In the place of ``torch.cuda.Stream``."""

    def __init__(self, checker: Checker, name: str) -> None:
        self._checker = checker
        self.name = name
        self.clock: Clock = {}
        self.device = DEVICE

    def wait_stream(self, other: VirtualStream) -> None:
        """All of the other's so far is before what follows here."""
        self._checker.follow(self, other.clock)

    def wait_event(self, event: VirtualEvent) -> None:
        """What was before the event is before what follows here."""
        self._checker.follow(self, event.clock)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """An event at this place."""
        event = event or VirtualEvent(self._checker)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        self._checker.hold_up(self, "synchronize")

    def query(self) -> bool:
        """Nothing is known to be done that nobody has waited for."""
        return False


class VirtualEvent:
    """In the place of ``torch.cuda.Event``."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self.clock: Clock = {}

    def record(self, stream: VirtualStream | None = None) -> None:
        """At the end of a stream."""
        self.clock = dict((stream or self._checker.current).clock)

    def wait(self, stream: VirtualStream | None = None) -> None:
        """As :meth:`VirtualStream.wait_event`."""
        (stream or self._checker.current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for what was before."""
        self._checker.host_waits["event"] += 1
        merge(self._checker.host, self.clock)

    def query(self) -> bool:
        """As of a stream."""
        return False


def merge(clock: Clock, other: Clock) -> None:
    """Know what the other knows."""
    for name, place in other.items():
        if place > clock.get(name, 0):
            clock[name] = place


class VirtualWork:
    """A transfer on a process group's own stream."""

    def __init__(self, checker: Checker, done: VirtualEvent) -> None:
        self._checker, self._done = checker, done

    def wait(self) -> None:
        """Let the current stream wait, not the host."""
        self._checker.current.wait_event(self._done)


class Checker:
    """Clocks, memory, and what was found."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.compute = VirtualStream(self, COMPUTE)
        self.streams = [self.compute]
        self._stack = [self.compute]
        self.memory: dict[int, Memory] = {}
        self.found: dict[Violation, int] = {}
        self.host_waits: Counter[str] = Counter()
        """What held the host up, by cause."""

        self.collectives: list[Issued] = []
        """Those of the device, in order."""

        self.placing: tuple[bool, bool] | None = None
        """Device (or host), pinned: of what is being allocated, if somebody has said so."""

        self.moving = False
        """Whether a move to another device that is under way need not hold the host up."""

        self._names = Counter[str]()
        self._transfers: VirtualStream | None = None

    # -- Streams

    @property
    def current(self) -> VirtualStream:
        """The current stream."""
        return self._stack[-1]

    def make_stream(self, *_: Any, **__: Any) -> VirtualStream:
        """A stream that is called as the attribute that will hold it."""
        frame, name = sys._getframe(1), ""
        while frame is not None and not name:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            found = re.search(r"self\.(\w+)(: \w+)? = make_stream", line)
            name = found[1] if found else ""
            frame = frame.f_back  # type: ignore[assignment]
        name = name.lstrip("_") or "stream"
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name} {self._names[name]}"
        self.streams.append(VirtualStream(self, name))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: VirtualStream | None) -> Iterator[None]:
        """In the place of ``torch.cuda.stream``."""
        self._stack.append(stream or self.current)
        try:
            yield
        finally:
            self._stack.pop()

    def follow(self, stream: VirtualStream, clock: Clock) -> None:
        """Let a stream know a clock."""
        merge(stream.clock, clock)

    def hold_up(self, stream: VirtualStream, cause: str) -> None:
        """The host waits for a stream."""
        self.host_waits[cause] += 1
        merge(self.host, stream.clock)

    def synchronize(self, *_: Any) -> None:
        """The host waits for all of them."""
        for stream in self.streams:
            self.hold_up(stream, "synchronize")

    # -- Memory

    def of(self, tensor: torch.Tensor) -> Memory | None:
        """What is known of a tensor's memory."""
        if isinstance(tensor, ShardTensor):
            return self.of(tensor.raw_local)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return self.memory.get(tensor.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):
                return None

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor says that it is."""
        memory = self.of(tensor)
        return memory is not None and memory.on_device

    def allocated(self, storage: torch.UntypedStorage, on_device: bool, pinned: bool) -> Memory:
        """Memory that is new."""
        key = storage._cdata
        memory = Memory(
            on_device=on_device,
            pinned=pinned,
            stream=self.current.name if on_device else HOST,
            site=site(),
        )
        # The reference is called before the number is used again.
        memory.reference = weakref.ref(storage, lambda _: self._gone(key))
        self.memory[key] = memory
        return memory

    def part(self, whole: torch.UntypedStorage, part: slice) -> torch.UntypedStorage:
        """In the place of ``slice_storage``."""
        found = slice_storage(whole, part)
        memory = self.memory.get(whole._cdata)
        if memory is not None:
            key = found._cdata
            self.memory[key] = memory
            memory.parts.append(weakref.ref(found, lambda _: self.memory.pop(key, None)))
        return found

    def _gone(self, key: int) -> None:
        memory = self.memory.pop(key, None)
        if memory is not None:
            self.freed(memory)

    def freed(self, memory: Memory) -> None:
        """The last reference is gone: the stream that allocated it has to be behind everybody."""
        if memory.on_device:
            stream = next(it for it in self.streams if it.name == memory.stream)
            for access in memory.accesses:
                known = max(stream.clock.get(access.stream, 0), self.host.get(access.stream, 0))
                if access.stream not in (stream.name, *memory.recorded) and known < access.place:
                    self._report(
                        "use after unmap",
                        access,
                        f"release at {site()}, behind {stream.name}",
                        memory,
                    )
        memory.accesses = []

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Memory is given back or taken anew."""
        memory = self.memory.get(storage._cdata)
        if memory is not None:
            self.freed(memory)
            memory.stream = self.current.name if memory.on_device else HOST
            memory.site = site()

    @contextmanager
    def place(self, on_device: bool, pinned: bool, moving: bool = False) -> Iterator[None]:
        """Where what is allocated in here lies."""
        former = self.placing, self.moving
        self.placing, self.moving = (on_device, pinned), moving
        try:
            yield
        finally:
            self.placing, self.moving = former

    def record_stream(self, tensor: torch.Tensor, stream: VirtualStream) -> None:
        """In the place of ``Tensor.record_stream``: what the stream has done so far delays a release."""
        memory = self.of(tensor)
        if memory is not None:
            memory.recorded = {**memory.recorded, stream.name: stream}

    def stream_of_group(self) -> VirtualStream:
        """The stream on which process groups transfer."""
        if self._transfers is None:
            self._transfers = VirtualStream(self, "transfers")
            self.streams.append(self._transfers)
        return self._transfers

    def _report(self, kind: str, access: Access, later: str, memory: Memory) -> None:
        where = f"of {memory.stream} from {memory.site}"
        violation = Violation(kind, str(access), later, where)
        self.found[violation] = self.found.get(violation, 0) + 1

    # -- Accesses

    def launch(self, stream: VirtualStream) -> int:
        """One more operation on a stream, which is behind what the host knows."""
        merge(stream.clock, self.host)
        place = stream.clock.get(stream.name, 0) + 1
        stream.clock[stream.name] = place
        return place

    def access(
        self,
        operation: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        stream: VirtualStream | None = None,
    ) -> None:
        """An operation on a stream (None: on the host)."""
        if stream is None:
            place = self.host[HOST] = self.host.get(HOST, 0) + 1
            name, clock = HOST, self.host
        else:
            place, name, clock = self.launch(stream), stream.name, stream.clock
        where = site()
        for is_write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                memory = self.of(tensor)
                if memory is None or not tensor.numel():
                    continue
                start, stop = extent(tensor)
                self._note(
                    memory,
                    Access(
                        start=start, stop=stop, writes=is_write, stream=name, place=place,
                        operation=operation, site=where,
                    ),
                    clock,
                )  # fmt: skip

    def _note(self, memory: Memory, new: Access, clock: Clock) -> None:
        rest: list[Access] = []
        for old in memory.accesses:
            if old.stop <= new.start or new.stop <= old.start:
                rest.append(old)
                continue
            if (
                (old.writes or new.writes)
                and old.stream != new.stream
                and clock.get(old.stream, 0) < old.place
            ):
                self._report("race", old, str(new), memory)
            covered = new.start <= old.start and old.stop <= new.stop
            if not (covered and (new.stream == old.stream or clock.get(old.stream, 0) >= old.place)
                    and (new.writes or not old.writes)):  # fmt: skip
                rest.append(old)
        rest.append(new)
        memory.accesses = rest


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and last of what a tensor may touch of its storage."""
    start = tensor.storage_offset()
    last = start + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start * tensor.itemsize, (last + 1) * tensor.itemsize


def site() -> str:
    """The innermost line of the package on the stack, or of what runs it."""
    frame: Any = sys._getframe(1)
    outside = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from Python 3.11 on
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{file[len(PACKAGE) :]}:{frame.f_lineno} ({name}: {text})"
        if not outside and "/torch/" not in file and file != __file__:
            outside = f"{Path(file).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return outside


_NO_ACCESS = {
    "detach",
    "alias",
    "set_",
    "lift_fresh",
    "resize_",
    "_unsafe_view",
    "_reshape_alias",
    "is_same_size",
}
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_HOLDS_UP = {
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "is_set_to",
}


class Accesses(TorchDispatchMode):
    """Tells a checker of all operations."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it reads and writes."""
        kwargs = kwargs or {}
        if any(issubclass(kind, shard_tensor.NoRawMemory) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        namespace, name = func._schema.name.split("::")
        checker = self._checker
        if namespace == "c10d":
            result = self._collective(name, func, args, kwargs)
            self._see_outputs(result, checker.placing, ())
            return result
        reads, writes = _arguments(func, args, kwargs)
        place = checker.placing
        for tensor in (
            *reads,
            *writes,
        ):  # made before there was a checker, or by an operation unseen
            if checker.of(tensor) is None:
                self._see_outputs(tensor, (False, False), ())
        result = func(*args, **kwargs)
        if name in _NO_ACCESS:
            return result
        device = any(checker.is_on_device(tensor) for tensor in (*reads, *writes))
        if place is None:
            place = device, False
        fresh = self._see_outputs(result, place, writes)
        if name in _ALLOCATES or (func.is_view and not fresh):
            return result
        targets = [*writes, *fresh]
        if name in ("copy_", "clone") and self._copy(name, args, kwargs, reads, targets):
            return result
        on_device = device or place[0]
        checker.access(name, reads, [*writes, *fresh], checker.current if on_device else None)
        if on_device and (name in _HOLDS_UP or (name == "index" and _by_mask(args))):
            checker.hold_up(checker.current, name)
        return result

    def _copy(self, name: str, args: Any, kwargs: Any, reads: Any, targets: Any) -> bool:
        """A copy between host and device."""
        checker = self._checker
        sources = [it for it in reads if all(it is not target for target in targets)]
        if not sources or not targets:
            return False
        source, target = checker.of(sources[0]), checker.of(targets[0])
        if source is None or target is None or source.on_device == target.on_device:
            return False
        host = target if source.on_device else source
        asked = args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False)
        asked = asked or checker.moving
        stream = checker.current
        if source.on_device or host.pinned:
            checker.access(name, sources, targets, stream)
        else:  # the host reads pageable memory itself, before it goes on
            checker.access(name, sources, [], None)
            checker.access(name, [], targets, stream)
        if not asked:
            checker.hold_up(stream, "blocking copy at " + site())
        elif not host.pinned and source.on_device:
            checker.hold_up(stream, "copy to pageable memory at " + site())
        return True

    def _see_outputs(
        self, result: Any, place: Any, known: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        fresh: list[torch.Tensor] = []
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._checker.memory:
                self._checker.allocated(storage, *(place or (False, False)))
                fresh.append(tensor)
        return fresh

    # -- Collectives, in which other ranks have what this one has

    def _collective(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        checker = self._checker
        tensors = tensors_in(args)
        if name == "allgather_":
            [pieces], [own] = args[:2]
            # The fake group knows pieces of one size only.
            result = args[0], func([[own.clone() for _ in pieces]], *args[1:], **kwargs)[1]
            for piece in pieces:
                piece.copy_(own) if piece.numel() == own.numel() else piece.zero_()
        else:
            result = func(*args, **kwargs)
        on_device = any(map(checker.is_on_device, tensors))
        stream = checker.current if on_device else None
        group = next((it for it in args if isinstance(it, torch.ScriptObject)), None)
        if name == "_allgather_base_":
            whole, own = args[0], args[1]
            reads, writes = [own], [whole]
            whole.view(-1, own.numel()).copy_(own.view(-1).clone())
        elif name == "_reduce_scatter_base_":
            own, whole = args[0], args[1]
            reads, writes = [whole], [own]
            own.copy_(whole.view(-1, own.numel())[0].view(own.shape))
        elif name == "allgather_":
            reads, writes = tensors_in(args[1]), tensors_in(args[0])
        elif name in ("allreduce_", "broadcast_"):
            reads = writes = tensors
        else:
            reads, writes = tensors, tensors
        checker.access(name, reads, writes, stream)
        if on_device:
            nbytes = max((it.nbytes for it in tensors), default=0)
            found = dist.ProcessGroup.unbox(group)
            checker.collectives.append(issued_in(found, name, nbytes))
        return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Plain tensors with memory in a structure."""
    return [
        leaf
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, shard_tensor.NoRawMemory)
        and leaf.layout is torch.strided and leaf.device.type != "meta"
    ]  # fmt: skip


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if value is None:
            continue
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(tensors_in(value))
    return reads, writes


def _by_mask(args: Any) -> bool:
    return any(it is not None and it.dtype in (torch.bool, torch.uint8) for it in args[1])


# -- Virtual device

_FACTORIES = (
    "empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "eye", "empty_strided",
    "scalar_tensor", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint",
)  # fmt: skip
_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_DEVICE = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]


@contextmanager
def virtual_device() -> Iterator[Checker]:
    """Let ``cuda:0`` be there, and watch it."""
    checker = Checker()

    def device_of(tensor: torch.Tensor) -> torch.device:
        if isinstance(tensor, ShardTensor):
            return tensor.spec.device_of(tensor.raw_local)
        found = _DEVICE(tensor)
        return DEVICE if found.type == "cpu" and checker.is_on_device(tensor) else found

    def factory(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def call(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
            if device is not None:
                device = torch.device(device)
            if device is None and not pin_memory:
                return make(*args, **kwargs)
            if device is not None and device.type == "meta":
                return make(*args, device=device, **kwargs)
            with checker.place(device is not None and device.type == "cuda", pin_memory):
                return make(*args, **kwargs)

        return call

    move = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(tensor, ShardTensor):
            return move(tensor, *args, **kwargs)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(
            *args, **{key: value for key, value in kwargs.items() if key != "copy"}
        )
        if device is None or device.type == "meta":
            return move(tensor, *args, **kwargs)
        if (device.type == "cuda") == checker.is_on_device(tensor):
            return move(tensor, dtype or tensor.dtype, copy=kwargs.get("copy", False))
        if dtype is not None and dtype is not tensor.dtype and device.type == "cpu":
            tensor = move(tensor, dtype)  # the conversion is made on the device
        with checker.place(device.type == "cuda", False, non_blocking):
            moved = torch.clone(tensor)
        return moved if dtype is None else move(moved, dtype)

    def pinned(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        with checker.place(False, True):
            return torch.clone(tensor)

    def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
        memory = checker.of(tensor)
        return memory is not None and memory.pinned

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        checker.resized(storage, nbytes)
        return resize(storage, nbytes)

    def outcome_on_host(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            memory = checker.of(tensor)
            if memory is not None and memory.on_device:
                checker.access(read.__name__, [tensor], [], checker.current)
                checker.hold_up(checker.current, read.__name__)
            elif memory is not None and not isinstance(tensor, ShardTensor):
                checker.access(read.__name__, [tensor], [], None)
            return read(tensor, *args, **kwargs)

        return call

    def transfers(operations: Sequence[dist.P2POp]) -> list[VirtualWork]:
        own = checker.stream_of_group()
        own.wait_stream(checker.current)
        for each in operations:
            sends = each.op is dist.isend
            checker.access(
                "send" if sends else "recv",
                [each.tensor] if sends else [],
                [] if sends else [each.tensor],
                own,
            )
        group = operations[0].group
        pairs = Counter[tuple[int, bool]]()
        for each in operations:
            peer = dist.get_global_rank(group, each.group_peer)
            pairs[peer, each.op is dist.isend] += each.tensor.nbytes
        checker.collectives.append(issued_in(group, "transfers", 0, pairs))
        return [VirtualWork(checker, own.record_event())]

    copies = snapshot.HostMemory.copies

    def copied(memory: Any, tensors: Any) -> Any:
        made = copies(memory, tensors)
        checker.access("copies that a thread will write", made, [], None)
        return made

    autocast, autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    subclass = shard_tensor.make_wrapper_subclass

    def on_host(*args: Any, **kwargs: Any) -> Any:
        return subclass(*args, **(kwargs | {"device": HOST_DEVICE}))

    def set_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
        stack.enter_context(patch.object(owner, name, value))

    with ExitStack() as stack:
        for name in _FACTORIES:
            set_attribute(stack, torch, name, factory(getattr(torch, name)))
        for name in _METHODS:
            set_attribute(stack, torch.Tensor, name, factory(getattr(torch.Tensor, name)))
        for name in ("numpy", "tolist"):
            set_attribute(stack, torch.Tensor, name, outcome_on_host(getattr(torch.Tensor, name)))
        for owner, name, value in (
            (torch.Tensor, "device", property(device_of)),
            (torch.Tensor, "is_cuda", property(lambda it: it.device.type == "cuda")),
            (torch.Tensor, "is_cpu", property(lambda it: it.device.type == "cpu")),
            (torch.Tensor, "to", to),
            (torch.Tensor, "cpu", lambda it, **_: it.to(HOST_DEVICE)),
            (torch.Tensor, "cuda", lambda it, *_, **options: it.to(DEVICE, **options)),
            (torch.Tensor, "pin_memory", pinned),
            (torch.Tensor, "is_pinned", is_pinned),
            (
                torch.Tensor,
                "record_stream",
                lambda tensor, stream: checker.record_stream(tensor, stream),
            ),
            (torch.UntypedStorage, "resize_", resized),
            (engine_storage, "slice_storage", checker.part),
            (torch.cuda, "Stream", checker.make_stream),
            (torch.cuda, "Event", lambda *_, **__: VirtualEvent(checker)),
            (torch.cuda, "current_stream", lambda *_: checker.current),
            (torch.cuda, "stream", checker.on),
            (torch.cuda, "synchronize", checker.synchronize),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            # The Trainer's autocast is the CPU's.
            (torch, "is_autocast_enabled", lambda *_: autocast("cpu")),
            (torch, "get_autocast_dtype", lambda _: autocast_dtype("cpu")),
            (torch.accelerator, "synchronize", checker.synchronize),
            (dist, "batch_isend_irecv", transfers),
            (snapshot.HostMemory, "copies", copied),
            (shard_tensor, "make_wrapper_subclass", on_host),
        ):
            set_attribute(stack, owner, name, value)
        stack.enter_context(Accesses(checker))
        yield checker
