"""What a step computes and keeps is counted as GPUs do it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardeddp.plan.topology import Topology
from shardeddp.planner.trace import profile
from shardeddp.planner.work import ModelProfile, UnitWork
from shardeddp.wrap import resolve_policy
from shardeddp.wrap.flat_buffers import costs_of

WIDTH, LENGTH = 16, 8


class Normed(nn.Module):
    """A layer between two norms."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), norm(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def counted(norm: type[nn.Module], precision: str) -> ModelProfile:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32

    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, LENGTH, WIDTH, dtype=dtype))

    policy = resolve_policy({nn.Linear})
    return profile(
        Normed(norm), step, policy=policy, micro_batch=2, tokens=LENGTH, precision=precision
    )


@pytest.mark.parametrize(("precision", "itemsize"), [("32-true", 4), ("bf16-true", 2)])
def test_an_rms_norm_keeps_its_input_and_one_number_of_each_vector(
    precision: str, itemsize: int
) -> None:
    vectors = 2 * LENGTH
    (root, linear) = counted(nn.RMSNorm, precision).work
    # What the first norm returns is the layer's input; the layer keeps it.
    assert linear.saved_nbytes == vectors * WIDTH * itemsize
    assert root.saved_nbytes == 2 * vectors * (WIDTH * itemsize + 4)


class Calling(nn.Module):
    """A layer, and what it is called by."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(WIDTH, WIDTH, bias=False), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


def in_a_branch(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    other: Any = lambda x: layer(layer(x))  # noqa: E731
    return torch.cond(x.sum() > 0, layer, other, (x,))


def in_a_loop(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    index = torch.zeros((), dtype=torch.int64)
    _, found = while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, layer(x)), (index, x))
    return found


def for_each_place(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def combine(carried: torch.Tensor, place: torch.Tensor) -> Any:
        made = layer(carried + place)
        return made, made.clone()

    return scan(combine, torch.zeros_like(x[:, 0]), x, dim=1)[1]


@pytest.mark.parametrize("call", [in_a_branch, in_a_loop, for_each_place])
def test_matmuls_in_operators_of_functions_count(call: Callable[..., torch.Tensor]) -> None:
    plain, found = (of_calls(it) for it in (lambda layer, x: layer(x), call))
    assert found.matmul_flops == plain.matmul_flops == 2 * 2 * LENGTH * WIDTH**2
    assert found.saved_nbytes >= plain.saved_nbytes


def test_flex_attention_counts_as_the_attention_that_it_is() -> None:
    def flexible(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        heads = layer(x)[:, None]
        return torch.compile(flex_attention)(heads, heads, heads)[:, 0]  # type: ignore[index, return-value]

    def fused(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        heads = layer(x)[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads)[:, 0]

    found, expected = of_calls(flexible), of_calls(fused)
    assert found.attention_flops == expected.attention_flops > 0
    assert found.saved_nbytes == expected.saved_nbytes


def of_calls(call: Callable[..., torch.Tensor]) -> UnitWork:
    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, LENGTH, WIDTH))

    policy = resolve_policy({Calling})
    counts = profile(
        Calling(call), step, policy=policy, micro_batch=2, tokens=LENGTH, precision="32-true"
    )
    return counts.work[0]


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "bf16"])
def test_memory_that_two_parameters_share_is_counted_once(precision: str, on_meta: bool) -> None:
    device = "meta" if on_meta else "cpu"
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(3)])
    model[2].weight.data = model[0].weight.data

    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, WIDTH, dtype=model[0].weight.dtype))

    policy = resolve_policy("auto")
    traced = profile(model, step, policy=policy, micro_batch=2, tokens=2, precision=precision)
    costs = costs_of(traced.units[0], Topology(world_size=2, shard_size=2))
    assert [cost.plan.borrows for cost in costs if cost.layout.numel] == [False, True, False]
    itemsize = 2 if precision == "bf16-true" else 4
    assert sum(cost.main_nbytes for cost in costs) == 2 * WIDTH * WIDTH * itemsize // 2


class Setting(nn.Module):
    """A layer that is called as often as a setting says."""

    def __init__(self, setting: Any, count: Callable[[Any], int]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.setting, self.count = setting, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count(self.setting)):
            x = self.layer(x)
        return x


class Strided(nn.Module):
    """A convolution."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.layer = nn.Conv1d(LENGTH, LENGTH, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Activated(nn.Module):
    """A layer with another one or none before it, which has no parameters."""

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = before, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.before(x))


class Kind(Enum):
    """Settings with names."""

    ONE, TWO = 1, 2


@dataclass
class Sizes:
    """A setting of several values."""

    count: int


