"""The policies that are told what to choose: by class, by name or by predicate; and what each says of a mistake."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from shardeddp.errors import ConfigurationError
from shardeddp.wrap import (
    ClassPolicy,
    NamePolicy,
    Policy,
    PredicatePolicy,
    SingleUnitPolicy,
    SizePolicy,
)

pytestmark = pytest.mark.timeout(30)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)  # 60 parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x)[..., :4]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Linear(4, 4)  # 20 parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class LastBlock(Block):
    pass


class Toy(nn.Module):
    """Two blocks of 80 parameters, a third of a subclass, a head of 20."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), LastBlock()])
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


LAYERS = ["layers.0", "layers.1", "layers.2"]


def refused(policy: Policy, root: nn.Module | None = None) -> str:
    """The text of the error that selecting raises."""
    with pytest.raises(ConfigurationError) as caught:
        policy.select(root or Toy())
    return str(caught.value)


# --- one unit ---


def test_the_single_unit_policy_chooses_nothing_below_the_root() -> None:
    assert SingleUnitPolicy().select(Toy()) == []


# --- classes ---


@pytest.mark.parametrize(
    "classes",
    [
        [Block],
        {Block},
        (Block,),
        Block,
        "Block",
        ["Block"],
        [f"{__name__}.Block"],
        {f"{__name__}.Block", "Block"},
    ],
)
def test_a_class_chooses_its_modules_and_those_of_its_subclasses(classes: object) -> None:
    assert ClassPolicy(classes).select(Toy()) == LAYERS  # type: ignore[arg-type]


def test_several_classes_give_nested_units_in_module_order() -> None:
    expected = [name for layer in LAYERS for name in (layer, f"{layer}.attention")]
    assert ClassPolicy([Attention, "Block"]).select(Toy()) == expected


def test_a_subclass_leaves_its_base_alone() -> None:
    assert ClassPolicy(["LastBlock"]).select(Toy()) == ["layers.2"]


def test_a_public_import_path_finds_a_class_that_is_defined_elsewhere() -> None:
    assert nn.Linear.__module__ != "torch.nn"
    assert "head" in ClassPolicy(["torch.nn.Linear"]).select(Toy())


def test_a_base_class_can_be_named_though_no_module_is_exactly_of_it() -> None:
    model = nn.Sequential(LastBlock(), LastBlock())
    assert ClassPolicy(["Block"]).select(model) == ["0", "1"]


def test_a_class_under_parametrizations_is_still_found_by_name() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.ReLU())
    assert ClassPolicy(["Linear"]).select(model) == ["0"]


def test_a_class_that_only_the_root_has_is_matched() -> None:
    assert ClassPolicy([Toy]).select(Toy()) == []


def test_every_class_must_match_and_the_nearest_names_are_told() -> None:
    text = refused(ClassPolicy([Block, "Atention"]))
    assert "'Atention' in Toy, found none" in text
    assert "did you mean 'Attention'?" in text


def test_a_class_object_that_matches_nothing_is_named_with_its_import_path() -> None:
    text = refused(ClassPolicy([nn.Linear, nn.LSTM]))
    assert "'torch.nn.modules.rnn.LSTM' in Toy" in text
    assert "there are 'Attention', 'Block', 'LastBlock', 'Linear'." in text


@pytest.mark.parametrize(
    "name", ["no.such.module.Blok", "torch.nn.Blok", "math.pi", "torch.nn.functional", "Blok"]
)
def test_a_name_that_leads_to_no_module_class_is_refused_with_the_nearest(name: str) -> None:
    assert repr(name) in refused(ClassPolicy([name]))


def test_the_nearest_name_ignores_the_module_and_the_case() -> None:
    assert "did you mean 'LastBlock' or 'Block'?" in refused(ClassPolicy(["my.model.lastblock"]))


def test_a_bare_name_of_two_classes_is_refused_with_both_paths() -> None:
    other = type(
        "Attention", (nn.Module,), {"forward": lambda self, x: x, "__module__": "other.model"}
    )
    text = refused(ClassPolicy(["Attention"]), nn.Sequential(Toy(), other()))
    assert f"{__name__}.Attention" in text
    assert "other.model.Attention" in text
    assert "import path" in text


def test_an_import_path_settles_which_of_two_classes_is_meant() -> None:
    other = type(
        "Attention", (nn.Module,), {"forward": lambda self, x: x, "__module__": "other.model"}
    )
    assert ClassPolicy(["other.model.Attention"]).select(nn.Sequential(Toy(), other())) == ["1"]


def test_a_class_that_was_defined_again_is_told_apart_from_a_missing_one() -> None:
    again = type("Block", (nn.Module,), {"forward": lambda self, x: x})
    text = refused(ClassPolicy([again]))
    assert "another class that is named 'Block'" in text
    assert "as a string" in text


def test_a_class_of_the_model_comes_before_its_base_of_the_same_name() -> None:
    own = type("Linear", (nn.Linear,), {"__module__": "my.model"})
    assert ClassPolicy(["Linear"]).select(nn.Sequential(own(2, 2), nn.ReLU())) == ["0"]


