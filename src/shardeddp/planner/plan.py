"""Plan of a model on a cluster: settings that fit, the best of them, and the reasons."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, cast

from torch import nn

from shardeddp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingLike,
    DTypeLike,
    MixedPrecision,
    check_size,
    resolve_activation_checkpointing,
    resolve_mixed_precision,
    resolve_prefetch,
)
from shardeddp.errors import ConfigurationError, UsageError, first_three
from shardeddp.plan.hardware import GPU, Cluster, find_gpu
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES, ShardingStrategy
from shardeddp.planner.axes import WHOLE, ModelAxes
from shardeddp.planner.calibration import Calibration
from shardeddp.planner.calibration import calibrate as calibration_of
from shardeddp.planner.memory import OPTIMIZER_STATES
from shardeddp.planner.search import RECOMPUTES, Planned, Planner, Profiles, Strategies, why
from shardeddp.planner.source import Source, of_dimensions, of_instance, of_module
from shardeddp.planner.transformer import SPLITS, Dimensions
from shardeddp.planner.view import picture, plan_lines
from shardeddp.wrap import AutoPolicy, Policy, PolicyLike, resolve_policy
from shardeddp.wrap.experts import resolve_experts
from shardeddp.wrap.tensor_plan import TensorPlan, check_plan

Model: TypeAlias = nn.Module | type[nn.Module] | str | Mapping[str, Any] | Dimensions | Source
"""Types that :func:`make_plan` accepts as a model."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of one model on a cluster, with predicted memory and time; ``str()`` shows them."""

    name: str
    """Name of the model."""
    cluster: Cluster
    plans: Sequence[Planned]
    """All combinations, the best first."""
    calibrated: Sequence[str] = ()
    """Report lines of the calibration: files used, and their figures."""
    policy: Policy | None = None
    """Wrap policy of the model; None: the default one."""
    mixed_precision: MixedPrecision | None = None
    """Dtypes of gathers, reductions and casts; None: those of the precision."""
    axes: ModelAxes = WHOLE
    """Tensor-parallel plan and experts; the sizes are in each combination."""
    splits: str = ""
    """Note on the split layers of the planner's own decoder; empty for other models."""
    units: Sequence[str] = ()
    """Names of the units, the root first; neighbours with parameters of equal shapes share one."""
    recomputation: ActivationCheckpointing | None = None
    """Recomputed modules, and what selective checkpointing keeps; None: units, matmuls, attention."""
    unplanned: Sequence[str] = ()
    """Settings that the plan does not know."""
    is_routed: bool = False
    """True if tokens are assumed to be spread evenly over experts."""

    @property
    def best(self) -> Planned:
        """Fastest combination that fits; if none fits, the one with the lowest peak."""
        return self.plans[0]

    @property
    def fits(self) -> bool:
        """True if any combination fits."""
        return self.best.fits

    @property
    def yaml(self) -> str:
        """Configuration of the Trainer for the best combination."""
        return self.best.choice.yaml(
            self.cluster, self.axes, self.policy, self.mixed_precision, self.recomputation
        )

    def why(self) -> list[str]:
        """Return lines that explain the best combination."""
        return why(self.best, self.plans[1:], self.cluster)

    def lines(self, top: int = 10, width: int = 100) -> list[str]:
        """Format a table of the best combinations.

        Args:
            top: Number of rows.
            width: Width of the terminal in characters.
        """
        even = "Tokens are taken to be spread evenly over experts."
        units = f"Units: {first_three(self.units)}."
        states = self.best.optimizer_states
        adam = ", those of AdamW" if states == OPTIMIZER_STATES else ""
        optimizer = f"Optimizer states: {states} of each trained parameter{adam}."
        notes = {
            "TP": self.splits,
            "": f"{units} {optimizer} {even if self.is_routed else ''}",
            "unplanned": f"The plan does not know {', '.join(self.unplanned)}: memory and time are "
            f"those without."
            if self.unplanned
            else "",
        }
        return plan_lines(self.plans, self.cluster, self.name, self.calibrated, notes, top, width)

    def html(self) -> str:
        """Make an HTML page with the memory and time of the best combination."""
        return picture(self.best, self.cluster, self.name, self.yaml)

    def as_json(self, *, why: bool = False) -> str:
        """Write all combinations as JSON: bytes, seconds and their intervals.

        With ``why``, the best one has the lines that explain it.
        """
        made = [it.as_json() for it in self.plans]
        if why:
            made[0]["why"] = self.why()
        return json.dumps(made, indent=2)

    def __str__(self) -> str:
        """Format the table, the explanation, and the configuration to copy if any fits."""
        lines = [*self.lines(), "", *self.why()]
        return "\n".join([*lines, "", self.yaml] if self.fits else lines)


