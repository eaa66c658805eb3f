"""A file is flushed as it grows, in a thread, and what goes wrong there is not lost."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from shardeddp.checkpoint.disk.durable import Durability
from shardeddp.checkpoint.disk.early_sync import EarlySync


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


@pytest.mark.parametrize(("durability", "flushes"), [("disk", 3), ("process", 0)])
def test_it_flushes_as_often_as_so_much_was_written(descriptor: int, durability: Durability, flushes: int) -> None:
    with mock.patch("os.fsync") as fsync, EarlySync(descriptor, durability, every=100) as sync:
        for nbytes in (99, 1, 250, 30, 70):
            sync.wrote(nbytes)
    assert fsync.call_count == flushes
    assert not any(thread.name == "shardeddp-sync" for thread in threading.enumerate())


def test_an_error_of_a_flush_is_raised_at_the_end(descriptor: int) -> None:
    with (
        mock.patch("os.fsync", side_effect=[OSError(errno.EIO, "lost"), None]),
        pytest.raises(OSError, match="lost"),
        EarlySync(descriptor, "disk", every=1) as sync,
    ):
        sync.wrote(1)
        sync.wrote(1)


def test_the_error_of_the_block_itself_comes_first(descriptor: int) -> None:
    with (
        mock.patch("os.fsync", side_effect=OSError(errno.EIO, "lost")),
        pytest.raises(ValueError, match="first"),
        EarlySync(descriptor, "disk", every=1) as sync,
    ):
        sync.wrote(1)
        raise ValueError("first")
