"""Uneven data: ranks with different numbers of batches, in training and in evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from typing_extensions import override

from shardeddp.comm import Mesh, agree_on_any, all_gather_bytes
from shardeddp.config import UnevenBatches
from shardeddp.engine.order import OrderAgreement
from shardeddp.errors import ConfigurationError
from shardeddp.lightning import private
from shardeddp.lightning.api import (
    GradientAccumulationScheduler,
    Trainer,
    TrainerFn,
    callbacks_of,
    has_iterable_dataset,
    reloads_dataloaders,
    sized_len,
)
from shardeddp.lightning.private import PrefetchDataFetcher

# -- Uneven evaluation: each rank runs its own batches


class UnevenEvaluation:
    """Participation of a rank without batches in the gathers of other ranks, during evaluation."""

    def __init__(self, mesh: Mesh, agreement: OrderAgreement) -> None:
        self._mesh, self._agreement = mesh, agreement
        # Function that restores the loop's own end, which waits for all ranks.
        self._restore: Callable[[], None] | None = None

    def begin(self, trainer: Trainer) -> None:
        """Let each rank run its own batches if their numbers differ or are unknown.

        Ranks that divide layers or experts need a batch each for a forward. Their unknown numbers
        are compared before every batch.

        Raises:
            ConfigurationError: Ranks that divide layers or experts have different numbers of
                batches; or they are unknown, and the module takes batches from
                ``dataloader_iter``.
        """
        loop, mesh = _loop_of(trainer), self._mesh
        divided = _DividingRanks.of(mesh)
        if private.combined_loader(loop) is None or not (
            self._agreement.has_all_gathers or divided
        ):
            return
        lengths = [*_lengths(loop)]
        texts = all_gather_bytes(json.dumps(lengths).encode(), mesh.control)
        if len(set(texts)) == 1 and None not in lengths:
            return
        if divided is not None:
            divided.refuse_lengths(texts)
            if None in lengths:
                _compare_ends(trainer, loop, divided)
        if mesh.experts is None and self._agreement.has_all_gathers:
            self._agreement.begin_evaluation()
            self._restore = private.delay_ends(loop, self._wait)

    def end(self) -> None:
        """Drop the state of an evaluation that has ended or failed."""
        self._agreement.end_evaluation()
        if self._restore is not None:
            self._restore()
        self._restore = None

    def _wait(self, then: Callable[[], Any]) -> Any:
        self._agreement.await_others()
        return then()


@dataclass(frozen=True, kw_only=True)
class _DividingRanks:
    """Ranks that divide layers or experts: a forward takes a batch of each."""

    option: str
    reason: str
    advice: str
    groups: list[list[int]]
    any_of: Callable[[list[bool]], list[bool]]
    """Returns for each flag whether any rank of this rank's group has it set; a collective."""

    gather: Callable[[int], list[int]]
    """Returns the numbers of the group's ranks; a collective."""

    own: list[int]
    """Ranks of this rank's group."""

    @classmethod
    def of(cls, mesh: Mesh) -> _DividingRanks | None:
        """Return the ranks that divide layers or experts with this one; None: there are none."""
        if mesh.experts is not None:  # the rest of the model is gathered by all ranks

            def gather(number: int) -> list[int]:
                texts = all_gather_bytes(json.dumps(number).encode(), mesh.control)
                return [json.loads(it) for it in texts]

            every = [*range(mesh.topology.world_size)]
            return cls(
                option="expert_parallel_size",
                reason="each forward sends tokens to other ranks",
                advice="Use a DistributedSampler of your own, which repeats samples "
                "(Trainer(use_distributed_sampler=False)), or limit_predict_batches and the like",
                groups=[every],
                own=every,
                any_of=lambda flags: agree_on_any(flags, mesh.control),
                gather=gather,
            )
        if mesh.tensor.size == 1:
            return None

        def largest(numbers: list[int]) -> list[int]:
            tensor = torch.tensor(numbers, device=mesh.device)
            mesh.tensor.all_reduce_(tensor, "max").wait()
            return tensor.tolist()

        def gather_in_group(number: int) -> list[int]:
            own = [-1] * mesh.tensor.size
            own[mesh.tensor.rank] = number
            return largest(own)

        groups = mesh.topology.tensor_groups()
        return cls(
            option="tensor_parallel_size",
            reason="the ranks that split layers run each forward together",
            advice="Give them the same batches: a sampler takes "
            "strategy.distributed_sampler_kwargs",
            groups=groups,
            own=next(it for it in groups if mesh.rank in it),
            any_of=lambda flags: [*map(bool, largest([*map(int, flags)]))],
            gather=gather_in_group,
        )

    def refuse_lengths(self, texts: Sequence[bytes]) -> None:
        """Raise ConfigurationError if ranks that divide something have other numbers of batches."""
        for group in self.groups:
            if len({texts[rank] for rank in group}) > 1:
                counts = ", ".join(f"{texts[rank].decode()} on rank {rank}" for rank in group)
                raise ConfigurationError(
                    f"{self.option} needs equal numbers of batches on {_ranks(group, len(texts))} in "
                    f"an evaluation, found {counts}: {self.reason}. {self.advice}"
                )


