"""Text from ids: what comes piece by piece is what the whole decodes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.text import TextState, TokenTable
from baton.ipc.frames import Params

TABLE = TokenTable([bytes([byte]) for byte in range(256)] + [b"<end>", "né".encode()], frozenset({256}))
ids = st.lists(st.integers(0, 260), max_size=40)


def pieces(tokens: list[int], skip_special: bool = True, stops: tuple[str, ...] = ()) -> tuple[list[str], str]:
    state = TextState(TABLE, Params(skip_special_tokens=skip_special, stop=stops))
    return [state.push(token) for token in tokens], state.finish()


@given(ids, st.booleans())
def test_pieces_and_tail_are_the_whole_text(tokens: list[int], skip_special: bool) -> None:
    came, tail = pieces(tokens, skip_special)
    table = TABLE.plain if skip_special else TABLE.pieces
    whole = b"".join(table[token] for token in tokens if token < len(table))
    assert "".join(came) + tail == whole.decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_a_character_in_single_bytes_never_shows_a_replacement(text: str) -> None:
    came, tail = pieces(list(text.encode()))
    assert "".join(came) == text
    assert tail == ""
    assert ("\ufffd" in "".join(came)) == ("\ufffd" in text)


def test_bytes_of_an_unfinished_character_wait_and_end_as_a_replacement() -> None:
    assert pieces(list("€".encode()[:2])) == (["", ""], "\ufffd")


@given(ids, st.lists(st.text(st.sampled_from("ab\xe9"), min_size=1, max_size=3), max_size=2).map(tuple))
def test_the_same_ids_give_the_same_pieces_again(tokens: list[int], stops: tuple[str, ...]) -> None:
    """A request that is submitted again is decoded again from its first token: nothing may come out otherwise."""
    first, again = TextState(TABLE, Params(stop=stops)), TextState(TABLE, Params(stop=stops))
    for token in tokens:
        if first.hit is not None:
            break
        assert first.push(token) == again.push(token)
    assert (first.hit, first.finish()) == (again.hit, again.finish())


def test_what_may_begin_a_stop_string_comes_out_at_the_end() -> None:
    assert pieces(list(b"one st"), stops=("stop",)) == (["o", "n", "e", " ", "", ""], "st")


def test_nothing_comes_out_after_a_stop_string() -> None:
    state = TextState(TABLE, Params(stop=("st",)))
    assert [state.push(token) for token in b"ast"] == ["a", "", ""]
    assert (state.hit, state.finish()) == ("st", "")


def test_special_tokens_are_left_out_unless_asked_for_and_foreign_ids_have_no_text() -> None:
    assert pieces([97, 256, 9999]) == (["a", "", ""], "")
    assert pieces([97, 256], skip_special=False) == (["a", "<end>"], "")
