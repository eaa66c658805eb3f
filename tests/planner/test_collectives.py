"""The plan's collectives are those that the engine issues, in calls and bytes, under every strategy."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg as _registers_fake  # noqa: F401 - the backend

from shardeddp.comm import Mesh
from shardeddp.config import MixedPrecision, Options, parse_options
from shardeddp.engine.dtypes import assign_dtypes, cast_at_boundaries
from shardeddp.engine.shard_model import shard_model
from shardeddp.optim.attach import attach_optimizer
from shardeddp.plan.topology import Topology
from shardeddp.planner.calibration import FITTED
from shardeddp.planner.collectives import Collective, collectives_of_step
from shardeddp.planner.plan import Plan, make_plan
from shardeddp.planner.source import Source
from shardeddp.planner.trace import profile
from shardeddp.wrap import NamePolicy, Policy, build_units
from shardeddp.wrap.flat_buffers import costs_of
from shardeddp.wrap.tree import UnitSpec

pytestmark = pytest.mark.timeout(60)

WIDTH = 12


def sent_by_kind(collectives: Sequence[Collective]) -> tuple[Counter[str], Counter[str]]:
    """Bytes and calls by kind, as the engine's `Traffic` has them."""
    nbytes, calls = Counter[str](), Counter[str]()
    for it in collectives:
        nbytes[it.kind] += it.sent_nbytes * it.times
        calls[it.kind] += it.times
    return nbytes, calls


class Block(nn.Module):
    """Two matrices and a norm, whose sizes need padding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH) to the same."""
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    """Blocks between two layers of the root; one of the blocks may be frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.input = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.output = nn.Linear(WIDTH, 5)
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 3) to (rows, 5)."""
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Rank 0 of ranks that are not there: what it sends is true, what it receives is not."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("frozen", "dtype"), [(False, None), (True, "bfloat16")])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("full_shard", {}),
        ("full_shard", {"reshard_after_forward": 4}),
        ("full_shard", {"reduce_every_backward": False}),
        ("shard_grad_op", {}),
        ("shard_optimizer", {}),
        ("no_shard", {}),
        ("hybrid_shard", {}),
        ("hybrid_shard", {"shard_size": 2}),
        ("hybrid_shard", {"optimizer_shard": "world"}),
    ],
)
def test_the_plan_lists_what_the_engine_sends(
    strategy: str,
    options: dict[str, Any],
    dtype: str | None,
    frozen: bool,
    micro_batches: int,
) -> None:
    asked = parse_options({"sharding_strategy": strategy, **options})
    sharding = asked.sharding
    topology = sharding.topology(2, 4)
    model = Stack(frozen)
    precision = MixedPrecision(param_dtype=dtype) if dtype else None
    units = assign_dtypes(model, build_units(model, NamePolicy(("blocks.*",))), precision, None)
    expected = sent_by_kind(
        collectives_of_step([costs_of(unit, topology) for unit in units], sharding, micro_batches)
    )
    found = sent_by_engine(model, units, topology, asked, precision, micro_batches)
    assert found == expected


