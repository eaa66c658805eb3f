"""Checkpoints of other tools, read without running anything in them."""
