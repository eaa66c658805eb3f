"""Memory plan: bytes that a rank holds between steps and at its peak, from layouts alone."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.gather import GatherPlan
from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.sharding_strategy import ShardingStrategy

WAITING_UNITS = 4
"""Bound on the bytes of gradients that wait for replicas, in multiples of the largest unit's."""


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """Sizes of the flat buffers of one group of parameters."""

    plan: BufferPlan
    trainable: bool
    main_itemsize: int
    """Bytes per element of the main shard, the gradient shard and the optimizer states."""

    param_itemsize: int
    """Bytes per element of the gathered buffer and of unsharded gradients."""

    reduce_itemsize: int
    """Bytes per element of the gradient buffer."""

    splitting_replicas: int = 1
    """Number of replicas that split a shard; 1 if every replica has the whole shard."""

    replicas: int = 1
    """Size of the replicate group."""

    tensor_size: int = 1
    """Size of the tensor-parallel or expert-parallel group; all figures are those of one rank."""

    def __post_init__(self) -> None:
        plan, main = self.plan, self.main_itemsize
        if not plan.casts_params and self.param_itemsize != main:
            raise ValueError(
                f"expected param_itemsize={main} without a cast, found {self.param_itemsize}"
            )
        if not plan.casts_gradients and self.reduce_itemsize != main:
            raise ValueError(
                f"expected reduce_itemsize={main} without a cast, found {self.reduce_itemsize}"
            )
        if (
            self.splitting_replicas not in (1, self.replicas)
            or plan.layout.num_slices % self.splitting_replicas
        ):
            raise ValueError(
                f"expected that all {self.replicas} replicas split a shard or none does, and that "
                f"they divide the {plan.layout.num_slices} slices, found splitting_replicas={self.splitting_replicas}"
            )

    def gathers(self, sharding: ShardingStrategy) -> GatherPlan:
        """Return the plan of the gathers under a sharding strategy."""
        return GatherPlan(
            buffers=self.plan,
            reshard=sharding.reshard,
            shard_size=self.shard_size,
            regather_size=sharding.regather_size,
        )

    @property
    def layout(self) -> FlatLayout:
        """Layout of the parameters in the buffers."""
        return self.plan.layout

    @property
    def shard_size(self) -> int:
        """Number of ranks that share these parameters."""
        return self.layout.num_slices // self.splitting_replicas

    @property
    def replica_shard_nbytes(self) -> int:
        """Bytes of the shard in the compute dtype, retained if replicas split it; 0 otherwise."""
        part = self.layout.padded_numel // self.shard_size
        return (
            0 if self.splitting_replicas == 1 or self.plan.borrows else part * self.param_itemsize
        )

    @property
    def slice_nbytes(self) -> int:
        """Bytes of this rank's slice in the main dtype: of its main shard and gradient shard."""
        return self.layout.slice_numel * self.main_itemsize

    @property
    def main_nbytes(self) -> int:
        """Bytes of the main shard that are the group's own; zero if it borrows them."""
        return 0 if self.plan.borrows else self.slice_nbytes

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered buffer; zero if another buffer serves as it."""
        is_own = not (self.plan.resident or self.plan.borrows)
        return self.layout.padded_numel * self.param_itemsize if is_own else 0

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the unsharded gradients; zero for frozen parameters."""
        return self.layout.padded_numel * self.param_itemsize if self.trainable else 0

    @property
    def summed_nbytes(self) -> int:
        """Bytes of unsharded gradients that autograd has added up over several backwards.

        These are in the reduce dtype if parameters are cast.
        """
        return self.layout.padded_numel * self.summed_itemsize if self.trainable else 0

    @property
    def summed_itemsize(self) -> int:
        """Bytes per element of gradients that autograd has added up."""
        return self.reduce_itemsize if self.plan.casts_params else self.param_itemsize

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest parameter's gradient; zero for frozen parameters."""
        numels = [slot.numel for slot in self.layout.slots if self.trainable]
        return max(numels, default=0) * self.param_itemsize

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the gradient buffer; zero if gradients are packed into the gradient shard."""
        is_used = self.trainable and not self.plan.packs_into_shard
        return self.layout.padded_numel * self.reduce_itemsize if is_used else 0

    @property
    def receive_nbytes(self) -> int:
        """Bytes of the receive buffer for other ranks' gradients in a reduce-scatter (gloo)."""
        return (
            self.buffer_nbytes
            - self.buffer_nbytes * self.splitting_replicas // self.layout.num_slices
        )

    @property
    def partial_nbytes(self) -> int:
        """Bytes of partial sums: averaged in the shard group, not yet across replicas."""
        return (
            self.slice_nbytes * self.splitting_replicas
            if self.trainable and self.replicas > 1
            else 0
        )

    @property
    def averages_nbytes(self) -> int:
        """Bytes of averages that are reduced across replicas, or on the way to the host.

        Includes the receive buffers of replicas that split the shard.
        """
        leaves = self.plan.on_host or self.splitting_replicas > 1
        if not leaves and (self.replicas == 1 or self.plan.averages_in_shard):
            return 0
        shard = self.buffer_nbytes * self.splitting_replicas // self.layout.num_slices
        return shard + shard - shard // self.splitting_replicas


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Predicted memory of one rank in bytes, without activations and the user's own tensors."""

    main_shard_nbytes: int
    gradient_shard_nbytes: int
    optimizer_nbytes: int
    retained_nbytes: int = 0
    """Gathered parameters that are retained between steps."""

    in_flight_nbytes: int
    """Unsharded parameters and gradients at the peak of a step."""

    host_nbytes: int = 0
    """State offloaded to host memory, of which what a device copies from or to is pinned."""

    @property
    def resting_nbytes(self) -> int:
        """Bytes on the device between steps."""
        return (
            self.main_shard_nbytes
            + self.gradient_shard_nbytes
            + self.optimizer_nbytes
            + self.retained_nbytes
        )

    @property
    def peak_nbytes(self) -> int:
        """Bytes on the device at the peak of a step."""
        return self.resting_nbytes + self.in_flight_nbytes


