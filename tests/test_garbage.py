"""Pauses of the collector of garbage: the first begins one, the last ends it, whichever threads they are of."""

import gc
import os
import threading
from collections.abc import Iterator

import pytest
from torch import nn

from shardeddp.garbage import collector_paused
from shardeddp.wrap import NamePolicy, build_units

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_pauses_may_be_nested_and_fail() -> None:
    with pytest.raises(ValueError, match="inside"), collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_so() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_a_pause_lasts_until_that_of_another_thread_is_over() -> None:
    begun, over = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            begun.set()
            over.wait(10)

    thread = threading.Thread(target=pause)
    with collector_paused():
        thread.start()
        assert begun.wait(10)
    assert not gc.isenabled()
    over.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("collects", [True, False])
def test_a_forked_process_has_no_pauses_of_its_parent(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    with collector_paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() is collects else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0


def test_units_are_built_in_one() -> None:
    seen: list[bool] = []

    class Looks(NamePolicy):
        def select(self, root: nn.Module) -> list[str]:
            seen.append(gc.isenabled())
            return super().select(root)

    build_units(nn.Sequential(nn.Linear(2, 2)), Looks(("0",)))
    assert seen == [False] and gc.isenabled()
