"""Autograd on sharded parameters: `grad`, `backward(inputs=...)`, and arguments of `Function`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shardeddp.tensor.backward import asking, retaining, stored_gradient
from shardeddp.tensor.operations import asks_only_about
from shardeddp.tensor.shard_tensor import (
    ShardTensor,
    gather,
    origin_of,
    refuse_recorded_write,
)
from shardeddp.tensor.unsharded import (
    FQN,
    ReleasedParameter,
    UnshardedBase,
    outside_of,
    replacement_of,
    sharded_of,
    with_gradient_of,
)
from shardeddp.tensor.views import Gathered, GatheredView, update_views
from shardeddp.torch_private import (
    described_gradient,
    engine_run,
    function_arguments,
    node_of_tensor,
    pytree,
    temporarily_clear_interpreter_stack,
    will_execute,
    without_torch_function,
)

# -- ``torch.autograd.grad`` with respect to sharded parameters
#
# Gradients are this rank's own and whole, as under DistributedDataParallel.


def autograd_grad(
    outputs: Any, inputs: Sequence[Any], **options: Any
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ``torch.autograd.grad``, with sharded parameters among its arguments.

    A sharded parameter stands for two leaves of the graph: itself, where it was used outside its
    unit, and the unsharded parameter of its unit. Its gradient is the sum of theirs: of this rank's
    outputs, not averaged, a plain tensor of the parameter's shape that may be differentiated again.
    """
    dtypes = [x.dtype for x in inputs]
    inputs = [outside_of(x) for x in inputs]  # within a step, parameters are unsharded ones
    leaves = [
        (index, x.unsharded)
        for index, x in enumerate(inputs)
        if isinstance(x, ShardTensor) and x.unsharded is not None
    ]
    unused_is_fine, zeros = options.get("allow_unused"), options.get("materialize_grads")
    options |= {"allow_unused": True, "materialize_grads": False}
    with asking():
        both = [*inputs, *(leaf for _, leaf in leaves)]
        results: list[torch.Tensor | None] = [*torch.autograd.grad(outputs, both, **options)]
    for (index, _), gradient in zip(leaves, results[len(inputs) :], strict=True):
        if gradient is not None:
            gradient = gradient.to(dtypes[index])  # gradient of autocast's copy
        outside = results[index]
        results[index] = (
            gradient if outside is None else outside if gradient is None else outside + gradient
        )
    for index, x in enumerate(inputs):
        if results[index] is None and zeros:
            graph = bool(options.get("create_graph"))
            results[index] = torch.zeros(
                x.shape, dtype=x.dtype, device=x.device, requires_grad=graph
            )
        elif results[index] is None and not unused_is_fine:
            name = f" ({x.spec.fqn})" if isinstance(x, ShardTensor) else ""
            raise RuntimeError(
                f"One of the differentiated Tensors{name} appears to not have been used in the "
                f"graph. Set allow_unused=True if this is the desired behavior."
            )
    return tuple(results[: len(inputs)])


def with_unsharded(inputs: Any) -> list[Any]:
    """Return leaves of a graph and the unsharded parameters of sharded ones; each once."""
    leaves: list[Any] = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    unsharded = [
        leaf.unsharded
        for leaf in leaves
        if isinstance(leaf, ShardTensor) and leaf.unsharded is not None
    ]
    known = {id(leaf) for leaf in leaves}
    return leaves + [leaf for leaf in unsharded if id(leaf) not in known]


# -- Arguments of ``torch.autograd.Function``
#
# ``apply`` is the one way into a graph that ``__torch_function__`` does not see. The forward of a
# function would compute with a shard, its backward return a gradient that is never averaged, and a
# kernel read memory that does not exist. All calls of ``apply``, also by references that were taken
# at import, pass their arguments through one private function of torch; that one is patched here.
#
# A backward that builds a graph (adjoint methods, reversible layers) requests gradients with
# respect to the arguments of its forward, while the code it runs may use the parameters themselves.
# In one process the two are one leaf. So a request for the gradient of such an argument becomes one
# for that of the parameter: torch's way into its engine, private as well, is patched for that, and
# for `backward(inputs=...)`: a sharded parameter there means all of its uses. So it does for its
# node in the graph (`get_gradient_edge`, `register_multi_grad_hook`).

_NAMED = 5  # parameters in a message

_AT_VERSION = re.compile(r"\[([\d, ]*)\]\].* is at version (\d+)")  # autograd's text, by shape


