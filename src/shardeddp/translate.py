"""Translation of other strategies' arguments into those of ShardedDP, with what changes its meaning.

It knows names and plain values alone: a call in a file, an entry of YAML and an object of a running
program are made into the same :class:`Call`, and nothing of the other engines is imported.
"""

from __future__ import annotations

# ruff: noqa: SIM905  # tables of words are read as text
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import partial
from types import EllipsisType, FunctionType, NoneType
from typing import Any, cast

from shardeddp.errors import ConfigurationError


class Expression(str):
    """Python code that stands for a value which is not known before it runs."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Call:
    """An object by the call that makes it."""

    path: str
    """Class or function, as it was written."""

    positional: tuple[Any, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    written: str = ""
    """Python code that makes it; empty for what is written by name and arguments."""

    @property
    def name(self) -> str:
        """The path's last word."""
        return self.path.rpartition(".")[2]

    @property
    def named(self) -> dict[str, Any]:
        """All arguments by name; those without are named by their places in torch's classes."""
        places = _PLACES.get(self.name, ())
        extra = (f"argument {place + 1}" for place in range(len(places), len(self.positional)))
        return {**dict(zip([*places, *extra], self.positional, strict=False)), **self.arguments}

    def get(self, name: str) -> Any:
        """An argument; None where it is not given."""
        return self.named.get(name)

    def __repr__(self) -> str:
        if self.written:
            return self.written
        shown = [
            *map(repr, self.positional),
            *(f"{key}={it!r}" for key, it in self.arguments.items()),
        ]
        return f"{self.path}({', '.join(shown)})"


_PLACES: dict[str, tuple[str, ...]] = {
    "MixedPrecision": ("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads",
                       "cast_forward_inputs", "cast_root_forward_inputs",
                       "_module_classes_to_ignore"),
    "MixedPrecisionPolicy": ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
    "CPUOffload": ("offload_params",),
    "CPUOffloadPolicy": ("pin_memory",),
    "ModuleWrapPolicy": ("module_classes",),
    "CustomPolicy": ("lambda_fn",),
    "init_device_mesh": ("device_type", "mesh_shape"),
    "timedelta": ("days", "seconds", "microseconds", "milliseconds", "minutes", "hours", "weeks"),
}  # fmt: skip
"""Arguments of other libraries' classes in their order."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a reader has to know about one key."""

    key: str
    text: str
    lost: bool = False
    """Whether something that was asked for cannot be had, so the run will not be the same."""


@dataclass(kw_only=True)
class Translation:
    """Arguments of ShardedDP, and what to know about them."""

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the Trainer that go with them."""

    notes: list[Note] = field(default_factory=list[Note])
    unneeded: list[str] = field(default_factory=list[str])
    """Keys that ask for what is always so, or tune parts that are not there."""

    @property
    def loses(self) -> bool:
        """Whether something that was asked for cannot be had."""
        return any(note.lost for note in self.notes)

    def note(self, key: str, text: str) -> None:
        """Say how a key changes its meaning."""
        self.notes.append(Note(key=key, text=text))

    def lose(self, key: str, text: str) -> None:
        """Say that something cannot be had."""
        self.notes.append(Note(key=key, text=text, lost=True))


@dataclass(frozen=True)
class Rule:
    """How a key and its value are taken into a translation; as a decorator, of a function."""

    apply: Callable[[Translation, str, Any], None]
    any_value: bool = False
    """Whether it passes values on without a look at them, or looks for expressions itself."""

    needed: bool | None = None
    """Whether its key is needed whatever the value; None: where it changes or says something."""


any_value = partial(Rule, any_value=True)

_UNNEEDED = Rule(lambda made, key, value: None, any_value=True, needed=False)


# -- values


def described(value: Any) -> Any:
    """A value of a running program, as it would be read from a file.

    Enumerations become their names, dtypes theirs, and option objects of other libraries the calls
    that make them; classes and functions stay.
    """
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, partial):
        made = cast("partial[Any]", value)
        arguments = {key: described(it) for key, it in made.keywords.items()}
        return Call(
            path="functools.partial", positional=(made.func, *made.args), arguments=arguments
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return Call(
            path=type(value).__name__,
            arguments={
                each.name: described(getattr(value, each.name))
                for each in dataclasses.fields(value)
                if each.init and getattr(value, each.name) not in (None, each.default)
            },
        )
    return value


class OpaqueValueError(Exception):
    """A value of a running program that no code is known for."""


def python_code(value: Any, quote: Callable[[str], str] = repr) -> str:
    """A value as Python code that makes it, of names that its file is taken to import.

    Args:
        value: Of a file or of a running program.
        quote: Writes texts.

    Raises:
        OpaqueValueError: Nothing that can be written makes it.
    """
    write = partial(python_code, quote=quote)
    if isinstance(value, Expression) or (isinstance(value, Call) and value.written):
        return str(value)
    if isinstance(value, Call):
        pairs = (f"{key}={write(it)}" for key, it in value.arguments.items())
        return f"{value.name}({', '.join([*map(write, value.positional), *pairs])})"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, timedelta):
        return repr(value.total_seconds())
    if isinstance(known := described(value), Call):
        return write(known)
    if type(value).__module__.startswith("shardeddp.wrap."):  # policies
        return write(Call(path=type(value).__name__, arguments=vars(value)))
    if isinstance(value, (type, FunctionType)) and value.__name__.isidentifier():
        return value.__name__
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value).items()
        return f"{{{', '.join(f'{write(key)}: {write(it)}' for key, it in entries)}}}"
    if isinstance(value, (list, tuple, set, frozenset)):
        inner = ", ".join(map(write, cast("Iterable[Any]", value)))
        if isinstance(value, tuple):
            return f"({inner},)" if inner else "()"
        return f"{{{inner}}}" if isinstance(value, (set, frozenset)) and inner else f"[{inner}]"
    plain = isinstance(value, (int, float, complex, bytes, NoneType, EllipsisType))
    if plain or type(value).__name__ == "dtype":
        return repr(value)
    raise OpaqueValueError


def _word(value: Any) -> str:
    """An enumeration's member, a name or a dotted path, as its last word in capitals."""
    word = value.name if isinstance(value, Enum) else str(value)
    return word.rpartition(".")[2].strip("'\"").lstrip("_").upper()


