"""Optimizers on shards, and clipping.

Element-wise ones step on local elements, others on whole parameters on one rank each.
"""
