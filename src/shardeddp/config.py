"""Options of the strategy: their types, as YAML can write them, and checks of users' values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, TypeVar, cast, get_args

import torch
from torch import nn

from shardeddp.errors import ConfigurationError
from shardeddp.plan.hardware import find_gpu
from shardeddp.plan.sharding_strategy import (
    AUTO,
    OptimizerShard,
    ShardingStrategy,
    ShardSizeOption,
    candidates,
    choose_sharding,
)
from shardeddp.translation.torch_strategies import options_of, prefetch_of, sharding_of
from shardeddp.translation.unknown import explain_unknown
from shardeddp.wrap import AutoPolicy, Policy, PolicyLike, resolve_policy
from shardeddp.wrap.experts import resolve_experts
from shardeddp.wrap.kept_operations import check_save_ops
from shardeddp.wrap.tensor_plan import TensorPlan, check_plan
from shardeddp.wrap.tree import imported, nearest

T = TypeVar("T")

StateDictType: TypeAlias = Literal["auto", "sharded", "full"]
StartMethod: TypeAlias = Literal["popen", "spawn", "fork", "forkserver"]

UnevenBatches: TypeAlias = Literal["error", "min", "join"]
"""End of an epoch in which ranks have different numbers of batches.

An error on all ranks, the first rank that has none left, or the last, with batches of no weight on
the others.
"""

Scope: TypeAlias = Literal["element", "parameter", "model"]
"""Input of an optimizer for the new value of an element.

