"""Recorder: operations, saved tensors, exchanges and memory of a step on fake tensors, by unit."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from shardeddp.engine.hooks import find_tensors
from shardeddp.planner.backward import (
    LiveStorages,
    MadeStorage,
    MemoryRecord,
    RootMemory,
    UnitMemory,
    run_backward,
)
from shardeddp.planner.collectives import Exchange
from shardeddp.planner.values import Reads, Values, is_grouped
from shardeddp.planner.work import KeptMemory, UnitWork
from shardeddp.torch_private import DispatchMode, HigherOrderOperator, pytree, storage_of
from shardeddp.wrap.tree import ParameterSpec


@dataclass(frozen=True, kw_only=True)
class Use:
    """Storage that a forward gets, saves or makes."""

    kind: Literal["input", "saved", "costly", "kept"]
    """``saved``: autograd's hooks saw it; ``costly``: a result that selective checkpointing keeps;
    ``kept``: made by the forward and alive when it is over, and no hook saw it."""
    visit: int
    """Place of the forward; -1: the root's."""
    storage: int
    nbytes: int
    born: int
    """Index of the first count that has it; ``sys.maxsize``: none is known."""
    is_activation: bool
    """True if a gradient goes through it."""
    made: Sequence[MadeStorage]
    """Storages that tell when it is freed: of the unit that has run, and of the input of an equal
    one. None if no operation of the step has made it."""
    is_outside: bool = False
    """True if something else than the graph of the forward has it, too."""

    @property
    def is_held(self) -> bool:
        """Whether it is alive: after the step, attributes of modules hold it."""
        return any(it.is_alive for it in self.made)


@dataclass(kw_only=True)
class UnitRecords:
    """Records of one run of a unit: of each unit inside of it, itself among them."""

    works: list[UnitWork]
    trained: list[UnitWork]
    exchanges: list[list[Exchange]]
    visits: list[int]
    """Forwards of these units, as places in the lists."""
    memory: list[UnitMemory]
    """Memory of each forward."""
    has_backward: list[bool]
    uses: list[Use]
    """With ``visit`` and ``born`` from the begin of the run on."""
    inputs: list[int]
    """Storages of the inputs."""
    results: Sequence[int | None]
    """Storages of the results; None: no tensor."""


@dataclass(frozen=True, kw_only=True)
class RecordsBefore:
    """Records of units before a run of one of them: copies, and lengths of lists."""

    places: Sequence[int]
    works: list[UnitWork]
    trained: list[UnitWork]
    exchanges: list[int]
    visits: int
    uses: int


