"""Checksums: xxh3 of 128 bits (https://xxhash.com), of the memory of tensors block by block; they find accidents."""

import torch
import xxhash

from shardeddp.checkpoint.format.manifest import BLOCK_NBYTES

ALGORITHM = "xxh3_128"


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Of some bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def memory_of(elements: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host; writing to them changes the tensor."""
    return elements.detach().reshape(-1).view(torch.uint8).numpy().data if elements.numel() else memoryview(b"")


def block_checksums(elements: torch.Tensor) -> tuple[str, ...]:
    """Of every ``BLOCK_NBYTES`` of a contiguous tensor on the host; the last block may be shorter."""
    data = memory_of(elements)
    return tuple(checksum(data[start : start + BLOCK_NBYTES]) for start in range(0, len(data), BLOCK_NBYTES))
