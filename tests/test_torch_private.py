"""Private names of torch are looked for, with the parameters that they have to have."""

import textwrap

import pytest

from shardeddp.errors import ConfigurationError
from shardeddp.torch_private import PatchPoint, of_torch

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    "path", ["torch:_nothing", "torch._C:_autograd._nothing", "torch:Tensor._nothing"]
)
def test_a_name_that_torch_has_not_is_an_error_with_the_range_of_releases(path: str) -> None:
    place = path.replace(":", r"\.")
    with pytest.raises(
        ConfigurationError,
        match=rf"torch 2\S+ has changed {place}: expected to be there.*torch >=2\.11",
    ):
        of_torch(path)


def test_a_function_with_other_parameters_is_an_error_with_both() -> None:
    with pytest.raises(
        ConfigurationError, match=r"get_default_store: expected \(group\), found \(\)"
    ):
        of_torch("torch.distributed.distributed_c10d:_get_default_store", "group")


def test_a_replaceable_function_is_called_through_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = PatchPoint("textwrap:dedent", "text")
    monkeypatch.setattr(textwrap, "dedent", textwrap.dedent)
    found.replace(str.upper)
    assert textwrap.dedent(" a") == " A" and found.current is str.upper