def _dtype(value: Any) -> Any:
    """The name of a dtype that is written as ``torch.bfloat16``."""
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else value


_BY_STAGE = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
_STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"sharding_strategy": "full_shard"},
    "SHARD_GRAD_OP": {"sharding_strategy": "shard_grad_op"},
    "HYBRID_SHARD": {"sharding_strategy": "hybrid_shard"},
    "HYBRID_SHARD_ZERO2": {"sharding_strategy": "hybrid_shard", "reshard_after_forward": False},
    "NO_SHARD": {"sharding_strategy": "no_shard"},
    "SHARD_OPTIMIZER": {"sharding_strategy": "shard_optimizer"},
    "FSDP": {"sharding_strategy": "full_shard"},
    "FSDP2": {"sharding_strategy": "full_shard"},
    "HSDP": {"sharding_strategy": "hybrid_shard"},
    "DDP": {"sharding_strategy": "no_shard"},
    **{
        f"{prefix}{stage}": {"sharding_strategy": name}
        for stage, name in enumerate(_BY_STAGE)
        for prefix in ("ZERO", "ZERO_", "ZERO-", "STAGE", "STAGE_")
    },
}
_BY_NUMBER = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of Accelerate, from 1."""


def sharding_of(value: Any) -> dict[str, Any] | None:
    """Our arguments for a sharding strategy of other libraries; None where it is not known.

    Args:
        value: A name in any case (``HYBRID_SHARD_ZERO2``, ``zero3``, ``hsdp``), or a member of
            torch's ``ShardingStrategy``.
    """
    found = _STRATEGIES.get(_word(value))
    return None if found is None else dict(found)


def prefetch_of(value: Any) -> int | None:
    """Our number of units for torch's ``BackwardPrefetch``; None where it is something else."""
    return {"BACKWARD_PRE": 1, "BACKWARD_POST": 1, "NO_PREFETCH": 0}.get(_word(value))


# -- rules that several strategies share


def _takes(
    expected: str, *types: type
) -> Callable[[Callable[[Translation, str, Any], None]], Rule]:
    """Makes a rule for values of some types alone; None asks for nothing."""

    def checked(apply: Callable[[Translation, str, Any], None]) -> Rule:
        @any_value
        def rule(made: Translation, key: str, value: Any) -> None:
            if type(value) in types:
                apply(made, key, value)
            else:
                _not_understood(made, key, value, expected)

        return rule

    return checked


_is_flag = _takes("true or false", bool)


