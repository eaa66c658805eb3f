"""Pure geometry: what lies where, on which rank, in which order. Standard library only."""
