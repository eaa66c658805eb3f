"""Lets ``generate()`` of transformers keep ranks in step, where a rank that has ended could take no part in gathers."""

from torch import nn
from torch._guards import TracingContext

from shardeddp.plan.placement import Placement, Reshard


class Managed:
    """What a module answers when transformers asks whether its ranks have to run equally many forwards.

    Dynamo reads the same attribute, and takes a module that has it for one of FSDP, with other rules for its guards:
    while it traces, the answer is no.
    """

    def __bool__(self) -> bool:
        return TracingContext.try_get() is None


MARK = "_is_fsdp_managed_module"
"""The attribute by which transformers recognizes a sharded model: ``generate()`` then runs with ``synced_gpus``."""


def keep_generation_in_step(module: nn.Module, placement: Placement) -> None:
    """Mark every model in a module that generates by itself, if its units are gathered for each forward.

    Ranks that end their sequences at different lengths would run different numbers of forwards, and the longest would
    wait for the others in a gather.

    Args:
        module: The root; models of transformers in it are known by name, so that nothing needs to be installed.
        placement: Whether units are gathered for each forward.
    """
    if placement.reshard is Reshard.NEVER:
        return
    for child in module.modules():
        if any(base.__name__ == "GenerationMixin" for base in type(child).__mro__):
            setattr(child, MARK, Managed())
