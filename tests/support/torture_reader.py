"""Opens checkpoints of this package in full, in a process whose time and memory are measured.

Usage: torture_reader.py FOLDER    one line of JSON for each directory in it
"""

import gc
import json
import sys
import time
import warnings
from pathlib import Path

from shardeddp.checkpoint.contents import open_checkpoint
from shardeddp.checkpoint.schema import check_optimizers, check_run
from shardeddp.errors import CheckpointError
from support.hostile_reader import peak, reset_peak
from support.torture_training import whole

CLASSES = {"ModelCheckpoint{}": "ModelCheckpoint", "EarlyStopping{}": "EarlyStopping"}
"""Callbacks of the run that goes on, by the keys of their states."""


def attempt(folder: Path) -> str:
    """What came of it: the text of the documented error, or what must not be."""
    try:
        opened = open_checkpoint(folder, None)
        check_run(opened, CLASSES, folder)
        check_optimizers(opened, folder)
        whole(opened)
    except CheckpointError as error:
        return f"refused: {error}"
    except BaseException as error:  # noqa: BLE001 - any other kind is a finding
        return f"{type(error).__name__}: {error}"
    return "read"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if path.suffix == ".ckpt")
    attempt(folders[0])  # what is loaded once only
    for folder in folders:
        gc.collect()  # what the one before has left is not this one's time
        before, start = reset_peak(), time.process_time()
        outcome = attempt(folder)
        seconds = time.process_time() - start
        print(json.dumps([folder.stem, outcome[:2000], seconds, peak() - before]), flush=True)
