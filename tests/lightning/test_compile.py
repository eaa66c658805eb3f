"""A compiled LightningModule and compiled blocks train through the Trainer as eager ones do, under every strategy."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from shardeddp import MixedPrecision, ShardedDP, StepMonitor
from support.compiling import fresh_compiler
from support.parity import Run, Trained, assert_same_training
from support.tasks import (
    Block,
    ConvBlock,
    EvaluatedGpt,
    NormalizedDescent,
    Recorded,
    TinyConvNet,
    TinyGpt,
    image_loader,
    token_loader,
)
from support.trainers import assert_same_weights, full_weights, make_trainer
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(120)

STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "hybrid_shard": {"shard_size": 1},
    "shard_grad_op": {},
    "shard_optimizer": {},
    "no_shard": {},
}

GPT = Run(
    model=TinyGpt,
    loader=token_loader,
    steps=8,
    batches=3,
    options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
)
CONV_NET = Run(model=TinyConvNet, loader=image_loader, steps=8)

INDUCTOR = "inductor"
TRACED = "aot_eager"


# -- the ways to compile


def whole_module(module: Recorded, backend: str) -> Any:
    return torch.compile(module, backend=backend)


def blocks_in_place(module: Recorded, backend: str) -> Any:
    for block in blocks(module):
        block.compile(backend=backend, fullgraph=True)
    return module


def wrapped_blocks(module: Recorded, backend: str) -> Any:
    holder: Any = module
    for index, block in enumerate(blocks(module)):
        holder.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)
    return module


def blocks(module: Any) -> list[torch.nn.Module]:
    return list(module.blocks)


WAYS: dict[str, Callable[[Recorded, str], Any]] = {
    "whole module": whole_module,
    "blocks in place": blocks_in_place,
    "wrapped blocks": wrapped_blocks,
}


def trained(run: Run, way: str, backend: str, arguments: dict[str, Any]) -> Trained:
    """What a compiled training leaves, under the names of an eager one."""
    compiled = replace(run, model=lambda: WAYS[way](run.model(), backend))
    with fresh_compiler():
        result = compiled.sharded(**arguments)
    return Trained(
        losses=result.losses,
        weights={name.replace("_orig_mod.", ""): w for name, w in result.weights.items()},
    )


@pytest.fixture(scope="module")
def reference(world: Worlds) -> Callable[[str], list[Trained]]:
    """What DDP makes of an eager run, by rank; trained once."""

    def train(name: str) -> list[Trained]:
        return world(2).run({"gpt": GPT, "conv net": CONV_NET}[name].under_ddp)

    return cache(train)


References = Callable[[str], list[Trained]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "strategy"),
    [
        *(("blocks in place", strategy) for strategy in STRATEGIES),
        *((way, "full_shard") for way in WAYS if way != "blocks in place"),
        *((way, "no_shard") for way in WAYS if way != "blocks in place"),
    ],
)
def test_every_loss_and_all_weights_equal_eager_ddp(
    world: Worlds, reference: References, way: str, strategy: str
) -> None:
    arguments = {"sharding_strategy": strategy, **STRATEGIES[strategy], "auto_wrap_policy": {Block}}
    assert_same_training(world(2).run(trained, GPT, way, TRACED, arguments), reference("gpt"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[] if way == "whole module" else pytest.mark.torture) for way in WAYS],
)
def test_inductor_trains_to_the_same_weights(
    world: Worlds, reference: References, way: str
) -> None:
    arguments = {"auto_wrap_policy": {Block}}
    assert_same_training(world(2).run(trained, GPT, way, INDUCTOR, arguments), reference("gpt"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_statistics_of_compiled_batch_norms_equal_those_of_eager_ones(
    world: Worlds, reference: References, way: str
) -> None:
    arguments = {"auto_wrap_policy": {ConvBlock}}
    assert_same_training(
        world(2).run(trained, CONV_NET, way, TRACED, arguments), reference("conv net")
    )


# -- one module, several runs


def trainer_for(strategy: str = "full_shard", **options: Any) -> Trainer:
    return make_trainer(
        ShardedDP(strategy, auto_wrap_policy={Block}), max_steps=2, max_epochs=-1, **options
    )


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2)
def test_a_compiled_module_goes_through_all_kinds_of_runs() -> None:
    torch.manual_seed(0)
    module = EvaluatedGpt()
    with fresh_compiler():
        compiled: Any = torch.compile(module, backend=TRACED)
        trainer = trainer_for()
        trainer.fit(compiled, token_loader(16))
        (validated,) = trainer.validate(compiled, token_loader(8), verbose=False)
        (tested,) = trainer.test(module, token_loader(8), verbose=False)
        predicted = trainer.predict(compiled, token_loader(8))
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(compiled, token_loader(16))
    assert predicted is not None
    assert tested["test"] == pytest.approx(validated["val"], rel=1e-6)
    assert len(module.losses) == 4


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole module", "blocks in place"])
def test_runs_around_a_training_with_dynamic_shapes_equal_those_of_ddp(
    world: Worlds, way: str
) -> None:
    expected, found = (world(2).run(validated_trained_and_tested, it, way) for it in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def validated_trained_and_tested(is_reference: bool, way: str) -> list[float]:
    torch.manual_seed(0)
    module = EvaluatedGpt()
    with fresh_compiler():
        compiled: Any = module
        if way == "whole module":
            compiled = torch.compile(module, backend=TRACED, dynamic=True)
        else:
            for block in module.blocks:
                block.compile(backend=TRACED, dynamic=True)
        strategy = DDPStrategy() if is_reference else ShardedDP(auto_wrap_policy={Block})
        trainer = make_trainer(strategy, max_steps=2, max_epochs=-1)
        (validated,) = trainer.validate(compiled, token_loader(8), verbose=False)
        trainer.fit(compiled, token_loader(16))
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(compiled, token_loader(16))
        (tested,) = trainer.test(compiled, token_loader(12, 3), verbose=False)
    return [validated["val"], *module.losses, tested["test"]]


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_module_is_tested_from_a_checkpoint_without_being_given_again(
    world: Worlds, tmp_path: Path
) -> None:
    fresh, loaded = world(2).run(losses_before_and_after_loading, str(tmp_path / "last.ckpt"))[0]
    assert loaded == pytest.approx(fresh, rel=1e-6)


def losses_before_and_after_loading(path: str) -> tuple[float, float]:
    torch.manual_seed(0)
    with fresh_compiler():
        compiled: Any = torch.compile(EvaluatedGpt(), backend=TRACED)
        trainer = trainer_for()
        trainer.fit(compiled, token_loader(16))
        trainer.save_checkpoint(path)
        (fresh,) = trainer.test(compiled, token_loader(8), verbose=False)
        (loaded,) = trainer.test(dataloaders=token_loader(8), ckpt_path=path, verbose=False)
    return fresh["test"], loaded["test"]


@on_ranks(2)
def test_blocks_compiled_in_a_hook_after_sharding_are_one_graph() -> None:
    backend = CompileCounterWithBackend(TRACED)

    class CompiledLate(TinyGpt):
        def on_train_start(self) -> None:
            blocks_in_place(self, backend)  # type: ignore[arg-type]

    torch.manual_seed(0)
    with fresh_compiler():
        trainer_for().fit(CompiledLate(), token_loader(16))
    assert backend.frame_count == 1


class CalledEarly(TinyGpt):
    """Its blocks are compiled when it is built, and may be called before any training."""

    def __init__(self, backend: CompileCounterWithBackend, called: str, fullgraph: bool) -> None:
        super().__init__()
        self.called = called
        for block in self.blocks:
            block.compile(backend=backend, fullgraph=fullgraph)
        if called == "when it is built":
            self.blocks[0](torch.randn(2, 8))

    def setup(self, stage: str) -> None:
        if self.called == "in a hook":
            self.blocks[0](torch.randn(2, 8))


@pytest.mark.loop(1)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("called", ["in training", "when it is built", "in a hook"])
@on_ranks(2)
def test_blocks_of_a_deferred_model_are_compiled(called: str, fullgraph: bool) -> None:
    backend = CompileCounterWithBackend(TRACED)
    with fresh_compiler():
        trainer = trainer_for()
        with trainer.init_module(empty_init=True):
            module = CalledEarly(backend, called, fullgraph)
        trainer.fit(module, token_loader(16))
    assert backend.frame_count == 1


class Recomputing(nn.Module):
    """Its recomputation repeats a dropout, for which compiled code keeps random states."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.5), nn.Linear(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_blocks_of_a_deferred_model_recompute_with_dropout() -> None:
    backend = CompileCounterWithBackend(TRACED)

    class Dropping(TinyGpt):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Recomputing(8) for _ in range(3))
            blocks_in_place(self, backend)  # type: ignore[arg-type]

    losses: list[list[float]] = []
    with fresh_compiler():
        for empty in (False, True):
            trainer = make_trainer(
                ShardedDP(auto_wrap_policy={Recomputing}), max_steps=2, max_epochs=-1
            )
            torch.manual_seed(0)
            with trainer.init_module(empty_init=empty):
                module = Dropping()
            trainer.fit(module, token_loader(16))
            losses.append(module.losses)
    assert losses[1] == losses[0]
    assert backend.frame_count == 1


