"""Checkpoints: format, files, saving, loading, verification, export and import.

Whatever cannot be written or read as it should be is a ``CheckpointError`` that says where. Functions
name it again only where they promise more about it.
"""