def _runs(value: Any) -> bool:
    """Whether a value has parts that are not known before it runs."""
    if isinstance(value, Call):
        return _runs(value.named)
    if isinstance(value, Mapping):
        return any(map(_runs, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, (list, tuple)):
        return any(map(_runs, cast("Sequence[Any]", value)))
    return isinstance(value, Expression)


def _not_understood(made: Translation, key: str, value: Any, expected: str) -> None:
    if isinstance(value, Expression):
        made.lose(key, f"only the running program knows {value}: expected {expected}")
    elif value is not None:
        made.lose(key, f"{value!r} is not understood: expected {expected}")


def _pass_on(made: Translation, key: str, option: str, value: Any, remark: str = "") -> None:
    """Give a value as it is, with a line where the file does not say what it is."""
    made.options[option] = value
    if isinstance(value, Expression) or (remark and isinstance(value, Call)):
        made.note(key, f"{value} is passed on as it is written{remark}")


@any_value
def _same(made: Translation, key: str, value: Any) -> None:
    if value is not None:
        _pass_on(made, key, key, value)


@any_value
def _timeout(made: Translation, key: str, value: Any) -> None:
    """Seconds; also a text that LightningCLI reads as a duration, or the call that makes one."""
    if isinstance(value, Call) and value.name == "timedelta" and not _runs(value):
        value = timedelta(**value.named).total_seconds()
    elif isinstance(value, Call):
        value = Expression(repr(value))
    elif type(value) is str and not re.fullmatch(r"(\d+ days?, )?\d+:\d+:\d+(\.\d+)?", value):
        value = float(value)
    _same.apply(made, key, value)


def _always(text: str, *, when: Any) -> Rule:
    """A switch that is always in one position here."""

    @Rule
    def rule(made: Translation, key: str, value: Any) -> None:
        if value is not None and value != when:
            made.note(key, text)

    return rule


def _lost(text: str, *, unless: Sequence[Any] = (None, False)) -> Rule:
    @any_value
    def rule(made: Translation, key: str, value: Any) -> None:
        if not any(value is harmless or value == harmless for harmless in unless):
            made.lose(key, text)

    return rule


@any_value
def _of_trainer(made: Translation, key: str, value: Any) -> None:
    if value is not None:
        made.lose(
            key, "a Trainer argument here: Trainer(precision='bf16-mixed') or the one that it is"
        )


@partial(Rule, needed=True)
def _sharding(made: Translation, key: str, value: Any) -> None:
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and value.isdigit():
        number = int(value)
    if number is not None and 1 <= number <= len(_BY_NUMBER):
        value = _BY_NUMBER[number - 1]
    found = sharding_of(value)
    if found is None:
        near = _did_you_mean(_nearest(str(value).upper(), _BY_NUMBER))
        made.lose(key, f"{value!r} is not known: expected one of {', '.join(_BY_NUMBER)}{near}")
    else:
        made.options |= found


_SIGNATURE = ": here a function takes (name, module), not (module, recurse, nonwrapped_numel)"


@any_value
def _policy(made: Translation, key: str, value: Any) -> None:
    """A wrap policy: torch's objects, partials of its functions, classes, or None."""
    option = key.removesuffix("_policy") if key.startswith("activation") else "auto_wrap_policy"
    remark = _SIGNATURE if key.endswith("_policy") else ""
    if value is None and option != "auto_wrap_policy":
        return
    policy: Any = value
    if isinstance(policy, Call) and policy.name == "partial" and len(policy.positional) == 1:
        function = policy.positional[0]
        name = getattr(function, "__name__", str(function)).rpartition(".")[2]
        policy = Call(path=name, arguments=policy.arguments)
    if isinstance(policy, Expression) and policy.rpartition(".")[2] in _POLICY_FUNCTIONS:
        policy = Call(path=policy)
    asked = policy if isinstance(policy, Call) else Call(path="")
    match asked.name:
        case "ModuleWrapPolicy":
            classes = asked.get("module_classes")
        case "transformer_auto_wrap_policy" | "_module_wrap_policy":
            classes = asked.get("transformer_layer_cls") or asked.get("module_classes")
        case "size_based_auto_wrap_policy":
            size = asked.get("min_num_params") or 100_000_000
            made.options[option] = Call(path="shardeddp.SizePolicy", arguments={"min_numel": size})
            if asked.get("exclude_wrap_modules") or asked.get("force_leaf_modules"):
                made.note(key, "sizes alone decide: exclude_wrap_modules and force_leaf_modules "
                               "have no counterpart; name the classes instead")  # fmt: skip
            return
        case "CustomPolicy" | "lambda_auto_wrap_policy" if isinstance(
            asked.get("lambda_fn"), Expression
        ):
            function = asked.get("lambda_fn")
            made.options[option] = Expression(f"lambda name, module: bool(({function})(module))")
            return
        case "always_wrap_policy":
            made.options[option] = Expression("lambda name, module: True")
            return
        case _:
            if isinstance(value, Call) and value.written:
                value = Expression(value.written)
            _pass_on(made, key, option, value, remark)
            return
    if classes is None:
        made.lose(key, f"{policy!r} names no classes: write {option}={{Block}}")
    else:
        made.options[option] = classes


_POLICY_FUNCTIONS = ("size_based_auto_wrap_policy", "always_wrap_policy")


@any_value
def _offload(made: Translation, key: str, value: Any) -> None:
    if isinstance(value, Call):
        known = value.name in ("CPUOffload", "CPUOffloadPolicy", "OffloadPolicy")
        if not known or value.named.keys() - {"offload_params", "pin_memory"}:
            _not_understood(made, key, value, "true, false or torch's CPUOffload")
        value = known and (value.name == "CPUOffloadPolicy" or value.get("offload_params"))
    if value is not None and value is not False:
        _pass_on(made, key, "cpu_offload", value)


@any_value
def _mixed_precision(made: Translation, key: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Call):
        _pass_on(made, key, "mixed_precision", value)
        return
    found = value.named
    ours = {
        name: _dtype(found.pop(name))
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
        if found.get(name) is not None
    }
    if "param_dtype" in ours and "reduce_dtype" not in ours:
        ours["reduce_dtype"] = ours["param_dtype"]
        made.note(key, "gradients are reduced in param_dtype there where reduce_dtype is not "
                       "given, in float32 here: leave reduce_dtype out for that")  # fmt: skip
    # FSDP1 casts the inputs of the root even where it casts no others, and the rest follows from it.
    casts_root = found.pop("cast_root_forward_inputs", value.name == "MixedPrecision")
    casts = found.pop("cast_forward_inputs", value.name != "MixedPrecision")
    if isinstance(casts, Expression) or isinstance(casts_root, Expression):
        made.lose(key, "only the running program knows which inputs are cast")
    elif casts is False and not casts_root:
        ours["cast_forward_inputs"] = False
    ignored = found.pop("_module_classes_to_ignore", None)
    if ignored and [_word(getattr(it, "__name__", it)) for it in ignored] != ["BATCHNORM"]:
        ours["keep_fp32"] = ignored  # batch norms, the default, may not be in the model
    if found.pop("keep_low_precision_grads", None):
        made.lose(key, "keep_low_precision_grads: gradients of shards have the shards' own dtype")
    for name in found:
        made.lose(key, f"{name} is not known")
    made.options["mixed_precision"] = Call(path="shardeddp.MixedPrecision", arguments=ours)


@Rule
def _device_mesh(made: Translation, key: str, value: Any) -> None:
    if value is None:
        return
    sizes: Any = value
    if isinstance(value, Call):
        sizes = value.get("mesh_shape")
    elif type(value).__name__ == "DeviceMesh":
        sizes = tuple(value.mesh.shape)
    if not isinstance(sizes, (tuple, list)) or not all(
        type(size) is int and size > 0 for size in cast("Sequence[Any]", sizes)
    ):
        made.lose(key, "write shard_size=, the number of ranks that share one model (the last "
                       "number of the mesh), with 'hybrid_shard'")  # fmt: skip
    elif len(sizes) == 2:
        made.options.setdefault("sharding_strategy", "hybrid_shard")
        if made.options["sharding_strategy"] == "full_shard":
            made.options["sharding_strategy"] = "hybrid_shard"
        if (chosen := made.options["sharding_strategy"]) != "hybrid_shard":
            made.lose(key, f"replicas of shards are 'hybrid_shard', and {chosen!r} is asked for")
        else:
            made.options["shard_size"] = sizes[1]
    elif len(sizes) != 1:
        made.lose(key, f"{tuple(sizes)} has more dimensions than replicas and shards: write "
                       f"tensor_parallel_size= for ranks that split layers; context and pipeline "
                       f"parallelism are not there")  # fmt: skip


@Rule
def _backward_prefetch(made: Translation, key: str, value: Any) -> None:
    if value is None:
        made.options[key] = 0
        return
    depth = prefetch_of(value)
    if depth is None:
        made.options[key] = value
    elif _word(value) == "BACKWARD_POST":
        made.note(key, "BACKWARD_POST gathers a unit later than here, where 1 is as early as "
                       "BACKWARD_PRE; backward_prefetch=0 takes the least memory")  # fmt: skip
    elif depth != 1:
        made.options[key] = depth


@Rule
def _forward_prefetch(made: Translation, key: str, value: Any) -> None:
    if value is False:
        made.note(key, "one unit is gathered ahead here, which False does without saying so by "
                       "running the host ahead; forward_prefetch=0 for none")  # fmt: skip
    elif value is not True and value is not None:
        made.options[key] = value


@Rule
def _reshard(made: Translation, key: str, value: Any) -> None:
    if isinstance(value, str) and sharding_of(value):
        _sharding.apply(made, key, value)
    elif value is False or type(value) is int:
        made.options[key] = value
    elif value is not True:
        _not_understood(made, key, value, "true, false or a number of ranks")


@Rule
def _unused_parameters(made: Translation, key: str, value: Any) -> None:
    if value:
        made.note(key, "not needed: a parameter without a gradient keeps none. Where ranks use "
                       "different parts of the model in a step, write uneven_units=True")  # fmt: skip


_IGNORED = _lost(
    "every parameter is sharded, and nothing can be left out: a module that must stay whole "
    "has to be kept out of the LightningModule's attributes"
)
_FP32_MASTER = (
    "DeepSpeed keeps float32 master weights and steps on them whatever the precision; here "
    "precision='bf16-mixed' or '16-mixed' does that, and 'bf16-true' steps on bfloat16 itself"
)

_SHARED: dict[str, Rule] = {
    **dict.fromkeys(("cluster_environment", "checkpoint_io", "process_group_backend"), _same),
    "timeout": _timeout,
    **dict.fromkeys(("accelerator", "parallel_devices"), _UNNEEDED),
    "precision_plugin": _of_trainer,
}

# -- torch's FSDP, in its two generations

_FSDP: dict[str, Rule] = {
    **_SHARED,
    "sharding_strategy": _sharding,
    "device_mesh": _device_mesh,
    "cpu_offload": _offload,
    "offload_policy": _offload,
    "mixed_precision": _mixed_precision,
    "mp_policy": _mixed_precision,
    "auto_wrap_policy": _policy,
    "activation_checkpointing": _policy,
    "activation_checkpointing_policy": _policy,
    "state_dict_type": _same,
    "backward_prefetch": _backward_prefetch,
    "forward_prefetch": _forward_prefetch,
    "reshard_after_forward": _reshard,
    "use_orig_params": _always(
        "parameters always keep their names, shapes and identity", when=True
    ),
    "sync_module_states": _always("rank 0's values always reach all ranks", when=True),
    "limit_all_gathers": _always(
        "how far the host runs ahead is always limited: by forward_prefetch and backward_prefetch",
        when=True,
    ),
    "ignored_modules": _IGNORED,
    "ignored_states": _IGNORED,
    "ignored_parameters": _IGNORED,
    "ignored_params": _IGNORED,
    "param_init_fn": _lost(
        "modules built on the meta device get the values that their own construction gives; "
        "leave the function out, or write in configure_model what it does"
    ),
    "process_group": _lost("groups follow from sharding_strategy and shard_size"),
    "mesh": _device_mesh,
    "dp_mesh_dims": _lost("shard_size says how many ranks share one model"),
    "shard_placement_fn": _lost("flat buffers are cut evenly over ranks, whatever the dimension"),
    "device_id": _UNNEEDED,
}

# -- ModelParallelStrategy


@_is_flag
def _save_distributed(made: Translation, key: str, value: Any) -> None:
    made.options["state_dict_type"] = "full" if value is False else "sharded"


@Rule
def _tensor_parallel(made: Translation, key: str, value: Any) -> None:
    if type(value) is int and value > 0:
        made.options |= {"tensor_parallel_size": value} if value > 1 else {}
    elif value != "auto":
        _not_understood(made, key, value, "a number of ranks")
    else:
        made.lose(key, "its default is all ranks of a node there and 1 here: say the number of "
                       "ranks that split layers")  # fmt: skip


_MODEL_PARALLEL: dict[str, Rule] = {
    **_SHARED,
    "data_parallel_size": _UNNEEDED,
    "tensor_parallel_size": _tensor_parallel,
    "save_distributed_checkpoint": _save_distributed,
}

# -- DeepSpeed, by arguments and by its JSON


@partial(Rule, any_value=True, needed=True)
def _stage(made: Translation, key: str, value: Any) -> None:
    stage = int(value) if type(value) is str and value.isdigit() else value
    if type(value) not in (int, str):
        _not_understood(made, key, value, "0, 1, 2 or 3")
    elif stage in range(4):
        made.options["sharding_strategy"] = _BY_STAGE[int(stage)]
    else:
        made.lose(key, f"{value!r} is not known: expected 0, 1, 2 or 3")


@_is_flag
def _zero(made: Translation, key: str, value: Any) -> None:
    if not value:
        made.options["sharding_strategy"] = "no_shard"


_NO_DISKS = "disks are not offloaded to: host memory is the last resort"


def _offload_of(part: str) -> Rule:
    @any_value
    def rule(made: Translation, key: str, value: Any) -> None:
        device = value
        if isinstance(value, Mapping):
            inner = dict(cast("Mapping[str, Any]", value))
            device = inner.pop("device", "none")
            _apply_inside(made, _OFFLOADING, inner, f"{key}.")
        if device == "nvme":
            made.lose(key, _NO_DISKS)
        if device in (None, False, "none"):
            return
        if device not in (True, "cpu", "nvme"):
            _not_understood(made, key, device, "cpu, nvme or none")
        elif part == "params":
            made.options["cpu_offload"] = True
        else:
            made.options.setdefault("cpu_offload", {"optimizer": True})

    return rule


_device_of_offload = _lost(_NO_DISKS, unless=(None, "cpu", "none"))


@_is_flag
def _cpu_checkpointing(made: Translation, key: str, value: Any) -> None:
    if value:
        made.options["activation_checkpointing"] = Call(
            path="shardeddp.ActivationCheckpointing", arguments={"cpu_offload": True}
        )


_is_number_of_ranks = _takes("a number of ranks", int)


@_is_number_of_ranks
def _hpz(made: Translation, key: str, value: Any) -> None:
    if value > 1:
        made.options["reshard_after_forward"] = value
        made.note(key, "hpZ is reshard_after_forward: each rank keeps its part of what was "
                       "gathered, and this many neighbours gather for the backward")  # fmt: skip


@_is_number_of_ranks
def _mics(made: Translation, key: str, value: Any) -> None:
    if value > 0:
        made.options |= {"sharding_strategy": "hybrid_shard", "shard_size": value}


@_is_flag
def _gather_on_save(made: Translation, key: str, value: Any) -> None:
    if value:
        made.options["state_dict_type"] = "full"


_OFFLOADING: dict[str, Rule] = {
    **dict.fromkeys(
        "nvme_path pin_memory buffer_count buffer_size max_in_cpu pipeline_read pipeline_write "
        "pipeline fast_init".split(),
        _UNNEEDED,
    ),
    "ratio": _lost("what is offloaded is offloaded as a whole", unless=(None, 1)),
}
_TUNING = (
    "params_buffer_count params_buffer_size max_in_cpu optimizer_buffer_count block_size "
    "queue_depth single_submit overlap_events thread_count pin_memory sub_group_size "
    "contiguous_gradients overlap_comm allgather_partitions reduce_scatter allgather_bucket_size "
    "reduce_bucket_size zero_allow_untested_optimizer logging_batch_size_per_gpu logging_level "
    "contiguous_memory_optimization synchronize_checkpoint_boundary load_full_weights nvme_path "
    "round_robin_gradients ignore_unused_parameters stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold elastic_checkpoint legacy_stage1 memory_efficient_linear "
    "override_module_apply use_multi_rank_bucket_allreduce mics_hierarchical_params_gather "
    "param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance prefetch_bucket_size load_from_fp32_weights"
).split()

_SCALER = (
    "the loss scaler is the Trainer's: Trainer(plugins=MixedPrecision('16-mixed', 'cuda', "
    "scaler=torch.amp.GradScaler(...)))"
)
_SCALING: dict[str, Rule] = {
    "loss_scale": _lost(_SCALER, unless=(None, 0)),
    "initial_scale_power": _lost(_SCALER, unless=(None, 16)),
    "loss_scale_window": _lost(_SCALER, unless=(None, 1000)),
    "hysteresis": _lost(_SCALER, unless=(None, 2)),
    "min_loss_scale": _lost(_SCALER, unless=(None, 1)),
}
_PRECISION: dict[str, Rule] = {
    **_SCALING,
    "consecutive_hysteresis": _lost(_SCALER),
    "auto_cast": _lost("inputs are cast by the Trainer's precision"),
    **dict.fromkeys(
        "fp16_master_weights_and_grads bf16_master_weights_and_grads bf16_optimizer_states".split(),
        _lost("main weights and what the optimizer holds have the dtype of the parameters"),
    ),
    **dict.fromkeys(("immediate_grad_update", "check_grad_overflow"), _UNNEEDED),
}
_ZERO: dict[str, Rule] = {
    **dict.fromkeys(_TUNING, _UNNEEDED),
    "stage": _stage,
    "offload_optimizer": _offload_of("optimizer"),
    "offload_param": _offload_of("params"),
    "cpu_offload": _offload_of("optimizer"),
    "cpu_offload_params": _offload_of("params"),
    "zero_hpz_partition_size": _hpz,
    "mics_shard_size": _mics,
    "gather_16bit_weights_on_model_save": _gather_on_save,
    "stage3_gather_16bit_weights_on_model_save": _gather_on_save,
    "stage3_gather_fp16_weights_on_model_save": _gather_on_save,
    "zero_quantized_weights": _lost("parameters travel in their compute dtype, never in int8"),
    "zero_quantized_nontrainable_weights": _lost("parameters travel in their compute dtype"),
    "zero_quantized_gradients": _lost("gradients travel in reduce_dtype, never in int8"),
}


_AUTO = "'auto' is filled in by transformers; Lightning has to be told"


def _apply_inside(
    made: Translation, rules: Mapping[str, Rule], given: Mapping[str, Any], prefix: str
) -> None:
    """Take the keys of a part of a configuration, in which any value may be 'auto'."""
    apply_rules(made, {key: _or_auto(rule) for key, rule in rules.items()}, given, prefix)


def _or_auto(rule: Rule) -> Rule:
    def apply(made: Translation, key: str, value: Any) -> None:
        if type(value) is str and value == "auto":
            made.note(key, _AUTO)
        else:
            rule.apply(made, key, value)

    return rule if rule.needed is False else dataclasses.replace(rule, apply=apply)


@any_value
def _zero_optimization(made: Translation, key: str, value: Any) -> None:
    if isinstance(value, bool):
        _zero.apply(made, key, value)
    elif isinstance(value, Mapping):
        _apply_inside(made, _ZERO, cast("Mapping[str, Any]", value), f"{key}.")
    else:
        _not_understood(made, key, value, "a mapping, true or false")


def _within(rules: Mapping[str, Rule]) -> Rule:
    """A rule that takes the keys of a mapping by rules of their own."""

    @any_value
    def rule(made: Translation, key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            _apply_inside(made, rules, cast("Mapping[str, Any]", value), f"{key}.")
        else:
            _not_understood(made, key, value, "a mapping")

    return rule


def _mixed(precision: str) -> Rule:
    @_is_flag
    def enabled(made: Translation, key: str, value: Any) -> None:
        if made.trainer.setdefault("precision", precision) != precision:
            made.lose(key, f"{made.trainer['precision']!r} is asked for as well: one of the two")

    inside = _within({**_PRECISION, "enabled": enabled})

    @any_value
    def rule(made: Translation, key: str, value: Any) -> None:
        it = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"enabled": True}
        if it.get("enabled") == "auto":
            made.note(f"{key}.enabled", f"{_AUTO}: Trainer(precision={precision!r}), or nothing")
            inside.apply(made, key, {name: it[name] for name in it if name != "enabled"})
        elif it.get("enabled") not in (None, False):
            inside.apply(made, key, value)

    return rule


def _to_trainer(name: str) -> Rule:
    @_takes("a number", int, float)
    def rule(made: Translation, key: str, value: Any) -> None:
        made.trainer[name] = value

    return rule


@_takes("a number", int)
def _in_loader(made: Translation, key: str, value: Any) -> None:
    own = value if key.endswith("train_micro_batch_size_per_gpu") else "..."
    made.note(key, f"the DataLoader says it: DataLoader(batch_size={own}), per rank")


_IN_CODE = "written in code: configure_optimizers() returns it"
_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad")


@any_value
def _optimizer(made: Translation, key: str, value: Any) -> None:
    """DeepSpeed's Adam is torch's AdamW, as long as nobody asks for the other one."""
    it = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
    kind, asked, line = str(it.get("type")).lower(), it.get("params") or {}, ""
    if not isinstance(value, Mapping) or not isinstance(asked, Mapping):
        _not_understood(made, key, value, 'a mapping with "type" and "params"')
        return
    params = {
        name: own for name, own in cast("Mapping[str, Any]", asked).items() if own is not None
    }
    if kind == "adamw" or (kind == "adam" and params.get("adam_w_mode", True) is True):
        # Its own kernels do not decay weights unless they are told to; torch's class does.
        own = {} if params.get("torch_adam") else {"weight_decay": 0.0}
        own = {**{name: params[name] for name in _ADAM if name in params}, **own, **params}
        own = {name: own[name] for name in own if name in _ADAM and own[name] != "auto"}
        call = Call(path="AdamW", positional=(Expression("self.parameters()"),), arguments=own)
        line = f", here torch.optim.{python_code(call)}"
        if others := [str(it) for it in params if it not in (*_ADAM, "torch_adam", "adam_w_mode")]:
            line += f"; {', '.join(others)} would be lost"
    made.lose(key, f"{_IN_CODE}{line}")


_ACTIVATIONS: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "contiguous_memory_optimization",
            "number_checkpoints",
            "profile",
            "synchronize_checkpoint_boundary",
        ),
        _UNNEEDED,
    ),
    "cpu_checkpointing": _cpu_checkpointing,
    "partition_activations": _lost("kept inputs are not split over tensor-parallel ranks"),
}


