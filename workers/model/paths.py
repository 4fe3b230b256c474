"""Where Baton keeps what it can make again: ``$XDG_CACHE_HOME/baton``, by default ``~/.cache/baton``."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(kind: str) -> Path:
    """The directory of one kind of cached files, not necessarily there yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification has relative paths ignored.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "baton" / kind
