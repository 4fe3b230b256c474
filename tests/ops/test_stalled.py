"""The measurement of stalled readers, small, on a real server."""

from __future__ import annotations

import json

from click.testing import CliRunner

from baton.ops.bench.stalled import main


def test_stalled_readers_are_paused_and_the_gaps_of_the_others_are_compared() -> None:
    flags = [
        "--streams",
        "2",
        "--stalled",
        "3",
        "--output-tokens",
        "16",
        "--seconds",
        "0.3",
        "--step-ms",
        "1",
        "--json",
    ]
    done = CliRunner().invoke(main, [*flags, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["reading"], found["stalled"], found["paused"], found["failed"]) == (2, 3, 3, 0)
    assert found["itl_p99_ms"] >= found["itl_p50_ms"] > 0 and found["itl_p50_stalled_ms"] > 0
    assert found["itl_p99_ratio"] == round(found["itl_p99_stalled_ms"] / found["itl_p99_ms"], 3)