``element``: the element itself, its gradient and its states. ``parameter``: all of its parameter.
``model``: anything else that the optimizer holds.
"""

DTypeLike: TypeAlias = torch.dtype | str | None
"""A dtype, or its name: ``bfloat16``, also ``bf16``, ``fp16``, ``fp32``, ``fp64``."""

ModuleClasses: TypeAlias = Sequence[type[nn.Module] | str]
"""Module classes, or their names or import paths."""


class ChoosesModules(Protocol):
    """Protocol of policies; the command line makes one of a ``class_path``."""

    def select(self, root: nn.Module) -> list[str]:
        """The names of the modules that are meant."""
        ...


Modules: TypeAlias = (
    ChoosesModules
    | str
    | type[nn.Module]
    | Sequence[type[nn.Module] | str]
    | set[type[nn.Module] | str]
    | Callable[[str, nn.Module], bool]
)
"""Some modules of a model, in every way of writing them."""


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Dtypes in which parameters travel and compute, and gradients are reduced.

    Main shards keep their own dtype.

    A dtype is written as ``torch.bfloat16`` or as the name ``bfloat16`` (also ``bf16``, ``fp16``,
    ``fp32``, ``fp64``).

    Args:
        param_dtype: Of gathered parameters, in which modules compute. None: each parameter's own.
        reduce_dtype: Of gradients while they are averaged. None: float32 for parameters of at most
            that width, else their own.
        output_dtype: Of floating-point tensors that the model's outermost modules return. None: as
            they come.
        buffer_dtype: Of floating-point buffers. None: each buffer's own.
        cast_forward_inputs: Cast floating-point inputs of units and of the model's outermost
            modules to ``param_dtype``.
        keep_fp32: Classes of modules whose parameters and computation stay in the parameters' own
            dtype, such as norms and routers; classes, their names or import paths.
    """

    param_dtype: DTypeLike = None
    reduce_dtype: DTypeLike = None
    output_dtype: DTypeLike = None
    buffer_dtype: DTypeLike = None
    cast_forward_inputs: bool = True
    keep_fp32: ModuleClasses = ()

    def __post_init__(self) -> None:
        check_flags(cast_forward_inputs=self.cast_forward_inputs)
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            resolve_dtype(getattr(self, name), name)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Which modules keep only their inputs in forward and are computed again in backward.

    Args:
        modules: Written as ``auto_wrap_policy`` is: ``auto`` (the repeated blocks of the model),
            classes or their names, a policy (in YAML ``class_path`` and ``init_args``), a function
            of (name, module). Of modules inside each other the outermost is taken.
        every: Every n-th of those modules, in module order, beginning with the first.
        save_ops: Selective: operations whose results are kept instead of computed again, as names
            (``matmul`` and ``attention`` for all of their kind, ``aten.mm.default``, ``aten.mm``,
            ``mm``) or objects of ``torch.ops``; or a policy function, as
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it, or its import
            path. Nothing: everything is computed again.
        cpu_offload: Keep the inputs of those modules in host memory between forward and backward.
            Tensors that ``save_ops`` keeps stay on the device.
    """

    modules: Modules = "auto"
    every: int = 1
    save_ops: str | Sequence[Any] | Callable[..., Any] = ()
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ConfigurationError(
                f"ActivationCheckpointing.every: expected 1 (each) or another number above it, "
                f"found {self.every!r}."
            )
        if type(self.cpu_offload) is not bool:
            raise ConfigurationError(
                f"ActivationCheckpointing.cpu_offload: expected true or false, found "
                f"{self.cpu_offload!r}."
            )


@dataclass(frozen=True, kw_only=True)
class CPUOffload:
    """State kept in host memory instead of on the device.

    Args:
        params: Main shards, gradient shards and optimizer states; the optimizer steps on the host.
            The least device memory, and the slowest.
        optimizer: Optimizer states; without ``params`` they alone, and the optimizer steps on the
            host on copies of parameters and gradients.
    """

    params: bool = False
    optimizer: bool = False

    def __post_init__(self) -> None:
        check_flags(params=self.params, optimizer=self.optimizer)

    @property
    def optimizer_alone(self) -> bool:
        """Whether the optimizer steps on the host on copies of parameters and gradients."""
        return self.optimizer and not self.params


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Writing of checkpoints, and limits of reading them.

    Args:
        max_file_gb: Up to how many GB (of 10**9 bytes) ``state_dict_type="auto"`` saves one file.
            0: directories only.
        asynchronous: Write in a thread while training goes on, from one copy of the shards in host
            memory. Directories only: with ``state_dict_type="auto"`` every checkpoint is one.
        durability: ``disk``: a save that has returned survives a power loss. ``process``: nothing
            is synced; faster, and it survives the end of the process only.
        permissions: ``private``: files are for their owner alone (0600, directories 0700).
            ``umask``: as the umask has it, for checkpoints that others read. None: directories are
            private, single files as the umask has it.
        zip_crc: Write the checksums that tools other than this package look for. Costs about 0.4 s
            of a core per GB. False is for directories: with ``state_dict_type="auto"`` every
            checkpoint is one.
        cast: Load tensors of another dtype than the model's by casting them.
        foreign: Also load directories that other tools wrote (FSDP, FSDP2, plain
            ``torch.distributed.checkpoint``): their indexes are pickles, which are read by a reader
            that knows a few harmless types only.
        trust_pickle: Unpickle foreign indexes as they are: their writer can run code here.
            With ``foreign``.
        timeout: After how many seconds a rank that has written its part stops waiting for the
            others; longer than the slowest disk needs. None: the strategy's own ``timeout``.
    """

    max_file_gb: float = 4.0
    asynchronous: bool = False
    durability: Literal["disk", "process"] = "disk"
    permissions: Literal["private", "umask"] | None = None
    zip_crc: bool = True
    cast: bool = False
    foreign: bool = False
    trust_pickle: bool = False
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_flags(
            asynchronous=self.asynchronous,
            zip_crc=self.zip_crc,
            cast=self.cast,
            foreign=self.foreign,
            trust_pickle=self.trust_pickle,
        )
        if self.timeout is not None and not _is_duration(self.timeout):
            raise ConfigurationError(
                f"timeout={self.timeout!r}: expected a positive number of seconds, or None"
            )
        if not _is_number(self.max_file_gb) or not self.max_file_gb >= 0:
            raise ConfigurationError(
                f"max_file_gb={self.max_file_gb!r}: expected a number of GB, 0 for no single files"
            )
        check_choice("durability", self.durability, ("disk", "process"))
        check_choice("permissions", self.permissions, ("private", "umask", None))
        if self.trust_pickle and not self.foreign:
            raise ConfigurationError(
                "trust_pickle=True goes with foreign=True: no pickle of our own is ever read"
            )