@any_value
def _tool(made: Translation, key: str, value: Any) -> None:
    off = isinstance(value, Mapping) and cast("Any", value).get("enabled") in (None, False)
    if value is not None and value is not False and not off:
        made.lose(key, "a tool of DeepSpeed: use the Trainer's logger and profiler")


_CONFIG: dict[str, Rule] = {
    **dict.fromkeys(
        "steps_per_print dump_state zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "prescale_gradients gradient_predivide_factor memory_breakdown checkpoint "
        "sparse_gradients".split(),
        _UNNEEDED,
    ),
    **dict.fromkeys(
        "wall_clock_breakdown flops_profiler comms_logger tensorboard wandb csv_monitor".split(),
        _tool,
    ),
    "communication_data_type": _lost("gradients are reduced in mixed_precision's reduce_dtype"),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), _in_loader),
    "zero_optimization": _zero_optimization,
    "fp16": _mixed("16-mixed"),
    "bf16": _mixed("bf16-mixed"),
    "bfloat16": _mixed("bf16-mixed"),
    "gradient_clipping": _to_trainer("gradient_clip_val"),
    "gradient_accumulation_steps": _to_trainer("accumulate_grad_batches"),
    "optimizer": _optimizer,
    "scheduler": _lost(_IN_CODE),
    "activation_checkpointing": _within(_ACTIVATIONS),
    "aio": _lost(_NO_DISKS),
}


