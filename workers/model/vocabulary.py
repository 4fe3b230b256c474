"""The vocabulary a GGUF file carries: bytes of every token, special ids, the chat template, and an encoder.

Reading it imports neither torch nor ``tokenizers``, for the detokenizer needs only the table of bytes;
``tokenizers`` is imported where the encoder is built, in the tokenizer process. Byte-level BPE is supported,
with the pre-tokenizers of ``_PRE_TOKENIZERS``; anything else is refused by name rather than tokenised almost
right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.workers.model.gguf import Header, ModelFileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# The splits of Llama 3, GPT-2 (which ByteLevel knows itself) and of the models that also part every digit.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "gpt-2": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a model stand for; ``pieces[i]`` are the bytes of id ``i``, a special token's its own
    text.
    """

    pieces: list[bytes] = field(repr=False)
    special: frozenset[int]  # control tokens: structure, not text
    bos_id: int | None
    eos_id: int | None
    add_bos: bool  # whether plain prompts begin with bos_id
    chat_template: str | None
    used: int  # ids from here on are there to fill up a table

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` adds to the text."""
        return self.pieces[token]


def read_vocabulary(header: Header) -> Vocabulary:
    """Read the vocabulary of a model file; raises ``ModelFileError`` where it is missing, torn or
    unsupported.
    """
    tokens, types = _tokens(header)
    strangers = dict.fromkeys(range(0x100), 0x100)  # no byte's number: Latin-1 refuses it
    alphabet = strangers | {ord(char): byte for byte, char in enumerate(byte_alphabet())}
    pieces = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _NORMAL:
            try:
                pieces.append(token.translate(alphabet).encode("latin-1"))
            except UnicodeEncodeError as error:
                fault = f"token {index} is not written in the alphabet of bytes"
                raise ModelFileError(header.path, fault) from error
        else:
            pieces.append(token.encode())
    template = "tokenizer.chat_template"
    return Vocabulary(
        pieces=pieces,
        special=frozenset(i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)),
        bos_id=_special_id(header, "bos", len(tokens)),
        eos_id=_special_id(header, "eos", len(tokens)),
        add_bos=header.flag("tokenizer.ggml.add_bos_token", _pre_tokenizer(header) == "llama3"),
        chat_template=header.text(template) if template in header.values else None,
        used=max((i + 1 for i, kind in enumerate(types) if kind != _UNUSED), default=0),
    )


def build_encoder(header: Header) -> Tokenizer:
    """The encoder of a model file. Its ``encode`` puts the bos id in front where the model wants it so.

    Bytes without a token (in SmolLM2's vocabulary six control characters and bytes that are rare or
    impossible in UTF-8) are dropped; ``tokenizers`` knows nothing better for a model without an unknown
    token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    tokens, types = _tokens(header)
    split = _pre_tokenizer(header)
    merges = []
    vocabulary = {token: index for index, token in enumerate(tokens)}
    for line in header.texts("tokenizer.ggml.merges"):
        left, space, right = line.partition(" ")
        if not space or not {left, right, left + right} <= vocabulary.keys():
            raise ModelFileError(header.path, f"merge {line[:40]!r} is not of two tokens into a third")
        merges.append((left, right))
    encoder = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == "llama3"))
    encoder.pre_tokenizer = _splitter(split)
    encoder.decoder = decoders.ByteLevel()
    added = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}
    encoder.add_tokens(
        [
            AddedToken(token, special=added[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in added and token
        ]
    )
    known = read_vocabulary(header)
    if known.add_bos and known.bos_id is not None:
        bos = tokens[known.bos_id]
        encoder.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, known.bos_id)])
    return encoder


def _splitter(kind: str) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if kind == "gpt2":
        return ByteLevel(add_prefix_space=False)
    if kind == "digits":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    split = Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_alphabet() -> str:
    """The 256 printable characters byte-level BPE writes bytes with, byte 0 first.

    Radford et al., GPT-2, 2019: printable Latin-1 stands for itself, the rest is numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


def _tokens(header: Header) -> tuple[list[str], list[int]]:
    model = header.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelFileError(header.path, f"tokenizer model {model!r} is not supported (gpt2, byte-level BPE, is)")
    tokens = header.texts("tokenizer.ggml.tokens")
    types = [int(kind) for kind in header.numbers("tokenizer.ggml.token_type")]
    if len(types) != len(tokens):
        raise ModelFileError(header.path, f"{len(tokens)} tokens have {len(types)} token types")
    for kind in set(types) - {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED}:
        raise ModelFileError(header.path, f"token type {kind} has no place in a byte-level vocabulary")
    if len(set(tokens)) != len(tokens):
        raise ModelFileError(header.path, "a token stands twice in the vocabulary")
    return tokens, types


def _pre_tokenizer(header: Header) -> str:
    name = header.text("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelFileError(header.path, f"pre-tokenizer {name!r} is not supported ({known} are)")
    return _PRE_TOKENIZERS[name]


def _special_id(header: Header, name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in header.values:
        return None
    index = header.integer(key)
    if not 0 <= index < size:
        raise ModelFileError(header.path, f"metadata {key} is {index}, outside the vocabulary")
    return index
