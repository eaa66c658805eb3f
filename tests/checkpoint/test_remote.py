"""Remote paths: what is kept of objects that were read."""

import pytest

from shardeddp.checkpoint.remote import WINDOW_NBYTES, RemotePath

pytestmark = pytest.mark.timeout(60)


class Counted(bytes):
    """Bytes that know how many of them are alive."""

    alive = 0

    def __init__(self, *_: object) -> None:
        Counted.alive += len(self)

    def __del__(self) -> None:
        Counted.alive -= len(self)


def test_windows_of_many_objects_that_are_just_above_one_window_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RemotePath, "nbytes", lambda path: WINDOW_NBYTES + 1)
    monkeypatch.setattr(RemotePath, "get", lambda path, start, stop: Counted(stop - start))
    folder = RemotePath("memory://run").reading_ahead()
    buffer = memoryview(bytearray(2**20))
    most = 0
    for number in range(12):
        with folder.open_source(f"{number}") as (file, _):
            for start in range(0, WINDOW_NBYTES + 1, len(buffer)):
                assert file.read_into(buffer, start)
        most = max(most, Counted.alive)
    assert 2 * WINDOW_NBYTES < most < 4 * WINDOW_NBYTES
