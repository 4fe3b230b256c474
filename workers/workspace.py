"""What a step was measured to take in memory, remembered beside the converted weights: measuring takes seconds.

A figure is found again only where all that it depends on is the same, down to the source of what computes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from baton.workers.model.paths import cache_directory

HERE = Path(__file__).resolve().parent
SOURCES = ("runner.py", "sampler.py", "largest.py", "peak.py")


def remembered(what: tuple[object, ...], measure: Callable[[], int]) -> int:
    """The bytes that ``measure`` found for ``what`` (of plain values) once; it is called where nobody asked before."""
    path = cache_directory("workspace") / _name(what)
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    found = measure()
    with contextlib.suppress(OSError):  # then it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{found}\n")
    return found


def _name(what: tuple[object, ...]) -> str:
    digest = hashlib.sha256(repr(what).encode())
    kernels = [path for path in (HERE.parent / "kernels").rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    for path in [*(HERE / source for source in SOURCES), *sorted((HERE / "model").glob("*.py")), *sorted(kernels)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
