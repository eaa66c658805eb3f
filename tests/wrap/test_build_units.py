"""From a model and a policy to units: every parameter in exactly one, tied ones where all their places are covered."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from shardeddp.errors import ConfigurationError
from shardeddp.wrap import (
    AutoPolicy,
    ClassPolicy,
    NamePolicy,
    Policy,
    SingleUnitPolicy,
    SizePolicy,
    build_units,
    require_parameters,
)
from shardeddp.wrap.tree import ParameterSpec, UnitSpec

pytestmark = pytest.mark.timeout(30)


class Block(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Toy(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class Chosen(Policy):
    """Selects exactly the names it was given, right or wrong."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def select(self, root: nn.Module) -> list[str]:
        return list(self.names)


def contents(units: list[UnitSpec]) -> dict[str, list[str]]:
    """The fqns of the parameters of every unit."""
    return {unit.name: [spec.fqn for spec in unit.parameters] for unit in units}


def spec_of(units: list[UnitSpec], fqn: str) -> ParameterSpec:
    (spec,) = [spec for unit in units for spec in unit.parameters if spec.fqn == fqn]
    return spec


def refused(root: nn.Module, policy: Policy | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        build_units(root, policy or SingleUnitPolicy())
    return str(caught.value)


# --- where a parameter belongs ---


def test_every_parameter_belongs_to_the_nearest_unit_around_it() -> None:
    assert contents(build_units(Toy(), NamePolicy(["layers.*", "layers.1.first"]))) == {
        "": ["scale", "head.weight"],
        "layers.0": ["layers.0.first.weight", "layers.0.first.bias", "layers.0.second.weight"],
        "layers.1": ["layers.1.second.weight"],
        "layers.1.first": ["layers.1.first.weight", "layers.1.first.bias"],
        "layers.2": ["layers.2.first.weight", "layers.2.first.bias", "layers.2.second.weight"],
    }


@pytest.mark.parametrize(
    "policy",
    [
        SingleUnitPolicy(),
        ClassPolicy([Block]),
        ClassPolicy([Block, nn.Linear]),
        SizePolicy(20),
        AutoPolicy(min_numel=1),
    ],
    ids=repr,
)
def test_every_parameter_is_in_exactly_one_unit_under_every_policy(policy: Policy) -> None:
    model = Toy()
    units = build_units(model, policy)
    specs = [spec for unit in units for spec in unit.parameters]
    assert sorted(spec.fqn for spec in specs) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert all(spec.parameter is model.get_parameter(spec.fqn) for spec in specs)
    assert sum(spec.parameter.numel() for spec in specs) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_the_root_comes_first_and_the_others_in_module_order_whatever_the_policy_returned() -> None:
    units = build_units(Toy(), Chosen("head", "layers.2", "layers.0", "layers.2"))
    assert [unit.name for unit in units] == ["", "layers.0", "layers.2", "head"]
    assert [unit.label for unit in units][:2] == ["(root)", "layers.0"]


def test_units_hold_their_module_and_the_owners_of_each_parameter() -> None:
    model = Toy()
    root, unit = build_units(model, NamePolicy(["layers.1"]))
    assert root.module is model
    assert unit.module is model.layers[1]
    assert spec_of([unit], "layers.1.first.bias").registrations == (
        (model.layers[1].first, "bias"),
    )
    assert spec_of([root], "scale").registrations == ((model, "scale"),)


def test_frozen_scalar_and_empty_parameters_are_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_parameter("nothing", nn.Parameter(torch.empty(0)))
    model[0].register_parameter("scalar", nn.Parameter(torch.tensor(1.0), requires_grad=False))
    assert contents(build_units(model, NamePolicy(["0"])))["0"] == [
        "0.weight",
        "0.bias",
        "0.nothing",
        "0.scalar",
    ]


def test_members_of_parameter_lists_belong_to_the_nearest_unit_with_a_forward() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.ones(2) for _ in range(2))
            self.named = nn.ParameterDict({"a": torch.ones(3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    units = build_units(
        nn.Sequential(Holder(), nn.Linear(2, 2)), Chosen("0", "0.weights", "0.named")
    )
    assert contents(units) == {
        "": ["1.weight", "1.bias"],
        "0": ["0.weights.0", "0.weights.1", "0.named.a"],
    }


def test_parametrized_parameters_belong_to_the_unit_around_the_parametrized_module() -> None:
    units = build_units(
        nn.Sequential(weight_norm(nn.Linear(2, 2)), nn.ReLU()), ClassPolicy(["Linear"])
    )
    assert contents(units)["0"] == [
        "0.bias",
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    ]


def test_containers_that_a_policy_chose_are_left_out() -> None:
    units = build_units(Toy(), Chosen("layers", "layers.0"))
    assert [unit.name for unit in units] == ["", "layers.0"]


def test_a_unit_without_parameters_is_dropped_but_not_the_root() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    units = build_units(model, Chosen("0", "1"))
    assert contents(units) == {"": [], "1": ["1.weight", "1.bias"]}


def test_the_root_as_a_choice_changes_nothing() -> None:
    assert [unit.name for unit in build_units(Toy(), Chosen("", "head"))] == ["", "head"]


# --- tied parameters ---


def test_a_weight_tied_between_the_root_and_a_unit_belongs_to_the_root() -> None:
    model = Toy()
    model.layers[0].second.weight = model.head.weight
    units = build_units(model, NamePolicy(["layers.*", "head"]))
    assert contents(units)[""] == ["scale", "layers.0.second.weight"]
    assert "head" not in contents(units)
    assert spec_of(units, "layers.0.second.weight").registrations == (
        (model.layers[0].second, "weight"),
        (model.head, "weight"),
    )


def test_a_weight_tied_inside_one_unit_stays_there_with_both_owners() -> None:
    model = Toy()
    block = model.layers[1]
    block.second.weight = block.first.weight
    units = build_units(model, NamePolicy(["layers.*"]))
    assert contents(units)["layers.1"] == ["layers.1.first.weight", "layers.1.first.bias"]
    assert spec_of(units, "layers.1.first.weight").registrations == (
        (block.first, "weight"),
        (block.second, "weight"),
    )


def test_a_weight_tied_between_two_units_belongs_to_the_innermost_unit_around_both() -> None:
    model = nn.Sequential(nn.Sequential(Block(), Block()), Block())
    model[0][0].first.weight = model[0][1].second.weight
    units = build_units(model, NamePolicy(["0", "0.*", "1"]))
    assert contents(units)["0"] == ["0.0.first.weight"]
    assert contents(units)[""] == []


def test_a_weight_tied_between_a_unit_and_one_inside_it_belongs_to_the_outer_one() -> None:
    model = nn.Sequential(Block())
    model[0].first.weight = model[0].second.weight
    units = build_units(model, NamePolicy(["0", "0.first"]))
    assert contents(units) == {"": [], "0": ["0.first.weight"], "0.first": ["0.first.bias"]}


def test_a_parameter_under_two_names_of_one_module_has_both_as_owners() -> None:
    model = nn.Linear(2, 2)
    model.alias = model.weight
    (root,) = build_units(model, SingleUnitPolicy())
    assert spec_of([root], "weight").registrations == ((model, "weight"), (model, "alias"))


def test_a_tied_embedding_leaves_the_blocks_alone() -> None:
    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 64)
            self.layers = nn.ModuleList(Block(64) for _ in range(3))
            self.head = nn.Linear(64, 100, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Gpt()
    units = build_units(model, AutoPolicy(min_numel=1000))
    assert [unit.name for unit in units] == ["", "layers.0", "layers.1", "layers.2"]
    assert units[0].parameters == (
        ParameterSpec(
            fqn="embed.weight",
            parameter=model.embed.weight,
            registrations=((model.embed, "weight"), (model.head, "weight")),
        ),
    )


# --- modules registered twice ---


def test_a_module_registered_twice_is_one_unit_under_its_first_name() -> None:
    model = Toy()
    model.again = model.layers[0]
    for name in ("layers.0", "again"):
        units = build_units(model, Chosen(name))
        assert [unit.name for unit in units] == ["", "layers.0"]
        assert len(units[1].parameters) == 3
        assert spec_of(units, "layers.0.first.bias").registrations == (
            (model.layers[0].first, "bias"),
        )


def test_a_module_shared_by_two_units_belongs_to_the_unit_around_both() -> None:
    shared = nn.Linear(4, 4, bias=False)
    first, second = Block(), Block()
    first.second = second.second = shared
    units = build_units(nn.Sequential(first, second), NamePolicy(["0", "1"]))
    assert contents(units)[""] == ["0.second.weight"]
    assert spec_of(units, "0.second.weight").registrations == ((shared, "weight"),)


def test_a_shared_module_that_is_a_unit_itself_keeps_its_parameters() -> None:
    first, second = Block(), Block()
    first.second = second.second
    units = build_units(nn.Sequential(first, second), NamePolicy(["0", "1", "1.second"]))
    assert contents(units)["0.second"] == ["0.second.weight"]


# --- models that cannot be sharded, and policies that are wrong ---


def test_a_name_that_does_not_exist_is_refused_with_the_policy_and_the_nearest_name() -> None:
    text = refused(Toy(), Chosen("layer.0"))
    assert text.startswith("Chosen: ")
    assert "'layer.0'; did you mean 'layers.0'" in text


@pytest.mark.parametrize(
    "model", [nn.ReLU(), nn.Sequential(), nn.ModuleList([nn.Dropout(), nn.Identity()])]
)
def test_a_model_without_parameters_is_one_empty_unit_that_cannot_be_trained(
    model: nn.Module,
) -> None:
    (unit,) = build_units(model, SingleUnitPolicy())
    assert (unit.module, unit.parameters) == (model, ())
    with pytest.raises(ConfigurationError, match=f"found none in {type(model).__name__}"):
        require_parameters(model)


def test_parameters_on_the_meta_device_have_the_units_of_real_ones() -> None:
    with torch.device("meta"):
        deferred = build_units(Toy(depth=4), NamePolicy(("layers.*",)))
    real = build_units(Toy(depth=4), NamePolicy(("layers.*",)))
    assert [(unit.name, [spec.fqn for spec in unit.parameters]) for unit in deferred] == [
        (unit.name, [spec.fqn for spec in unit.parameters]) for unit in real
    ]


def test_lazy_modules_are_refused_until_they_have_run() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    text = refused(model)
    assert "found 2 uninitialized: '0.weight', '0.bias'" in text
    assert "Run one forward" in text
    model(torch.ones(1, 2))
    assert len(build_units(model, SingleUnitPolicy())[0].parameters) == 4


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_another_engine_wrapped_is_refused_with_the_modules_name() -> None:
    model = Toy()
    model.head = DistributedDataParallel(model.head)
    text = refused(model)
    assert "'head' wrapped by torch.nn.parallel.DistributedDataParallel" in text
    assert "Pass the bare module" in text
    assert "'(root)' wrapped by torch.nn.parallel" in refused(DistributedDataParallel(Toy()))


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.filterwarnings("ignore")
def test_both_generations_of_torchs_fsdp_are_refused() -> None:
    first = FullyShardedDataParallel(Toy(), device_id=torch.device("cpu"))
    assert "'(root)' wrapped by FSDP1" in refused(first)
    second = Toy()
    fully_shard(second.layers[1], mesh=init_device_mesh("cpu", (1,)))
    assert "'layers.1' wrapped by FSDP2" in refused(second)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.filterwarnings("ignore")
def test_parameters_that_are_dtensors_are_refused() -> None:
    model = Toy()
    mesh = init_device_mesh("cpu", (1,))
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh))
    text = refused(model)
    assert "found 1 that are DTensors already: 'head.weight'" in text
    assert "Pass the bare module" in text


def test_data_parallel_is_refused_too() -> None:
    assert "torch.nn.DataParallel" in refused(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))
