"""Plan of the flat buffers of one group: what they have to be, from its layout and its dtypes."""

from dataclasses import dataclass

from shardeddp.plan.layout import FlatLayout


@dataclass(frozen=True, kw_only=True)
class BufferPlan:
    """Decisions about one group's buffers, by which the engine allocates and plans count."""

    layout: FlatLayout
    casts_params: bool = False
    """True if parameters are gathered in another dtype than that of the main shard."""

    casts_gradients: bool = False
    """True if gradients are reduced in another dtype than that of the main shard."""

    on_host: bool = False
    """True if main shard and gradient shard are in host memory while another device computes."""

    borrows: bool = False
    """True if main shard and gathered buffer are those of another group, which lends them."""

    @property
    def resident(self) -> bool:
        """True if the main shard is the whole flat buffer: nothing is ever gathered or released."""
        return self.layout.num_slices == 1 and not (self.casts_params or self.on_host)

    @property
    def averages_in_shard(self) -> bool:
        """True if averages are computed in the gradient shard, neither cast nor moved after."""
        return not (self.casts_gradients or self.on_host)

    @property
    def packs_into_shard(self) -> bool:
        """True if gradients can be packed into the gradient shard, without a gradient buffer."""
        return self.layout.num_slices == 1 and self.averages_in_shard
