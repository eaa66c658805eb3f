"""The training of a drawn program: its steps, its optimizers, and what its user does between the steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardeddp import ShardedDP
from support.drawn_model import VOCABULARY, DrawnModel
from support.drawn_modules import LENGTH, Layer, auxiliary, call
from support.drawn_programs import Program

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


class DrawnTraining(DrawnModel):
    """The LightningModule of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.automatic_optimization = program.backward in ("automatic", "overridden")
        self.pieces: list[Tensor] = []
        self.batch_index = 0
        self.kept: dict[Any, Tensor] = {}
        self.after_backward: Callable[[], None] = int  # does nothing

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
        self.pieces = losses if backward == "overridden" else []
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
        pieces, self.pieces = self.pieces, []
        if not pieces:
            loss.backward(*args, **kwargs)
        for index, piece in enumerate(pieces):
            (piece / self.program.accumulate).backward(retain_graph=index < len(pieces) - 1)
        self.after_backward()

    def _optimizers(self) -> list[Any]:
        found = self.optimizers()
        return found if isinstance(found, list) else [found]

    def configure_optimizers(self) -> Any:
        self.hook(at=1)
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
            case "all_reduce" if p.grad is not None:
                dist.all_reduce(p.grad)
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
            case "data" if self.program.shares_memory:
                p.data.mul_(0.98)  # refused: it would part the two
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
                self.kept[key] = (
                    view if kind == "keep_view" else view[0] if kind == "keep_rows" else view[:3]
                )
                self._read_kept_by_layers()
            case "normalize":
                p.div_(p.norm(dim=-1, keepdim=True).clamp_min(0.5))
            case "renorm" if p.ndim > 1:
                p.copy_(torch.renorm(p, 2, 0, 0.5))
            case "toggle" if self.program.backward != "toggled":
                for inner, parameter in block.named_parameters():
                    if (
                        f"{self.block_names[number % len(self.block_names)]}.{inner}"
                        not in self.frozen_names
                    ):
                        parameter.requires_grad_(self.batch_index % 2 == 0)
            case "clip":
                self.note(label, nn.utils.clip_grad_norm_(self.parameters(), 0.1))
            case "clip_value":
                nn.utils.clip_grad_value_(self.parameters(), 0.005)
            case "vector" if not self.program.shares_memory:  # it assigns to `.data`
                parameters = list(block.parameters())
                if parameters:
                    nn.utils.vector_to_parameters(
                        nn.utils.parameters_to_vector(parameters) * 0.98, parameters
                    )
            case "state_dict":
                block.load_state_dict(
                    {key: value * 0.98 for key, value in block.state_dict().items()}
                )
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
                    if isinstance(
                        module, (nn.Linear, nn.LayerNorm, nn.Embedding, nn.LSTM, nn.Conv1d)
                    ):
                        module.reset_parameters()

    def _read_kept_by_layers(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, Layer) and module.kept is not None and "teachers" not in name:
                self.note(f"kept by {name}", module.kept.norm())

    def _summoned(self) -> contextlib.AbstractContextManager[None]:
        strategy = self.trainer.strategy
        return (
            strategy.summon_full_params()
            if isinstance(strategy, ShardedDP)
            else contextlib.nullcontext()
        )

    def _example(self) -> Tensor:
        return torch.linspace(-1, 1, 2 * LENGTH * self.program.width).view(
            2, LENGTH, self.program.width
        )


def batches(program: Program) -> DataLoader[tuple[Tensor, ...]]:
    """The same samples in every process; tokens and what follows them."""
    generator = torch.Generator().manual_seed(program.seed)
    count = BATCH * program.ranks * program.steps * program.accumulate
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return DataLoader(TensorDataset(tokens, (tokens + 1) % VOCABULARY), batch_size=BATCH)
