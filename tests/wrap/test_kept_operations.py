"""Operations by name: which ones a name stands for, and what is said about one that is none."""

import pytest
import torch

from shardeddp.errors import ConfigurationError
from shardeddp.wrap.kept_operations import (
    PRESETS,
    check_save_ops,
    find_operations,
    selective_contexts,
)

MM = torch.ops.aten.mm


@pytest.mark.parametrize(
    "name",
    ["aten.mm.default", "aten::mm.default", "mm.default", "torch.ops.aten.mm.default", MM.default],
)
def test_a_name_with_an_overload_is_one_operation(name: object) -> None:
    assert find_operations([name]) == [MM.default]


@pytest.mark.parametrize("name", ["aten.mm", "aten::mm", "mm", "torch.mm", MM])
def test_a_name_without_an_overload_is_all_that_make_a_new_tensor(name: object) -> None:
    assert find_operations([name]) == [MM.default, MM.dtype]


@pytest.mark.parametrize("name", ["tanh", "exp", "aten.sin"])
def test_overloads_for_numbers_are_no_operations(name: str) -> None:
    assert {it.name() for it in find_operations([name])} >= {f"aten::{name.removeprefix('aten.')}"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_all_of_its_operations_once(name: str) -> None:
    operations = find_operations([name, name])
    assert len(operations) == len(set(operations)) >= len(PRESETS[name])


def test_an_operation_of_higher_order_is_found_by_its_name() -> None:
    (operation,) = find_operations(["flex_attention"])
    assert operation is torch.ops.higher_order.flex_attention


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("aten.mn", "did you mean 'aten.min'"),
        ("aten.mm.dfault", "did you mean 'aten.mm.default'"),
        ("flash_attn::fwd", "once their library is imported"),
        ("linear", "taken apart into other operations"),
        (torch.ops.aten.matmul.default, "'matmul' stands for"),
        (3, "found 3 of type int"),
        (torch.mm, "of type builtin_function_or_method"),
    ],
)
def test_what_is_no_operation_is_refused(entry: object, said: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        find_operations([entry])
    assert said in str(refusal.value)


def test_an_operation_of_another_library_is_looked_for_later() -> None:
    check_save_ops(["some_library::attend", "mm"])
    with pytest.raises(ConfigurationError, match="not registered"):
        selective_contexts(["some_library::attend", "mm"])


def policy(*args: object, **kwargs: object) -> bool:
    return False


def test_a_policy_function_may_be_an_import_path() -> None:
    contexts = selective_contexts("os.path.join")
    assert contexts is not None
    assert selective_contexts(policy) is not None


@pytest.mark.parametrize("nothing", [(), [], None])
def test_nothing_is_not_selective(nothing: object) -> None:
    assert selective_contexts(nothing) is None