def sent_by_engine(
    model: nn.Module,
    units: Sequence[UnitSpec],
    topology: Topology,
    asked: Options,
    precision: MixedPrecision | None,
    micro_batches: int,
    autocast: bool = False,
) -> tuple[Counter[str], Counter[str]]:
    """What the engine sends in the third step."""
    with fake_world(topology.world_size):
        cast_at_boundaries(model, units, precision)
        regather = asked.sharding.regather_size
        mesh = Mesh(topology, torch.device("cpu"), timedelta(seconds=30), regather)
        runtime = shard_model(units, mesh, asked)
        trained = [it for it in model.parameters() if it.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        attach_optimizer(optimizer)
        for _ in range(3):
            mesh.traffic.reset()
            for micro_batch in range(micro_batches):
                runtime.sync_gradients = micro_batch == micro_batches - 1
                mixed = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
                with mixed, runtime.step("training_step") as outputs:
                    inputs = torch.ones(2, 3, dtype=next(model.parameters()).dtype)
                    outputs.append(model(inputs).float().square().mean())
                outputs[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        found = mesh.traffic
    return +found.nbytes, +found.calls


class Nest(nn.Module):
    """Blocks inside of another unit, between two uses of its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.inside = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH) to the same."""
        x = self.own(x)
        for block in self.inside:
            x = block(x)
        return self.own(x)


class Wide(Block):
    """Another size than a block has."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, WIDTH) to the same."""
        return super().forward(x) + self.wide(x).mean()


@dataclass(frozen=True)
class Result:
    """Result of a block, with values of its own."""

    values: torch.Tensor
    rows: int
    others: list[torch.Tensor] = field(default_factory=list[torch.Tensor])


class InDataclass(Block):
    """A block whose result is a dataclass."""

    def forward(self, x: torch.Tensor) -> Result:
        """Shape (rows, WIDTH) to the same."""
        return Result(super().forward(x), len(x), [x.detach()])


class Routed(Stack):
    """Units that run in an order of their own; some parameters may be frozen."""

    def __init__(self, order: Sequence[int], frozen: Sequence[str] = ()) -> None:
        super().__init__(frozen=False)
        self.blocks = nn.ModuleList(
            [Wide(), Block(), Nest(), Block(), InDataclass(), InDataclass()]
        )
        self.order = order
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 3) to (rows, 5)."""
        x = self.input(x)
        for index in self.order:
            x = self.blocks[index](x)
            x = x.values if isinstance(x, Result) else x
        return self.output(x)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("full_shard", {}),
        ("full_shard", {"reshard_after_forward": 4}),
        ("shard_grad_op", {}),
        ("shard_optimizer", {}),
        ("no_shard", {}),
        ("hybrid_shard", {"optimizer_shard": "world"}),
    ],
)
@pytest.mark.parametrize(
    ("order", "frozen"),
    [
        pytest.param([0, 1, 1, 1, 3], [], id="one runs thrice"),
        pytest.param([1, 3, 1, 0, 1], [], id="the last one ran before"),
        pytest.param([0, 3], [], id="some do not run"),
        pytest.param([4, 5], [], id="their results are dataclasses"),
        pytest.param([3, 1, 0], [], id="against the order of their registration"),
        pytest.param([0, 1, 2], [], id="inside of another unit"),
        pytest.param([2, 0, 2], [], id="inside of another unit that runs twice"),
        pytest.param([0, 1, 3], ["input", "blocks.0", "blocks.1"], id="the first are frozen"),
        pytest.param([0, 1, 1, 2, 3], ["input", "blocks"], id="the head is trained"),
        pytest.param([0, 1, 3], ["input", "output", "blocks.0", "blocks.3"], id="one is trained"),
        pytest.param([0, 1, 2, 3], ["blocks.1.up", "blocks.2.own"], id="layers are frozen"),
    ],
)
def test_the_plan_follows_the_forwards_of_units(
    order: Sequence[int],
    frozen: Sequence[str],
    strategy: str,
    options: dict[str, Any],
) -> None:
    asked = parse_options({"sharding_strategy": strategy, **options})
    topology = asked.sharding.topology(2, 4)
    policy = NamePolicy(("blocks.*", "blocks.2.inside.*"))

    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.ones(samples, 3)).square().mean()

    traced = profile(
        Routed(order, frozen),
        step,
        policy=policy,
        precision="32-true",
        micro_batch=2,
        tokens=2,
    )
    costs = [costs_of(unit, topology) for unit in traced.units]
    expected = collectives_of_step(costs, asked.sharding, 3, traced.usages)
    model = Routed(order, frozen)
    units = build_units(model, policy)
    found = sent_by_engine(model, units, topology, asked, None, 3)
    assert found == sent_by_kind(expected)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("full_shard", {}),
        ("shard_grad_op", {"reduce_every_backward": False}),
        ("shard_optimizer", {}),
        ("no_shard", {}),
        ("hybrid_shard", {}),
        ("hybrid_shard", {"optimizer_shard": "world"}),
    ],
)
@pytest.mark.parametrize(
    ("precision", "fields"),
    [
        ("32-true", {"reduce_dtype": "bf16"}),
        ("32-true", {"reduce_dtype": "float64"}),
        ("bf16", {"reduce_dtype": "bf16", "output_dtype": "fp32"}),
        ("bf16", {"keep_fp32": ["LayerNorm"]}),
        ("bf16", {"keep_fp32": ["Block"], "reduce_dtype": "bf16", "buffer_dtype": "bf16"}),
        ("fp16", {"cast_forward_inputs": True}),
        ("bf16-mixed", {}),
        ("bf16-mixed", {"reduce_dtype": "bf16"}),
        ("bf16-mixed", {"param_dtype": "fp32"}),
        ("bf16-true", {}),
        ("bf16-true", {"param_dtype": "fp32", "reduce_dtype": "bf16"}),
    ],
)
def test_the_plan_has_the_dtypes_of_gathers_and_reductions(
    precision: str, fields: dict[str, Any], strategy: str, options: dict[str, Any]
) -> None:
    asked = parse_options({"sharding_strategy": strategy, **options})
    topology = asked.sharding.topology(2, 4)
    policy, dtypes = NamePolicy(("blocks.*",)), MixedPrecision(**fields)
    stored = torch.bfloat16 if precision == "bf16-true" else torch.float32

    def step(module: nn.Module, samples: int) -> torch.Tensor:
        return module(torch.ones(samples, 3, dtype=stored)).float().square().mean()

    traced = profile(
        Stack(frozen=True),
        step,
        policy=policy,
        precision=precision,
        micro_batch=2,
        tokens=2,
        mixed_precision=dtypes,
    )
    costs = [costs_of(unit, topology) for unit in traced.units]
    expected = collectives_of_step(costs, asked.sharding, 2, traced.usages)
    model = Stack(frozen=True).to(stored)
    if precision in ("bf16", "fp16"):
        dtypes = MixedPrecision(**{**fields, "param_dtype": precision})
    units = build_units(model, policy)
    autocast = precision == "bf16-mixed"
    units = assign_dtypes(model, units, dtypes, torch.bfloat16 if autocast else None)
    found = sent_by_engine(model, units, topology, asked, dtypes, 2, autocast)
    assert found == sent_by_kind(expected)


def planned(
    build: Callable[[], nn.Module], strategy: str, asked: Options, policy: Policy, **options: Any
) -> Plan:
    """The plan of three micro-batches of two rows on two nodes of four ranks."""

    def step(module: nn.Module, samples: int, dtype: torch.dtype | None) -> torch.Tensor:
        return module(torch.ones(samples, 3)).float().square().mean()

    source = Source(name="model", build=build, step=step, tokens_of=lambda *_: 1)
    return make_plan(
        source,
        gpus=8,
        per_node=4,
        strategies=[(strategy, asked.sharding)],
        precisions="32-true",
        recomputes="none",
        micro_batches=2,
        global_batch=48,
        auto_wrap_policy=policy,
        **options,
    )


class Buffered(Stack):
    """Buffers of several kinds, one of which ranks keep to themselves."""

    def __init__(self) -> None:
        super().__init__(frozen=False)
        self.statistics = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.ones(5, 3))
        self.register_buffer("one", torch.ones(1).expand(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (rows, 3) to (rows, 5)."""
        x = self.statistics(x[:, :, None].expand(-1, -1, 2)).mean(-1)
        return super().forward((x * self.table[0] * self.one[0]).float())


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "no_shard"])
@pytest.mark.parametrize("fields", [{}, {"buffer_dtype": "float64"}])
def test_the_plan_has_the_broadcast_of_buffers(fields: dict[str, Any], strategy: str) -> None:
    asked, policy = parse_options({"sharding_strategy": strategy}), NamePolicy(("blocks.*",))
    dtypes = MixedPrecision(**fields, output_dtype="fp32", keep_fp32=["BatchNorm1d"])
    plan = planned(Buffered, strategy, asked, policy, mixed_precision=dtypes)
    topology = asked.sharding.topology(2, 4)
    model = Buffered()
    units = assign_dtypes(model, build_units(model, policy), dtypes, None)
    found = sent_by_engine(model, units, topology, asked, dtypes, 3)
    assert found == sent_by_kind(plan.best.task.collectives)
    assert found[1]["broadcast"] == (3 if fields else 2)
    task = plan.best.task
    others = [it for it in task.collectives if it.kind != "broadcast"]
    times = [
        it.time(plan.cluster, FITTED).gathers for it in (task, replace(task, collectives=others))
    ]
    assert times[0] > times[1]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 3]])
def test_the_plan_has_the_gathers_of_ranks_that_may_use_different_units(
    order: Sequence[int], strategy: str
) -> None:
    asked = parse_options({"sharding_strategy": strategy, "uneven_units": True})
    policy = NamePolicy(("blocks.*", "blocks.2.inside.*"))

    plan = planned(lambda: Routed(order), strategy, asked, policy, uneven_units=True)
    topology = asked.sharding.topology(2, 4)
    model = Routed(order)
    found = sent_by_engine(model, build_units(model, policy), topology, asked, None, 3)
    assert found == sent_by_kind(plan.best.task.collectives)
    assert plan.best.task.setting.forward_prefetch == 0
    assert "uneven_units: true" in plan.yaml