def works_of(*modules: nn.Module) -> list[UnitWork]:
    def step(module: nn.Module, samples: int) -> torch.Tensor:
        x = torch.zeros(samples, LENGTH, WIDTH, requires_grad=True)
        for each in module.children():
            x = each(x)
        return x.mean()

    model = nn.ModuleList([*modules])
    policy = resolve_policy({*map(type, modules)})
    options: dict[str, Any] = {"micro_batch": 2, "tokens": LENGTH, "precision": "32-true"}
    return profile(model, step, policy=policy, **options).work[1:]


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (((1,), (1, 2, 3)), len),
        (([1], [1, 2, 3]), len),
        (({"a": [1]}, {"a": [1, 2, 3]}), lambda it: len(it["a"])),
        (({1}, {1, 2, 3}), len),
        ((torch.float32, torch.float64), lambda it: it.itemsize // 4),
        ((Kind.ONE, Kind.TWO), lambda it: it.value),
        ((partial(int, 1), partial(int, 2)), lambda it: it()),
        ((torch.zeros(1), torch.zeros(3)), len),
        ((Sizes(1), Sizes(3)), lambda it: it.count),
    ],
)
def test_units_with_other_settings_are_other_units(
    settings: Sequence[Any], count: Callable[[Any], int]
) -> None:
    each = [work.matmul_flops for work in works_of(*(Setting(it, count) for it in settings))]
    one = 2.0 * 2 * LENGTH * WIDTH * WIDTH
    assert each == [one * count(it) for it in settings]


def test_convolutions_with_other_strides_are_other_units() -> None:
    one, two, three = (work.matmul_flops for work in works_of(*map(Strided, (1, 2, 2))))
    assert one == 2 * two == 4 * three


def test_layers_of_other_classes_make_other_units() -> None:
    kernels = [it.kernels for it in works_of(Activated(nn.Tanh()), Activated(nn.Identity()))]
    assert kernels[0] == kernels[1] + 1


def test_hooks_of_layers_make_other_units() -> None:
    first, second = Activated(nn.Identity()), Activated(nn.Identity())
    second.layer.register_forward_hook(lambda _, __, out: out.relu())
    one, other = works_of(first, second)
    assert other.kernels == one.kernels + 1


def test_equal_units_run_once() -> None:
    calls = list[object]()

    def count(setting: object) -> int:
        calls.append(setting)
        return 1

    setting: Any = lambda: (1, [2.0, {"three": torch.int8}], Kind.ONE, Sizes(4))  # noqa: E731
    works_of(*(Setting(setting(), count) for _ in range(4)))
    assert len(calls) == 1


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, WIDTH), (WIDTH, 2), (2, WIDTH))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x)).relu()