@dataclass
class Recorder:
    """Recorder of operations and saved tensors in the innermost running unit."""

    work: list[UnitWork]
    head: UnitWork
    free: set[int]  # storages of parameters and buffers, and of parameters as they are gathered
    casts: Mapping[int, torch.dtype]
    """Dtypes in which parameters are gathered that their layers cast, by storage."""
    is_kept: Callable[..., bool]
    """Whether selective checkpointing keeps the results of an operation and its arguments."""
    inside: list[int] = field(default_factory=lambda: [0])
    uses: list[Use] = field(default_factory=list[Use])
    """What units get, save and make, in its order."""
    before_head: int = sys.maxsize
    """Number of uses before the root's head; without a unit there is none."""
    same: dict[int, int] = field(default_factory=dict[int, int])
    """Results of units that are inputs of theirs, and the storages of these."""
    known: list[StorageWeakRef] = field(default_factory=list[StorageWeakRef])
    """Storages that were used: no other one gets their ids, and their memory is not kept."""
    made_again: Iterator[int] = field(default_factory=lambda: count(-1, -1))
    """Ids of storages that repeated forwards would have made."""
    live: LiveStorages = field(default_factory=LiveStorages)
    memory: list[UnitMemory] = field(default_factory=list[UnitMemory])
    """Memory of each forward."""
    head_memory: UnitMemory = field(default_factory=UnitMemory)
    largest: list[int] = field(default_factory=list[int])
    """Bytes of the largest result of each unit, and of the root after the last one."""
    anchors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Ends of backwards at the results of units that have run."""
    after_units: bool = False
    exchanges: list[list[Exchange]] = field(default_factory=list[list[Exchange]])
    unsaved: list[Exchange] = field(default_factory=list[Exchange])
    """Exchanges of the running unit since its last saved tensor, which no recomputation repeats."""
    values: Values = field(default_factory=Values)
    is_backward: bool = False
    """True while exchanges of the backward are recorded."""
    leaking: set[int] = field(default_factory=set[int])
    """Units that have left tensors with a graph in attributes or arguments."""
    is_paused: bool = False
    """True while a backward runs, of which memory and FLOPs alone are recorded."""
    visits: list[int] = field(default_factory=list[int])
    """Unit of each forward, in their order; see :class:`ForwardRecord` of the engine."""
    between: list[list[int]] = field(default_factory=lambda: [[]])
    """Counts of what is alive after each operation of the root, before and between forwards."""
    at_forward: list[int] = field(default_factory=list[int])
    """The same at the begin of each forward."""
    running: list[int] = field(default_factory=list[int])
    """Places of the running ones."""
    batch: Any = None
    at_begin: int = 0
    """Bytes that are alive at the begin of the step."""
    root_memory: RootMemory = field(default_factory=RootMemory)
    has_backward: list[bool] = field(default_factory=list[bool])
    """Whether results of each forward require a gradient."""
    trained: list[UnitWork] = field(default_factory=list[UnitWork])
    """Matmuls and attention with a backward, and kernels with an operand that requires a gradient."""
    trained_head: UnitWork = field(default_factory=UnitWork)
    """The same of the root after the last unit."""
    backward: UnitWork = field(default_factory=UnitWork)
    """Matmuls of the last backward that was run, half of their FLOPs; and its attention."""

    def __post_init__(self) -> None:
        self.exchanges = [[] for _ in self.work]
        self.trained = [UnitWork() for _ in self.work]
        self.largest = [0 for _ in self.work]

    @contextmanager
    def rehearsal(self) -> Generator[None]:
        """Record only exchanges of the backward; its other work is derived from the forward."""
        self.is_backward = True
        try:
            yield
        finally:
            self.is_backward = False

    def bind(self, unit: int, spec: ParameterSpec, parameter: nn.Parameter) -> None:
        """Replace a parameter in its modules by its wrapped form, as the engine does."""
        assert spec.distribution is not None
        self.inside.append(unit)
        made: Any = spec.distribution.wrap(parameter.to(spec.param_dtype))  # type: ignore[arg-type]
        self.inside.pop()
        for module, name in spec.registrations:
            module._parameters[name] = made

    def _targets(self) -> list[UnitWork]:
        own = self.work[self.inside[-1]]
        return [own, self.head] if self.after_units and self.inside[-1] == 0 else [own]

    def _trained_targets(self) -> list[UnitWork]:
        own = self.trained[self.inside[-1]]
        return [own, self.trained_head] if self.after_units and self.inside[-1] == 0 else [own]

    @property
    def with_backward(self) -> set[int]:
        """Units with results that require a gradient."""
        return {0, *(it for it, has in zip(self.visits, self.has_backward, strict=True) if has)}

    def run_forward(
        self, index: int, inputs: Any, forward: Callable[[], Any]
    ) -> tuple[Any, list[int]]:
        """Run the forward of a unit; return its results and what it holds after each operation."""
        self._begin_forward(index)
        for it in find_tensors(inputs):
            self._use("input", len(self.visits) - 1, it)
        around, self.unsaved = self.unsaved, []
        self.inside.append(index)
        self.running.append(len(self.visits) - 1)
        try:
            return self.live.measure(forward)
        finally:
            self.inside.pop()
            self.running.pop()
            self.unsaved = around

    def _begin_forward(self, index: int) -> None:
        self.visits.append(index)
        self.memory.append(UnitMemory())
        self.has_backward.append(False)
        self.live.add(())  # what has been freed since the last operation
        self.at_forward.append(self.live.count())
        self.between.append([])

    def _use(self, kind: Literal["input", "saved", "costly"], visit: int, it: torch.Tensor) -> None:
        storage, memory = self.storage_of(it), it.untyped_storage()
        self.known.append(StorageWeakRef(memory))
        made = None if storage in self.free else self.live.made(storage_of(it))
        self.uses.append(
            Use(
                kind=kind,
                visit=visit,
                storage=storage,
                nbytes=0 if storage in self.free else memory.nbytes(),
                born=self.live.begin(storage),
                is_activation=it.requires_grad and not it.is_leaf,
                made=() if made is None else (made,),
            )
        )

    def _drop_graphs(self, visit: int, first: int, begin: int) -> None:
        """Drop what graphs have saved that a forward has thrown away: it is freed at its end.

        ``first`` is the place of the first use that may be of the forward, ``begin`` the index of
        its first count.
        """
        self.live.drop_freed()
        dropped = {
            place
            for place, it in enumerate(self.uses[first:], first)
            if (it.kind, it.visit) == ("saved", visit)
            and begin < it.born < sys.maxsize
            and not it.is_held
        }
        if dropped:
            self.uses = [it for place, it in enumerate(self.uses) if place not in dropped]
            self.before_head -= sum(place < self.before_head for place in dropped)

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return the storage of a tensor, or the earlier one that it stands for."""
        storage = storage_of(tensor)
        return self.same.get(storage, storage)

    def end_forward(
        self,
        before: RecordsBefore,
        made: Sequence[int],
        results: Collection[int],
        root: torch.Tensor | None,
        inputs: Any,
        parameters: Sequence[tuple[torch.Tensor, torch.dtype]],
    ) -> None:
        """Note what a unit's forward keeps, and run its backward; the forward has held these bytes."""
        visit = before.visits
        begin = self.at_forward[visit]
        self._drop_graphs(visit, before.uses, begin)
        for storage, it in self.live.unsaved_since(begin).items():
            if storage in results or (root is not None and storage == storage_of(root)):
                continue
            self.live.save(storage, begin + 1)
            self.uses.append(
                Use(
                    kind="kept",
                    visit=visit,
                    storage=self.same.get(storage, storage),
                    nbytes=it.nbytes,
                    born=it.begin,
                    is_activation=False,
                    made=(it,),
                )
            )
        timeline = self.run_backward(self.visits[visit], root, inputs, parameters)
        self.memory[visit] = UnitMemory(forward=made, backward=timeline)
        self.has_backward[visit] = root is not None

    def note_outside(self, before: RecordsBefore) -> None:
        """Note what is alive without the graph of a unit's forward, whose backward has run."""
        for place, it in enumerate(self.uses[before.uses :], before.uses):
            if it.visit == before.visits and it.kind in ("saved", "kept") and it.is_held:
                self.uses[place] = replace(it, is_outside=True)

    def before(self, places: Sequence[int]) -> RecordsBefore:
        """Return what has been recorded in the units at these places."""
        return RecordsBefore(
            places=places,
            works=[replace(self.work[it]) for it in places],
            trained=[replace(self.trained[it]) for it in places],
            exchanges=[len(self.exchanges[it]) for it in places],
            visits=len(self.visits),
            uses=len(self.uses),
        )

    def since(
        self, before: RecordsBefore, inputs: Any, results: Sequence[int | None]
    ) -> UnitRecords:
        """Return what these units have recorded since, for these inputs and storages of results."""
        places, begin = before.places, before.visits
        return UnitRecords(
            works=[*map(self._difference, (self.work[it] for it in places), before.works)],
            trained=[*map(self._difference, (self.trained[it] for it in places), before.trained)],
            exchanges=[
                self.exchanges[it][length:]
                for it, length in zip(places, before.exchanges, strict=True)
            ],
            visits=[places.index(it) for it in self.visits[begin:]],
            memory=self.memory[begin:],
            has_backward=self.has_backward[begin:],
            uses=[
                replace(it, visit=it.visit - begin, born=it.born - self.at_forward[begin])
                for it in self.uses[before.uses :]
            ],
            inputs=[*map(self.storage_of, find_tensors(inputs))],
            results=results,
        )

    @staticmethod
    def _difference(after: UnitWork, before: UnitWork) -> UnitWork:
        found = replace(after)
        found.add(before, times=-1)
        return found

    def repeat(
        self, first: UnitRecords, places: Sequence[int], inputs: Any
    ) -> Sequence[int | None]:
        """Repeat the records of a run of equal units, in the units at these places.

        Return the storages of the results.
        """
        for at, place in enumerate(places):
            self.work[place].add(first.works[at])
            self.trained[place].add(first.trained[at])
            self.exchanges[place] += first.exchanges[at]
        begin = len(self.visits)
        for at in first.visits:
            self._begin_forward(places[at])
        self.memory[begin:], self.has_backward[begin:] = first.memory, first.has_backward
        given = [*find_tensors(inputs)]
        self.known += [StorageWeakRef(it.untyped_storage()) for it in given]
        taken = dict(zip(first.inputs, map(self.storage_of, given), strict=True))
        own = {
            storage: made
            for storage, it in zip(first.inputs, given, strict=True)
            if (made := self.live.made(storage_of(it))) is not None
        }
        for it in (*(it.storage for it in first.uses if it.born > 0), *first.results):
            if it is not None and it not in taken and it not in self.free:
                taken[it] = next(self.made_again)
        self.uses += [
            replace(
                it,
                visit=it.visit + begin,
                storage=taken.get(it.storage, it.storage),
                born=it.born + self.at_forward[begin],
                made=(*it.made, own[it.storage]) if it.storage in own else it.made,
            )
            for it in first.uses
        ]
        return [it if it is None else taken.get(it, it) for it in first.results]

    def return_results(
        self, before: RecordsBefore, storages: Sequence[int | None], results: Any
    ) -> list[int | None]:
        """Let fresh tensors stand for a unit's results, which have these storages; return theirs."""
        inputs = {
            it.storage
            for it in self.uses[before.uses :]
            if it.kind == "input" and it.visit == before.visits
        }
        stands = dict[int, int]()
        for storage, tensor in zip(storages, pytree.tree_leaves(results), strict=True):
            if storage is None or storage == storage_of(tensor):
                continue
            self.known.append(StorageWeakRef(tensor.untyped_storage()))
            if storage in self.free:
                self.free.add(storage_of(tensor))
                self.live.save(storage_of(tensor), 0)
            elif storage in inputs or storage in stands:
                self.same[storage_of(tensor)] = stands.get(storage, storage)
                self.live.save(storage_of(tensor), 0)
            else:
                stands[storage] = storage_of(tensor)
        self.uses[before.uses :] = [
            replace(it, storage=stands.get(it.storage, it.storage))
            for it in self.uses[before.uses :]
        ]
        for it in self.uses[before.uses :]:
            if it.kind in ("saved", "kept"):  # known from the unit's begin on
                self.live.save(it.storage, self.at_forward[before.visits] + 1)
        return [it if it is None else stands.get(it, it) for it in storages]

    def kept(self, recompute: str, recomputed: Sequence[bool], on_host: bool) -> KeptMemory:
        """Return what each forward keeps: each storage once, in the first one that keeps it.

        Args:
            recompute: Kind of recomputation.
            recomputed: Whether it is of each unit.
            on_host: True if inputs of recomputed units wait in host memory.
        """
        saving = {it.visit for it in self.uses if it.kind in ("saved", "kept")}
        costly = {(it.visit, it.storage) for it in self.uses if it.kind == "costly"}
        costly = costly if recompute == "selective" else set[tuple[int, int]]()
        found, seen = KeptMemory.of(len(self.visits)), set[object]()
        keepers = dict[int, int]()  # the forward that keeps each storage
        recomputed_until = dict[tuple[int, int], int]()
        for place, it in enumerate(self.uses):
            at, storage, nbytes = it.visit, it.storage, it.nbytes
            is_for_step = it.is_outside and not it.is_held
            if it.kind == "kept":
                if it.is_held or storage in keepers:
                    continue
                if is_for_step:
                    found.for_step[at] += nbytes
                    continue
                found.in_graph[at] += nbytes
            elif at < 0 or recompute == "none" or not recomputed[self.visits[at]]:
                if it.kind != "saved" or storage in keepers:
                    continue
            elif at not in saving:  # its backward computes nothing
                continue
            elif it.kind == "input":
                seen.add((at, storage))
                if on_host and it.is_activation:
                    found.on_host[at] += nbytes * (("host", storage) not in seen)
                    seen.add(("host", storage))
                    continue
            elif (at, storage) in seen:
                continue
            elif it.kind == "saved" and it.born > self.at_forward[at]:
                found.again[at] += nbytes * ((at, storage) not in costly)
                found.for_step[at] += nbytes * is_for_step
                recomputed_until[at, storage] = found.again[at]
                seen.add((at, storage))
                continue
            elif it.kind == "costly" and (at, storage) not in costly:
                continue
            if storage in keepers:
                continue
            if at < 0:
                is_head = place >= self.before_head
                keepers[storage] = len(self.visits) if is_head else -1
                found.root_nbytes += nbytes
                found.head_nbytes += nbytes * is_head
            else:
                keepers[storage] = at
                found.kept[at] += nbytes
                found.given[at] += nbytes * (it.kind in ("input", "kept"))
        self._keep_attributes(found, keepers, recomputed_until)
        return found

    def _keep_attributes(
        self,
        found: KeptMemory,
        keepers: dict[int, int],
        recomputed_until: Mapping[tuple[int, int], int],
    ) -> None:
        """Add what attributes keep, and hold until the next forward of their module.

        Args:
            found: Memory that autograd keeps.
            keepers: Forward that keeps each storage; -1: the root's, until the end of its backward.
            recomputed_until: Bytes recomputed in a forward up to each storage.
        """
        last = {unit: at for at, unit in enumerate(self.visits)}
        seen, graphs, given = set[int](), dict[int, int](), [*found.given]
        for it in self.uses:
            at, storage = it.visit, it.storage
            is_replaced = at >= 0 and last[self.visits[at]] != at
            if not it.is_held or it.kind == "costly" or is_replaced or storage in seen:
                continue
            seen.add(storage)
            is_own = at >= 0 and it.born > self.at_forward[at]
            # The root's counts have inputs that are alive.
            if storage not in keepers and (is_own or (at >= 0 and not it.made[-1].is_alive)):
                keepers[storage] = at
                found.kept[at] += it.nbytes
                found.given[at] += it.nbytes
                if (at, storage) in recomputed_until:  # replaces the first one
                    found.again[at] -= it.nbytes
            if keepers.get(storage, -1) >= 0:
                found.held[keepers[storage]] += it.nbytes
            if is_own and it.made[0].has_graph and found.again[at]:
                # No backward frees the graph of a recomputation: it lives as long as its result.
                until = recomputed_until.get((at, storage), found.again[at])
                graphs[at] = max(graphs.get(at, 0), given[at] + until - it.nbytes)
        for at, nbytes in graphs.items():
            found.held[at] += nbytes
        found.graphs += graphs

    def begin_step(self, batch: Any) -> None:
        """Hold a batch, which is there before the step, until the backward of the loss is over."""
        self.batch = batch
        self.live.add(find_tensors(batch))
        self.at_begin = self.live.nbytes

    def end_unit(self) -> None:
        """Let the root's head begin: it is what follows the last unit that has run."""
        self.after_units, self.largest[0], self.before_head = True, 0, len(self.uses)
        self.head, self.trained_head = UnitWork(), UnitWork()

    def end_step(
        self, root: torch.Tensor | None, parameters: Sequence[tuple[torch.Tensor, torch.dtype]]
    ) -> None:
        """Run the backward of the loss, and note what it has computed: that of the head, or all."""
        counted = self.live.counted()
        self.root_memory = RootMemory(
            between=[[counted[it] for it in span] for span in self.between],
            at_begin=self.at_begin,
            at_forward=[counted[it] for it in self.at_forward],
            held_nbytes=self.live.unsaved_nbytes,
        )
        self._drop_graphs(-1, 0, -1)
        head = self.run_backward(0, root, self.anchors, parameters)
        self.batch = None
        self.head_memory = UnitMemory(backward=head)
        done, before = UnitWork(), UnitWork()
        if self.after_units:
            for rest, whole, head in (
                (done, self.work[0], self.head),
                (before, self.trained[0], self.trained_head),
            ):
                rest.add(whole)
                rest.add(head, times=-1)
        self.note_trained(self.work[0], done, self.trained[0], before)

    def trained_works(self) -> list[UnitWork]:
        """Return the part of each unit's work that has a backward; after the backward of the loss.

        Other kernels than matmuls and attention have one in units with a backward, and in the root
        before them if any of them has.
        """
        found, with_backward = list[UnitWork](), self.with_backward
        for unit, (work, trained) in enumerate(zip(self.work, self.trained, strict=True)):
            rest = trained.kernels > self.trained_head.kernels if unit == 0 else True
            others = (work if rest else self.head) if unit in with_backward else UnitWork()
            found.append(
                replace(
                    others,
                    matmul_flops=trained.matmul_flops,
                    attention_flops=trained.attention_flops,
                )
            )
        return found

    def run_backward(
        self,
        index: int,
        root: torch.Tensor | None,
        inputs: Any,
        parameters: Sequence[tuple[torch.Tensor, torch.dtype]],
    ) -> MemoryRecord:
        """Run the backward of a unit, or of the loss (0), for its memory.

        Estimate it if it fails: it needs values, or reads a result that a unit has not returned.
        """
        self.backward = UnitWork()
        ends = [*find_tensors(inputs)]
        if root is None:
            return MemoryRecord()
        try:
            with self.paused(), torch.autocast("cpu", enabled=False):
                return run_backward(root, self.live, ends, parameters)
        except Exception:  # noqa: BLE001 - the module's own code
            self.backward = UnitWork(matmul_flops=math.inf, attention_flops=math.inf)
            own = sum(it.numel() * dtype.itemsize for it, dtype in parameters if it.requires_grad)
            return MemoryRecord(activations=[2 * self.largest[index]], gradients=[own])

    @contextmanager
    def paused(self) -> Generator[None]:
        """Surround operations that are not recorded."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def note_trained(
        self, work: UnitWork, done: UnitWork, trained: UnitWork, before: UnitWork
    ) -> None:
        """Count what the last backward has computed if the forward's operands did not tell it.

        Functions with their own backward, and checkpointing that is reentrant, have a forward
        without gradients. ``done`` and ``before`` are ``work`` and ``trained`` at its start. What
        the model itself computes again is no part of the backward.
        """
        for name in ("matmul_flops", "attention_flops"):
            least = vars(before)[name] + vars(self.backward)[name]
            most = vars(before)[name] + vars(work)[name] - vars(done)[name]
            setattr(trained, name, max(vars(trained)[name], min(least, most)))

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves, once for each storage; return what the graph keeps."""
        if self.is_paused:
            return tensor
        for it in self.unsaved:
            it.is_redone = True
        self.unsaved.clear()
        visit = self.running[-1] if self.running else -1
        self._use("saved", visit, tensor)
        if self.storage_of(tensor) not in self.free:
            # A unit's saved tensors are known from its begin on.
            end = None if visit < 0 else self.at_forward[visit] + 1
            self.live.save(self.storage_of(tensor), end)
        if tensor.grad_fn is None:
            return tensor
        with self.paused():
            return tensor.detach()  # a graph that has its own result would never be freed

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Count the work of an operation that has run."""
        results = [it for it in pytree.tree_leaves(out) if isinstance(it, torch.Tensor)]
        operands = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
        if not results or isinstance(func, HigherOrderOperator):
            return
        self.live.add(it for it in results if storage_of(it) not in self.free)
        name = func.name().partition("::")[2].partition(".")[0]
        if self.is_paused:
            is_backward = name.endswith("backward")
            if "scaled_dot_product" in name:
                if is_backward:
                    self.backward.attention_flops += _flops(func, args, kwargs, out)
            else:
                self.backward.matmul_flops += _flops(func, args, kwargs, out) / 2
            return
        if func.namespace == "shardeddp":
            self._record_exchange(func.name(), operands[0], results[0])
        if self.is_backward:
            return
        if name == "_to_copy" and self.casts.get(storage_of(operands[0])) is results[0].dtype:
            self.free.add(storage_of(results[0]))
            self.live.save(storage_of(results[0]), 0)
            self.known.append(StorageWeakRef(results[0].untyped_storage()))
            return
        if storage_of(results[0]) in {storage_of(it) for it in operands} and func.is_view:
            return
        if not self.inside[-1]:
            self.between[-1].append(self.live.count())
        nbytes = sum(it.nbytes for it in (*operands, *results))
        index = self.inside[-1]
        if index or self.after_units:
            self.largest[index] = max(self.largest[index], *(it.nbytes for it in results))
        done, flops = UnitWork(kernels=1), _flops(func, args, kwargs, out)
        wanted = [it.requires_grad for it in operands] if torch.is_grad_enabled() else [False]
        trained = UnitWork(kernels=int(any(wanted)))
        if "scaled_dot_product" in name:
            done.attention_flops = flops
            trained.attention_flops = flops * any(wanted)
        elif _is_matmul(func, operands):
            done.matmul_flops, done.matmul_nbytes = flops, nbytes
            # Each of two factors gets its gradient by as many FLOPs; operands before them are added.
            factors = wanted[1:3] if _adds(name) else wanted[:2]
            trained.matmul_flops = flops * sum(factors) / 2
        else:
            done.moved_nbytes = nbytes
        if self.is_kept(func, *args, **kwargs):
            for it in results if self.running else ():
                self._use("costly", self.running[-1], it)
            done.kept_matmul_flops = done.matmul_flops
            done.kept_attention_flops = done.attention_flops
            done.kept_moved_nbytes = done.moved_nbytes
        for work in self._targets():
            work.add(done)
        for work in self._trained_targets():
            work.add(trained)

    def _record_exchange(self, name: str, given: torch.Tensor, made: torch.Tensor) -> None:
        kind: Any = name.partition("::")[2]
        found = Exchange(kind=kind, nbytes=max(given.nbytes, made.nbytes))
        self.exchanges[self.inside[-1]].append(found)
        if not self.is_backward:
            self.unsaved.append(found)


def _is_matmul(func: Any, operands: Sequence[torch.Tensor]) -> bool:
    return func.overloadpacket in flop_registry or is_grouped(func, operands)


def _adds(name: str) -> bool:
    """Return whether the first operand of a matmul is added to the product of the next two."""
    return name.lstrip("_").startswith(("addmm", "baddbmm", "addbmm"))


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of a matmul, or those of the forward of fused attention; 0 for all others."""
    operands = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
    if "scaled_dot_product" in func.name():
        flags = (*args[4:], kwargs.get("is_causal"))  # dropout before it is a number
        query, key = operands[1:3] if "backward" in func.name() else operands[:2]
        causal = 0.5 if any(flag is True for flag in flags) else 1.0
        return 4.0 * math.prod(query.shape) * key.shape[-2] * causal
    if is_grouped(func, operands):
        return 2.0 * operands[0].numel() * operands[1].shape[2]
    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


class RecordingMode(DispatchMode):
    """Mode in which operations are recorded; floating-point values are 1, and booleans ``truth``."""

    def __init__(self, recorder: Recorder, truth: bool) -> None:
        super().__init__()
        self._recorder, self._truth = recorder, truth
        self.was_asked = False
        """True if the step has read the value of a boolean tensor."""

        self._reads = Reads()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten._local_scalar_dense.default
            and self._recorder.values.of(args[0]) is None
        ):
            self._reads.note()
            if args[0].is_floating_point():
                return 1.0  # any number: it is logged; integers decide on shapes
            if args[0].dtype is torch.bool:
                self.was_asked = True
                return self._truth
        if func is torch.ops.prim.device.default:  # most calls: `.device` of a fake tensor
            return func(*args)
        out = self._recorder.values.call(func, args, kwargs or {})
        self._recorder.operation(func, args, kwargs or {}, out)
        return out
