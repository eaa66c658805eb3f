"""Planning of a Trainer's run: a dry run instead of training, and the choice of a sharding strategy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import nn
from typing_extensions import override

from shardeddp.checkpoint.random_state import capture_random_state, restore_random_state
from shardeddp.config import AUTO, MixedPrecision, Options
from shardeddp.errors import ConfigurationError
from shardeddp.lightning import private
from shardeddp.lightning.api import (
    CombinedLoader,
    LightningDataModule,
    LightningModule,
    Trainer,
    TrainerFn,
    TrainerStatus,
    is_overridden,
    rank_zero_info,
    rank_zero_only,
)
from shardeddp.lightning.forked import call_in_fork
from shardeddp.lightning.planned_optimizers import (
    dry_trainer,
    set_optimizers,
    states_of,
    unplanned_callbacks,
)
from shardeddp.lightning.run_group import RunGroup
from shardeddp.plan.hardware import GIB, GPUS, gpu_of_device
from shardeddp.plan.memory import plan_memory
from shardeddp.plan.sharding_strategy import SHARDING_STRATEGIES, ShardingStrategy, shard_sizes
from shardeddp.plan.topology import Topology
from shardeddp.planner.axes import ModelAxes
from shardeddp.planner.memory import OPTIMIZER_STATES
from shardeddp.planner.plan import Plan, make_plan
from shardeddp.planner.source import (
    configured,
    of_instance,
    samples_of,
    sized,
    tokens_of,
    without_weights,
)
from shardeddp.report import human_seconds
from shardeddp.torch_private import DispatchMode, FakeTensor, make_group, pytree
from shardeddp.wrap import build_units
from shardeddp.wrap.flat_buffers import costs_of

ASSUMED_GPU = "H100-80"
"""GPU of a dry run on a machine without one."""


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """Settings of a strategy and its Trainer that plans depend on."""

    options: Options
    precision: str
    """Name in ``shardeddp.planner.trace.PRECISIONS``; others cannot be planned."""
    device: torch.device
    num_nodes: int
    ranks_per_node: int
    accumulates: int
    """Number of micro-batches per optimizer step."""

    @property
    def recompute(self) -> str:
        """Recomputation by the planner's name."""
        asked = self.options.activation_checkpointing
        return "none" if asked is None else "selective" if asked.save_ops else "full"

    @property
    def offload(self) -> str:
        """Offload by the planner's name."""
        asked = self.options.cpu_offload
        return "params" if asked.params else "optimizer" if asked.optimizer else "none"

    @property
    def axes(self) -> ModelAxes:
        """Axes over which ranks split the model."""
        return ModelAxes(
            tensor_size=self.options.tensor_parallel_size,
            tensor_plan=self.options.tensor_parallel_plan,
            expert_size=self.options.expert_parallel_size,
            experts=self.options.experts,
        )

    @property
    def data_size(self) -> int:
        """Number of ranks with different batches."""
        return self.num_nodes * self.ranks_per_node // self.options.tensor_parallel_size

    def topology(self, sharding: ShardingStrategy) -> Topology:
        """Return the topology of the ranks under a sharding strategy.

        Raises:
            ConfigurationError: A size does not divide the number of ranks.
        """
        return sharding.topology(
            self.num_nodes,
            self.ranks_per_node,
            tensor_size=self.options.tensor_parallel_size,
            expert_size=self.options.expert_parallel_size,
        )

    def possible(
        self, candidates: Iterable[tuple[str, ShardingStrategy]]
    ) -> list[tuple[str, ShardingStrategy]]:
        """Return the sharding strategies, with names, whose sizes divide the number of ranks."""
        found: list[tuple[str, ShardingStrategy]] = []
        for name, sharding in candidates:
            with suppress(ConfigurationError):
                self.topology(sharding)
                found.append((name, sharding))
        return found


def planned_precision(precision: object, mixed_precision: MixedPrecision | None) -> str:
    """Return the planner's name of a Trainer's precision, or the name of one that it cannot plan.

    ``bf16`` and ``fp16`` are the ``param_dtype`` of ``mixed_precision`` under ``32-true``.
    """
    dtype = None if mixed_precision is None else mixed_precision.param_dtype
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return next(
        (name for it, name in names.items() if precision == "32-true" and it is dtype),
        str(precision),
    )


@contextmanager
def detached(module: LightningModule) -> Generator[None]:
    """Detach a module from its Trainer inside the context, so that copies have none."""
    parts = [it for it in module.modules() if isinstance(it, LightningModule)]
    trainers = [private.trainer_of(it) for it in parts]
    for part in parts:
        part.trainer = None
    try:
        yield
    finally:
        for part, trainer in zip(parts, trainers, strict=True):
            part.trainer = trainer


