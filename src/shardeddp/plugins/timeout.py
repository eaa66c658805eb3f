"""How long a rank waits for the others: the argument ``timeout`` in its spellings."""

from datetime import timedelta

from shardeddp.errors import ConfigurationError


def collective_timeout(value: object) -> timedelta:
    """A number of seconds or a duration as a duration.

    Raises:
        ConfigurationError: It is neither, or not positive.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
        return timedelta(seconds=value)
    if isinstance(value, timedelta) and value > timedelta(0):
        return value
    raise ConfigurationError(
        f"timeout={value!r}: expected a positive number of seconds or a datetime.timedelta, for example 600.0"
    )
