"""Probe: how fast the ranks at hand compute, move memory and communicate, measured in less than a minute."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from statistics import fmean, median
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from typing_extensions import override

from shardeddp.comm import Mesh
from shardeddp.comm.collectives import CollectiveHandle, Collectives
from shardeddp.comm.streams import CommStream
from shardeddp.lightning.api import NAMESPACE, Callback, LightningModule, Trainer
from shardeddp.lightning.strategy import ShardedDP
from shardeddp.planner.calibration import Device, Probe, Timed, TimedCollective
from shardeddp.planner.trace import profile
from shardeddp.planner.transformer import Block, Decoder, Dimensions
from shardeddp.planner.work import UnitWork
from shardeddp.wrap import resolve_policy

REPEATS = 9
WINDOW_S = 0.5
"""Time that all ranks repeat a measurement which needs no other rank. Ranks that share processors
slow each other down, which a rank that is done before the others does not."""
_LEAST_S = 1e-5

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_Sizes: TypeAlias = tuple[int, int, int, int, int]
"""Layers, width and heads of a decoder; samples and length of a batch."""
_TINY: _Sizes = (4, 16, 2, 1, 8)
_STEPS = 48

# Sizes that keep a device busy for a short time, by device type.
MATMULS = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
DECODERS: dict[str, tuple[_Sizes, ...]] = {
    "cpu": ((2, 128, 4, 8, 128), (2, 256, 4, 4, 128), (2, 256, 4, 16, 128), (1, 512, 8, 4, 128)),
    "cuda": ((4, 1024, 8, 4, 2048), (4, 2048, 16, 1, 2048), (2, 4096, 32, 1, 2048)),
}
COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}
GATHERED = {
    "cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24),
    "cuda": (1 << 12, 1 << 18, 1 << 22, 1 << 26, 1 << 28),
}


def probe() -> Probe | None:
    """Measure on the ranks of torchrun, or on a single process; returns None except on rank 0.

    Two runs on a tiny model set up ranks, groups and strategy as any run does. The first
    communicates once per step; the second gathers all units in every forward and backward. Rates
    are measured at the start of the second run. The runs' own steps give the overhead of loops and
    hooks.
    """
    logging.getLogger(NAMESPACE).setLevel(logging.ERROR)  # hide messages on the tiny runs
    replicas, shards, rates = _Clock(), _Clock(), _Rates()
    _train("no_shard", [replicas])
    rank = _train("hybrid_shard", [rates, shards])
    return None if rank else _probe_of(rates.figures, replicas, shards)


def _train(strategy: str, callbacks: list[Callback]) -> int:
    """Train a tiny model; return the rank."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    batches: Any = [_tokens(_TINY)] * 2 * _STEPS
    trainer = Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=per_node,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // per_node,
        strategy=ShardedDP(strategy, auto_wrap_policy={Block}),
        callbacks=callbacks,
        accumulate_grad_batches=2,
        max_steps=_STEPS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Tiny(), DataLoader(batches, batch_size=None))
    return trainer.global_rank


def _probe_of(figures: dict[str, Any], replicas: _Clock, shards: _Clock) -> Probe:
    """Combine the rates with the overhead of loops, hooks and collectives."""
    host: Timed = figures["host"]
    latency = min((it.seconds for it in figures["collectives"]), default=0.0)
    # Replicas communicate only in the last micro-batch of a step, shards equally in all.
    alone, calls_alone = replicas.medians(1)
    others, calls = shards.medians(1)
    steps, _ = shards.medians(2)
    issued = calls - calls_alone
    return Probe(
        **figures,
        micro_batch_s=max(_LEAST_S, alone - host.seconds - host.backward_s),
        step_s=max(_LEAST_S, steps - others),
        collective_s=max(0.0, (others - alone) / issued - latency) if issued else 0.0,
    )


class _Tiny(LightningModule):
    """Tiny model to train."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = _decoder(_TINY)

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch of tokens."""
        with batch.device:
            return self.decoder(batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters())


class _Clock(Callback):
    """Timer of micro-batches, two per optimizer step."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record the time and the number of collectives at the end of a micro-batch."""
        mesh: Mesh = trainer.strategy.mesh  # pyright: ignore[reportAttributeAccessIssue]
        self._ends.append((time.perf_counter(), sum(mesh.traffic.calls.values())))

    def medians(self, first: int) -> tuple[float, float]:
        """Median seconds and collectives of micro-batches: 1: without, 2: with optimizer step."""
        # The second micro-batch of each pair steps; the first pair is left out.
        each = [*zip(self._ends, self._ends[1:], strict=False)][first::2]
        return (
            median(end - begin for (begin, _), (end, _) in each),
            median(calls - before for (_, before), (_, calls) in each),
        )


