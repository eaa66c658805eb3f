"""Memory plan: bytes that a rank holds at rest and at its peak, from layouts alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardeddp.plan.layout import FlatLayout
from shardeddp.plan.sharding_strategy import Reshard, ShardingStrategy

WAITING_UNITS = 4
"""Largest units whose shards of gradients may wait for replicas when another unit is reduced."""


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """The flat buffers of one group of parameters, as the cost model sees them."""

    layout: FlatLayout
    trainable: bool
    main_itemsize: int
    """Bytes of an element of the main shard, the gradient shard and the optimizer's states."""

    param_itemsize: int
    """Bytes of an element of the gathered buffer, and of the gradients that autograd leaves."""

    reduce_itemsize: int
    """Bytes of an element of the gradient buffer."""

    split: int = 1
    """Replicas that split a shard among them."""

    replicas: int = 1
    """Shard groups that train on different batches."""

    parts: int = 1
    """Ranks that have other parts of the same layers, or other experts; these figures are of one."""

    @property
    def shard_size(self) -> int:
        """Ranks that share these parameters."""
        return self.layout.num_slices // self.split

    @property
    def part_nbytes(self) -> int:
        """Bytes of the shard that this rank gathers from, where it owns only a slice of it."""
        part = self.layout.padded_numel // self.shard_size
        return 0 if self.split == 1 else part * self.param_itemsize

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's slice of the main shard."""
        return self.layout.shard_numel * self.main_itemsize

    @property
    def full_nbytes(self) -> int:
        """Bytes of the gathered buffer; zero when the main shard is the buffer."""
        resident = self.layout.num_slices == 1 and self.param_itemsize == self.main_itemsize
        return 0 if resident else self.layout.padded_numel * self.param_itemsize

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradients where autograd leaves them; zero for frozen parameters."""
        return self.layout.padded_numel * self.param_itemsize if self.trainable else 0

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the gradient of the largest parameter; zero for frozen ones."""
        numels = [slot.numel for slot in self.layout.slots if self.trainable]
        return max(numels, default=0) * self.param_itemsize

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the gradient buffer; zero if gradients are packed directly into their shard."""
        direct = self.layout.num_slices == 1 and self.reduce_itemsize == self.main_itemsize
        return (
            0 if direct or not self.trainable else self.layout.padded_numel * self.reduce_itemsize
        )

    @property
    def arriving_nbytes(self) -> int:
        """Bytes of the other ranks' gradients for this rank's slice."""
        return self.buffer_nbytes - self.buffer_nbytes * self.split // self.layout.num_slices

    @property
    def partial_nbytes(self) -> int:
        """Bytes of the sums of micro-batches that replicas have not shared yet."""
        return self.shard_nbytes * self.split if self.trainable and self.replicas > 1 else 0

    @property
    def sharing_nbytes(self) -> int:
        """Bytes of a shard's gradients on their way to the replicas, beside the gradient shard.

        Arrivals from replicas that split the shard are included.
        """
        if self.replicas == 1 or (self.split == 1 and self.reduce_itemsize == self.main_itemsize):
            return 0  # it is averaged where it stays
        shard = self.buffer_nbytes * self.split // self.layout.num_slices
        return shard + shard - shard // self.split

    @property
    def leaving_nbytes(self) -> int:
        """Bytes of a shard's gradients on their way from a device to the host."""
        nbytes = self.layout.padded_numel * self.reduce_itemsize // self.layout.num_slices
        return nbytes if self.trainable else 0


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Predicted bytes of one rank's device, without activations and the user's own tensors."""

    main_shard_nbytes: int
    gradient_shard_nbytes: int
    optimizer_nbytes: int
    retained_nbytes: int = 0
    """Gathered parameters that stay between steps."""

    in_flight_nbytes: int
    """Unsharded parameters and gradients of the units that are in flight at the worst moment."""

    host_nbytes: int = 0
    """State kept in host memory instead, between steps."""

    @property
    def resting_nbytes(self) -> int:
        """Bytes that stay between steps."""
        return (
            self.main_shard_nbytes
            + self.gradient_shard_nbytes
            + self.optimizer_nbytes
            + self.retained_nbytes
        )

    @property
    def peak_nbytes(self) -> int:
        """Bytes held at the worst moment of a step."""
        return self.resting_nbytes + self.in_flight_nbytes


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """Bytes that a unit or a part of it holds on its rank's device now."""

    main_nbytes: int = 0
    gradient_nbytes: int = 0
    """Of gradient shards."""
    in_flight_nbytes: int = 0
    """Gathered parameters, and gradients that are not reduced yet."""

    def __add__(self, other: "HeldMemory") -> "HeldMemory":
        """Both."""
        return HeldMemory(**{name: mine + vars(other)[name] for name, mine in vars(self).items()})