def patch_functions() -> None:
    """Patch torch so that every ``autograd.Function`` of the process sees full tensors from now on.

    Later calls change nothing; the patches stay for as long as the process lives.
    """
    replaced = function_arguments, engine_run, node_of_tensor, will_execute, described_gradient
    unwrap, run, _, executes, gradient = (each.current for each in replaced)
    if unwrap.__module__ == __name__:
        return

    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = unwrap(args)
        if any(isinstance(arg, (ShardTensor, ReleasedParameter)) for arg in args):
            return tuple(map(_full, args))
        return args

    def run_backward(
        outputs: Any,
        grad_outputs: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Any,
        *flags: Any,
        **kwargs: Any,
    ) -> Any:
        try:
            with retaining(retain_graph, for_inputs=bool(inputs)):
                return run(
                    outputs, grad_outputs, retain_graph, create_graph, inputs, *flags, **kwargs
                )
        except RuntimeError as error:
            _name_written(error, outputs)
            raise

    def engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        grad_outputs, retain_graph, create_graph, inputs, *flags = args
        if kwargs["accumulate_grad"]:
            inputs = tuple({id(each): each for each in map(outside_of, inputs)}.values())
            if any(isinstance(each, ShardTensor) for each in inputs):
                args = (
                    grad_outputs,
                    retain_graph,
                    create_graph,
                    tuple(with_unsharded(inputs)),
                    *flags,
                )
            return run_backward(outputs, *args, **kwargs)
        together = set(map(id, inputs))
        found = [_origin(each, together) for each in inputs]
        if not any(each is not None for each in found):
            return run_backward(outputs, *args, **kwargs)
        asked = [
            each if origin is None else origin for each, origin in zip(inputs, found, strict=True)
        ]
        graph = {
            "retain_graph": retain_graph,
            "create_graph": create_graph,
            "allow_unused": flags[0],
        }
        with without_torch_function():
            return autograd_grad(outputs, asked, grad_outputs=grad_outputs, **graph)

    def node_of(tensor: Any) -> Node:
        sharded = _with_node_in_unit(tensor)
        if sharded is not None:
            sharded.show_node()
        return node_for_engine(tensor)

    def executes_node(node: Node) -> bool:
        successor = replacement_of(node)
        return executes(node if successor is None else node_of(successor))

    def safe_grad(t: torch.Tensor) -> torch.Tensor | None:
        # The node of the sharded parameter, from an earlier step, is no part of a unit's graph.
        return stored_gradient(t) if isinstance(t, UnshardedBase) else gradient(t)

    described_gradient.replace(safe_grad)
    function_arguments.replace(unwrap_dead_wrappers)
    BackwardCFunction.saved_tensors = _saved_with_gradients(BackwardCFunction.saved_tensors)  # type: ignore[assignment]
    # Callers may pass nodes from before the parameters were sharded.
    will_execute.replace(executes_node)
    node_of_tensor.replace(node_of)
    engine_run.replace(engine_run_backward)


def node_for_engine(tensor: Any) -> Node:
    """Return the node where gradients of a tensor arrive; of a parameter, that within its unit.

    It is the node of ``get_gradient_edge``, which counts a parameter's as known to a user.
    """
    sharded = _with_node_in_unit(tensor)
    if sharded is None:
        return node_of_tensor.original(tensor)
    sharded.pass_gradients_through_hooks()  # as get_gradient_edge does
    with without_torch_function():
        return node_of_tensor.original(sharded.unsharded)


def _with_node_in_unit(tensor: Any) -> ShardTensor | None:
    """Return the sharded parameter that a tensor is, if its unit's one has the node."""
    sharded = outside_of(tensor) if isinstance(tensor, torch.Tensor) else tensor
    is_in_unit = isinstance(sharded, ShardTensor) and sharded.unsharded is not None
    return sharded if is_in_unit and sharded.requires_grad else None


def _origin(asked: Any, together: set[int]) -> ShardTensor | None:
    """Return the sharded parameter that a gradient request means; None if it is requested itself.

    Args:
        asked: Full tensor that a function was given, or a parameter as it is within a step: its
            earlier uses may have been uses of the sharded one.
        together: Identities of all tensors of the request; :func:`autograd_grad` handles both.
    """
    origin = outside_of(asked) if isinstance(asked, UnshardedBase) else origin_of(asked)
    return None if id(origin) in together else origin


def _name_written(error: RuntimeError, outputs: Iterable[torch.Tensor | GradientEdge]) -> None:
    """Raise with the names of parameters that were written to since the forward."""
    if "modified by an inplace operation" not in str(error):
        return
    if "output 0 of _View" in str(error):
        _raise_written(
            {
                node.fqn  # type: ignore[attr-defined]
                for node in _nodes(outputs)
                if isinstance(node, _View._backward_cls)  # type: ignore[attr-defined]
            },
            error,
        )
    found = _AT_VERSION.search(str(error))
    if found is None:
        return
    shape, version = found.groups()
    numel = math.prod(map(int, shape.split(","))) if shape else 1
    with without_torch_function():
        leaves = [getattr(node, "variable", None) for node in _nodes(outputs)]
        numels = {
            vars(leaf)[FQN]: leaf.numel()
            for leaf in leaves
            if isinstance(leaf, UnshardedBase) and leaf._version == int(version)
        }
    whole = {name for name, its in numels.items() if its == numel}
    # Or a view of it was saved.
    _raise_written(whole or {name for name, its in numels.items() if its > numel}, error)