@dataclass(frozen=True, kw_only=True)
class BackwardMemory:
    """Candidate for the memory peak of a backward: a unit has computed its gradients."""

    unit: int
    """Index of the running unit."""

    position: int = 0
    """Number of forwards of inner units before the one whose backward this is."""

    nbytes: int
    """Bytes of unsharded parameters and of gradients that are not reduced yet."""

    is_over: bool = False
    """True if the unit's activations are freed."""

    own_nbytes: int = 0
    """Part of ``nbytes`` that is the unit's own gradients."""

    accumulates: bool = False
    """True if each of these is added to one of an earlier micro-batch."""

    root_nbytes: int = 0
    """Part of ``nbytes`` that is the root's gradients; those of an embedding come last."""

    unsharded: Collection[int] | None = ()
    """Inner units whose parameters are in ``nbytes``; None: all whose backwards are to come."""


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """Memory that a unit or one of its groups currently holds on the device, in bytes."""

    main_nbytes: int = 0
    gradient_nbytes: int = 0
    """Bytes of gradient shards."""
    in_flight_nbytes: int = 0
    """Bytes of gathered parameters, and of gradients that are not reduced yet."""

    def __add__(self, other: "HeldMemory") -> "HeldMemory":
        """Add field by field."""
        return HeldMemory(**{name: mine + vars(other)[name] for name, mine in vars(self).items()})