KEEPS_NORMS = MixedPrecision(param_dtype="bf16", output_dtype="fp32", keep_fp32=["LayerNorm"])
IN_BF16: dict[str, tuple[Any, dict[str, Any]]] = {
    "by autocast": (None, {"precision": "bf16-mixed"}),
    "by options": ("bf16", {}),
    "by options that keep norms": (KEEPS_NORMS, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("computed", IN_BF16)
@on_ranks(2)
def test_another_batch_size_is_compiled_where_gradients_have_another_dtype(computed: str) -> None:
    # Gradients of the step before are still there: in float32, of parameters gathered in bfloat16.
    backend = CompileCounterWithBackend(TRACED)
    mixed_precision, options = IN_BF16[computed]
    strategy = ShardedDP(auto_wrap_policy={Block}, mixed_precision=mixed_precision)
    module = blocks_in_place(TinyGpt(), backend)  # type: ignore[arg-type]
    with fresh_compiler():
        make_trainer(
            strategy, max_steps=3, max_epochs=-1, use_distributed_sampler=False, **options
        ).fit(module, token_loader(11))
    assert backend.frame_count == 2, "casts of a block's inputs and outputs are no graphs"


class OwnStep(torch.optim.AdamW):
    """A class that nobody knows, whose step calls another."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, OwnStep, NormalizedDescent])
@on_ranks(2)
def test_a_compiled_optimizer_step_equals_an_eager_one(kind: Any) -> None:
    backend = CompileCounterWithBackend(TRACED)
    weights: list[dict[str, torch.Tensor]] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, {"lr": 1e-2} if kind is NormalizedDescent else 1e-2)

    class Stepped(TinyGpt):
        def configure_optimizers(self) -> Any:
            (optimizer,), schedulers = super().configure_optimizers()
            if kind is not torch.optim.AdamW:
                optimizer, schedulers = make(self.parameters()), []
            if weights:
                step: Any = torch.compile(optimizer.step, backend=backend)
                optimizer.step = step
            return [optimizer], schedulers

    warnings.filterwarnings("ignore", "nothing is known about the optimizer")
    with fresh_compiler():
        for _ in range(2):
            torch.manual_seed(0)
            module = blocks_in_place(Stepped(), TRACED)
            trainer_for().fit(module, token_loader(16))
            weights.append(full_weights(module))
    assert_same_weights(weights[1], weights[0])
    if kind is torch.optim.AdamW:  # others step on sharded parameters, which end graphs
        assert backend.frame_count > 0


@on_ranks(2)
def test_compiled_code_takes_a_weight_that_was_kept_from_a_forward() -> None:
    kept: list[torch.Tensor] = []

    class Keeping(TinyGpt):
        double: Callable[[torch.Tensor], torch.Tensor]

        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].register_forward_hook(lambda *_: kept.append(self.blocks[0].up.weight))

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return super().loss(batch) + self.double(kept[-1]).sum()

    def double(weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight

    losses: list[list[float]] = []
    with fresh_compiler():
        warnings.filterwarnings("ignore", "parameter .* is used outside the forward")
        compiled: Any = torch.compile(double, backend=TRACED)
        for function in (double, compiled):
            torch.manual_seed(0)
            module = Keeping()
            module.double = function
            trainer_for().fit(module, token_loader(16))
            losses.append(module.losses)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


class CallsAFunction(TinyGpt):
    """A step of it calls a compiled function, which copies of the module share."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = calls = list[int]()

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            return lambda *args: calls.append(1) or graph(*args)

        self.double = torch.compile(lambda loss: 2 * loss.sin(), backend=backend)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.double(super().loss(batch))


@pytest.mark.loop(1)
@pytest.mark.parametrize("planned", ["by 'auto'", "by a monitor"])
@on_ranks(2)
def test_a_function_that_was_planned_with_its_model_is_compiled(planned: str) -> None:
    monitor = StepMonitor()
    strategy = ShardedDP(
        "full_shard" if planned == "by a monitor" else "auto", auto_wrap_policy={Block}
    )
    callbacks = [monitor] if planned == "by a monitor" else []
    module = CallsAFunction()
    with fresh_compiler():
        warnings.filterwarnings("ignore", "ShardedDP.'auto'")
        make_trainer(strategy, max_steps=4, max_epochs=-1, callbacks=callbacks).fit(
            module, token_loader(16)
        )
    assert len(module.calls) == 4


@pytest.mark.slow
@on_ranks(2)
def test_a_penalty_on_sharded_parameters_in_a_compiled_step_counts() -> None:
    class Penalized(TinyGpt):
        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return super().loss(batch) + 0.1 * sum(p.pow(2).sum() for p in self.blocks.parameters())

    runs: list[Penalized] = []
    with fresh_compiler():
        warnings.filterwarnings("ignore", "parameter .* is used outside the forward")
        for compile_it in (False, True):
            torch.manual_seed(0)
            module: Any = Penalized()
            runs.append(module)
            trained_as: Any = torch.compile(module, backend=TRACED) if compile_it else module
            trainer_for().fit(trained_as, token_loader(16))
    torch.testing.assert_close(runs[1].losses, runs[0].losses, rtol=1e-5, atol=0)
