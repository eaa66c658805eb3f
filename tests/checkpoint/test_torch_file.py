"""What is streamed into a zip archive is what torch.load reads, with and without mapping it."""

import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from shardeddp.checkpoint.contents import open_file
from shardeddp.checkpoint.full_write import TorchFile
from shardeddp.checkpoint.read import LazyTensor
from shardeddp.checkpoint.state_codec import plain
from shardeddp.errors import CheckpointError
from shardeddp.plan.layout import Interval


def written(tree: Any, path: Path, **options: Any) -> Any:
    with open(path, "w+b") as file:
        TorchFile(plain(tree), **options).write(file)
    return torch.load(path, weights_only=True, mmap=True)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
]
DTYPES += [torch.float8_e4m3fn, torch.uint16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (3, 0, 2), (2, 1, 5)])
def test_a_tensor_of_any_dtype_and_shape_comes_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.rand(shape) * 5).to(dtype)
    found = written([tensor], tmp_path / "a.pt")[0]
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, tensor.shape, True)
    assert found.flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist()


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    square = torch.arange(12.0).view(3, 4)
    wave = torch.complex(square, square + 1)
    tree = {
        "turned": square.t(),
        "part": square[1:, ::2],
        "conjugated": wave.conj(),
        "imaginary": wave.conj().imag,
    }
    found = written(tree, tmp_path / "a.pt")
    assert all(torch.equal(found[name], value) for name, value in tree.items())
    assert (tmp_path / "a.pt").stat().st_size < 2500


def test_containers_become_those_that_everybody_reads(tmp_path: Path) -> None:
    class Options(dict[str, Any]):
        pass

    tree = {
        "options": Options(a=1),
        "ordered": OrderedDict(b=(1, [2.5, None, "x"])),
        "size": torch.Size([2]),
        3: {4},
    }
    found = written(tree, tmp_path / "a.pt")
    assert found == tree
    assert [type(value) for value in found.values()] == [dict, OrderedDict, torch.Size, set]


def test_elements_are_stored_once_if_they_are_shared(tmp_path: Path) -> None:
    one, two = torch.ones(1000), torch.ones(1000)
    found = written({"a": one, "b": two}, tmp_path / "apart.pt")
    assert found["a"].data_ptr() != found["b"].data_ptr()
    found = written(
        {"a": one, "b": two, "c": torch.zeros(2)},
        tmp_path / "once.pt",
        memory=lambda tensor: "here",
    )
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["c"].tolist() == [0, 0]  # another shape is another memory, whatever it is called


def test_elements_of_lazy_tensors_are_read_in_parts_and_once() -> None:
    asked: list[Interval] = []

    def read(interval: Interval) -> torch.Tensor:
        asked.append(interval)
        return torch.arange(interval.start, interval.stop)

    numel = 5 * 2**20
    file = io.BytesIO()
    TorchFile(LazyTensor(("model", "long"), (5, 2**20), torch.int64, read)).write(file)
    assert [asked[0].start, *(it.stop for it in asked)] == [*(it.start for it in asked), numel]
    assert len(asked) > 1
    assert torch.equal(
        torch.load(io.BytesIO(file.getvalue()), weights_only=True), torch.arange(numel).view(5, -1)
    )


def test_the_archive_is_whole_and_its_elements_are_aligned(tmp_path: Path) -> None:
    written({str(size): torch.ones(size) for size in range(1, 20)}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
        for key in range(19):
            info = archive.getinfo(f"archive/data/{key}")
            name, extra = (
                int.from_bytes(content[info.header_offset + at :][:2], "little") for at in (26, 28)
            )
            assert (info.header_offset + 30 + name + extra) % 64 == 0


def test_equal_trees_make_equal_files() -> None:
    files = [io.BytesIO(), io.BytesIO()]
    for file in files:
        TorchFile({"a": torch.ones(5), "b": [1, torch.zeros(2, 2)]}).write(file)
    assert files[0].getvalue() == files[1].getvalue()


@pytest.mark.parametrize(
    ("value", "reason"),
    [(1 << 3_000, "Unsupported operand"), (Path("data"), "Unsupported global: GLOBAL pathlib")],
)
def test_what_torch_does_not_load_without_pickle_is_refused_with_its_reason(
    tmp_path: Path, value: Any, reason: str
) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"value": value}, path)
    with pytest.raises(CheckpointError, match=f"or is damaged: {reason}"):
        open_file(str(path), None, (0, 1))