def plan_memory(
    units: Sequence[Sequence[GroupCost]],
    sharding: ShardingStrategy,
    *,
    prefetch: int,
    states_per_element: int = 2,
    staged: bool = True,
    accumulates: bool = False,
    offload_optimizer: bool = False,
) -> MemoryPlan:
    """Predict the memory of a rank.

    The root unit is unsharded throughout a backward, and its gradients may be there from the start
    (those of an output layer are the first of all). Beside them there are two candidates for the
    worst moment:

    - An inner unit is at its last gradient. Its gradients lie where autograd left them; those of
      the unit before it, packed into a flat buffer, are being reduced. Over gloo the other ranks'
      contributions arrive beside that buffer, which is still being sent from. How many units are
      unsharded then is the strategy's choice: ``prefetch`` more than the one at work, or all that
      the backward has not come to yet, or all and always.
    - The root unit's gradients are packed, so they are there twice; the last inner unit's wait for
      their turn.

    Units are expected side by side, in the order of their forwards: one with others inside it stays
    unsharded while those are at work.

    Args:
        units: The flat buffers of every unit, the root unit first.
        sharding: Times of resharding and reduction, and state kept on the host.
        prefetch: Depth of the backward prefetch, in units.
        states_per_element: Optimizer states of a parameter's own dtype per element; 2 for Adam.
        staged: Whether contributions arrive beside the packed gradients (gloo); NCCL adds them up
            on the way.
        accumulates: Whether several micro-batches make a step; gradients then wait unsharded where
            the strategy does not reduce them each time, and in sums of the shard group where it
            does and there are replicas.
        offload_optimizer: The optimizer's states live on the host, with copies of parameters and
            gradients.
    """
    groups = [group for unit in units for group in unit]
    main = sum(group.shard_nbytes for group in groups)
    gradient = sum(group.shard_nbytes for group in groups if group.trainable)
    states = states_per_element * gradient
    retained = sum(group.part_nbytes for group in groups)
    if sharding.reshard is Reshard.NEVER:
        retained += sum(group.full_nbytes for group in groups)
    worst = backward_moments(
        units, sharding, prefetch=prefetch, staged=staged, accumulates=accumulates
    )
    in_flight = max((nbytes for _, nbytes in worst), default=0)
    if sharding.offload_params:
        host, main, gradient, states = main + gradient + states, 0, 0, 0
    elif offload_optimizer:
        host, states = states + 2 * gradient, 0
    else:
        host = 0
    return MemoryPlan(
        main_shard_nbytes=main,
        gradient_shard_nbytes=gradient,
        optimizer_nbytes=states,
        retained_nbytes=retained,
        in_flight_nbytes=in_flight,
        host_nbytes=host,
    )


def waiting_gradients(
    units: Sequence[Sequence[GroupCost]], sharding: ShardingStrategy, *, accumulates: bool
) -> int:
    """Bytes of gradients that wait for a step's last micro-batch, beside the gradient shards.

    All of them are there from the end of the first micro-batch to the last backward. Arguments as
    in :func:`plan_memory`.
    """
    if not accumulates:
        return 0
    reduced = sharding.reduce_every_backward
    return sum(
        group.partial_nbytes if reduced else group.gradient_nbytes
        for unit in units
        for group in unit
    )


def backward_moments(
    units: Sequence[Sequence[GroupCost]],
    sharding: ShardingStrategy,
    *,
    prefetch: int,
    staged: bool = True,
    accumulates: bool = False,
) -> list[tuple[int, int]]:
    """Candidates for the worst moment of a backward; arguments as in :func:`plan_memory`.

    Returns:
        The place of the unit at work, and bytes of unsharded parameters and gradients then.
    """
    gradients = [sum(group.gradient_nbytes for group in unit) for unit in units]
    buffers = [sum(group.buffer_nbytes for group in unit) for unit in units]
    arriving = [sum(group.arriving_nbytes for group in unit) if staged else 0 for unit in units]
    parameters = [sum(group.full_nbytes for group in unit) for unit in units]
    packed = [buffer + more for buffer, more in zip(buffers, arriving, strict=True)]
    kept_root = 0 if sharding.reshard is Reshard.NEVER else sum(parameters[:1])
    waiting = waiting_gradients(units, sharding, accumulates=accumulates)
    root = kept_root + sum(gradients[:1]) + waiting
    if accumulates and not sharding.reduce_every_backward:
        # All of them lie where autograd left them, until each has been packed. A new one is there
        # twice until it has been added to that of the micro-batches before.
        extra = [
            max(buffer, more - own)
            for buffer, more, own in zip(buffers, packed, gradients, strict=True)
        ]
        largest = [group.largest_nbytes for unit in units for group in unit]
        everything = kept_root + waiting + max(extra + largest, default=0)
        return [(max(0, len(units) - 1), everything)]
    unsharded = _unsharded(parameters, sharding, prefetch)
    to_host = sharding.offload_params and not staged
    sharing = [
        sum(max(group.sharing_nbytes, group.leaving_nbytes * to_host) for group in unit)
        for unit in units
    ]

    def waiting_behind(place: int) -> int:
        """Bytes of reductions in the second collective while the unit of this place is in the first."""
        behind = sharing[place + 1 :]
        if staged:
            return sum(behind[:1])
        # Streams keep the order: the host issues both at once, as far as the reducer lets it.
        return min(sum(sharing[place:]), (WAITING_UNITS + 1) * max(sharing, default=0))

    # The root's turn, the last inner unit being done.
    moments = [(0, root + sum(gradients[1:2]) + sum(buffers[:1]) + waiting_behind(0))]
    for place, (own, held) in enumerate(zip(gradients[1:], unsharded, strict=True), start=1):
        moments.append((place, root + own + held))
    # The unit before the one at work is in the first collective, the one before that in the second.
    for place, (own, before, held) in enumerate(
        zip(gradients[1:], packed[2:], unsharded, strict=False), start=1
    ):
        moments.append((place, root + own + before + waiting_behind(place + 1) + held))
    return moments


def _unsharded(parameters: Sequence[int], sharding: ShardingStrategy, prefetch: int) -> list[int]:
    """By inner unit, bytes of inner units' unsharded parameters while the backward is at it."""
    inner = parameters[1:]
    if sharding.reshard is Reshard.NEVER:
        return [0 for _ in inner]
    if sharding.reshard is Reshard.AFTER_BACKWARD:
        return [sum(inner[: place + 1]) for place in range(len(inner))]
    return [sum(inner[max(0, place - prefetch) : place + 1]) for place in range(len(inner))]
