"""Private names of torch, each under a plain name and looked for at import.

Only this file uses them.

Long-standing attributes of tensors and modules (``_version``, ``_parameters``, hooks) are used
directly in other files; ``tests/house_rules.py`` lists them.
"""

# Other files import these imports from here.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from shardeddp.errors import ConfigurationError

NEEDS = ">=2.11"
"""Releases of torch that ``pyproject.toml`` allows."""


def _changed(problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"torch {torch.__version__} has changed {problem}. shardeddp needs torch {NEEDS}"
    )


try:
    from torch._dynamo import OptimizedModule
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._guards import TracingContext
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
    from torch.overrides import TorchFunctionMode
    from torch.utils import _pytree as pytree
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise _changed(f"{error.name}: expected all that is used, but {error}") from error

# -- Checks


def changed_parameters(
    found: Sequence[inspect.Parameter], parameters: str, *, exactly: bool = True
) -> str | None:
    """Return the difference between a function's parameters and the expected ones, or None.

    Args:
        found: Parameters of the installed function.
        parameters: Expected first names, separated by blanks.
        exactly: True if no further parameters are allowed; else these need a default.
    """
    expected, names = parameters.split(), [each.name for each in found]
    further = [each for each in found[len(expected) :] if exactly or _is_required(each)]
    if names[: len(expected)] == expected and not further:
        return None
    return f"expected ({', '.join(expected)}), found ({', '.join(names)})"


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not variadic


