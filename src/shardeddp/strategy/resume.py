"""Resume: the part of a checkpoint that lets a run go on exactly - random state, places in the data, kept tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from shardeddp.checkpoint.kept_shards import KEPT, KEY, KeptShards, places_of_shards
from shardeddp.checkpoint.loader_states import gather_loader_states, take_loader_state
from shardeddp.checkpoint.random_state import ResumeRandomness, Stateful, gather_random_states
from shardeddp.lightning_api import (
    FitLoop,
    LightningModule,
    PrefetchDataFetcher,
    ProcessedTracker,
    Trainer,
    TrainerFn,
)
from shardeddp.strategy.process_group import ProcessGroup
from shardeddp.strategy.resumed_streams import ResumedStreams


class Resume:
    """State that Lightning does not save, and the moments at which a resumed run gets it back.

    Args:
        group: Ranks of the run.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._randomness = ResumeRandomness()
        self._streams = ResumedStreams()
        self._kept: KeptShards | None = None  # from reading a checkpoint until the model is sharded

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy or a pickle, which has read no checkpoint yet."""
        return {**vars(self), "_kept": None}

    # -- checkpoints

    def extended(self, checkpoint: dict[str, Any], module: LightningModule | None) -> dict[str, Any]:
        """A checkpoint with all that Lightning does not know of; hooks of the user still hold the one without.

        A collective of all ranks; where there are none yet, the checkpoint as it is.
        """
        mesh = self._group.current
        if mesh is None:
            return checkpoint
        own: dict[str, Any] = {}
        own["random_states"] = gather_random_states(self._randomness.capture(mesh.device), mesh.control)
        checkpoint, loader_states = gather_loader_states(checkpoint, mesh.control)
        if loader_states:  # ranks are in different places of their data
            own["loader_states"] = loader_states
        if module is not None and (places := places_of_shards(checkpoint, module)):
            own[KEPT] = places
        return {**checkpoint, KEY: own}

    def take(self, checkpoint: dict[str, Any], fitting: bool) -> None:
        """Take the own part out of a checkpoint that was read; hooks of the user get the one that they have seen.

        Args:
            checkpoint: Checkpoint of :meth:`extended`, or of another strategy; changed.
            fitting: Whether training goes on from it: random states come into force when it starts.
        """
        self._kept = KeptShards(checkpoint)
        own = checkpoint.pop(KEY, {})
        mesh = self._group.current
        if mesh is None or not fitting:
            return
        rank, size = mesh.rank, mesh.topology.world_size
        self._randomness.hold(own.get("random_states"), rank, size)
        if self._randomness.holds:
            self._streams.load(checkpoint)
        if "loader_states" in own:
            take_loader_state(checkpoint, own["loader_states"], rank, size)

    def take_kept(self, module: LightningModule) -> Callable[[], None] | None:
        """Action that shards what callbacks have loaded as the module is sharded; None: nothing was read."""
        kept, self._kept = self._kept, None
        return None if kept is None else partial(kept.shard, module)

    # -- a run that trains

    def prepare_loader(self, loader: object, trainer: Trainer) -> object:
        """The loader to use in the place of one of the user's."""
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return loader
        loop = trainer.fit_loop
        epoch, batches = cast(ProcessedTracker, loop.epoch_progress.current), loop.epoch_loop.batch_progress
        if self._randomness.holds and batches.is_last_batch and epoch.ready == epoch.started == epoch.processed:
            # Between epochs. A Trainer that counts steps would train on one more batch of the epoch that is over.
            for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
                each._restarting = False  # the property of a loop that counts steps is always true

        def in_hand() -> bool:
            fetcher = loop._data_fetcher
            return isinstance(fetcher, PrefetchDataFetcher) and bool(fetcher.batches)

        mid_epoch = loop.restarting and not batches.is_last_batch
        loader, device = self._streams.hold_back(loader), self._group.mesh.device
        return self._randomness.watch(loader, device, mid_epoch=mid_epoch, in_hand=in_hand)

    def ask_loaders_again(self, loop: FitLoop) -> None:
        """Drop training loaders that were asked for before Lightning knew where a run goes on.

        Those that know where they are would not be told any more, and the progress of an epoch that is over would go
        on. In the middle of an epoch others start where they start, as under every strategy.
        """
        loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
        if self._streams.wait or any(isinstance(each, Stateful) for each in loaders):
            loop._combined_loader = None

    def begin_streams(self, trainer: Trainer) -> None:
        """Give the loop its loaders as the user knows them, before the user's hooks of the start of training."""
        loaders = trainer.fit_loop._combined_loader
        if self._streams.wait and loaders is not None:
            loaders.flattened = self._streams.begin(loaders.flattened)

    def begin_training(self, loop: FitLoop) -> None:
        """Restore random states, last before the first batch."""
        if not self._randomness.holds:
            return
        if not loop.restarting and loop.is_resuming:
            # Between epochs. Lightning would train on with the iterator that was made in setting up, while the
            # uninterrupted run makes one when the epoch has started, after all hooks.
            loop._resuming_from_checkpoint = False
        self._randomness.begin(self._group.mesh.device)

    def begin_batch(self) -> None:
        """Give loaders their own generators back, as their first batch is there."""
        self._randomness.began()

    def end_run(self) -> None:
        """Let go of a run's loaders."""
        self._randomness.forget()
        self._streams.wait = False
