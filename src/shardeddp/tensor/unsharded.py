"""Unsharded parameters: their identity, and their classes while the unit is unsharded and after."""

import copy
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from shardeddp.tensor.backward import store_gradient, stored_gradient
from shardeddp.torch_private import (
    make_subclass,
    never_traced,
    no_torch_function,
    pytree,
    swap_tensor_impl,
    without_torch_function,
)

# -- Identity: a parameter's implementation swapped, its references kept

_IDENTITY = "shardeddp"  # key in the metadata of a node, which torch leaves to users


def swap_bodies(first: torch.Tensor, second: torch.Tensor) -> None:
    """Swap class, attributes and implementation of two tensors; ``id()`` of each is unchanged.

    ``torch.utils.swap_tensors`` does the same but refuses objects with weak references, which every
    ``nn.LSTM`` has on its weights; those references are to the object and remain valid. A graph
    that was recorded before leads to the former implementation: it refuses to run backward.

    Raises:
        RuntimeError: Native code holds a weak reference to one of them; nothing has changed.
    """
    others = first._use_count() - 1  # type: ignore[attr-defined]  # torch.utils.swap_tensors asks the same
    recorded = get_gradient_edge(first).node if first.requires_grad and others else None
    swap_tensor_impl(first, second)
    if recorded is not None:
        recorded.register_prehook(_refuse_backward)
        _metadata_of(recorded)[_IDENTITY] = weakref.ref(first)
    first_class, second_class = type(first), type(second)
    first_attributes, second_attributes = dict(first.__dict__), dict(second.__dict__)
    first.__class__, second.__class__ = second_class, first_class
    vars(first).clear()
    vars(first).update(second_attributes)
    vars(second).clear()
    vars(second).update(first_attributes)


def replacement_of(node: Node) -> torch.Tensor | None:
    """Return the parameter that had a node before its implementation was swapped, else None."""
    identity = _metadata_of(node).get(_IDENTITY)
    return None if identity is None else identity()


def _metadata_of(node: Any) -> dict[str, Any]:
    return node.metadata  # a property, which torch declares as a method


def _refuse_backward(gradients: tuple[Any, ...]) -> None:
    raise RuntimeError(
        "this graph was recorded before its model was sharded, and its gradients would reach "
        "no optimizer: expected a forward of the model as the Trainer has set it up. Compute what the "
        "loss needs anew, inside training_step"
    )


# -- Classes of an unsharded parameter

FQN = "_shardeddp_fqn"
"""Key of an unsharded parameter's dictionary: its name. A summoned parameter has it, too."""

DTYPE = "_shardeddp_dtype"
"""Key of an unsharded parameter's dictionary: its dtype outside of the unit."""

SHARDED = "_shardeddp_sharded"
"""Key of an unsharded parameter's dictionary: a weak reference to its sharded parameter."""

SHARED_WITH = "_shardeddp_shared_with"
"""Key of a summoned parameter's dictionary: name of a parameter that shares its memory, or ""."""

_ALIASES = WeakIdKeyDictionary()
"""Weak references to detached aliases, by parameter; not in its dictionary, which is pickled."""

_PARAMETERS = WeakIdKeyDictionary()
"""Weak references to parameters, by detached alias."""


def keep_shared_memory(fqn: str, shared_with: str) -> None:
    """Refuse new memory for a parameter while another one shares its memory."""
    if shared_with:
        raise RuntimeError(
            f"{fqn} and {shared_with} have the same memory, and sharded parameters keep theirs: "
            f".data = ... would change both, where an unsharded parameter would part from the "
            f"other. Write in place (copy_, mul_), or part them before the model is sharded"
        )


def part_from_aliases(parameter: torch.Tensor) -> None:
    """Give detached aliases memory of their own with the present values of the parameter."""
    found: Any = _ALIASES.pop(parameter, None) or []
    for alias in [alias for each in found if (alias := each()) is not None]:
        alias.data = alias.clone()