def check_choice(option: str, value: T, choices: Sequence[object], advice: str = "") -> T:
    """The value of an option, if it is one of its choices.

    Raises:
        ConfigurationError: It is not.
    """
    if value not in choices:
        raise ConfigurationError(
            f"{option}={value!r}: expected one of {', '.join(map(str, choices))}{advice}"
        )
    return value


def check_flags(**options: object) -> None:
    """Check options that are on or off.

    Raises:
        ConfigurationError: One is neither True nor False.
    """
    for option, value in options.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{option}={value!r}: expected True or False")


def resolve_checkpoint_options(value: object) -> CheckpointOptions:
    """The options of a ``checkpoint_options``: the options, or their fields.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(value, CheckpointOptions):
        return value
    known = [each.name for each in fields(CheckpointOptions)]
    if isinstance(value, Mapping) and set(value) <= set(known):
        return CheckpointOptions(**value)
    raise ConfigurationError(
        f"checkpoint_options={value!r}: expected CheckpointOptions(...), or a mapping with some of "
        f"{', '.join(known)}"
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_duration(value: object) -> TypeGuard[float]:
    """Whether it is a number of seconds that a ``timedelta`` can have."""
    return _is_number(value) and 0 < value < timedelta.max.total_seconds()


def resolve_timeout(value: object) -> timedelta:
    """The duration of a ``timeout``: a number of seconds or a duration.

    Raises:
        ConfigurationError: It is neither, or not positive.
    """
    if _is_duration(value):
        return timedelta(seconds=value)
    if isinstance(value, timedelta) and value > timedelta(0):
        return value
    raise ConfigurationError(
        f"timeout={value!r}: expected a positive number of seconds or a datetime.timedelta, for "
        f"example 600.0"
    )


def resolve_offload(value: object) -> CPUOffload:
    """The options of a ``cpu_offload``: a bool, the options, or their fields.

    Raises:
        ConfigurationError: It is none of these.
    """
    value = options_of("cpu_offload", value)
    if isinstance(value, Mapping) and value and set(value) <= {"params", "optimizer"}:
        value = CPUOffload(**value)
    if value is None or isinstance(value, bool):
        return CPUOffload(params=bool(value), optimizer=bool(value))
    if isinstance(value, CPUOffload) and (value.params or value.optimizer):
        return value
    raise ConfigurationError(
        f"cpu_offload={value!r}: expected True (everything), False, or what to offload: "
        f"CPUOffload(optimizer=True), in YAML {{optimizer: true}}, or params"
    )


def resolve_mixed_precision(value: object) -> MixedPrecision | None:
    """The options of a ``mixed_precision``: None, the options, their fields, or a ``param_dtype``.

    Raises:
        ConfigurationError: It is none of these, or a dtype in it is not known.
    """
    value = options_of("mixed_precision", value)
    if value is None or isinstance(value, MixedPrecision):
        return value
    if isinstance(value, (str, torch.dtype)):
        return MixedPrecision(param_dtype=value)
    if isinstance(value, Mapping):
        try:
            return MixedPrecision(**value)
        except TypeError as error:
            raise ConfigurationError(f"mixed_precision={dict(value)!r}: {error}") from None
    raise ConfigurationError(
        f"mixed_precision={value!r}: expected None (the Trainer's precision alone), a dtype for "
        f"param_dtype, or MixedPrecision(param_dtype=..., reduce_dtype=...)"
    )


_DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
}


def resolve_dtype(value: DTypeLike, name: str) -> torch.dtype | None:
    """The dtype of a field of :class:`MixedPrecision`.

    Args:
        value: A dtype or its name; None: none.
        name: Field.

    Raises:
        ConfigurationError: It is no dtype of floating-point numbers.
    """
    if value is None:
        return None
    text = str(value).lower().removeprefix("torch.")
    found = (
        value if isinstance(value, torch.dtype) else vars(torch).get(_DTYPE_NAMES.get(text, text))
    )
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            f"MixedPrecision.{name}={value!r}: expected a floating-point dtype, for example "
            f"'bfloat16', 'float16', 'float32' or torch.bfloat16"
        )
    return found


def resolve_optimizer_scope(value: Any) -> dict[str, Scope]:
    """The scopes of an ``optimizer_scope``, by name or import path of the optimizer's class.

    Raises:
        ConfigurationError: It is no mapping, or a scope is not known.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"optimizer_scope={value!r}: expected a mapping from optimizer classes, or their names "
            f"or import paths, to one of {', '.join(get_args(Scope))}, such as {{'Lion': "
            f"'element'}}"
        )
    return {
        f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else str(key): check_choice(
            f"optimizer_scope[{key!r}]",
            scope,
            get_args(Scope),
            ": the elements that the new value of an element depends on",
        )
        for key, scope in value.items()
    }