def make_plan(
    model: Model,
    *,
    gpu: str | None = None,
    gpus: int = 8,
    per_node: int = 8,
    network_gbits: float | None = None,
    gpu_figures: Mapping[str, float | None] | None = None,
    arguments: Mapping[str, Any] | None = None,
    inputs: Sequence[str] = (),
    batch: Callable[[int], Any] | None = None,
    length: int = 2048,
    global_batch: int | None = None,
    strategies: Strategies = tuple(SHARDING_STRATEGIES),
    precisions: Sequence[str] | None = None,
    recomputes: Sequence[str] = RECOMPUTES,
    offloads: Sequence[str] = ("none",),
    micro_batches: Sequence[int] = (1, 2, 4, 8, 16),
    auto_wrap_policy: PolicyLike = "auto",
    tensor_parallel_sizes: Sequence[int] = (1,),
    tensor_parallel_plan: TensorPlan | None = None,
    expert_parallel_sizes: Sequence[int] = (1,),
    experts: PolicyLike = None,
    forward_prefetch: int = 1,
    backward_prefetch: int = 1,
    mixed_precision: MixedPrecision | Mapping[str, Any] | DTypeLike = None,
    uneven_units: bool = False,
    activation_checkpointing: ActivationCheckpointingLike = False,
    optimizer_states: int = OPTIMIZER_STATES,
    calibrate: Sequence[str | Path] = (),
) -> Plan:
    """Plan an unmodified model: settings that fit on a cluster, their predicted time and memory.

    No weights are loaded and nothing runs: training steps of one sample, of two and of the largest
    micro-batch are traced on tensors that have shapes and no values. Routers are assumed to choose experts evenly.

    Args:
        model: LightningModule (copied without its weights, not changed), its class or import path,
            or a YAML file of LightningCLI; or the ``config`` of a transformers model as a mapping
            (``config.to_dict()``), or dimensions.
        gpu: Name of the GPU, one of those in ``shardeddp.plan.hardware``; None: the device of
            ``calibrate``, else H100-80.
        gpus: Total number of GPUs, one rank each.
        per_node: Number of GPUs per node.
        network_gbits: Inter-node bandwidth per GPU in Gbit/s; None: unknown, a usual value.
        gpu_figures: Figures of a GPU that is not listed: ``bf16_tflops``, ``memory_gb`` (10**9
            bytes), ``memory_tbs`` (TB/s) and ``link_gbs`` (GB/s inside a node, one direction).
        arguments: Constructor arguments of a class or import path.
        inputs: Dtypes and sizes of a batch's tensors, such as ``int64:B,S``; several make a tuple.
            Empty: ``batch``, or the module's ``example_input_array``.
        batch: Function of the number of samples that returns a batch; overrides ``inputs``.
        length: Tokens per sample, the value of ``S``.
        global_batch: Samples per optimizer step over all ranks; None: one micro-batch per rank.
        strategies: Names of sharding strategies, each planned with all useful shard sizes; or pairs
            of a name and a configured strategy.
        precisions: Values of the Trainer's ``precision``, or ``bf16`` for
            ``MixedPrecision(param_dtype="bfloat16")``. None: ``bf16-mixed``, or ``16-mixed`` if the
            GPU has no bfloat16.
        recomputes: ``none``, ``selective`` (keeps matmuls and attention), ``full``.
        offloads: ``none``, ``optimizer``, ``params``.
        micro_batches: Samples per forward of a rank, to compare.
        auto_wrap_policy: Wrap policy, see :class:`shardeddp.ShardedDP`.
        tensor_parallel_sizes: Tensor-parallel sizes to compare. The engine's own code splits the
            layers, and one rank's part of the step is traced.
        tensor_parallel_plan: Plan as in :class:`shardeddp.ShardedDP`, without styles of torch;
            ``auto`` also works for configs of transformers and for dimensions. None: ``auto`` for
            these two.
        expert_parallel_sizes: Numbers of ranks that divide the experts, to compare. In each plan,
            this or the tensor-parallel size is 1.
        experts: Modules of experts, see :class:`shardeddp.ShardedDP`.
        forward_prefetch: Number of units gathered ahead of the current one in forward; 0: none.
        backward_prefetch: Number of units gathered ahead of the current one in backward; 0: none.
        mixed_precision: Dtypes as in :class:`shardeddp.ShardedDP`; its ``param_dtype`` is that of
            ``bf16`` and ``fp16`` among ``precisions``.
        uneven_units: Option of :class:`shardeddp.ShardedDP`. All ranks are assumed to use the same
            units; without prefetches, compute waits for each gather.
        activation_checkpointing: Modules that ``selective`` and ``full`` recompute, and operations
            that ``selective`` keeps, as in :class:`shardeddp.ShardedDP`. False: units, and
            matmuls and attention.
        optimizer_states: Optimizer states of a parameter's size, per trained parameter: 2 for AdamW,
            3 with ``amsgrad``, 1 for SGD with momentum, 0 for SGD without.
        calibrate: Files of ``shardeddp probe`` and of ``StepMonitor(record=...)``; their figures
            replace those fitted to published runs.

    Raises:
        UsageError: The GPU is unknown or lacks a precision, an option has an invalid value, or a
            size does not divide layers or experts.
        ConfigurationError: The model cannot be built, or its step fails without data and values.
    """
    inputs = _several("inputs", inputs, str, is_compared=False)
    calibrate = _several("calibrate", calibrate, (str, Path), is_compared=False)
    micro_batches = _several("micro_batches", micro_batches, int)
    tensor_parallel_sizes = _several("tensor_parallel_sizes", tensor_parallel_sizes, int)
    expert_parallel_sizes = _several("expert_parallel_sizes", expert_parallel_sizes, int)
    strategies = _several("strategies", strategies, str, pairs=True)
    recomputes = _several("recomputes", recomputes, str)
    offloads = _several("offloads", offloads, str)
    if precisions is not None:
        precisions = _several("precisions", precisions, str)
    _check_values(gpu=gpu, gpu_figures=gpu_figures, arguments=arguments, batch=batch)
    calibration = calibration_of([*map(Path, calibrate)], gpu, network_gbits)
    cluster = _cluster(calibration, gpu, gpu_figures or {}, gpus, per_node)
    source = _source(model, arguments or {}, inputs, batch, length)
    try:
        check_size("length", length)
        check_size("optimizer_states", optimizer_states, least=0)
        if global_batch is not None:
            check_size("global_batch", global_batch)
        _check_sizes(tensor_parallel_sizes, expert_parallel_sizes, cluster)
        asked = check_plan(tensor_parallel_plan, max(tensor_parallel_sizes, default=1))
        chosen = resolve_experts(experts, max(expert_parallel_sizes, default=1))
        ahead = resolve_prefetch("forward_prefetch", forward_prefetch)
        back = resolve_prefetch("backward_prefetch", backward_prefetch)
        recomputation = resolve_activation_checkpointing(activation_checkpointing)
        dtypes = resolve_mixed_precision(mixed_precision)
    except ConfigurationError as error:
        raise UsageError(str(error)) from error
    of_source = source.tensor_plan if asked in (None, "auto") else None
    traced = ModelAxes(tensor_plan=of_source or asked, experts=chosen)
    policy = resolve_policy(auto_wrap_policy)
    is_usual = (type(policy), vars(policy)) == (AutoPolicy, vars(AutoPolicy()))
    is_usual = is_usual and recomputation is None and dtypes is None and chosen is None
    is_usual = is_usual and asked in (None, "auto") and source.dimensions is not None
    planner = Planner(
        source=source,
        length=length,
        policy=policy,
        calibration=calibration,
        cluster=cluster,
        global_batch=global_batch,
        strategies=strategies,
        precisions=_precisions(precisions, cluster.gpu),
        recomputes=recomputes,
        offloads=offloads,
        micro_batches=micro_batches,
        axes=[
            replace(traced, tensor_size=split, expert_size=of)
            for split in tensor_parallel_sizes
            for of in expert_parallel_sizes
            if split == 1 or of == 1
        ],
        forward_prefetch=ahead,
        backward_prefetch=back,
        mixed_precision=dtypes,
        uneven_units=uneven_units,
        recomputation=recomputation,
        optimizer_states=optimizer_states,
        profiles=_store_of(source.dimensions, length) if is_usual else {},
    )
    plans = planner.plans()
    return Plan(
        name=f"{source.name} ({planner.numel:,} parameters)",
        cluster=cluster,
        plans=plans,
        calibrated=calibration.lines,
        policy=planner.policy,
        units=planner.units,
        mixed_precision=dtypes,
        recomputation=recomputation,
        unplanned=planner.unplanned,
        axes=ModelAxes(tensor_plan="auto" if of_source else asked, experts=chosen),
        splits=SPLITS if of_source else "",
        is_routed=planner.is_routed,
    )


