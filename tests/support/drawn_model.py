"""The model of a drawn program: its graph of blocks, what they share, its hooks and its losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from support.drawn_modules import (
    LENGTH,
    DrawnBlock,
    MeanSquare,
    Prefix,
    auxiliary,
    call,
    first_tensor,
    make_block,
)
from support.drawn_programs import Program

VOCABULARY = 7


class DrawnModel(LightningModule):
    """The model of a program, with its hooks and losses; keeps every number that it sees in a record."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        width = program.width
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.3)
        blocks = [make_block(block, width, program.dropout) for block in program.blocks]
        names = {f"b{index}": block for index, block in enumerate(blocks)}
        self.body = nn.ModuleDict(names) if program.named else nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.block_names = [
            name for name, module in self.named_modules() if isinstance(module, DrawnBlock)
        ]
        self._tie()
        self.parameter_names = [name for name, _ in self.named_parameters()]
        for number in program.frozen:
            self.block(number).requires_grad_(False)
        self.frozen_names = {name for name, p in self.named_parameters() if not p.requires_grad}
        teachers = [self.block(number) for kind, number in program.terms if kind == "teacher"]
        self.teachers = nn.ModuleList(
            copy.deepcopy(block).requires_grad_(False) for block in teachers
        )
        self.record: list[tuple[str, float]] = []
        self.features: dict[int, Tensor] = {}
        for kind, number in program.terms:
            if kind in ("recorded", "detached"):
                self.block(number).register_forward_hook(self._keeps_features(number))
        self.hook(at=0)

    # -- what a program's numbers stand for

    def block(self, number: int) -> DrawnBlock:
        """A block by its number."""
        return self.get_submodule(self.block_names[number % len(self.block_names)])  # type: ignore[return-value]

    def name(self, number: int) -> str:
        """A parameter's name by its number."""
        return self.parameter_names[number % len(self.parameter_names)]

    def parameter(self, number: int) -> nn.Parameter:
        """A parameter by its number."""
        return self.get_parameter(self.name(number))

    def _tie(self) -> None:
        for kind, number in self.program.ties:
            if kind == "head":
                self.head.weight = self.embed.weight
                continue
            names = [
                name
                for name, _ in self.named_parameters()
                if "inner" not in name or "inner.weight" in name
            ]
            chosen = self.get_parameter(names[number % len(names)])
            for name in names:
                module, _, word = name.rpartition(".")
                other = self.get_parameter(name)
                if other is not chosen and other.shape == chosen.shape:
                    if kind == "parameter":
                        setattr(self.get_submodule(module), word, chosen)
                    else:
                        other.data = chosen.data
                    break

    def note(self, key: str, value: Any) -> None:
        """Keep a number for the comparison."""
        self.record.append((key, float(value.detach() if isinstance(value, Tensor) else value)))

    # -- hooks

    def _keeps_features(self, number: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, result: Any) -> None:
            self.features[number] = first_tensor(result)

        return keep

    def hook(self, at: int) -> None:
        """Register the hooks of before the sharding (0), or those of after it (1)."""
        for kind, number in self.program.hooks:
            if number // 2 % 2 != at:
                continue
            block, parameter = self.block(number), self.parameter(number)
            if (
                kind in ("tensor", "tensor_clamp", "post_accumulate")
                and not parameter.requires_grad
            ):
                continue
            if kind == "tensor":
                parameter.register_hook(lambda g: g * 0.7)
            elif kind == "tensor_clamp":
                parameter.register_hook(lambda g: g.clamp(-0.003, 0.003))
            elif kind == "post_accumulate":
                parameter.register_post_accumulate_grad_hook(_scale_gradient)
            elif kind == "full_backward":
                block.register_full_backward_hook(
                    lambda module, inputs, outputs: tuple(
                        g if g is None else g * 0.7 for g in inputs
                    )
                )
            elif kind == "full_backward_pre":
                block.register_full_backward_pre_hook(
                    lambda module, outputs: tuple(g if g is None else g * 0.7 for g in outputs)
                )
            elif kind == "forward":
                block.register_forward_hook(lambda module, args, result: _scaled(result))
            elif kind == "forward_pre":
                block.register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:]))

    # -- losses

    def run(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Embedded input, features at the end, and auxiliary losses."""
        losses: list[Tensor] = []
        embedded = self.embed(tokens) + self.positions
        x = embedded * 1.0
        for block in self.body.values() if isinstance(self.body, nn.ModuleDict) else self.body:
            x = call(block, x, losses)
        for number in self.program.calls:
            x = call(self.block(number), x, losses)
        if self.training and x.requires_grad and self.program.uses("activation"):
            x.register_hook(lambda g: g * 0.7)
        return embedded, self.norm(x), losses

    def first_loss(self, x: Tensor, batch: Sequence[Tensor]) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def all_losses(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """The first loss, auxiliary ones, and the program's terms."""
        list(auxiliary(self))
        embedded, x, losses = self.run(batch[0])
        first = self.first_loss(x, batch)
        teachers = iter(self.teachers)
        for kind, number in self.program.terms:
            teacher = next(teachers) if kind == "teacher" else None
            losses += self._term(kind, number, embedded, x, first, teacher)
        losses = [0.1 * loss for loss in [*losses, *auxiliary(self)] if loss.requires_grad]
        return [first, *losses] if self.program.main or not losses else losses

    def _term(
        self,
        kind: str,
        number: int,
        embedded: Tensor,
        x: Tensor,
        first: Tensor,
        teacher: nn.Module | None,
    ) -> Iterator[Tensor]:
        block, parameter = self.block(number), self.parameter(number)
        match kind:
            case "l2":
                yield parameter.square().sum()
            case "norm":
                yield parameter.norm()
            case "foreign" if parameter.ndim == 2 and parameter.shape[1] == x.shape[-1]:
                yield F.linear(x, parameter).square().mean()
            case "foreign":
                yield F.linear(x, parameter.flatten()[: x.shape[-1]][None]).square().mean()
            case "function":
                yield MeanSquare.apply(parameter)
            case "custom":
                yield Prefix.apply(x, parameter).square().mean()
            case "recorded" if number in self.features:
                yield self.features.pop(number).square().mean()
            case "detached" if number in self.features:
                feature = self.features.pop(number).detach()
                yield F.mse_loss(x, feature.view(x.shape))
            case "past":
                inner: list[Tensor] = []
                yield call(block, embedded * 1.0, inner).square().mean()
                yield from inner
            case "nograd":
                with torch.no_grad():
                    target = call(block, embedded * 1.0, [])
                yield F.mse_loss(x, target)
            case "teacher":
                assert teacher is not None
                with torch.no_grad():
                    for average, current in zip(
                        teacher.parameters(), block.parameters(), strict=True
                    ):
                        average.lerp_(current, 0.1)
                    target = call(teacher, embedded * 1.0, [])  # type: ignore[arg-type]
                yield F.mse_loss(x, target)
            case "penalty":
                (gradient,) = torch.autograd.grad(first, embedded, create_graph=True)
                yield 100 * gradient.square().sum()
            case "asked" | "asked_graph" if parameter.requires_grad:
                graph = kind == "asked_graph"
                (gradient,) = torch.autograd.grad(
                    first, parameter, retain_graph=True, create_graph=graph, allow_unused=True
                )
                if gradient is not None:
                    self.note("asked", gradient.norm())
                    yield 10 * gradient.square().sum()


def _scale_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.7)


def _scaled(result: Any) -> Any:
    if isinstance(result, dict):
        return {**result, "out": result["out"] * 0.9}
    return (result[0] * 0.9, *result[1:]) if isinstance(result, tuple) else result * 0.9