# -- Activation checkpointing, as users write it

ActivationCheckpointingLike: TypeAlias = (
    bool | ActivationCheckpointing | Mapping[str, Any] | PolicyLike
)
"""Everything that ``resolve_activation_checkpointing`` understands."""

_FIELDS = tuple(field.name for field in fields(ActivationCheckpointing))

LIKE_UNITS = (
    "ActivationCheckpointing.modules is written as auto_wrap_policy is, and what was found does "
    "not do:"
)
"""Beginning of errors of :func:`resolve_modules` and of what it chooses."""


def resolve_activation_checkpointing(value: object) -> ActivationCheckpointing | None:
    """The options that a value of ``activation_checkpointing`` means.

    Args:
        value: None, False or ``"none"`` (off); True or ``"auto"`` (the repeated blocks of the
            model); modules, written as ``auto_wrap_policy`` is: a module class or its name, a list
            or set of those, a function ``(name, module) -> bool``, a Policy; a mapping with the
            fields of :class:`ActivationCheckpointing`, or with the ``class_path`` and ``init_args``
            of a policy; or that itself.

    Returns:
        The options, with a Policy as ``modules``; None for off.

    Raises:
        ConfigurationError: The value is none of these, or one of the options is wrong.
    """
    if value is None or value is False or (isinstance(value, str) and value.lower() == "none"):
        return None
    if isinstance(value, ActivationCheckpointing):
        options = value
    elif isinstance(value, Mapping):
        options = _from_mapping(value)
    else:
        options = ActivationCheckpointing(modules="auto" if value is True else cast(Modules, value))
    check_save_ops(options.save_ops)
    return replace(options, modules=resolve_modules(options.modules))


def _from_mapping(value: Mapping[Any, Any]) -> ActivationCheckpointing:
    if "class_path" in value:
        return ActivationCheckpointing(modules=_build_policy(value))
    for key in value:
        if key not in _FIELDS:
            raise ConfigurationError(
                f"activation_checkpointing: expected a mapping with some of {', '.join(_FIELDS)}; "
                f"found {key!r}: {nearest(str(key), _FIELDS)}"
            )
    return ActivationCheckpointing(**value)


