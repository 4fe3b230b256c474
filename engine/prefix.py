"""What a block of the KV cache holds, as a name: chained SHA-256 identities, so that equal beginnings are found.

The keys and values in a full block follow from its tokens, all tokens before it, and what computed them. A block's
identity is the hash of its parent's identity and its own tokens; the parent of a first block is a *root*, the hash of
everything else that the numbers depend on or that keeps strangers apart. It knows no pool: ``engine/blocks.py`` keeps
the index. Chained block hashes are vLLM's (Kwon et al., PagedAttention, 2023, section 4.4); that they must be hard to
collide on purpose, and salted, is what prompt caches shared between strangers taught.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from baton.ipc.frames import Terms

_ROOT = b"baton prefix root 1"
_LENGTH = struct.Struct("<Q")


class Link(msgspec.Struct, frozen=True, gc=False):
    """One full block by name: its identity, its parent's, and its token ids packed as little-endian uint32.

    The tokens are kept to be compared, so that a hit never rests on a hash alone.
    """

    identity: bytes
    parent: bytes
    content: bytes


@dataclass(slots=True)
class PrefixCounts:
    """Counters for the metrics; they only grow. ``queries`` and ``hits`` in tokens, ``evictions`` in blocks."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0


def root(terms: Terms, weights_digest: str, *, share_between_tenants: bool, salt: str = "") -> bytes:
    """The parent of a request's first block: 32 bytes that differ wherever its cache must not be shared.

    It covers the weights that compute (``weights_digest``, as the worker said), the adapter, the tenant unless
    tenants are configured to share, and ``salt``, by which whoever asks may keep to himself within a tenant. Each
    field is tagged and prefixed with its length, so that no two sets of fields read the same.
    """
    tenant = [] if share_between_tenants else [(b"tenant", terms.tenant)]
    fields = [(b"weights", weights_digest), (b"adapter", terms.adapter_digest), *tenant, (b"salt", salt)]
    digest = sha256(_ROOT)
    for tag, value in fields:
        data = value.encode()
        digest.update(_LENGTH.pack(len(tag)) + tag + _LENGTH.pack(len(data)) + data)
    return digest.digest()


class Chain:
    """The names of a sequence's full blocks, in order. Invariant: each is computed once, when it is first asked for.

    It reads ``prompt`` and ``output`` where they are; both may only grow at their ends, the prompt not at all.
    """

    __slots__ = ("_head", "_links", "_output", "_pack", "_prompt", "awaited", "block_tokens", "root")

    def __init__(self, root: bytes, block_tokens: int, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.awaited: bytes | None = None  # the pool's note: the block this chain was last told to wait for
        self._prompt = prompt
        self._output = output
        self._links: list[Link] = []
        self._pack = struct.Struct(f"<{block_tokens}I").pack
        self._head = b"block" + _LENGTH.pack(4 * block_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of the sequence so far."""
        return len(self._prompt) + len(self._output)

    @property
    def full(self) -> int:
        """Blocks whose tokens are all known."""
        return self.tokens // self.block_tokens

    def link(self, index: int) -> Link:
        """The name of block ``index``, which is one of the ``full`` ones."""
        links = self._links
        if index >= len(links):
            self._extend(index)
        return links[index]

    def _extend(self, index: int) -> None:
        links, prompt, size, pack, head = self._links, self._prompt, self.block_tokens, self._pack, self._head
        parent = links[-1].identity if links else self.root
        for at in range(len(links) * size, (index + 1) * size, size):
            end = at + size
            content = pack(*(prompt[at:end] if end <= len(prompt) else self._slice(at, end)))
            identity = sha256(head + parent + content).digest()
            links.append(Link(identity, parent, content))
            parent = identity

    def _slice(self, start: int, end: int) -> Sequence[int]:
        """Tokens that are not all of the prompt."""
        prompt = len(self._prompt)
        assert end <= self.tokens, f"tokens {start} to {end} asked of {self.tokens}"
        rest = self._output[max(start - prompt, 0) : end - prompt]
        return [*self._prompt[start:], *rest] if start < prompt else rest
