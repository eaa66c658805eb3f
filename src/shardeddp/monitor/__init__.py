"""What a person sees of a sharded run: the table of units, bytes and times."""
