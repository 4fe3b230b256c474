"""The card of a model: what every process must know of it, read once from the model's file before any is started."""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton.workers.config import Card, Settings
from baton.workers.model.config import read_config
from baton.workers.model.gguf import read_header
from baton.workers.model.pull import KNOWN_MODELS, resolve
from baton.workers.model.vocabulary import read_vocabulary


def make_card(settings: Settings) -> Card:
    """Read the card; ``ModelFileError`` where the file is missing, damaged or not of a family that is served."""
    path = resolve(settings.model)
    header = read_header(path)
    config = read_config(header)
    vocabulary = read_vocabulary(header)
    alias = settings.model if settings.model in KNOWN_MODELS else Path(settings.model).stem
    table = hashlib.sha256()
    for piece in vocabulary.pieces:
        table.update(len(piece).to_bytes(4, "little") + piece)
    return Card(
        name=settings.served_model_name or alias,
        path=str(path.resolve()),
        vocab=min(config.vocab, vocabulary.used),
        vocab_padded=config.vocab,
        context_tokens_max=config.context_length,
        end_ids=config.end_ids,
        weights_digest="",
        tokenizer_digest=table.hexdigest(),
        template_digest=hashlib.sha256((vocabulary.chat_template or "").encode()).hexdigest(),
        created=int(path.stat().st_mtime),
    )