# -- no effects on the run


class _OwnRank(DispatchMode):
    """Mode that refuses collectives on real tensors: one rank plans, and no other takes part."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not any(
            isinstance(it, FakeTensor) for it in pytree.tree_leaves((args, kwargs))
        ):
            _refuse_communication(func.name())
        return func(*args, **(kwargs or {}))


def _refuse_communication(name: str) -> None:
    raise ConfigurationError(
        f"the model cannot be planned because its code communicates ({name}), and no other rank "
        f"takes part in a plan. Leave that out of configure_model and training_step, or do it in "
        f"setup"
    )


@contextmanager
def _on_own_rank(device: torch.device) -> Generator[None]:
    """Run the user's code on one rank alone: it communicates with no other, and draws no numbers."""
    used = device if torch.cuda.is_initialized() else torch.device("cpu")
    state, make = capture_random_state(used), make_group.current
    make_group.replace(lambda *_, **__: _refuse_communication("new_group"))
    try:
        with _OwnRank():
            yield
    finally:
        make_group.replace(make)
        restore_random_state(state, used)


# -- a batch of another size


def resized(batch: Any, samples: int) -> Any:
    """Return a batch of ``samples`` samples, without values; other first sizes are kept."""
    return apply_to_collection(
        batch, torch.Tensor, partial(sized, former=samples_of(batch), samples=samples)
    )


def _plan_with(
    module: LightningModule,
    batch: Any,
    setting: RunSetting,
    gpu: str,
    trainer: Trainer | None = None,
    **options: Any,
) -> Plan:
    """Plan for the ranks, batch and units of a run; ``options`` go to :func:`make_plan`.

    The step has the ``trainer``, without loggers. It must not be that of a run with ranks, with
    which a step could communicate.
    """
    axes, length = setting.axes, tokens_of(batch)
    source = of_instance(module, (), length, lambda size: resized(batch, size))
    if trainer is not None:
        trainer = copy(trainer)
        trainer.loggers = []
        source = replace(source, build=partial(_attached, source.build, trainer))
    with detached(module), _on_own_rank(setting.device):
        return make_plan(
            source,
            gpu=gpu,
            gpus=setting.num_nodes * setting.ranks_per_node,
            per_node=setting.ranks_per_node,
            length=length,
            global_batch=samples_of(batch) * setting.accumulates * setting.data_size,
            tensor_parallel_sizes=(axes.tensor_size,),
            tensor_parallel_plan=axes.tensor_plan if axes.tensor_size > 1 else None,
            expert_parallel_sizes=(axes.expert_size,),
            experts=axes.experts,
            precisions=(setting.precision,),
            auto_wrap_policy=setting.options.auto_wrap_policy,
            mixed_precision=setting.options.mixed_precision,
            forward_prefetch=setting.options.forward_prefetch,
            backward_prefetch=setting.options.backward_prefetch,
            uneven_units=setting.options.uneven_units,
            activation_checkpointing=setting.options.activation_checkpointing or False,
            **options,
        )


def _attached(build: Callable[[], nn.Module], trainer: Trainer) -> nn.Module:
    """Build a module and attach it to a Trainer; what it logs goes nowhere."""
    module = build()
    for it in module.modules():
        if isinstance(it, LightningModule):
            it.trainer, it.log = trainer, _log_nothing
    return module


def _log_nothing(*args: object, **kwargs: object) -> None:
    pass


# -- dry run


