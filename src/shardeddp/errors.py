"""The errors that shardeddp raises on purpose, and what each of them means.

A wrong argument is a ``ValueError`` (or ``TypeError``), a call at the wrong moment a ``RuntimeError``, and a stated
limit a ``NotImplementedError``; the classes below refine those where a caller may want to catch one thing alone.
"""


class ConfigurationError(ValueError):
    """The options or the model cannot be trained as asked; raised before any training, on every rank."""


class RankError(RuntimeError):
    """At least one rank failed in a step that all ranks take together; raised on every rank with every traceback.

    Args:
        step: What the ranks were doing, as a noun phrase ("sharding the model").
        failures: Formatted traceback of every rank that failed, by rank.
    """

    def __init__(self, step: str, failures: dict[int, str]) -> None:
        super().__init__(step, failures)  # what pickle calls the class with
        self.step = step
        self.failures = failures

    def __str__(self) -> str:
        """Which ranks failed and how."""
        ranks = ", ".join(str(rank) for rank in sorted(self.failures))
        traces = "\n".join(f"--- rank {rank} ---\n{self.failures[rank].rstrip()}" for rank in sorted(self.failures))
        return f"{self.step} failed on rank {ranks}; every rank stops here.\n{traces}"


class ReleasedParameterError(RuntimeError):
    """An unsharded parameter was used after its unit was resharded."""


class LayoutMismatchError(ConfigurationError):
    """The ranks built different models or asked for different shardings."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or could not be written; says what was expected and found, and where."""


class DamagedCheckpointError(CheckpointError):
    """Something in a checkpoint is not as it was written."""