class Own(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x * 1.0) @ (weight * 1.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grad_outputs
        return grad @ weight.T, x.flatten(0, 1).T @ grad.flatten(0, 1)


class OwnBackward(nn.Module):
    """A layer whose product has a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Own.apply(x, self.weight)


class Attending(nn.Module):
    """Attention of frozen or trained queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.base(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]


class Teaching(nn.Module):
    """A layer that runs without gradients first."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.base(x)
        return self.base(x) - target


class Layered(nn.Module):
    """Units of a kind between an embedding with a layer behind it, and an output layer."""

    def __init__(self, kind: type[nn.Module], frozen: Sequence[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.input = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([kind() for _ in range(3)])
        self.output = nn.Linear(WIDTH, 7, bias=False)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.input(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return self.output(x).square().mean()


@pytest.mark.parametrize("kind", [Adapted, OwnBackward, Attending, Teaching])
@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param([], id="nothing is frozen"),
        pytest.param(["embedding"], id="the embedding"),
        pytest.param(["embedding", "input", "blocks.0", "blocks.1"], id="the first blocks"),
        pytest.param(["embedding", "input", "blocks"], id="all but the head"),
        pytest.param(["embedding", "input", "output", "base"], id="all but adapters"),
    ],
)
def test_frozen_parameters_take_no_flops_for_their_gradients(
    kind: type[nn.Module], frozen: Sequence[str]
) -> None:
    if "base" in frozen:
        if kind is not Adapted:
            pytest.skip("has no adapters")
        frozen = [*frozen[:-1], *(f"blocks.{index}.base" for index in range(3))]

    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, LENGTH, dtype=torch.int64))

    options: dict[str, Any] = {"micro_batch": 2, "tokens": LENGTH, "precision": "32-true"}
    traced = profile(Layered(kind, frozen), step, policy=resolve_policy({kind}), **options)
    with FlopCounterMode(display=False) as counter:
        step(Layered(kind, frozen), 2).backward()
    attention = 4.0 * 2 * LENGTH * LENGTH * WIDTH / 2 if kind is Attending else 0.0
    trained = 3 - len({"blocks.0", "blocks.1"} & {*frozen}) if "blocks" not in frozen else 0
    counts = counter.get_flop_counts()["Global"]
    counted = sum(n for op, n in counts.items() if "scaled_dot_product" not in str(op))
    assert traced.model_flops == counted + attention * (3 + 2 * trained)
    assert traced.trained_shares[1] == (trained / 3 if attention else 1)


def test_all_work_of_a_trained_model_has_a_backward() -> None:
    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.zeros(samples, LENGTH, dtype=torch.int64))

    options: dict[str, Any] = {"micro_batch": 2, "tokens": LENGTH, "precision": "32-true"}
    traced = profile(Layered(Attending, ()), step, policy=resolve_policy({Attending}), **options)
    assert traced.trained_shares == traced.recomputed_shares["full"] == (1, 1, 1)


def test_the_head_is_what_follows_the_last_unit_that_runs() -> None:
    def work(order: Sequence[int]) -> tuple[UnitWork, list[UnitWork]]:
        def step(module: nn.Module, samples: int) -> torch.Tensor:
            x = torch.zeros(samples, LENGTH, WIDTH, requires_grad=True)
            for index in order:
                x = module[0][index](x)
            return module[1](x).mean()

        units = nn.ModuleList([Adapted(), Attending(), Teaching()])
        model = nn.ModuleList([units, nn.Linear(WIDTH, WIDTH)])
        policy = resolve_policy({Adapted, Attending, Teaching})
        options: dict[str, Any] = {"micro_batch": 2, "tokens": LENGTH, "precision": "32-true"}
        traced = profile(model, step, policy=policy, **options)
        return traced.head, traced.work[1:]

    forwards, backwards = work([0, 1, 2]), work([2, 1, 0])
    assert forwards[0] == backwards[0]
    assert forwards[0].matmul_flops == 2.0 * 2 * LENGTH * WIDTH * WIDTH
    assert [it.matmul_flops for it in forwards[1]] == [it.matmul_flops for it in backwards[1][::-1]]


class Sampling(nn.Module):
    """A step that reads every other frame of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of frames (samples, length, width)."""
        return self.layer(batch[:, ::2].float()).sum()


def test_a_batch_is_held_during_the_backward() -> None:
    found = profile(
        Sampling(),
        lambda module, samples: module.training_step(
            torch.zeros(samples, LENGTH, WIDTH, dtype=torch.uint8)
        ),
        policy=resolve_policy({nn.Linear}),
        micro_batch=2,
        tokens=2,
        precision="32-true",
    )
    batch = 2 * LENGTH * WIDTH
    assert found.root_memory.at_begin == batch
    assert found.root_memory.held_nbytes in range(batch, batch + 16)  # and the loss


def test_a_sum_in_float32_makes_no_copy_of_its_operand() -> None:
    def kernels(call: Callable[..., torch.Tensor]) -> int:
        def step(module: nn.Module, samples: int) -> torch.Tensor:
            return module(torch.zeros(samples, LENGTH, WIDTH))

        model = Calling(lambda layer, x: call(layer(x)))
        policy = resolve_policy({nn.Linear})
        found = profile(model, step, policy=policy, micro_batch=2, tokens=2, precision="bf16-mixed")
        return found.head.kernels

    assert kernels(lambda x: x.sum(-1)) == kernels(lambda x: x.sum(-1, dtype=torch.float32))


class Checkpointing(nn.Module):
    """Layers under the checkpointing of torch."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, WIDTH)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in "1234"]
        )
        self.use_reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            reentrant = self.use_reentrant
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_units_under_the_checkpointing_of_torch_run_once_and_keep_their_inputs(
    use_reentrant: bool,
) -> None:
    def found(use_reentrant: bool | None) -> ModelProfile:
        return profile(
            Checkpointing(use_reentrant),
            lambda module, samples: module(torch.zeros(samples, LENGTH, dtype=torch.long)).sum(),
            policy=resolve_policy({nn.Sequential}),
            micro_batch=2,
            tokens=2,
            precision="32-true",
        )

    plain, under = found(None), found(use_reentrant)
    assert (under.visits, under.usages) == (plain.visits, plain.usages)
    assert under.model_flops == plain.model_flops
    inputs = 4 * 2 * LENGTH * WIDTH * 4
    kept = sum(it.saved_nbytes for it in under.work)
    assert inputs <= kept < 1.2 * inputs < sum(it.saved_nbytes for it in plain.work)