def plan_memory(
    units: Sequence[Sequence[GroupCost]],
    sharding: ShardingStrategy,
    *,
    prefetch: int,
    states_per_element: int = 2,
    needs_receive_buffer: bool = True,
    accumulates: bool = False,
    offload_optimizer: bool = False,
) -> MemoryPlan:
    """Predict the memory of a rank.

    The root unit is unsharded throughout a backward, and its gradients may exist from the start
    (those of an output layer come first). In addition there are two candidates for the peak:

    - An inner unit computes its last gradient. Its gradients are unsharded; those of the previous
      unit, packed into a flat buffer, are being reduced. With gloo the other ranks' contributions
      need a receive buffer as well, while the flat buffer is still being sent. The number of
      unsharded units depends on the strategy: the running one and ``prefetch`` more, or all that
      the backward has not reached yet, or always all.
    - The root unit's gradients are packed, so they exist twice; those of the last inner unit wait
      for their reduction.

    Units are assumed to be siblings in forward order: a unit with other units inside it stays
    unsharded while those run.

    Args:
        units: Flat buffers of every unit, the root unit first.
        sharding: Strategy: times of resharding and reduction.
        prefetch: Depth of the backward prefetch, in units.
        states_per_element: Optimizer states in the main dtype per parameter element; 2 for Adam.
        needs_receive_buffer: True if a reduce-scatter needs a receive buffer (gloo); NCCL sums in transit.
        accumulates: True if a step has several micro-batches. Their gradients are kept unsharded if
            the strategy reduces once per step; else as partial sums if there are replicas.
        offload_optimizer: True if optimizer states live on the host, with copies of parameters and
            gradients.

    The peak of a root unit of 8 and two inner units of 16 float32 elements on two ranks is in the
    backward of inner unit 1, while the gradients of unit 2 are reduced by NCCL:

    >>> from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES
    >>> def cost(numel: int) -> GroupCost:
    ...     layout = FlatLayout.build(["w"], [(numel,)], itemsize=4, num_slices=2)
    ...     sizes = dict(main_itemsize=4, param_itemsize=4, reduce_itemsize=4)
    ...     return GroupCost(plan=BufferPlan(layout=layout), trainable=True, **sizes)
    >>> units = [[cost(8)], [cost(16)], [cost(16)]]
    >>> full = SHARDING_STRATEGIES["full_shard"]
    >>> found = plan_memory(units, full, prefetch=1, needs_receive_buffer=False)
    >>> found.main_shard_nbytes, found.gradient_shard_nbytes  # half of 40 elements, 4 bytes each
    (80, 80)
    >>> found.optimizer_nbytes  # two states of Adam
    160
    >>> root, inner, packed = 2 * 8 * 4, 2 * 16 * 4, 16 * 4  # parameters and gradients; a buffer
    >>> found.in_flight_nbytes == root + inner + packed == 256
    True
    """
    worst = backward_moments(
        units,
        sharding,
        prefetch=prefetch,
        needs_receive_buffer=needs_receive_buffer,
        accumulates=accumulates,
    )
    between_steps = memory_between_steps(
        units,
        sharding,
        states_per_element=states_per_element,
        offload_optimizer=offload_optimizer,
    )
    return replace(between_steps, in_flight_nbytes=max((it.nbytes for it in worst), default=0))


def memory_between_steps(
    units: Sequence[Sequence[GroupCost]],
    sharding: ShardingStrategy,
    *,
    states_per_element: int = 2,
    offload_optimizer: bool = False,
) -> MemoryPlan:
    """Predict the memory of a rank with nothing in flight; arguments as in :func:`plan_memory`."""
    groups = [group for unit in units for group in unit]
    main = sum(unit_sums(units, lambda it: it.main_nbytes))
    gradient = sum(group.slice_nbytes for group in groups if group.trainable)
    states = states_per_element * gradient
    retained = sum(unit_sums(units, lambda it: it.replica_shard_nbytes))
    if sharding.retains:
        retained += sum(unit_sums(units, lambda it: it.gathered_nbytes))
    host = 0
    if any(group.plan.on_host for group in groups):
        own = sum(pinned(group.main_nbytes) for group in groups)
        own += sum(pinned(group.slice_nbytes) for group in groups if group.trainable)
        host, main, gradient, states = own + states, 0, 0, 0
    elif offload_optimizer:
        copies = sum(pinned(group.slice_nbytes) for group in groups if group.trainable)
        host, states = states + 2 * copies, 0
    return MemoryPlan(
        main_shard_nbytes=main,
        gradient_shard_nbytes=gradient,
        optimizer_nbytes=states,
        retained_nbytes=retained,
        in_flight_nbytes=0,
        host_nbytes=host,
    )


