"""Options of the strategy: their types, as YAML can write them, and checks of users' values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cache, partial
from inspect import signature
from types import MappingProxyType, UnionType
from typing import (
    Any,
    Literal,
    TypeAlias,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import nn

from shardeddp.errors import ConfigurationError, closest, did_you_mean, nearest
from shardeddp.plan.hardware import find_gpu
from shardeddp.plan.sharding_strategy import (
    SHARDING_STRATEGIES,
    Reshard,
    ShardingStrategy,
    ShardSize,
)
from shardeddp.translation.torch_strategies import options_of, prefetch_of, sharding_of
from shardeddp.translation.unknown import explain_unknown
from shardeddp.wrap import AutoPolicy, Modules, Policy, PolicyLike, resolve_policy
from shardeddp.wrap.experts import resolve_experts
from shardeddp.wrap.kept_operations import check_save_ops
from shardeddp.wrap.tensor_plan import TensorPlan, check_plan
from shardeddp.wrap.tree import imported

T = TypeVar("T")

AUTO = "auto"
"""Option value of a strategy or shard size that setup chooses by a plan."""

ShardingStrategyName: TypeAlias = Literal[
    "full_shard", "hybrid_shard", "shard_grad_op", "shard_optimizer", "no_shard", "auto"
]

ShardSizeOption: TypeAlias = int | Literal["auto"] | None
OptimizerShard: TypeAlias = Literal["group", "world"]
StateDictType: TypeAlias = Literal["auto", "sharded", "full"]
StartMethod: TypeAlias = Literal["popen", "spawn", "fork", "forkserver"]
UnevenBatches: TypeAlias = Literal["error", "min", "join"]
OptimizerScope: TypeAlias = Literal["element", "parameter", "model"]
DTypeLike: TypeAlias = torch.dtype | str | None
ModuleClasses: TypeAlias = Sequence[type[nn.Module] | str]


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Dtypes of gathered parameters, of computation and of gradient reduction.

    Main shards keep their own dtype.

    A dtype is written as ``torch.bfloat16`` or as the name ``bfloat16`` (also ``bf16``, ``fp16``,
    ``fp32``, ``fp64``).

    Args:
        param_dtype: Dtype of gathered parameters and of computation. None: each parameter's own.
        reduce_dtype: Dtype of gradient reduction. None: float32, or the parameter's own dtype if
            that is wider.
        output_dtype: Dtype of floating-point outputs of the model's outermost modules. None: no
            cast.
        buffer_dtype: Dtype of floating-point buffers. None: each buffer's own.
        cast_forward_inputs: True: cast floating-point inputs of units and of the model's outermost
            modules to ``param_dtype``.
        keep_fp32: Module classes, their names or import paths, that keep and compute with their
            parameters' own dtype, such as norms and routers.
    """

    param_dtype: DTypeLike = None
    reduce_dtype: DTypeLike = None
    output_dtype: DTypeLike = None
    buffer_dtype: DTypeLike = None
    cast_forward_inputs: bool = True
    keep_fp32: ModuleClasses = ()

    def __post_init__(self) -> None:
        check_fields(self, prefix="MixedPrecision.")
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            object.__setattr__(self, name, _resolve_dtype(getattr(self, name), name))


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Activation checkpointing: modules that keep only their inputs and recompute in backward.

    Args:
        modules: Modules to recompute, written as for ``auto_wrap_policy``: ``auto`` (the repeated
            blocks of the model), classes or their names, a policy (in YAML ``class_path`` and
            ``init_args``), a function of (name, module). Of nested modules the outermost counts.
        every: Step of the selection: every n-th of these modules, in module order, from the first.
        save_ops: Operations that keep their results (selective checkpointing), as names (``matmul``
            and ``attention`` for all of their kind, ``aten.mm.default``, ``aten.mm``, ``mm``) or
            objects of ``torch.ops``; or a policy function for
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, or its import path.
            Empty: all operations are recomputed.
        cpu_offload: True: keep the inputs of these modules in host memory between forward and
            backward. Tensors kept by ``save_ops`` stay on the device.
    """

    modules: Modules = "auto"
    every: int = 1
    save_ops: str | Sequence[Any] | Callable[..., Any] = ()
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ConfigurationError(
                f"ActivationCheckpointing.every: expected 1 (every module) or a larger whole number, "
                f"found {self.every!r}."
            )
        check_fields(self, prefix="ActivationCheckpointing.")


@dataclass(frozen=True, kw_only=True)
class CPUOffload:
    """State kept in host memory instead of on the device.

    Args:
        params: True: offload main shards, gradient shards and optimizer states; the optimizer steps
            on the host. The least device memory, and the slowest.
        optimizer: True: offload optimizer states. Without ``params`` they alone are offloaded, and
            the optimizer steps on the host, on copies of parameters and gradients.
    """

    params: bool = False
    optimizer: bool = False

    def __post_init__(self) -> None:
        check_fields(self, prefix="CPUOffload.")

    @property
    def optimizer_alone(self) -> bool:
        """True if the optimizer steps on the host, on copies of parameters and gradients."""
        return self.optimizer and not self.params


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options of writing and reading checkpoints.

    Args:
        max_file_gb: Size limit of a file under ``state_dict_type="auto"``, in GB (10**9 bytes);
            larger checkpoints are directories. 0: directories only.
        asynchronous: True: write in a thread during training, from one copy of the shards in host
            memory. Directories only: with ``state_dict_type="auto"`` every checkpoint is one.
        durability: ``disk``: a save that has returned survives a power loss. ``process``: no fsync;
            faster, but a save survives only the end of the process.
        permissions: ``private``: access for the owner alone (0600, directories 0700). ``umask``:
            access by the umask, for checkpoints that others read. None: private directories, single
            files by the umask.
        zip_crc: True: write the checksums that tools other than this package look for, at about
            0.4 s of a core per GB. False needs directories: with ``state_dict_type="auto"`` every
            checkpoint is one.
        cast: True: cast loaded tensors to the model's dtypes. False: a different dtype is an error.
        foreign: True: load directories of other tools too (FSDP, FSDP2, plain
            ``torch.distributed.checkpoint``). Their indexes are pickles; the reader accepts a few
            harmless types only.
        trust_pickle: True: unpickle foreign indexes without this limit, so that their writer can
            run code here. Needs ``foreign``.
        timeout: Seconds for which a rank that has written its part waits for the others; longer
            than the slowest disk needs. None: the strategy's own ``timeout``.
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
        check_fields(self, prefix="CheckpointOptions.")
        if self.timeout is not None and not _is_duration(self.timeout):
            raise ConfigurationError(
                f"CheckpointOptions.timeout={self.timeout!r}: expected a positive number of "
                f"seconds, or None"
            )
        if not _is_number(self.max_file_gb) or not self.max_file_gb >= 0:
            raise ConfigurationError(
                f"CheckpointOptions.max_file_gb={self.max_file_gb!r}: expected a number of GB, 0 for "
                f"no single files"
            )
        if self.trust_pickle and not self.foreign:
            raise ConfigurationError(
                "trust_pickle=True goes with foreign=True: no pickle of our own is ever read"
            )


def check_choice(option: str, value: T, choices: Sequence[object], advice: str = "") -> T:
    """Return the value of an option if it is one of its choices; ``advice`` ends the error's text."""
    if value not in choices:
        raise ConfigurationError(
            f"{option}={value!r}: expected one of {', '.join(map(str, choices))}{advice}"
        )
    return value


