"""Log-probabilities of candidates on their way from the sampler to the detokenizer: packed, best first.

A pair is a token id and its log-probability, eight bytes. Nobody between the two ends looks inside, so they travel and
are kept as bytes. What is told of a prompt's token (any but the first) is an entry: its rank among all tokens in its
place, 1 for the likeliest, then the pair of the token itself, then the pairs of the ``top`` likeliest. All entries of
one request are of one size, so that those of a stretch of its prompt are one string of bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

_PAIR = struct.Struct("=If")
_RANK = struct.Struct("=I")
PAIR_BYTES = _PAIR.size
RANK_BYTES = _RANK.size


def pack(pairs: Iterable[tuple[int, float]]) -> bytes:
    """Pairs of token id and log-probability as bytes."""
    return b"".join(_PAIR.pack(token, logprob) for token, logprob in pairs)


def unpack(data: bytes) -> list[tuple[int, float]]:
    """The reverse; ``data`` is a whole number of pairs."""
    return list(_PAIR.iter_unpack(data))


def entry_bytes(top: int) -> int:
    """The size of an entry with the ``top`` likeliest tokens."""
    return RANK_BYTES + PAIR_BYTES * (1 + top)


def pack_entry(rank: int, pairs: Iterable[tuple[int, float]]) -> bytes:
    """One entry: the token's rank, then its own pair and those of the likeliest."""
    return _RANK.pack(rank) + pack(pairs)


def unpack_entries(data: bytes, top: int) -> Iterator[tuple[int, list[tuple[int, float]]]]:
    """The rank and the pairs of each entry; ``data`` is a whole number of them."""
    size = entry_bytes(top)
    for at in range(0, len(data), size):
        yield _RANK.unpack_from(data, at)[0], unpack(data[at + RANK_BYTES : at + size])


class PromptRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step computed of a prompt, as it stands in the token ring: ``count`` entries from position ``start`` on.

    The first of a prompt's tokens, position 0, has none: nothing comes before it.
    """

    slot: int
    generation: int
    run: int
    start: int
    count: int
    entries: bytes


def news(record: PromptRecord, generation: int, run: int, known: int, top: int | None) -> bytes:
    """The entries in a record that (generation, run) has not: it knows those of positions 1 to ``known``.

    None are there where the record is of another life, or nobody asked (``top`` is None). As with tokens, what does not
    join on to what is known does not count: a damaged ring lost what was between, and its writer's next life says it.
    """
    if top is None or record.run != run or record.generation != generation:
        return b""
    size, skip = entry_bytes(top), known + 1 - record.start
    assert len(record.entries) % size == 0, f"entries of {size} bytes are asked for, {record} comes"
    return record.entries[skip * size :] if skip >= 0 else b""