def unit_sums(
    units: Sequence[Sequence[GroupCost]], nbytes_of: Callable[[GroupCost], int]
) -> list[int]:
    """Return the bytes of each unit, summed over its groups.

    A search plans many strategies; its equal units are one object, and computed once.
    """
    made = {id(unit): unit for unit in units}
    sums = {key: sum(map(nbytes_of, unit)) for key, unit in made.items()}
    return [sums[id(unit)] for unit in units]


def pinned(nbytes: int) -> int:
    """Return the bytes of a block of pinned memory: torch's allocator takes powers of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def waiting_gradients(
    units: Sequence[Sequence[GroupCost]], sharding: ShardingStrategy, *, accumulates: bool
) -> int:
    """Return the bytes of gradients accumulated over micro-batches, without gradient shards.

    They exist from the end of the first micro-batch to the last backward. Arguments as in
    :func:`plan_memory`.
    """
    if not accumulates:
        return 0
    reduced = sharding.reduce_every_backward
    if reduced:
        return sum(unit_sums(units, lambda it: it.partial_nbytes))
    return sum(unit_sums(units, lambda it: it.summed_nbytes))


def backward_moments(
    units: Sequence[Sequence[GroupCost]],
    sharding: ShardingStrategy,
    *,
    prefetch: int,
    needs_receive_buffer: bool = True,
    accumulates: bool = False,
    uses: Sequence[int] | None = None,
    keeps_last: bool = True,
) -> list[BackwardMemory]:
    """Return candidates for the memory peak of a backward.

    ``uses`` has the index of the inner unit of each forward, in their order; None: each runs once.
    ``keeps_last`` is False if the last unit is released at the end of its forward, as all others
    are. Other arguments are as in :func:`plan_memory`.
    """
    uses = range(1, len(units)) if uses is None else uses
    unit_bytes = _UnitBytes(
        units, needs_receive_buffer=needs_receive_buffer, accumulates=accumulates
    )
    kept = kept_parts(units, sharding, uses, keeps_last=keeps_last)
    backward = _backward_of(uses, unit_bytes.parameters, kept, sharding, prefetch)
    held = 0 if sharding.retains else sum(unit_bytes.parameters[:1])
    held += waiting_gradients(units, sharding, accumulates=accumulates)
    if accumulates and not sharding.reduce_every_backward:
        return unit_bytes.moments_of_sums(backward, held)
    return unit_bytes.moments_in_turn(backward, held)


def kept_parts(
    units: Sequence[Sequence[GroupCost]],
    sharding: ShardingStrategy,
    uses: Sequence[int],
    *,
    keeps_last: bool = True,
) -> list[int]:
    """Return bytes of the part of each unit that a rank keeps from its forward to its backward.

    The root is not released between them. Arguments are as in :func:`backward_moments`.
    """
    if sharding.regather_size is None:  # most plans; a search makes many
        return [0] * len(units)
    released = uses[:-1] if keeps_last else uses
    return [
        sum(group.gathers(sharding).kept_numel * group.param_itemsize for group in unit)
        if at in released
        else 0
        for at, unit in enumerate(units)
    ]


@dataclass(frozen=True, kw_only=True)
class _Use:
    """Backward of one forward of a unit."""

    unit: int
    position: int
    """Number of forwards that ran before that one."""
    unsharded_nbytes: int = 0
    """Bytes of inner units' unsharded parameters, and of the parts kept for their gathers."""
    unsharded: Collection[int] | None = ()
    """Those inner units; None: all whose backwards are to come."""
    closed: Sequence[int] = ()
    """Units whose backwards are over, in their order."""
    opened: Sequence[int] = ()
    """Other units with gradients, of which backwards are still to come."""
    adds: bool = False
    """True if its gradients are added to those of a later forward."""
    is_open: bool = False
    """True if a backward of an earlier forward is still to come."""


