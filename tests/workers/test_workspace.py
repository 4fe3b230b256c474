"""What a step takes in memory: the largest steps, the peak, the figure that is remembered, and that it holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.batch import StepRow
from baton.kernels.lean import quarter_blocks
from baton.kernels.reference import padded_blocks
from baton.workers import peak, workspace
from baton.workers.cache import BLOCK_SIZE
from baton.workers.largest import largest_steps
from baton.workers.peak import resident_peak
from baton.workers.runner import Runner
from baton.workers.workspace import remembered

MIB = 1 << 20
PADDED = st.sampled_from([padded_blocks, quarter_blocks])
Padded = Callable[[int, int], int]


def gathered(rows: list[StepRow], block_tokens: int, padded: Padded) -> int:
    """Blocks that a step's decoding rows gather at once: the largest group of one width."""
    widths = [padded(row.start + 1, block_tokens) for row in rows if len(row.tokens) == 1]
    return max((widths.count(width) * width for width in widths), default=0)


@given(st.integers(1, 600), st.integers(1, 300), st.integers(1, 200), st.integers(1, 16), st.data())
def test_largest_steps_are_possible_ones(
    step_tokens: int, rows_max: int, blocks: int, block_tokens: int, data: st.DataObject
) -> None:
    context = data.draw(st.integers(1, blocks * block_tokens))
    many, one = largest_steps(step_tokens, rows_max, blocks, block_tokens, context, data.draw(PADDED))
    for step in (many, one):
        assert len(step) <= rows_max and len({row.slot for row in step}) == len(step)
        assert sum(len(row.tokens) for row in step) <= step_tokens
        for row in step:
            end = row.start + len(row.tokens)
            assert row.tokens and row.start >= 0 and end <= context and row.sample
            assert len(row.blocks) == -(-end // block_tokens) <= blocks and not any(row.blocks)
    assert len(one) == 1 and len(one[0].tokens) == min(step_tokens, context)
    assert len(many) == min(rows_max, step_tokens, blocks)


@given(st.integers(1, 40), st.integers(1, 40), PADDED, st.data())
def test_no_other_batch_gathers_more(rows: int, blocks: int, padded: Padded, data: st.DataObject) -> None:
    context = data.draw(st.integers(1, blocks))
    many, _ = largest_steps(rows + 1, rows + 1, blocks, 1, context, padded)
    rows, most = len(many) - 1, 0
    for table in range(1, context + 1):
        attending = min(rows, blocks // table)
        most = max(most, attending * padded(table, 1))
    assert gathered(many[:-1], 1, padded) == most


SEEN = """
from baton.workers.peak import resident_peak
MIB = 1 << 20
bytes(bytearray(b"x") * (128 * MIB))  # an earlier peak does not count
with resident_peak() as seen:
    held = bytearray(b"x") * (48 * MIB)
    del held
    held = bytearray(b"x") * (32 * MIB)
with resident_peak() as nothing:
    pass
print(seen.bytes, nothing.bytes)
"""


def test_a_peak_is_what_was_held_at_once_and_given_back() -> None:
    # In a process of its own, as a worker is one: what ran here before may have left memory that is never given back.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SEEN]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=60)
    seen, nothing = map(int, run.stdout.split())
    assert 47 * MIB <= seen < 56 * MIB  # the kernel counts in strides
    assert nothing < 2 * MIB


def test_where_the_mark_cannot_be_reset_the_figure_is_too_large_not_too_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = bytearray(b"x") * (96 * MIB)
    del earlier
    monkeypatch.setattr(peak, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
    with resident_peak() as seen:
        held = bytearray(b"x") * (8 * MIB)
    assert seen.bytes >= len(held)


def test_a_kernel_that_tells_nothing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\n")
    monkeypatch.setattr(peak, "STATUS", tmp_path / "status")
    with pytest.raises(AssertionError, match="tells no VmRSS"), resident_peak():
        pass


def test_a_figure_is_measured_once_for_what_it_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    figures = iter(range(100, 200))

    def ask(*what: object) -> int:
        return remembered(what, lambda: next(figures))

    assert [ask("a", 1), ask("a", 2), ask("a", 1), ask("a", "1"), ask("a", 2)] == [100, 101, 100, 102, 101]
    (tmp_path / "source.py").write_text("x = 1")
    monkeypatch.setattr(workspace, "SOURCES", (*workspace.SOURCES, str(tmp_path / "source.py")))
    assert ask("a", 1) == 103, "what computes has changed"
    for path in (tmp_path / "baton" / "workspace").iterdir():
        path.write_text("")
    assert [ask("a", 1), ask("a", 1)] == [104, 104]


def test_where_nothing_can_be_kept_it_is_measured_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "baton").write_text("a file, not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    figures = iter(range(9))
    assert [remembered(("a",), lambda: next(figures)) for _ in range(2)] == [0, 1]


@pytest.fixture(scope="module")
def runner(model_path: Path) -> Runner:
    return Runner(model_path, dtype="float32", weights="bfloat16", blocks=64, threads=1)


def test_no_step_takes_much_more_than_was_measured(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    few, many = runner.measure(64, 4), runner.measure(64, 48)
    assert runner.workspace_bytes == many == runner.measure(64, 48)
    logits = runner.config.vocab * 4
    assert 4 * logits < few and few + 44 * logits < many
    for step in largest_steps(64, 48, 64, BLOCK_SIZE, 64 * BLOCK_SIZE, runner._steps.padded):
        with resident_peak() as seen:
            runner.step(step)
        assert seen.bytes <= 1.5 * many  # all layers; the heap's gaps are not the same each time


def test_weights_are_counted_once_each(runner: Runner) -> None:
    assert runner.config.tied_embeddings
    assert runner.weights_bytes == 2 * 134_515_008, "135 million weights of two bytes, the embedding being the head"
