"""A drawn program under DDP and under ShardedDP, on the ranks of a pool, compared."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import math
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from shardeddp import ShardedDP
from shardeddp.wrap import AutoPolicy
from support.drawn_modules import DrawnUnit
from support.drawn_programs import Program
from support.drawn_training import DrawnTraining, batches
from support.trainers import full_weights, make_trainer
from world import Pool, RankDied, RemoteTracebacks, WorldTimeout

RTOL = 1e-5
NOISE = 1e-7
"""Relative change of the initial weights by which a program's own sensitivity to rounding is found."""

PATIENCE_S = 30
"""How long a rank waits for another; nothing in a program takes a second."""

TIMEOUT_S = 100.0
"""Of one program under both strategies, on a machine that has other work."""


RANKS_RUN = 25
"""How many programs rank processes run.

Torch never frees a module that keeps an output of its own reentrant checkpointing, and with it the
threads and connections of the process groups that trained it.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a program."""

    kind: str
    """"same", "sensitive" (same within its sensitivity to rounding), "discarded" (DDP raises), "differs", "raises",
    "dies" or "hangs"."""

    text: str = ""
    details: str = ""

    @property
    def failed(self) -> bool:
        """Whether ShardedDP did something other than DDP."""
        return self.kind in ("differs", "raises", "dies", "hangs")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank has seen, and the weights at the end."""

    record: list[tuple[str, float]]
    weights: dict[str, Tensor]


# -- on a rank


class AveragedReplicas(DDPStrategy):
    """DDP by definition: a replica per rank, whose gradients are averaged when a backward has ended.

    DistributedDataParallel refuses what it cannot follow (a graph that reentrant checkpointing hides, a parameter that
    several backwards reach); the definition knows no such limits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocked = False

    def _setup_model(self, model: Any) -> Any:
        model.after_backward = self._average
        return model

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Surround a micro-batch that is not the last of its step."""
        self._blocked = True
        yield
        self._blocked = False

    def _average(self) -> None:
        for parameter in () if self._blocked else self.lightning_module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


def under_ddp(program: Program, noise: float = 0.0) -> Trained:
    """Train with DistributedDataParallel, which looks for unused parameters where checkpoints do not hide the graph."""
    return _train(program, DDPStrategy(find_unused_parameters=not program.uses("reentrant")), noise)


def averaged(program: Program, noise: float = 0.0) -> Trained:
    """Train replicas whose gradients are averaged."""
    return _train(program, AveragedReplicas(), noise)


def sharded(program: Program) -> Trained:
    """Train with ShardedDP."""
    policy: Any = program.policy
    if policy == "blocks":
        units = any(block.unit for block in program.all_blocks())
        policy = [DrawnUnit] if units else None
    elif policy == "auto":
        policy = AutoPolicy(min_numel=1)
    strategy = ShardedDP(
        program.sharding,
        2 if program.sharding == "hybrid_shard" else None,
        policy,
        forward_prefetch=program.prefetch[0],
        backward_prefetch=program.prefetch[1],
        reshard_after_forward=program.reshard_after_forward,
        reduce_every_backward=program.reduce_every_backward,
        optimizer_scope={"Remembering": "element"} if program.scope else None,
        timeout=PATIENCE_S,
    )
    return _train(program, strategy)


def _train(program: Program, strategy: Any, noise: float = 0.0) -> Trained:
    faulthandler.enable()  # anew: the end of a Trainer takes it away
    # In evaluation torch takes another way through attention where dtypes agree, which those of
    # gathered weights do not; bfloat16 shows it.
    torch.backends.mha.set_fastpath_enabled(program.precision != "bf16-mixed")
    seed_everything(program.seed, verbose=False)
    module = DrawnTraining(program)
    if noise:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 + noise * torch.randn_like(parameter))
    kind, value = program.clip or (None, None)
    trainer = make_trainer(
        strategy,
        max_epochs=program.epochs,
        accumulate_grad_batches=program.accumulate,
        gradient_clip_val=value,
        gradient_clip_algorithm=kind,
        precision=program.precision,
    )
    warnings.simplefilter("ignore")  # what programs of this kind do is warned about, rightly
    trainer.fit(module, batches(program))
    weights = full_weights(module)
    return Trained(record=module.record, weights=weights)


def difference(found: Trained, expected: Trained) -> tuple[float, str]:
    """The largest difference, relative to the tolerance's scale, and where it is."""
    if [key for key, _ in found.record] != [key for key, _ in expected.record]:
        index = next(
            (
                i
                for i, (a, b) in enumerate(zip(found.record, expected.record, strict=False))
                if a[0] != b[0]
            ),
            min(len(found.record), len(expected.record)),
        )
        texts = [
            f"{side.record[index : index + 1]} ({len(side.record)} numbers)"
            for side in (found, expected)
        ]
        return math.inf, f"what happened: expected {texts[1]}, found {texts[0]}"
    worst = (0.0, "nothing")
    for index, ((key, ours), (_, theirs)) in enumerate(
        zip(found.record, expected.record, strict=True)
    ):
        relative = abs(ours - theirs) / (abs(theirs) + 1e-3)
        relative = 0.0 if ours == theirs else relative if math.isfinite(relative) else math.inf
        # The first number that is wrong says more than the largest.
        if relative > RTOL:
            return (
                relative,
                f"{key} (number {index} of {len(found.record)}): expected {theirs:.8g}, found {ours:.8g}",
            )
        worst = max(worst, (relative, key))
    if list(found.weights) != list(expected.weights):
        return (
            math.inf,
            f"names of weights: expected {list(expected.weights)}, found {list(found.weights)}",
        )
    for name, theirs in expected.weights.items():
        change = float((found.weights[name].double() - theirs.double()).norm())
        relative = change / (float(theirs.double().norm()) + 1e-2)
        worst = max(worst, (relative if math.isfinite(relative) else math.inf, f"weight {name}"))
    return worst