def _raise_written(names: Iterable[str], error: RuntimeError) -> None:
    if not (names := sorted(names)):
        return
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise RuntimeError(
        f"parameter {', '.join(names[:_NAMED])}{rest} was written to between its forward and "
        f"its backward (through `.data`, too): the gradients would belong to neither state. "
        f"Write to it before the forward or after the backward"
    ) from error


def _nodes(outputs: Iterable[torch.Tensor | GradientEdge]) -> Iterator[Any]:
    """Yield the nodes of a graph."""
    waiting = [
        output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs
    ]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        yield node
        found = {each for each, _ in getattr(node, "next_functions", ()) if each is not None} - seen
        seen |= found
        waiting += found


def _saved_with_gradients(inherited: Any) -> property:
    """Return a property for a function's saved tensors that share the ``.grad`` of parameters.

    Under hooks autograd unpacks a parameter as a new tensor, on which a gradient would be lost.
    """

    def saved_tensors(context: Any) -> tuple[Any, ...]:
        return tuple(map(_with_its_gradient, inherited.__get__(context)))

    return property(saved_tensors)


def _with_its_gradient(tensor: Any) -> Any:
    if type(tensor) is not torch.Tensor or not tensor.requires_grad:
        return tensor
    if tensor.is_leaf:
        node: Any = get_gradient_edge(tensor).node
        parameter = node.variable if isinstance(node.variable, UnshardedBase) else None
    else:
        parameter = origin_of(tensor)
    return tensor if parameter is None else with_gradient_of(parameter, tensor)


def _full(argument: Any) -> Any:
    if isinstance(argument, ReleasedParameter):
        argument = sharded_of(argument)
    if not isinstance(argument, ShardTensor):
        return argument
    operation = "an autograd.Function of"
    if argument.requires_grad and torch.is_grad_enabled():
        argument.warn_outside()
        return with_gradient_of(argument, argument.full_for_autograd(operation))
    gathered = Gathered(argument, operation=operation)
    return GatheredView(gathered.full, gathered)  # writes of the forward reach the shard


class _View(torch.autograd.Function):
    """Return a view of a full tensor as a ``GatheredView``, with the view's gradients."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor, gathered: Gathered) -> GatheredView:
        ctx.fqn = gathered.sharded.spec.fqn  # for errors
        return GatheredView(view, gathered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:  # type: ignore[override]
        return tangent


def _needs_gradient(arguments: Any) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad
        for leaf in pytree.tree_leaves(arguments)
    )


def _run_on_full(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that autograd records, on full tensors."""
    found: dict[int, tuple[Gathered, int]] = {}

    def to_full(sharded: ShardTensor) -> torch.Tensor:
        if id(sharded) not in found:
            operation = f"{func.__name__} of"
            # Transforms of torch.func see the gathered tensors, and not the gather.
            with temporarily_clear_interpreter_stack():
                full = (
                    sharded.full_for_autograd(operation)
                    if sharded.requires_grad
                    else gather(sharded, operation)
                )
            found[id(sharded)] = (Gathered(sharded, full), full._version)
        return found[id(sharded)][0].full

    def wrap_results(tensor: torch.Tensor) -> torch.Tensor:
        gathered = next(
            (gathered for gathered, _ in found.values() if gathered.aliases(tensor)), None
        )
        if gathered is None:
            return tensor
        return gathered.sharded if tensor is gathered.full else _View.apply(tensor, gathered)

    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, ShardTensor) and isinstance(leaf, nn.Parameter) and leaf.requires_grad:
            leaf.warn_outside(stacklevel=6)  # caller of the torch function
    full_args, full_kwargs = pytree.tree_map_only(ShardTensor, to_full, (args, kwargs))
    update_views(args, kwargs)
    result = func(*full_args, **full_kwargs)
    for gathered, version in found.values():
        if gathered.full._version != version:
            if gathered.sharded.requires_grad or isinstance(gathered.sharded, nn.Parameter):
                refuse_recorded_write(gathered.sharded, func.__name__)
            with torch.no_grad():  # a gradient: p.grad.add_(0.1 * p.sign()), with gradients enabled
                gathered.sharded.copy_(gathered.full.detach())
    return pytree.tree_map_only(torch.Tensor, wrap_results, result)


def run_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch's Python API that meets sharded parameters."""
    if func is torch.autograd.grad:
        return autograd_grad(*args, **kwargs)
    if func is torch.autograd.backward:  # `engine_run_backward` handles its leaves
        return func(*args, **kwargs)
    if torch.is_grad_enabled() and not asks_only_about(func) and _needs_gradient((args, kwargs)):
        return _run_on_full(func, args, kwargs)
    return func(*args, **kwargs)
