"""ContinuingStrategy: a run that ends before its time - by a signal or an error - and goes on exactly in another."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch.optim import Optimizer
from typing_extensions import override

from shardeddp.checkpoint.kept_shards import KEPT, KEY, KeptShards, places_of_shards
from shardeddp.checkpoint.loader_states import gather_loader_states, take_loader_state
from shardeddp.checkpoint.random_state import ResumeRandomness, Stateful, gather_random_states
from shardeddp.comm import Mesh, exchange
from shardeddp.comm.failures import is_transfer_error
from shardeddp.comm.muster import Muster
from shardeddp.lightning_api import (
    FitLoop,
    PrefetchDataFetcher,
    ProcessedTracker,
    Trainer,
    TrainerFn,
    TrainerStatus,
    callbacks_of,
    private,
)
from shardeddp.plugins.foremost import Foremost
from shardeddp.plugins.interruption import Interruption
from shardeddp.plugins.preemption import Preemption
from shardeddp.sharding.hooks import runtime_of
from shardeddp.strategy.checkpoints import CheckpointStrategy
from shardeddp.strategy.resumed_streams import ResumedStreams


class ContinuingStrategy(CheckpointStrategy):
    """Answers signals, keeps errors of one rank from holding up others, and continues random numbers.

    Args:
        options: Of :class:`CheckpointStrategy`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._randomness = ResumeRandomness()
        self._held_back = ResumedStreams()
        self._preemption = Preemption()
        self._interruption: Interruption | None = None
        self._kept: KeptShards | None = None  # from reading a checkpoint until the model is sharded
        self._foremost: Foremost | None = None

    # -- a run begins and ends

    def _begin_run(self, trainer: Trainer) -> None:
        """To be called by ``setup``: before Lightning registers its handlers of signals."""
        if self._interruption is None:
            size = self.mesh.topology.world_size
            self._interruption = Interruption(Muster(self.mesh.rank, size), self.mesh.rank)
        self._preemption.attach(trainer)
        self._remove_foremost()  # of a run whose setup has failed
        self._foremost = Foremost(self._begin_streams, self._explain)
        callbacks_of(trainer).insert(0, self._foremost)

    def _end_run(self) -> None:
        """To be called by ``teardown``."""
        self._preemption.detach()
        self._remove_foremost()
        self._randomness.forget()
        self._held_back.wait = False

    def _remove_foremost(self) -> None:
        callbacks = [] if self.trainer is None else callbacks_of(self.trainer)
        if self._foremost in callbacks:  # finders, which run a Trainer inside of its run, take callbacks away meanwhile
            callbacks.remove(self._foremost)
        self._foremost = None

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._trainer_at_work()
        self._preemption.begin(trainer, self.mesh.control, self._find_launcher())
        if self._randomness.holds:
            loop = trainer.fit_loop
            if not loop.restarting and loop.is_resuming:
                # Between epochs. Lightning would train on with the iterator that was made in setting up, while the
                # uninterrupted run makes one when the epoch has started, after all hooks.
                private.end_resume(loop)
            self._randomness.begin(self.root_device)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._randomness.began()

    def _begin_streams(self) -> None:
        """Training starts, and users may look at its loaders."""
        loaders = private.combined_loader(self._trainer_at_work().fit_loop)
        if self._held_back.wait and loaders is not None:
            loaders.flattened = self._held_back.begin(loaders.flattened)

    def _explain(self, exception: BaseException) -> None:
        """Let an error that comes from another rank say so before anybody hears of it."""
        if self._mesh is not None and is_transfer_error(exception):
            self._mesh.failures.explain(exception)

    def _trainer_at_work(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("ShardedDP has no module yet: the Trainer connects it when it starts to run")
        return self.trainer

    def _is_running(self) -> bool:
        return self.trainer is not None and self.trainer.state.status == TrainerStatus.RUNNING

    def _find_launcher(self) -> int | None:
        """The process of this machine's first rank, if that one has started this one."""
        mine = [self.node_rank, self.local_rank, os.getpid()]
        everyone = [json.loads(text) for text in exchange(json.dumps(mine).encode(), self.mesh.control)]
        return next((pid for node, local, pid in everyone if (node, local, pid) == (mine[0], 0, os.getppid())), None)

    # -- random numbers

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        trainer = self._trainer_at_work()
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader
        loop = trainer.fit_loop
        epoch, batches = cast(ProcessedTracker, loop.epoch_progress.current), loop.epoch_loop.batch_progress
        if self._randomness.holds and batches.is_last_batch and epoch.ready == epoch.started == epoch.processed:
            # Between epochs. A Trainer that counts steps would train on one more batch of the epoch that is over.
            for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
                private.end_restart(each)

        def in_hand() -> bool:
            fetcher = private.data_fetcher(loop)
            return isinstance(fetcher, PrefetchDataFetcher) and bool(fetcher.batches)

        dataloader = self._held_back.hold_back(dataloader)
        mid_epoch = loop.restarting and not batches.is_last_batch
        return self._randomness.watch(dataloader, self.root_device, mid_epoch=mid_epoch, in_hand=in_hand)

    def _ask_loaders_again(self, loop: FitLoop) -> None:
        """Training loaders were asked for before Lightning knew where a run goes on.

        Those that know where they are would not be told any more, and the progress of an epoch that is over would go
        on. In the middle of an epoch others start where they start, as under every strategy.
        """
        combined = private.combined_loader(loop)
        loaders = [] if combined is None else combined.flattened
        if self._held_back.wait or any(isinstance(each, Stateful) for each in loaders):
            private.drop_combined_loader(loop)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint with every rank's random state; nothing if not all ranks are there, after an error."""
        if self._alone():
            return
        with self._explaining():
            self._save(checkpoint, filepath, storage_options)

    def _save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        if self._mesh is not None:
            checkpoint = self._with_own(checkpoint, self._mesh)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._preemption.requeues or not self._is_running():
            self.wait_for_checkpoint()  # nobody else is going to

    def _with_own(self, checkpoint: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
        """A checkpoint with what Lightning does not know of; hooks of the user still hold the one without."""
        own: dict[str, Any] = {}
        own["random_states"] = gather_random_states(self._randomness.capture(self.root_device), mesh.control)
        checkpoint, loader_states = gather_loader_states(checkpoint, mesh.control)
        if loader_states:  # ranks are in different places of their data
            own["loader_states"] = loader_states
        module = self.lightning_module
        if module is not None and (places := places_of_shards(checkpoint, module)):
            own[KEPT] = places
        return {**checkpoint, KEY: own}

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; its random states come into force when training starts."""
        with self._explaining():
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._kept = KeptShards(checkpoint)
        own = checkpoint.pop(KEY, {})  # hooks of the user get the checkpoint that they have seen
        if self._mesh is not None and self._fitting:
            rank, size = self._mesh.rank, self._mesh.topology.world_size
            self._randomness.hold(own.get("random_states"), rank, size)
            if self._randomness.holds:
                self._held_back.load(checkpoint)
            if "loader_states" in own:
                take_loader_state(checkpoint, own["loader_states"], rank, size)
        if self.lightning_module is not None and runtime_of(self.lightning_module) is not None:
            self._shard_kept()
        return checkpoint

    def _shard_kept(self) -> None:
        """To be called when the module is sharded, and has loaded its part: callbacks' tensors become like its own."""
        module, kept = self.lightning_module, self._kept
        self._kept = None
        if module is not None and kept is not None:
            self._load(partial(kept.shard, module))

    # -- errors of one rank

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What a checkpoint has of an optimizer; nothing if not all ranks are there to tell theirs."""
        with self._explaining():
            return {} if self._alone() else super().optimizer_state(optimizer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._mesh is not None:
            self._mesh.failures.explain(exception)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._alone():
            super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._alone() else super().broadcast(obj, src)

    def _alone(self) -> bool:
        """Whether this rank handles an exception that others do not have, so that nothing may wait for them."""
        if self._interruption is None or self.trainer is None:
            return False
        return self._interruption.alone(self.trainer)
