"""Stores in memory that count what they are asked, and that can be slow, frozen or gone."""

import threading
import time
from datetime import timedelta

import torch.distributed as dist


class MemoryStore(dist.Store):
    """A store of one process.

    Args:
        delay_s: How long each answer takes.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.calls = 0
        self.delay_s = delay_s
        self.runs = threading.Event()
        self.runs.set()
        self.gone = False
        self.asked_by: set[threading.Thread] = set()

    def _take_note(self) -> None:
        self.calls += 1
        time.sleep(self.delay_s)
        self.runs.wait()
        self.asked_by.add(threading.current_thread())
        if self.gone:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: bytes | str) -> None:
        """Set one."""
        self._take_note()
        self.values[key] = _encode(value)

    def get(self, key: str) -> bytes:
        """What is there."""
        self._take_note()
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """What is there."""
        self._take_note()
        return [self.values[key] for key in keys]

    def clone(self) -> "MemoryStore":
        """Itself: nobody can keep it busy."""
        return self

    def add(self, key: str, value: int) -> int:
        """Add to a number."""
        self._take_note()
        self.values[key] = str(int(self.values.get(key, b"0")) + value).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        self._take_note()
        return all(key in self.values for key in keys)

    def compare_set(
        self, key: str, expected_value: bytes | str, desired_value: bytes | str
    ) -> bytes:
        """Set one that is not there."""
        self._take_note()
        return self.values.setdefault(key, _encode(desired_value))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Nothing here waits."""
        raise NotImplementedError


def _encode(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
