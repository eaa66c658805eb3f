"""Planner: memory and time of a training step before it runs, from the module and the engine's layouts."""
