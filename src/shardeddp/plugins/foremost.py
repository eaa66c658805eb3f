"""Foremost: a callback that comes before those of the user, for what has to be done before they are called."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from shardeddp.lightning_api import Callback, LightningModule, Trainer


class Foremost(Callback):
    """The first callback of a run.

    Args:
        on_train_start: Called when training starts.
        on_exception: Called with what a run ends with.
    """

    def __init__(self, on_train_start: Callable[[], None], on_exception: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_train_start, self._on_exception = on_train_start, on_exception

    def __reduce__(self) -> Any:
        """In the copy of a Trainer it does nothing: it belongs to a run."""
        return Callback, ()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass it on."""
        self._on_train_start()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Pass it on."""
        self._on_exception(exception)
