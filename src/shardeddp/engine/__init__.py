"""Engine: sharding of a model; units, their memory and their gradients on all ranks."""
