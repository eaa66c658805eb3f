"""What plugs into Lightning beside the strategy: precision, launchers."""
