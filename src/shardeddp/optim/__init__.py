"""Optimizers on shards, and clipping.

Element-wise optimizers step on local elements, others on whole parameters on one rank each.
"""
