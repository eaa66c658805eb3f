"""What the ranks of ``cluster_training.py`` have said, over all attempts of a job."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

TRAINING = Path(__file__).with_name("cluster_training.py")


class Said:
    """The lines of all ranks in a folder, in order.

    Args:
        out: The folder.
    """

    def __init__(self, out: Path) -> None:
        self.lines: dict[int, list[dict[str, Any]]] = {}
        for path in sorted(out.glob("rank-*.said")):
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            self.lines[int(path.stem.removeprefix("rank-"))] = [
                json.loads(line) for line in whole.splitlines()
            ]

    def of(self, key: str) -> dict[int, list[Any]]:
        """All that was said under a name, by rank."""
        return {
            rank: [line[key] for line in lines if key in line] for rank, lines in self.lines.items()
        }

    def all_at(self, step: int, ranks: int) -> bool:
        """Whether so many ranks have come to a step, in any attempt."""
        return sum(max(steps, default=-1) >= step for steps in self.of("step").values()) >= ranks

    def last_attempt(self) -> list[int]:
        """The steps that rank 0 has taken since it was started last."""
        lines = self.lines.get(0, [])
        begin = max((index for index, line in enumerate(lines) if "started" in line), default=0)
        return [line["step"] for line in lines[begin:] if "step" in line]

    def pids(self) -> dict[int, int]:
        """The processes of the last attempt."""
        return {rank: lines[-1]["pid"] for rank, lines in self.lines.items() if lines}

    def losses(self) -> dict[tuple[int, int], set[float]]:
        """By (step, rank), every loss that it ever had."""
        found: defaultdict[tuple[int, int], set[float]] = defaultdict(set)
        for rank, lines in self.lines.items():
            for line in lines:
                if "step" in line:
                    found[line["step"], rank].add(line["loss"])
        return dict(found)

    def curve(self) -> list[float]:
        """The loss of every step in the last attempt that took it: the mean over the ranks of that attempt."""
        newest: defaultdict[int, dict[int, tuple[int, float]]] = defaultdict(dict)
        for rank, lines in self.lines.items():
            for line in lines:
                if "step" in line:
                    newest[line["step"]][rank] = (line["ranks"], line["loss"])
        return [self._mean(newest[step]) for step in sorted(newest)]

    @staticmethod
    def _mean(found: dict[int, tuple[int, float]]) -> float:
        size = found[0][0]  # rank 0 is in every attempt, and its newest word counts
        own = [loss for rank, (ranks, loss) in found.items() if ranks == size and rank < size]
        if len(own) != size:
            raise ValueError(f"a step has losses of {len(own)} ranks, expected {size}")
        return sum(own) / size

    def digests(self) -> set[str]:
        """Of the final weights."""
        return {digest for digests in self.of("digest").values() for digest in digests}

    def finished(self) -> dict[int, list[int]]:
        """The last steps, by rank."""
        return {rank: steps for rank, steps in self.of("finished").items() if steps}
