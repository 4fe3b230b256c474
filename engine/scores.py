"""Log-probabilities of candidates on their way from the sampler to the detokenizer: packed, best first.

A pair is a token id and its log-probability, eight bytes. Nobody between the two ends looks inside, so they travel and
are kept as bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_PAIR = struct.Struct("=If")
PAIR_BYTES = _PAIR.size


def pack(pairs: Iterable[tuple[int, float]]) -> bytes:
    """Pairs of token id and log-probability as bytes."""
    return b"".join(_PAIR.pack(token, logprob) for token, logprob in pairs)


def unpack(data: bytes) -> list[tuple[int, float]]:
    """The reverse; ``data`` is a whole number of pairs."""
    return list(_PAIR.iter_unpack(data))
