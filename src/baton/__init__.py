"""Baton: an LLM serving engine in pure asyncio Python.

Importing this package imports neither torch nor aiohttp: the two clients load on first use, and every other part is
imported by its own name (``baton.engine``, ``baton.ipc``, ...).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]

if TYPE_CHECKING:
    from baton.frontends.client import AsyncClient, Client


def __getattr__(name: str) -> object:
    if name in ("AsyncClient", "Client"):
        from baton.frontends import client

        return getattr(client, name)
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
