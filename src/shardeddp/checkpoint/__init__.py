"""Checkpoints: format, files, saving, loading, verification, export and import.

Failed writes and reads raise a ``CheckpointError`` with the location of the fault. A function's
docstring lists it only to promise more about it.
"""
