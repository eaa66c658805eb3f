"""The engine: parameters as shards, units, and the runtime that gathers and reduces them."""
