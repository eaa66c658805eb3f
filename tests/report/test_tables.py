"""The table of units: figures that people can read, equal units in one row, and the unit that is too large."""

import io
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardeddp.report import (
    SMALL_MODEL_NUMEL,
    UnitRow,
    human_bytes,
    human_count,
    oversized,
    terminal_width,
    unit_table,
)

pytestmark = pytest.mark.timeout(30)


def row(
    name: str, numel: int, *, trainable: int | None = None, padding: int = 0, tensors: int = 2
) -> UnitRow:
    """A unit of fp32 parameters on two ranks."""
    return UnitRow(
        name=name,
        num_parameters=tensors,
        numel=numel,
        trainable_numel=numel if trainable is None else trainable,
        nbytes_per_rank=2 * (numel + padding),
        padding_numel=padding,
    )


def layers(count: int, numel: int = 7_087_872) -> list[UnitRow]:
    return [row(f"layers.{index}", numel, padding=3, tensors=12) for index in range(count)]


def printed(rows: list[UnitRow], width: int = 80, title: str = "A table") -> list[str]:
    """The lines of the table in a terminal of that width."""
    return unit_table(rows, title, width)


def cells(lines: list[str], start: str) -> list[str]:
    """The cells of the one line that begins like that; they stand two or more blanks apart."""
    (line,) = [line for line in lines if line.startswith(start)]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


# --- the table ---


def test_each_unit_has_a_row_with_its_figures() -> None:
    lines = printed([row("(root)", 1000, padding=24), row("layers.0", 38_633_472)])
    assert cells(lines, "unit") == ["unit", "tensors", "parameters", "per rank", "padding"]
    assert cells(lines, "(root)") == ["(root)", "2", "1,000", "2.00 KiB", "24 (2.3%)"]
    assert cells(lines, "layers.0") == ["layers.0", "2", "38.6 M", "73.7 MiB", "0 (0%)"]


def test_equal_neighbours_share_one_row_and_the_table_says_what_that_means() -> None:
    lines = printed([row("(root)", 1000), *layers(32), row("head", 5)])
    folded = cells(lines, "layers.0")
    assert folded == ["layers.0 ... layers.31 (32x)", "12", "7.09 M", "13.5 MiB", "3 (<0.1%)"]
    assert lines[-1] == "(Nx): N units with these figures each"
    assert not any(line.startswith("layers.1") for line in lines)


def test_without_equal_neighbours_nothing_is_explained() -> None:
    assert not any("(Nx)" in line for line in printed([row("a", 1), row("b", 2), row("c", 1)]))


@pytest.mark.parametrize(
    "other",
    [row("b", 9), row("b", 10, trainable=9), row("b", 10, padding=1), row("b", 10, tensors=3)],
    ids=["numel", "trainable", "padding", "tensors"],
)
def test_units_that_differ_in_one_figure_keep_their_own_rows(other: UnitRow) -> None:
    assert not any("2x" in line for line in printed([row("a", 10), other]))


def test_only_neighbours_are_folded() -> None:
    lines = printed([row("a", 10), row("b", 11), row("c", 10)])
    assert [line.split()[0] for line in lines[3:6]] == ["a", "b", "c"]


def test_the_total_counts_every_unit_of_a_folded_row() -> None:
    lines = printed([row("(root)", 1_000_000, padding=4), *layers(32)])
    total = cells(lines, "total")
    assert total == ["total (33 units)", "386", "228 M", "435 MiB", "100 (<0.1%)"]
    assert any(line.startswith("total (1 unit)") for line in printed([row("(root)", 3)]))


def test_trainable_parameters_have_a_column_only_if_some_are_frozen() -> None:
    assert not any("trainable" in line for line in printed([row("(root)", 10), row("a", 20)]))
    lines = printed([row("(root)", 10), row("frozen", 20_000, trainable=0)])
    assert cells(lines, "unit")[3] == "trainable"
    assert cells(lines, "frozen")[2:4] == ["20.0 K", "0"]
    assert cells(lines, "total")[2:4] == ["20.0 K", "10"]


def test_a_model_of_no_units_prints_a_total_of_nothing() -> None:
    lines = printed([])
    assert cells(lines, "total") == ["total (0 units)", "0", "0", "0 B", "0 (0%)"]


def test_square_brackets_in_names_and_titles_are_text() -> None:
    lines = printed([row("experts.[bold]", 10)], title="[red] units")
    assert lines[0] == "[red] units"
    assert any(line.startswith("experts.[bold]") for line in lines)


