"""Traffic: counts what this rank communicates, by kind of collective."""

from collections import Counter


class Traffic:
    """Bytes and calls that this rank has issued since the last reset.

    Bytes are those that the rank has to send when the collective is done as well as a ring does it, whatever the
    backend does: ``(n - 1) / n`` of the whole buffer for an all-gather, a reduce-scatter or a broadcast among ``n``
    ranks, twice that for an all-reduce. A group of one rank counts nothing.
    """

    def __init__(self) -> None:
        self.nbytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def add(self, kind: str, nbytes: int) -> None:
        """Count one collective."""
        self.nbytes[kind] += nbytes
        self.calls[kind] += 1

    def reset(self) -> None:
        """Start again from zero."""
        self.nbytes.clear()
        self.calls.clear()

    @property
    def total_nbytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes.values())
