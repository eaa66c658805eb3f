"""What ranks have written to parameters, in brief."""

import pytest
import torch

from shardeddp.comm.consistency import WriteDigest, checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int64]


def values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.randn(numel, generator=torch.Generator().manual_seed(numel)).gt(0).to(dtype)
        if dtype is torch.bool
        else (torch.arange(1, numel + 1).to(dtype))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 1023, 5000])
def test_a_checksum_depends_on_every_element(numel: int, dtype: torch.dtype) -> None:
    tensor = values(numel, dtype)
    for index in {0, numel // 2, numel - 1}:
        other = tensor.clone()
        other[index] = ~other[index] if dtype is torch.bool else other[index] + 64
        assert checksum(other) != checksum(tensor)
    assert checksum(tensor.clone()) == checksum(tensor)


@pytest.mark.parametrize("shift", [1, 1024, 2048])
def test_it_depends_on_where_elements_are(shift: int) -> None:
    mask = torch.zeros(8192)
    mask[:100] = 1
    assert checksum(mask.roll(shift)) != checksum(mask)
    assert checksum(mask.view(64, 128).t()) != checksum(mask.view(64, 128))
    permuted = torch.eye(64)
    assert checksum(permuted.roll(shift % 64 or 1, 0)) != checksum(permuted)
    long = torch.zeros(2**20)
    long[0] = 1
    assert checksum(long.roll(2**19)) != checksum(long)


def test_it_takes_views_that_begin_anywhere_and_tensors_without_elements() -> None:
    tensor = torch.randn(4099)
    assert checksum(tensor[1:]) == checksum(tensor[1:].clone())
    assert checksum(tensor[:0]) == checksum(torch.empty(0))
    assert checksum(tensor[0]) == checksum(tensor[:1])


def test_writes_are_told_apart_by_parameter_operation_values_and_order() -> None:
    one, other = torch.ones(3), torch.zeros(3)
    histories = [
        [("a", "mul_", one)],
        [("b", "mul_", one)],
        [("a", "add_", one)],
        [("a", "mul_", other)],
        [("a", "mul_", None)],
        [("a", "mul_", one), ("a", "mul_", one)],
        [("a", "mul_", one), ("a", "mul_", other)],
        [("a", "mul_", other), ("a", "mul_", one)],
    ]
    found = []
    for history in histories * 2:
        written = WriteDigest()
        for write in history:
            written.note(*write)
        found.append(written.take())
        assert written.take() == {}
    assert found[: len(histories)] == found[len(histories) :]
    assert len({str(each) for each in found}) == len(histories)


def test_options_are_taken_where_they_have_changed() -> None:
    written = WriteDigest()
    group = {"lr": 0.1, "betas": (0.9, 0.99), "params": [], "foreach": None, "maximize": False}
    written.note_options("AdamW", [group, group])
    assert written.take_changed_options() == {
        f"{option} of AdamW's group {index}": repr(group[option])
        for index in range(2)
        for option in ("lr", "maximize")
    }
    written.note_options("AdamW", [group, group])
    assert written.take_changed_options() == {}
    written.note_options("AdamW", [group, {**group, "lr": 0.2}])
    assert written.take_changed_options() == {"lr of AdamW's group 1": "0.2"}
    assert written.end_options()["lr of AdamW's group 0"] == "0.1"
    written.note_options("AdamW", [{"lr": 0.3}])
    assert written.take_changed_options() == {}
