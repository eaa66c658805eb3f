"""In which dtypes parameters travel and compute: as autocast would have it, or as the user's options say."""

import copy
import warnings
from collections import Counter, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardeddp import MixedPrecision
from shardeddp.config import parse_options, resolve_mixed_precision
from shardeddp.engine.dtypes import assign_dtypes, cast_at_boundaries
from shardeddp.engine.hooks import map_tensors
from shardeddp.errors import ConfigurationError
from shardeddp.wrap import NamePolicy, build_units
from training import RUNTIMES, Sharding, Trial, batch, full
from world import on_ranks

pytestmark = pytest.mark.timeout(60)

WIDTH = 16
BLOCKS = ("blocks.*",)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.norm.weight.dtype, self.up.weight.dtype]
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.register_buffer("table", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    given = tokens(rank, step)
    return nn.functional.cross_entropy(model(given).float().flatten(0, 1), given.flatten())


def dtypes_of(
    model: nn.Module, autocast: torch.dtype | None = None, **options: Any
) -> dict[str, torch.dtype]:
    """In which dtype each parameter is gathered."""
    chosen = MixedPrecision(**options) if options else None
    units = assign_dtypes(model, build_units(model, NamePolicy(BLOCKS)), chosen, autocast)
    return {spec.fqn: spec.param_dtype for unit in units for spec in unit.parameters}


def test_what_autocast_casts_is_gathered_in_its_dtype_and_the_rest_in_its_own() -> None:
    found = dtypes_of(Model(), autocast=torch.bfloat16)
    linear = {name for name in found if "up" in name or "down" in name or "head" in name}
    assert {name for name, dtype in found.items() if dtype is torch.bfloat16} == linear
    assert {found[name] for name in found if name not in linear} == {torch.float32}


def test_a_weight_that_something_else_uses_as_well_is_gathered_in_its_own_dtype() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    assert dtypes_of(model, autocast=torch.bfloat16)["embedding.weight"] is torch.float32


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.weight.norm())


def test_a_subclass_may_do_anything_with_its_weight_and_keeps_it() -> None:
    model = nn.Sequential(Scaled(2, 2), nn.Linear(2, 2))
    units = assign_dtypes(model, build_units(model, NamePolicy(["0"])), None, torch.bfloat16)
    found = {spec.fqn: spec.param_dtype for unit in units for spec in unit.parameters}
    assert found["0.weight"] is torch.float32 and found["1.weight"] is torch.bfloat16


def test_doubles_and_integers_are_left_to_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2))
    model[1].counts = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    units = assign_dtypes(model, build_units(model, NamePolicy(["0"])), None, torch.bfloat16)
    found = {spec.fqn: spec.param_dtype for unit in units for spec in unit.parameters}
    assert (found["0.weight"], found["1.counts"]) == (torch.float64, torch.int64)


def test_a_param_dtype_of_the_users_goes_for_all_but_what_is_kept() -> None:
    found = dtypes_of(Model(), param_dtype="bf16", keep_fp32=["LayerNorm"])
    assert {name for name, dtype in found.items() if dtype is torch.float32} == {
        f"blocks.{index}.norm.{name}" for index in range(3) for name in ("weight", "bias")
    }


# -- what is wrong


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("int8", "param_dtype='int8': expected a floating-point dtype"),
        ({"reduce_dtype": "brain"}, "reduce_dtype='brain'"),
        ({"parm_dtype": "bf16"}, "parm_dtype"),
        (3, "mixed_precision=3: expected None"),
    ],
)
def test_what_is_no_dtype_is_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_mixed_precision(value)


def test_options_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigurationError, match="reduce_dtype='brain'"):
        MixedPrecision(reduce_dtype="brain")


@pytest.mark.parametrize("value", ["bf16", torch.bfloat16, {"param_dtype": "bfloat16"}])
def test_a_dtype_alone_or_fields_are_enough(value: object) -> None:
    options = resolve_mixed_precision(value)
    assert options is not None
    assert options.param_dtype is torch.bfloat16


def test_a_class_to_keep_that_is_not_in_the_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="BatchNorm2d"):
        dtypes_of(Model(), param_dtype="bf16", keep_fp32=["BatchNorm2d"])