@any_value
def _config(made: Translation, key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        made.options["sharding_strategy"] = "no_shard"  # as without zero_optimization
        _apply_inside(made, _CONFIG, cast("Mapping[str, Any]", value), "config.")
    elif value is not None:
        made.lose(key, f"{value!r} could not be read: give the JSON file itself to "
                       f"`shardeddp migrate`")  # fmt: skip


_DEEPSPEED: dict[str, Rule] = {
    **_SHARED,
    **_ZERO,
    "zero_optimization": _zero,
    "offload_parameters": _offload_of("params"),
    "offload_params_device": _device_of_offload,
    "offload_optimizer_device": _device_of_offload,
    "remote_device": _device_of_offload,
    "config": _config,
    "partition_activations": _ACTIVATIONS["partition_activations"],
    "cpu_checkpointing": _cpu_checkpointing,
    "exclude_frozen_parameters": _lost(
        "checkpoints hold frozen parameters too; the LightningModule's "
        "on_save_checkpoint can drop them"
    ),
    **_SCALING,
}

# -- DistributedDataParallel

_HOOK = _lost("gradients are reduced by the engine: mixed_precision's reduce_dtype compresses them")
_DDP: dict[str, Rule] = {
    **_SHARED,
    "start_method": _same,
    "find_unused_parameters": _unused_parameters,
    "static_graph": _UNNEEDED,
    "gradient_as_bucket_view": _UNNEEDED,
    "bucket_cap_mb": _UNNEEDED,
    "bucket_cap_mb_list": _UNNEEDED,
    "init_sync": _always("rank 0's values always reach all ranks", when=True),
    "broadcast_buffers": _lost(
        "buffers follow rank 0, as DDP's do by default", unless=(None, True)
    ),
    "ddp_comm_hook": _HOOK,
    "ddp_comm_state": _HOOK,
    "ddp_comm_wrapper": _HOOK,
    "mixed_precision": _mixed_precision,
    **dict.fromkeys(
        ("batched_grad_copy", "check_reduction", "skip_all_reduce_unused_params"), _UNNEEDED
    ),
    **dict.fromkeys(
        ("delay_all_reduce_named_params", "param_to_hook_all_reduce", "forward_sync_buffers"),
        _lost("gradients and buffers are communicated by the engine alone"),
    ),
    "device_mesh": _lost("replicas are all ranks: 'hybrid_shard' with shard_size for fewer"),
    "model_averaging_period": _lost("replicas are equal after every step", unless=(None,)),
}

RULES: dict[str, dict[str, Rule]] = {
    "FSDPStrategy": _FSDP,
    "ModelParallelStrategy": _MODEL_PARALLEL,
    "DeepSpeedStrategy": _DEEPSPEED,
    "DDPStrategy": _DDP,
}

_THEIRS = frozenset(name for rules in RULES.values() for name in rules)
_OFFLOAD_3 = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("FSDPStrategy", {}),
    "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
    "deepspeed": ("DeepSpeedStrategy", {}),
    "deepspeed_stage_1": ("DeepSpeedStrategy", {"stage": 1}),
    "deepspeed_stage_1_offload": ("DeepSpeedStrategy", {"stage": 1, "offload_optimizer": True}),
    "deepspeed_stage_2": ("DeepSpeedStrategy", {"stage": 2}),
    "deepspeed_stage_2_offload": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": ("DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_stage_3_offload": ("DeepSpeedStrategy", _OFFLOAD_3),
    "deepspeed_stage_3_offload_nvme": (
        "DeepSpeedStrategy",
        {**_OFFLOAD_3, "offload_params_device": "nvme", "offload_optimizer_device": "nvme"},
    ),
    "ddp": ("DDPStrategy", {}),
    "ddp_spawn": ("DDPStrategy", {"start_method": "spawn"}),
    "ddp_fork": ("DDPStrategy", {"start_method": "fork"}),
    "ddp_notebook": ("DDPStrategy", {"start_method": "fork"}),
    "ddp_find_unused_parameters_true": ("DDPStrategy", {"find_unused_parameters": True}),
    "ddp_find_unused_parameters_false": ("DDPStrategy", {}),
}
"""Names that Lightning's Trainer knows, and the strategies that they stand for."""