def _ranks(group: Sequence[int], count: int) -> str:
    return "all ranks" if len(group) == count else f"ranks {group[0]} to {group[-1]}"


def _compare_ends(trainer: Trainer, loop: Any, divided: _DividingRanks) -> None:
    """Check before each batch that all ranks that divide layers or experts have one."""
    name = "predict" if trainer.predicting else "test" if trainer.testing else "val"
    fetcher = private.data_fetcher(loop)
    if not isinstance(fetcher, PrefetchDataFetcher):
        raise ConfigurationError(
            f"{divided.option} compares the ranks' batches before each of them where the "
            f"loaders of {name}_dataloader do not know their number, and a step(self, "
            f"dataloader_iter) takes its batches itself: write a step(self, batch, batch_idx), "
            f"or give the loaders a length"
        )
    even = EvenFetcher(fetcher, f"{name}_dataloader", divided)
    private.replace_data_fetcher(loop, even)


class EvenFetcher(PrefetchDataFetcher):
    """Fetcher that checks for each batch that all ranks have one of the same loader.

    Args:
        fetcher: Fetcher to replace; its state, with prefetched batches, is taken over.
        hook: Name of the hook that has made the loaders.
        divided: Ranks that need a batch each.
    """

    def __init__(self, fetcher: PrefetchDataFetcher, hook: str, divided: _DividingRanks) -> None:
        vars(self).update(vars(fetcher))
        self._hook, self._divided = hook, divided

    @override
    def __next__(self) -> Any:
        try:
            found = super().__next__()
        except StopIteration:
            found = None
        loaders = len(self.combined_loader.flattened)
        _, batch, loader = found or (None, 0, loaders)
        # Each rank sets one flag; several flags in the result mean that ranks differ.
        flags = self._divided.any_of([it == loader for it in range(loaders + 1)])
        if sum(flags) > 1:
            self._refuse(loader, batch, flags.index(True))
        if found is None:
            raise StopIteration
        return found

    def _refuse(self, loader: int, batch: int, uneven: int) -> None:
        """Raise on all ranks, because only some have a batch of the uneven loader."""
        divided = self._divided
        counts = divided.gather(batch if loader == uneven else -1)
        before = max(counts)
        listed = ", ".join(
            f"rank {rank} has {f'{before}' if count < 0 else f'more than {before}'}"
            for rank, count in zip(divided.own, counts, strict=True)
        )
        source: Any = self.combined_loader.flattened[uneven]
        kind = type(getattr(source, "dataset", source)).__name__  # loaders may be any iterable
        limit = f"limit_{self._hook.removesuffix('_dataloader')}_batches"
        raise ConfigurationError(
            f"{divided.option} needs equal numbers of batches on these ranks in an evaluation, and "
            f"loader {uneven} of {self._hook} (of a {kind}) has others: {listed}. None can go on when "
            f"one has no batch left: {divided.reason}. Set Trainer({limit}={before}) or a lower "
            f"number, or let the stream end with the same batch on all of them"
        )


def _loop_of(trainer: Trainer) -> Any:
    """Return the running evaluation loop."""
    if trainer.predicting:
        return trainer.predict_loop
    if trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    return trainer.test_loop if trainer.testing else trainer.validate_loop


def _lengths(loop: Any) -> Iterator[int | None]:
    """Yield the number of batches of each loader; None if unknown or for an iterable dataset."""
    for loader, limit in zip(
        private.combined_loader(loop).flattened, loop.max_batches, strict=True
    ):
        length = sized_len(loader)
        yield None if length is None or has_iterable_dataset(loader) else int(min(length, limit))


