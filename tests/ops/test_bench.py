"""The load generator calls a stream a success only if it is one, and its numbers are right."""

from __future__ import annotations

import json
import socket
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from baton.ops.bench import command
from baton.ops.bench.load import Plan, drive
from baton.ops.bench.report import Objectives, Report, percentile, report, spread, table
from baton.ops.bench.stream import Outcome, ask
from baton.ops.cli import cli
from baton.ops.http import Target, target
from tests.ops import misbehaving as server
from tests.ops.misbehaving import How


def body(how: int) -> bytes:
    return json.dumps({"prompt": [how, 1]}).encode()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (How.GOOD, None),
        (How.EARLY_END, "ended without a finish reason"),
        (How.CUT, "ended without a finish reason"),
        (How.ERROR_EVENT, "error event"),
        (How.MALFORMED, "malformed chunk"),
        (How.TOO_MANY, "http 429"),
        (How.BROKEN, "http 500"),
        (How.BAD_FRAMING, "malformed response"),
        (How.CLOSED, "closed before any response"),
        (How.HANG, "timeout"),
    ],
)
async def test_a_stream_is_judged_by_how_it_ended(how: int, error: str | None) -> None:
    async with server.misbehaving_server() as (url, _):
        outcome = await ask(target(url), body(how), 0.2 if how == How.HANG else 5.0, None)
    assert outcome.error == error
    assert outcome.ended >= outcome.started
    if error is None:
        assert (outcome.deltas, outcome.tokens, outcome.finish_reason) == (server.TOKENS, server.TOKENS, "length")
        assert len(outcome.gaps_s) == server.TOKENS - 1
        assert outcome.started <= outcome.first <= outcome.last <= outcome.ended


@pytest.mark.parametrize(("how", "words"), [(How.TOO_MANY, "not now"), (How.ERROR_EVENT, "the engine died")])
async def test_what_the_server_said_of_an_error_is_kept(how: int, words: str) -> None:
    async with server.misbehaving_server() as (url, _):
        outcome = await ask(target(url), body(how), 5.0, None)
    assert words in outcome.detail


@pytest.mark.parametrize(
    ("how", "expected", "doubt"),
    [
        (How.GOOD, server.TOKENS, None),
        (How.GOOD, server.TOKENS + 1, "usage differs from the tokens asked for"),
        (How.NO_USAGE, None, "no usage"),
        (How.WRONG_USAGE, None, "usage counts fewer tokens than deltas came"),
    ],
)
async def test_usage_is_checked_against_the_stream(how: int, expected: int | None, doubt: str | None) -> None:
    async with server.misbehaving_server() as (url, _):
        outcome = await ask(target(url), body(how), 5.0, expected)
    assert (outcome.error, outcome.doubt) == (None, doubt)


async def test_a_refused_connection_is_an_error_of_its_own() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        outcome = await ask(Target("127.0.0.1", unheard.getsockname()[1], False, ""), body(0), 1.0, None)
    assert outcome.error == "connection refused"


def plan(**changes: object) -> Plan:
    fields: dict[str, object] = {
        "model": "tiny",
        "concurrency": 3,
        "requests": 10,
        "seconds": None,
        "prompt_tokens": 5,
        "output_tokens": 4,
        "vocabulary": range(0, 1),
        "text": None,
        "ignore_eos": True,
        "timeout_s": 5.0,
        "seed": 1,
    }
    return Plan(**(fields | changes))  # type: ignore[arg-type]  # a test's shorthand


async def test_the_loop_sends_exactly_what_was_asked_for() -> None:
    outcomes: list[Outcome] = []
    async with server.misbehaving_server() as (url, seen):
        await drive(target(url), plan(), outcomes.append)
    assert [outcome.error for outcome in outcomes] == [None] * 10
    assert len(seen) == 10
    sent = json.loads(seen[0])
    assert (sent["max_tokens"], sent["ignore_eos"], sent["stream_options"]) == (4, True, {"include_usage": True})
    assert len(sent["prompt"]) == 5


async def test_after_the_seconds_no_request_is_started() -> None:
    outcomes: list[Outcome] = []
    async with server.misbehaving_server() as (url, _):
        await drive(target(url), plan(requests=None, seconds=1e-9, concurrency=2), outcomes.append)
    assert outcomes == []


