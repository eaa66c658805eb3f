"""Tensors of a sharded parameter: sharded, unsharded, views, and operations on all of them."""

# Imported for what they register: how functions of torch and ATen operations that meet a
# ShardTensor run.
from shardeddp.tensor import autograd as autograd
from shardeddp.tensor import dispatch as dispatch
