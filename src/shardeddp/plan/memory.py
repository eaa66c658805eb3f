"""The cost model: bytes that a rank holds at rest and at its peak, from layouts alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardeddp.plan.layout import FlatLayout


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """One flat buffer of a unit, as the cost model sees it."""

    layout: FlatLayout
    trainable: bool

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's slice."""
        return self.layout.shard_numel * self.layout.itemsize

    @property
    def full_nbytes(self) -> int:
        """Bytes of the whole flat buffer; zero when the slice is the buffer."""
        return 0 if self.layout.shard_size == 1 else self.layout.padded_numel * self.layout.itemsize


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Predicted bytes of one rank; activations and the user's own tensors are not in it."""

    main_shard_nbytes: int
    gradient_shard_nbytes: int
    optimizer_nbytes: int
    in_flight_nbytes: int
    """Unsharded parameters and gradients of the units that are in flight at the worst moment."""

    @property
    def resting_nbytes(self) -> int:
        """What stays between steps."""
        return self.main_shard_nbytes + self.gradient_shard_nbytes + self.optimizer_nbytes

    @property
    def peak_nbytes(self) -> int:
        """What is held at the worst moment of a step."""
        return self.resting_nbytes + self.in_flight_nbytes


def plan_memory(units: Sequence[Sequence[GroupCost]], *, prefetch: int, states_per_element: int = 2) -> MemoryPlan:
    """Predict what a rank holds when units are resharded after forward.

    At the worst moment of a backward the root unit is unsharded, and so are one unit and ``prefetch`` more; the unit at
    work holds its gradients twice (where autograd left them, and packed), and so does nobody else.

    Args:
        units: The flat buffers of every unit, the root unit first.
        prefetch: Depth of the backward prefetch, in units.
        states_per_element: Optimizer states of a parameter's own dtype per element; 2 for Adam.
    """
    groups = [group for unit in units for group in unit]
    main = sum(group.shard_nbytes for group in groups)
    gradient = sum(group.shard_nbytes for group in groups if group.trainable)
    parameters = [sum(group.full_nbytes for group in unit) for unit in units]
    gradients = [sum(group.full_nbytes for group in unit if group.trainable) for unit in units]
    inner = sorted(parameters[1:], reverse=True)[: 1 + prefetch]
    in_flight = sum(parameters[:1]) + sum(inner) + 2 * max(gradients, default=0)
    return MemoryPlan(
        main_shard_nbytes=main,
        gradient_shard_nbytes=gradient,
        optimizer_nbytes=states_per_element * gradient,
        in_flight_nbytes=in_flight,
    )