def parameter_in(tensor: torch.Tensor) -> Any:
    """Return the unsharded parameter that a plain tensor is, aliases or views; else None."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, UnshardedBase):
        return base
    reference: Any = _PARAMETERS.get(base)
    parameter = None if reference is None else reference()
    return parameter if isinstance(parameter, UnshardedBase) else None  # it may be summoned


class WholeParameter(nn.Parameter):
    """A plain parameter that counts writes through ``data``, and keeps its memory.

    ``data`` of a plain ``nn.Parameter`` has a version counter of its own, and assigning to it gives
    the parameter other memory.
    """

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The values without history; writing to them in place changes the parameter.

        Assigning copies the values in. Tensors handed out before keep the former values, as for a
        parameter that gets other memory.
        """
        return self.detach()

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if data.shape != self.shape or data.dtype != self.dtype or data.device != self.device:
            if self._has_already(data):
                return
            raise RuntimeError(
                f"{self.__dict__[FQN]} is sharded and cannot be given other memory (.data = "
                f"...): expected {tuple(self.shape)}, {self.dtype} on {self.device}, found "
                f"{tuple(data.shape)}, {data.dtype} on {data.device}. Change values in place, and "
                f"shape, dtype or device before the model is sharded"
            )
        has_memory = type(data) is torch.Tensor or isinstance(data, WholeParameter)
        if has_memory and data.data_ptr() == self.data_ptr() and data.stride() == self.stride():
            return
        is_ours = isinstance(self, UnshardedBase)
        shared_with = sharded_of(self).shared_with if is_ours else vars(self)[SHARED_WITH]
        keep_shared_memory(vars(self)[FQN], shared_with)
        if is_ours:
            sharded_of(self).note_assigned(data)
            sharded_of(self).leave_values()
        else:
            part_from_aliases(self)
        with torch.no_grad():
            self.copy_(data)

    def detach(self) -> torch.Tensor:  # noqa: D102
        alias = super().detach()
        if not torch.compiler.is_compiling():
            _ALIASES[self] = [
                *(each for each in _ALIASES.get(self) or () if each() is not None),
                weakref.ref(alias),
            ]
            _PARAMETERS[alias] = weakref.ref(self)
        return alias

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Copy the values of a tensor; the parameter keeps its memory."""
        if not isinstance(source, torch.Tensor) or args or kwargs:
            raise RuntimeError(
                f"{self.__dict__[FQN]} is sharded and cannot be given other memory (set_). "
                f"Write values into it (copy_), or change its memory before the model is sharded"
            )
        self.data = source.detach()
        return self

    def as_strided_(  # type: ignore[override]  # noqa: D102
        self, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
    ) -> Any:
        raise RuntimeError(
            f"{self.__dict__[FQN]} is sharded and keeps its shape (as_strided_): "
            f"as_strided() gives a view of another one"
        )

    def _has_already(self, data: torch.Tensor) -> bool:
        """Return whether ``data`` has the parameter's values in its dtype outside of the unit.

        ``module.to()`` with that dtype gives it. Modules that insist on a dtype call it in their
        forward, where the parameter may have a lower one.
        """
        same_place = data.shape == self.shape and data.device == self.device
        if not same_place or data.dtype != self.__dict__.get(DTYPE):
            return False
        return torch.equal(data.detach().to(self.dtype), self.detach())


class SameParameter(torch.Tensor):
    """Comparison of a parameter with itself: true for every element, and as a whole.

    So the parameter is found as a key: in dictionaries, in sets, in the state of an optimizer.
    """

    @staticmethod
    def like(parameter: torch.Tensor) -> torch.Tensor:
        """Return a comparison of the parameter's shape."""
        true = torch.ones((), dtype=torch.bool, device=parameter.device)
        return make_subclass(SameParameter, true.expand(parameter.shape))

    def __bool__(self) -> bool:
        return True

    __torch_function__ = no_torch_function  # type: ignore[assignment]


class ParameterValues(torch.Tensor):
    """Whole values of a parameter for an ``autograd.Function``; its gradient is the parameter's.

    Functions that keep the parameter (``ctx.save_for_backward``) may leave a gradient on it in
    their backward, instead of returning it.
    """

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gradient of the parameter."""
        return self.__dict__[_PARAMETER].grad

    @grad.setter
    def grad(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, gradient: torch.Tensor | None
    ) -> None:
        self.__dict__[_PARAMETER].grad = gradient

    __torch_function__ = no_torch_function  # type: ignore[assignment]


_PARAMETER = "_shardeddp_parameter"


def with_gradient_of(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values of a parameter as its :class:`ParameterValues`."""
    _set_attribute(values, "__class__", ParameterValues)
    vars(values)[_PARAMETER] = parameter
    return values


_set_attribute = object.__setattr__


