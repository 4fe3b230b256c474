"""Bad words as the tokenizer process writes them: with and without a leading space, in the real vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.ipc.frames import Prompt
from baton.workers.card import make_card
from baton.workers.config import Settings
from baton.workers.tokenizer import BadWordError, PromptEncoder
from tests.workers.model.tiny import Tiny


@pytest.fixture(scope="module")
def encoder(model_path: Path) -> PromptEncoder:
    return PromptEncoder(str(model_path))


def text(encoder: PromptEncoder, ids: tuple[int, ...]) -> str:
    return b"".join(encoder.vocabulary.token_bytes(token) for token in ids).decode()


def test_a_word_is_forbidden_as_it_stands_and_after_a_space(encoder: PromptEncoder) -> None:
    found = encoder.bad_ids(("Berlin", " cat", "unthinkableness"))
    assert [text(encoder, ids) for ids in found] == ["Berlin", " Berlin", " cat", "unthinkableness", " unthinkableness"]
    assert len(found[-1]) > 1


def test_the_same_ids_are_there_once(encoder: PromptEncoder) -> None:
    assert encoder.bad_ids((" cat", "cat")) == (*encoder.bad_ids((" cat",)), *encoder.bad_ids(("cat",))[:1])
    assert encoder.bad_ids(()) == ()


def test_a_word_without_a_token_is_named(encoder: PromptEncoder) -> None:
    missing = next(chr(byte) for byte in range(32) if bytes([byte]) not in encoder.vocabulary.pieces)
    with pytest.raises(BadWordError, match="no token for"):
        encoder.bad_ids((missing,))


def test_a_prompt_of_ids_is_what_it_is(encoder: PromptEncoder) -> None:
    assert encoder.encode(Prompt(token_ids=[5, 6])) == [5, 6]


def test_the_card_counts_what_stands_for_something(model_path: Path) -> None:
    card = make_card(Settings(model=str(model_path)))
    assert (card.vocab, card.vocab_padded) == (49152, 49152)


def test_ids_that_only_fill_up_the_table_are_no_part_of_the_vocabulary(tmp_path: Path) -> None:
    tiny = Tiny(padding=5)
    card = make_card(Settings(model=str(tiny.write(tmp_path / "padded.gguf"))))
    assert (card.vocab, card.vocab_padded) == (len(tiny.tokens) - 5, len(tiny.tokens))
