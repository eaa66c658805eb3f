"""Lets a Trainer accept a LightningModule that ``torch.compile`` was applied to."""

from __future__ import annotations

from shardeddp.lightning_api import LightningModule, ParallelStrategy, private


class AcceptsCompiled(ParallelStrategy):
    """A strategy to which a compiled LightningModule is one like any other.

    Lightning puts compiled functions in the place of the module's steps, which is all that a strategy needs, and notes
    the original ones in ``_compiler_ctx``. At the beginning of every run it refuses a module with such a note, unless
    the strategy is one of three of its own classes. So the note goes when the module is connected. What is lost is
    Lightning's ``to_uncompiled`` for this module; the note cannot come back between runs, because a run that is given
    no module (``trainer.test()``) checks that of the run before.

    *Rejected:* to register as a virtual subclass of one of the three. Lightning and its users ask for them for other
    reasons too: DDPStrategy would make one process count as distributed, FSDPStrategy changes evaluation and stops
    weight averaging, and whoever sees a SingleDeviceStrategy may leave out communication.
    """

    _connected: LightningModule | None = None

    # The attribute to which the Trainer assigns the module, before it looks for the note.
    @property
    def _lightning_module(self) -> LightningModule | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._connected

    @_lightning_module.setter
    def _lightning_module(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, module: LightningModule | None
    ) -> None:
        self._connected = module
        if module is not None:
            private.forget_compilation(module)
