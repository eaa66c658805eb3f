"""A drawn program as a LightningModule: its losses, its hooks, and what its user does between the steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardeddp import ShardedDP
from support.drawn_modules import (
    LENGTH,
    DrawnBlock,
    Layer,
    MeanSquare,
    Prefix,
    auxiliary,
    call,
    first_tensor,
    make_block,
)
from support.drawn_programs import Program

VOCABULARY = 7
BATCH = 4


class Remembering(torch.optim.Optimizer):
    """Descent along the gradient and what changed in it; keeps the last gradient as it was handed out."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].get("last", p.grad)
                    p.add_(p.grad + 0.5 * (p.grad - last), alpha=-group["lr"])
                    self.state[p]["last"] = p.grad
        return loss


class GlobalNorm(torch.optim.Optimizer):
    """Descent whose length depends on all gradients."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in used) ** 0.5
        for p in used:
            p.add_(p.grad / (1 + norm), alpha=-self.param_groups[0]["lr"])
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False),
    "remembering": lambda p: Remembering(p, lr=0.03),
    "global_norm": lambda p: GlobalNorm(p, lr=0.05),
}


class DrawnModule(LightningModule):
    """The module of a program; keeps every number that it sees in a record."""

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
        self.block_names = [name for name, module in self.named_modules() if isinstance(module, DrawnBlock)]
        self._tie()
        self.parameter_names = [name for name, _ in self.named_parameters()]
        for number in program.frozen:
            self.block(number).requires_grad_(False)
        self.frozen_names = {name for name, p in self.named_parameters() if not p.requires_grad}
        teachers = [self.block(number) for kind, number in program.terms if kind == "teacher"]
        self.teachers = nn.ModuleList(copy.deepcopy(block).requires_grad_(False) for block in teachers)
        self.automatic_optimization = program.backward in ("automatic", "overridden")
        self.record: list[tuple[str, float]] = []
        self.kept: dict[Any, Tensor] = {}
        self.features: dict[int, Tensor] = {}
        self.losses: list[Tensor] = []
        self.batch_index = 0
        self.after_backward: Callable[[], None] = int  # does nothing
        for kind, number in program.terms:
            if kind in ("recorded", "detached"):
                self.block(number).register_forward_hook(self._keeps_features(number))
        self._hook(at=0)

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
            names = [name for name, _ in self.named_parameters() if "inner" not in name or "inner.weight" in name]
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

    # -- hooks

    def _keeps_features(self, number: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, result: Any) -> None:
            self.features[number] = first_tensor(result)

        return keep

    def _hook(self, at: int) -> None:
        """Register the hooks of before the sharding (0), or those of after it (1)."""
        for kind, number in self.program.hooks:
            if number // 2 % 2 != at:
                continue
            block, parameter = self.block(number), self.parameter(number)
            if kind in ("tensor", "tensor_clamp", "post_accumulate") and not parameter.requires_grad:
                continue
            if kind == "tensor":
                parameter.register_hook(lambda g: g * 0.7)
            elif kind == "tensor_clamp":
                parameter.register_hook(lambda g: g.clamp(-0.003, 0.003))
            elif kind == "post_accumulate":
                parameter.register_post_accumulate_grad_hook(_scale_gradient)
            elif kind == "full_backward":
                block.register_full_backward_hook(
                    lambda module, inputs, outputs: tuple(g if g is None else g * 0.7 for g in inputs)
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
        self, kind: str, number: int, embedded: Tensor, x: Tensor, first: Tensor, teacher: nn.Module | None
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
                    for average, current in zip(teacher.parameters(), block.parameters(), strict=True):
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

    # -- the steps

    def training_step(self, batch: Sequence[Tensor], batch_index: int) -> Tensor | None:
        torch.manual_seed(1000 * self.global_rank + batch_index)
        self.batch_index = batch_index
        self.act("step")
        backward = self.program.backward
        if backward == "toggled":
            for number, optimizer in enumerate(self._optimizers()):
                self.toggle_optimizer(optimizer)
                losses = self.all_losses(batch)
                self.note(f"loss {number}", sum(losses))
                optimizer.zero_grad()
                if (total := sum(losses)).requires_grad:
                    self.manual_backward(total)
                    optimizer.step()
                self.untoggle_optimizer(optimizer)
            return None
        losses = self.all_losses(batch)
        for loss in losses:
            self.note("loss", loss)
        self.losses = losses if backward == "overridden" else []
        if self.automatic_optimization:
            return sum(losses)
        for optimizer in self._optimizers():
            optimizer.zero_grad()
        pieces = [sum(losses)] if backward == "manual" else losses
        for index, loss in enumerate(pieces):
            self.manual_backward(loss, retain_graph=index < len(pieces) - 1)
        for optimizer in self._optimizers():
            optimizer.step()
        return None

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        pieces, self.losses = self.losses, []
        if not pieces:
            loss.backward(*args, **kwargs)
        for index, piece in enumerate(pieces):
            (piece / self.program.accumulate).backward(retain_graph=index < len(pieces) - 1)
        self.after_backward()

    def _optimizers(self) -> list[Any]:
        found = self.optimizers()
        return found if isinstance(found, list) else [found]

    def configure_optimizers(self) -> Any:
        self._hook(at=1)
        parameters = [self.get_parameter(name) for name in self.parameter_names]
        make = OPTIMIZERS[self.program.optimizer]
        if self.program.backward in ("two", "toggled") and len(parameters) > 1:
            return [make(parameters[::2]), make(parameters[1::2])]
        return make(parameters)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch_index = batch_idx
        self.act("batch_start")

    def on_after_backward(self) -> None:
        self.act("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.act("before_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.act("batch_end")

    # -- the user between the steps

    def note(self, key: str, value: Any) -> None:
        """Keep a number for the comparison."""
        self.record.append((key, float(value.detach() if isinstance(value, Tensor) else value)))

    def act(self, hook: str) -> None:
        """Do what the program's user does in this hook."""
        for index, (kind, when, number) in enumerate(self.program.actions):
            if when == hook:
                with torch.no_grad():
                    self._act(kind, number, (index, hook))

    def _act(self, kind: str, number: int, key: tuple[int, str]) -> None:
        name, p, block = self.name(number), self.parameter(number), self.block(number)
        label = f"{kind} of {name} in {key[1]}"
        synced = (self.batch_index + 1) % self.program.accumulate == 0 or key[1] == "batch_start"
        last = self.kept.get(key)
        match kind:
            case "read_grad" if synced:
                self.note(label, -1.0 if p.grad is None else p.grad.norm())
            case "keep_grad" if synced:
                if last is not None:
                    self.note(label, last.norm())
                if p.grad is not None:
                    self.kept[key] = p.grad
            case "add_kept_grad" if p.grad is not None:
                if last is not None:
                    p.grad.add_(last, alpha=0.2)
                self.kept[key] = p.grad
            case "scale_grad" if p.grad is not None:
                p.grad.mul_(0.5)
            case "assign_grad" if p.grad is not None:
                p.grad = p.grad * 0.5
            case "drop_grad":
                p.grad = None
            case "zero_grad":
                self.zero_grad()
            case "zero_grad_in_place":
                for optimizer in self._optimizers():
                    optimizer.zero_grad(set_to_none=False)
            case "mul":
                p.mul_(0.98)
            case "lerp":
                p.lerp_(torch.zeros_like(p), 0.02)
            case "copy":
                p.copy_(p.clone() * 0.98)
            case "data":
                p.data = p.data * 0.98
            case "data_mul":
                p.data.mul_(0.98)
            case "rows":
                p[0].mul_(0.9)
            case "ema":
                average = self.kept.setdefault(key, p.detach().clone())
                average.lerp_(p.detach(), 0.1)
                self.note(label, average.norm())
            case "keep_view" | "keep_rows" | "keep_data":
                if last is not None:
                    self.note(label, last.norm())
                view = p.data.view(-1) if kind == "keep_data" else p.detach()
                self.kept[key] = view if kind == "keep_view" else view[0] if kind == "keep_rows" else view[:3]
                self._read_kept_by_layers()
            case "normalize":
                p.div_(p.norm(dim=-1, keepdim=True).clamp_min(0.5))
            case "renorm" if p.ndim > 1:
                p.copy_(torch.renorm(p, 2, 0, 0.5))
            case "toggle" if self.program.backward != "toggled":
                for inner, parameter in block.named_parameters():
                    if f"{self.block_names[number % len(self.block_names)]}.{inner}" not in self.frozen_names:
                        parameter.requires_grad_(self.batch_index % 2 == 0)
            case "clip":
                self.note(label, nn.utils.clip_grad_norm_(self.parameters(), 0.1))
            case "clip_value":
                nn.utils.clip_grad_value_(self.parameters(), 0.005)
            case "vector":
                parameters = list(block.parameters())
                if parameters:
                    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) * 0.98, parameters)
            case "state_dict":
                block.load_state_dict({key: value * 0.98 for key, value in block.state_dict().items()})
            case "summon" | "summon_write":
                with self._summoned():
                    for parameter in block.parameters():
                        if kind == "summon_write":
                            parameter.mul_(0.98)
                        self.note(label, parameter.norm())
            case "deepcopy":
                list(auxiliary(block))
                self.note(label, call(copy.deepcopy(block), self._example(), []).norm())
            case "call":
                self.note(label, call(block, self._example(), []).norm())
            case "evaluate":
                self.eval()
                tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
                self.note(label, self.first_loss(self.run(tokens)[1], [tokens, tokens.flip(0)]))
                self.train()
            case "mode":
                block.train(self.batch_index % 2 == 0)
            case "reset" if self.batch_index == 1:
                torch.manual_seed(7)
                for module in block.modules():
                    if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding, nn.LSTM, nn.Conv1d)):
                        module.reset_parameters()

    def _read_kept_by_layers(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, Layer) and module.kept is not None and "teachers" not in name:
                self.note(f"kept by {name}", module.kept.norm())

    def _summoned(self) -> contextlib.AbstractContextManager[None]:
        strategy = self.trainer.strategy
        return strategy.summon_full_params() if isinstance(strategy, ShardedDP) else contextlib.nullcontext()

    def _example(self) -> Tensor:
        return torch.linspace(-1, 1, 2 * LENGTH * self.program.width).view(2, LENGTH, self.program.width)


def _scale_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.7)


def _scaled(result: Any) -> Any:
    if isinstance(result, dict):
        return {**result, "out": result["out"] * 0.9}
    return (result[0] * 0.9, *result[1:]) if isinstance(result, tuple) else result * 0.9


def batches(program: Program) -> DataLoader[tuple[Tensor, ...]]:
    """The same samples in every process; tokens and what follows them."""
    generator = torch.Generator().manual_seed(program.seed)
    count = BATCH * program.ranks * program.steps * program.accumulate
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return DataLoader(TensorDataset(tokens, (tokens + 1) % VOCABULARY), batch_size=BATCH)
