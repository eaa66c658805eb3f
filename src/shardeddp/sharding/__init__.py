"""Sharding."""

from shardeddp.sharding import dispatch as dispatch
from shardeddp.sharding import function_arguments as function_arguments