def test_a_weight_between_a_kept_module_and_another_is_refused() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    with pytest.raises(
        ConfigurationError, match=r"embedding\.weight is shared between .* keep_fp32"
    ):
        dtypes_of(model, param_dtype="bf16", keep_fp32=["Embedding"])


# -- training


def trial_of(
    options: MixedPrecision, strategy: str = "full_shard", shard_size: int | None = None
) -> Trial:
    sharding = Sharding(strategy=strategy, shard_size=shard_size, units=BLOCKS)
    model = Model()
    trial = object.__new__(Trial)
    trial.reference, trial.model = copy.deepcopy(model), model
    trial.runtime = sharding.apply(model, options=options)
    return trial


def half_of(reference: nn.Module, kept: tuple[type, ...] = ()) -> nn.Module:
    """The same model in bfloat16, but for the modules of some classes, which cast what they take and return."""
    half = copy.deepcopy(reference).to(torch.bfloat16)
    names = {
        name: module
        for name, module in reference.named_modules()
        if kept and isinstance(module, kept)
    }
    for name, module in names.items():
        found = half.get_submodule(name)
        found.load_state_dict(module.state_dict())
        found.float().load_state_dict(module.state_dict())
        found.register_forward_pre_hook(lambda _, args: tuple(arg.float() for arg in args))
        found.register_forward_hook(lambda _, __, output: output.bfloat16())
    return half


def reference_gradients(reference: nn.Module, kept: tuple[type, ...] = ()) -> dict[str, Tensor]:
    """The mean over ranks of gradients that a model in bfloat16 computes, in float32."""
    total: Counter[str] | dict[str, Any] = {}
    for rank in range(dist.get_world_size()):
        half = half_of(reference, kept)
        loss(half, rank, 0).backward()
        for name, parameter in half.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, 0) + parameter.grad.float() / dist.get_world_size()
    return dict(total)


@pytest.mark.parametrize("strategy", RUNTIMES)
@pytest.mark.parametrize("keep", [(), ("LayerNorm",)])
@on_ranks(2)
def test_gradients_are_those_of_a_model_in_the_lower_dtype_averaged_in_float32(
    strategy: str, keep: tuple[str, ...]
) -> None:
    trial = trial_of(MixedPrecision(param_dtype="bf16", keep_fp32=keep), strategy)
    expected = reference_gradients(trial.reference, (nn.LayerNorm,) if keep else ())
    trial.forward(loss).backward()
    seen = trial.model.blocks[1].seen
    assert seen == [torch.bfloat16, torch.float32 if keep else torch.bfloat16, torch.bfloat16]
    for name, parameter in trial.model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        torch.testing.assert_close(full(parameter.grad), expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("reduce_dtype", "rtol"), [(None, 1e-6), ("bf16", 2e-2)])