def resolve_modules(modules: Any) -> Policy:
    """The policy that chooses the ``modules`` of :class:`ActivationCheckpointing`.

    A mapping is a policy as YAML writes an object.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(modules, Mapping):
        return _build_policy(modules)
    if modules is None or (isinstance(modules, str) and modules.lower() == "none"):
        raise ConfigurationError(
            "ActivationCheckpointing.modules: expected which modules to compute again, found "
            "None. Write 'auto' for the repeated blocks, classes or a policy; "
            "activation_checkpointing=None turns it off."
        )
    try:
        return resolve_policy(modules)
    except ConfigurationError as error:
        raise ConfigurationError(f"{LIKE_UNITS} {error}") from error


def _build_policy(written: Mapping[str, Any]) -> Policy:
    path, arguments = written.get("class_path"), written.get("init_args") or {}
    target = imported(path) if isinstance(path, str) else None
    if (
        set(written) - {"class_path", "init_args"}
        or not isinstance(arguments, Mapping)
        or not (isinstance(target, type) and issubclass(target, Policy))
    ):
        raise ConfigurationError(
            f"ActivationCheckpointing.modules: expected a mapping with the class_path of a policy, "
            f"such as 'shardeddp.wrap.NamePolicy', and its init_args; found {dict(written)!r}."
        )
    return target(**arguments)


# -- All options of a strategy


@dataclass(frozen=True, kw_only=True)
class Options:
    """Every option of a strategy, checked here; ``ShardedDP`` has the same and says what they mean.

    Parts of the strategy and of the engine get this object and read their fields. Two are equal if
    they shard a model alike; fields that do not decide on that are not compared.

    Raises:
        ConfigurationError: An option is wrong, or does not go with another one.
    """

    sharding_strategy: str = field(default="full_shard", compare=False)
    """Lower case, and our name where it was given by that of another library."""
    shard_size: ShardSizeOption = field(default=None, compare=False)
    """Ranks that share one model under ``hybrid_shard``."""
    auto_wrap_policy: Policy = field(default_factory=AutoPolicy)
    """Policy that chooses the modules that are units."""
    mixed_precision: MixedPrecision | None = None
    """Dtypes that parameters and gradients travel in; None: as the Trainer's precision says."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """What backward computes again, with a Policy as ``modules``; None: nothing."""
    cpu_offload: bool | CPUOffload = field(default=False, compare=False)
    """As it was given; ``offload`` is what it means."""
    reshard_after_forward: bool | int | None = field(default=None, compare=False)
    """Whether, and among how many neighbours, units are gathered again for backward."""
    optimizer_shard: OptimizerShard = field(default="group", compare=False)
    """Whether replicas split the optimizer's states under ``hybrid_shard``."""
    optimizer_scope: Mapping[str, Scope] = field(default_factory=dict[str, Scope], compare=False)
    """What new values depend on, by class name of optimizers that torch does not have."""
    tensor_parallel_size: int = 1
    """Neighbouring ranks that split layers."""
    tensor_parallel_plan: TensorPlan | None = field(default=None, compare=False)
    """Which layers they split; None: those that ``configure_model`` has split."""
    expert_parallel_size: int = 1
    """Neighbouring ranks that have different experts."""
    experts: Policy | None = None
    """Policy that chooses the modules that have experts; None: those of Mixtral-like models."""
    forward_prefetch: int = 1
    """Units gathered ahead of the one at work in forward."""
    backward_prefetch: int = 1
    """The same of backward."""
    reduce_every_backward: bool | None = field(default=None, compare=False)
    """Whether gradients are reduced in every micro-batch, and not once per step."""
    uneven_batches: UnevenBatches = field(default="error", compare=False)
    """End of an epoch in which ranks have different numbers of batches."""
    uneven_units: bool = False
    """Whether ranks may use different units in a step."""
    state_dict_type: StateDictType = field(default="auto", compare=False)
    """Whether checkpoints are one file, or a directory of shards."""
    checkpoint_options: CheckpointOptions = field(default=CheckpointOptions(), compare=False)
    """How checkpoints are written and read."""
    process_group_backend: str | None = field(default=None, compare=False)
    """Of torch; None: the device's own."""
    timeout: timedelta = field(default=timedelta(minutes=10), compare=False)
    """After how long a collective gives up."""
    debug: bool = False
    """Whether the collectives of users are compared over ranks before they happen."""
    plan_only: bool | str = field(default=False, compare=False)
    """Whether a fit is planned and not run; a GPU has the name that the planner knows it by."""
    start_method: StartMethod = field(default="popen", compare=False)
    """How ranks are started where the cluster environment does not."""

    # What several of them say together, or one of them in more than one type.
    sharding: ShardingStrategy = field(init=False)
    """Under ``auto`` the first candidate, until one is chosen."""
    candidates: Mapping[str, ShardingStrategy] = field(init=False, compare=False, repr=False)
    """Those that ``auto`` chooses from, by name; else the one that is set."""
    offload: CPUOffload = field(init=False)
    """What lives in host memory."""
    described_plan: str = field(init=False, repr=False)
    """Styles of torch are equal where they say the same."""

    def __post_init__(self) -> None:
        check_flags(uneven_units=self.uneven_units, debug=self.debug)
        check_choice("start_method", self.start_method, get_args(StartMethod))
        check_choice("state_dict_type", self.state_dict_type, get_args(StateDictType))
        check_choice(
            "uneven_batches",
            self.uneven_batches,
            get_args(UnevenBatches),
            "; 'min' ends each epoch with the first rank that has no batch left, 'join' with the "
            "last",
        )
        _check_backend(self.process_group_backend)
        _check_size("tensor_parallel_size", self.tensor_parallel_size)
        _check_size("expert_parallel_size", self.expert_parallel_size)
        # Names and values of other libraries come first.
        known = sharding_of(self.sharding_strategy) or {}
        strategy = known.get("sharding_strategy", self.sharding_strategy)
        reshard = self.reshard_after_forward
        reshard = known.get("reshard_after_forward") if reshard is None else reshard
        offload = resolve_offload(self.cpu_offload)
        choices: dict[str, Any] = {
            "shard_size": self.shard_size,
            "reduce_every_backward": self.reduce_every_backward,
            "reshard_after_forward": reshard,
            "offload_params": offload.params,
            "optimizer_shard": self.optimizer_shard,
        }
        name = str(strategy).lower()
        shardings = (
            candidates(**choices) if name == AUTO else {name: choose_sharding(strategy, **choices)}
        )
        sharding = next(iter(shardings.values()))
        untried = {
            "cpu_offload": offload.params or offload.optimizer,
            "optimizer_shard='world'": sharding.split_replicas,
            "reshard_after_forward=<number>": sharding.regather_size is not None,
            "uneven_batches": self.uneven_batches != "error",
            "uneven_units": self.uneven_units,
        }
        planned = {
            "sharding_strategy='auto'": name == AUTO,
            "shard_size='auto'": self.shard_size == AUTO,
            "plan_only": self.plan_only is not False,
        }
        splits = {"tensor_parallel_size": self.tensor_parallel_size > 1}
        by_name = self.tensor_parallel_plan is not None  # what is split without is not planned
        unnamed = {} if by_name else planned
        _check_axis("tensor_parallel_size", self.tensor_parallel_size, untried, unnamed)
        _check_axis("expert_parallel_size", self.expert_parallel_size, splits | untried, {})
        if self.experts is not None and self.expert_parallel_size == 1:
            raise ConfigurationError(
                "experts needs expert_parallel_size=2 or more: one rank has all of them"
            )
        resolved = {
            "sharding_strategy": name,
            "reshard_after_forward": reshard,
            "mixed_precision": resolve_mixed_precision(self.mixed_precision),
            "activation_checkpointing": resolve_activation_checkpointing(
                self.activation_checkpointing
            ),
            "optimizer_scope": resolve_optimizer_scope(self.optimizer_scope),
            "checkpoint_options": resolve_checkpoint_options(self.checkpoint_options),
            "timeout": resolve_timeout(self.timeout),
            "plan_only": _resolve_plan_only(self.plan_only),
            "sharding": sharding,
            "candidates": shardings,
            "auto_wrap_policy": resolve_policy(self.auto_wrap_policy),
            "experts": resolve_experts(self.experts),
            "forward_prefetch": _resolve_prefetch("forward_prefetch", self.forward_prefetch),
            "backward_prefetch": _resolve_prefetch("backward_prefetch", self.backward_prefetch),
            "offload": offload,
            "described_plan": str(check_plan(self.tensor_parallel_plan, self.tensor_parallel_size)),
        }
        for option, value in resolved.items():
            object.__setattr__(self, option, value)


