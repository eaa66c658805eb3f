"""Ownership: which rank steps which whole parameter, so that all ranks have as much to do."""

import math
from collections.abc import Sequence


class Ownership:
    """Deals parameters out to ranks; the same on every rank, as it looks at nothing but shapes and their order.

    The most costly is dealt first, each to the rank that has least so far (R. L. Graham 1969: at most 4/3 of the best
    possible). Who has been dealt a parameter keeps it.

    Args:
        num_ranks: Among how many.
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"expected at least one rank, found {num_ranks}")
        self.costs = [0] * num_ranks
        """Of what each rank has been dealt."""

    def deal(self, shapes: Sequence[Sequence[int]]) -> list[int]:
        """Deal some more.

        Args:
            shapes: Of the parameters.

        Returns:
            The rank of each, in the order of ``shapes``.
        """
        owners = [0] * len(shapes)
        for index in sorted(range(len(shapes)), key=lambda index: -step_cost(shapes[index])):
            owners[index] = min(range(len(self.costs)), key=self.costs.__getitem__)
            self.costs[owners[index]] += step_cost(shapes[index])
        return owners


def step_cost(shape: Sequence[int]) -> int:
    """What a step on a matrix costs, up to a factor: products of it with itself, along its shorter side.

    A tensor with more dims counts as the matrix that its rows make.

    >>> step_cost((4, 8)), step_cost((8, 4)), step_cost((10,)), step_cost((2, 2, 2))
    (128, 128, 10, 16)
    """
    numel = math.prod(shape)
    if numel == 0 or len(shape) < 2:
        return numel
    return numel * min(shape[0], numel // shape[0])
