"""Topology: groups of ranks for sharding and replication."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending, 1 and the number included."""
    return [it for it in range(1, number + 1) if number % it == 0]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Mesh of ``replicate_size x shard_size`` ranks; neighbours in ``order`` share a model.

    Six ranks with ``shard_size=2``::

                     shard axis
                     0   1
        replicate 0  r0  r1      shard group of r3: (r2, r3)
        axis      1  r2  r3      replicate group of r3: (r1, r3, r5)
                  2  r4  r5
    """

    world_size: int
    shard_size: int
    split_replicas: bool = False
    """True if replicas split each main shard, gradient shard and its optimizer states.

    False: each replica has all of them. A single replica has nobody to split with: always False.
    """

    tensor_size: int = 1
    """Size of a tensor-parallel group: neighbouring ranks in ``order``.

    Its ranks train on the same batches. Each tensor rank has its own mesh of
    ``replicate_size x shard_size`` ranks; with ``tensor_size=2``, ranks 0, 2, 4, ... have tensor
    rank 0.
    """

    order: tuple[int, ...] | None = None
    """Order of ranks in which members of a shard group are adjacent; None: 0, 1, 2, ...

    Needed if SLURM distributes ranks over nodes cyclically, or gives consecutive numbers to distant
    nodes. Every group lists its ranks ascending, as process groups do.
    """

    nearest: tuple[int, ...] | None = None
    """Order of ranks in which nearby ranks are adjacent; None: 0, 1, 2, ...

    Determines the subgroups of a shard group; members of a shard group stay ascending.
    """

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"expected a world_size of at least 1, found {self.world_size}")
        if self.tensor_size < 1 or self.world_size % self.tensor_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_size} does not divide the {self.world_size} "
                f"ranks of this run"
            )
        if self.shard_size < 1 or self.data_size % self.shard_size:
            raise ValueError(
                f"shard_size={self.shard_size} does not divide the {self.data_size} ranks of this "
                f"run{' that train on different data' if self.tensor_size > 1 else ''}; use one of "
                f"{divisors(self.data_size)}"
            )
        for name, ranks in (("order", self.order), ("nearest", self.nearest)):
            if ranks is not None and sorted(ranks) != [*range(self.world_size)]:
                raise ValueError(
                    f"expected each of {self.world_size} ranks once in {name}, found {ranks}"
                )
        if self.shard_size == self.data_size:
            object.__setattr__(self, "split_replicas", False)
        for group in self.shard_groups() if self.order is not None else ():
            if group != sorted(group):
                raise ValueError(
                    f"the placement of ranks on nodes makes shard groups that are not ascending: expected "
                    f"groups of ascending ranks, found {group}. Let the launcher place ranks node "
                    f"by node (srun --distribution=block)"
                )

    def over_experts(self, size: int) -> "Topology":
        """Return the mesh of expert parameters, with ``size`` expert ranks as its tensor axis.

        Ranks with the same experts shard them in groups of the model's shard size, or of its
        greatest common divisor with their number.

        >>> of_experts = Topology(world_size=8, shard_size=8).over_experts(2)
        >>> of_experts.tensor_groups(), of_experts.shard_groups()
        ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]])

        Raises:
            ValueError: The size does not divide the number of ranks.
        """
        if size < 1 or self.world_size % size:
            raise ValueError(
                f"expert_parallel_size={size} does not divide the {self.world_size} ranks of this "
                f"run"
            )
        same = self.world_size // size
        return replace(self, tensor_size=size, shard_size=gcd(self.shard_size, same))

    @property
    def replicate_size(self) -> int:
        """Number of replicas of the model."""
        return self.data_size // self.shard_size

    @property
    def data_size(self) -> int:
        """Number of ranks that train on different batches."""
        return self.world_size // self.tensor_size

    def data_rank(self, rank: int) -> int:
        """Index of ``rank`` on the data axis; equal for all ranks of a tensor-parallel group."""
        return self._place[rank] // self.tensor_size

    def tensor_rank(self, rank: int) -> int:
        """Rank of ``rank`` in its tensor-parallel group."""
        return self._place[rank] % self.tensor_size

    @cached_property
    def _place(self) -> tuple[int, ...]:
        """Position in the order, by rank."""
        places = dict(zip(self._ranks, range(self.world_size), strict=True))
        return tuple(places[rank] for rank in range(self.world_size))

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self.order if self.order is not None else tuple(range(self.world_size))

    def shard_rank(self, rank: int) -> int:
        """Rank of ``rank`` in its shard group."""
        return self.data_rank(rank) % self.shard_size

    def replicate_rank(self, rank: int) -> int:
        """Rank of ``rank`` in its replicate group.

        It is the index of the replica, unless the order of ranks puts one replica before another in
        some replicate groups only.
        """
        return self._replicate_ranks[rank]

    @cached_property
    def _replicate_ranks(self) -> dict[int, int]:
        return {rank: place for it in self.replicate_groups() for place, rank in enumerate(it)}

    @property
    def num_slices(self) -> int:
        """Number of slices of a flat buffer, one per rank that owns elements."""
        return self.data_size if self.split_replicas else self.shard_size

    def slice_rank(self, rank: int) -> int:
        """Index of the slice that ``rank`` owns; slices of a shard's replicas are adjacent.

        >>> [Topology(world_size=6, shard_size=2).slice_rank(rank) for rank in range(6)]
        [0, 1, 0, 1, 0, 1]
        >>> split = Topology(world_size=6, shard_size=2, split_replicas=True)
        >>> [split.slice_rank(rank) for rank in range(6)]
        [0, 3, 1, 4, 2, 5]
        """
        if not self.split_replicas:
            return self.shard_rank(rank)
        return self.shard_rank(rank) * self.replicate_size + self.replicate_rank(rank)

    def slice_groups(self) -> list[list[int]]:
        """Return the groups of ranks that together have all slices of a flat buffer.

        >>> Topology(world_size=6, shard_size=2).slice_groups()
        [[0, 1], [2, 3], [4, 5]]
        """
        return self.data_groups() if self.split_replicas else self.shard_groups()

    def data_groups(self) -> list[list[int]]:
        """Return the groups of ranks that train on different batches, by tensor rank."""
        return [sorted(ranks) for ranks in self._axes]

    def tensor_groups(self) -> list[list[int]]:
        """Return the tensor-parallel groups, by data rank."""
        return [list(ranks) for ranks in zip(*self._axes, strict=True)]

    def holder_groups(self) -> list[list[int]]:
        """Return the groups of ranks that together hold the whole model.

        A slice group has the parameters of one tensor rank only; a holder group joins them:

        >>> split = Topology(world_size=8, shard_size=2, tensor_size=2)
        >>> split.slice_groups()
        [[0, 2], [4, 6], [1, 3], [5, 7]]
        >>> split.holder_groups()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        slices = self.slice_groups()
        count = len(slices) // self.tensor_size
        return [
            sorted(rank for ranks in slices[first::count] for rank in ranks)
            for first in range(count)
        ]

    def shard_groups(self) -> list[list[int]]:
        """Return the shard groups, by tensor rank and replica."""
        return self._neighbours(self.shard_size)

    def subgroups(self, size: int) -> list[list[int]]:
        """Split every shard group into groups of ``size`` nearby ranks.

        >>> Topology(world_size=4, shard_size=4, nearest=(0, 2, 1, 3)).subgroups(2)
        [[0, 2], [1, 3]]
        """
        if size < 1 or self.shard_size % size:
            raise ValueError(
                f"groups of {size} ranks do not divide the {self.shard_size} ranks of a shard "
                f"group; use one of {divisors(self.shard_size)[1:-1]}"
            )
        if self.nearest is None:
            return self._neighbours(size)
        place = {rank: index for index, rank in enumerate(self.nearest)}
        near = [sorted(group, key=place.__getitem__) for group in self.shard_groups()]
        return [
            sorted(group[first : first + size])
            for group in near
            for first in range(0, self.shard_size, size)
        ]

    def replicate_groups(self) -> list[list[int]]:
        """Return the replicate groups, by tensor rank and shard rank.

        >>> Topology(world_size=6, shard_size=2).replicate_groups()
        [[0, 2, 4], [1, 3, 5]]
        """
        return [
            sorted(ranks[shard :: self.shard_size])
            for ranks in self._axes
            for shard in range(self.shard_size)
        ]

    @property
    def _axes(self) -> list[tuple[int, ...]]:
        """Ranks of each tensor rank, in the order of the data axis."""
        return [self._ranks[place :: self.tensor_size] for place in range(self.tensor_size)]

    def _neighbours(self, size: int) -> list[list[int]]:
        """Return groups of ``size`` ranks that follow each other on the data axis, by tensor rank."""
        return [
            list(ranks[first : first + size])
            for ranks in self._axes
            for first in range(0, self.data_size, size)
        ]
