"""Data files: what is appended comes back from ``torch.load`` bit by bit, and every byte is under a checksum."""

import errno
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from shardeddp.checkpoint.items import ALIGNMENT, DataFile, frame_of
from shardeddp.checkpoint.manifest import BLOCK_NBYTES, PIECE, Item

pytestmark = pytest.mark.timeout(60)

NAME = "__0_0.distcp"
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]
SHAPES = [(), (0,), (3, 0, 2), (5,), (1, 1, 7, 1), (2, 3, 4)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / NAME


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    yield descriptor
    os.close(descriptor)


def random_tensor(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Every bit pattern may occur, NaNs with payloads too."""
    limit = 2 if dtype == torch.bool else 256
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, limit, (nbytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    assert not found.requires_grad
    assert raw(found) == raw(expected)


def bytes_of(fd: int, item: Item) -> bytes:
    return os.pread(fd, item.nbytes, item.offset)


def load(fd: int, item: Item) -> Any:
    return torch.load(io.BytesIO(bytes_of(fd, item)), weights_only=True)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_and_shape_comes_back(
    fd: int, tmp_path: Path, dtype: torch.dtype, crc: bool
) -> None:
    file = DataFile(fd, NAME, crc=crc)
    tensors = [random_tensor(dtype, shape) for shape in SHAPES]
    stored = [file.put_tensor(tensor) for tensor in tensors]
    for tensor, (item, payload, _) in zip(tensors, stored, strict=True):
        assert_same(load(fd, item), tensor)
        assert os.pread(fd, tensor.nbytes, payload) == raw(tensor)
        alone = tmp_path / "alone.pt"
        alone.write_bytes(bytes_of(fd, item))
        assert_same(torch.load(alone, weights_only=True, mmap=True), tensor)
        assert payload % ALIGNMENT == item.offset % ALIGNMENT == 0


def test_payload_and_framing_are_under_checksums_that_cover_the_file(fd: int, path: Path) -> None:
    file = DataFile(fd, NAME)
    big = torch.randn(5 * BLOCK_NBYTES // 8)  # two and a half blocks
    whole = torch.randn(BLOCK_NBYTES // 4)
    puts = [
        (tensor, file.put_tensor(tensor)) for tensor in (big, torch.randn(3), whole, torch.empty(0))
    ]
    file.put_object({"lr": 0.1})
    digests = [digest for _, (_, _, checksums) in puts for digest in checksums]
    stored = file.close([(0, 0, 1, 2, 3, 4)] * 2, digests)
    content, table = path.read_bytes(), path.read_bytes()[-2 * PIECE.itemsize - 5 * 16 :]
    assert table[-5 * 16 :] == b"".join(digests)
    assert np.frombuffer(table, PIECE, 2).tolist() == [(0, 0, 1, 2, 3, 4)] * 2
    assert (stored.pieces, stored.blocks, stored.table_nbytes) == (2, 5, len(table))
    assert stored.table == xxhash.xxh3_128_hexdigest(table)
    framing, end = xxhash.xxh3_128(), 0
    for tensor, (_, payload, checksums) in puts:
        blocks = [
            content[payload + at : payload + tensor.nbytes][:BLOCK_NBYTES]
            for at in range(0, tensor.nbytes, BLOCK_NBYTES)
        ]
        assert checksums == [xxhash.xxh3_128_digest(block) for block in blocks]
        framing.update(content[end:payload])
        end = payload + tensor.nbytes
    framing.update(content[end : -len(table)])
    assert [len(checksums) for _, (_, _, checksums) in puts] == [3, 1, 1, 0]
    assert (stored.nbytes, stored.checksum) == (len(content), framing.hexdigest())


def test_other_tools_find_the_crc_of_every_record(fd: int) -> None:
    file = DataFile(fd, NAME)
    item, payload, _ = file.put_tensor(torch.randn(3 * BLOCK_NBYTES // 4))
    assert zipfile.ZipFile(io.BytesIO(bytes_of(fd, item))).testzip() is None
    os.pwrite(fd, b"\xff\xff\xff\xff", payload + 2 * BLOCK_NBYTES)
    assert zipfile.ZipFile(io.BytesIO(bytes_of(fd, item))).testzip() == "archive/data/0"


def test_without_crc_the_fields_are_zero_as_torch_leaves_them(fd: int) -> None:
    item, _, _ = DataFile(fd, NAME, crc=False).put_tensor(torch.randn(3))
    records = zipfile.ZipFile(io.BytesIO(bytes_of(fd, item))).infolist()
    assert {record.CRC for record in records} == {0}


def test_equal_tensors_make_equal_items(fd: int) -> None:
    file = DataFile(fd, NAME)
    tensor = torch.randn(3)
    first, second = (
        bytes_of(fd, file.put_tensor(each)[0])
        for each in (tensor, torch.nn.Parameter(tensor.clone()))
    )
    assert first == second


def test_a_view_is_stored_without_the_rest_of_its_memory(fd: int) -> None:
    flat = torch.randn(100_000)
    item, _, _ = DataFile(fd, NAME).put_tensor(flat[7:13].view(2, 3))
    assert_same(load(fd, item), flat[7:13].view(2, 3).clone())
    assert item.nbytes < 1000


def test_an_object_comes_back_between_tensors(fd: int) -> None:
    file = DataFile(fd, NAME)
    value = [{"lr": 0.1, "betas": (0.9, 0.999), "params": ["weight"]}]
    first, _, _ = file.put_tensor(torch.ones(3))
    item = file.put_object(value)
    last, _, _ = file.put_tensor(torch.zeros(3))
    assert load(fd, item) == value
    assert torch.equal(load(fd, first) + load(fd, last), torch.ones(3))
    assert first.offset + first.nbytes <= item.offset < item.offset + item.nbytes <= last.offset


def test_a_payload_beyond_4_gib_is_framed_in_zip64(fd: int, path: Path) -> None:
    shape = (2**30 + 5,)
    frame = frame_of(torch.float32, shape, crc=False)
    nbytes = 4 * shape[0]
    os.pwrite(fd, frame.head, 0)  # the payload is a hole in the file
    os.pwrite(fd, b"\0\0\x80\x3f", len(frame.head) + nbytes - 4)
    os.pwrite(fd, frame.tail(0x12345678), len(frame.head) + nbytes)
    tensor = torch.load(path, weights_only=True, mmap=True)
    assert tensor.shape == shape
    assert tensor[-1].item() == 1
    record = zipfile.ZipFile(path).getinfo("archive/data/0")
    assert (record.file_size, record.compress_size, record.CRC) == (nbytes, nbytes, 0x12345678)


@pytest.mark.parametrize("at", [-1, 0])
def test_the_largest_payload_without_zip64_and_the_smallest_with_it_can_be_read(
    fd: int, path: Path, at: int
) -> None:
    nbytes = 0xFFFFFFFF + at
    frame = frame_of(torch.uint8, (nbytes,), crc=False)
    os.pwrite(fd, frame.head, 0)
    os.pwrite(fd, frame.tail(0), len(frame.head) + nbytes)
    assert torch.load(path, weights_only=True, mmap=True).nbytes == nbytes
    record = zipfile.ZipFile(path).getinfo("archive/data/0")
    assert record.file_size == nbytes
    wide = at == 0  # 2**32 - 1 itself says that the size stands elsewhere
    assert bool(record.extra) == wide
    assert frame.tail(0)[8:].startswith(nbytes.to_bytes(8 if wide else 4, "little") * 2)


def test_short_writes_are_continued(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([1, 3, 400, 77] * 100_000)

    def write_less(descriptor: int, buffers: Sequence[memoryview]) -> int:
        return os.write(descriptor, b"".join(buffers)[: next(counts)])

    monkeypatch.setattr(os, "writev", write_less)
    file = DataFile(fd, NAME)
    tensor = torch.randn(777)
    item, payload, _ = file.put_tensor(tensor)
    value = file.put_object("text")
    assert_same(load(fd, item), tensor)
    assert load(fd, value) == "text"
    assert os.pread(fd, tensor.nbytes, payload) == raw(tensor)
    assert file.close().nbytes == os.fstat(fd).st_size


def test_a_write_that_makes_no_progress_is_an_error(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda *_: 0)
    with pytest.raises(OSError, match="nothing was written"):
        DataFile(fd, NAME).put_tensor(torch.ones(1))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        file = DataFile(full, NAME)
        with pytest.raises(OSError, match=NAME) as caught:
            file.put_tensor(torch.ones(3))
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(full)


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3).t(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.complex64).conj().imag.neg()._neg_view(),
        torch.ones(3, device="meta"),
        torch.ones(3).as_subclass(Labelled),
    ],
    ids=["strided", "conjugated", "negated", "meta", "subclass"],
)
def test_a_tensor_whose_memory_is_not_its_value_is_refused(fd: int, tensor: torch.Tensor) -> None:
    file = DataFile(fd, NAME)
    with pytest.raises(ValueError, match="expected a contiguous tensor on the CPU"):
        file.put_tensor(tensor)
    assert file.close().nbytes == os.fstat(fd).st_size == 0
