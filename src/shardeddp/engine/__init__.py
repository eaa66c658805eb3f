"""Engine: shards a model, and keeps its units, their memory and their gradients in step with the ranks."""
