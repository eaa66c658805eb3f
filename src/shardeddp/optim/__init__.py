"""Optimizers on shards: local elements for element-wise ones, whole parameters on one rank for others, clipping."""
