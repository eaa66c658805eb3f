"""Resume: random state, positions in the data and kept tensors, for an exact continuation."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

from shardeddp.checkpoint.kept_shards import KeptShards, places_of_shards
from shardeddp.checkpoint.random_state import (
    LoaderProxy,
    ResumeRandomness,
    gather_random_states,
    has_length,
)
from shardeddp.checkpoint.schema import KEPT, KEY, LOADERS, NAMES, STATES
from shardeddp.checkpoint.snapshot import ParameterNames
from shardeddp.comm.agreement import gather_to_first
from shardeddp.comm.host_group import HostGroup
from shardeddp.errors import CheckpointError
from shardeddp.lightning import private
from shardeddp.lightning.api import LightningModule, Trainer, TrainerFn, has_iterable_dataset
from shardeddp.lightning.planning import Chosen
from shardeddp.lightning.private import FitLoop, PrefetchDataFetcher, ProcessedTracker
from shardeddp.lightning.run_group import RunGroup

# -- Loader states of all ranks
#
# Lightning saves the state of one rank and loads it on all.

_PLACE = "combined_loader"
"""Key of the training loaders' states in the state of Lightning's fit loop."""


def gather_loader_states(checkpoint: dict[str, Any], group: HostGroup) -> list[Any]:
    """Gather the loader states of all ranks on rank 0 if they differ; a collective of all ranks.

    Returns:
        States by rank; empty if all are equal, without stateful loaders, and on other ranks.
    """
    # Pickle is used between ranks of one job only.
    own = _fit_loop(checkpoint).get(_PLACE)
    sent = gather_to_first("saving the states of data loaders", lambda: pickle.dumps(own), group)
    return [pickle.loads(each) for each in sent] if len({*map(bytes, sent)}) > 1 else []


def take_loader_state(
    checkpoint: dict[str, Any], states: object, rank: int, world_size: int
) -> None:
    """Put this rank's loader states into the checkpoint for Lightning.

    Args:
        checkpoint: Loaded checkpoint; changed.
        states: Saved states by rank.
        rank: Global rank.
        world_size: Current number of ranks. If the saved one differs, all ranks continue from rank
            0's state, and rank 0 warns.

    Raises:
        CheckpointError: The saved states are not a list.
    """
    if not isinstance(states, list):
        raise CheckpointError(
            f"the states of data loaders in the checkpoint are damaged: expected a list of them by "
            f"rank, found {type(states).__name__}. Load an older checkpoint, or remove them: del "
            f"checkpoint['shardeddp']"
        )
    by_rank = cast("list[Any]", states)
    if len(by_rank) == world_size:
        _fit_loop(checkpoint)[_PLACE] = by_rank[rank]
    elif rank == 0:
        warnings.warn(
            f"the checkpoint has the places of {len(by_rank)} ranks in their data, each its own, "
            f"and this run has {world_size}: all loaders go on from where that of rank 0 was, so "
            f"that samples may be seen twice or not at all in this epoch. Resume with "
            f"{len(by_rank)} ranks for the same data",
            stacklevel=2,
        )


def _fit_loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the fit loop's state in a checkpoint; empty if only weights are saved."""
    return _mapping_in(checkpoint, "loops", "fit_loop", "state_dict")


