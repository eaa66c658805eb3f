"""Python's own documentation as a byte-level corpus: about half a megabyte of English prose, no download."""

from __future__ import annotations

from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCAB_SIZE = 256
WINDOWS_PER_BLOCK = (
    8  # training windows overlap: each begins an eighth of a block after the one before it
)


def encode(text: str) -> Tensor:
    """The UTF-8 bytes of a text as token ids, shape (number of bytes,), int64."""
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """The text whose bytes are `tokens`, shape (T,); bytes that are not UTF-8 become the replacement character."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def corpus() -> str:
    """Every topic of `help()`, in order, without those that are only a section of another one.

    Roughly a quarter of the topics repeat text of a longer one. They are left out so that the validation text, which
    is the end of the corpus, was not read in training.
    """
    texts = [text.strip() for text in topics.values()]
    bodies = [
        text.split("\n", 2)[-1].strip() for text in texts
    ]  # without the title and its underline
    kept = [
        text
        for index, (text, body) in enumerate(zip(texts, bodies, strict=True))
        if not any(
            body in other
            for at, other in enumerate(texts)
            if at != index and len(other) > len(text)
        )
    ]
    return "\n\n\n".join(kept)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Fixed-length windows into one long text; the targets are the inputs one token later.

    Args:
        tokens: The text, shape (N,).
        block_size: Length of a window T.
        stride: Distance between the beginnings of two windows.

    Raises:
        ValueError: If the text is shorter than one window and its last target.
    """

    def __init__(self, tokens: Tensor, block_size: int, stride: int) -> None:
        if len(tokens) <= block_size:
            raise ValueError(
                f"Expected a text longer than block_size={block_size} tokens, found {len(tokens)}: "
                f"choose a smaller block_size."
            )
        self.tokens = tokens
        self.block_size = block_size
        self.stride = stride

    def __len__(self) -> int:
        """Number of windows that fit."""
        return (len(self.tokens) - self.block_size - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one window, each of shape (T,)."""
        begin = index * self.stride
        window = self.tokens[begin : begin + self.block_size + 1]
        return window[:-1], window[1:]


class PydocText(L.LightningDataModule):
    """Byte-level windows of the `help()` topics that every CPython ships (`pydoc_data.topics`).

    Args:
        block_size: Bytes per sample.
        batch_size: Samples per process and step.
        validation_fraction: Share of the text, taken from its end, that is never trained on.
    """

    def __init__(
        self, block_size: int = 128, batch_size: int = 8, validation_fraction: float = 0.1
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction

    def setup(self, stage: str) -> None:
        """Read the text and cut it in two."""
        tokens = encode(corpus())
        cut = round(len(tokens) * (1 - self.validation_fraction))
        overlapping = max(1, self.block_size // WINDOWS_PER_BLOCK)
        self.train_windows = Windows(tokens[:cut], self.block_size, stride=overlapping)
        self.validation_windows = Windows(tokens[cut:], self.block_size, stride=self.block_size)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Windows in random order; Lightning gives every rank its own share."""
        return DataLoader(self.train_windows, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Windows side by side, in order."""
        return DataLoader(self.validation_windows, self.batch_size)
