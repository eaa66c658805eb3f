"""Sharded checkpoints of a few bytes, for tests of files and not of tensors: the content tells the step."""

from pathlib import Path

from shardeddp.checkpoint import directory
from shardeddp.checkpoint.durable import Durability, Permissions
from shardeddp.checkpoint.find import WORKING_NAME, read_manifest
from shardeddp.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredFile,
    TrainingRun,
    manifest_to_bytes,
)

DATA = ("__0_0.distcp", "__1_0.distcp", "meta.pt")


def manifest_of(step: int, epoch: int = 0, names: tuple[str, ...] = DATA) -> Manifest:
    run = TrainingRun(
        uuid="0" * 32,
        step=step,
        epoch=epoch,
        world_size=2,
        shard_size=2,
        sharding_strategy="full_shard",
        versions={"torch": "2.11"},
    )
    files = {name: StoredFile(nbytes=len(content(name, step)), checksum="00") for name in names}
    return Manifest(run=run, algorithm="xxh3_128", files=files, tensors={}, objects={})


def content(name: str, step: int) -> bytes:
    return f"{name} of step {step};".encode() * step


def fill(folder: Path, step: int, epoch: int = 0) -> None:
    """Write the files of a checkpoint into a directory that exists, without any ceremony."""
    for name in DATA:
        (folder / name).write_bytes(content(name, step))
    (folder / MANIFEST).write_bytes(manifest_to_bytes(manifest_of(step, epoch)))


def put(path: Path, step: int, epoch: int = 0) -> Path:
    """Make a checkpoint as if it had been there for ever."""
    path.mkdir(parents=True)
    fill(path, step, epoch)
    return path


def save(
    target: Path, step: int, permissions: Permissions = "private", durability: Durability = "disk"
) -> tuple[str, ...]:
    """Save as the strategy does, in one process."""
    staging = directory.stage(target, permissions, durability)
    try:
        for name in DATA:
            staging.put(name, content(name, step))
        return staging.commit(manifest_of(step))
    except Exception:
        staging.discard()
        raise


def step_of(path: Path) -> int:
    """The step of a checkpoint of which every byte is of that step."""
    manifest = read_manifest(path)
    step = manifest.run.step
    for name in manifest.files:
        found = (path / name).read_bytes()
        assert found == content(name, step), f"{path / name} is not of step {step}: {found[:40]!r}"
    return step


def working_entries(folder: Path) -> list[str]:
    """Names of what a crash has left."""
    return sorted(path.name for path in folder.iterdir() if WORKING_NAME.fullmatch(path.name))
