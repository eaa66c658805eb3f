"""Checkpoints: format, files, saving, loading, verification, export and import."""
