"""Which errors mean that there was no memory, and what is said of the step there was none for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from baton.engine.batch import Sampling, StepRow
from baton.ipc.log import Log
from baton.workers.exhausted import out_of_memory, say_so

torch = pytest.importorskip("torch")


class Lines:
    """A log that keeps its lines."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def error(self, event: str, **fields: Any) -> None:
        self.said.append((event, fields))


def test_what_torch_says_when_there_is_no_memory_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] not enough memory: you tried")])
def test_other_words_for_it_are_understood(error: Exception) -> None:
    assert out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("out of memory"), AssertionError()])
def test_other_errors_are_no_want_of_memory(error: Exception) -> None:
    assert not out_of_memory(error)


def test_the_line_says_how_large_the_step_was() -> None:
    sampling = Sampling(1.0, 1.0, 0, 3, ())
    rows = [StepRow(0, [5, 6, 7], 0, [0], True, 0, sampling), StepRow(1, [5], 40, [1, 2, 3], True, 9, sampling)]
    lines = Lines()
    say_so(cast(Log, lines), (4 << 32) + 17, rows)
    assert lines.said == [("out_of_memory", {"step": 17, "rows": 2, "tokens": 4, "context_tokens": 44})]
