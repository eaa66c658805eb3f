"""Planner: memory and time of a training step before it runs."""