class PlanLauncher:
    """Launcher that plans the run and prints the plan; starts no ranks and runs no training."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.plan: Plan | None = None
        """Plan of the last run."""

    is_interactive_compatible = True
    """Flag for Lightning: works in a notebook, since it starts no process."""

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> None:
        """Plan the run instead of launching it, and mark the Trainer as finished."""
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            raise ConfigurationError(
                "plan_only=True plans a training: call trainer.fit(...), or leave it out for "
                "validate, test and predict"
            )
        given = signature(function).bind(*args, **kwargs).arguments
        module: LightningModule = given["model"] or self._strategy.lightning_module
        batch = _first_batch(
            module, given.get("train_dataloaders"), given.get("datamodule"), trainer
        )
        setting: RunSetting = self._strategy.setting(trainer)
        options = setting.options
        self.plan, note = plan_of_run(
            module,
            batch,
            setting,
            options.plan_only if isinstance(options.plan_only, str) else None,
            # Nothing for ``auto``, which takes the best plan.
            {options.sharding_strategy: options.sharding}
            if options.sharding_strategy in SHARDING_STRATEGIES
            else {},
            trainer,
        )
        rank_zero_only(print)("\n".join([str(self.plan), "", *note]))
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None


def plan_of_run(
    module: LightningModule,
    batch: Any,
    setting: RunSetting,
    gpu: str | None,
    candidates: Mapping[str, ShardingStrategy],
    trainer: Trainer | None = None,
) -> tuple[Plan, list[str]]:
    """Return the plan of a run, and lines on its own settings and on assumptions.

    The module is not changed. The batch is a micro-batch of one rank. Without ``gpu``, the plan is
    for that of this machine. ``candidates`` has the configured strategy, for a line on its plan, or
    nothing. The step has the ``trainer``.
    """
    lines = ["plan_only: nothing was trained and no rank was started; leave it out to train."]
    figures: dict[str, float] = {}
    if gpu is None and setting.device.type == "cuda":
        gpu, figures = gpu_at(setting.device), memory_at(setting.device)
        if gpu is None:
            found = torch.cuda.get_device_properties(setting.device)
            raise ConfigurationError(
                f"plan_only=True: the planner has no figures of the GPU {found.name!r}. Say a similar "
                f"one: plan_only='A100-80', of {', '.join(GPUS)}"
            )
    elif gpu is None:
        gpu = ASSUMED_GPU
        lines.insert(
            0,
            f"This machine has no GPU, so the plan is for {gpu}. For another GPU: plan_only='A100-80'.",
        )
    samples = samples_of(batch)
    sizes = {samples // part for part in (1, 2, 4, 8, 16) if samples % part == 0}
    states, unplanned = OPTIMIZER_STATES, list[str]()
    if trainer is not None:
        trainer, states, unplanned = _with_optimizers(module, trainer, setting)
    plan = _plan_with(
        module,
        batch,
        setting,
        gpu,
        gpu_figures=figures,
        offloads=tuple(dict.fromkeys(("none", setting.offload))),
        micro_batches=sorted(sizes),
        optimizer_states=states,
        trainer=trainer,
    )
    plan = replace(plan, unplanned=[*plan.unplanned, *unplanned])
    own: list[str] = []
    if candidates:
        pairs = tuple(candidates.items())
        it = plan_as_set(
            module,
            batch,
            pairs,
            setting,
            gpu,
            gpu_figures=figures,
            optimizer_states=states,
            trainer=trainer,
        ).best
        choice = it.choice
        own.append(
            f"As configured ({choice.strategy} over {choice.shard_size}, micro-batch "
            f"{choice.micro_batch} x {choice.micro_batches}): {it.memory.peak / GIB:.1f} GiB, "
            f"{human_seconds(it.step.total)}, {'fits' if it.fits else 'may not fit'}."
        )
    return plan, [*own, "", *lines]


def _with_optimizers(
    module: LightningModule, trainer: Trainer, setting: RunSetting
) -> tuple[Trainer, int, list[str]]:
    """Return a copy of a Trainer with its optimizers, their states, and what plans do not know."""
    trainer, unplanned = dry_trainer(trainer), unplanned_callbacks(trainer)
    try:
        bare = _configured_alone(module, setting)
        with _on_own_rank(setting.device):
            set_optimizers(trainer, bare)
        states, unknown = states_of(trainer.optimizers)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the module's own code
        states, unknown = (
            OPTIMIZER_STATES,
            [
                f"the optimizers (configure_optimizers fails without a run, {type(error).__name__}: "
                f"{error}; AdamW is taken)"
            ],
        )
    return trainer, states, [*unknown, *unplanned]


def _configured_alone(module: LightningModule, setting: RunSetting) -> Any:
    """Return a copy of a module without weights, as its ``configure_model`` makes it on one rank."""
    with _on_own_rank(setting.device), torch.device("meta"), detached(module):
        return configured(without_weights(module))


def _first_batch(module: LightningModule, loaders: Any, datamodule: Any, trainer: Trainer) -> Any:
    """Return the first training batch of a run, or without loaders the module's example input.

    The hooks that move a batch to a device have changed it, as they do for a training.
    """
    if isinstance(loaders, LightningDataModule):
        loaders, datamodule = None, loaders
    try:
        if loaders is None and datamodule is not None:
            datamodule.setup("fit")
        source = datamodule if datamodule is not None else module
        if loaders is None and is_overridden("train_dataloader", source):
            loaders = source.train_dataloader()
        if loaders is not None:
            batch, _, _ = next(iter(CombinedLoader(loaders, "max_size_cycle")))
            return _moved(batch, module, datamodule, trainer)
    except Exception as error:
        raise ConfigurationError(
            f"plan_only: the shapes of a batch come from the first one of the training data, and "
            f"making it, or a hook such as on_after_batch_transfer, failed ({type(error).__name__}: "
            f"{error}). Pass a loader to fit(), or set example_input_array and pass none"
        ) from error
    example = module.example_input_array
    if example is None:
        raise ConfigurationError(
            f"plan_only: expected a batch to plan with, found none: pass training data to fit(), or set "
            f"{type(module).__name__}.example_input_array"
        )
    return example


def _moved(batch: Any, module: LightningModule, datamodule: Any, trainer: Trainer) -> Any:
    """Call the hooks that move a batch to the host; those of the data module come first."""
    former, module.trainer = private.trainer_of(module), trainer
    try:
        for name, *given in (
            ("on_before_batch_transfer", 0),
            ("transfer_batch_to_device", torch.device("cpu"), 0),
            ("on_after_batch_transfer", 0),
        ):
            has_own = datamodule is not None and is_overridden(name, datamodule)
            batch = getattr(datamodule if has_own else module, name)(batch, *given)
        return batch
    finally:
        module.trainer = former


# -- choice of a sharding strategy

HALF = 0.5
"""Fraction of a device's memory for parameters, gradients and optimizer states, if activations are
unknown."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Chosen sharding strategy, with the reason."""

    sharding_strategy: str
    reason: str
    shard_size: int | None = None
    """Chosen shard size; None: only the strategy was chosen."""