def check_fields(
    options: Any, advice: Mapping[str, str] = MappingProxyType({}), prefix: str = ""
) -> None:
    """Check the fields of a dataclass that are declared as a bool or as a Literal.

    Args:
        options: Instance of the dataclass.
        advice: Ends of messages, by field.
        prefix: Text before names of fields, for those that are names of options too.
    """
    for name, choices in _choices_of(type(options)).items():
        value = getattr(options, name)
        if choices:
            check_choice(f"{prefix}{name}", value, choices, advice.get(name, ""))
        elif not isinstance(value, bool):
            raise ConfigurationError(f"{prefix}{name}={value!r}: expected True or False")


@cache
def _choices_of(kind: type) -> dict[str, tuple[object, ...]]:
    """Return the values of each field of type Literal or ``Literal | None``; none for flags."""
    found: dict[str, tuple[object, ...]] = {}
    for name, hint in get_type_hints(kind).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        literal, rest = parts[0], parts[1:]
        if hint is bool:
            found[name] = ()
        elif get_origin(literal) is Literal and rest in ((), (type(None),)):
            found[name] = (*get_args(literal), *([None] if rest else []))
    return found


def _from_fields(option: str, kind: Callable[..., T], value: Any) -> T | Any:
    """Return the options of a mapping with some of their fields; other values unchanged."""
    if not isinstance(value, Mapping) or "class_path" in value:
        return value
    known = [*signature(kind).parameters]
    for key in value:
        if key not in known:
            raise ConfigurationError(
                f"{option}={dict(value)!r}: expected a mapping with some of {', '.join(known)}; "
                f"found {key!r}: {nearest(str(key), known)}"
            )
    return kind(**value)


