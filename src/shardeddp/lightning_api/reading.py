"""How Lightning's ``load_from_checkpoint`` reads what it is given."""

import sys
from collections.abc import Callable
from typing import Any

from shardeddp.lightning_api.choice import STANDALONE, UNIFIED

Reader = Callable[..., Any]
"""``(path, map_location=, weights_only=)`` to the checkpoint."""


def extend_reading(extended: Callable[[Reader], Reader]) -> None:
    """Let ``load_from_checkpoint`` of all modules and data modules of this process read more than files.

    Lightning has no hook there: it opens the path as a file and hands that to ``torch.load``. It reads through one
    name, which is replaced in each of its packages that this process has imported.

    Args:
        extended: Makes the new reader of Lightning's own, for it to go on with.
    """
    for namespace in (UNIFIED, STANDALONE):
        saving = sys.modules.get(f"{namespace}.core.saving")
        if saving is not None and "pl_load" in vars(saving):
            vars(saving)["pl_load"] = extended(vars(saving)["pl_load"])
