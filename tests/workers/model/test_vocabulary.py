"""The vocabulary against the reference's prompts and outputs, and round trips of any text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.workers.model.gguf import ModelFileError, read_header
from baton.workers.model.vocabulary import Vocabulary, build_encoder, byte_alphabet, read_vocabulary
from tests.workers.model.tiny import Tiny

UNWRITABLE = {4, 6, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}  # and bytes that UTF-8 does not know
REFERENCES = json.loads((Path(__file__).parents[2] / "data" / "smollm2-135m-reference.json").read_text())["references"]


@pytest.fixture(scope="module")
def vocabulary(model_path: Path) -> Vocabulary:
    return read_vocabulary(read_header(model_path))


@pytest.fixture(scope="module")
def encoder(model_path: Path) -> Tokenizer:
    return build_encoder(read_header(model_path))


def decode(vocabulary: Vocabulary, ids: list[int]) -> str:
    return b"".join(map(vocabulary.token_bytes, ids)).decode()


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda r: r["message"][:12])
def test_reference_prompts_and_outputs(encoder: Tokenizer, vocabulary: Vocabulary, reference: dict[str, Any]) -> None:
    assert encoder.encode(reference["prompt"]).ids == reference["prompt_ids"]
    assert decode(vocabulary, reference["output_ids"]) == reference["output_text"]


def test_special_tokens_are_marked_and_give_their_text(vocabulary: Vocabulary) -> None:
    assert vocabulary.token_bytes(2) == b"<|im_end|>" and {0, 1, 2} <= vocabulary.special
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.add_bos) == (1, 2, False)
    assert vocabulary.chat_template and len(vocabulary.pieces) == 49152


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back(encoder: Tokenizer, vocabulary: Vocabulary, text: str) -> None:
    """Less the bytes that the vocabulary has no token for."""
    written = b"".join(map(vocabulary.token_bytes, encoder.encode(text).ids))
    assert written == bytes(byte for byte in text.encode() if byte not in UNWRITABLE)


@pytest.mark.parametrize(
    "text",
    ["ďábelské 👩‍👩‍👧‍👦 한국어", "  two  spaces\n\n\ttab ", "<|im_start|>x <|im_end|>", "12345 ⅷ½ x2y", ""],
)
def test_awkward_texts_come_back_and_agree_with_the_encoders_own_decoder(
    encoder: Tokenizer, vocabulary: Vocabulary, text: str
) -> None:
    ids = encoder.encode(text).ids
    assert decode(vocabulary, ids) == text == encoder.decode(ids, skip_special_tokens=False)


def test_the_byte_alphabet_is_one_to_one() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert (alphabet[ord("a")], alphabet[ord(" ")], alphabet[ord("\n")], alphabet[0xAD]) == (
        "a",
        "Ġ",
        "Ċ",
        "Ń",
    )


@pytest.mark.parametrize(("pre", "expected"), [("gpt-2", ["12", "345", "a"]), ("smollm", list("12345a"))])
def test_pre_tokenizers_part_digits_as_named(tmp_path: Path, pre: str, expected: list[str]) -> None:
    encoder = build_encoder(read_header(Tiny(pre=pre).write(tmp_path / "m.gguf")))
    pieces = [text for text, _ in encoder.pre_tokenizer.pre_tokenize_str("12345a")]
    assert pieces == (["12345", "a"] if pre == "gpt-2" else expected)


def test_llama3_splits_by_threes_and_begins_with_bos(tmp_path: Path) -> None:
    encoder = build_encoder(read_header(Tiny(pre="llama-bpe").write(tmp_path / "m.gguf")))
    pieces = [text for text, _ in encoder.pre_tokenizer.pre_tokenize_str("12345 It's\r\n  so")]
    assert pieces == ["123", "45", "ĠIt", "'s", "čĊ", "Ġ", "Ġso"]
    assert encoder.encode("hell").tokens == ["<|start|>", "hell"]
    assert encoder.encode("hell", add_special_tokens=False).tokens == ["hell"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"pre": "viking"}, "pre-tokenizer 'viking' is not supported"),
        ({"tokenizer": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"numbers": {"tokenizer.ggml.bos_token_id": 1 << 20}}, "outside the vocabulary|stands twice"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, object], fault: str) -> None:
    tiny = Tiny()
    for name, value in changes.items():
        setattr(tiny, name, value)
    with pytest.raises(ModelFileError, match=fault):
        read_vocabulary(read_header(tiny.write(tmp_path / "m.gguf")))


def test_the_detokenizers_half_imports_neither_torch_nor_tokenizers(model_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from baton.workers.model.gguf import read_header\n"
        "from baton.workers.model.vocabulary import read_vocabulary\n"
        f"read_vocabulary(read_header(pathlib.Path({str(model_path)!r})))\n"
        "assert not {'torch', 'tokenizers', 'numpy', 'gguf', 'jinja2'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