def resolve_checkpoint_options(value: object) -> CheckpointOptions:
    """Resolve ``checkpoint_options``: the options, or a mapping with their fields."""
    found = _from_fields("checkpoint_options", CheckpointOptions, value)
    if isinstance(found, CheckpointOptions):
        return found
    raise ConfigurationError(
        f"checkpoint_options={value!r}: expected CheckpointOptions(...), or a mapping with some of "
        f"{', '.join(signature(CheckpointOptions).parameters)}"
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_duration(value: object) -> TypeGuard[float]:
    """Return True for a positive number of seconds that fits into a ``timedelta``."""
    return _is_number(value) and 0 < value < timedelta.max.total_seconds()


def resolve_timeout(value: object) -> timedelta:
    """Resolve a ``timeout``: a number of seconds, or a timedelta."""
    if _is_duration(value):
        return timedelta(seconds=value)
    if isinstance(value, timedelta) and value > timedelta(0):
        return value
    raise ConfigurationError(
        f"timeout={value!r}: expected a positive number of seconds or a datetime.timedelta, for "
        f"example 600.0"
    )


def resolve_offload(value: object) -> CPUOffload:
    """Resolve ``cpu_offload``: a bool, the options, or a mapping with their fields."""
    value = _from_fields("cpu_offload", CPUOffload, options_of("cpu_offload", value))
    if value is None or isinstance(value, bool):
        return CPUOffload(params=bool(value), optimizer=bool(value))
    if isinstance(value, CPUOffload):
        return value
    raise ConfigurationError(
        f"cpu_offload={value!r}: expected True (everything), False, or what to offload: "
        f"CPUOffload(optimizer=True), in YAML {{optimizer: true}}, or params"
    )


def resolve_mixed_precision(value: object) -> MixedPrecision | None:
    """Resolve ``mixed_precision``: None, the options, their fields, or a ``param_dtype``."""
    value = _from_fields("mixed_precision", MixedPrecision, options_of("mixed_precision", value))
    if value is None or isinstance(value, MixedPrecision):
        return value
    if isinstance(value, (str, torch.dtype)):
        return MixedPrecision(param_dtype=value)
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


def _resolve_dtype(value: DTypeLike, name: str) -> torch.dtype | None:
    """Resolve the dtype of a field of :class:`MixedPrecision`."""
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


def resolve_optimizer_scope(value: Any) -> dict[str, OptimizerScope]:
    """Resolve ``optimizer_scope``: scopes by name or import path of the optimizer's class."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"optimizer_scope={value!r}: expected a mapping from optimizer classes, or their names "
            f"or import paths, to one of {', '.join(get_args(OptimizerScope))}, such as {{'Lion': "
            f"'element'}}"
        )
    return {
        f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else str(key): check_choice(
            f"optimizer_scope[{key!r}]",
            scope,
            get_args(OptimizerScope),
            ": the elements that the new value of an element depends on",
        )
        for key, scope in value.items()
    }


# -- Activation checkpointing

ActivationCheckpointingLike: TypeAlias = (
    bool | ActivationCheckpointing | Mapping[str, Any] | PolicyLike
)
"""Values that ``resolve_activation_checkpointing`` accepts."""

LIKE_UNITS = (
    "ActivationCheckpointing.modules is written as auto_wrap_policy is, and what was found does "
    "not do:"
)
"""Beginning of errors of :func:`resolve_modules` and of the policies that it returns."""


def resolve_activation_checkpointing(value: object) -> ActivationCheckpointing | None:
    """Resolve the value of ``activation_checkpointing``.

    Args:
        value: None, False or ``"none"`` (off); True or ``"auto"`` (the repeated blocks of the
            model); modules, written as for ``auto_wrap_policy``: a module class or its name, a list
            or set of these, a function ``(name, module) -> bool``, a Policy; a mapping with the
            fields of :class:`ActivationCheckpointing`, or with the ``class_path`` and ``init_args``
            of a policy; or an :class:`ActivationCheckpointing`.

    Returns:
        Options with a Policy as ``modules``; None for off.
    """
    if value is None or value is False or (isinstance(value, str) and value.lower() == "none"):
        return None
    options = _from_fields("activation_checkpointing", ActivationCheckpointing, value)
    if not isinstance(options, ActivationCheckpointing):
        options = ActivationCheckpointing(modules="auto" if value is True else cast(Modules, value))
    check_save_ops(options.save_ops)
    modules = resolve_modules(options.modules)
    return options if modules is options.modules else replace(options, modules=modules)


def resolve_modules(modules: Any) -> Policy:
    """Resolve ``modules`` of :class:`ActivationCheckpointing` to a policy.

    A mapping has the ``class_path`` and ``init_args`` of a policy, as in YAML.
    """
    if isinstance(modules, Mapping):
        return _build_policy(modules)
    if modules is None or (isinstance(modules, str) and modules.lower() == "none"):
        raise ConfigurationError(
            "ActivationCheckpointing.modules: expected the modules to recompute, found "
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


# -- Sharding strategies


def find_sharding(sharding_strategy: str) -> ShardingStrategy:
    """Return the sharding strategy of a case-insensitive name; an error suggests the nearest one."""
    name = str(sharding_strategy).lower()
    if name in SHARDING_STRATEGIES:
        return SHARDING_STRATEGIES[name]
    near = closest(name, (*SHARDING_STRATEGIES, AUTO), cutoff=0.4)
    raise ConfigurationError(
        f"sharding_strategy={sharding_strategy!r} is not known; expected one of "
        f"{', '.join((*SHARDING_STRATEGIES, AUTO))}{did_you_mean(map(repr, near))}"
    )


def choose_sharding(
    sharding_strategy: str,
    shard_size: ShardSizeOption = None,
    reduce_every_backward: bool | None = None,
    reshard_after_forward: bool | int | None = None,
    offload_params: bool = False,
    optimizer_shard: OptimizerShard = "group",
) -> ShardingStrategy:
    """Return the sharding strategy of a name with the user's options applied.

    The name is case-insensitive. ``shard_size="auto"`` is the default until setup chooses one.
    """
    sharding = find_sharding(sharding_strategy)
    changes: dict[str, Any] = {}
    if shard_size is not None:
        if sharding.shard_size is not ShardSize.NODE:
            raise ConfigurationError(
                f"shard_size={shard_size} goes with sharding_strategy='hybrid_shard', found "
                f"{sharding_strategy!r}, whose shard size is fixed; leave shard_size out or use "
                f"'hybrid_shard'"
            )
        if shard_size != AUTO and (type(shard_size) is not int or shard_size < 1):
            raise ConfigurationError(
                f"shard_size={shard_size!r}: expected a number of ranks, 'auto' or None"
            )
        if shard_size != AUTO:
            changes["shard_size"] = shard_size
    if type(reduce_every_backward) not in (bool, type(None)):  # 1 is equal to True
        raise ConfigurationError(
            f"reduce_every_backward={reduce_every_backward!r}: expected True, False or None"
        )
    if reduce_every_backward is not None:
        changes["reduce_every_backward"] = reduce_every_backward
    if reshard_after_forward is not None:
        changes |= _resharding(sharding_strategy, sharding, reshard_after_forward)
    if optimizer_shard == "world" and sharding.shard_size is not ShardSize.NODE:
        raise ConfigurationError(
            f"optimizer_shard='world' goes with sharding_strategy='hybrid_shard', found "
            f"{sharding_strategy!r}, which has no replicas or nothing but replicas; leave it out"
        )
    changes["split_replicas"] = optimizer_shard == "world"
    return replace(sharding, **changes, offload_params=offload_params)


def candidates(**options: Any) -> dict[str, ShardingStrategy]:
    """Return the sharding strategies that accept the options of :func:`choose_sharding`.

    They are in the order of preference for unknown hardware.
    """
    found: dict[str, ShardingStrategy] = {}
    refusals: list[ConfigurationError] = []
    for name in SHARDING_STRATEGIES:
        try:
            found[name] = choose_sharding(name, **options)
        except ConfigurationError as error:
            refusals.append(error)
    if not found:
        raise ConfigurationError(
            f"sharding_strategy='auto': no strategy goes with the other options: {refusals[0]}"
        ) from refusals[0]
    return found


def _resharding(
    sharding_strategy: str, sharding: ShardingStrategy, after_forward: object
) -> dict[str, Any]:
    if sharding.retains:
        raise ConfigurationError(
            f"reshard_after_forward={after_forward} does not go with "
            f"sharding_strategy={sharding_strategy!r}, which never reshards; leave it out, or use "
            f"'full_shard', 'hybrid_shard' or 'shard_grad_op'"
        )
    if isinstance(after_forward, bool):
        return {"reshard": Reshard.AFTER_FORWARD if after_forward else Reshard.AFTER_BACKWARD}
    if not isinstance(after_forward, int) or after_forward < 2:
        raise ConfigurationError(
            f"reshard_after_forward={after_forward!r}: expected True, False, or a number of ranks of "
            f"at least 2 that divides the shard size"
        )
    return {"reshard": Reshard.AFTER_FORWARD, "regather_size": after_forward}


# -- All options of a strategy


OF_LIGHTNING = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io")
"""Arguments of the strategies that are Lightning's own, and no fields of :class:`Options`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Options of a strategy, resolved: values as users write them become those of the fields.

    ``ShardedDP`` describes them for users, as its arguments of the same names. Components of the
    strategy and of the engine read their fields of this object.

    Raises:
        ConfigurationError: An option is invalid, or does not work with another one.
    """

    sharding_strategy: str = "full_shard"
    """Our own name in lower case, or ``auto``."""
    shard_size: ShardSizeOption = None
    """Number of ranks that share one model under ``hybrid_shard``; None: the ranks of one node."""
    auto_wrap_policy: Policy = field(default_factory=AutoPolicy)
    """Choice of the modules that become units."""
    mixed_precision: MixedPrecision | None = None
    """Dtypes of gathers and reductions; None: those of the Trainer's precision."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Modules whose activations are computed again in the backward; None: none."""
    cpu_offload: CPUOffload = CPUOffload()
    """What lies in host memory between its uses."""
    reshard_after_forward: bool | int | None = None
    """Override that holds for every strategy chosen later; None: the default of each."""
    optimizer_shard: OptimizerShard = "group"
    """Ranks that divide optimizer states: those of the shard group, or all of them."""
    optimizer_scope: Mapping[str, OptimizerScope] = field(default_factory=dict[str, OptimizerScope])
    """By class name or import path; a scope given here counts before the one that is known."""
    tensor_parallel_size: int = 1
    """Number of ranks that split layers."""
    tensor_parallel_plan: TensorPlan | None = None
    """Plan as given: its names are matched once there is a model."""
    expert_parallel_size: int = 1
    """Number of ranks with different experts."""
    experts: Policy | None = None
    """Choice of the modules that hold experts; None without expert parallelism."""
    forward_prefetch: int = 1
    """Number of units that are gathered ahead of their forward."""
    backward_prefetch: int = 1
    """Number of units that are gathered ahead of their backward."""
    reduce_every_backward: bool | None = None
    """Override that holds for every strategy chosen later; None: the default of each."""
    uneven_batches: UnevenBatches = "error"
    """What ends a training epoch if ranks have different numbers of batches."""
    uneven_units: bool = False
    """True: ranks may use different units in one step."""
    state_dict_type: StateDictType = "auto"
    """Form of checkpoints: directories of shards, or one file."""
    checkpoint_options: CheckpointOptions = CheckpointOptions()
    """How checkpoints are written and read."""
    process_group_backend: str | None = None
    """Backend of torch.distributed; None: the accelerator's."""
    timeout: timedelta = timedelta(seconds=600)
    """Limit of the rendezvous, of collectives and of messages on the host."""
    debug: bool = False
    """True: the mesh compares the collectives of user code; it cannot be changed later."""
    plan_only: bool | str = False
    """True or a GPU (its name in the planner's table): plan the run and end it."""
    start_method: StartMethod = "popen"
    """How ranks on this machine are started."""

    sharding: ShardingStrategy = field(init=False)
    """What the engine reads of these; under ``auto`` the first candidate, until one is chosen."""
    candidates: Mapping[str, ShardingStrategy] = field(init=False, repr=False)
    """Sharding strategies by name that ``auto`` chooses from; without it, the only one."""

    def __post_init__(self) -> None:
        self._set({name: resolve(getattr(self, name)) for name, resolve in _RESOLVED_BY.items()})
        _check_backend(self.process_group_backend)
        check_size("tensor_parallel_size", self.tensor_parallel_size)
        check_size("expert_parallel_size", self.expert_parallel_size)
        check_fields(
            self,
            {
                "uneven_batches": "; 'min' ends each epoch with the first rank that has no batch "
                "left, 'join' with the last"
            },
        )
        self._set({"experts": resolve_experts(self.experts, self.expert_parallel_size)})
        self._set(_resolve_sharding(self))
        self._check_axes()
        check_plan(self.tensor_parallel_plan, self.tensor_parallel_size)

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def shards_like(self, other: Options) -> bool:
        """Return whether a model that was sharded by these options is sharded by the others, too.

        If not, it is sharded anew when the others are set up. Plans of torch's styles, which are
        objects, are compared by their text.
        """
        names = [it.name for it in fields(self) if it.name not in _OUTSIDE_OF_SHARDS]
        mine, others = (
            [str(it.tensor_parallel_plan), *(getattr(it, name) for name in names)]
            for it in (self, other)
        )
        return mine == others

    def _check_axes(self) -> None:
        """Refuse options that do not work with tensor or expert parallelism."""
        untried = {
            "cpu_offload": self.cpu_offload.params or self.cpu_offload.optimizer,
            "optimizer_shard='world'": self.sharding.split_replicas,
            "reshard_after_forward=<number>": self.sharding.regather_size is not None,
            "uneven_batches": self.uneven_batches != "error",
            "uneven_units": self.uneven_units,
        }
        planned = {
            "sharding_strategy='auto'": self.sharding_strategy == AUTO,
            "shard_size='auto'": self.shard_size == AUTO,
            "plan_only": self.plan_only is not False,
        }
        splits = {"tensor_parallel_size": self.tensor_parallel_size > 1}
        by_name = self.tensor_parallel_plan is not None  # plans know layers of a plan only
        unnamed = {} if by_name else planned
        _check_axis("tensor_parallel_size", self.tensor_parallel_size, untried, unnamed)
        _check_axis("expert_parallel_size", self.expert_parallel_size, splits | untried, {})

    def with_sharding(self, name: str, shard_size: ShardSizeOption) -> Options:
        """Return these options with another sharding strategy."""
        return replace(self, sharding_strategy=name, shard_size=shard_size)

    @property
    def order_of_gathers(self) -> list[str]:
        """Options that change the order of gathers, with their values; equal on all ranks."""
        names = "forward_prefetch", "backward_prefetch", "uneven_units"
        return [f"{name}={getattr(self, name)}" for name in names]


_OUTSIDE_OF_SHARDS = frozenset(
    {
        # `sharding` has what these resolve to.
        *("sharding_strategy", "shard_size", "reshard_after_forward", "optimizer_shard"),
        *("reduce_every_backward", "candidates"),
        "tensor_parallel_plan",  # compared by its text
        *("optimizer_scope", "uneven_batches", "state_dict_type", "checkpoint_options"),
        *("process_group_backend", "timeout", "plan_only", "start_method"),
    }
)
"""Fields of :class:`Options` that may change while a model stays sharded as it is."""


def option_names() -> list[str]:
    """Return the names of the options."""
    return [*signature(Options).parameters]


def changed_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function or class that differ from their defaults."""

    def differs(value: Any, default: Any) -> bool:
        return value is not default and (type(value) is not type(default) or value != default)

    known = signature(function).parameters.values()
    defaults = {it.name: it.default for it in known if it.default is not it.empty}
    return {name: values[name] for name, it in defaults.items() if differs(values[name], it)}


def parse_options(given: Mapping[str, Any], beside: Collection[str] = ()) -> Options:
    """Parse the options of a strategy, as users write them; missing ones have their default.

    ``beside`` has the names of further arguments of the strategy that are no options.

    Raises:
        TypeError: A name is unknown, or an argument of another strategy; with the line to write.
        ConfigurationError: An option is invalid, or does not work with another one.
    """
    names = option_names()
    if unknown := [name for name in given if name not in (*names, *beside)]:
        raise TypeError(explain_unknown(unknown, given, (*names, *beside)))
    return Options(**{name: given[name] for name in names if name in given})


def _resolve_sharding(options: Options) -> dict[str, Any]:
    """Return the fields that follow from the sharding strategy, as the user has written it."""
    given, reshard = options.sharding_strategy, options.reshard_after_forward
    known = sharding_of(given) or {"sharding_strategy": given}
    strategy = known["sharding_strategy"]
    reshard = known.get("reshard_after_forward") if reshard is None else reshard
    choices: dict[str, Any] = {
        "shard_size": options.shard_size,
        "reduce_every_backward": options.reduce_every_backward,
        "reshard_after_forward": reshard,
        "offload_params": options.cpu_offload.params,
        "optimizer_shard": options.optimizer_shard,
    }
    name = str(strategy).lower()
    found = candidates(**choices) if name == AUTO else {name: choose_sharding(strategy, **choices)}
    return {
        "sharding_strategy": name,
        "reshard_after_forward": reshard,
        "sharding": next(iter(found.values())),
        "candidates": found,
    }


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
    """Resolve ``plan_only``; a GPU gets its name in the planner's table."""
    if isinstance(value, str):
        return find_gpu(value).name
    if not isinstance(value, bool):
        raise ConfigurationError(
            f"plan_only={value!r}: expected True, False, or the name of a GPU such as 'A100-80'"
        )
    return value


def resolve_prefetch(option: str, value: Any) -> int:
    """Resolve a number of units to gather ahead; torch's ``BackwardPrefetch`` is accepted."""
    depth = prefetch_of(value) if option == "backward_prefetch" else None
    depth = value if depth is None else depth
    if depth is True and option == "forward_prefetch":  # a flag in torch's FSDP
        return 1
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
        raise ConfigurationError(f"{option}={depth!r}: expected 0 (none) or a number of units")
    return depth


_RESOLVED_BY: Mapping[str, Callable[[Any], Any]] = {
    "auto_wrap_policy": resolve_policy,
    "mixed_precision": resolve_mixed_precision,
    "activation_checkpointing": resolve_activation_checkpointing,
    "cpu_offload": resolve_offload,
    "optimizer_scope": resolve_optimizer_scope,
    "forward_prefetch": partial(resolve_prefetch, "forward_prefetch"),
    "backward_prefetch": partial(resolve_prefetch, "backward_prefetch"),
    "checkpoint_options": resolve_checkpoint_options,
    "timeout": resolve_timeout,
    "plan_only": _resolve_plan_only,
}
"""Functions from a user's value to the field, by option; other values are fields already."""


def check_size(option: str, size: object, least: int = 1) -> None:
    """Refuse a size that is no whole number of at least ``least``."""
    if type(size) is not int or size < least:
        raise ConfigurationError(
            f"expected {option} to be a whole number of at least {least}, found {size!r}"
        )


def _check_axis(
    option: str, size: int, untried: Mapping[str, bool], planned: Mapping[str, bool]
) -> None:
    """Refuse options that are set (True) and do not work with an axis, or with plans of it."""
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
