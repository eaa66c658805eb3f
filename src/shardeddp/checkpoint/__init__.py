"""From sharded state to what is on disk, and back."""