def parse_options(given: Mapping[str, Any], beside: Collection[str] = ()) -> Options:
    """The options of a strategy.

    Args:
        given: Values by name; what is left out has its default.
        beside: Names of further arguments that the strategy takes, which are no options.

    Raises:
        TypeError: A name is unknown, or an argument of another strategy; with the line to write.
        ConfigurationError: See :class:`Options`.
    """
    names = [it.name for it in fields(Options) if it.init]
    if unknown := [name for name in given if name not in (*names, *beside)]:
        raise TypeError(explain_unknown(unknown, given, (*names, *beside)))
    return Options(**{name: given[name] for name in names if name in given})


def _check_backend(name: str | None) -> None:
    """Refuse a ``process_group_backend`` that torch does not know."""
    known = sorted(set(torch.distributed.Backend.backend_list) - {"undefined"})
    given = [] if name is None else str(name).split(",")
    parts = [part.rpartition(":")[2].lower() for part in given]
    if not set(parts) <= set(known):
        raise ConfigurationError(
            f"process_group_backend={name!r}: expected one of {', '.join(known)}, or one for each "
            f"kind of device (cpu:gloo,cuda:nccl); a backend of a package of its own is known once "
            f"that package is imported"
        )


def _resolve_plan_only(value: object) -> bool | str:
    """The value of ``plan_only``, a GPU by its name in the table."""
    if isinstance(value, str):
        return find_gpu(value).name
    if not isinstance(value, bool):
        raise ConfigurationError(
            f"plan_only={value!r}: expected True, False, or the name of a GPU such as 'A100-80'"
        )
    return value