def compare(program: Program, journal: str) -> Outcome:
    """Train under both; called on every rank, where each compares its own numbers.

    Raises:
        ProgramRaised: ShardedDP or DDP raises; the ranks' process groups are no longer to be trusted.
    """
    with open(journal, "w", buffering=1) as notes:
        notes.write("ddp\n")
        reference: Callable[..., Trained] = under_ddp
        try:
            expected = under_ddp(program)
            if drifted(expected):
                raise RuntimeError(
                    "DDP does not average all gradients of this program: its replicas differ"
                )
        except Exception:  # noqa: BLE001 - what DDP cannot do is compared with what it is defined as
            reference = averaged
            try:
                expected = averaged(program)
            except Exception as error:  # noqa: BLE001 - nothing to compare with
                return Outcome(
                    kind="discarded",
                    text=f"{type(error).__name__}: {error}",
                    details=traceback.format_exc(),
                )
        gc.collect()
        notes.write("sharded\n")
        try:
            found = sharded(program)
        except Exception as error:  # noqa: BLE001 - travels to the session
            raise ProgramRaised(
                f"{type(error).__name__}: {error}", traceback.format_exc()
            ) from None
        error, where = difference(found, expected)
        worst = _largest(error)
        if worst <= RTOL:
            return Outcome(
                kind="same",
                text="" if reference is under_ddp else "(compared with averaged replicas)",
            )
        notes.write("noise\n")
        noise = _largest(
            max(_spread(reference(program, NOISE * sign), expected) for sign in (1, -1, 2))
        )
        if (
            worst < 1e-3
            and program.precision == "bf16-mixed"
            and program.uses("penalty", "asked_graph")
        ):
            # What a second derivative adds to a gradient is added in bfloat16 or in float32: autocast leaves that open.
            with casting_once():
                noise = max(noise, _largest(_spread(reference(program), expected)))
        text = f"rank {dist.get_rank()}: {where}: {error:.2g} (rounding alone: {noise:.2g})"
        small = worst <= 4 * noise
        # (What shares memory has its own when it is cast.)
        if (
            not small
            and worst < 1e-3
            and program.precision == "32-true"
            and not program.uses("memory")
        ):
            precise = replace(program, precision="64-true")
            rest = _largest(difference(sharded(precise), reference(precise))[0])
            small, text = rest < 1e-9, f"{text}, in float64: {rest:.2g}"
        if not small and reference is under_ddp:
            text += (
                f"; from averaged replicas: {_largest(difference(found, averaged(program))[0]):.2g}"
            )
        return Outcome(kind="sensitive" if small else "differs", text=text)


@contextlib.contextmanager
def casting_once() -> Iterator[None]:
    """Let autocast cast a parameter once for all of its uses, as torch does unless it is told not to."""
    autocast = torch.autocast
    torch.autocast = functools.partial(_autocast, autocast)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.autocast = autocast  # type: ignore[misc]


def _autocast(autocast: Any, *args: Any, **options: Any) -> Any:
    return autocast(*args, **{**options, "cache_enabled": True})


def drifted(trained: Trained) -> bool:
    """Whether ranks have ended with different weights, in any bit."""
    total = torch.stack([weight.double().abs().sum() for weight in trained.weights.values()])
    largest = total.clone()
    dist.all_reduce(total, op=dist.ReduceOp.MIN)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return not torch.equal(total, largest)


def _largest(value: float) -> float:
    """Of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _spread(found: Trained, expected: Trained) -> float:
    """The largest difference anywhere."""
    pairs = zip(found.record, expected.record, strict=False)
    numbers = [abs(a[1] - b[1]) / (abs(b[1]) + 1e-3) for a, b in pairs]
    weights = [
        float((found.weights[name] - theirs).norm()) / (float(theirs.norm()) + 1e-2)
        for name, theirs in expected.weights.items()
    ]
    return max([*numbers, *weights, 0.0])


class ProgramRaised(Exception):
    """A program raised under one of the strategies."""

    def __init__(self, text: str, details: str) -> None:
        super().__init__(text, details)
        self.text, self.details = text, details


# -- in the session


def run(pool: Pool, program: Program) -> Outcome:
    """What comes of a program on a world of its ranks."""
    with tempfile.NamedTemporaryFile("r", prefix="journal-") as journal:
        try:
            outcomes = pool(program.ranks).run(compare, program, journal.name, timeout_s=TIMEOUT_S)
        except ProgramRaised as error:
            return Outcome(kind="raises", text=error.text, details=error.details)
        except (RankDied, WorldTimeout) as error:
            phase = Path(journal.name).read_text().split()[-1:]
            kind = "dies" if isinstance(error, RankDied) else "hangs"
            return Outcome(
                kind="discarded" if phase == ["ddp"] else kind,
                text=f"{kind} under {phase}: {error}",
                details=_causes(error),
            )
        return max(outcomes, key=lambda outcome: (outcome.failed, outcome.kind != "same"))


def _causes(error: BaseException) -> str:
    return str(error.__cause__) if isinstance(error.__cause__, RemoteTracebacks) else ""
