"""Views of sharded tensors: gathered elements, and writes to them that reach the shard."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from shardeddp.comm import agree_on_highest_alike
from shardeddp.tensor.collectives import finish, refuse_unmet
from shardeddp.tensor.operations import (
    asks_only_about,
    communicates,
    is_random,
    names_its_writes,
    reshapes,
    written,
)
from shardeddp.tensor.shard_tensor import (
    NoRawMemory,
    ShardSpec,
    ShardTensor,
    end_writes,
    gather,
    mark_written,
    outside_of_graphs,
    refuse_recorded_write,
)
from shardeddp.torch_private import (
    is_alias_of,
    make_subclass,
    no_torch_function,
    pytree,
    temporarily_clear_interpreter_stack,
)

# -- Full elements of a ShardTensor, gathered or seen through views


class Gathered:
    """The full elements of a sharded tensor, kept equal to it while a view of them is in use.

    Without ``full`` elements, they are gathered.
    """

    def __init__(
        self, sharded: ShardTensor, full: torch.Tensor | None = None, operation: str = "reading"
    ) -> None:
        self.sharded = sharded
        self.full = gather(sharded, operation) if full is None else full
        self._note_shard()

    @property
    def is_current(self) -> bool:
        """True if the shard is unchanged since it was gathered."""
        local = self.sharded.to_local()
        return local is self._local and _version_of(local) == self._version

    def update(self) -> None:
        """Gather again, a collective, if the shard has changed in any way."""
        if self.is_current:
            return
        # Transforms of torch.func treat the view as a constant.
        with temporarily_clear_interpreter_stack(), torch.no_grad():
            self.full.copy_(gather(self.sharded, "reading a view of"))
        mark_written(self.full)  # a graph that still needs the former values must fail
        self._note_shard()

    def follow(self, sharded: ShardTensor) -> None:
        """Become the elements of another tensor, which has the values this one had so far."""
        is_current, self.sharded = self.is_current, sharded
        self._note_shard()
        if not is_current:
            self._version = -1

    def write_back(self) -> None:
        """Bring writes to the full elements to the shard; every rank keeps its own interval."""
        local, spec = self.sharded.to_local(), self.sharded.spec
        if self.full.shape != spec.shape:
            raise RuntimeError(
                f"expected a result of shape {tuple(spec.shape)} to write to {spec.fqn}, "
                f"found {tuple(self.full.shape)}; the parameter is unchanged"
            )
        self.sharded.note_write("whole", self.full)
        local.copy_(spec.localize(self.full))
        end_writes(self.sharded)
        self._note_shard()

    def follow_rank_zero(self, func: Any) -> None:
        """Replace the elements by those that rank 0 has drawn; a collective of all ranks."""
        mesh = self.sharded.spec.mesh
        if mesh.data.size > 1 and self.full.numel():
            self._assemble(func)
            mesh.data.broadcast_(self.full, 0).wait()

    def digest(self) -> int:
        """Return a CRC-32 of the elements' bits, on the host."""
        flat = self.full.detach().contiguous().view(-1).view(torch.uint8)
        return zlib.crc32(cast("bytes", flat.cpu().numpy()))

    def check_alike(self, func: Any, changed: bool = True) -> bool:
        """Return whether an operation has written to the elements; a collective of all ranks.

        Written elements that differ between ranks are an error.
        """
        spec = self.sharded.spec
        if spec.mesh.data.size == 1:
            return changed
        self._assemble(func)
        operation = f"{func.overloadpacket.__name__} of {spec.fqn}"
        (written,), same = agree_on_highest_alike(
            [changed], self.digest().to_bytes(4, "big"), spec.mesh.control, operation
        )
        if written and not same:
            raise RuntimeError(
                f"{func} has left different values of {spec.fqn} on different ranks (this is rank "
                f"{spec.mesh.rank}): it is sharded and has one value for all of them. Expected "
                f"what every rank gets alike (all_reduce, broadcast or all_gather over all ranks); "
                f"the parameter is unchanged. Work on a copy (full_tensor())"
            )
        return changed

    def _assemble(self, func: Any) -> None:
        mesh = self.sharded.spec.mesh
        # Gathering has called the other fingerprints already.
        if mesh.world_fingerprints is not mesh.fingerprints:
            mesh.world_fingerprints.call(
                f"{func.overloadpacket.__name__} of {self.sharded.spec.fqn}"
            )

    def aliases(self, tensor: torch.Tensor) -> bool:
        """Return whether a plain tensor shares memory with the full elements."""
        return tensor.layout is torch.strided and is_alias_of(tensor, self.full)

    def _note_shard(self) -> None:
        # An alias that has parted from its parameter has another shard.
        self._local = self.sharded.to_local()
        self._version = _version_of(self._local)


def _version_of(local: torch.Tensor) -> int:
    return 0 if local.is_inference() else local._version


# Their inputs' values are not read.
_BACKWARDS = {torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward}


