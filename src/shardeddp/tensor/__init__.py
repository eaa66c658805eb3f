"""Tensors of a sharded parameter: sharded, unsharded, views, and operations on all of them."""

from shardeddp.tensor import autograd, dispatch
from shardeddp.tensor.shard_tensor import handlers

handlers.function, handlers.operation = autograd.run_function, dispatch.run
