"""What ``torch.autograd.Function.apply`` is given in the place of sharded parameters: full tensors.

``apply`` is the one way into a graph that ``__torch_function__`` does not hear of. The forward of a function would
compute with a shard, its backward return a gradient that nobody averages, and a kernel read memory that is not there.
All calls of ``apply``, also by references that were taken at import, pass their arguments through one private function
of torch; that one is extended here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.utils as functorch_utils

from shardeddp.sharding.gathered import gather
from shardeddp.sharding.shard_tensor import ShardTensor
from shardeddp.sharding.unsharded import ReleasedParameter, sharded_of


def gather_function_arguments() -> None:
    """Let every ``autograd.Function`` see full tensors from now on; calling it again does nothing."""
    unwrap = functorch_utils.unwrap_dead_wrappers
    if unwrap.__module__ == __name__:
        return

    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = unwrap(args)
        if any(isinstance(arg, (ShardTensor, ReleasedParameter)) for arg in args):
            return tuple(map(_full, args))
        return args

    functorch_utils.unwrap_dead_wrappers = unwrap_dead_wrappers


def _full(argument: Any) -> Any:
    if isinstance(argument, ReleasedParameter):
        argument = sharded_of(argument)
    if not isinstance(argument, ShardTensor):
        return argument
    operation = "an autograd.Function of"
    if argument.requires_grad and torch.is_grad_enabled():
        argument.warn_outside()
        return argument.full_for_autograd(operation)
    return gather(argument, operation)
