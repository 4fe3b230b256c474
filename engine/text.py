"""From token ids to text, piece by piece: a pure function of the ids, so that a replay gives the same pieces.

The piece of a token is the text that became certain with it: bytes of an unfinished character and the possible
beginning of a stop string are held back. It never sees a tokenizer, only a table from id to bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from baton.engine.stopping import StopScanner
from baton.ipc.frames import Params

_utf8 = codecs.getincrementaldecoder("utf-8")


class TokenTable:
    """What each id stands for: its bytes, and whether it is special (left out of the text unless asked for)."""

    def __init__(self, pieces: Sequence[bytes], special: frozenset[int]) -> None:
        self.pieces = pieces
        self.special = special
        self.plain = [b"" if token in special else piece for token, piece in enumerate(pieces)]

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for, special ones too; nothing for ids outside the table."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""


class TextState:
    """One sequence's decoding state. Invariant: the concatenated pieces, plus ``finish()``, are the whole text.

    The token that ended it by ``stop_token_ids`` has no text, unless the client asked for what stopped it.
    """

    __slots__ = ("_deaf", "_decode", "_mute", "_pieces", "_scanner")

    def __init__(self, table: TokenTable, params: Params) -> None:
        self._pieces = table.plain if params.skip_special_tokens else table.pieces
        self._decode = _utf8("replace").decode
        self._scanner = StopScanner(params.stop, params.include_stop) if params.stop else None
        self._deaf = params.min_tokens  # tokens still to come in which no stop string is looked for
        self._mute = frozenset() if params.include_stop else frozenset(params.stop_token_ids)

    @property
    def hit(self) -> str | None:
        """The stop string that is complete, if any."""
        return self._scanner.hit if self._scanner is not None else None

    def push(self, token: int) -> str:
        """The text that is certain once ``token`` is known. Ids outside the table have no text."""
        piece = self._pieces[token] if 0 <= token < len(self._pieces) and token not in self._mute else b""
        text = self._decode(piece)
        if self._scanner is None:
            return text
        self._deaf -= 1
        return self._scanner.feed(text, self._deaf < 0)

    def finish(self) -> str:
        """What was held back, at the end of the sequence; empty after a stop string."""
        if self.hit is not None:
            return ""
        text = self._decode(b"", True)
        if self._scanner is None:
            return text
        released = self._scanner.feed(text, self._deaf < 0) if text else ""
        return released if self._scanner.hit is not None else released + self._scanner.held