@lru_cache(maxsize=2)
def _store_of(dims: Dimensions | None, length: int) -> Profiles:
    """Return the store of what is traced of a decoder with the usual options, empty at first.

    Plans of the same decoder for other clusters find it there.
    """
    return {}


def _several(
    option: str,
    given: Any,
    kind: type | tuple[type, ...],
    *,
    pairs: bool = False,
    is_compared: bool = True,
) -> Sequence[Any]:
    """Return the values of an option; a single value counts as a list of it.

    Options to compare have at least one value, and equal ones count once. With ``pairs``, a tuple
    of a name and a sharding strategy is a value as well.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping))
    values = [*cast("Iterable[Any]", given)] if is_list else [given]
    for value in values:
        is_pair = isinstance(value, tuple) and [*map(type, cast("tuple[Any, ...]", value))] == [
            str,
            ShardingStrategy,
        ]
        if not (pairs and is_pair) and (not isinstance(value, kinds) or isinstance(value, bool)):
            names = " or ".join(it.__name__ for it in kinds)
            raise UsageError(f"expected {option} to be {names}, one or several, found {value!r}")
    if not values and is_compared:
        raise UsageError(f"expected at least one value of {option}, found none")
    return [*dict.fromkeys(values)] if is_compared else values


def _check_values(*, gpu: object, gpu_figures: object, arguments: object, batch: object) -> None:
    """Refuse options of other types; None stands for none."""
    names = gpu_figures if isinstance(gpu_figures, Mapping) else (None,)
    has_names = all(isinstance(it, str) for it in cast("Iterable[Any]", names))
    for option, found, is_right, wanted in (
        ("gpu", gpu, isinstance(gpu, str), "the name of a GPU"),
        ("gpu_figures", gpu_figures, has_names, "figures by name"),
        ("arguments", arguments, isinstance(arguments, Mapping), "arguments by name"),
        ("batch", batch, callable(batch), "a function of the number of samples"),
    ):
        if found is not None and not is_right:
            raise UsageError(f"expected {option} to be {wanted}, found {found!r}")


def _cluster(
    calibration: Calibration,
    gpu: str | None,
    gpu_figures: Mapping[str, float | None],
    gpus: int,
    per_node: int,
) -> Cluster:
    """Return the cluster of a plan: figures that are given come before measured ones."""
    name = calibration.device.name if calibration.device else "H100-80" if gpu is None else gpu
    given = {key: value for key, value in gpu_figures.items() if value is not None}
    alone = {"link_gbs": 1.0} if calibration.figures and gpus == 1 else {}  # not used
    return Cluster(
        gpu=find_gpu(name, **{**alone, **calibration.figures, **given}),
        count=gpus,
        per_node=per_node,
        network_gbits=calibration.network_gbits,
    )


def _check_sizes(
    tensor_sizes: Sequence[int], expert_sizes: Sequence[int], cluster: Cluster
) -> None:
    """Refuse sizes that do not divide the ranks, or that have no combination to plan."""
    nodes, per_node = cluster.num_nodes, cluster.ranks_per_node
    for size in tensor_sizes:
        check_size("tensor_parallel_sizes", size)
        SHARDING_STRATEGIES["no_shard"].topology(nodes, per_node, tensor_size=size)
    for size in expert_sizes:
        check_size("expert_parallel_sizes", size)
        SHARDING_STRATEGIES["no_shard"].topology(nodes, per_node, expert_size=size)
    if not any(split == 1 or of == 1 for split in tensor_sizes for of in expert_sizes):
        raise UsageError(
            "tensor_parallel_size and expert_parallel_size above 1 do not work together yet: add 1 to "
            "the sizes of one"
        )


def _precisions(wanted: Sequence[str] | None, gpu: GPU) -> Sequence[str]:
    """Return the precisions of a plan; raise UsageError if the GPU does not support one."""
    if gpu.has_bf16:
        return wanted or ["bf16-mixed"]
    if missing := [name for name in wanted or () if name.startswith("bf16")]:
        raise UsageError(
            f"precision {missing[0]!r}: {gpu.name} has no bfloat16; '16-mixed' and '16-true' compute "
            f"in float16, '32-true' in float32"
        )
    return wanted or ["16-mixed"]


def _source(
    model: Model,
    arguments: Mapping[str, Any],
    inputs: Sequence[str],
    batch: Callable[[int], Any] | None,
    length: int,
) -> Source:
    if arguments and not isinstance(model, (str, type)):
        raise UsageError(
            f"arguments={dict(arguments)!r} are those of a constructor: expected a class or an import "
            f"path beside them, found {type(model).__name__}"
        )
    if (inputs or batch) and isinstance(model, (Source, Dimensions, Mapping)):
        raise UsageError(
            f"{'inputs' if inputs else 'batch'} is that of a LightningModule: expected one, its class or "
            f"its import path beside it, found {type(model).__name__}, whose decoder has its own"
        )
    if isinstance(model, Source):
        return model
    if isinstance(model, Dimensions):
        return of_dimensions(model, length)
    if isinstance(model, Mapping):
        return of_dimensions(Dimensions.of_config(model), length, str(model.get("model_type")))
    if isinstance(model, nn.Module):
        return of_instance(model, inputs, length, batch)
    if isinstance(model, str) and Path(model).suffix == ".json":
        raise ConfigurationError(
            f"{model!r}: a config of transformers is given as a mapping here: "
            f"json.loads(Path({model!r}).read_text(encoding='utf-8'))"
        )
    return of_module(model, arguments, inputs, length, batch)