class GatheredView(NoRawMemory, torch.Tensor):
    """A view of a sharded tensor that behaves like a plain one: reads and writes reach the shard.

    It owns gathered memory for as long as it lives. A read gathers again if the shard has changed
    in between, so every rank has to take part, as everywhere.
    """

    _plain: torch.Tensor
    _gathered: Gathered

    def __new__(cls, plain: torch.Tensor, gathered: Gathered) -> GatheredView:  # noqa: D102
        made = make_subclass(cls, plain)
        made._plain, made._gathered = plain, gathered
        gathered.sharded.note_view(gathered)
        return made

    def __init__(self, plain: torch.Tensor, gathered: Gathered) -> None:
        """Wrap a view."""

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The view without its history; it cannot be given other memory."""
        return self.detach()

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        fqn = self._gathered.sharded.spec.fqn
        raise NotImplementedError(f"a view of {fqn} cannot be given other memory: use copy_()")

    @property
    def sharded(self) -> ShardTensor:
        """Sharded tensor that this is a view of."""
        return self._gathered.sharded

    @property
    def spec(self) -> ShardSpec:
        """Spec of the sharded tensor that this is a view of."""
        return self._gathered.sharded.spec

    def plain(self) -> torch.Tensor:
        """Return the current elements as a plain tensor, which must not be written to."""
        self._gathered.update()
        return self._plain

    def tolist(self) -> Any:  # noqa: D102
        return self.plain().tolist()

    def numpy(self, *, force: bool = False) -> Any:  # noqa: D102
        array = self.plain().numpy(force=force)
        array.flags.writeable = False  # writes to an array go unseen
        return array

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(self._plain)

    def __format__(self, format_spec: str) -> str:
        return format(self.plain().detach(), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.plain().detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().detach().clone().__reduce_ex__(protocol)

    @classmethod
    @outside_of_graphs
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and not asks_only_about(func) and func not in _BACKWARDS:
            update_views(args, kwargs)
        # Classes with more to say about the function, sharded parameters above all.
        others = tuple(kind for kind in types if not issubclass(kind, cls))
        for kind in others:
            result = kind.__torch_function__(func, others, args, kwargs)
            if result is not NotImplemented:
                return result
        return NotImplemented if others else no_torch_function(func, types, args, kwargs)

    @classmethod
    @outside_of_graphs
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        views = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        everything = written(func, args, kwargs)
        targets = [target for target in everything if isinstance(target, cls)]
        refuse_unmet(func, args, kwargs)
        for view in views:
            view._gathered.update()
        _check_targets(func, targets, args, kwargs)
        plain_args, plain_kwargs = pytree.tree_map_only(
            cls, lambda view: view._plain, (args, kwargs)
        )
        gathered = {id(view._gathered): view._gathered for view in views}
        written_to = {id(target._gathered): target._gathered for target in targets}
        result = run_on_whole(
            func, plain_args, plain_kwargs, [*gathered.values()], [*written_to.values()]
        )
        # Below autograd nothing counts versions, also not those of plain targets in the same list.
        end_writes(*[target for target in everything if not isinstance(target, cls)])
        return wrap_results(
            result, [view._gathered for view in views], {id(view._plain): view for view in views}
        )


def update_views(*arguments: Any) -> None:
    """Gather views among a function's arguments again if their shards have changed; a collective.

    Call it before autograd saves them: it notes their versions, which a later gather would change.
    """
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, GatheredView):
            leaf._gathered.update()


def views_among(tensors: Iterable[torch.Tensor]) -> list[Gathered]:
    """Return the full elements of those tensors that are views of sharded ones."""
    return [tensor._gathered for tensor in tensors if isinstance(tensor, GatheredView)]


def _check_targets(
    func: Any, targets: Sequence[GatheredView], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse writes that could not be brought back."""
    for target in targets:
        sharded = target._gathered.sharded
        if torch.Tag.inplace_view in func.tags and reshapes(func, args, kwargs):
            raise NotImplementedError(
                f"{func} would reshape a view of {sharded.spec.fqn} in place: take another view"
            )
        if target.requires_grad and torch.is_grad_enabled():
            refuse_recorded_write(sharded, str(func))


def wrap_results(result: Any, gathered: Iterable[Gathered], known: dict[int, torch.Tensor]) -> Any:
    """Return the result of an operation on full elements, as callers see it.

    Results that alias the elements which the operation saw become views of the shard. ``known`` has
    the objects to return for plain tensors, by the tensor's identity.
    """

    def present(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in known:
            return known[id(tensor)]
        source = next((each for each in gathered if each.aliases(tensor)), None)
        return tensor if source is None else GatheredView(tensor, source)

    return pytree.tree_map_only(torch.Tensor, present, result)


# -- Writes to gathered tensors, brought back to shards


def run_on_whole(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gathered: Sequence[Gathered],
    targets: Sequence[Gathered],
) -> Any:
    """Run an operation on whole tensors, and bring its writes back to their shards.

    A sharded tensor has one value for all ranks. So random numbers are those of rank 0, and results
    of a collective are refused if they differ between ranks.

    Raises:
        RuntimeError: The written values differ between ranks; shards are unchanged.
    """
    refuse_overlapping(func, targets)
    suspects = [] if names_its_writes(func) else [each for each in gathered if each not in targets]
    before = [each.digest() for each in suspects]
    result = func(*args, **kwargs)
    if communicates(func) and targets:
        finish(func, result, [each.full for each in targets])
        for target in targets:
            target.check_alike(func)
    for suspect, digest in zip(suspects, before, strict=True):
        changed = suspect.digest() != digest
        if suspect.check_alike(func, changed=changed):
            suspect.write_back()
    for target in targets:
        if is_random(func):
            target.follow_rank_zero(func)
        target.write_back()
    return result


def refuse_overlapping(
    func: Any, targets: Sequence[Gathered], also: Iterable[ShardTensor] = ()
) -> None:
    """Refuse a write to one shard through several copies of it."""
    sharded = [*(each.sharded for each in targets), *also]
    if targets and len({id(each.to_local()) for each in sharded}) < len(sharded):
        fqns = ", ".join(sorted({each.spec.fqn for each in sharded}))
        raise NotImplementedError(
            f"{func} would write to several views of {fqns} at once: write to one at a time"
        )
