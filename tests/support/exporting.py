"""A checkpoint of one process, made by hand: everything that an export has to deal with, in a few kilobytes."""

import json
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardeddp.checkpoint.manifest import TrainingRun
from shardeddp.checkpoint.snapshot import take_snapshot
from shardeddp.checkpoint.write import write_checkpoint
from shardeddp.config import CheckpointOptions
from shardeddp.plan.topology import Topology
from support.host_groups import all_ranks

PARAMETERS = ("net.embed.weight", "net.scale")


@dataclass(frozen=True)
class Alone:
    """One process that needs no process group."""

    rank: int = 0
    topology: Topology = field(default_factory=lambda: Topology(world_size=1, shard_size=1))
    experts: None = None


def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    """Several dtypes and shapes, a tied weight, a buffer."""
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(7, 10, generator=generator)
    return {
        "net.embed.weight": embed,
        "net.scale": torch.randn(5, generator=generator).bfloat16(),
        "net.count": torch.tensor(12345678901),
        "net.mask": torch.arange(9) % 3 == 0,
        "net.none": torch.empty(0, 4),
        "net.head.weight": embed.detach(),  # another object over the same memory, as state_dict() has it
    }


def checkpoint(step: int = 7, **more: Any) -> dict[str, Any]:
    """As Lightning puts it together before it is saved."""
    state = weights(step)
    moments = {
        number: {"step": torch.tensor(7.0), "exp_avg": torch.full_like(state[name], number + 0.5)}
        for number, name in enumerate(PARAMETERS)
    }
    return {
        "epoch": 1,
        "global_step": step,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": state,
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"Best": {"score": torch.tensor(0.5)}},
        "optimizer_states": [
            {
                "state": moments,
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
            }
        ],
        "lr_schedulers": [{"last_epoch": 3}],
        "hyper_parameters": {"width": 10},
        **more,
    }


def put(path: Path, content: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Save a checkpoint as a run of one rank does."""
    content = checkpoint() if content is None else content
    run = TrainingRun(
        uuid=uuid.uuid4().hex,
        step=content["global_step"],
        epoch=content["epoch"],
        world_size=1,
        shard_size=1,
        sharding_strategy="full_shard",
        versions={"torch": "2.13.0"},
    )
    names = [list(PARAMETERS) for _ in content.get("optimizer_states", ())]
    snapshot = take_snapshot(content, names, Alone())
    write_checkpoint(snapshot, path, run, all_ranks(), CheckpointOptions(**options))
    return path


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a file, as its specification says; refuses gaps, overlaps, and bytes behind the last."""
    dtypes = {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "I64": torch.int64,
        "BOOL": torch.bool,
    }
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata, body, end = header.pop("__metadata__"), data[8 + length :], 0
    assert length % 8 == 0
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert start == end
        raw = (
            torch.frombuffer(bytearray(body[start:stop]), dtype=torch.uint8)
            if stop > start
            else torch.empty(0).byte()
        )
        tensors[name] = raw.view(dtypes[entry["dtype"]]).view(entry["shape"])
        end = stop
    assert end == len(body)
    return tensors, metadata


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether two states have the same names, in any order, and tensors of the same bits."""
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape) == (it.dtype, it.shape)
        and torch.equal(found[name], it)
        for name, it in expected.items()
    )
