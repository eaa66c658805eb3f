"""Ranks that decide together: bytes are exchanged, failures of one become failures of all, differences are named."""

import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardeddp.comm import (
    agree_on_any,
    agree_on_layout,
    all_gather_bytes,
    gather_to_first,
    run_on_all_ranks,
)
from shardeddp.comm.host_group import HostGroup
from shardeddp.errors import CheckpointError, ConfigurationError, LayoutMismatchError, RankError
from support.host_groups import all_ranks
from world import Worlds, on_ranks

pytestmark = pytest.mark.timeout(60)


# -- exchange


def send(payloads: Sequence[bytes]) -> list[bytes]:
    return all_gather_bytes(payloads[dist.get_rank()], all_ranks())


@pytest.mark.parametrize(
    "payloads",
    [
        (b"a", b"bb", b"ccc"),
        (b"", b"", b""),
        (b"", b"long" * 300_000, b"\x00"),
        (bytes(range(256)), b"\x00\x00", b"\xff"),
    ],
    ids=["different lengths", "empty", "long and empty", "all bytes"],
)
def test_every_rank_gets_the_bytes_of_every_rank(
    world: Worlds, payloads: tuple[bytes, ...]
) -> None:
    for size in (1, 2, 3):
        assert world(size).run(send, payloads[:size]) == [list(payloads[:size])] * size


@on_ranks(2)
def test_messages_are_on_the_host_whatever_device_is_the_default() -> None:
    with torch.device("meta"):
        assert all_gather_bytes(b"text", all_ranks()) == [b"text"] * 2
        assert agree_on_any([dist.get_rank() == 1, False], all_ranks()) == [True, False]
        agree_on_layout(["one line"], all_ranks())
        assert gather_to_first("sending", lambda: b"x", all_ranks()) in ([b"x"] * 2, [])


def send_to_first(payloads: Sequence[bytes]) -> list[bytes]:
    return [*map(bytes, gather_to_first("sending", lambda: payloads[dist.get_rank()], all_ranks()))]


@pytest.mark.parametrize(
    "payloads",
    [
        (b"a", b"bb", b"ccc"),
        (b"", b"", b""),
        (b"much longer" * 100_000, b"", b"\x00"),
        (b"", b"long" * 300_000, b"\x00"),
        (b"alone", b"", b""),
    ],
    ids=["different lengths", "empty", "a long first", "long and empty", "the first alone"],
)
def test_the_first_rank_gets_the_bytes_of_every_rank(
    world: Worlds, payloads: tuple[bytes, ...]
) -> None:
    for size in (1, 2, 3):
        first, *others = world(size).run(send_to_first, payloads[:size])
        assert first == list(payloads[:size])
        assert others == [[]] * (size - 1)


def fail_at(rank: int) -> bytes:
    if dist.get_rank() == rank:
        raise CheckpointError(f"rank {rank} has no disk")
    return b"x" * 1000


@on_ranks(3)
def test_what_fails_on_one_rank_fails_on_all_though_only_the_first_gets_results() -> None:
    for rank in range(3):
        with pytest.raises(CheckpointError, match=rf"no disk \(found on rank {rank}\)"):
            gather_to_first("writing", partial(fail_at, rank), all_ranks())
    assert bool(gather_to_first("writing", partial(fail_at, 9), all_ranks())) == (
        dist.get_rank() == 0
    )


def fail_differently() -> bytes:
    if dist.get_rank():
        raise CheckpointError(f"rank {dist.get_rank()} has no disk")
    return b""


@on_ranks(3)
def test_each_error_about_a_checkpoint_stands_with_its_ranks() -> None:
    with pytest.raises(CheckpointError) as caught:
        gather_to_first("writing", fail_differently, all_ranks())
    text = "rank 1 has no disk (found on rank 1)\nrank 2 has no disk (found on rank 2)"
    assert str(caught.value) == text


# -- together


@on_ranks(3)
def test_a_step_that_succeeds_gives_each_rank_its_own_result() -> None:
    assert run_on_all_ranks("counting", lambda: [dist.get_rank()], all_ranks()) == [dist.get_rank()]
    assert run_on_all_ranks("nothing", lambda: None, all_ranks()) is None


def fail(*ranks: int) -> None:
    if dist.get_rank() in ranks:
        raise LookupError(f"no such layer on rank {dist.get_rank()}")


@on_ranks(3)
def test_the_failure_of_one_rank_is_raised_on_every_rank_with_its_traceback() -> None:
    with pytest.raises(RankError) as caught:
        run_on_all_ranks("cutting parameters", lambda: fail(1), all_ranks())
    error = caught.value
    assert str(error).startswith("cutting parameters failed on rank 1; every rank stops here.")
    assert error.step == "cutting parameters" and [*error.failures] == [1]
    assert "in fail" in str(error) and "LookupError: no such layer on rank 1" in str(error)
    if dist.get_rank() == 1:
        assert isinstance(error.__cause__, LookupError)
    else:
        assert error.__cause__ is None
    assert run_on_all_ranks("going on", lambda: 1, all_ranks()) == 1