def of_torch(path: str, parameters: str | None = None) -> Any:
    """Return a private name of torch.

    Args:
        path: Module and name, as in ``torch.autograd.graph:_get_grad_fn_or_grad_acc``.
        parameters: Expected parameter names of a Python function that is called or replaced,
            separated by blanks; None: they are not checked.

    Raises:
        ConfigurationError: The installed release does not have it, or has it with other parameters.
    """
    module, _, names = path.partition(":")
    found: Any = import_module(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    place = path.replace(":", ".")
    if found is None:
        raise _changed(f"{place}: expected to be there, found nothing")
    if parameters is not None:
        has = list(inspect.signature(found).parameters.values())
        if problem := changed_parameters(has, parameters):
            raise _changed(f"{place}: {problem}")
    return found


# -- Tensors

close_to_pytree: Any = of_torch("torch.utils._pytree:_deregister_pytree_node", "cls")
"""Undo ``pytree.register_pytree_node`` of a class."""

without_torch_function: Any = of_torch("torch._C:DisableTorchFunctionSubclass")
"""Context manager in which functions of torch work on subclasses as on plain tensors."""

no_torch_function: Any = of_torch("torch._C:_disabled_torch_function_impl")
"""``__torch_function__`` of a subclass with the functions of plain tensors."""

torch_function_modes: Callable[[], Sequence[Any]] = of_torch(
    "torch.overrides:_get_current_function_mode_stack", ""
)
"""Active ``TorchFunctionMode`` objects, the innermost last."""

torch_dispatch_modes: Callable[[], Sequence[Any]] = of_torch(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", ""
)
"""Active ``TorchDispatchMode`` objects, the innermost last."""

transforms: Callable[[], Any] = of_torch("torch._C._functorch:peek_interpreter_stack")
"""Innermost active transform of ``torch.func``, or None."""

top_saved_tensors_hooks: Callable[[bool], Any] = of_torch(
    "torch._C._autograd:_top_saved_tensors_default_hooks"
)
"""Active hooks for saved tensors, or None; True: also those that are off while torch traces."""
push_saved_tensors_hooks: Callable[..., None] = of_torch(
    "torch._C._autograd:_push_saved_tensors_default_hooks"
)
pop_saved_tensors_hooks: Callable[[], None] = of_torch(
    "torch._C._autograd:_pop_saved_tensors_default_hooks"
)


class DispatchMode(TorchDispatchMode):
    """A mode that hears of operations, those with functions among their arguments included."""

    supports_higher_order_operators = True
    """Else torch refuses them: cond, flex_attention, the random states of a compiled recomputation."""


def leave_mode(mode: Any) -> None:
    """End a mode, which need not be the innermost; modes entered later remain active."""
    kind: Any = TorchFunctionMode if isinstance(mode, TorchFunctionMode) else TorchDispatchMode
    active = torch_function_modes() if kind is TorchFunctionMode else torch_dispatch_modes()
    at = max((at for at, it in enumerate(active) if it is mode), default=None)
    if at is not None:
        _replace_modes(kind, active[at:], active[at + 1 :])


def _replace_modes(kind: Any, innermost: Sequence[Any], successors: Sequence[Any]) -> None:
    """Replace the innermost modes of a kind, without their own ``__enter__`` and ``__exit__``."""
    for mode in reversed(innermost):
        kind.__exit__(mode, None, None, None)
    for mode in successors:
        kind.__enter__(mode)


_SELECTIVE_MODES: tuple[type, ...] = (
    of_torch("torch.utils.checkpoint:_CachingTorchDispatchMode"),
    of_torch("torch.utils.checkpoint:_CachedTorchDispatchMode"),
)


@contextmanager
def outside_selective_checkpoints() -> Generator[None]:
    """Suspend the modes of selective activation checkpointing.

    They number the operations of a recomputed module in its forward, and find kept results by these
    numbers in its recomputation. Gathers and reductions inside of it are no operations of its own,
    and differ between both.
    """
    active = [*torch_dispatch_modes()]
    first = next((at for at, it in enumerate(active) if isinstance(it, _SELECTIVE_MODES)), None)
    if first is None:
        yield
        return
    suspended = active[first:]
    others = [it for it in suspended if not isinstance(it, _SELECTIVE_MODES)]
    _replace_modes(TorchDispatchMode, suspended, others)
    try:
        yield
    finally:
        _replace_modes(TorchDispatchMode, others, suspended)


TensorBase: Any = of_torch("torch._C:TensorBase")
get_gradient: Any = TensorBase.grad.__get__
set_gradient: Any = TensorBase.grad.__set__
set_data: Any = TensorBase.data.__set__

preserve_versions: Any = of_torch("torch.autograd.grad_mode:_unsafe_preserve_version_counter")
"""Context manager that leaves writes to some tensors uncounted."""

swap_tensor_impl: Callable[[torch.Tensor, torch.Tensor], None] = of_torch(
    "torch._C:_swap_tensor_impl"
)
make_subclass: Any = of_torch("torch:Tensor._make_subclass")
"""Returns an object of a class over the memory of a tensor, past its constructor."""

make_wrapper_subclass: Any = of_torch("torch:Tensor._make_wrapper_subclass")
"""Returns an object of a class with a shape and a dtype, and no memory."""

neg_view: Callable[[torch.Tensor], torch.Tensor] = of_torch("torch:_neg_view")
"""Returns the negative of a tensor as a view, as is the imaginary part of a conjugate."""

slice_storage: Callable[[torch.UntypedStorage, slice], torch.UntypedStorage] = of_torch(
    "torch._C:StorageBase.__getitem__"
)
"""Returns a storage over bytes of another, which it keeps; the public way takes 4 times as long."""

storage_of_weak_reference: Any = of_torch("torch:UntypedStorage._new_with_weak_ptr")
refuse_data_pointer: Callable[[torch.Tensor], None] = of_torch(
    "torch._C:_set_throw_on_mutable_data_ptr"
)
is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = of_torch("torch._C:_is_alias_of")
storage_use_count: Callable[[int], int] = of_torch("torch._C:_storage_Use_Count")
"""Number of references of C++ to a storage, given as its ``_cdata``."""


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, equal for all tensors over that memory."""
    return tensor.untyped_storage()._cdata


foreach_copy_: Any = of_torch("torch:_foreach_copy_")
foreach_mul_: Any = of_torch("torch:_foreach_mul_")
foreach_zero_: Any = of_torch("torch:_foreach_zero_")
parse_to: Any = of_torch("torch._C:_nn._parse_to")
"""Parses device, dtype and further arguments as ``Module.to`` does."""

typed_storage_class: Callable[[torch.TypedStorage], str] = of_torch(
    "torch:TypedStorage._pickle_storage_type", "self"
)
"""Returns the name in torch of the class that a pickle has for a typed storage."""

typed_storage_length: Callable[[torch.TypedStorage], int] = of_torch(
    "torch:TypedStorage._size", "self"
)


def untyped_storage(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the bytes of a typed storage; the public way warns."""
    return storage._untyped_storage


rebuild_tensor: Any = of_torch(
    "torch._utils:_rebuild_tensor_v3",
    "storage storage_offset size stride requires_grad backward_hooks dtype metadata",
)

# -- Functions that dynamo does not trace

P = ParamSpec("P")
R = TypeVar("R")

_skip_frames: Any = of_torch("torch._dynamo.decorators:skip", "fn")
_skip_code: Any = of_torch("torch._dynamo.eval_frame:skip_code", "code")


def never_traced(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Exclude a function from compiled code: the graph breaks before it and resumes after it.

    Args:
        reason: Reason and remedy; torch shows both to users of ``fullgraph=True``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        disabled: Any = torch.compiler.disable(function, reason=reason)
        return disabled

    return decorate


def runs_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run eagerly where it is called between the graphs of compiled code.

    Costs nothing, unlike :func:`never_traced`; functions that it calls may be compiled.
    """
    skipped: Any = _skip_frames(function)
    return skipped


def compiled_only_inside(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function be a part of graphs that it is called in, and no graph of its own elsewhere.

    For hooks of modules: torch runs those of a compiled module before or after its graph.
    """
    eager: Any = torch.compiler.disable(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return (function if torch.compiler.is_compiling() else eager)(*args, **kwargs)

    made: Any = run
    _skip_code(made.__code__)  # of the call by torch; what is traced looks into it
    return made


# -- Autograd

current_backward: Callable[[], int] = of_torch("torch._C:_current_graph_task_id")
"""Returns the number of the backward that runs on this thread, or -1."""

are_transforms_active: Callable[[], bool] = of_torch("torch._C:_are_functorch_transforms_active")
_get_dispatch_mode: Callable[[Any], Any] = of_torch("torch._C:_get_dispatch_mode")
_PROXY: Any = of_torch("torch._C:_TorchDispatchModeKey.PROXY")


def is_in_backward() -> bool:
    """Return whether a backward runs on this thread."""
    return current_backward() != -1


def are_operations_traced() -> bool:
    """Return whether operations are traced: by make_fx, linearize, export or torch.jit.trace."""
    return _get_dispatch_mode(_PROXY) is not None or torch.jit.is_tracing()


engine: Any = of_torch("torch.autograd:Variable._execution_engine")


class PatchPoint:
    """A function of torch that may be replaced, and is called through its module."""

    def __init__(self, path: str, parameters: str | None = None) -> None:
        of_torch(path, parameters)
        module, _, self._name = path.partition(":")
        self._module: Any = import_module(module)
        self.original: Any = self.current
        """The function when this module was imported."""

    @property
    def current(self) -> Any:
        """The function as it is now."""
        return getattr(self._module, self._name)

    def replace(self, function: Callable[..., Any]) -> None:
        """Let torch call another function instead."""
        setattr(self._module, self._name, function)


function_arguments = PatchPoint("torch._functorch.utils:unwrap_dead_wrappers", "args")
"""Unwraps the arguments of every ``autograd.Function.apply``."""

engine_run = PatchPoint("torch.autograd:_engine_run_backward", "t_outputs args kwargs")
"""Entry of ``backward`` and ``autograd.grad`` into the engine."""

node_of_tensor = PatchPoint("torch.autograd.graph:_get_grad_fn_or_grad_acc", "t")
"""Returns the node of a tensor, for ``register_multi_grad_hook`` and ``get_gradient_edge``."""

will_execute = PatchPoint("torch._C:_will_engine_execute_node")
"""Returns whether the running backward will execute a node."""

described_gradient = PatchPoint("torch._subclasses.meta_utils:safe_grad", "t")
"""Returns the ``grad`` of a tensor for the compiler's own description of it."""

flex_attention_device = PatchPoint(
    "torch.nn.attention.flex_attention:_validate_device", "query key value"
)
"""Refuses devices: the CPU with gradients."""

# -- Stack of saved-tensor hooks

are_hooks_enabled: Callable[[], bool] = of_torch(
    "torch._C._autograd:_saved_tensors_hooks_is_enabled"
)
top_hooks: Callable[[bool], Any] = of_torch("torch._C._autograd:_top_saved_tensors_default_hooks")
push_hooks: Callable[[Any, Any], None] = of_torch(
    "torch._C._autograd:_push_saved_tensors_default_hooks"
)
pop_hooks: Callable[[], None] = of_torch("torch._C._autograd:_pop_saved_tensors_default_hooks")

disable_hooks = PatchPoint("torch._C._autograd:_saved_tensors_hooks_disable")
"""Disables the hooks; a later attempt to set one raises the given error."""

# -- Operations

all_operation_names: Callable[[], Sequence[str]] = of_torch("torch._C:_dispatch_get_all_op_names")
_front: Any = of_torch("torch._C:DispatchKey.BackendSelect")
"""Dispatch key of all calls, after the keys of subclasses and before those of devices."""

_PYTHON_DISPATCHER: Any = of_torch("torch._C:DispatchKey.PythonDispatcher")
"""The dispatch key of a dispatcher that compilers enable: it would look for the same kernel again."""


def put_in_front(
    library: torch.library.Library,
    func: OpOverload,
    kernel: Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> None:
    """Run a kernel before an operation's kernels for devices.

    Args:
        library: Library that owns the kernel.
        func: Operation.
        kernel: Function called with the operation, a function that runs it as without this kernel,
            the arguments and the keyword arguments.
    """

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        behind = partial(func.redispatch, keys.remove(_front).remove(_PYTHON_DISPATCHER))
        if getattr(_past, "front", False):
            return behind(*args, **kwargs)
        return kernel(func, behind, args, kwargs)

    library.impl(func, run, "BackendSelect", with_keyset=True)


_past = threading.local()


def past_the_front(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function's operations skip the kernels of :func:`put_in_front`."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # No dispatch key is excluded: groups written in Python make tensors, for which torch needs
        # the same key.
        _past.front = True
        try:
            return function(*args, **kwargs)
        finally:
            _past.front = False

    return run


has_kernel: Callable[[str, str], bool] = of_torch("torch._C:_dispatch_has_kernel_for_dispatch_key")
higher_order_operations: Any = of_torch("torch._ops:_higher_order_ops")

# -- Process groups

_c10d: Any = import_module("torch.distributed.distributed_c10d")
_world: Any = of_torch("torch.distributed.distributed_c10d:_world")
COLLECTIVES_FILE: str = _c10d.__file__
"""Source file of the functions that issue collectives."""

OPERATORS_FILE: str = of_torch("torch._ops:__file__")
"""Source file of the functions that call operators."""

default_store: Callable[[], dist.Store] = of_torch(
    "torch.distributed.distributed_c10d:_get_default_store", ""
)


make_group = PatchPoint("torch.distributed.distributed_c10d:_new_process_group_helper")
"""Makes every process group, whatever function is called for one."""


def new_group_of_its_ranks(
    ranks: Sequence[int], name: str, timeout: timedelta, backend: str | None
) -> dist.ProcessGroup:
    """Return a process group that is made by its own ranks, without the others.

    ``new_group(use_local_synchronization=True)`` does that too, but derives the store key at which
    its ranks meet from the number of groups a rank has. That differs between ranks once a user has
    made a group of some of them.

    Args:
        ranks: Global ranks, ascending; this rank among them.
        name: Name of the group, the same on all of its ranks and new.
        timeout: Timeout of its collectives.
        backend: Backend of the group; None: that of the default process group.
    """
    default: Any = dist.group.WORLD
    default_backend, store = _world.pg_map[default]
    group, _ = make_group.current(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend or default_backend),
        store,
        name,
        timeout=timeout,
        device_id=default.bound_device_id,
    )
    _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


_get_sequence_number: Any = of_torch(
    "torch.distributed:ProcessGroup._get_sequence_number_for_group"
)


def sequence_number(group: dist.ProcessGroup) -> int | None:
    """Return the number of collectives begun in a group; None: its backend does not count them."""
    try:
        return _get_sequence_number(group)
    except RuntimeError:
        return None


def process_groups() -> list[dist.ProcessGroup]:
    """Return every process group of this process."""
    return list(_world.pg_map)


def backend_config(group: dist.ProcessGroup) -> str:
    """Return the backends of a group by device, as torch writes them; empty if it is gone."""
    return _world.pg_backend_config.get(group, "")


def coalesces() -> bool:
    """Return whether collectives are being coalesced."""
    return bool(_world.pg_coalesce_state)


def content_of_fsdp_policy(policy: Any) -> Any:
    """Return the classes of FSDP's ``ModuleWrapPolicy`` or the function of its ``CustomPolicy``.

    Args:
        policy: Policy, recognized by its name: the engine that it belongs to is not imported here.
    """
    for name in ("_module_classes", "_lambda_fn"):
        if name in vars(policy):
            return vars(policy)[name]
    raise _changed(
        f"{type(policy).__name__}: expected _module_classes or _lambda_fn, found neither"
    )


STATE_VERSIONS = "_metadata"
"""Attribute of a state dict: versions of modules' states, by fqn."""
