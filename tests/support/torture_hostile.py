"""Hostile checkpoints in this package's own format: all checksums fit, and what they cover was written to do harm."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardeddp.checkpoint.manifest import (
    DIGEST_NBYTES,
    EXTENT,
    MANIFEST,
    PIECE,
    PLACEMENT,
    STATE,
)
from support.hostile import Bait, archive_of
from support.tables import Files, edit_manifest, edit_placement, edit_table, seal_bytes
from support.torture_mutations import edit_state, put_file, write_files

DATA = "__0_0.distcp"

Spoil = Callable[[Files, Path, Path], None]
"""Makes the files of an honest checkpoint hostile; gets the directory for what is no ordinary file, and the marker."""


def build(original: Files, folder: Path, marker: Path, name: str) -> None:
    """Write one case of the corpus."""
    files = dict(original)
    folder.mkdir()
    {**CASES, **HARMLESS}[name](files, folder, marker)
    write_files(folder, files)


def _manifest(change: Callable[[Any], object]) -> Spoil:
    return lambda files, folder, marker: edit_manifest(files, change)


def _state(change: Callable[[Any], object]) -> Spoil:
    return lambda files, folder, marker: edit_state(files, change)


def _raw_state(make: Callable[[Files, Path], bytes]) -> Spoil:
    return lambda files, folder, marker: put_file(files, STATE, make(files, marker))


def _raw_manifest(make: Callable[[bytes], bytes]) -> Spoil:
    def spoil(files: Files, folder: Path, marker: Path) -> None:
        body = files[MANIFEST].partition(b'"manifest":')[2][:-1]
        files[MANIFEST] = seal_bytes(make(body))

    return spoil


def _named(name: str) -> Spoil:
    """The data file under a name that lies elsewhere; all items follow."""

    def change(manifest: Any) -> None:
        files = manifest["files"]
        manifest["files"] = {name if it == DATA else it: entry for it, entry in files.items()}
        for entry in manifest["objects"]:
            entry[1] = name

    return _manifest(change)


def _instead_of(name: str, place: Callable[[Path, Path], object]) -> Spoil:
    """Something that is no ordinary file, in the place of one."""

    def spoil(files: Files, folder: Path, marker: Path) -> None:
        away = folder.with_name(f"{folder.name}-{name.strip('.')}")
        away.write_bytes(files.pop(name))
        place(folder / name, away)

    return spoil


def _table(change: Callable[[Any, list[bytes]], Any]) -> Spoil:
    return lambda files, folder, marker: edit_table(files, DATA, change)


def _row(row: int, **values: int) -> Spoil:
    """A row of the table that claims something else."""

    def change(rows: Any, digests: list[bytes]) -> None:
        for column, value in values.items():
            rows[row][column] = value

    return _table(change)


def _placement(change: Callable[[Any], Any]) -> Spoil:
    return lambda files, folder, marker: edit_placement(files, change)


def _first(manifest: Any) -> Any:
    return manifest["sections"][0]


def _huge_shape(manifest: Any) -> None:
    _first(manifest)[2] = [2**26, 2**20]


def _huge_empty(manifest: Any) -> None:
    """So many elements that no file can hold, and none that has them."""
    _first(manifest)[2:4] = [[2**26, 2**20], 0]


def _huge_file(manifest: Any) -> None:
    manifest["files"][DATA][0] = 2**52


def _twice_named(manifest: Any) -> None:
    manifest["sections"][-1][0] += _first(manifest)[0]


def _next_payload(rows: Any, digests: list[bytes]) -> None:
    """Two tensors have the same bytes, but for the first of them."""
    rows["item"], rows["item_nbytes"] = 0, rows["item"].max() + rows["item_nbytes"][-1]
    rows["payload"][1] = rows["payload"][0] + 4


def _endless_from_little(rows: Any, digests: list[bytes]) -> Any:
    """Pieces without end that are all the same bytes."""
    digests[:] = digests[:1] * 20_000
    rows = np.repeat(rows[:1], 20_000)
    rows["start"] = np.arange(20_000) * 4
    rows["stop"] = rows["start"] + 4
    return rows


def _empty_pieces(rows: Any, digests: list[bytes]) -> Any:
    empty = np.repeat(rows[:1], 60_000)
    empty["stop"] = empty["start"]
    return np.concatenate([empty, rows])


def _section_of_all(rows: Any, digests: list[bytes]) -> None:
    rows["section"] = rows["section"].max()


def _many_digests(rows: Any, digests: list[bytes]) -> None:
    digests += digests[:1] * 200_000


def _hollow(counts: tuple[int, int]) -> Spoil:
    """A data file whose table is a hole of a terabyte, which takes no room on the disk."""

    def spoil(files: Files, folder: Path, marker: Path) -> None:
        nbytes = counts[0] * PIECE.itemsize + counts[1] * DIGEST_NBYTES
        content = files.pop(DATA)
        (folder / DATA).write_bytes(content)
        os.truncate(folder / DATA, len(content) + nbytes)
        entry = [len(content) + nbytes, "0" * 32, *counts, "0" * 32]
        edit_manifest(files, lambda manifest: manifest["files"].update({DATA: entry}))

    return spoil


def _hollow_placement(files: Files, folder: Path, marker: Path) -> None:
    rows = 2**30
    (folder / PLACEMENT).touch()
    os.truncate(folder / PLACEMENT, rows * EXTENT.itemsize)
    (count,) = {len(files.pop(PLACEMENT)) // EXTENT.itemsize}

    def change(manifest: Any) -> None:
        manifest["files"][PLACEMENT][0] = rows * EXTENT.itemsize
        _first(manifest)[3] += rows - count

    edit_manifest(files, change)


def _many_sections(manifest: Any) -> None:
    """All of the placement for each of many tensors."""
    _, dtype, shape, *rest = _first(manifest)
    manifest["sections"] = [
        [[["model", str(number)]], dtype, shape, *rest] for number in range(10_000)
    ]


def _step_in(kind: str) -> Callable[[Any], Any]:
    def change(rows: Any) -> Any:
        match kind:
            case "file":
                rows["file"][0] = 2**32 - 1
            case "other file":
                rows["file"] = 1 - rows["file"]
            case "gap":
                rows["start"] += 1
            case "beyond":
                rows["start"][rows["start"] > 0] = 2**63
            case "backwards":
                rows["start"] = rows["start"][::-1].copy()
        return rows

    return change


def _other_algorithm(manifest: Any) -> None:
    manifest["algorithm"] = "none"


def _bait(files: Files, marker: Path) -> bytes:
    return pickle.dumps(Bait(marker))


def _baited(name: str) -> Spoil:
    """A pickle that runs code in a file that other tools unpickle; here it is never read."""
    return lambda files, folder, marker: put_file(files, name, archive_of(_bait(files, marker)))


def _tagged(tag: str, parts: Any) -> Spoil:
    return _state(lambda tree: tree.update(callbacks={"evil": {f"${tag}": parts}}))


CASES: dict[str, Spoil] = {
    "a file above": _named("../secret.distcp"),
    "an absolute file": _named("/etc/hostname"),
    "a file in a folder": _named("data/__0_0.distcp"),
    "a NUL in a name": _named("__0_0.distcp\0"),
    "a name with a newline": _named("__0_0.distcp\n"),
    "a name in other digits": _named("__\u0660_0.distcp"),
    "a linked data file": _instead_of(DATA, lambda place, away: place.symlink_to(away)),
    "a linked state": _instead_of(STATE, lambda place, away: place.symlink_to(away)),
    "a linked manifest": _instead_of(MANIFEST, lambda place, away: place.symlink_to(away)),
    "a pipe for data": _instead_of(DATA, lambda place, away: os.mkfifo(place)),
    "a pipe for the manifest": _instead_of(MANIFEST, lambda place, away: os.mkfifo(place)),
    "a directory for data": _instead_of(DATA, lambda place, away: place.mkdir()),
    "a device for data": _instead_of(DATA, lambda place, away: place.symlink_to(os.devnull)),
    "a tensor of exabytes": _manifest(_huge_shape),
    "a tensor of exabytes without pieces": _manifest(_huge_empty),
    "a file of petabytes": _manifest(_huge_file),
    "one range for all of a large tensor": _table(_endless_from_little),
    "pieces without elements": _table(_empty_pieces),
    "payloads that overlap": _table(_next_payload),
    "pieces that overlap": _row(1, section=0, start=0, stop=1),
    "a piece that ends at 0": _row(0, stop=0),
    "a piece beyond its tensor": _row(0, stop=2**40),
    "a piece of exabytes": _row(0, stop=2**63 + 1),
    "a piece of no section": _row(-1, section=2**32 - 1),
    "pieces of one section": _table(_section_of_all),
    "an item beyond the end": _row(0, item_nbytes=2**61),
    "an item of all numbers": _row(0, item=2**64 - 1, item_nbytes=2),
    "an item in the table": _table(
        lambda rows, digests: rows["item_nbytes"].__setitem__(-1, sum(rows["item_nbytes"]) + 10**6)
    ),
    "a payload before its item": _row(-1, payload=0),
    "a payload behind its item": _row(0, payload=2**40),
    "rows in another order": _table(lambda rows, digests: rows[::-1].copy()),
    "no rows": _table(lambda rows, digests: rows[:0]),
    "no checksums": _table(lambda rows, digests: digests.clear()),
    "a table of holes": _hollow((2**34, 1)),
    "checksums of holes": _hollow((1, 2**36)),
    "a count of pieces that lies": _manifest(
        lambda manifest: manifest["files"][DATA].__setitem__(2, 1)
    ),
    "a count of pieces without end": _manifest(
        lambda manifest: manifest["files"][DATA].__setitem__(2, 2**52)
    ),
    "a placement of holes": _hollow_placement,
    "a placement in no file": _placement(_step_in("file")),
    "a placement in other files": _placement(_step_in("other file")),
    "a placement with a gap": _placement(_step_in("gap")),
    "a placement beyond its tensor": _placement(_step_in("beyond")),
    "a placement backwards": _placement(_step_in("backwards")),
    "the placement for each tensor": _manifest(_many_sections),
    "a name that is no path": _manifest(lambda manifest: _first(manifest)[0].append("model")),
    "parts without end": _manifest(lambda manifest: _first(manifest).__setitem__(3, 2**52)),
    "a step that is text": _state(lambda state: state.update(global_step="7")),
    "a step below 0": _state(lambda state: state.update(global_step=-1)),
    "an epoch that is a list": _state(lambda state: state.update(epoch=[1])),
    "weights that are a list": _state(lambda state: state.update(state_dict=[1])),
    "optimizers by name": _state(lambda state: state.update(optimizer_states={"adam": {}})),
    "groups without parameters": _state(
        lambda state: state["optimizer_states"][0].update(param_groups=[{"lr": 0.1}])
    ),
    "an optimizer that is a number": _state(lambda state: state.update(optimizer_states=[3])),
    "loops that are text": _state(lambda state: state.update(loops="fit")),
    "a loop of numbers": _state(lambda state: state["loops"].update(fit_loop=[1, 2])),
    "progress that is text": _state(
        lambda state: state["loops"]["fit_loop"].update(epoch_progress={"total": {"ready": "1"}})
    ),
    "schedulers that are text": _state(lambda state: state.update(lr_schedulers="all")),
    "a callback's best models that are a list": _state(
        lambda state: state.update(callbacks={"ModelCheckpoint{}": {"best_k_models": [1]}})
    ),
    "patience that is text": _state(
        lambda state: state.update(callbacks={"EarlyStopping{}": {"wait_count": "x"}})
    ),
    "own states that are a list": _state(lambda state: state.update(shardeddp=[1])),
    "kept shards that are numbers": _state(
        lambda state: state["shardeddp"].update(kept_shards=[1])
    ),
    "the checkpoint as a list": _raw_state(lambda files, marker: b"[1,2]"),
    "a tensor named by two arrays": _state(
        lambda state: state.update(
            callbacks={"Own": [{"$array": {"$tensor": "model.head.weight"}}] * 2}
        )
    ),
    "checksums without end": _table(_many_digests),
    "a negative offset": _manifest(lambda manifest: manifest["objects"][0].__setitem__(2, -1)),
    "a fraction for a size": _manifest(lambda manifest: _first(manifest)[2].__setitem__(0, 1.0)),
    "true for a size": _manifest(lambda manifest: _first(manifest)[2].__setitem__(0, True)),
    "an attribute of torch for a dtype": _manifest(
        lambda manifest: _first(manifest).__setitem__(1, "load")
    ),
    "a path through torch for a dtype": _manifest(
        lambda manifest: _first(manifest).__setitem__(1, "serialization.load")
    ),
    "one tensor twice": _manifest(_twice_named),
    "no checksums at all": _manifest(_other_algorithm),
    "a number that is too large": _raw_manifest(
        lambda body: body.replace(b'"step":', b'"step":9' + b"9" * 30 + b',"x":', 1)
    ),
    "digits without end": _raw_manifest(
        lambda body: body.replace(b'"step":', b'"step":' + b"9" * 4_000_000 + b',"x":', 1)
    ),
    "a key twice": _raw_manifest(lambda body: body.replace(b'"step":', b'"step":7,"step":', 1)),
    "lists in lists": _raw_manifest(lambda body: b"[" * 1_000_000 + b"]" * 1_000_000),
    "lists beside lists": _raw_manifest(lambda body: b"[" + b"[]," * 10_000_000 + b"[]]"),
    "not a number": _raw_manifest(lambda body: body.replace(b'"step":', b'"step":NaN,"x":', 1)),
    "no mapping": _raw_manifest(lambda body: b"[1,2]"),
    "more than a manifest": lambda files, folder, marker: files.update(
        {MANIFEST: files[MANIFEST] + b" " * 70_000_000}
    ),
    "a pickle for the manifest": lambda files, folder, marker: files.update(
        {MANIFEST: _bait(files, marker)}
    ),
    "a pickle for the state": _raw_state(_bait),
    "state in a state in a state": _raw_state(
        lambda files, marker: b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    ),
    "state with a key twice": _raw_state(
        lambda files, marker: b'{"global_step":1,' + files[STATE][1:]
    ),
    "state that names a class": _tagged("class", ["os", "system"]),
    "state that calls": _tagged("reduce", ["os.system", ["true"]]),
    "a default factory of its own": _tagged("defaultdict", ["os.system", []]),
    "a dtype that is a function": _tagged("dtype", "load"),
    "an array of exabytes": _tagged("array", ["float64", [2**40, 2**20], ""]),
    "bytes that are none": _tagged("bytes", "@@@"),
    "a tensor that is not there": _tagged("tensor", "model.secret"),
    "a tensor with a path for a name": _tagged("tensor", "../../secret"),
    "an object that only pickle saves": _tagged("opaque", "os.system"),
}
"""Each is refused."""

HARMLESS: dict[str, Spoil] = {
    "a pickle for the metadata of torch": _baited(".metadata"),
    "a pickle for the file of Lightning": _baited("meta.pt"),
}
"""Each loads as if nothing were: what runs code in other tools is not read."""


def callbacks_that_delete(files: Files, folder: Path, victim: str) -> None:
    """Let the state of every ModelCheckpoint list a directory that it is to delete as soon as there is a better one.

    Args:
        files: Of a checkpoint.
        folder: Where the callback keeps checkpoints; else it does not take its state over.
        victim: The directory.
    """

    def change(tree: Any) -> None:
        states = [state for key, state in tree["callbacks"].items() if "ModelCheckpoint" in key]
        assert states, "nothing to spoil"
        for state in states:
            state.update(dirpath=str(folder), best_model_path=victim)
            state.update(
                best_k_models={victim: {"$tensor": "extra.plain.1"}}, kth_best_model_path=victim
            )

    edit_state(files, change)
