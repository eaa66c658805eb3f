"""Plan of a reduction of one group's gradients: where they are packed, its stages, its result."""

from dataclasses import dataclass
from enum import Enum

from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.topology import Topology


class ReduceOver(Enum):
    """Ranks over which a backward averages its gradients."""

    NONE = "none"
    """This rank alone: gradients stay whole until a later micro-batch of the step."""

    SHARD_GROUP = "shard group"
    """The shard group: a later micro-batch of the step averages their sums over replicas."""

    ALL = "all"
    """All ranks: the last micro-batch of a step, or its only one."""


class ReductionStage(Enum):
    """Stage of a reduction: a transfer on a stream of its own, after which the next one begins."""

    IN_SHARD_GROUP = "in_shard_group"
    """Reduce-scatter in the shard group, on the reduce stream; partial sums are added to it."""

    ACROSS_REPLICAS = "across_replicas"
    """All-reduce across replicas, on the replicate stream; a reduce-scatter if they split shards."""

    TO_HOST = "to_host"
    """Copy to a gradient shard in host memory, on the copy-out stream."""


@dataclass(frozen=True, kw_only=True)
class ReductionPlan:
    """Facts about one reduction, and the decisions that follow from them.

    Two replicas of two ranks each reduce the shard group's gradients first, then across replicas:

    >>> from shardeddp.plan.layout import FlatLayout
    >>> layout = FlatLayout.build(["weight"], [(4, 2)], itemsize=4, num_slices=2)
    >>> plan = ReductionPlan(
    ...     buffers=BufferPlan(layout=layout),
    ...     topology=Topology(world_size=4, shard_size=2),
    ...     over=ReduceOver.ALL,
    ...     adds_to=(False,),
    ...     has_replicas=True,
    ... )
    >>> [stage.value for stage in plan.stages], plan.packs_into_shard, plan.output_in_buffer
    (['in_shard_group', 'across_replicas'], False, False)
    """

    buffers: BufferPlan
    topology: Topology
    """Mesh of the ranks that share these parameters."""

    over: ReduceOver
    adds_to: tuple[bool, ...]
    """Per parameter: True to add to its gradient in the gradient shard, False to overwrite it."""

    has_replicas: bool
    """True if a step has a stage across replicas.

    Experts have it with the other parameters, even if no other rank has the same experts.
    """

    adds_partial: bool = False
    """True if partial sums of earlier micro-batches are added."""

    averages: bool = True
    """True if collectives average; False: they add up, and divide the sum."""

    def __post_init__(self) -> None:
        if self.over is ReduceOver.NONE:
            raise ValueError("expected a reduction over ranks, found ReduceOver.NONE")
        if len(self.adds_to) != len(self.buffers.layout.slots):
            raise ValueError(
                f"expected one flag for each of {len(self.buffers.layout.slots)} parameters, found "
                f"{len(self.adds_to)}"
            )
        if not self.has_replicas and (self.adds_partial or self.topology.replicate_size > 1):
            raise ValueError(f"expected a stage across replicas, found none in {self}")

    @property
    def stages(self) -> tuple[ReductionStage, ...]:
        """Stages of the reduction, in order."""
        stages = [ReductionStage.IN_SHARD_GROUP]
        if self.has_replicas and not self.keeps_partial:
            stages.append(ReductionStage.ACROSS_REPLICAS)
        if self.buffers.on_host and not (self.keeps_partial or self.adds):
            stages.append(ReductionStage.TO_HOST)
        return tuple(stages)

    @property
    def keeps_partial(self) -> bool:
        """True if the result is added to the partial sums, for a later micro-batch."""
        return self.has_replicas and self.over is ReduceOver.SHARD_GROUP

    @property
    def adds(self) -> bool:
        """True if the result is added to gradients in the gradient shard.

        Compute may add to the shard at any time (gradients of parameters used outside of their
        unit). Additions of a reduction run on compute's stream, too: on the reduce stream they
        would race.
        """
        return any(self.adds_to) and not self.keeps_partial

    @property
    def packs_into_shard(self) -> bool:
        """True if gradients are packed into the gradient shard; False: into the gradient buffer."""
        return self.buffers.packs_into_shard and not (self.keeps_partial or self.adds)

    @property
    def output_in_buffer(self) -> bool:
        """True if the output of the reduce-scatter stays in this rank's shard of the buffer.

        It is added to the shard, changes dtype or device, or is divided among replicas. False: the
        output is the gradient shard.
        """
        accumulates = self.keeps_partial or self.adds
        return accumulates or self.divides_output or not self.buffers.averages_in_shard

    @property
    def divides_output(self) -> bool:
        """True if replicas divide the average: a rank has a slice of it after a reduce-scatter."""
        return self.topology.split_replicas

    @property
    def scale(self) -> float | None:
        """Factor of gradients while they are packed, so that a sum over replicas is their average.

        A shard group of one rank reduces the packed gradients across replicas directly, so the
        division of the average can be fused with packing. None: no factor; replicas average.
        """
        is_fused = (
            self.packs_into_shard
            and ReductionStage.ACROSS_REPLICAS in self.stages
            and not (self.averages or self.adds_partial)
            # In a narrower dtype the product would be rounded, but a copy is exact.
            and not self.buffers.casts_params
        )
        return 1.0 / self.topology.replicate_size if is_fused else None
