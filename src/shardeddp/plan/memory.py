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

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the whole buffer's gradients; zero for frozen parameters, or when the slice is the buffer."""
        return self.full_nbytes if self.trainable else 0

    @property
    def arriving_nbytes(self) -> int:
        """Bytes of the other ranks' gradients for this rank's slice."""
        return self.gradient_nbytes - self.gradient_nbytes // self.layout.shard_size


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


def plan_memory(
    units: Sequence[Sequence[GroupCost]], *, prefetch: int, states_per_element: int = 2, staged: bool = True
) -> MemoryPlan:
    """Predict what a rank holds when units are resharded after forward.

    The root unit is unsharded throughout a backward, and its gradients may be there from the start (those of an output
    layer are the first of all). Beside them there are two candidates for the worst moment:

    - An inner unit is at its last gradient. It is unsharded, and so are ``prefetch`` more. Its gradients lie where
      autograd left them; those of the unit before it, packed into a flat buffer, are being reduced. Over gloo the other
      ranks' contributions arrive beside that buffer, which is still being sent from.
    - The root unit's gradients are packed, so they are there twice; the last inner unit's wait for their turn.

    Units are expected side by side: one with others inside it stays unsharded while those are at work.

    Args:
        units: The flat buffers of every unit, the root unit first.
        prefetch: Depth of the backward prefetch, in units.
        states_per_element: Optimizer states of a parameter's own dtype per element; 2 for Adam.
        staged: Whether contributions arrive beside the packed gradients (gloo); NCCL adds them up on the way.
    """
    groups = [group for unit in units for group in unit]
    main = sum(group.shard_nbytes for group in groups)
    gradient = sum(group.shard_nbytes for group in groups if group.trainable)
    parameters = [sum(group.full_nbytes for group in unit) for unit in units]
    gradients = [sum(group.gradient_nbytes for group in unit) for unit in units]
    arriving = [sum(group.arriving_nbytes for group in unit) for unit in units]
    root, root_gradients = sum(parameters[:1]), sum(gradients[:1])
    unsharded = sum(sorted(parameters[1:], reverse=True)[: 1 + prefetch])
    two_units = sorted(gradients[1:], reverse=True)[:2]
    at_work = unsharded + sum(two_units)
    if staged and len(two_units) == 2:
        at_work += max(arriving[1:])
    return MemoryPlan(
        main_shard_nbytes=main,
        gradient_shard_nbytes=gradient,
        optimizer_nbytes=states_per_element * gradient,
        in_flight_nbytes=root + root_gradients + max(at_work, root_gradients + sum(two_units[:1])),
    )