@on_ranks(4)
def test_bytes_on_the_wire_are_those_of_the_dtypes(reduce_dtype: str | None, rtol: float) -> None:
    sizes = {"gather": 2, "reduce": 4 if reduce_dtype is None else 2}
    trial = trial_of(
        MixedPrecision(param_dtype="bf16", reduce_dtype=reduce_dtype), "hybrid_shard", 2
    )
    trial.forward(loss).backward()
    layouts = [
        group.layout for progress in trial.runtime.progresses for group in progress.unit.groups
    ]
    padded = sum(layout.padded_numel for layout in layouts)
    nbytes = trial.runtime.mesh.traffic.nbytes
    root = sum(
        cost.layout.padded_numel for cost in trial.runtime.progresses[0].unit.costs()
    )  # gathered once
    assert nbytes["all_gather"] == sizes["gather"] * (2 * padded - root) // 2
    assert nbytes["reduce_scatter"] == sizes["reduce"] * padded // 2
    assert nbytes["all_reduce"] == 2 * sizes["reduce"] * (padded // 2) // 2
    expected = reference_gradients(trial.reference)
    for name, parameter in trial.model.named_parameters():
        error = float((full(parameter.grad) - expected[name]).norm() / expected[name].norm())
        assert error < rtol, name


@on_ranks(2)
def test_outputs_and_buffers_have_the_dtypes_that_were_asked_for() -> None:
    trial = trial_of(
        MixedPrecision(param_dtype="bf16", output_dtype="float32", buffer_dtype="bf16")
    )
    with torch.no_grad(), trial.runtime.step("validation_step"):
        assert trial.model(tokens(0, 0)).dtype is torch.float32
        assert trial.model.blocks[0].seen[0] is torch.bfloat16
    assert trial.model.table.dtype is torch.bfloat16


@on_ranks(2)
def test_inputs_are_left_alone_where_casting_is_switched_off() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    options = MixedPrecision(param_dtype="bf16", cast_forward_inputs=False)
    cast_at_boundaries(model, build_units(model, NamePolicy(["0"])), options)
    assert not model._forward_pre_hooks and not model[0]._forward_pre_hooks
    with pytest.raises(RuntimeError, match="dtype"):
        Sharding(units=("0",)).apply(model, options=options)
        model(batch(0, 0, 2, 3))


@pytest.mark.parametrize("strategy", RUNTIMES)
@on_ranks(2)
def test_a_write_inside_a_step_is_said_to_be_rounded_and_leaves_other_elements_at_full_precision(
    strategy: str,
) -> None:
    trial = trial_of(MixedPrecision(param_dtype="bf16"), strategy)
    before = {name: full(parameter).clone() for name, parameter in trial.model.named_parameters()}
    for expected in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad(), trial.runtime.step("validation_step"):
                trial.model.head.weight[0].fill_(0.5)
        said = [str(each.message) for each in caught]
        assert len(said) == expected and all(
            "head.weight is written to inside of a step" in each for each in said
        )
    before["head.weight"][0] = 0.5
    for name, parameter in trial.model.named_parameters():
        assert torch.equal(full(parameter), before[name]), name


# -- loss scaling


@pytest.mark.parametrize("strategy", RUNTIMES)
@on_ranks(3)
def test_a_loss_scaler_skips_a_step_on_all_ranks_when_one_shard_overflows(strategy: str) -> None:
    warnings.filterwarnings("ignore", "parameter .* is used outside the forward")
    torch.manual_seed(0)
    trial = Trial(
        nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)),
        Sharding(strategy=strategy, units=("0", "1")),
    )
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(4):
        overflows = step in (1, 2)

        def mean(model: nn.Module, rank: int, step: int, overflows: bool = overflows) -> Tensor:
            # One element of one weight overflows, in the shard of one rank.
            spike = torch.tensor(float("inf")) if overflows and rank == 1 else torch.tensor(1.0)
            return model(batch(rank, step, 4, 5)).mean() + model[0].weight[0, 0] * spike.where(
                spike > 2, 0.0
            )

        scalers[0].scale(trial.forward(mean, step)).backward()
        scalers[1].scale(trial.reference_loss(mean, step)).backward()
        for scaler, optimizer in zip(
            scalers, (trial.optimizer, trial.reference_optimizer), strict=True
        ):
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        trial.check_parameters()
    assert scalers[0].get_scale() == 1.0


def test_equal_dtypes_are_equal_however_they_are_written() -> None:
    first, *others = (
        parse_options({"mixed_precision": given})
        for given in ("bf16", torch.bfloat16, MixedPrecision(param_dtype="bfloat16"))
    )
    assert all(first.shards_like(other) for other in others)


@dataclass(frozen=True)
class Pair:
    """Values of a user's class."""

    one: Any
    two: Any


def test_tensors_are_replaced_in_whatever_holds_them_and_the_rest_stays_itself() -> None:
    def half(tensor: Tensor) -> Tensor:
        return tensor.bfloat16()

    Point = namedtuple("Point", "x y")
    x = torch.ones(2)
    found = map_tensors([{"a": (x, 3)}, Pair(x, "x"), Point(x, None), defaultdict(list, k=x)], half)
    assert found[0]["a"][0].dtype is found[1].one.dtype is found[2].x.dtype is torch.bfloat16
    assert found[3]["k"].dtype is torch.bfloat16
    assert found[3]["new"] == [] and found[0]["a"][1] == 3 and found[1].two == "x"
    same = {"a": ["text", range(3)]}
    assert map_tensors(same, half) is same
