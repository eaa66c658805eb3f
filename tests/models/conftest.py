"""The tests of models that people train: only with the extra that brings them, and with a table of what was found."""

from collections.abc import Iterator
from pathlib import Path

import pytest

EXTRA = ("transformers", "peft")
REASON = "needs the extra 'models' (make test-models, or pip install -c constraints.txt -e '.[test,models]')"

COMPARED = pytest.StashKey[dict[tuple[str, str], float]]()


class NeedsModels(pytest.Module):
    """A file of tests that is not even imported without the extra."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:  # type: ignore[override]  # a generator is one, too
        """The tests of the file, or one skip."""
        for name in EXTRA:
            pytest.importorskip(name, reason=REASON)
        self.add_marker("models")
        yield from super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> NeedsModels:
    """Every file in this folder is one of those."""
    return NeedsModels.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def compared(pytestconfig: pytest.Config) -> dict[tuple[str, str], float]:
    """(model, strategy) -> largest relative difference of a loss; shown at the end."""
    return pytestconfig.stash.setdefault(COMPARED, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the table, as docs/models.md has it."""
    found = config.stash.get(COMPARED, {})
    if not found:
        return
    strategies = list(dict.fromkeys(strategy for _, strategy in found))
    terminalreporter.section("largest relative difference of a loss from DDP's")
    terminalreporter.write_line(
        f"| model | {' | '.join(f'`{strategy}`' for strategy in strategies)} |"
    )
    terminalreporter.write_line("|---" * (len(strategies) + 1) + "|")
    for model in dict.fromkeys(model for model, _ in found):
        cells = [found.get((model, strategy)) for strategy in strategies]
        shown = ["" if cell is None else "0" if cell == 0 else f"{cell:.0e}" for cell in cells]
        terminalreporter.write_line(f"| {model} | {' | '.join(shown)} |")
