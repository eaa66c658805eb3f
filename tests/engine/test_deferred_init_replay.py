"""Deferred draws begin where the eager ones would have begun, and leave the generator where those would have."""

from collections.abc import Iterator

import pytest
import torch

from shardeddp.engine.deferred_init import ConstructionRecord, origin_of, replay


@pytest.fixture(autouse=True)
def _generator() -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(3)
    yield
    torch.set_rng_state(before)


def drawn(*origins: ConstructionRecord) -> list[float]:
    """One number from each origin."""
    numbers: list[float] = []
    replay(origins, lambda index: numbers.append(torch.rand(()).item()))
    return numbers


def now() -> ConstructionRecord:
    return ConstructionRecord(state=torch.get_rng_state())


def stream(count: int, seed: int = 3) -> list[float]:
    """The first numbers behind a seed."""
    torch.manual_seed(seed)
    return [torch.rand(()).item() for _ in range(count)]


def test_without_an_origin_the_generator_is_used_as_it_is() -> None:
    numbers = [*drawn(), torch.rand(()).item()]
    assert numbers == stream(2)


def test_a_generator_that_has_not_moved_continues_behind_the_draws() -> None:
    numbers = [*drawn(now()), torch.rand(()).item()]
    assert numbers == stream(2)


def test_one_that_has_moved_stays_where_it_is() -> None:
    origin = now()
    torch.rand(())
    numbers = [*drawn(origin), torch.rand(()).item()]
    assert numbers == stream(2)  # the number between was drawn from the same place


def test_one_that_was_seeded_anew_stays_where_it_is() -> None:
    origin = ConstructionRecord(state=torch.get_rng_state(), reseeded=True)
    numbers = [*drawn(origin), torch.rand(()).item()]
    assert numbers == stream(1) * 2


def test_origins_at_one_place_draw_one_after_the_other() -> None:
    numbers = [*drawn(now(), now()), torch.rand(()).item()]
    assert numbers == stream(3)


def test_origins_at_two_places_draw_from_either() -> None:
    first = now()
    torch.manual_seed(4)
    numbers = [*drawn(first, now()), torch.rand(()).item()]
    assert numbers == stream(1) + stream(2, seed=4)


def test_a_tensor_belongs_to_the_last_origin_that_did_not_find_it() -> None:
    first, second, third = (torch.zeros(1) for _ in range(3))
    origins = [now(), ConstructionRecord(state=torch.get_rng_state(), earlier=[first, third])]
    assert [origin_of(tensor, origins) for tensor in (first, second, third)] == [0, 1, 0]
    assert origin_of(first, origins[1:]) == 0
    assert origin_of(first, ()) == 0