_POSITIONS: dict[str, tuple[str, ...]] = {
    "FSDPStrategy": ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io",
                     "precision_plugin", "process_group_backend", "timeout", "cpu_offload",
                     "mixed_precision", "auto_wrap_policy"),
    "ModelParallelStrategy": ("data_parallel_size", "tensor_parallel_size",
                              "save_distributed_checkpoint", "process_group_backend", "timeout"),
    "DeepSpeedStrategy": ("accelerator", "zero_optimization", "stage"),
    "DDPStrategy": ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
}  # fmt: skip


def translate(
    strategy: str, arguments: Mapping[str, Any], positional: Sequence[Any] = ()
) -> Translation:
    """Arguments of ShardedDP for those of another strategy of Lightning.

    Args:
        strategy: Its class name, one of :data:`RULES`.
        arguments: By name, as a file has them or :func:`described` makes them.
        positional: Those without names, in order.
    """
    made = Translation()
    places = _POSITIONS[strategy]
    given = dict(zip(places, positional, strict=False))
    for place, extra in enumerate(positional[len(places) :], len(places) + 1):
        made.lose(repr(extra), f"argument {place} of {strategy}: give it by name")
    given |= arguments
    made.options["sharding_strategy"] = {
        "DeepSpeedStrategy": "shard_grad_op",
        "DDPStrategy": "no_shard",
    }.get(strategy, "full_shard")
    rules = RULES[strategy]
    says: list[str] = []
    if strategy == "DeepSpeedStrategy":  # where one of these is said, Lightning looks at it alone
        says += ["config"] if given.get("config") is not None else []
        says += ["zero_optimization"] if given.get("zero_optimization") is False else []
    for key in [
        it for it in given if says and it in rules and it not in (says[0], *_BESIDE_CONFIG)
    ]:
        made.note(key, f"not looked at there: {says[0]} says it all")
        del given[key]
    apply_rules(made, rules, given)
    _say_defaults(made, strategy, given)
    return made