def _mapping_in(tree: Any, *keys: str) -> dict[str, Any]:
    """Return the mapping at nested keys; empty if a user hook has removed it."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, dict) else {}


# -- Resume: random state, positions in the data, kept tensors


class Resume:
    """Saving and restoring of state that Lightning does not save."""

    def __init__(self, group: RunGroup) -> None:
        self._group = group
        self._randomness = ResumeRandomness()
        self._streams = _ResumedStreams()
        self._kept: KeptShards | None = None  # set from reading a checkpoint until sharding

    def __getstate__(self) -> dict[str, Any]:
        """Drop kept shards from copies and pickles."""
        return {**vars(self), "_kept": None}

    # -- Checkpoints

    def extended(
        self,
        checkpoint: dict[str, Any],
        module: LightningModule | None,
        names: Callable[[], ParameterNames],
        chosen: Chosen | None,
    ) -> dict[str, Any]:
        """Return a copy of a checkpoint with our own state; user hooks keep the original.

        Collective of all ranks; before the rendezvous it returns the checkpoint unchanged. Rank 0
        gets the random and loader states of all ranks; all other entries are per rank.
        """
        mesh = self._group.current
        if mesh is None:
            return checkpoint
        own: dict[str, Any] = {}
        own[STATES] = gather_random_states(self._randomness.capture(mesh.device), mesh.control)
        loader_states = gather_loader_states(checkpoint, mesh.control)
        if loader_states:  # ranks are at different positions in their data
            own[LOADERS] = loader_states
        if module is not None and (places := places_of_shards(checkpoint, module)):
            own[KEPT] = places
        if checkpoint.get("optimizer_states"):
            own[NAMES] = names()
        if chosen is not None:
            own["chosen"] = dict(vars(chosen))
        return {**checkpoint, KEY: own}

    def take(self, checkpoint: dict[str, Any], fitting: bool) -> None:
        """Remove our own state from a loaded checkpoint, so that user hooks get their original.

        Args:
            checkpoint: Checkpoint of :meth:`extended`, or of another strategy; changed.
            fitting: True if training resumes from it; random states are restored at its start.
        """
        self._kept = KeptShards(checkpoint)
        own = checkpoint.pop(KEY, {})
        mesh = self._group.current
        if mesh is None or not fitting:
            return
        rank, size = mesh.rank, mesh.topology.world_size
        self._randomness.hold(own.get(STATES), rank, size)
        if self._randomness.holds:
            self._streams.load(checkpoint)
        if LOADERS in own:
            take_loader_state(checkpoint, own[LOADERS], rank, size)

    def take_kept(self, module: LightningModule) -> Callable[[], None] | None:
        """Return a function that shards kept tensors like the module; None without a checkpoint."""
        kept, self._kept = self._kept, None
        return None if kept is None else partial(kept.shard, module)

    # -- Training

    def prepare_loader(self, loader: object, trainer: Trainer) -> object:
        """Wrap a user's training loader for the resumed run; return other loaders unchanged."""
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return loader
        loop = trainer.fit_loop
        epoch, batches = (
            cast(ProcessedTracker, loop.epoch_progress.current),
            loop.epoch_loop.batch_progress,
        )
        if (
            self._randomness.holds
            and batches.is_last_batch
            and epoch.ready == epoch.started == epoch.processed
        ):
            # Between epochs. A Trainer with max_steps would train on one more batch of the finished
            # epoch.
            for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
                private.end_restart(each)

        def in_hand() -> bool:
            fetcher = private.data_fetcher(loop)
            return isinstance(fetcher, PrefetchDataFetcher) and bool(fetcher.batches)

        mid_epoch = loop.restarting and not batches.is_last_batch
        loader, device = self._streams.defer(loader), self._group.device
        return self._randomness.watch(loader, device, mid_epoch=mid_epoch, in_hand=in_hand)

    def ask_loaders_again(self, trainer: Trainer) -> None:
        """Drop training loaders that were created before Lightning restores the run's progress.

        Stateful loaders would miss their state, and a finished epoch would continue. Other loaders
        start from their beginning in the middle of an epoch, as under every strategy.
        """
        loaders = private.combined_loader(trainer.fit_loop)
        if trainer.ckpt_path is None or loaders is None:
            return
        if self._streams.waits or any(isinstance(each, Stateful) for each in loaders.flattened):
            private.drop_combined_loader(trainer.fit_loop)

    def begin_streams(self, trainer: Trainer) -> None:
        """Put the user's own loaders back into the loop, before user hooks at training start."""
        loaders = private.combined_loader(trainer.fit_loop)
        if self._streams.waits and loaders is not None:
            loaders.flattened = self._streams.begin(loaders.flattened)

    def begin_training(self, loop: FitLoop) -> None:
        """Restore random states, directly before the first batch."""
        if not self._randomness.holds:
            return
        if not loop.restarting and loop.is_resuming:
            # Between epochs. Lightning would use the iterator from setup, but the uninterrupted run
            # creates one after the epoch's start hooks.
            private.end_resume(loop)
        self._randomness.begin(self._group.device)

    def begin_batch(self) -> None:
        """Give loaders their own generators back after their first batch."""
        self._randomness.began()

    def end_run(self) -> None:
        """Drop a run's loaders."""
        self._randomness.forget()
        self._streams.end_run()


class _NotStarted(LoaderProxy):
    """Proxy of a loader during setup: iteration yields one discarded None, not data."""

    def __iter__(self) -> Iterator[None]:
        """Yield the one batch that Lightning prefetches."""
        return iter([None])


class _SizedNotStarted(_NotStarted):
    """Proxy of a loader with a length, during setup."""

    def __len__(self) -> int:
        """Length of the loader."""
        return len(vars(self)["loader"])


class _ResumedStreams:
    """Proxies of iterable loaders in a run that resumes between epochs, until it trains.

    Lightning creates an iterator in setup and prefetches its first batch. It does so again if
    ``trainer.estimated_stepping_batches`` asked for the length before. And for exact random numbers
    the resumed run creates one after the epoch's start hooks. Each iterator costs a stream data.
    """

    def __init__(self) -> None:
        self.waits = False
        """True from the load of a checkpoint between epochs until training starts."""

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Wait if a checkpoint was saved between epochs."""
        loop = _mapping_in(checkpoint, "loops", "fit_loop")
        epoch = _mapping_in(loop, "epoch_progress", "current")
        ended = _mapping_in(loop, "epoch_loop.batch_progress").get("is_last_batch", False)
        counts = {epoch.get(name) for name in ("ready", "started", "processed")}
        self.waits = bool(ended) and len(counts) == 1 and None not in counts

    def defer(self, loader: object) -> object:
        """Replace a training loader by a proxy during setup; stateful loaders do not need one."""
        streams = has_iterable_dataset(loader) or not isinstance(loader, DataLoader)
        if not self.waits or not streams or isinstance(loader, Stateful):
            return loader
        return _SizedNotStarted(loader) if has_length(loader) else _NotStarted(loader)

    def begin(self, loaders: Sequence[object]) -> list[object]:
        """Replace the proxies by the user's loaders at the start of training."""
        self.waits = False
        return [vars(each)["loader"] if isinstance(each, _NotStarted) else each for each in loaders]

    def end_run(self) -> None:
        """Wait no longer: the run has ended, perhaps before it has trained."""
        self.waits = False