def _resolve_prefetch(option: str, value: Any) -> int:
    """The number of units gathered ahead, also of torch's ``BackwardPrefetch``."""
    depth = prefetch_of(value) if option == "backward_prefetch" else None
    depth = value if depth is None else depth
    if depth is True and option == "forward_prefetch":  # torch's FSDP has a flag
        return 1
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
        raise ConfigurationError(f"{option}={depth!r}: expected 0 (none) or a number of units")
    return depth


def _check_size(option: str, size: object) -> None:
    if type(size) is not int or size < 1:
        raise ConfigurationError(
            f"expected {option} to be a whole number of at least 1, found {size!r}"
        )


def _check_axis(
    option: str, size: int, untried: Mapping[str, bool], planned: Mapping[str, bool]
) -> None:
    """Refuse options that do not work with an axis.

    Args:
        option: The axis.
        size: Its ranks.
        untried: Options that have not been tried with it, and whether they are set.
        planned: Those that need a plan of the run.
    """
    if size == 1:
        return
    if found := [name for name, is_set in untried.items() if is_set]:
        raise ConfigurationError(
            f"{option}={size} does not work together with {', '.join(found)} yet: leave out one "
            f"of the two"
        )
    if found := [name for name, is_set in planned.items() if is_set]:
        raise ConfigurationError(
            f"{option}={size} does not work together with {', '.join(found)}: plans are of layers "
            f"that tensor_parallel_plan names, so their memory and times would be those of another run. "
            f"Name the layers, or name a sharding_strategy (and a number for shard_size), leave "
            f"plan_only out, and compare strategies by a few steps"
        )