_BESIDE_CONFIG = {
    *_SHARED, *_SCALING, "config", "exclude_frozen_parameters", "load_full_weights", "logging_level",
    "remote_device",
}  # fmt: skip
"""Arguments of DeepSpeedStrategy that do not make a configuration."""


def translate_config(config: Mapping[str, Any]) -> Translation:
    """Arguments of ShardedDP for a configuration of DeepSpeed, as its JSON file has it."""
    made = Translation()
    _config.apply(made, "config", config)
    _say_defaults(made, "DeepSpeedStrategy", {})
    return made


_ITS_OWN = {
    *("fp16", "bf16", "zero_allow_untested_optimizer", "gradient_accumulation_steps"),
    *("gradient_clipping", "steps_per_print", "wall_clock_breakdown", "flops_profiler"),
}
"""Keys that a configuration of DeepSpeed has, and others hardly."""

_OF_LIGHTNING = {"trainer", "strategy", "class_path"}


def is_of_deepspeed(config: Mapping[Any, Any]) -> bool:
    """Whether a mapping is DeepSpeed's, by its keys."""
    sizes = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
    return bool({*config} & sizes) or bool(_ITS_OWN & {*config} and not _OF_LIGHTNING & {*config})


_LAST = ("device_mesh", "mesh", "mics_shard_size", "zero_hpz_partition_size")
"""Keys that are looked at when the sharding strategy is known."""


def in_order(names: Iterable[str]) -> list[str]:
    """Names of arguments in the order in which they are taken."""
    return sorted(names, key=_LAST.__contains__)


def apply_rules(
    made: Translation, rules: Mapping[str, Rule], arguments: Mapping[str, Any], prefix: str = ""
) -> None:
    """Take each key by its rule; what has none, or surprises it, is lost.

    Args:
        made: What is added to.
        rules: By key.
        arguments: Values by key, as a file has them.
        prefix: Of keys in lines about them.
    """
    for key in in_order(arguments):
        rule, value = rules.get(key), arguments[key]
        if rule is None:
            near = _did_you_mean(_nearest(key, rules))
            made.lose(f"{prefix}{key}", f"no counterpart is known{near}")
            continue
        before = len(made.notes)
        former = dict(made.options), dict(made.trainer), [*made.unneeded]
        if _runs(value) and not rule.any_value:
            made.lose(key, f"only the running program knows {value!r}")
        else:
            try:
                rule.apply(made, key, value)
            except Exception as error:  # noqa: BLE001 - files hold anything, and a line says so
                made.options, made.trainer, made.unneeded = former
                made.lose(key, f"{value!r} is not understood: {error}")
        said = len(made.notes) > before
        if not (said or rule.needed) and former == (made.options, made.trainer, made.unneeded):
            made.unneeded.append(key)
        made.notes[before:] = [
            dataclasses.replace(note, key=f"{prefix}{note.key}")
            if not note.key.startswith(prefix)
            else note
            for note in made.notes[before:]
        ]


