"""The bound on answer lengths on real traffic, replayed without look-ahead, and the command that prints it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.ops.bench.arrivals import Arrival, read_trace
from baton.ops.bench.conformal import main, replay
from baton.ops.bench.static import main as static

TRACE = Path(__file__).parent.parent / "data" / "azure-conversation-2023.csv.gz"


@pytest.mark.parametrize("token_s", [0.0, 0.03, 0.2])
def test_nine_in_ten_keep_their_bound_on_an_hour_of_conversations(token_s: float) -> None:
    arrivals = read_trace(TRACE)
    kept = replay(arrivals, 0.1, 1000, token_s)
    assert kept.requests == 19366 and kept.predicted > 19000
    assert 0.88 <= kept.coverage <= 0.93
    assert 0.88 <= kept.coverage_last_third <= 0.93
    assert kept.reserved_over_used <= 1.6


def test_a_length_is_not_known_before_it_would_have_finished() -> None:
    arrivals = [Arrival(index / 10, 10, 100) for index in range(200)]
    soon, late = replay(arrivals, 0.1, 1000, 0.0), replay(arrivals, 0.1, 1000, 0.1)
    assert soon.predicted - late.predicted == pytest.approx(100, abs=1)  # ten seconds of arrivals


def test_the_table_is_printed_for_either_form_of_trace(tmp_path: Path) -> None:
    original = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:{15 + index // 60:02}:{index % 60:02}.6805900,{index},44" for index in range(300)]
    original.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *reversed(rows)]))
    assert read_trace(original)[59].at_s == pytest.approx(59)
    for path in (original, TRACE):
        done = CliRunner().invoke(main, [str(path)])
        assert done.exit_code == 0 and done.output.count("\n") == 7, done.output
    for columns, missing in (("a,b", "gap_ms"), ("gap_ms,b", "context_tokens"), ("TIMESTAMP,b", "ContextTokens")):
        original.write_text(f"{columns}\n1,2\n")
        for command, arguments in ((main, [str(original)]), (static, ["--trace", str(original)])):
            done = CliRunner().invoke(command, arguments)
            assert done.exit_code == 1 and f"no column {missing}" in done.output, done.output