def gpu_at(device: torch.device) -> str | None:
    """Return the name of a rank's GPU in the planner's table; None: it is not in the table."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return gpu_of_device(found.name, found.total_memory)


def memory_at(device: torch.device) -> dict[str, float]:
    """Return the memory of a rank's GPU, which replaces that of the planner's table."""
    return {"memory_gb": torch.cuda.get_device_properties(device).total_memory / 1e9}


def choose_on_rank_zero(
    group: RunGroup, module: LightningModule | None, setting: RunSetting
) -> Chosen:
    """Replace ``auto`` in the group's options by the choice of rank 0, and log it; a collective."""
    options = group.options
    reach = group.reach or setting.ranks_per_node
    choose = (
        partial(choose_shard_size, module, setting, reach)  # valid with hybrid_shard alone
        if options.shard_size == AUTO
        else partial(choose_strategy, module, setting)
    )
    found = group.on_rank_zero("choice of a sharding strategy", lambda: vars(choose()))
    chosen = Chosen(**found)
    over = f" over {chosen.shard_size} ranks" if chosen.shard_size else ""
    rank_zero_info(f"ShardedDP: auto chose {chosen.sharding_strategy}{over}, {chosen.reason}")
    size = chosen.shard_size or options.shard_size
    group.choose(chosen.sharding_strategy, size)
    return chosen


