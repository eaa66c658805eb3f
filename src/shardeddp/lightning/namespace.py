"""Which of Lightning's two packages this process uses; decided once, before Lightning is imported.

``lightning.pytorch`` and ``pytorch_lightning`` hold the same code twice. A Trainer of one refuses
strategies and modules of the other, so the classes of this package are made for one of them.
"""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from shardeddp.errors import ConfigurationError

VARIABLE = "SHARDEDDP_LIGHTNING"
"""Environment variable that decides where imports do not."""

UNIFIED = "lightning.pytorch"
STANDALONE = "pytorch_lightning"

_BY_VALUE = {"lightning": UNIFIED, UNIFIED: UNIFIED, STANDALONE: STANDALONE}


def choose_namespace(environment: Mapping[str, str], imported: Mapping[str, Any]) -> str:
    """The namespace to use: the one that is asked for, else the one that the program has imported.

    A program that has imported both, or none yet, gets ``lightning.pytorch`` where it is installed.

    Args:
        environment: Variables of the process.
        imported: Modules by name, as ``sys.modules`` has them.

    Raises:
        ConfigurationError: The variable asks for something else.
        ImportError: Neither package is installed.
    """
    asked = environment.get(VARIABLE)
    if asked:
        if asked not in _BY_VALUE:
            raise ConfigurationError(
                f"{VARIABLE}={asked!r}: expected {UNIFIED} or {STANDALONE}, or no such variable"
            )
        return _BY_VALUE[asked]
    present = [
        namespace for namespace in (UNIFIED, STANDALONE) if imported.get(namespace) is not None
    ]
    if len(present) == 1:
        return present[0]
    for namespace in (UNIFIED, STANDALONE):
        if _is_installed(namespace.partition(".")[0]):
            return namespace
    raise ImportError(
        "shardeddp needs PyTorch Lightning: pip install lightning (or pytorch-lightning)"
    )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # somebody forbids it
        return False


NAMESPACE = choose_namespace(os.environ, sys.modules)
"""Of this process; it never changes."""

OTHER = STANDALONE if NAMESPACE == UNIFIED else UNIFIED
"""Namespace whose Trainer refuses strategies of this one."""


@contextmanager
def handed_down() -> Generator[None]:
    """Surround the start of processes that use the same namespace, whatever they import first."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = NAMESPACE
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
