"""Where flat buffers get their memory from, and views of a parameter's part of them."""

import torch

from shardeddp.plan.layout import FlatLayout


def empty_on_host(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host memory for the elements of a tensor; pinned if it is a CUDA device that copies from it."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=device.type == "cuda")


def allocate(flat: torch.Tensor) -> None:
    """Give a flat buffer memory, of undefined content; nothing happens to one that has it."""
    storage = flat.untyped_storage()
    if storage.nbytes() != flat.nbytes:  # resizing to the same size would copy all of it
        storage.resize_(flat.nbytes)


def release(flat: torch.Tensor) -> None:
    """Take a flat buffer's memory away; views of it must not be touched until it has some again."""
    flat.untyped_storage().resize_(0)


def local_view(shard: torch.Tensor, layout: FlatLayout, index: int, slice_rank: int) -> torch.Tensor:
    """A rank's elements of one parameter in its slice of a flat buffer; 1D."""
    interval = layout.local_interval(layout.slots[index], slice_rank)
    return shard[interval.start : interval.stop]
