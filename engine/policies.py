"""What whoever runs the server may choose about scheduling, as the scheduler's core is told it."""

from __future__ import annotations

import msgspec


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    """``prefix_cache``: what was computed is kept and found again by later prompts that begin alike, of one tenant, or
    of all of them with ``share_prefixes``.
    """

    prefix_cache: bool = True
    share_prefixes: bool = False