def test_prompts_repeat_with_the_seed_and_differ_by_number() -> None:
    ids = range(100, 30_000)
    one, two = plan(vocabulary=ids), plan(vocabulary=ids)
    assert one.body(3) == two.body(3) != one.body(4)
    assert plan(vocabulary=ids, seed=2).body(3) != one.body(3)
    assert json.loads(plan(text="hi").body(0))["prompt"] == "hi"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", Target("h", 1, False, "")),
        ("http://h:1/v1/", Target("h", 1, False, "")),
        ("https://h/api/v1", Target("h", 443, True, "/api")),
        ("h:8000", Target("h", 8000, False, "")),
    ],
)
def test_base_urls(url: str, expected: Target) -> None:
    assert target(url) == expected


def test_what_is_no_url_or_range_is_refused() -> None:
    for url in ("ftp://h", "http://"):
        with pytest.raises(ValueError, match="not an http"):
            target(url)
    for text in ("7", "9-3", "a-b"):
        with pytest.raises(ValueError, match="FROM-TO"):
            command.id_range(text)


def test_percentiles_interpolate() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([7.0], 99) == 7.0
    assert spread([]) is None
    found = spread([0.001, 0.002, 0.003])
    assert found is not None and (found.mean, found.p50, found.max) == (2.0, 2.0, 3.0)


def outcome(ttft: float, gap: float, tokens: int = 5, error: str | None = None) -> Outcome:
    last = ttft + gap * (tokens - 1)
    return Outcome(0.0, last, ttft, last, array("d", [gap] * (tokens - 1)), tokens, tokens, "stop", None, error)


def summed(outcomes: list[Outcome], objectives: Objectives | None = None) -> Report:
    return report(outcomes, 2.0, "u", "m", 2, objectives or Objectives(), 0.01)


def test_the_report_counts_only_successes_as_throughput() -> None:
    found = summed([outcome(0.1, 0.01), outcome(0.1, 0.01, error="timeout"), outcome(0.3, 0.01)])
    assert (found.requests, found.succeeded, found.errors, found.timeouts) == (3, 2, {"timeout": 1}, 1)
    assert (found.output_tokens, found.output_tokens_per_s, found.requests_per_s) == (10, 5.0, 1.0)
    assert found.ttft_ms is not None and found.ttft_ms.p50 == 200.0
    assert found.tpot_ms is not None and found.tpot_ms.p99 == 10.0
    assert found.goodput is None


@pytest.mark.parametrize(
    ("objectives", "share"),
    [
        (Objectives(ttft_ms=200), 0.5),
        (Objectives(itl_ms=5), 0.0),
        (Objectives(tpot_ms=10.001, e2e_ms=1000), 0.75),
    ],
)
def test_goodput_is_what_keeps_every_bound(objectives: Objectives, share: float) -> None:
    outcomes = [outcome(0.1, 0.01), outcome(0.1, 0.01), outcome(0.3, 0.01), outcome(0.1, 0.01, error="http 500")]
    found = summed(outcomes, objectives)
    assert found.goodput is not None and found.goodput.share == share


def test_an_empty_run_still_has_a_report() -> None:
    found = summed([], Objectives(ttft_ms=1))
    assert found.ttft_ms is None and found.goodput is not None and found.goodput.share == 0.0
    Console(quiet=True).print(table(found))


@pytest.fixture
def url() -> Iterator[str]:
    with server.server_beside() as (address, _):
        yield address


def bench(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["bench", "--concurrency", "2", "--requests", "3", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_a_table_and_writes_json(url: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    status, shown, _ = bench("--url", url, "--vocabulary", "0-0", "--ttft-slo-ms", "60000", "--json", str(path))
    assert status == 0
    assert "TTFT" in shown and "3 of 3 succeeded" in shown
    found = msgspec.json.decode(path.read_bytes(), type=Report)
    assert (found.model, found.succeeded, found.output_tokens) == ("tiny", 3, 12)
    assert found.goodput is not None and found.goodput.share == 1.0


def test_the_command_fails_where_no_request_succeeds(url: str) -> None:
    broken = str(int(How.BROKEN))
    status, shown, _ = bench("--url", url, "--vocabulary", f"{broken}-{broken}", "--model", "m", "--json", "-")
    assert status == 1
    assert json.loads(shown)["errors"] == {"http 500": 3}


def test_the_command_says_in_one_line_that_nobody_listens() -> None:
    status, _, said = bench("--url", "http://127.0.0.1:9")
    assert status == 1
    assert said.startswith("baton: ") and said.count("\n") == 1