def _say_defaults(made: Translation, strategy: str, given: Mapping[str, Any]) -> None:
    """What is other than there where nothing was said."""
    if strategy == "DeepSpeedStrategy":
        made.note("precision", _FP32_MASTER)
        made.note("checkpoints", "those of DeepSpeed are not read: make one file of the last with "
                                 "its zero_to_fp32.py, and load that as a state_dict")  # fmt: skip
    if strategy == "ModelParallelStrategy":
        made.note("configure_model", "take fully_shard(...) out of it, and parallelize_module(...) "
                                     "where tensor_parallel_size is 1: auto_wrap_policy says "
                                     "which modules are units")  # fmt: skip
        if "tensor_parallel_size" not in given:
            _tensor_parallel.apply(made, "tensor_parallel_size", "auto")
        if "save_distributed_checkpoint" not in given:
            made.options["state_dict_type"] = "sharded"
    if strategy == "FSDPStrategy":
        if "auto_wrap_policy" not in given:
            made.note("auto_wrap_policy", "without one the whole model is gathered at once there; "
                                          "here 'auto' finds its repeated blocks")  # fmt: skip
        if not {"mixed_precision", "precision_plugin"} & given.keys():
            made.note("precision", "with 'bf16-mixed' FSDP reduces gradients in bfloat16, here "
                                   "they are reduced in float32")  # fmt: skip
    if "state_dict_type" not in made.options and strategy != "ModelParallelStrategy":
        there = "a directory" if strategy == "DeepSpeedStrategy" else "one file"
        made.note("state_dict_type", f"a checkpoint is {there} there; here one file up to 4 GB and "
                                     f"a directory of shards beyond: 'full' or 'sharded' decides")  # fmt: skip
    if given.get("timeout") is None:
        made.note("timeout", "ranks wait 600 s for each other here, 1800 s there: timeout=1800.0 "
                             "keeps that")  # fmt: skip
    _settle(made)


def _settle(made: Translation) -> None:
    """Take out what does not go with the sharding strategy."""
    if "shard_size" in made.options:
        made.options.setdefault("sharding_strategy", "hybrid_shard")
    whole = made.options.get("sharding_strategy") in ("no_shard", "shard_optimizer")
    if whole and made.options.pop("reshard_after_forward", None) is not None:
        made.lose("reshard_after_forward", "parameters are whole all the time here")


# -- what somebody gives to ShardedDP itself


def options_of(option: str, value: Any) -> Any:
    """A value of ``cpu_offload`` or ``mixed_precision`` where torch has a class of its own for it.

    Args:
        option: Which of the two.
        value: Any; what is no object of torch's FSDP is returned as it is.

    Raises:
        ConfigurationError: Something in it cannot be had.
    """
    if not type(value).__module__.startswith("torch.distributed."):
        return value
    made = Translation()
    rule = {"cpu_offload": _offload, "mixed_precision": _mixed_precision}[option]
    rule.apply(made, option, described(value))
    if lost := [note.text for note in made.notes if note.lost]:
        raise ConfigurationError(f"{option}={value!r}: {'; '.join(lost)}")
    found = made.options.get(option)
    return dict(found.arguments) if isinstance(found, Call) else found


def explain_unknown(names: Iterable[str], given: Mapping[str, Any], known: Iterable[str]) -> str:
    """An error's text for arguments that ShardedDP does not have."""
    known, lines, foreign = list(known), list[str](), dict[str, str]()
    own = {key: it for key, it in given.items() if key in known}
    for name in names:
        owner = _owner(name)
        if name in _TRAINERS:
            lines.append(
                f"{name}: it belongs to the Trainer: Trainer({name}={_or_own(given[name])})"
            )
        elif owner is None:
            nearest = _nearest(name, known)
            theirs = (
                [] if nearest else [f"{it} (of {_owner(it)})" for it in _nearest(name, _THEIRS)]
            )
            lines.append(f"{name}: not known{_did_you_mean([*nearest, *theirs])}")
            own |= {near: given[name] for near in nearest if near not in given}
        else:
            foreign[name] = owner
    made = Translation(options=own)
    for name in in_order(foreign):
        owner, before, options = foreign[name], len(made.notes), dict(made.options)
        apply_rules(made, RULES[owner], {name: described(given[name])})
        changed = {key: it for key, it in made.options.items() if options.get(key) is not it}
        said = "".join(f"; {it.text}" for it in made.notes[before:])
        if changed:
            said = f"write {_line(changed)}{said}"
            said += "".join(
                f"; {key}={_or_own(options[key])} is given as well: keep one of the two"
                for key in changed
                if key in options and options[key] != changed[key]
            )
            lines.append(f"{name} (of {owner}): {said}")
        else:
            lines.append(f"{name} (of {owner}): leave it out{said or '; nothing is needed for it'}")
    before = len(made.notes)
    _settle(made)
    lines += [f"{it.key}: leave it out; {it.text}" for it in made.notes[before:]]
    listed = "".join(f"\n  {text}" for text in lines)
    line = _line(made.options, "ShardedDP({})")
    return f"ShardedDP has no such arguments:{listed}\nThe line to write: {line}"


_TRAINERS = "precision devices num_nodes gradient_clip_val accumulate_grad_batches".split()
"""Arguments that people give to a strategy, and Lightning's Trainer takes."""


def not_known(name: str, known: Iterable[str]) -> str:
    """Text about a name that is none of the known ones, with the nearest of them."""
    return f"not known{_did_you_mean(_nearest(name, known))}"


def _owner(name: str) -> str | None:
    """The strategy of others that has an argument."""
    return next((each for each, rules in RULES.items() if name in rules), None)


def _did_you_mean(nearest: Iterable[str]) -> str:
    return "".join(f"; did you mean {near}?" for near in nearest)


def _nearest(name: object, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(str(name), list(known), n=1)


def _line(options: Mapping[str, Any], around: str = "{}") -> str:
    """Arguments as they are written, and the names of those whose values cannot be."""
    shown = {key: _or_own(it) for key, it in options.items()}
    line = ", ".join(f"{key}={text}" for key, text in shown.items() if text != _OWN)
    left = [key for key, text in shown.items() if text == _OWN]
    return around.format(line) + "".join(f", and your own {key}=" for key in left)


_OWN = "..."


def _or_own(value: Any) -> str:
    try:
        return python_code(value)
    except OpaqueValueError:
        return _OWN
