"""The timeout is taken as seconds or as a duration, and reaches the process groups."""

from datetime import timedelta

import pytest

from shardeddp import ConfigurationError
from shardeddp.config import resolve_timeout

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (60, timedelta(minutes=1)),
        (0.5, timedelta(seconds=0.5)),
        (timedelta(hours=1), timedelta(hours=1)),
    ],
)
def test_seconds_and_durations_are_taken(value: object, expected: timedelta) -> None:
    assert resolve_timeout(value) == expected


@pytest.mark.parametrize(
    "value", [0, -1, True, None, "60", float("inf"), float("nan"), timedelta(0)]
)
def test_anything_else_is_refused_with_what_to_write(value: object) -> None:
    with pytest.raises(
        ConfigurationError, match=r"expected a positive number of seconds or a datetime.timedelta"
    ):
        resolve_timeout(value)