# --- widths and files ---


LONG = [
    row(f"model.transformer.encoder.layers.{index}.mixture_of_experts", 405_849_243_648)
    for index in range(3)
]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(
    width: int, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    rows = [row("(root)", 10**12, trainable=1, padding=10**9), *LONG, *layers(32)]
    lines = printed(rows, width)
    "".join(lines).encode(encoding)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert all(
        figure in text
        for figure in ("1.00 B (<0.1%)", "406 B", "756 GiB", "7.09 M", "13.5 MiB", "1.00 T")
    )


def test_a_long_name_is_continued_on_the_next_line_and_nothing_is_lost() -> None:
    lines = printed(LONG, width=80)
    first, last = (
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in ("model.", "total")
    )
    width_of_names = lines[1].index("  tensors")
    name = "".join(line[:width_of_names].strip() for line in lines[first : last - 1])
    assert name.replace(" ", "") == f"{LONG[0].name}...{LONG[2].name}(3x)"


def test_thirty_two_layers_fit_on_one_line_of_eighty_columns() -> None:
    assert any(
        line.startswith("layers.0 ... layers.31 (32x) ") for line in printed(layers(32), width=80)
    )


@pytest.mark.parametrize(("columns", "width"), [("40", 80), ("80", 80), ("100", 100)])
def test_a_narrow_terminal_counts_as_eighty_columns(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width(least=80) == width
    lines = printed([row("very_long_name_" * 20, 10)], width)
    assert max(map(len, lines)) == width


# --- figures ---


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10.0 K"),
        (12_345, "12.3 K"),
        (99_950, "100 K"),
        (999_499, "999 K"),
        (999_500, "1.00 M"),
        (7_077_888, "7.08 M"),
        (9_995_000, "10.0 M"),
        (405_849_243_648, "406 B"),
        (1_215 * 10**12, "1215 T"),
    ],
)
def test_counts_have_three_digits_and_the_suffix_of_people(count: int, shown: str) -> None:
    assert human_count(count) == shown


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (28_311_552, "27.0 MiB"),
        (1023 * 2**20, "1.00 GiB"),
        (2**50, "1.00 PiB"),
    ],
)
def test_bytes_are_shown_in_powers_of_1024(nbytes: int, shown: str) -> None:
    assert human_bytes(nbytes) == shown


@given(st.integers(min_value=0, max_value=10**17))
def test_a_shown_count_is_within_half_of_its_last_digit(count: int) -> None:
    number, _, suffix = human_count(count).replace(",", "").partition(" ")
    value = float(number) * 1000 ** ["", "K", "M", "B", "T"].index(suffix)
    assert math.isclose(value, count, rel_tol=0.0051)


@pytest.mark.parametrize(
    ("numel", "padding", "shown"),
    [
        (100, 0, "0 (0%)"),
        (10**6, 1, "1 (<0.1%)"),
        (9, 1, "1 (10.0%)"),
        (0, 16, "16 (100.0%)"),
        (0, 0, "0 (0%)"),
    ],
)
def test_padding_is_a_share_of_the_padded_buffers(numel: int, padding: int, shown: str) -> None:
    assert any(
        line.endswith(shown)
        for line in printed([row("a", numel, padding=padding)])
        if line.startswith("a ")
    )


# --- the unit that is too large ---


def test_the_unit_with_more_than_half_of_the_parameters_is_found() -> None:
    rows = [row("(root)", 10), row("huge", 60), row("small", 49)]
    assert oversized(rows) is rows[1]


def test_half_is_not_more_than_half() -> None:
    assert oversized([row("(root)", 50), row("a", 25), row("b", 25)]) is None


def test_one_unit_is_too_large_only_for_a_model_that_is_not_small() -> None:
    assert oversized([row("(root)", SMALL_MODEL_NUMEL)]) is None
    large = [row("(root)", SMALL_MODEL_NUMEL + 1)]
    assert oversized(large) is large[0]


def test_units_without_parameters_do_not_count_as_units() -> None:
    assert oversized([row("(root)", 0), row("all", 1000)]) is None
    rows = [row("(root)", 0), row("all", 2 * SMALL_MODEL_NUMEL)]
    assert oversized(rows) is rows[1]


def test_no_units_and_no_parameters_are_nothing_to_warn_of() -> None:
    assert oversized([]) is None
    assert oversized([row("(root)", 0), row("a", 0)]) is None