def choose_shard_size(module: LightningModule | None, setting: RunSetting, reach: int) -> Chosen:
    """Choose the shard size of ``hybrid_shard``.

    If the GPU and, from ``example_input_array``, the activations are known: the fastest size that
    fits by the plan. Else ``reach``: the ranks of a node, or of an NVLink domain of several nodes.
    """
    count = setting.num_nodes * setting.ranks_per_node
    near = "a node" if reach == setting.ranks_per_node else "an NVLink domain"
    near_size = reach // setting.options.tensor_parallel_size
    setting = replace(setting, num_nodes=count // reach, ranks_per_node=reach)

    def sizes() -> Iterator[tuple[str, ShardingStrategy]]:
        for size in shard_sizes(setting.num_nodes, near_size):
            with suppress(ConfigurationError):  # the regather size does not divide it
                sharding = setting.options.candidates["hybrid_shard"]
                yield "hybrid_shard", replace(sharding, shard_size=size)

    chosen, note = _fastest(module, setting.possible(sizes()), setting)
    return chosen or Chosen(
        sharding_strategy="hybrid_shard", shard_size=near_size, reason=f"the ranks of {near}{note}"
    )


def choose_strategy(module: LightningModule | None, setting: RunSetting) -> Chosen:
    """Choose a sharding strategy for a run.

    If the GPU and, from ``example_input_array``, the activations are known: the fastest that fits
    by the plan. If only the device's memory is known: by the memory of parameters, gradients and
    optimizer states. Else the first candidate, which has the least memory.
    """
    every = setting.options.candidates
    candidates = dict(setting.possible(every.items())) or every
    names = ", ".join(candidates)
    first = Chosen(
        sharding_strategy=next(iter(candidates)),
        reason=f"first of {names}, as the memory of {setting.device.type} is not known",
    )
    if setting.device.type != "cuda" or module is None:
        return first
    chosen, note = _fastest(module, [*candidates.items()], setting)
    if chosen is not None:
        return replace(chosen, shard_size=None)
    found = torch.cuda.get_device_properties(setting.device)
    if not note:
        gpu = gpu_at(setting.device)
        note = f"; {'no example_input_array' if gpu else f'{found.name} is not in the table'}"

    def choose() -> Chosen:
        bare = _configured_alone(module, setting)
        return by_states(bare, candidates, setting, found.total_memory, note)

    try:
        return call_in_fork(choose)
    except ConfigurationError as error:
        return Chosen(
            sharding_strategy=first.sharding_strategy,
            reason=f"first of {names}, as the model cannot be planned: {str(error)[:80]}",
        )


def _fastest(
    module: LightningModule | None,
    candidates: Sequence[tuple[str, ShardingStrategy]],
    setting: RunSetting,
) -> tuple[Chosen | None, str]:
    """Return the best by the plan; None without GPU or example; None and a note on an error."""
    gpu = gpu_at(setting.device)
    if gpu is None or module is None or module.example_input_array is None:
        return None, ""
    example, figures = module.example_input_array, memory_at(setting.device)

    def choose() -> Chosen:
        plan = plan_as_set(module, example, candidates, setting, gpu, gpu_figures=figures)
        best = plan.best.choice
        return Chosen(
            sharding_strategy=best.strategy,
            shard_size=best.shard_size,
            reason=_reason(plan, gpu),
        )

    try:
        return call_in_fork(choose), ""
    except ConfigurationError as error:
        return None, f"; its step could not be planned: {str(error)[:80]}"


def _reason(plan: Plan, gpu: str) -> str:
    best, room = plan.best, plan.cluster.gpu.memory_gb * 1e9 / GIB
    needs = f"{best.memory.peak / GIB:.1f} GiB of {room:.1f} GiB"
    machines = f"{plan.cluster.count} x {gpu}"
    without = f", which does not know {', '.join(plan.unplanned)}" if plan.unplanned else ""
    return (
        f"the fastest that fits {machines} by the plan{without} ({needs}, {human_seconds(best.step.total)})"
        if best.fits
        else f"the least memory of all, none of which fits {machines} by the plan{without} ({needs})"
    )


def plan_as_set(
    module: LightningModule,
    batch: Any,
    candidates: Sequence[tuple[str, ShardingStrategy]],
    setting: RunSetting,
    gpu: str,
    **options: Any,
) -> Plan:
    """Return the plan of a run for its own settings, under each of the candidates.

    The module is not changed. The batch is a micro-batch of one rank. Options go to
    :func:`make_plan`, a ``trainer`` to the step.
    """
    return _plan_with(
        module,
        batch,
        setting,
        gpu,
        strategies=candidates,
        recomputes=(setting.recompute,),
        offloads=(setting.offload,),
        micro_batches=(samples_of(batch),),
        **options,
    )


def by_states(
    module: nn.Module,
    candidates: Mapping[str, ShardingStrategy],
    setting: RunSetting,
    memory_nbytes: int,
    note: str = "",
) -> Chosen:
    """Choose the least communication with states in half of the memory; else the least memory.

    Raises:
        ConfigurationError: The model has no units.
    """
    units = build_units(module, *setting.axes.split(module, setting.options.auto_wrap_policy))
    peaks: dict[str, int] = {}
    for name, sharding in candidates.items():
        topology = setting.topology(sharding)
        peaks[name] = plan_memory(
            [costs_of(unit, topology, on_host=sharding.offload_params) for unit in units],
            sharding,
            prefetch=setting.options.backward_prefetch,
            needs_receive_buffer=False,
            accumulates=setting.accumulates > 1,
            offload_optimizer=setting.offload == "optimizer",
        ).peak_nbytes
    fitting = [
        name for name in _BY_COMMUNICATION if peaks.get(name, memory_nbytes) <= HALF * memory_nbytes
    ]
    name = fitting[0] if fitting else min(peaks, key=lambda it: peaks[it])
    share = f"{peaks[name] / GIB:.2f} GiB of {memory_nbytes / GIB:.1f} GiB"
    return Chosen(
        sharding_strategy=name,
        reason=f"the least communication of those whose states take at most half of the memory "
        f"({share}{note})"
        if fitting
        else f"the least memory, as no states take at most half of it ({share}{note})",
    )


_BY_COMMUNICATION = tuple(reversed(SHARDING_STRATEGIES))