def test_names_come_in_module_order_and_not_in_that_of_the_alphabet() -> None:
    model = nn.Sequential(*(Attention() for _ in range(12)))
    assert ClassPolicy([Attention]).select(model) == [str(index) for index in range(12)]


def test_a_forward_that_the_object_has_itself_counts() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)]))
    model[0].forward = lambda x: x
    assert ClassPolicy([nn.ModuleList]).select(model) == ["0"]


def test_containers_have_no_forward_and_cannot_be_chosen_by_class() -> None:
    text = refused(ClassPolicy([nn.ModuleList]))
    assert "found only 'layers'" in text
    assert "no forward" in text


def test_the_parts_of_attention_are_not_called_and_cannot_be_chosen_by_class() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    assert ClassPolicy([nn.Linear]).select(model) == ["1"]
    assert "'0.out_proj'" in refused(
        ClassPolicy([nn.Linear]), nn.Sequential(nn.MultiheadAttention(4, 2))
    )


@pytest.mark.parametrize("classes", [[], set(), ()])
def test_no_classes_at_all_are_refused(classes: object) -> None:
    with pytest.raises(ConfigurationError, match="auto_wrap_policy=None for one unit"):
        ClassPolicy(classes)  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [int, 3, None, Block.__init__])
def test_what_is_no_module_class_is_refused_when_the_policy_is_made(entry: object) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"found {entry!r}")):
        ClassPolicy([entry])  # type: ignore[list-item]


# --- names ---


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.1"], ["layers.1"]),
        ("layers.*", LAYERS),
        (["layers.[01]"], LAYERS[:2]),
        (["layers.?.mlp"], [f"{layer}.mlp" for layer in LAYERS]),
        (["*.*.attention"], [f"{layer}.attention" for layer in LAYERS]),
        (["head", "layers.0", "layers.0"], ["head", "layers.0"]),
        ({"layers.*", "layers.0.mlp"}, [*LAYERS, "layers.0.mlp"]),
    ],
)
def test_names_and_patterns_are_matched_segment_by_segment(
    names: object, expected: list[str]
) -> None:
    assert sorted(NamePolicy(names).select(Toy())) == sorted(expected)  # type: ignore[arg-type]


def test_case_counts_in_names() -> None:
    assert "did you mean 'head'?" in refused(NamePolicy(["Head"]))


def test_a_name_that_matches_nothing_is_refused_with_the_nearest() -> None:
    text = refused(NamePolicy(["layers.0", "layer.1"]))
    assert "'layer.1' to name a module of Toy" in text
    assert "'layers.1'" in text


def test_a_pattern_does_not_reach_into_deeper_segments() -> None:
    assert "'layers.*.*.*.*'" in refused(NamePolicy(["layers.*.*.*.*"]))


def test_containers_are_refused_by_name_and_their_members_suggested() -> None:
    text = refused(NamePolicy(["layers"]))
    assert "no forward" in text
    assert "'layers.*'" in text
    assert "'layers'" in refused(NamePolicy(["*"]))


def test_the_parts_of_parametrizations_are_refused_by_name() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(4, 4)))
    assert "without a call" in refused(NamePolicy(["0.parametrizations.weight"]), model)


def test_a_module_registered_twice_can_be_named_by_either_name() -> None:
    model = Toy()
    model.again = model.layers[1]
    assert NamePolicy(["again"]).select(model) == ["layers.1"]
    assert NamePolicy(["again", "layers.1"]).select(model) == ["layers.1"]


@pytest.mark.parametrize("names", [[], [""], "", ["head", ""]])
def test_the_root_is_not_named(names: object) -> None:
    with pytest.raises(ConfigurationError, match="always a unit"):
        NamePolicy(names)  # type: ignore[arg-type]


# --- predicates ---


def test_a_predicate_sees_every_module_that_can_be_a_unit_with_its_name() -> None:
    model = Toy()
    seen: dict[str, nn.Module] = {}

    def predicate(name: str, module: nn.Module) -> bool:
        seen[name] = module
        return name.endswith("mlp")

    assert PredicatePolicy(predicate).select(model) == [f"{layer}.mlp" for layer in LAYERS]
    assert seen == {
        name: module for name, module in model.named_modules() if name not in ("", "layers")
    }


def test_a_predicate_that_accepts_nothing_is_refused() -> None:
    def never(name: str, module: nn.Module) -> bool:
        return False

    text = refused(PredicatePolicy(never))
    assert "never" in text
    assert "none of 13" in text
    assert "and 3 more" in text
    assert "no submodules" in refused(PredicatePolicy(never), nn.Linear(2, 2))


def test_an_error_inside_a_predicate_is_the_callers_own() -> None:
    def broken(name: str, module: nn.Module) -> bool:
        raise KeyError(name)

    with pytest.raises(KeyError, match=r"layers\.0"):
        PredicatePolicy(broken).select(Toy())


# --- all of them ---


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (SingleUnitPolicy, "SingleUnitPolicy()"),
        (lambda: SizePolicy(7), "SizePolicy(min_numel=7)"),
        (lambda: NamePolicy({"b", "a"}), "NamePolicy(names=['a', 'b'])"),
    ],
)
def test_a_policy_shows_what_it_was_told(make: Callable[[], Policy], shown: str) -> None:
    assert repr(make()) == shown
