"""Search: the settings of a run that fit on the machines, with their memory and time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import groupby
from typing import Any, Literal, TypeAlias

import torch
import yaml

from shardeddp.config import (
    ActivationCheckpointing,
    MixedPrecision,
    ModuleClasses,
    find_sharding,
    resolve_modules,
)
from shardeddp.errors import UsageError, first_three
from shardeddp.plan.hardware import GIB, Cluster
from shardeddp.plan.memory import GroupCost, MemoryPlan, memory_between_steps
from shardeddp.plan.sharding_strategy import (
    ShardingStrategy,
    ShardSize,
    shard_sizes,
)
from shardeddp.planner.axes import WHOLE, ModelAxes, names_of
from shardeddp.planner.calibration import Calibration
from shardeddp.planner.collectives import (
    Collective,
    broadcasts_of_step,
    collectives_of_step,
    exchanges_of_step,
)
from shardeddp.planner.cost import Step, StepSetting, Task
from shardeddp.planner.memory import OPTIMIZER_STATES, BufferMemory, Memory, Peak
from shardeddp.planner.source import Source
from shardeddp.planner.trace import SELECTIVE, PlannedPrecision, profile
from shardeddp.planner.work import RECOMPUTES, ModelProfile
from shardeddp.report import folded_name, human_bytes
from shardeddp.wrap import (
    AutoPolicy,
    ClassPolicy,
    NamePolicy,
    Policy,
    PredicatePolicy,
    SingleUnitPolicy,
    SizePolicy,
)
from shardeddp.wrap.flat_buffers import costs_of
from shardeddp.wrap.kept_operations import written_operations
from shardeddp.wrap.tree import function_path, import_path, imported

MEMORY_ERROR = 0.06
"""Relative error of the predicted peak; a plan fits only if the upper end of the interval fits."""
HOST_GBS = 20.0
"""Bandwidth in GB/s of an optimizer step on a rank's share of the host."""
PCIE_GBS = 20.0
"""Bandwidth in GB/s between a device and the host, of gradients, parameters and activations."""


OFFLOADS = ("none", "optimizer", "params")

Strategies: TypeAlias = Sequence[str | tuple[str, ShardingStrategy]]
"""Names of sharding strategies, or pairs of a name and a configured strategy."""


