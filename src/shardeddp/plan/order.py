"""ExecutionOrder: the order in which a pass visits units, recorded once and checked ever after."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OrderChange:
    """A visit that the recorded order did not expect; ``expected`` is None where the recorded pass had ended."""

    expected: int | None
    found: int


class ExecutionOrder:
    """Predicts which units come next in a pass.

    The first pass is recorded: the unit numbers in the order of their visits, repeats included. In later passes each
    visit is matched against the record. A visit that is not the expected one is reported, and the record is taken up
    again at that unit's next occurrence, so one skipped unit costs one late gather and nothing more.
    """

    def __init__(self) -> None:
        self._record: list[int] = []
        self._recording = True
        self._position = 0

    @property
    def record(self) -> tuple[int, ...]:
        """The visits of the recorded pass."""
        return tuple(self._record)

    def begin(self) -> None:
        """Start a pass; what the first pass has recorded stands from here on."""
        if self._record:
            self._recording = False
        self._position = 0

    def visit(self, unit: int) -> OrderChange | None:
        """Note a visit; returns what was wrong with it, if anything."""
        if self._recording:
            self._record.append(unit)
            self._position = len(self._record)
            return None
        expected = self._record[self._position] if self._position < len(self._record) else None
        if expected == unit:
            self._position += 1
            return None
        later = self._find(unit, self._position)
        if later is not None:
            self._position = later + 1
        return OrderChange(expected, unit)

    def upcoming(self, depth: int) -> list[int]:
        """The next ``depth`` different units that the record expects after the last visit."""
        found: list[int] = []
        for unit in self._record[self._position :]:
            if len(found) == depth:
                break
            if unit not in found:
                found.append(unit)
        return found

    def next(self) -> int | None:
        """The unit that a recorded pass expects next; None at its end, and while recording."""
        return None if self._recording or self.at_end() else self._record[self._position]

    def at_end(self) -> bool:
        """Whether a recorded pass ends with the last visit; False while recording."""
        return not self._recording and self._position == len(self._record)

    def _find(self, unit: int, start: int) -> int | None:
        for position in (*range(start, len(self._record)), *range(start)):
            if self._record[position] == unit:
                return position
        return None
