"""What lives in host memory: the argument ``cpu_offload`` in its spellings."""

from collections.abc import Mapping

from shardeddp.config import CPUOffload
from shardeddp.errors import ConfigurationError


def resolve_offload(value: object) -> CPUOffload:
    """The options that a value of ``cpu_offload`` means.

    Raises:
        ConfigurationError: It is neither a bool nor :class:`CPUOffload` nor its fields.
    """
    if isinstance(value, CPUOffload):
        return value
    if value is None or isinstance(value, bool):
        return CPUOffload(params=bool(value), optimizer=bool(value))
    if isinstance(value, Mapping) and set(value) <= {"params", "optimizer"}:
        return CPUOffload(**value)
    raise ConfigurationError(
        f"cpu_offload={value!r}: expected True (everything), False, or CPUOffload(params=..., optimizer=...)"
    )
