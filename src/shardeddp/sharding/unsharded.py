"""The two classes of an unsharded parameter: usable while its unit is unsharded, and an error to touch after that."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardeddp.errors import ReleasedParameterError


class UnshardedParameter(nn.Parameter):
    """The class of an unsharded parameter while it is usable: a plain one whose writes can be counted.

    ``data`` of a plain parameter has a version counter of its own, and assigning to it takes the parameter out of the
    gathered buffer.
    """

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The values without history; writing to them in place changes the parameter."""
        return self.detach()

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if data.shape != self.shape or data.dtype != self.dtype or data.device != self.device:
            if self._has_already(data):
                return
            raise RuntimeError(
                f"{self.__dict__['fqn']} is sharded and cannot be given other memory (.data = ...): expected "
                f"{tuple(self.shape)}, {self.dtype} on {self.device}, found {tuple(data.shape)}, {data.dtype} on "
                f"{data.device}. Change values in place, and shape, dtype or device before the model is sharded"
            )
        with torch.no_grad():
            self.copy_(data)

    def _has_already(self, data: torch.Tensor) -> bool:
        """Whether these are its values in the dtype that it has outside of its unit: ``module.to()`` with that dtype.

        Modules that insist on a dtype do so in their forward, where the parameter may be in a lower one.
        """
        same_place = data.shape == self.shape and data.device == self.device
        if not same_place or data.dtype != self.__dict__.get("sharded_dtype"):
            return False
        return torch.equal(data.detach().to(self.dtype), self.detach())


class ReleasedParameter(nn.Parameter):
    """The class of an unsharded parameter while its memory is released: everything that touches it raises.

    Without it, whoever kept a reference would read freed memory. Changing an object's class is invisible to autograd,
    which holds the implementation and not the Python object.
    """

    fqn: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        fqns = [leaf.__dict__["fqn"] for leaf in leaves if isinstance(leaf, cls)]
        name = f"parameter {fqns[0]}" if fqns else "a parameter"
        raise ReleasedParameterError(
            f"{name} was kept from inside its unit's forward and used ({getattr(func, '__name__', func)}) after the "
            f"unit was resharded, when its memory is gone. Read it again from its module (module.weight) where you "
            f"need it, or keep a copy (module.weight.detach().clone())"
        )
