"""Resumed streams: iterable data of a run that goes on between epochs, which must not be started twice.

Lightning asks for an iterator when it sets up, and takes the first batch, once more where
``trainer.estimated_stepping_batches`` wanted to know the length before, and, so that random numbers go on exactly, when
the epoch has started, behind all hooks. For a stream each time costs data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from shardeddp.checkpoint.random_state import Stateful, has_length
from shardeddp.lightning_api import has_iterable_dataset


class NotStarted:
    """A loader while a run is set up: its first batch is nothing, and is thrown away; else the loader itself.

    Args:
        loader: In whose place it is.
    """

    def __init__(self, loader: Any) -> None:
        vars(self).update(loader=loader)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the loader's."""
        return getattr(vars(self)["loader"], name)

    def __setattr__(self, name: str, value: object) -> None:
        """Everything is the loader's, as where Lightning sets a function that seeds workers."""
        setattr(vars(self)["loader"], name, value)

    def __iter__(self) -> Iterator[None]:
        """Yield what is asked for ahead."""
        return iter([None])


class SizedNotStarted(NotStarted):
    """The same with a length."""

    def __len__(self) -> int:
        """That of the loader."""
        return len(vars(self)["loader"])


class ResumedStreams:
    """Holds back the iterable data of one run until it trains."""

    def __init__(self) -> None:
        self.wait = False
        """Whether a run resumes between epochs and does not train yet."""

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """A run is about to resume from a checkpoint, and will ask for iterators anew when its epoch has started."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        epoch = loop.get("epoch_progress", {}).get("current", {})
        ended = loop.get("epoch_loop.batch_progress", {}).get("is_last_batch", False)
        self.wait = bool(ended) and epoch["ready"] == epoch["started"] == epoch["processed"]

    def hold_back(self, loader: object) -> object:
        """The loader to use instead of one of the training's while the run is set up.

        One that knows where it is loses nothing.
        """
        streams = has_iterable_dataset(loader) or not isinstance(loader, DataLoader)
        if not self.wait or not streams or isinstance(loader, Stateful):
            return loader
        return SizedNotStarted(loader) if has_length(loader) else NotStarted(loader)

    def begin(self, loaders: Sequence[object]) -> list[object]:
        """Training loaders as users know them; training begins."""
        self.wait = False
        return [vars(each)["loader"] if isinstance(each, NotStarted) else each for each in loaders]
