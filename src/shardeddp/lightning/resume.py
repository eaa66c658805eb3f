"""Resume: random state, places in the data and kept tensors, for an exact continuation."""

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
from shardeddp.lightning.private import FitLoop, PrefetchDataFetcher, ProcessedTracker
from shardeddp.lightning.process_group import ProcessGroup

# -- Loader states of all ranks
#
# Lightning saves the state of one rank and gives it to all.

_PLACE = "combined_loader"
"""The name that the states of training loaders have among those of Lightning's fit loop."""


def gather_loader_states(checkpoint: dict[str, Any], group: HostGroup) -> list[Any]:
    """Every rank's states on rank 0, by rank, where they are not the same; a collective.

    Returns:
        All of them; nothing if all ranks are in one place, or have no stateful loader, and on
        other ranks.
    """
    # Pickled on the way between ranks of one job only.
    own = _fit_loop(checkpoint).get(_PLACE)
    sent = gather_to_first("saving the states of data loaders", lambda: pickle.dumps(own), group)
    return [pickle.loads(each) for each in sent] if len({*map(bytes, sent)}) > 1 else []


def take_loader_state(
    checkpoint: dict[str, Any], states: object, rank: int, world_size: int
) -> None:
    """Put this rank's states where Lightning looks for them.

    Args:
        checkpoint: As it was read.
        states: By rank, as saved.
        rank: This rank.
        world_size: Number of ranks now. If there were more or fewer, all go on from where rank 0
            was: rank 0 warns.

    Raises:
        CheckpointError: These are no states.
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
    """The part that is read and written here; an empty one where weights alone are saved."""
    return _mapping_in(checkpoint, "loops", "fit_loop", "state_dict")


def _mapping_in(tree: Any, *keys: str) -> dict[str, Any]:
    """The mapping behind some keys; an empty one where a hook of the user's has left no such thing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, dict) else {}


# -- Resume: random state, places in the data, kept tensors


class Resume:
    """State that Lightning does not save, and the moments at which a resumed run gets it back."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._randomness = ResumeRandomness()
        self._streams = _ResumedStreams()
        self._kept: KeptShards | None = None  # from reading a checkpoint until the model is sharded

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy or a pickle, which has read no checkpoint yet."""
        return {**vars(self), "_kept": None}

    # -- Checkpoints

    def extended(
        self,
        checkpoint: dict[str, Any],
        module: LightningModule | None,
        names: Callable[[], ParameterNames],
    ) -> dict[str, Any]:
        """A checkpoint with all that Lightning does not know of; user hooks hold the one without.

        A collective of all ranks; where there are none yet, the checkpoint as it is. Rank 0 gets
        the states of all ranks; everything else is its own.
        """
        mesh = self._group.current
        if mesh is None:
            return checkpoint
        own: dict[str, Any] = {}
        own[STATES] = gather_random_states(self._randomness.capture(mesh.device), mesh.control)
        loader_states = gather_loader_states(checkpoint, mesh.control)
        if loader_states:  # ranks are in different places of their data
            own[LOADERS] = loader_states
        if module is not None and (places := places_of_shards(checkpoint, module)):
            own[KEPT] = places
        if checkpoint.get("optimizer_states"):
            own[NAMES] = names()
        return {**checkpoint, KEY: own}

    def take(self, checkpoint: dict[str, Any], fitting: bool) -> None:
        """Take the own part out of a loaded checkpoint; user hooks get the one they have seen.

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
        self._randomness.hold(own.get(STATES), rank, size)
        if self._randomness.holds:
            self._streams.load(checkpoint)
        if LOADERS in own:
            take_loader_state(checkpoint, own[LOADERS], rank, size)

    def take_kept(self, module: LightningModule) -> Callable[[], None] | None:
        """Action that shards loads of callbacks as the module is sharded.

        None: nothing was read.
        """
        kept, self._kept = self._kept, None
        return None if kept is None else partial(kept.shard, module)

    # -- Training

    def prepare_loader(self, loader: object, trainer: Trainer) -> object:
        """The loader to use in the place of one of the user's."""
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
            # Between epochs. A Trainer that counts steps would train on one more batch of the epoch
            # that is over.
            for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
                private.end_restart(each)

        def in_hand() -> bool:
            fetcher = private.data_fetcher(loop)
            return isinstance(fetcher, PrefetchDataFetcher) and bool(fetcher.batches)

        mid_epoch = loop.restarting and not batches.is_last_batch
        loader, device = self._streams.defer(loader), self._group.device
        return self._randomness.watch(loader, device, mid_epoch=mid_epoch, in_hand=in_hand)

    def ask_loaders_again(self, loop: FitLoop) -> None:
        """Drop training loaders that were asked for before Lightning knew where a run goes on.

        Those that know where they are would not be told any more, and the progress of an epoch that
        is over would go on. In the middle of an epoch others start where they start, as under every
        strategy.
        """
        combined = private.combined_loader(loop)
        loaders = [] if combined is None else combined.flattened
        if self._streams.wait or any(isinstance(each, Stateful) for each in loaders):
            private.drop_combined_loader(loop)

    def begin_streams(self, trainer: Trainer) -> None:
        """Put the user's own loaders back into the loop.

        This comes before the user's hooks of the start of training.
        """
        loaders = private.combined_loader(trainer.fit_loop)
        if self._streams.wait and loaders is not None:
            loaders.flattened = self._streams.begin(loaders.flattened)

    def begin_training(self, loop: FitLoop) -> None:
        """Restore random states, last before the first batch."""
        if not self._randomness.holds:
            return
        if not loop.restarting and loop.is_resuming:
            # Between epochs. Lightning would train on with the iterator that was made in setting
            # up, while the uninterrupted run makes one when the epoch has started, after all hooks.
            private.end_resume(loop)
        self._randomness.begin(self._group.device)

    def begin_batch(self) -> None:
        """Give loaders their own generators back, as their first batch is there."""
        self._randomness.began()

    def end_run(self) -> None:
        """Let go of a run's loaders."""
        self._randomness.forget()
        self._streams.wait = False


