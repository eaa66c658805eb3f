"""Axes: ranks that have different parts of a model, which the engine's own code splits for plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from shardeddp.errors import ConfigurationError, UsageError
from shardeddp.tensor.distributed import Distribution
from shardeddp.tensor.expert_dispatch import divided_experts, end_forward
from shardeddp.tensor.parallel_styles import ParallelStyle, TensorAxis
from shardeddp.wrap import ClassPolicy, NamePolicy, Policy
from shardeddp.wrap.experts import ChosenUnits, find_experts, keep_own
from shardeddp.wrap.tensor_plan import TensorPlan, cut_layers, find_layers
from shardeddp.wrap.tree import import_path


@dataclass(frozen=True, kw_only=True)
class ModelAxes:
    """Tensor-parallel and expert-parallel sizes, with plan and experts; one of the sizes is 1."""

    tensor_size: int = 1
    tensor_plan: TensorPlan | None = None
    expert_size: int = 1
    experts: Policy | None = None
    """Policy that chooses the modules with experts; None: those of Mixtral-like models."""

    @property
    def size(self) -> int:
        """Number of ranks that exchange activations."""
        return self.tensor_size * self.expert_size

    @property
    def option(self) -> str:
        """Option of the larger size with its value, ``name=value``, for messages."""
        name = "tensor" if self.tensor_size > 1 else "expert"
        return f"{name}_parallel_size={self.size}"

    def split(
        self,
        module: nn.Module,
        policy: Policy,
        rehearsal: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> tuple[Policy, Mapping[nn.Parameter, Distribution]]:
        """Replace the parameters of a module by the first rank's parts.

        They may be fake tensors or on the meta device. Returns the policy for the split module, and
        the split of each former parameter, by new parameter. For the ``rehearsal`` see
        :class:`TensorAxis`.

        Raises:
            UsageError: No layer or expert can be split, or the size does not divide them.
        """
        axis = TensorAxis("a plan", 0, self.size, rehearsal)
        try:
            if self.expert_size > 1:
                experts = find_experts(module, self.experts, axis.size)
                policy = ChosenUnits(policy, module, experts)
                return policy, keep_own(module, experts, axis)
            return policy, self._split_layers(module, axis) if self.tensor_size > 1 else {}
        except ConfigurationError as error:
            raise UsageError(str(error)) from error

    def end_forward(self, module: nn.Module) -> None:
        """Exchange what ranks exchange at the end of a forward, between the step and its backward."""
        for divided in divided_experts(module)[:1]:
            end_forward(divided)

    def _split_layers(
        self, module: nn.Module, axis: TensorAxis
    ) -> Mapping[nn.Parameter, Distribution]:
        plan = self.tensor_plan
        if plan is None:
            raise UsageError(
                f"tensor_parallel_size={axis.size} is planned where tensor_parallel_plan names the "
                f"layers ('auto' for models of transformers); what configure_model splits by "
                f"parallelize_module is not planned"
            )
        layers = find_layers(module, plan, axis.size)
        odd = next((it.name for it in layers if not isinstance(it.style, ParallelStyle)), None)
        if odd is not None or not layers:
            raise UsageError(
                f"tensor_parallel_plan: {'no layer of the module is in it' if odd is None else odd}"
                f"{'' if odd is None else ' has a style of torch, whose DTensors are not planned'}"
            )
        return cut_layers(module, layers, axis)


WHOLE = ModelAxes()
"""Axes of size 1: each rank has the whole model."""


def names_of(experts: Policy | None) -> str | list[str] | None:
    """Return ``experts`` as a configuration has it; None: unset, or a policy without a name."""
    names: list[str] = []
    if isinstance(experts, NamePolicy) and all("*" in it for it in experts.names):
        names = experts.names
    elif isinstance(experts, ClassPolicy):
        names = [it if isinstance(it, str) else import_path(it) for it in experts.classes]
    return names[0] if len(names) == 1 else names or None
