"""What a step that ran out of memory says, on any device and at any layer. It knows no tensor and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.batch import StepRow
from baton.ipc.log import Log

#: how torch's allocators say it: ``torch.OutOfMemoryError`` of a device, a plain ``RuntimeError`` of the CPU's
WORDS = ("out of memory", "can't allocate memory", "not enough memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for it; every error of torch's that means so is a ``RuntimeError``."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in said for word in WORDS))


def say_so(log: Log, step: int, rows: Sequence[StepRow]) -> None:
    """One line of how large the step was that there was no memory for."""
    tokens = sum(len(row.tokens) for row in rows)
    context = sum(row.start + len(row.tokens) for row in rows)
    log.error("out_of_memory", step=step & 0xFFFF_FFFF, rows=len(rows), tokens=tokens, context_tokens=context)