Profiles: TypeAlias = dict[tuple[str, int, int, int], ModelProfile]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One combination of settings."""

    strategy: str
    shard_size: int
    recompute: str
    offload: str
    micro_batch: int
    micro_batches: int
    precision: str
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    uneven_units: bool = False

    def yaml(
        self,
        cluster: Cluster,
        axes: ModelAxes = WHOLE,
        policy: Policy | None = None,
        mixed_precision: MixedPrecision | None = None,
        recomputation: ActivationCheckpointing | None = None,
    ) -> str:
        """Return the configuration of the Trainer with these settings.

        Tensor-parallel plan and experts of the axes are written if their size is above 1, the wrap
        policy if it is not the default one.
        """
        options: dict[str, Any] = {"sharding_strategy": self.strategy}
        notes = [f"# and DataLoader(batch_size={self.micro_batch}): samples of each rank"]
        try:
            options.update({} if policy is None else _written(policy))
        except LookupError:
            notes.append("# and auto_wrap_policy: as it was given, which has no name")
        if self.strategy == "hybrid_shard":
            options["shard_size"] = self.shard_size
        if self.tensor_parallel_size > 1:
            plan: Any = axes.tensor_plan
            options["tensor_parallel_size"] = self.tensor_parallel_size
            options["tensor_parallel_plan"] = "auto" if plan in (None, "auto") else dict(plan)
        if self.expert_parallel_size > 1:
            options["expert_parallel_size"] = self.expert_parallel_size
            experts = names_of(axes.experts)
            if experts is not None:
                options["experts"] = experts
            elif axes.experts is not None:
                notes.append("# and experts: as it was given, which has no name")
        dtypes = _written_dtypes(mixed_precision or MixedPrecision())
        param_dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(self.precision)
        if param_dtype:
            dtypes["param_dtype"] = param_dtype
        if dtypes:
            options["mixed_precision"] = (
                param_dtype if len(dtypes) == 1 and param_dtype else _made("MixedPrecision", dtypes)
            )
        if self.recompute != "none" and not isinstance(policy, SingleUnitPolicy):
            # Units are recomputed if nothing else is asked for.
            asked = recomputation or ActivationCheckpointing(modules=policy or "auto")
            try:
                options["activation_checkpointing"] = _recomputing(asked, self.recompute)
            except LookupError:
                notes.append("# and activation_checkpointing: as it was given, which has no name")
        for option in ("forward_prefetch", "backward_prefetch"):
            if vars(self)[option] != 1:
                options[option] = vars(self)[option]
        if self.uneven_units:
            options["uneven_units"] = True
        if self.offload != "none":
            options["cpu_offload"] = _made("CPUOffload", {self.offload: True})
        trainer: dict[str, Any] = {
            "num_nodes": cluster.num_nodes,
            "devices": cluster.ranks_per_node,
        }
        if self.micro_batches > 1:
            trainer["accumulate_grad_batches"] = self.micro_batches
        trainer["precision"] = "32-true" if param_dtype else self.precision
        trainer["strategy"] = _made("ShardedDP", options)
        return yaml.safe_dump({"trainer": trainer}, sort_keys=False) + "\n".join(notes)


def _written(policy: Policy) -> dict[str, Any]:
    """Return a wrap policy as an option in a configuration file; nothing for the default one.

    Raises:
        LookupError: It has no name that another process could find it by.
    """
    kind, fields = type(policy), vars(policy)
    if kind is AutoPolicy and fields == vars(AutoPolicy()):
        return {}
    if kind is SingleUnitPolicy:
        return {"auto_wrap_policy": None}
    if kind in (AutoPolicy, SizePolicy, NamePolicy):
        return {"auto_wrap_policy": _made(kind.__name__, fields)}
    if isinstance(policy, ClassPolicy):
        names = _names(policy.classes)
        return {"auto_wrap_policy": names[0] if len(names) == 1 else names}
    path = function_path(policy.predicate) if isinstance(policy, PredicatePolicy) else None
    if path is None:
        raise LookupError(policy)
    return {"auto_wrap_policy": path}


def _recomputing(options: ActivationCheckpointing, recompute: str) -> str | dict[str, Any]:
    """Return activation checkpointing as a configuration file has it.

    Raises:
        LookupError: Its modules or operations have no name that another process could find.
    """
    chosen = _written(resolve_modules(options.modules))
    fields: dict[str, Any] = {"modules": chosen["auto_wrap_policy"]} if chosen else {}
    if options.every > 1:
        fields["every"] = options.every
    if recompute == "selective":
        fields["save_ops"] = written_operations(options.save_ops or SELECTIVE)
    if options.cpu_offload:
        fields["cpu_offload"] = True
    return _made("ActivationCheckpointing", fields) if fields else "auto"


def _names(classes: ModuleClasses) -> list[str]:
    """Return classes of modules as a configuration file has them."""
    # A class that cannot be imported is found in the model by its own name.
    return [
        it if isinstance(it, str) else path if imported(path) is it else it.__name__
        for it in classes
        for path in ["" if isinstance(it, str) else import_path(it)]
    ]


def _written_dtypes(options: MixedPrecision) -> dict[str, Any]:
    """Return the fields of mixed precision that differ from their defaults, as in a file."""
    changed = {it.name: vars(options)[it.name] for it in fields(options)}
    changed = {name: it for name, it in changed.items() if it != vars(MixedPrecision())[name]}
    return {
        name: str(it).removeprefix("torch.")
        if isinstance(it, torch.dtype)
        else _names(it)
        if name == "keep_fp32"
        else it
        for name, it in changed.items()
    }


def _made(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of the package as a configuration file has it."""
    return {"class_path": f"shardeddp.{name}", "init_args": arguments}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Choice with its predicted memory and time."""

    choice: Choice
    memory: Memory
    peak: Peak
    """Moment of a step that ``memory`` is of."""
    step: Step
    relative_error: float
    """Relative error of the step time."""
    task: Task
    """Input of the cost model for the step."""
    tokens: int
    """Tokens of all ranks per optimizer step; samples if these are no sequences."""
    counted: Literal["tokens", "samples"]
    model_flops: float
    """Model FLOPs of a rank per optimizer step, without recomputation."""
    peak_flops: float
    fits: bool
    optimizer_states: int = OPTIMIZER_STATES
    """Optimizer states per trained parameter element."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens, or samples, per second of all ranks."""
        return self.tokens / self.step.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, as a fraction of the dense peak."""
        return self.model_flops / self.step.total / self.peak_flops

    @property
    def memory_by_unit(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes of ``memory`` by kind and unit; what belongs to no unit has another name."""
        return self.peak.by_unit(
            optimizer_states=self.optimizer_states,
            offload_optimizer=self.choice.offload == "optimizer",
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain figures: bytes, seconds and intervals."""
        seconds, peak = self.step.total, self.memory.peak
        return {
            **vars(self.choice),
            "fits": self.fits,
            "memory_nbytes": {**vars(self.memory), "peak": peak, "reserved": self.memory.reserved},
            "memory_interval": [round(peak * (1 + sign * MEMORY_ERROR)) for sign in (-1, 1)],
            "step_seconds": {**vars(self.step), "total": seconds},
            "step_interval": [max(0.0, seconds * (1 + s * self.relative_error)) for s in (-1, 1)],
            f"{self.counted}_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "optimizer_states": self.optimizer_states,
        }


@dataclass(kw_only=True)
class Planner:
    """Planner of one model on one cluster; see :func:`make_plan` for the arguments."""

    source: Source
    length: int
    policy: Policy
    calibration: Calibration
    cluster: Cluster
    global_batch: int | None
    strategies: Strategies
    precisions: Sequence[str]
    recomputes: Sequence[str]
    offloads: Sequence[str]
    micro_batches: Sequence[int]
    axes: Sequence[ModelAxes] = (WHOLE,)
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    mixed_precision: MixedPrecision | None = None
    uneven_units: bool = False
    recomputation: ActivationCheckpointing | None = None
    optimizer_states: int = OPTIMIZER_STATES
    profiles: Profiles = field(default_factory=dict[tuple[str, int, int, int], ModelProfile])
    """Work of micro-batches that is known, by precision, samples and sizes of the axes."""

    @property
    def numel(self) -> int:
        """Number of the model's parameters; of one rank's part if no whole model was planned."""
        whole = [it for (*_, split, experts), it in self.profiles.items() if split * experts == 1]
        units = (whole or [*self.profiles.values()])[0].units
        return sum(it.parameter.numel() for unit in units for it in unit.parameters)

    @property
    def units(self) -> list[str]:
        """Names of the units, the root first; neighbours with parameters of equal shapes share one."""
        units = next(iter(self.profiles.values())).units
        equal = groupby(units, lambda unit: [it.parameter.shape for it in unit.parameters])
        return [folded_name([unit.label for unit in group]) for _, group in equal]

    @property
    def is_routed(self) -> bool:
        """True if a router is assumed to choose experts evenly."""
        return any(it.is_routed for it in self.profiles.values())

    @property
    def unplanned(self) -> list[str]:
        """Settings that the plan does not know."""
        traced = next(iter(self.profiles.values()))
        names, leaking = traced.others_recomputed, traced.leaking
        found = list[str]()
        if names:
            found.append(
                f"activation_checkpointing of modules that are no units ({first_three(names)})"
            )
        if leaking and {*self.recomputes} != {"none"}:
            found.append(
                f"further gathers of recomputed units for tensors with a graph that they leave in "
                f"attributes or arguments ({first_three(leaking)})"
            )
        return found

    def profile(self, precision: str, micro_batch: int, axes: ModelAxes = WHOLE) -> ModelProfile:
        """Return the work of a micro-batch.

        Extrapolated from traces of one and two samples if these tell that of the largest one. Else
        traced itself: its work is not affine in samples (a loss over all pairs of samples), or it
        has too few tokens to spread evenly over experts.
        """
        key = precision, micro_batch, axes.tensor_size, axes.expert_size
        if key not in self.profiles:
            self.profiles[key] = (
                self.profile(precision, 1, axes).extrapolate(
                    self.profile(precision, 2, axes), micro_batch
                )
                if micro_batch > 2 and self._is_affine(precision, micro_batch, axes)
                else self._trace(precision, micro_batch, axes)
            )
        return self.profiles[key]

    def _is_affine(self, precision: str, micro_batch: int, axes: ModelAxes) -> bool:
        """Return whether traces of one and two samples tell those of a micro-batch."""
        if self.source.is_affine:
            return True
        most = max(self.micro_batches)
        if micro_batch >= most:
            return False
        one, two, largest = (self.profile(precision, it, axes) for it in (1, 2, most))
        every = (one, two, largest)
        if any(it.is_routed for it in every) and not all(it.is_even for it in every):
            return False
        return two.is_like(one) and one.extrapolate(two, most).is_close(largest)

    def _trace(self, precision: str, micro_batch: int, axes: ModelAxes) -> ModelProfile:
        if axes.size > 1:
            self.profile(precision, micro_batch)  # for errors of the whole model
        with torch.device("meta"):
            module = self.source.build()
        # Lightning casts the batch, the strategy the inputs of modules.
        dtype = self._dtypes(precision).stored
        return profile(
            module,
            lambda module, samples: self.source.step(module, samples, dtype),
            policy=self.policy,
            precision=precision,
            micro_batch=micro_batch,
            tokens=micro_batch * self.source.tokens_of(module, self.length),
            axes=axes,
            mixed_precision=self.mixed_precision,
            recomputation=self.recomputation,
        )

    def _dtypes(self, precision: str) -> PlannedPrecision:
        return PlannedPrecision.of(precision, self.mixed_precision)

    def plans(self) -> list[Planned]:
        """Plan all combinations, sorted: fitting ones by tokens per second, then others by peak."""
        for option, values, known in (
            ("recomputes", self.recomputes, RECOMPUTES),
            ("offloads", self.offloads, OFFLOADS),
        ):
            for value in set(values) - set(known):
                raise UsageError(
                    f"{option}: {value!r} is not known; expected some of {', '.join(known)}"
                )
        if "none" not in self.offloads:
            for axes in self.axes:
                if axes.size > 1:
                    raise UsageError(
                        f"offloads: {', '.join(self.offloads)} do not go with {axes.option} yet: add "
                        f"none"
                    )
        for size in self.micro_batches:
            if size < 1:
                raise UsageError(f"micro_batches: {size} is no number of samples")
        found = [
            each
            for axes in self.axes
            for precision in self.precisions
            for strategy, sharding in _shardings(self.strategies, self.cluster, axes.tensor_size)
            for each in self._plans_of(strategy, sharding, precision, axes)
        ]
        if not found:
            ranks = sorted({self.cluster.count // it.tensor_size for it in self.axes})
            raise UsageError(
                f"global_batch={self.global_batch}: expected a multiple of a micro-batch of "
                f"{', '.join(map(str, self.micro_batches))} samples on each of "
                f"{' or '.join(map(str, ranks))} ranks"
            )
        return sorted(
            found,
            key=lambda it: (not it.fits, -it.tokens_per_second if it.fits else it.memory.peak),
        )

    def _plans_of(
        self, strategy: str, sharding: ShardingStrategy, precision: str, axes: ModelAxes
    ) -> Iterator[Planned]:
        cluster = self.cluster
        topology = sharding.topology(
            cluster.num_nodes, cluster.ranks_per_node, tensor_size=axes.tensor_size
        )
        traced = self.profile(precision, 1, axes)
        specs, usages = traced.units, traced.usages
        if self.uneven_units:  # ranks do not know which unit is the last
            usages = [replace(it, ends_forward=False) for it in usages]

        @cache
        def costs(on_host: bool) -> list[list[GroupCost]]:
            # Equal units share one list, by which plans of memory compute them once.
            made = {it: costs_of(specs[it], topology, on_host=on_host) for it in {*traced.alike}}
            return [made[it] for it in traced.alike]

        trained = sum(it.slice_nbytes for unit in costs(False) for it in unit if it.trainable)
        # The engine refuses others.
        offloads = [it for it in self.offloads if it == "none" or axes.size == 1]

        # Equal inner units issue equal collectives: those of one are planned, and counted.
        alike = Counter(zip(traced.alike[1:], usages[1:], strict=True))

        @cache
        def transfers(count: int) -> list[Collective]:
            units = [costs(False)[it] for it in (0, *(place for place, _ in alike))]
            uses = [usages[0], *(usage for _, usage in alike)]
            numbers = [1, *alike.values()]
            found = [
                replace(it, times=it.times * numbers[it.unit])
                for it in collectives_of_step(units, sharding, count, uses)
            ]
            ranks, stride = topology.data_size, axes.tensor_size
            return combined([*found, *broadcasts_of_step(traced.broadcast_nbytes, ranks, stride)])

        @cache
        def resting(offload: str) -> MemoryPlan:
            return memory_between_steps(
                costs(offload == "params"),
                sharding,
                states_per_element=self.optimizer_states,
                offload_optimizer=offload == "optimizer",
            )

        @cache
        def buffers(on_host: bool, accumulates: bool) -> BufferMemory:
            return BufferMemory.of(
                costs(on_host),
                traced.visits,
                sharding,
                has_backward=traced.has_backward,
                prefetch=self._prefetched(),
                accumulates=accumulates,
                keeps_last=not self.uneven_units,
            )

        for micro_batch in self.micro_batches:
            samples = micro_batch * topology.data_size
            count, rest = divmod(self.global_batch or samples, samples)
            if rest or not count:
                continue
            work = self.profile(precision, micro_batch, axes)
            for recompute in self.recomputes:
                exchanges = exchanges_of_step(
                    work.exchanges,
                    axes.size,
                    count,
                    recomputed=[it and recompute != "none" for it in work.recomputed],
                )
                issued = [*transfers(count), *combined(exchanges)]
                peaks = {
                    on_host: Peak.of(work, recompute, buffers(on_host, count > 1))
                    for on_host in {it == "params" for it in offloads}
                }
                for offload in offloads:
                    choice = Choice(
                        strategy=strategy,
                        shard_size=topology.shard_size,
                        recompute=recompute,
                        offload=offload,
                        micro_batch=micro_batch,
                        micro_batches=count,
                        precision=precision,
                        tensor_parallel_size=axes.tensor_size,
                        expert_parallel_size=axes.expert_size,
                        forward_prefetch=self.forward_prefetch,
                        backward_prefetch=self.backward_prefetch,
                        uneven_units=self.uneven_units,
                    )
                    peak = peaks[offload == "params"]
                    memory = peak.memory(resting(offload))
                    yield self._timed(choice, peak, memory, work, issued, trained)

    def _prefetched(self) -> tuple[int, int]:
        """Return the numbers of units gathered ahead, in forward and in backward."""
        return (0, 0) if self.uneven_units else (self.forward_prefetch, self.backward_prefetch)

    def _timed(
        self,
        choice: Choice,
        peak: Peak,
        memory: Memory,
        work: ModelProfile,
        collectives: Sequence[Collective],
        trained_nbytes: int,
    ) -> Planned:
        """Predict the time of one choice; a host step includes transfers to and from the host."""
        ahead, back = self._prefetched()
        on_host, is_fp32 = choice.offload != "none", self._dtypes(choice.precision).is_fp32
        task = Task(
            work=work.total,
            inner=work.inner,
            collectives=collectives,
            setting=StepSetting(
                micro_batches=choice.micro_batches,
                recomputes=work.recomputed_shares[choice.recompute],
                copies_s=2 * sum(work.saved[choice.recompute].on_host) / (PCIE_GBS * 1e9),
                trained=work.trained_shares,
                fp32=is_fp32,
                optimizer_nbytes=(2 * self.optimizer_states + 3) * trained_nbytes
                + on_host * 2 * trained_nbytes * HOST_GBS / PCIE_GBS,
                host_gbs=HOST_GBS if on_host else None,
                shortage=memory.shortage(self.cluster.gpu),
                forward_prefetch=ahead,
                backward_prefetch=back,
            ),
        )
        step = task.time(self.cluster, self.calibration.constants)
        size = choice.tensor_parallel_size
        whole = self.profile(choice.precision, choice.micro_batch)  # ranks repeat some work
        flops = whole.model_flops / size * choice.micro_batches
        gpu = self.cluster.gpu
        return Planned(
            choice=choice,
            memory=memory,
            peak=peak,
            step=step,
            relative_error=self.calibration.relative_error(step),
            task=task,
            tokens=work.tokens * choice.micro_batches * (self.cluster.count // size),
            counted="samples" if work.tokens == choice.micro_batch else "tokens",
            model_flops=flops,
            peak_flops=(gpu.fp32_tflops if is_fp32 else gpu.bf16_tflops) * 1e12,
            fits=memory.peak * (1 + MEMORY_ERROR) <= gpu.memory_gb * 1e9,
            optimizer_states=self.optimizer_states,
        )


def combined(collectives: Sequence[Collective]) -> list[Collective]:
    """Merge equal collectives of different units into one with the sum of their ``times``."""
    counts: defaultdict[Collective, int] = defaultdict(int)
    for it in collectives:
        counts[replace(it, unit=0, times=1)] += it.times
    return [replace(it, times=times) for it, times in counts.items()]


def _shardings(
    strategies: Strategies, cluster: Cluster, tensor_size: int
) -> Iterator[tuple[str, ShardingStrategy]]:
    """Yield configured strategies unchanged, and named ones with all useful shard sizes."""
    node, count = cluster.ranks_per_node // tensor_size, cluster.count // tensor_size
    names = {it.lower() for it in strategies if isinstance(it, str)}
    for it in strategies:
        if isinstance(it, tuple):
            yield it
            continue
        name = it.lower()
        sharding = find_sharding(name)
        if sharding.shard_size is not ShardSize.NODE:
            yield name, sharding
            continue
        for size in shard_sizes(cluster.num_nodes, node):
            if size < count or "full_shard" not in names:  # it is that over all ranks
                yield name, replace(sharding, shard_size=size)


def why(best: Planned, others: Sequence[Planned], cluster: Cluster) -> list[str]:
    """Explain the best plan: largest parts of its step, and losses of plans with one change."""
    parts: Mapping[str, float] = vars(best.step)
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    spent = ", ".join(f"{100 * parts[name] / best.step.total:.0f} % {name}" for name in largest)
    lines = [f"A step is {spent}."]
    memory = cluster.gpu.memory_gb * 1e9
    room = (memory - best.memory.peak * (1 + (0 if best.fits else MEMORY_ERROR))) / GIB
    lines.append(
        f"It leaves {room:.1f} GiB of {memory / GIB:.1f} GiB free."
        if room >= 0
        else f"It needs {-room:.1f} GiB more than {memory / GIB:.1f} GiB."
    )
    if best.fits and best.memory.shortage(cluster.gpu):
        lines.append(
            f"Its allocator would reserve {best.memory.reserved / GIB:.1f} GiB to keep its blocks. It "
            f"releases some and reserves them again in every step, which is slower: set "
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    size, split = best.choice.shard_size, best.choice.tensor_parallel_size
    node, count = cluster.ranks_per_node // split, cluster.count // split
    layers = [it for it in best.task.collectives if it.phase == "layer"]
    sent = human_bytes(round(sum(it.sent_nbytes * it.times for it in layers)))
    if split > 1:
        lines.append(
            f"Each layer is split over {split} neighbouring ranks, which exchange {sent} "
            f"of activations in a step."
        )
    if (experts := best.choice.expert_parallel_size) > 1:
        lines.append(
            f"Every {experts} neighbouring ranks divide the experts among them, and send {sent} of tokens "
            f"in a step."
        )
    if 1 < size < count:
        among = (
            "of one node" if size <= node else f"of {size // node} nodes that are near each other"
        )
        lines.append(
            f"Shard groups are {size} ranks {among}; {count // size} of them are replicas."
        )
    names = ("tensor_parallel_size", "expert_parallel_size", "strategy", "shard_size")
    together = ({"strategy", "shard_size"}, {"tensor_parallel_size", "shard_size"})
    names += ("recompute", "offload", "micro_batch", "precision")
    mine = vars(best.choice)
    for other in others:
        differs = [name for name in names if vars(other.choice)[name] != mine[name]]
        if len(differs) == 1 or set(differs) in together:
            lines.append(_loss_of(other, differs, best, cluster))
    return lines[:12]


def _loss_of(other: Planned, differs: Sequence[str], best: Planned, cluster: Cluster) -> str:
    """Return the line about a plan that differs from the best one in one choice."""
    change = " ".join(str(vars(other.choice)[name]) for name in differs)
    if not other.fits:
        over = other.memory.peak * (1 + MEMORY_ERROR) - cluster.gpu.memory_gb * 1e9
        verdict = f"may need {over / GIB:.1f} GiB more than there is"
    else:
        slower = best.tokens_per_second / other.tokens_per_second - 1
        parts, theirs = vars(best.step), vars(other.step)
        cause = max(
            parts,
            key=lambda it: theirs[it] / other.tokens - parts[it] / best.tokens,
        )
        verdict = f"{100 * slower:.0f} % slower, most by {cause}"
    return f"{differs[0]} {change}: {verdict}."
