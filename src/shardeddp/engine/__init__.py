"""Engine: shards a model; keeps its units, their memory and gradients in step with the ranks."""
