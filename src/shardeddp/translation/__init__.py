"""Translation of other strategies' arguments into those of ShardedDP, with notes on differences.

It works on names and plain values only: a call in a file, an entry of YAML and an object of a
running program all become a :class:`~shardeddp.translation.calls.Call`. The other engines are never
imported.
"""
