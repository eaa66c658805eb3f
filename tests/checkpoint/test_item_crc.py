"""CRCs of an item: damage is found wherever a CRC covers it, and a hostile archive is refused before it costs much."""

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardeddp.checkpoint.items import DataFile, check_item_crc
from shardeddp.checkpoint.manifest import Item
from shardeddp.errors import CheckpointError

pytestmark = pytest.mark.timeout(60)

NAME = "__3_0.distcp"
BEFORE = b"what another item has here"


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture
def check(tmp_path: Path) -> Callable[[bytes], bool]:
    """Checks bytes as an item in the middle of a file."""

    def run(content: bytes) -> bool:
        path = tmp_path / NAME
        path.write_bytes(BEFORE + content + BEFORE)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return check_item_crc(
                descriptor, Item(file=NAME, offset=len(BEFORE), nbytes=len(content))
            )
        finally:
            os.close(descriptor)

    return run


def archive(*records: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytearray:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in records:
            file.writestr(name, data)
    return bytearray(buffer.getvalue())


@pytest.mark.parametrize(
    "value", [torch.randn(700_000), {"a": torch.ones(3), "b": [1, "text"]}, torch.empty(0), None]
)
def test_what_torch_saves_is_good(check: Callable[[bytes], bool], value: object) -> None:
    assert check(saved(value))


@pytest.mark.parametrize("crc", [True, False])
def test_what_a_data_file_holds_is_good_and_without_crcs_it_is_unchecked(
    tmp_path: Path, crc: bool
) -> None:
    descriptor = os.open(tmp_path / NAME, os.O_RDWR | os.O_CREAT)
    try:
        file = DataFile(descriptor, NAME, crc=crc)
        items = [file.put_tensor(torch.randn(shape))[0] for shape in [(), (0,), (7, 3), (3, 2**20)]]
        assert [check_item_crc(descriptor, item) for item in items] == [crc] * 4
        assert check_item_crc(descriptor, file.put_object({"lr": 0.1}))
    finally:
        os.close(descriptor)


def test_every_flipped_bit_of_a_record_is_found(check: Callable[[bytes], bool]) -> None:
    content = bytearray(saved(torch.randn(3)))
    records = zipfile.ZipFile(io.BytesIO(content)).infolist()
    tried = 0
    for record in records:
        name_nbytes, extra_nbytes = struct.unpack_from("<HH", content, record.header_offset + 26)
        start = record.header_offset + 30 + name_nbytes + extra_nbytes
        for at in range(start, start + record.file_size):
            content[at] ^= 1 << at % 8
            with pytest.raises(
                CheckpointError, match=rf"(?s){NAME} is damaged .*{record.filename}.* has CRC"
            ):
                check(bytes(content))
            content[at] ^= 1 << at % 8
            tried += 1
    assert tried > 100
    assert check(bytes(content))


def test_any_damage_ends_in_a_checkpoint_error_or_leaves_the_records_alone(
    check: Callable[[bytes], bool], tmp_path: Path
) -> None:
    descriptor = os.open(tmp_path / "whole", os.O_RDWR | os.O_CREAT)
    DataFile(descriptor, NAME).put_tensor(torch.arange(6.0))
    os.close(descriptor)
    whole = (tmp_path / "whole").read_bytes()
    accepted = 0
    for at in range(len(whole)):
        for damaged in (
            whole[:at],
            whole[:at] + b"\xff" + whole[at + 1 :],
            whole[:at] + bytes(len(whole) - at),
        ):
            try:
                check(damaged)
            except CheckpointError:
                continue
            accepted += damaged != whole
            assert contents(damaged) == contents(whole), f"damage from byte {at} on was accepted"
    assert 0 < accepted < 300, (
        "of padding, times, attributes and second copies of what the directory says"
    )


def contents(archive: bytes) -> list[bytes]:
    file = zipfile.ZipFile(io.BytesIO(archive))
    found: list[bytes] = []
    for record in file.infolist():
        name_nbytes, extra_nbytes = struct.unpack_from("<HH", archive, record.header_offset + 26)
        start = record.header_offset + 30 + name_nbytes + extra_nbytes
        found.append(archive[start : start + record.file_size])
    return found


def test_a_file_that_ends_inside_an_item_is_refused(tmp_path: Path) -> None:
    path, content = tmp_path / NAME, saved(torch.randn(3))
    path.write_bytes(content[:-200])
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(CheckpointError, match="the file ends after"):
            check_item_crc(descriptor, Item(file=NAME, offset=0, nbytes=len(content)))
    finally:
        os.close(descriptor)


def test_a_compressed_record_is_refused(check: Callable[[bytes], bool]) -> None:
    bomb = archive(("archive/data/0", bytes(2**24)), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is compressed"):
        check(bytes(bomb))


@pytest.mark.parametrize(("field", "value"), [(10, 8), (24, 2**30)], ids=["method", "size"])
def test_a_record_that_would_be_unpacked_is_refused(
    check: Callable[[bytes], bool], field: int, value: int
) -> None:
    content = archive(("archive/data/0", bytes(100)))
    struct.pack_into(
        "<H" if value < 2**16 else "<I", content, content.rindex(b"PK\1\2") + field, value
    )
    with pytest.raises(CheckpointError, match="is compressed"):
        check(bytes(content))


def test_bytes_behind_the_archive_are_refused(check: Callable[[bytes], bool]) -> None:
    with pytest.raises(CheckpointError, match="does not end as"):
        check(saved(1) + b"more")


def test_a_record_that_reaches_out_of_the_item_is_refused(check: Callable[[bytes], bool]) -> None:
    content = archive(("archive/data/0", bytes(100)))
    directory = content.rindex(b"PK\1\2")
    struct.pack_into("<II", content, directory + 20, 2**31, 2**31)
    with pytest.raises(CheckpointError, match="is not where the directory says"):
        check(bytes(content))


def test_records_that_share_bytes_are_refused(check: Callable[[bytes], bool]) -> None:
    content = archive(*((f"archive/data/{index}", bytes(4000)) for index in range(3)))
    start = content.index(b"PK\1\2")
    for _ in range(
        3
    ):  # every entry of the directory shows the first record, which now holds all of them
        entry = content.index(b"PK\1\2", start)
        struct.pack_into("<II", content, entry + 20, 12_000, 12_000)
        struct.pack_into("<I", content, entry + 42, 0)
        content[entry + 46 : entry + 60] = b"archive/data/0"
        start = entry + 4
    with pytest.raises(CheckpointError, match="records claim more than"):
        check(bytes(content))


def test_a_record_that_starts_inside_of_another_is_refused(
    check: Callable[[bytes], bool],
) -> None:
    content = archive(("archive/data/0", bytes(100)), ("archive/data/1", bytes(100)))
    struct.pack_into("<II", content, content.index(b"PK\1\2") + 20, 200, 200)
    with pytest.raises(CheckpointError, match="'archive/data/1' starts inside of 'archive/data/0'"):
        check(bytes(content))


def test_two_records_of_one_name_are_refused(check: Callable[[bytes], bool]) -> None:
    content = archive(("archive/data/0", b"checked"), ("archive/data/1", b"read"))
    with pytest.raises(CheckpointError, match="have the same name"):
        check(bytes(content.replace(b"archive/data/1", b"archive/data/0")))


@pytest.mark.parametrize("flag", [1, 1 << 5, 1 << 6, 1 << 13])
def test_an_encrypted_record_is_refused(check: Callable[[bytes], bool], flag: int) -> None:
    content = archive(("archive/data/0", bytes(100)))
    struct.pack_into("<H", content, content.rindex(b"PK\1\2") + 8, flag)
    with pytest.raises(CheckpointError, match="encrypted"):
        check(bytes(content))


def test_a_record_that_calls_itself_compressed_is_refused(check: Callable[[bytes], bool]) -> None:
    content = archive(("archive/data/0", bytes(100)))
    struct.pack_into("<H", content, 8, zipfile.ZIP_DEFLATED)  # its own header, not the directory
    with pytest.raises(CheckpointError, match="compressed"):
        check(bytes(content))


def test_bytes_in_front_of_the_archive_are_refused(check: Callable[[bytes], bool]) -> None:
    with pytest.raises(CheckpointError, match="does not start with a record"):
        check(saved(1) + saved(2))


def test_a_directory_of_anything_but_entries_is_refused(check: Callable[[bytes], bool]) -> None:
    content = archive(("archive/data/0", bytes(20_001_000)))
    struct.pack_into("<I", content, content.rindex(b"PK\5\6") + 12, 20_000_500)
    with pytest.raises(CheckpointError, match="a directory of"):
        check(bytes(content))


def test_bytes_that_are_no_archive_are_refused(check: Callable[[bytes], bool]) -> None:
    with pytest.raises(CheckpointError, match="no zip archive"):
        check(os.urandom(5000))


def test_a_record_outside_of_the_folder_that_torch_reads_is_refused(
    check: Callable[[bytes], bool],
) -> None:
    names = ("archive/data.pkl", "arghive/data/0")
    with pytest.raises(CheckpointError, match="'arghive/data/0' is not in the folder 'archive'"):
        check(bytes(archive(*((name, b"1") for name in names))))
    with pytest.raises(CheckpointError, match=r"no record 'archive/data\.pkl'"):
        check(bytes(archive(("archive/data/0", b"1"))))


def test_a_changed_byte_around_the_records_is_refused_or_torch_does_not_mind(
    check: Callable[[bytes], bool],
) -> None:
    content = saved([torch.ones(2), torch.zeros(3)])
    refused = 0
    for at in range(content.index(b"PK\1\2"), len(content), 3):
        damaged = bytearray(content)
        damaged[at] ^= 0x20
        try:
            check(bytes(damaged))
        except CheckpointError:
            refused += 1
            continue
        found = torch.load(io.BytesIO(damaged), weights_only=True)
        assert torch.equal(torch.cat(found), torch.tensor([1.0, 1, 0, 0, 0])), f"byte {at}"
    assert refused > 100
