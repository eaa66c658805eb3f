"""OwnedStep: an optimizer that looks at parameters as wholes steps on whole ones, each on one rank, its owner.

Before a step, every rank sends its shards of values and gradients to their owners, and the new values travel back after
it: each rank sends and receives its own shards three times, which is what one all-gather of the model moves for three
ranks, and less for more. States stay with the owners.
"""

from __future__ import annotations

import torch
from torch import optim

from shardeddp.comm import Mesh
from shardeddp.sharding.owned_states import OwnedStates
from shardeddp.sharding.relocation import Relocated, bring, take_back
from shardeddp.sharding.swapped_step import Gradients, OnStep, SwappedStep
from shardeddp.sharding.whole_parameters import WholeParameter, WholeParameters


class OwnedStep(SwappedStep):
    """Lets an optimizer step on the whole parameters that this rank owns.

    Args:
        optimizer: One whose new value of a parameter depends on that parameter alone, with its gradient and states.
        on_step: Called after each step.
        mesh: Of the sharded parameters.
    """

    _states: OwnedStates

    def __init__(self, optimizer: optim.Optimizer, on_step: OnStep, mesh: Mesh) -> None:
        self._mesh = mesh
        self._wholes = WholeParameters(mesh)
        self._moved: list[WholeParameter] = []  # have a gradient, and memory -> released after the step
        super().__init__(optimizer, on_step)
        optimizer.register_state_dict_pre_hook(lambda _: self._states.bring_numbers())

    def _swap_in(self, groups: list[list[torch.Tensor]], gradients: list[Gradients]) -> list[list[torch.Tensor]]:
        self._wholes.follow([it for group in groups for it in group])
        self._states.settle()
        found: list[list[torch.Tensor]] = []
        moved: list[Relocated] = []
        for group in zip(groups, gradients, strict=True):
            mine: list[torch.Tensor] = []
            for parameter, gradient in zip(*group, strict=True):
                whole = self._wholes.of(parameter)
                if whole is None:
                    mine.append(parameter)
                elif gradient is not None:
                    self._moved.append(whole)
                    moved += whole.take_gradient(gradient)
                    if whole.tensor is not None:
                        mine.append(whole.tensor)
            found.append(mine)
        # One after the other: what travels is in memory twice.
        bring([whole.values for whole in self._moved if not whole.at_home], self._mesh)
        bring(moved, self._mesh)
        return found

    def _bring_back(self) -> None:
        take_back([whole.values for whole in self._moved if not whole.at_home], self._mesh)

    def _let_go(self) -> None:
        for whole in self._moved:
            whole.release()
        self._moved = []

    def _outside(self, optimizer: optim.Optimizer) -> OwnedStates:
        return OwnedStates(optimizer, self._wholes, self._mesh)
