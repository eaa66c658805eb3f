"""Translation of other strategies' arguments into those of ShardedDP, with what changes its meaning.

It knows names and plain values alone: a call in a file, an entry of YAML and an object of a running
program are made into the same :class:`~shardeddp.translation.calls.Call`, and nothing of the other
engines is imported.
"""
