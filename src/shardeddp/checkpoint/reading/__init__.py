"""From the disk to tensors, and into a model."""