class UnshardedBase(nn.Parameter):
    """Attributes of the sharded parameter that its unsharded one shares.

    These are the gradient, hooks, and attributes set by users.
    """

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Gradient of the sharded parameter.

        The one that autograd stores here, of this rank and this unit, belongs to the engine.
        """
        gradient = sharded_of(self).grad
        # torch.compile takes no parameter with a gradient of another dtype, and does not need the
        # gradient. Its own check runs in Python, where is_dynamo_compiling() is false; traced code
        # may want the gradient.
        asks = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        return None if asks and gradient is not None and gradient.dtype != self.dtype else gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        sharded_of(self).grad = gradient

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        sharded_of(self).grad = None

    def register_hook(self, hook: Callable[..., Any]) -> Any:  # type: ignore[override]
        """Call a hook with each gradient on its way to the parameter."""
        return sharded_of(self).register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        """Call a hook with the parameter when a backward has completed its gradient."""
        return sharded_of(self).register_post_accumulate_grad_hook(hook)

    def requires_grad_(self, requires_grad: bool = True) -> Any:  # type: ignore[override]
        """Set whether operations on the parameter are recorded, sharded or unsharded."""
        sharded_of(self).requires_grad_(requires_grad)
        return self

    def full_tensor(self) -> torch.Tensor:
        """Gather the sharded parameter, in its own dtype; a collective."""
        return sharded_of(self).full_tensor()

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements of the sharded parameter."""
        return sharded_of(self).to_local()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return sharded_of(self).__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        reference = vars(self).get(SHARDED)  # none yet while the parameter is being made
        found = {} if reference is None else sharded_of(self).user_attributes()
        if name not in found:
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self
            )
        return found[name]

    @never_traced("a parameter is looked up in a dictionary or a set")
    def __hash__(self) -> int:
        return hash(sharded_of(self))

    @never_traced("a parameter is compared")
    def __eq__(self, other: object) -> Any:
        """Compare element-wise; true as a whole for the same parameter outside of its unit."""
        if (
            not isinstance(other, UnshardedBase)
            and isinstance(other, nn.Parameter)
            and sharded_of(self) is other
        ):
            return SameParameter.like(self)
        return super().__eq__(other)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "requires_grad":  # no property: reading it would be slow
            self.requires_grad_(value)
        elif hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(sharded_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        if hasattr(type(self), name):
            super().__delattr__(name)
        else:
            delattr(sharded_of(self), name)


class UnshardedParameter(UnshardedBase, WholeParameter):  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
    """Class of an unsharded parameter while it is usable: it lies in a gathered buffer."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            kind = next(base for base in type(self).__mro__ if not issubclass(base, UnshardedBase))
            copied = make_subclass(kind, self.detach().clone(), self.requires_grad)
            vars(copied).update(copy.deepcopy(sharded_of(self).user_attributes(), memo))
            memo[id(self)] = copied
        return memo[id(self)]


class ReleasedParameter(UnshardedBase):
    """An unsharded parameter with released memory: operations on it use the sharded one.

    A reference kept from inside of the unit's forward has the same values, gathered for each use.
    Changing an object's class is invisible to autograd, which holds the implementation and not the
    Python object.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(sharded_of(self), memo)
        return memo[id(self)]

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`ShardTensor.set_`; torch calls no ``__torch_function__`` for it."""
        return sharded_of(self).set_(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Never called. With it torch.compile breaks the graph here, and takes no such tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        positional, named = without_released(args, kwargs or {})
        # By name if it is a method or an attribute: the sharded parameter's class may override
        # it.
        if args and isinstance(args[0], ReleasedParameter):
            name = func.__name__
            if getattr(torch.Tensor, name, None) is func:
                return getattr(positional[0], name)(*positional[1:], **named)
            if name == "__get__":
                return getattr(positional[0], func.__self__.__name__)
            if name == "__set__":
                return setattr(positional[0], func.__self__.__name__, positional[1])
        return func(*positional, **named)


def without_released(args: Any, kwargs: Any) -> Any:
    """Replace released parameters among a function's arguments by sharded ones."""
    return pytree.tree_map_only(ReleasedParameter, sharded_of, (args, kwargs))


def accumulate_in(unsharded: nn.Parameter, dtype: torch.dtype) -> None:
    """Let autograd accumulate an unsharded parameter's gradients in another dtype from now on."""
    former = stored_gradient(unsharded)
    with without_torch_function():
        if unsharded.grad_dtype is dtype or (former is not None and former.is_sparse):
            return
        store_gradient(unsharded, None)  # torch refuses to change the dtype of an existing one
        unsharded.grad_dtype = dtype
    if former is not None:
        store_gradient(unsharded, former.to(dtype))


@contextmanager
def taking_hooks(unsharded: torch.Tensor) -> Generator[None]:
    """Allow hooks inside: a frozen parameter takes none, and may be unfrozen later."""
    with without_torch_function():
        trainable = unsharded.requires_grad
        torch.Tensor.requires_grad_(unsharded, True)
        try:
            yield
        finally:
            torch.Tensor.requires_grad_(unsharded, trainable)


def divide_gradients(unsharded: nn.Parameter, divisor: int) -> None:
    """Let autograd divide an unsharded parameter's gradients from now on."""
    with taking_hooks(unsharded):
        torch.Tensor.register_hook(unsharded, partial(_divided, divisor))


def _divided(divisor: int, gradient: torch.Tensor) -> torch.Tensor:
    return gradient / divisor


def sharded_of(unsharded: nn.Parameter) -> Any:
    """Return the sharded parameter, a ``ShardTensor``, of an unsharded one."""
    sharded = unsharded.__dict__[SHARDED]()
    if sharded is None:
        raise RuntimeError(
            f"parameter {unsharded.__dict__[FQN]} was kept from inside its unit's forward, and "
            f"its model is gone"
        )
    return sharded


def outside_of(parameter: Any) -> Any:
    """Return the sharded parameter of an unsharded one; any other value unchanged."""
    return sharded_of(parameter) if isinstance(parameter, UnshardedBase) else parameter


@cache
def derived_class(ours: type, prefix: str, theirs: type) -> Any:
    """Return a subclass of one of our parameter classes and of a user's class."""
    if theirs is nn.Parameter:
        return ours
    return type(f"{prefix}{theirs.__name__}", (ours, theirs), {"__module__": theirs.__module__})