class _Rates(Callback):
    """Callback that measures rates at the start of training."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        """Fields of a :class:`Probe`, by name."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure all rates; a collective of all ranks."""
        mesh: Mesh = trainer.strategy.mesh  # pyright: ignore[reportAttributeAccessIssue]
        kind, ranks = mesh.device.type, _Measurements(mesh)
        with mesh.device:
            self.figures = {
                "device": Device.of(mesh.device, mesh.topology.world_size, trainer.num_devices),
                "compute": [
                    *ranks.matmuls("fp32"),
                    *ranks.matmuls("bf16"),
                    *(ranks.attention(each) for each in DECODERS[kind]),
                    *(ranks.steps(each) for each in DECODERS[kind]),
                ],
                "host": ranks.steps(_TINY),
                "memory_gbs": ranks.memory_gbs(),
                "optimizer_gbs": ranks.optimizer_gbs(),
                "collectives": ranks.collectives(),
                "interference": ranks.interference(),
            }
            self.figures["spread"] = median(ranks.spreads)


class _Measurements:
    """Measurements on all ranks at once; times are the slowest rank's typical ones in seconds."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._device = mesh, mesh.device
        self._is_cuda = mesh.device.type == "cuda"
        self.spreads: list[float] = []
        """Relative difference of later repetitions from earlier ones, by measurement."""

    # -- Compute and memory

    def matmuls(self, dtype: str) -> list[Timed]:
        """Time matmuls of square matrices, up to the size that takes longer than the window.

        A processor without instructions for bf16 takes seconds for the largest size.
        """
        found: list[Timed] = []
        for size in MATMULS[self._device.type]:
            if found and 8 * found[-1].seconds > WINDOW_S:  # twice the size
                break
            one, other = (torch.randn(size, size, dtype=_DTYPES[dtype]) for _ in range(2))
            seconds = self._typical(lambda one=one, other=other: one @ other)
            work = UnitWork(matmul_flops=2 * size**3, matmul_nbytes=3 * one.nbytes, kernels=1)
            found.append(Timed(label="matmul", dtype=dtype, work=work, seconds=seconds))
        return found

    def attention(self, sizes: _Sizes) -> Timed:
        """Time causal attention of one layer of a decoder."""
        _, width, heads, samples, length = sizes
        dtype = "bf16" if self._is_cuda else "fp32"
        query = torch.randn(samples, heads, length, width // heads, dtype=_DTYPES[dtype])
        attend = F.scaled_dot_product_attention
        seconds = self._typical(lambda: attend(query, query, query, is_causal=True))
        work = UnitWork(attention_flops=2 * samples * width * length**2, kernels=1)
        return Timed(label="attention", dtype=dtype, work=work, seconds=seconds)

    def steps(self, sizes: _Sizes) -> Timed:
        """Time forward and backward of a decoder."""
        module, tokens = _decoder(sizes).to(self._device), _tokens(sizes).to(self._device)
        mixed = torch.autocast("cuda", torch.bfloat16, enabled=self._is_cuda)
        loss = torch.zeros(())

        def forward() -> None:
            nonlocal loss
            with mixed:
                loss = module(tokens)

        def backward() -> None:
            loss.backward()
            module.zero_grad()

        ahead, back = self._typicals([forward, backward])
        with torch.device("meta"):
            bare = _decoder(sizes)
        found = profile(
            bare,
            lambda it, samples: it(torch.empty(samples, sizes[-1], dtype=torch.long)),
            policy=resolve_policy("auto"),
            precision="bf16-mixed" if self._is_cuda else "32-true",
            micro_batch=tokens.shape[0],
            tokens=tokens.numel(),
        )
        dtype = "bf16" if self._is_cuda else "fp32"
        return Timed(label="decoder", dtype=dtype, work=found.total, seconds=ahead, backward_s=back)

    def memory_gbs(self) -> float:
        """Measure the bandwidth of a device copy, read plus write, in GB/s."""
        source = torch.ones(COPIED[self._device.type] // 4)
        target = torch.empty_like(source)
        return 2 * source.nbytes / 1e9 / self._typical(lambda: target.copy_(source))

    def optimizer_gbs(self) -> float:
        """Measure the bandwidth of AdamW in GB/s: 4 reads and 3 writes per parameter element."""
        parameters = [torch.ones(1 << (22 if self._is_cuda else 18)) for _ in range(8)]
        for it in parameters:
            it.grad = torch.ones_like(it)
        optimizer = torch.optim.AdamW(parameters)
        return 7 * sum(it.nbytes for it in parameters) / 1e9 / self._typical(optimizer.step)

    # -- Communication

    def collectives(self) -> list[TimedCollective]:
        """Time collectives of the ranks of a node, and of all ranks if there are several nodes."""
        mesh = self._mesh
        groups = {mesh.gather.size: (mesh.gather, mesh.reduce)}
        groups.setdefault(mesh.world.size, (mesh.world, mesh.world))
        return [
            it
            for size, (gather, reduce) in groups.items()
            if size > 1
            for nbytes in GATHERED[self._device.type]
            for it in self._collectives(gather, reduce, nbytes)
        ]

    def _collectives(
        self, gather: Collectives, reduce: Collectives, nbytes: int
    ) -> list[TimedCollective]:
        actions = _actions(gather, reduce, nbytes)
        seconds = self._typicals([_waits(it) for it in actions.values()], together=True)
        return [
            TimedCollective(kind=kind, ranks=gather.size, nbytes=nbytes, seconds=took)
            for kind, took in zip(actions, seconds, strict=True)
        ]

    def interference(self) -> dict[str, float]:
        """Measure the seconds that overlapped matmuls lose per second of a collective, by kind."""
        mesh = self._mesh
        if mesh.gather.size == 1:
            return {}
        kind, found = self._device.type, dict[str, float]()
        matrix = torch.randn(MATMULS[kind][-2], MATMULS[kind][-2])
        single = self._typical(lambda: torch.mm(matrix, matrix))
        actions = _actions(mesh.gather, mesh.reduce, GATHERED[kind][-1])
        del actions["all_to_all"]  # layers wait for it
        for name, action in actions.items():
            stream = mesh.gather_stream if name == "all_gather" else mesh.reduce_stream
            alone = self._typicals([_waits(action)], together=True)[0]
            times = math.ceil(2 * alone / single)

            def compute(times: int = times) -> None:
                for _ in range(times):
                    torch.mm(matrix, matrix)

            def both(
                stream: CommStream = stream,
                action: Callable[[], CollectiveHandle] = action,
                compute: Callable[[], None] = compute,
            ) -> None:
                handle = stream.issue(action)
                compute()
                handle.wait()

            computing, together = self._typicals([compute, both], together=True)
            found[name] = min(1.5, max(0.0, together - computing) / alone)
        return found

    # -- Repetitions

    def _typical(self, action: Callable[[], object]) -> float:
        return self._typicals([action])[0]

    def _typicals(
        self, actions: Sequence[Callable[[], object]], *, together: bool = False
    ) -> list[float]:
        """Typical seconds of actions run in turn; ``together``: all ranks run each equally often."""
        times = [list[float]() for _ in actions]
        self._mesh.user_fingerprints.call("probe")
        began = time.perf_counter()
        for repeat in count():
            for action, found in zip(actions, times, strict=True):
                if together:
                    self._mesh.user_fingerprints.call("probe")
                self._synchronize()
                begin = time.perf_counter()
                action()
                self._synchronize()
                found.append(time.perf_counter() - begin)
            is_late = time.perf_counter() - began > WINDOW_S
            is_over = repeat >= REPEATS if together else repeat > 2 and is_late
            if is_over:
                break
        kept = [found[1:] for found in times]
        for found in kept:
            half = len(found) // 2
            self.spreads.append(abs(_typical_of(found[:half]) / _typical_of(found[half:]) - 1))
        seconds = torch.tensor([*map(_typical_of, kept)], dtype=torch.double)
        self._mesh.world.all_reduce_(seconds, "max").wait()
        return seconds.tolist()

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


def _actions(
    gather: Collectives, reduce: Collectives, nbytes: int
) -> dict[str, Callable[[], CollectiveHandle]]:
    """Make functions that issue a collective on a buffer, by kind."""
    buffer = torch.ones(nbytes // 4 // gather.size * gather.size)
    shard = torch.empty(buffer.numel() // gather.size)
    leaving, arriving = (it.chunk(gather.size) for it in (buffer, torch.empty_like(buffer)))
    return {
        "all_gather": lambda: gather.all_gather_(buffer),
        "reduce_scatter": lambda: reduce.reduce_scatter(shard, buffer),
        "all_reduce": lambda: reduce.all_reduce_(buffer, "mean"),
        "all_to_all": lambda: gather.all_to_all(arriving, leaving),
    }


def _typical_of(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half.

    Of ranks that share processors, a repetition takes one time or its double: their median is
    either, their mean is what a run sees.
    """
    ordered, aside = sorted(seconds), len(seconds) // 4
    return fmean(ordered[aside : len(ordered) - aside])


def _waits(action: Callable[[], CollectiveHandle]) -> Callable[[], object]:
    return lambda: action().wait()


# -- Decoder from a tuple of sizes


def _decoder(sizes: _Sizes) -> Decoder:
    layers, width, heads, _, length = sizes
    dims = Dimensions(layers=layers, width=width, heads=heads, vocabulary=256, rope=False)
    return Decoder(dims, length)


def _tokens(sizes: _Sizes) -> torch.Tensor:
    return torch.randint(256, sizes[3:])
