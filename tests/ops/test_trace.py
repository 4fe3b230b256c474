"""A trace is put together from what several processes kept, whole or damaged, and shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from baton.engine.effects import Span
from baton.engine.limits import Limits
from baton.ipc.tracing import Tracer
from baton.ops.cli import cli
from baton.ops.trace.story import find
from baton.ops.trace.waterfall import waterfall

TRACE = bytes(range(16))
REQUEST = b"\xab" * 16
MS = 1_000_000


def context(span_id: int, trace: bytes = TRACE) -> bytes:
    return trace + span_id.to_bytes(8, "big") + b"\x01"


def root(span_id: int, start_ms: int, end_ms: int, request: bytes = REQUEST, error: str | None = None) -> Span:
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.response.id": request.hex(),
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": "stop",
        "ratio": 0.5,
        "streamed": True,
    }
    return Span("chat", b"", start_ms * MS, end_ms * MS, attributes, error, span_id=context(span_id), server=True)


def state(name: str, parent: int, start_ms: int, end_ms: int, owner: str, trace: bytes = TRACE) -> Span:
    return Span(name, context(parent, trace), start_ms * MS, end_ms * MS, {"baton.owner": owner})


def write(directory: Path, role: str, *spans: Span) -> None:
    tracer = Tracer(role, 0, directory, 0, Limits(), {"process.pid": 7}, incarnation=1)
    for span in spans:
        tracer.emit(span)
    tracer.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two finished requests of one trace (the second is the later), one running one of another, and steps."""
    write(
        tmp_path,
        "frontend",
        state("received", 1, 0, 2, "frontend-0#1"),
        root(1, 0, 100),
        state("received", 2, 50, 60, "frontend-0#1"),
        root(2, 50, 120, b"\xcd" * 16, "no room"),
        state("received", 9, 0, 5, "frontend-0#1", b"z" * 16),
    )
    write(tmp_path, "tokenizer", state("tokenizing", 1, 2, 10, "tokenizer-0#1"))
    steps = [
        Span("step", b"", at * MS, (at + 10) * MS, {}, links=(context(1), context(2), context(3, b"y" * 16)))
        for at in (20, 30, 40)
    ]
    write(tmp_path, "scheduler", *steps, state("decoding", 1, 20, 90, "scheduler-0#1"))
    return tmp_path


def test_last_is_the_request_that_ended_last(run: Path) -> None:
    (story,) = find(run, "last")
    assert story.root is not None and story.root.span.error == "no room"
    assert [stored.span.name for stored in story.states] == ["received"]


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "resp_", "CHATCMPL-"])
def test_a_request_is_found_by_its_id_with_any_prefix(run: Path, prefix: str) -> None:
    (story,) = find(run, prefix + REQUEST.hex())
    assert story.span_id == "0000000000000001"
    assert [(stored.process, stored.span.name) for stored in story.states] == [
        ("frontend-0#1", "received"),
        ("tokenizer-0#1", "tokenizing"),
        ("scheduler-0#1", "decoding"),
    ]
    assert len(story.steps) == 3
    assert story.coverage() == pytest.approx(0.8)


@pytest.mark.parametrize("form", ["{}", "00-{}-0000000000000001-01"])
def test_a_trace_id_stands_for_all_its_requests(run: Path, form: str) -> None:
    assert [story.span_id[-1] for story in find(run, form.format(TRACE.hex()))] == ["1", "2"]


def test_a_running_request_is_shown_without_its_root(run: Path) -> None:
    (story,) = find(run, (b"z" * 16).hex())
    assert story.root is None
    assert (story.start_ns, story.end_ns) == (0, 5 * MS)


@pytest.mark.parametrize("which", ["f" * 32, "nonsense", ""])
def test_what_is_not_on_record_is_a_lookup_error(run: Path, which: str) -> None:
    with pytest.raises(LookupError):
        find(run, which)


def test_torn_tails_and_garbage_are_skipped(run: Path) -> None:
    for path in (run / "traces").iterdir():
        with path.open("ab") as file:
            file.write(b'\xff\x00 junk\n["span",1]\n["span","' + TRACE.hex().encode() + b'","00')
    (story,) = find(run, REQUEST.hex())
    assert len(story.states) == 3


def test_no_store_at_all_is_explained(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="OTLP collector"):
        find(tmp_path, "last")


def shown(run: Path, which: str, steps: bool = False) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    for story in find(run, which):
        console.print(waterfall(story, steps))
    return console.export_text()


def test_the_waterfall_shows_states_owners_times_and_coverage(run: Path) -> None:
    text = shown(run, REQUEST.hex())
    assert "chat tiny  100.00 ms  stop  3 tokens in, 5 out" in text
    decoding = next(line for line in text.splitlines() if line.startswith("decoding"))
    assert decoding.split()[1:6] == ["scheduler-0#1", "20.00", "ms", "70.00", "ms"]
    assert "█" * 20 in decoding
    assert "3 steps" in text and "80.0 % of 100.00 ms accounted for" in text
    assert shown(run, REQUEST.hex(), steps=True).count("step ") == 3
    assert "no room" in shown(run, "last")


def test_the_command_prints_json_that_is_otlp(run: Path) -> None:
    result = CliRunner().invoke(cli, ["trace", REQUEST.hex(), "--json", "--run-directory", str(run)])
    assert result.exit_code == 0, result.output
    parts = json.loads(result.stdout)["resourceSpans"]
    spans = {span["name"]: span for part in parts for scope in part["scopeSpans"] for span in scope["spans"]}
    assert len(parts) == 3
    assert spans["chat"]["kind"] == 2 and spans["chat"]["endTimeUnixNano"] == "100000000"
    assert spans["decoding"]["parentSpanId"] == spans["chat"]["spanId"]
    values = {pair["key"]: pair["value"] for pair in spans["chat"]["attributes"]}
    assert values["gen_ai.usage.output_tokens"] == {"intValue": "5"}
    assert values["streamed"] == {"boolValue": True} and values["ratio"] == {"doubleValue": 0.5}


def test_the_command_says_in_one_line_what_is_missing(run: Path) -> None:
    result = CliRunner().invoke(cli, ["trace", "f" * 32, "--run-directory", str(run)])
    assert result.exit_code == 1
    assert result.stderr.startswith("baton: nothing on record") and result.stderr.count("\n") == 1
    assert CliRunner().invoke(cli, ["trace", "--run-directory", "/nonexistent"]).exit_code == 1
