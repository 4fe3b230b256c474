"""The comparison of servers, whole: two small programs, every workload, what is written, and what goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from click.testing import CliRunner, Result

from baton.ops.bench.compare import plot
from baton.ops.bench.compare.__main__ import main
from baton.ops.bench.compare.measured import Comparison
from baton.ops.bench.compare.requests import read

FAKE = Path(__file__).with_name("fake_openai.py")
TRACE = "gap_ms,context_tokens,generated_tokens\n0,30,6\n5,12,4\n5,400,900\n"


def table(path: Path, **rows: str) -> Path:
    """A table whose rows are "HOW" or "HOW, more TOML"."""
    text = ""
    for name, row in rows.items():
        how, _, more = row.partition(",")
        command = json.dumps(["{python}", str(FAKE), "{port}", how])
        text += f'[{name}]\ncommand = {command}\nserved = "tiny"\n{more.strip()}\n'
    path.write_text(text, encoding="utf-8")
    return path


def left_over() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline", "status"])
    alive = [one for one in found if one.info["cmdline"] and one.info["status"] != psutil.STATUS_ZOMBIE]
    return [one for one in alive if str(FAKE) in " ".join(one.info["cmdline"])]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen"))

    def call(rows: dict[str, str], *arguments: str) -> Result:
        path = table(tmp_path / "servers.toml", **rows)
        flags = ["--servers", str(path), "--logs", str(tmp_path / "logs"), "--repeats", "2", *arguments]
        return CliRunner().invoke(main, flags)

    return call


def bodies(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "seen").read_text(encoding="utf-8").splitlines()]


def test_servers_take_turns_and_get_the_same_requests(run: object, tmp_path: Path) -> None:
    assert callable(run)
    (tmp_path / "trace.csv").write_text(TRACE, encoding="utf-8")
    rows = {
        "ours": 'well, token_ids = true\nrequest = { ignore_eos = true }\nengine = "fake_openai"',
        "theirs": 'well, token_ids = true\nenvironment = { FAKE_PER_DELTA = "4", FAKE_IDS = "1" }',
    }
    written = tmp_path / "found.json"
    more = ["--trace", str(tmp_path / "trace.csv"), "--arrivals", "8", "--context-tokens", "64", "--rate", "200"]
    outputs = ["--json", str(written), "--markdown", str(tmp_path / "found.md"), "--requests", str(tmp_path / "file")]
    done = run(rows, "--rounds", "2", *more, *outputs)
    assert done.exit_code == 0, done.output
    found = msgspec.json.decode(written.read_bytes(), type=Comparison)

    assert [(start.server, start.round) for start in found.starts] == [
        ("ours", 1),
        ("theirs", 1),
        ("ours", 2),
        ("theirs", 2),
    ]
    assert found.workloads() == [
        *("single", "many", "prompt", "prefix, first", "prefix"),
        *("capacity", "load 50 %", "load 80 %", "load 110 %", "200 requests/s"),
    ]
    for one in found.measured:
        assert one.report.succeeded == one.report.requests and one.report.errors == {} == one.report.doubts
        assert one.usage.engine and one.usage.memory_bytes_max > 1 << 20
        if one.load:
            assert one.capacity and one.rate == pytest.approx(one.load * one.capacity)
    assert {one.rate for one in found.measured if one.workload == "200 requests/s"} == {200.0}
    assert [one.report.tokens_per_delta for one in found.of("ours", "single")] == [1.0, 1.0]
    assert [one.report.tokens_per_delta for one in found.of("theirs", "single")] == [4.0, 4.0]

    sent = bodies(tmp_path)
    a_round = len(sent) // 4
    ours = [{name: value for name, value in body.items() if name != "ignore_eos"} for body in sent[:a_round]]
    # Those sent at once may arrive in any order.
    assert sorted(ours, key=json.dumps) == sorted(sent[a_round : 2 * a_round], key=json.dumps)
    assert all(body["ignore_eos"] for body in sent[:a_round]) and "ignore_eos" not in sent[a_round]
    assert sum(len(part.requests) for part in read(tmp_path / "file")) == a_round

    page = (tmp_path / "found.md").read_text(encoding="utf-8")
    assert page == done.stdout and "theirs" in page and "goodput" in page and "Errors" not in page
    again = CliRunner().invoke(main, ["--from", str(written), "--baseline", "theirs"])
    assert again.exit_code == 0 and "How many times better theirs does" in again.stdout
    assert not left_over()


def test_a_server_that_takes_no_ids_gets_as_many_words(run: object, tmp_path: Path) -> None:
    assert callable(run)
    done = run({"worded": "well"}, "--workload", "prefix", "--rounds", "1")
    assert done.exit_code == 0, done.output
    prompts = [str(body["prompt"]) for body in bodies(tmp_path) if body["max_tokens"] == 16][-3:]
    assert {len(prompt.split()) for prompt in prompts} == {664}
    assert len({tuple(prompt.split()[:600]) for prompt in prompts}) == 1 and len(set(prompts)) == 3


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("die", ("broken: ended with status 1 while starting", "the weights are not there")),
        ("orphan", ("broken: ended with status 1 while starting",)),
        ("unready, start_s_max = 0.8", ("broken: GET /v1/models did not give 200 within 0.8 s",)),
        ("refuse", ("broken: a request of 'warm-up, one' failed: http 404", "no such model")),
        ("fall", ("broken: died during 'single'",)),
        ('well, engine = "nothing"', ("broken: no process of it matches engine = 'nothing'",)),
        ('well, version = ["{python}", "-c", "import nowhere"]', ("broken: ", "No module named 'nowhere'")),
    ],
)
def test_a_server_that_fails_is_named_with_what_it_said(run: object, how: str, words: tuple[str, ...]) -> None:
    assert callable(run)
    done = run({"broken": how}, "--workload", "single", "--rounds", "1")
    assert done.exit_code == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert not left_over()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_comparison_that_is_stopped_ends_its_server(tmp_path: Path, number: int) -> None:
    path = table(tmp_path / "servers.toml", slow="unready")
    command = [sys.executable, "-m", "baton.ops.bench.compare", "--servers", str(path), "--logs", str(tmp_path)]
    with subprocess.Popen([*command, "--workload", "single"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None and b"slow starts" in process.stderr.readline()
        until = time.monotonic() + 20
        while not left_over() and time.monotonic() < until:
            pass
        assert left_over()
        process.send_signal(number)
        assert process.wait(20) == 1 and b"Aborted" in process.stderr.read()
    assert not left_over()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--server", "nobody"], "no server 'nobody' in the table, which has: one, peer"),
        (["--server", "peer"], "peer: nothing says venv; give --set peer.venv=…"),
        (["--peer", "peer=/nowhere/at/all"], "peer: no such directory: /nowhere/at/all"),
        (["--peer", f"peer={Path(__file__).parent}"], "peer: no such program: "),
        (["--peer", "peer"], "'peer' is not NAME=VALUE"),
        (["--set", "one=3"], "'one=3' is not NAME.PLACEHOLDER=VALUE"),
        (["--set", "one.colour=red"], "one: its command has no place for {colour}"),
        (["--model", "other=x"], "no server is called 'other'"),
        (["--workload", "load"], "give --trace, or other --workload"),
        (["--workload", "load", "--trace", str(Path(__file__))], "is no trace"),
        (["--vocabulary", "9"], "--vocabulary must be FROM-TO"),
        (["--requests", str(FAKE)], "fake_openai.py is there and says what is sent; --repeats would have no effect"),
        (["--from", str(FAKE)], "--from measures nothing; logs, repeats, table would have no effect"),
        (["--baseline", "peer", "--workload", "prefix"], "--baseline peer: only these are measured: one"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(tmp_path: Path, arguments: list[str], words: str) -> None:
    rows = {"one": "die", "peer": 'x, environment = { A = "{venv}" }'}
    path = table(tmp_path / "servers.toml", **rows)
    peer = path.read_text(encoding="utf-8").rpartition("[peer]")
    path.write_text(f"{peer[0]}[peer]{peer[2].replace('{python}', '{venv}/bin/serve')}", encoding="utf-8")
    flags = ["--servers", str(path), "--logs", str(tmp_path / "logs"), "--repeats", "1"]
    done = CliRunner().invoke(main, [*flags, *arguments])
    assert done.exit_code == 1 and words in done.stderr, done.stderr
    assert "ended with status" not in done.stderr


def test_without_matplotlib_a_plot_is_refused_before_anything_starts(
    run: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(run)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run({"one": "die"}, "--plot", str(tmp_path / "x.svg"))
    assert done.exit_code == 1 and "the plot needs matplotlib" in done.stderr and "status" not in done.stderr


def test_a_plot_is_drawn_or_what_it_lacks_is_said(run: object, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert callable(run)
    written = tmp_path / "found.json"
    (tmp_path / "trace.csv").write_text(TRACE, encoding="utf-8")
    for arguments in (["--workload", "prefix"], ["--workload", "rate", "--rate", "50", "--rate", "100"]):
        more = ["--trace", str(tmp_path / "trace.csv"), "--arrivals", "4", "--context-tokens", "32"]
        done = run({"one": "well"}, "--rounds", "1", "--json", str(written), *arguments, *more)
        assert done.exit_code == 0, done.output
        found = msgspec.json.decode(written.read_bytes(), type=Comparison)
        if "rate" in arguments:
            plot.plot(found, tmp_path / "x.svg")
            assert (tmp_path / "x.svg").stat().st_size > 1000
            with pytest.raises(plot.NoPlot, match=r"x\.odd"):
                plot.plot(found, tmp_path / "x.odd")
        else:
            with pytest.raises(plot.NoPlot, match="no workload with a load or a rate"):
                plot.plot(found, tmp_path / "x.svg")