@on_ranks(3)
def test_several_failures_are_listed_by_rank() -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 0, 2;.*--- rank 0 ---.*on rank 0.*--- rank 2 ---.*on rank 2"
    ):
        run_on_all_ranks("cutting", lambda: fail(2, 0), all_ranks())


def misconfigure(*ranks: int) -> None:
    if dist.get_rank() in ranks:
        raise ConfigurationError("expected another model")


@on_ranks(2)
def test_a_configuration_that_every_rank_refuses_needs_no_traceback_of_each() -> None:
    with pytest.raises(ConfigurationError, match=r"^expected another model$"):
        run_on_all_ranks("cutting", lambda: misconfigure(0, 1), all_ranks())
    with pytest.raises(RankError, match="ConfigurationError: expected another model"):
        run_on_all_ranks("cutting", lambda: misconfigure(1), all_ranks())


def fail_with(text: str) -> None:
    if dist.get_rank() == 0:
        raise ValueError(text)


@on_ranks(2)
def test_a_failure_whose_text_is_empty_long_or_not_ascii_arrives() -> None:
    for text in ("", "x" * 200_000, "Gr\u00f6\u00dfe \U0001f642"):
        with pytest.raises(RankError) as caught:
            run_on_all_ranks("cutting", lambda text=text: fail_with(text), all_ranks())
        assert f"ValueError: {text}".strip().rstrip(":") in str(caught.value)


@on_ranks(2)
def test_an_interrupt_is_not_held_back() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_on_all_ranks("cutting", interrupt, all_ranks())


def test_the_error_of_other_ranks_is_a_runtime_error() -> None:
    assert issubclass(RankError, RuntimeError) and issubclass(LayoutMismatchError, ValueError)


def test_a_rank_error_survives_pickling() -> None:
    error = RankError("cutting", {1: "Traceback"})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.step, again.failures) == (str(error), error.step, error.failures)


# -- agree_on_layout


def compare(everyones: Sequence[Sequence[str]]) -> str:
    try:
        agree_on_layout(everyones[dist.get_rank()], all_ranks())
    except LayoutMismatchError as error:
        return str(error)
    return ""


def test_equal_layouts_are_agreed_on(world: Worlds) -> None:
    for lines in (["options", "weight (3, 5)"], []):
        for size in (1, 3):
            assert world(size).run(compare, [lines] * size) == [""] * size


@pytest.mark.parametrize(
    ("everyones", "expected"),
    [
        (
            (["o", "a", "b"], ["o", "x", "y"]),
            "rank 0 has 'a' where rank 1 has 'x' (ranks that differ from",
        ),
        (
            (["o"], ["o"], ["p"]),
            "rank 0 has 'o' where rank 2 has 'p' (ranks that differ from rank 0: [2])",
        ),
        (
            (["o"], ["p"], ["q"]),
            "rank 0 has 'o' where rank 1 has 'p' (ranks that differ from rank 0: [1, 2])",
        ),
        ((["o", "a"], ["o"]), "rank 0 has 'a' where rank 1 has 'nothing more'"),
        ((["o"], ["o", "a"]), "rank 0 has 'nothing more' where rank 1 has 'a'"),
        (([], ["a"]), "rank 0 has 'nothing more' where rank 1 has 'a'"),
        ((["a, b"], ["a", "b"]), "rank 0 has 'a, b' where rank 1 has 'a'"),
    ],
    ids=["values", "third rank", "all differ", "shorter", "longer", "empty", "not by their text"],
)
def test_the_first_difference_is_named_on_every_rank(
    world: Worlds, everyones: tuple[list[str], ...], expected: str
) -> None:
    found = world(len(everyones)).run(compare, everyones)
    assert found == [found[0]] * len(everyones)
    assert expected in found[0]
    assert "Build the same model with the same options on every rank" in found[0]


# -- agree_on_any


def any_of(everyones: Sequence[Sequence[bool]]) -> list[bool]:
    return agree_on_any(everyones[dist.get_rank()], all_ranks())


def test_a_flag_is_set_where_any_rank_has_it(world: Worlds) -> None:
    everyones = [
        [True, False, False, False],
        [False, False, True, False],
        [True, False, False, False],
    ]
    assert world(3).run(any_of, everyones) == [[True, False, True, False]] * 3
    assert world(1).run(any_of, everyones) == [everyones[0]]
    assert world(2).run(any_of, [[], []]) == [[], []]


def bytes_of_collectives(lines: Sequence[str]) -> int:
    """What a rank gives to collectives to compare a layout with the others."""
    given = 0

    send = HostGroup.hop

    def counting(group: HostGroup, axis: Any, sent: Any, *rest: Any) -> None:
        nonlocal given
        given += sent.nbytes
        send(group, axis, sent, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostGroup, "hop", counting)
        agree_on_layout(lines, all_ranks())
    return given


def test_ranks_that_agree_on_a_layout_send_its_checksum_and_not_its_text(world: Worlds) -> None:
    lines = [f"parameter {number} of shape (4096, 4096)" for number in range(10_000)]
    assert max(world(3).run(bytes_of_collectives, lines)) <= 1024
