"""Replicas: ranks that hold the same elements have to hold the same bits, or nothing is saved."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from shardeddp.checkpoint.format.checksums import block_checksums
from shardeddp.checkpoint.writing.snapshot import Share
from shardeddp.comm import Mesh, gather_results
from shardeddp.errors import CheckpointError

BoxKey: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name of a tensor, offsets and sizes of a box of it."""

Sums: TypeAlias = Mapping[BoxKey, tuple[str, ...]]


def compare_replicas(written: Sequence[Sums], copies: Sequence[Sums]) -> None:
    """Hold what replicas have against what is written.

    Args:
        written: By rank, the checksums of the boxes that it writes.
        copies: By rank, the checksums of the boxes that it has and another rank writes.

    Raises:
        CheckpointError: Two of them differ: names the tensor and the ranks.
    """
    writers = {key: (rank, sums) for rank, each in enumerate(written) for key, sums in each.items()}
    for rank, each in enumerate(copies):
        for key, checksums in each.items():
            writer, expected = writers[key]
            if checksums != expected:
                name, offsets, sizes = key
                raise CheckpointError(
                    f"replicas differ: {name}, elements from {offsets} of sizes {sizes}, is not the same on rank "
                    f"{rank} as on rank {writer}. They have to be equal to the last bit: one of these ranks has "
                    f"computed or kept something wrong. Nothing was saved: go on from the last checkpoint, on other "
                    f"machines"
                )


def compare_shares(shares: Sequence[Share], mesh: Mesh) -> None:
    """The same of the shares that ranks have of a checkpoint; a collective of all ranks.

    Args:
        shares: This rank's, of sharded tensors.
        mesh: All ranks.

    Raises:
        CheckpointError: Two replicas differ.
    """
    if mesh.topology.num_slices == mesh.topology.world_size:
        return  # no two ranks hold the same elements

    def sums() -> bytes:
        found = [(*_key(share), share.written, block_checksums(plain_elements(share.elements))) for share in shares]
        return json.dumps(found).encode()

    by_rank = [json.loads(text) for text in gather_results("comparing replicas", sums, mesh.saving)]
    compare_replicas(*([_of_kind(each, written) for each in by_rank] for written in (True, False)))


def plain_elements(elements: torch.Tensor) -> torch.Tensor:
    """In host memory as they are, without a conjugation that is still to come."""
    return elements.as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()


def _key(share: Share) -> BoxKey:
    return share.name, share.box.offsets, share.box.sizes


def _of_kind(entries: Sequence[Sequence[Any]], kind: bool) -> dict[BoxKey, tuple[str, ...]]:
    return {
        (name, tuple(offsets), tuple(sizes)): tuple(sums)
        for name, offsets, sizes, written, sums in entries
        if written is kind
    }