class _NotStarted(LoaderProxy):
    """A loader during setup: its first batch is nothing and is thrown away; else the loader itself."""

    def __iter__(self) -> Iterator[None]:
        """Yield what is asked for ahead."""
        return iter([None])


class _SizedNotStarted(_NotStarted):
    """The same with a length."""

    def __len__(self) -> int:
        """Length of the loader."""
        return len(vars(self)["loader"])


class _ResumedStreams:
    """Holds back the iterable data of one run that goes on between epochs until it trains.

    Lightning asks for an iterator when it sets up, and takes the first batch, once more where
    ``trainer.estimated_stepping_batches`` wanted to know the length before, and, so that random
    numbers go on exactly, when the epoch has started, behind all hooks. For a stream each time
    costs data.
    """

    def __init__(self) -> None:
        self.wait = False
        """Whether a run resumes between epochs and does not train yet."""

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """A run is about to resume from a checkpoint.

        It will ask for iterators anew when its epoch has started.
        """
        loop = _mapping_in(checkpoint, "loops", "fit_loop")
        epoch = _mapping_in(loop, "epoch_progress", "current")
        ended = _mapping_in(loop, "epoch_loop.batch_progress").get("is_last_batch", False)
        counts = {epoch.get(name) for name in ("ready", "started", "processed")}
        self.wait = bool(ended) and len(counts) == 1 and None not in counts

    def defer(self, loader: object) -> object:
        """The loader to use instead of one of the training's while the run is set up.

        One that knows where it is loses nothing.
        """
        streams = has_iterable_dataset(loader) or not isinstance(loader, DataLoader)
        if not self.wait or not streams or isinstance(loader, Stateful):
            return loader
        return _SizedNotStarted(loader) if has_length(loader) else _NotStarted(loader)

    def begin(self, loaders: Sequence[object]) -> list[object]:
        """Training loaders as users know them; training begins."""
        self.wait = False
        return [vars(each)["loader"] if isinstance(each, _NotStarted) else each for each in loaders]
