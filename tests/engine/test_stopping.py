"""Stop strings are found at the same place however the text is cut, and the end of a sequence is one rule."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.engine.batch import END_FLAG, INVALID_FLAG
from baton.engine.effects import TokenRecord
from baton.engine.stopping import StopScanner, counts, ending

alphabet = st.sampled_from("ab")
texts = st.text(alphabet, max_size=30)
stop_lists = st.lists(st.text(alphabet, min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def prefix_overlap(text: str, stops: tuple[str, ...]) -> int:
    """The longest tail of the text that begins a stop string."""
    tails = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(tails, default=0)


@given(st.lists(texts, max_size=8), stop_lists)
@example(["aa", "ab"], ("aab",))
@example(["ab", "ab"], ("bab", "ba"))
def test_any_cut_gives_the_same_text_and_the_same_stop(pieces: list[str], stops: tuple[str, ...]) -> None:
    scanner, released = StopScanner(stops), ""
    for number, piece in enumerate(pieces):
        released += scanner.feed(piece)
        so_far = "".join(pieces[: number + 1])
        found = [(at, stop) for stop in stops if (at := so_far.find(stop)) >= 0]
        if found:
            at = min(found)[0]
            assert released == so_far[:at]
            assert scanner.hit in stops
            assert so_far.startswith(scanner.hit, at)
            return
        assert scanner.hit is None
        assert released + scanner.held == so_far
        assert len(scanner.held) == prefix_overlap(so_far, stops)


def test_a_stop_string_across_pieces() -> None:
    scanner = StopScanner(("beta gamma",))
    assert [scanner.feed(piece) for piece in ("alpha be", "ta", " gam", "ma delta")] == ["alpha ", "", "", ""]
    assert scanner.hit == "beta gamma"


def test_nothing_is_held_without_stop_strings_or_without_a_beginning_of_one() -> None:
    assert StopScanner(()).feed("text") == "text"
    assert StopScanner(("zzz",)).feed("text") == "text"


@pytest.mark.parametrize(
    ("flags", "length", "end"),
    [
        (0, 3, None),
        (0, 4, "length"),
        (0, 5, "length"),
        (END_FLAG, 1, "stop"),
        (END_FLAG, 4, "stop"),
        (INVALID_FLAG, 1, "error"),
        (INVALID_FLAG | END_FLAG, 4, "error"),
    ],
)
def test_ending(flags: int, length: int, end: str | None) -> None:
    assert ending(flags, length, 4) == end


@pytest.mark.parametrize(
    ("generation", "run", "length", "counted"), [(2, 5, 3, True), (1, 5, 3, False), (2, 4, 3, False), (2, 5, 2, False)]
)
def test_a_record_counts_for_its_generation_run_and_position(
    generation: int, run: int, length: int, counted: bool
) -> None:
    assert counts(TokenRecord(0, 2, 5, 3, 9, 0, 0.0), generation, run, length) is counted