def _backward_of(
    uses: Sequence[int],
    parameters: Sequence[int],
    kept: Sequence[int],
    sharding: ShardingStrategy,
    prefetch: int,
) -> list[_Use]:
    """Return the backwards of forwards, in their order: the last forward comes first."""
    found: list[_Use] = []
    closed: list[int] = []
    begun: dict[int, None] = {}  # of which backwards are still to come
    ahead = Counter(uses)
    # Bytes of all units with backwards still to come, the running one among them.
    gathered, parts = (sum(nbytes[it] for it in ahead) for nbytes in (parameters, kept))
    for position in reversed(range(len(uses))):
        unit = uses[position]
        ahead[unit] -= 1
        opened = [it for it in begun if it != unit]
        near, nbytes = None, gathered  # a list of them for each backward grows with the square
        if sharding.retains:
            near, nbytes = (), 0
        elif sharding.reshard.in_turn:
            near = {unit, *opened, *_last_different(uses, position, prefetch)}
            nbytes = sum(parameters[it] for it in near)
        found.append(
            _Use(
                unit=unit,
                position=position,
                unsharded_nbytes=nbytes + parts,
                unsharded=near,
                closed=[*closed],
                opened=opened,
                adds=unit in begun,
                is_open=ahead[unit] > 0,
            )
        )
        if ahead[unit]:
            begun[unit] = None
            continue
        begun.pop(unit, None)
        gathered, parts = gathered - parameters[unit], parts - kept[unit]
        closed.append(unit)
    return found


def _last_different(uses: Sequence[int], position: int, count: int) -> list[int]:
    """Return the last ``count`` different units before a position, the last one first."""
    found: list[int] = []
    while position and len(found) < count:
        position -= 1
        if uses[position] not in found:
            found.append(uses[position])
    return found


