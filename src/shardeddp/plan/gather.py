"""Plan of the gathers of one group's parameters: whether one is due, and its stages."""

from dataclasses import dataclass
from enum import Enum

from shardeddp.plan.buffers import BufferPlan
from shardeddp.plan.sharding_strategy import Reshard


class GatherStage(Enum):
    """Stage of a gather: a transfer, after which the next one begins."""

    FROM_HOST = "from_host"
    """Copy of a main shard in host memory to the device, on the copy-in stream."""

    AMONG_REPLICAS = "among_replicas"
    """All-gather of the main shards of replicas that split a shard, cast, on the gather stream."""

    IN_SHARD_GROUP = "in_shard_group"
    """All-gather of the main shards, cast, on the gather stream; of shards in the compute dtype, if
    replicas split the main shards."""

    IN_REGATHER_GROUP = "in_regather_group"
    """All-gather of the parts that ranks have kept of the forward's gather, on the gather stream."""


@dataclass(frozen=True, kw_only=True)
class GatherPlan:
    """Facts about the gathers of one group, and the decisions that follow from them.

    Replicas that split a shard exchange their slices once after each optimizer step:

    >>> from shardeddp.plan.layout import FlatLayout
    >>> buffers = BufferPlan(layout=FlatLayout.build(["weight"], [(4, 2)], itemsize=4, num_slices=4))
    >>> plan = GatherPlan(buffers=buffers, reshard=Reshard.AFTER_FORWARD, shard_size=2)
    >>> [stage.value for stage in plan.stages(main_has_changed=True, has_kept_part=False)]
    ['among_replicas', 'in_shard_group']
    >>> [stage.value for stage in plan.stages(main_has_changed=False, has_kept_part=False)]
    ['in_shard_group']
    """

    buffers: BufferPlan
    reshard: Reshard
    shard_size: int
    regather_size: int | None = None
    """Number of ranks in the backward's all-gather; None: the shard group.

    ZeRO++'s hpZ, https://arxiv.org/abs/2306.10209.
    """

    def __post_init__(self) -> None:
        if self.buffers.layout.num_slices % self.shard_size:
            raise ValueError(
                f"expected a shard_size that divides the {self.buffers.layout.num_slices} slices, "
                f"found {self.shard_size}"
            )
        if self.regather_size is not None and not self.reshard.in_turn:
            raise ValueError(
                f"expected no regather_size under {self.reshard}: nothing is regathered"
            )

    @property
    def splits_replicas(self) -> bool:
        """True if replicas split the shard, and each keeps its part in the compute dtype."""
        return self.buffers.layout.num_slices > self.shard_size

    @property
    def kept_numel(self) -> int:
        """Number of gathered elements that a rank keeps, for the backward's gather; 0: none."""
        if self.regather_size is None or self.regather_size >= self.shard_size:
            return 0
        due = self.is_due(main_has_changed=False)
        return self.buffers.layout.padded_numel // self.regather_size if due else 0

    @property
    def is_retained(self) -> bool:
        """True if the gathered buffer keeps its memory and its values between steps."""
        return self.buffers.resident or self.reshard is Reshard.NEVER

    def is_due(self, *, main_has_changed: bool) -> bool:
        """Return whether unsharding has to fill the buffer, as it does not hold the values already.

        A gather group of one rank has nothing to send, and only casts.

        Args:
            main_has_changed: True if the main shard has changed since the last gather. Without
                effect unless the buffer is retained.
        """
        if self.buffers.resident or self.buffers.borrows:
            return False
        return main_has_changed or not self.is_retained

    def stages(self, *, main_has_changed: bool, has_kept_part: bool) -> tuple[GatherStage, ...]:
        """Return the stages of a gather, in order; none if the buffer has the values already."""
        if not self.is_due(main_has_changed=main_has_changed):
            return ()
        if has_kept_part and not main_has_changed:
            return (GatherStage.IN_REGATHER_GROUP,)
        stages: list[GatherStage] = []
        if self.buffers.on_host and (main_has_changed or not self.splits_replicas):
            stages.append(GatherStage.FROM_HOST)
        if self.splits_replicas and main_has_changed:
            stages.append(GatherStage.AMONG_REPLICAS)
        return (*stages, GatherStage.IN_SHARD_GROUP)
