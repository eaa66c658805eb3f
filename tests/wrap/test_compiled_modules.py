"""Policies see through what ``torch.compile(module)`` returns, and the unit is what is called: the compiled module."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo import OptimizedModule

from shardeddp.wrap import (
    AutoPolicy,
    ClassPolicy,
    NamePolicy,
    Policy,
    PredicatePolicy,
    SizePolicy,
    build_units,
)

pytestmark = pytest.mark.timeout(60)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)  # 20 parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Toy(nn.Module):
    """Two compiled blocks and one that is not, between a stem and a list of other modules."""

    def __init__(self, compile_block: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([compile_block(Block()), compile_block(Block()), Block()])
        self.others = nn.ModuleList([compile_block(nn.LayerNorm(4)), nn.Tanh()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def once(module: nn.Module) -> nn.Module:
    compiled: object = torch.compile(module, backend="eager")
    assert isinstance(compiled, OptimizedModule)
    return compiled


POLICIES: dict[str, Policy] = {
    "auto": AutoPolicy(min_numel=20),
    "class": ClassPolicy([Block]),
    "class name": ClassPolicy(["Block"]),
    "predicate": PredicatePolicy(lambda name, module: isinstance(module, Block)),
    "size": SizePolicy(20),
    "name": NamePolicy(["blocks.*"]),
    "inner name": NamePolicy(["blocks.*._orig_mod", "blocks.2"]),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_block_is_a_block_and_its_unit_is_the_compiled_module(policy: str) -> None:
    model = Toy(once)
    units = [
        unit for unit in build_units(model, POLICIES[policy]) if unit.name.startswith("blocks")
    ]
    if (
        policy == "size"
    ):  # it takes the smallest modules that are large enough: of a block, the layer inside
        assert [unit.name for unit in units] == [
            "blocks.0._orig_mod.linear",
            "blocks.1._orig_mod.linear",
            "blocks.2.linear",
        ]
        return
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [unit.module for unit in units] == list(model.blocks)
    assert [spec.fqn for spec in units[0].parameters] == [
        "blocks.0._orig_mod.linear.weight",
        "blocks.0._orig_mod.linear.bias",
    ]


def test_a_module_that_is_also_called_uncompiled_belongs_to_the_unit_around_both_places() -> None:
    model = Toy(once)
    model.raw = model.blocks[0].get_submodule("_orig_mod")
    units = build_units(model, ClassPolicy([Block]))
    assert [unit.name for unit in units] == ["", "blocks.1", "blocks.2"]
    assert "blocks.0._orig_mod.linear.weight" in [spec.fqn for spec in units[0].parameters]


def test_of_two_shells_the_outer_one_is_the_unit() -> None:
    shell = once(Block())
    model = nn.Sequential(nn.Linear(4, 4), OptimizedModule(shell, shell.dynamo_ctx))  # type: ignore[arg-type]
    units = build_units(model, ClassPolicy([Block]))
    assert [unit.module for unit in units] == [model, model[1]]