class _UnitBytes:
    """Bytes of the tensors of each unit in a backward, and the moments at which they add up."""

    def __init__(
        self,
        units: Sequence[Sequence[GroupCost]],
        *,
        needs_receive_buffer: bool,
        accumulates: bool,
    ) -> None:
        def total(nbytes_of: Callable[[GroupCost], int], counts: bool = True) -> list[int]:
            return unit_sums(units, nbytes_of) if counts else [0] * len(units)

        self._units, self._receives = units, needs_receive_buffer
        self.parameters = total(lambda it: it.gathered_nbytes)
        self._gradients, self._summed = (
            total(lambda it: it.gradient_nbytes),
            total(lambda it: it.summed_nbytes),
        )
        self._buffers = total(lambda it: it.buffer_nbytes)
        arriving = total(lambda it: it.receive_nbytes, needs_receive_buffer)
        self._packed = [own + more for own, more in zip(self._buffers, arriving, strict=True)]
        self._sharing = total(lambda it: it.averages_nbytes)
        # Averages that exist as soon as a reduction is issued: streams keep the order of its stages,
        # and a group of one rank has nothing to wait for.
        self._early = self._sharing
        if needs_receive_buffer:
            self._early = [
                sum(it.averages_nbytes for it in unit if it.shard_size == 1) for unit in units
            ]
        # After the reduce-scatter averages are in the place of partial sums.
        partial = total(lambda it: it.partial_nbytes, accumulates)
        self._late = [
            max(0, more - former) for more, former in zip(self._sharing, partial, strict=True)
        ]
        self._most = (WAITING_UNITS + 1) * max(self._sharing, default=0)

    def moments_of_sums(self, backward: Sequence[_Use], held: int) -> list[BackwardMemory]:
        """Return the moments of a backward in which all gradients of a step are added up first."""
        moments: list[BackwardMemory] = []
        closed = [it.unit for it in backward if not it.is_open]
        for it in [*backward, _Use(unit=0, position=0, closed=closed)] if self._gradients else []:
            # Those of the unit whose backwards were over before are being reduced meanwhile.
            behind = sum(
                max(0, self._packed[last] - self._summed[last] + self._early[last])
                for last in it.closed[-1:]
            )
            moments.append(self._in_backward(it, held, behind, adds_all=True))
            # The averages are copied out of the buffer before that is released.
            done = max(0, self._packed[it.unit] - self._summed[it.unit]) + self._sharing[it.unit]
            moments.append(
                BackwardMemory(
                    unit=it.unit,
                    position=it.position,
                    nbytes=held + it.unsharded_nbytes + max(self._buffers[it.unit], done),
                    unsharded=it.unsharded,
                    is_over=True,
                )
            )
        return moments

    def moments_in_turn(self, backward: Sequence[_Use], held: int) -> list[BackwardMemory]:
        """Return the moments of a backward in which gradients are reduced unit after unit."""
        closed = [it.unit for it in backward if not it.is_open]
        held += sum(self._gradients[:1])
        # The root's reduction, after the last inner unit.
        last = held + sum(self._gradients[it] for it in closed[-1:]) + sum(self._buffers[:1])
        late_before = [0, *accumulate(self._late[it] for it in closed)]
        last += self._waiting_behind([*closed, 0] if self._gradients else [], late_before)
        moments = [BackwardMemory(unit=0, nbytes=last, is_over=True)]
        for it in backward:
            # The previous unit is in its reduce-scatter, the one before it is reduced across
            # replicas.
            before = sum(self._packed[unit] for unit in it.closed[-1:])
            before += self._waiting_behind(it.closed, late_before)
            moments.append(self._in_backward(it, held, before, adds_all=False))
        return moments

    def _in_backward(self, it: _Use, held: int, behind: int, *, adds_all: bool) -> BackwardMemory:
        """Return the moment of a unit's backward, beside what is held and reduced meanwhile."""
        # Autograd holds the gradients of a unit until all of its backwards have added to them.
        held += (
            sum(self._gradients[unit] for unit in it.opened) + it.adds * self._gradients[it.unit]
        )
        own = cast = self._gradients[it.unit]
        adds = it.adds or (adds_all and not it.is_open)
        if adds:  # a new one exists beside what it is added to, cast if that is of former backwards
            own, cast = self._added(it.unit)
        return BackwardMemory(
            unit=it.unit,
            position=it.position,
            nbytes=held + behind + it.unsharded_nbytes + (own if it.is_open else cast),
            unsharded=it.unsharded,
            own_nbytes=own,
            accumulates=adds,
            root_nbytes=0 if adds_all else sum(self._gradients[:1]),
        )

    def _added(self, unit: int) -> tuple[int, int]:
        """Return bytes of a new gradient, before and after the cast in which it is added."""
        group = max(self._units[unit], key=lambda it: it.largest_nbytes, default=None)
        if group is None:
            return 0, 0
        own = group.largest_nbytes
        return own, own // group.param_itemsize * group.summed_itemsize

    def _waiting_behind(self, closed: Sequence[int], late_before: Sequence[int]) -> int:
        """Return bytes in reductions across replicas while the last of these units is reduced.

        They are the first ones whose backwards end; ``late_before`` has the sums of all of those.
        """
        own = sum(self._early[it] for it in closed[-1:])
        if self._receives:  # a unit waits for the next one's, and in a group of one for none
            return own or sum(self._late[it] for it in closed[-2:-1])
        # Streams keep the order, so the host issues both at once, up to the limit of the reduction
        # queue.
        behind = own + late_before[max(0, len(closed) - 1)]
        return min(behind, self._most)
