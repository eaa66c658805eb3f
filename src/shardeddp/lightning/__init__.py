"""Lightning: the strategy and its parts."""