# -- Uneven training: an error, a common end, or repeated batches


class EvenTraining:
    """Coordination of ranks with different numbers of training batches, in one run of a Trainer.

    Known lengths of loaders are compared as soon as the loaders exist. If a loader has no length,
    the ranks agree before each batch whether it is the last. They wait for the result, because
    Lightning's next action depends on it.

    With ``join``, a rank without a batch runs its last batch again with all hooks, so that it takes
    part in all collectives of the module. Its loss has no weight (:meth:`zero_repeated_loss`).
    """

    def __init__(self, mesh: Mesh, choice: UnevenBatches) -> None:
        self._choice = choice
        self._mesh = mesh
        # Number of batches of this rank; infinite for a loader without a length.
        self._own: float = inf
        self._differ = False  # True if ranks have different numbers of batches
        self._asks = False  # True to agree before each batch, because some numbers are unknown
        self.repeats = False
        """True if the current batch is a repeated one, or beyond the end of the loader."""

        # Agreed end of the epoch before the next batch; None: not agreed
        self._over: bool | None = None

    def continue_on(self, mesh: Mesh) -> None:
        """Continue a run whose module was sharded anew."""
        self._mesh = mesh

    def align(self, trainer: Trainer) -> bool:
        """Compare the numbers of batches and set a common one; a collective of all ranks.

        Returns:
            True if the numbers differ.
        """
        loop = trainer.fit_loop
        loader = private.combined_loader(loop)
        length = None if loader is None else sized_len(loader)
        asks = length is None or any(
            map(has_iterable_dataset, loader.flattened if loader is not None else ())
        )
        answers = all_gather_bytes(json.dumps([length, asks]).encode(), self._mesh.control)
        loaders: list[tuple[int | None, bool]] = [json.loads(text) for text in answers]
        counts = [inf if count is None else count for count, _ in loaders]
        self._own = inf if asks else counts[self._mesh.rank]
        self._asks = any(asks for _, asks in loaders)
        self._differ = len(set(counts)) > 1 and (
            self._asks or not _ends_before(trainer, min(counts))
        )
        if not self._differ:
            return False
        self._refuse([f"{count:g}" if count < inf else "an unknown number" for count in counts])
        loop.max_batches = max(counts) if self._choice == "join" else min(counts)
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            batches = loop.max_batches * trainer.val_check_interval
            trainer.val_check_batch = max(1, int(batches)) if batches < inf else inf
        return True

    def begin(self, trainer: Trainer) -> None:
        """Prepare training, or an epoch with new loaders."""
        self.align(trainer)
        fetcher = private.data_fetcher(trainer.fit_loop)
        if isinstance(fetcher, PrefetchDataFetcher):
            if (self._asks or self._differ) and not isinstance(fetcher, WatchedFetcher):
                watched = WatchedFetcher(
                    fetcher, lambda: self._goes_on_without(trainer), self._mesh.rank
                )
                private.replace_data_fetcher(trainer.fit_loop, watched)
        elif self._choice == "join" and (self._asks or self._differ):
            raise ConfigurationError(
                "uneven_batches='join' cannot give a batch again to a training_step(self, "
                "dataloader_iter), which takes its batches itself: write training_step(self, "
                "batch, batch_idx), or use 'min'"
            )

    def begin_batch(self, trainer: Trainer) -> None:
        """Determine if the current batch is the last of the epoch."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        ready = progress.current.ready
        if ready == 1 and reloads_dataloaders(trainer):
            self.begin(trainer)
        fetcher = private.data_fetcher(trainer.fit_loop)
        watched = fetcher if isinstance(fetcher, WatchedFetcher) else None
        self.repeats = self._differ and (
            ready > self._own or (watched is not None and watched.repeats)
        )
        if self._over is not None:
            over, self._over = self._over, None
        elif self._asks:
            over = self._agree("last" if progress.is_last_batch else "more", ready) is not False
        else:
            over = progress.is_last_batch and self._choice != "join"
        over |= ready >= trainer.num_training_batches  # even if the loader has more
        if progress.is_last_batch and not over and watched is not None:
            watched.repeat()
        progress.is_last_batch = over

    def zero_repeated_loss(self, loss: torch.Tensor) -> None:
        """Zero the gradient of a loss if the batch is a repeated one."""
        if self.repeats and loss.requires_grad:
            loss.register_hook(torch.zeros_like)

    def _goes_on_without(self, trainer: Trainer) -> bool:
        """Return True if this rank, which has no batch left, is to repeat its last one."""
        if self._asks:
            self._over = self._agree(
                "none", trainer.fit_loop.epoch_loop.batch_progress.current.ready + 1
            )
            if self._over is None:
                return False
        return self._choice == "join"

    def _agree(self, mine: str, ready: int) -> bool | None:
        """Agree on the end of the epoch: True if it ends with this batch; None if no rank has it.

        Args:
            mine: State of this rank: ``more`` batches follow, this is the ``last``, or ``none``:
                the rank does not have this batch.
            ready: Number of the batch in the epoch, from 1.
        """
        if not agree_on_any([mine != "more"], self._mesh.control)[0]:
            return False
        states = [
            json.loads(text)
            for text in all_gather_bytes(json.dumps(mine).encode(), self._mesh.control)
        ]
        if set(states) == {"none"}:
            return None
        if len(set(states)) > 1:
            self._differ = True
            had = {"more": f"more than {ready}", "last": f"{ready}", "none": f"{ready - 1}"}
            self._refuse([had[each] for each in states], too_late="none" in states)
        return self._choice != "join" or "more" not in states

    def _refuse(self, counts: Sequence[str], *, too_late: bool = False) -> None:
        """Raise if ``uneven_batches`` does not allow different numbers, or it is too late to stop.

        It is too late if ranks have already begun a batch that others do not have.
        """
        if self._choice == "join" or (self._choice == "min" and not too_late):
            return
        listed = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
        reason = ", and the end of a loader was not known before" if too_late else ""
        raise ConfigurationError(
            f"ranks have different numbers of batches to train on: {listed}{reason}. A step takes "
            f"all ranks, so training cannot go on when one has no batch left. Give every rank the "
            f"same number (a DistributedSampler with drop_last=True, or limit_train_batches), or "
            f"set ShardedDP(uneven_batches='min') to end each epoch on all ranks with the first "
            f"that has none left, or 'join' to end it with the last"
        )


class WatchedFetcher(PrefetchDataFetcher):
    """Fetcher that can repeat the last batch of another fetcher after its end.

    Args:
        fetcher: Fetcher to replace; its state, with prefetched batches, is taken over.
        goes_on: Function called at the end of the data; True to repeat a batch.
        rank: Global rank.
    """

    def __init__(
        self, fetcher: PrefetchDataFetcher, goes_on: Callable[[], bool], rank: int
    ) -> None:
        vars(self).update(vars(fetcher))
        self._goes_on, self._rank = goes_on, rank
        self._last: Any = None
        self._repeats_next = False
        self.repeats = False
        """True if the last returned batch was a repeated one."""

    def repeat(self) -> None:
        """Repeat the last batch on the next call, if training continues then."""
        self._repeats_next = True

    @override
    def __next__(self) -> Any:
        ended, self._repeats_next, self.repeats = self._repeats_next, False, False
        try:
            if not ended:
                self._last = super().__next__()
        except StopIteration:
            ended = True
        if not ended:
            return self._last
        if not self._goes_on():
            raise StopIteration
        self.repeats = True
        if self._last is None:
            # No last batch: the run was resumed at a point where this rank had none left.
            self._last = next(iter(self.combined_loader), None)
        if self._last is None:
            raise RuntimeError(
                f"rank {self._rank} has no batch at all in this epoch, and uneven_batches='join' "
                f"repeats a rank's last one: give every rank one batch at least, or use 'min'"
            )
        return self._last

    @override
    def reset(self) -> None:
        super().reset()
        self._last, self._repeats_next = None, False


def _ends_before(trainer: Trainer, count: float) -> bool:
    """True if training certainly reaches ``max_steps`` within ``count`` batches of each rank."""
    accumulates = any(
        isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)
    )
    if trainer.max_steps < 0 or accumulates or not trainer.lightning_module.automatic_optimization:
        return False
    steps = trainer.max_steps - trainer.global_step
    return (
        trainer.fit_loop.epoch_loop.batch_progress.current.ready
        + steps * trainer.accumulate_grad_batches
        <= count
    )
