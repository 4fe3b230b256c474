"""The detokenizer process: the detokenizer's core at the token ring. It imports no tokenizer, only a table of bytes."""

from __future__ import annotations

from pathlib import Path

from baton.engine.detokenizer import DetokenizerCore
from baton.engine.effects import Doorbell
from baton.engine.text import TokenTable
from baton.workers.model.gguf import ModelFileError, read_header
from baton.workers.model.vocabulary import read_vocabulary
from baton.workers.process import Process, StartError

TOKEN_READER = 1


async def run(process: Process) -> None:
    """Serve until halted."""
    try:
        vocabulary = read_vocabulary(read_header(Path(process.card.path)))
    except ModelFileError as error:
        raise StartError(str(error)) from error
    table = TokenTable(vocabulary.pieces, vocabulary.special)
    tokens = process.steps(TOKEN_READER)
    process.run_core(DetokenizerCore(process.me, process.board, tokens, table, process.limits), {})

    def tokens_came() -> None:
        process.feed(Doorbell())

    process.hear("tokens", tokens_came)
    process.ready({})
    await process.halted.wait()
