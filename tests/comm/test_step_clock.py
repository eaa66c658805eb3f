"""The step clock: parts sum to the step, the innermost has the time, and nothing waits for a mark to be readable."""

import threading
from typing import Any

import pytest

from shardeddp.comm.step_clock import EVALUATION, HostTimer, Span, StepClock, during


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class LateTimer(HostTimer):
    """Marks that can be read some time later, as those of a device."""

    def __init__(self, time: Time, delay: float) -> None:
        super().__init__(time)
        self._time, self._delay = time, delay

    def is_past(self, mark: Any) -> bool:
        """Whether the delay is over."""
        return self._time.now >= mark + self._delay


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> StepClock:
    return StepClock(HostTimer(time))


def spent(step: list[Span]) -> dict[str, float]:
    """Seconds by part and unit."""
    parts: dict[str, float] = {}
    for part, unit, _, seconds in step:
        key = f"{part} {unit}".strip()
        parts[key] = parts.get(key, 0.0) + seconds
    return {key: seconds for key, seconds in parts.items() if seconds}


def test_the_innermost_part_has_the_time(clock: StepClock, time: Time) -> None:
    time.now += 1
    with clock.during("optimizer"):
        time.now += 2
        with clock.during("compute"):
            time.now += 4
            with clock.during("gather", "blocks.1"):
                time.now += 8
            time.now += 16
        time.now += 32
    clock.end_step()
    [step] = clock.take()
    assert spent(step) == {"rest": 1, "optimizer": 34, "compute": 20, "gather blocks.1": 8}
    assert [span.begin for span in step] == [0, 1, 3, 7, 15, 31, 63]


def test_parts_sum_to_the_step_after_an_exception_in_the_middle(
    clock: StepClock, time: Time
) -> None:
    with pytest.raises(KeyError), clock.during("compute"):
        time.now += 1
        with clock.during("gather", "a"):
            time.now += 2
            raise KeyError
    time.now += 4
    clock.end_step()
    [step] = clock.take()
    assert spent(step) == {"compute": 1, "gather a": 2, "rest": 4}


def test_a_part_goes_on_where_a_step_ends_inside_of_it(clock: StepClock, time: Time) -> None:
    with clock.during("checkpoint"):
        time.now += 1
        clock.end_step()
        time.now += 2
    clock.end_step()
    assert [spent(step) for step in clock.take()] == [{"checkpoint": 1}, {"checkpoint": 2}]


def test_what_happens_in_an_evaluation_is_evaluation(clock: StepClock, time: Time) -> None:
    with clock.during(EVALUATION):
        time.now += 1
        with clock.during("compute"), clock.during("gather", "a"):
            time.now += 2
        time.now += 4
    with clock.during("compute"):
        time.now += 8
    clock.end_step()
    [step] = clock.take()
    assert spent(step) == {EVALUATION: 7, "compute": 8}


class Counted(HostTimer):
    """Counts its marks."""

    def __init__(self) -> None:
        self.count = 0
        super().__init__(self._mark)

    def _mark(self) -> float:
        self.count += 1
        return float(self.count)


def test_an_evaluation_has_two_marks_whatever_happens_in_it() -> None:
    timer = Counted()
    clock = StepClock(timer)
    with clock.during(EVALUATION):
        for _ in range(100):
            with clock.during("compute"), clock.during("gather", "a"):
                pass
            with clock.during(EVALUATION):
                pass
    assert timer.count == 3


def test_a_step_without_an_end_keeps_its_last_marks_and_its_parts() -> None:
    clock = StepClock(Counted())
    for _ in range(300_000):
        with clock.during("compute"):
            pass
    clock.end_step()
    [step] = clock.take()
    assert 50_000 <= len(step) <= 100_000
    assert spent(step)["compute"] == pytest.approx(spent(step)["rest"], abs=2)


def test_a_step_is_read_when_its_last_mark_is_past_and_in_order(time: Time) -> None:
    clock = StepClock(LateTimer(time, delay=5))
    for length in (1, 2, 3):
        with clock.during("compute"):
            time.now += length
        clock.end_step()
    assert time.now == 6
    assert [spent(step) for step in clock.take()] == [{"compute": 1}], "it ended at 1"
    assert clock.take() == []
    time.now = 8
    assert [spent(step) for step in clock.take()] == [{"compute": 2}]
    time.now = 20
    assert [spent(step) for step in clock.take()] == [{"compute": 3}]
    assert clock.take() == []


def test_another_thread_does_not_disturb_the_parts(clock: StepClock, time: Time) -> None:
    def save() -> None:
        with clock.during("checkpoint"):
            time.now += 4

    with clock.during("compute"):
        time.now += 1
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
    clock.end_step()
    assert [spent(step) for step in clock.take()] == [{"compute": 5}]


def test_nothing_is_made_where_nobody_measures() -> None:
    with during(None, "gather", "a") as nothing:
        assert nothing is None
    assert during(None, "gather", "a") is during(None, "compute")
