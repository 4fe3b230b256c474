"""The model file of level two: a vocabulary and no tensors, read by the real tokenizer and detokenizer.

Its first ids are the script's pieces, so that answers are what the script says; after them comes a token for each byte
that no piece stands for, and with no merge that applies a prompt's ids are its bytes.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import gguf

from baton.workers.config import Card
from baton.workers.model.vocabulary import byte_alphabet
from tests.sim.script import BYTES, END, PIECES, TABLE

_IDS = {piece: token for token, piece in enumerate([*PIECES, *BYTES]) if len(piece) == 1}


def encode(text: str) -> list[int]:
    """The ids of a prompt, told without the encoder: one a byte."""
    return [_IDS[bytes([byte])] for byte in text.encode()]


@functools.cache
def model_file() -> Path:
    """The file, written once a process; its folder goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="baton-sim-")
    _folders.append(folder)
    path = Path(folder.name) / "sim.gguf"
    alphabet = byte_alphabet()
    plain = [
        piece.decode() if token in TABLE.special else "".join(alphabet[byte] for byte in piece)
        for token, piece in enumerate([*PIECES, *BYTES])
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(plain)
    writer.add_token_types([3 if token in TABLE.special else 1 for token in range(len(plain))])
    writer.add_token_merges(["2 2"])  # there must be one; no prompt has digits
    writer.add_eos_token_id(END)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def card(context_tokens: int) -> Card:
    """What the processes know of the model."""
    return Card(
        name="m",
        path=str(model_file()),
        vocab=len(PIECES),
        vocab_padded=len(PIECES),
        context_tokens_max=context_tokens,
        end_ids=(END,),
        weights_digest="",
        tokenizer_digest="t",
        template_digest="",
        created=0,
    )


_folders: list[tempfile.TemporaryDirectory[str]] = []
