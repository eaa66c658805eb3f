"""What needs a CUDA device is skipped without one, and has a world of one rank there."""

from collections.abc import Iterator

import pytest
import torch

from support.devices import DEVICE, alone


@pytest.fixture(autouse=True, scope="session")
def device() -> Iterator[None]:
    """Skips everything here where there is none."""
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with pytest.MonkeyPatch.context() as patch:
        # KiB; by default the library that multiplies matrices takes up to 32 MiB for each product, as large as a unit.
        patch.setenv("CUBLASLT_WORKSPACE_SIZE", "1024")
        if DEVICE.type == "cuda":
            torch.cuda.set_device(DEVICE)
        yield


@pytest.fixture(scope="module")
def one_rank(device: None) -> Iterator[None]:
    """A process group of this process alone, over NCCL."""
    with alone():
        yield
