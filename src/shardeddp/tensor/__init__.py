"""Tensors of a sharded parameter: sharded, unsharded, views, and operations on all of them."""

# Imported for their handlers: they run functions of torch and ATen operations that meet a
# ShardTensor.
from shardeddp.tensor import autograd as autograd
from shardeddp.tensor import dispatch as dispatch
