"""The comparison's parts: the table of servers, the file of requests, the arithmetic of tokens, capacity and ratios."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from baton.ops.bench.compare.measured import Comparison, Measured, token_gaps
from baton.ops.bench.compare.play import capacity
from baton.ops.bench.compare.ratios import GOODPUT, TTFT_P50, better
from baton.ops.bench.compare.requests import BadRequests, Part, Shape, Workload, make, read, write
from baton.ops.bench.compare.servers import EXAMPLE, BadTable, chosen, read_table
from baton.ops.bench.compare.usage import Meter, Usage
from baton.ops.bench.report import Objectives, report
from baton.ops.bench.stream import Outcome

TRACE = Path(__file__).parent.parent / "data" / "azure-conversation-2023.csv.gz"


def shape(**changed: Any) -> Shape:
    given: dict[str, Any] = {
        "workloads": ("single", "many", "prompt", "prefix", "load", "rate"),
        "loads": (0.5, 1.1),
        "rates": (2.0,),
        "repeats": 3,
        "arrivals": 200,
        "trace": TRACE,
        "context_tokens": 1024,
        "vocabulary": range(1000, 20000),
        "seed": 1,
    }
    return Shape(**(given | changed))


def test_the_table_that_ships_can_be_read_and_each_row_filled(tmp_path: Path) -> None:
    table = read_table(EXAMPLE)
    assert {"baton", "baton-int8", "vllm"} <= set(table)
    assert [server.name for server in chosen(table, [], [])] == ["baton"]
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert [server.name for server in chosen(table, ["baton-int8"], [])] == ["baton-int8"]
    found = chosen(table, [], [("llama-*", "venv", str(tmp_path)), ("llama-q8_0", "model", "m.gguf")])
    assert [server.name for server in found] == ["baton", "llama-q8_0"]
    command = found[1].at(81).command
    assert command[0] == str(program) and "m.gguf" in command and "81" in command


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[a]\ncommand = ["x"]\nserved = "m"\ncolour = 1', r"server 'a': .*unknown field `colour`"),
        ('[a]\ncommand = ["x"]', "server 'a': .*missing required field `served`"),
        ('[a]\ncommand = "x"\nserved = "m"', r"server 'a': .*\$\.command"),
        ('[a]\ncommand = []\nserved = "m"', "server 'a': it needs a command"),
        ('[a]\ncommand = ["{x"]\nserved = "m"', "server 'a': expected '}'"),
        ('[a]\ncommand = ["x"]\nserved = "m"\nengine = "("', "server 'a': .*unterminated"),
        ('[a]\nlike = "b"', "server 'a': like = 'b' names no other"),
        ("a = 1", "server 'a': "),
        ("[a", "servers.toml: "),
        ("", "no server in it"),
    ],
)
def test_a_bad_table_is_told_so_by_server_and_field(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "servers.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadTable, match=words):
        read_table(path)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTable, match=r"nowhere\.toml: No such file"):
        read_table(tmp_path / "nowhere.toml")


def test_requests_are_the_same_for_the_same_seed_and_survive_the_file(tmp_path: Path) -> None:
    parts = list(make(shape()))
    assert parts == list(make(shape()))
    assert [part.workload for part in parts] == [part.workload for part in make(shape(seed=2))]
    assert parts != list(make(shape(seed=2)))
    write(tmp_path / "file", iter(parts))
    assert read(tmp_path / "file") == parts


def test_lengths_keep_to_the_context_and_are_the_same_at_every_load() -> None:
    parts = {part.workload.name: part for part in make(shape())}
    drawn = [parts[name] for name in ("capacity", "load 50 %", "load 110 %", "2 requests/s")]

    def lengths(part: Part) -> list[tuple[int, int, float]]:
        return [(len(one.prompt), one.output_tokens, one.gap) for one in part.requests]

    assert all(lengths(part) == lengths(drawn[0]) for part in drawn)
    assert all(prompt + output <= 1024 for prompt, output, _ in lengths(drawn[0]))
    gaps = [gap for _, _, gap in lengths(drawn[0])]
    assert 0.8 < sum(gaps) / len(gaps) < 1.2


def test_no_prompt_is_sent_twice() -> None:
    prompts = [tuple(request.prompt[:16]) for part in make(shape(arrivals=20)) for request in part.requests]
    shared = [prompt for prompt in set(prompts) if len(prompt) == 16 and prompts.count(prompt) > 1]
    assert len(shared) == 1 and prompts.count(shared[0]) == 4


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"type": "workload", "name": "a", "concurrency": 1}\n{"type', "file:2: "),
        ('{"type": "request", "prompt": [1], "output_tokens": 1}', "file:1: a request before any workload"),
        ('{"type": "workload", "name": "a"}', "file:1: workload 'a' needs one of"),
        ('{"type": "workload", "name": "a", "load": 0.5}', "file:1: a load before the workload 'capacity'"),
        ('{"type": "workload", "name": "a", "rate": 1, "colour": 1}', "file:1: .*colour"),
        ('{"type": "workload", "name": "a", "rate": 1}', "no requests for a"),
        ("\n".join(['{"type": "workload", "name": "a", "rate": 1}'] * 2), "file:2: .* twice"),
        (
            '{"type": "workload", "name": "a", "rate": 1}\n{"type": "request", "prompt": [], "output_tokens": 1}',
            "file:2: a request without a prompt",
        ),
        ("", "no requests for anything"),
    ],
)
def test_a_bad_file_of_requests_is_told_so_by_line(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "file"
    path.write_text(lines, encoding="utf-8")
    with pytest.raises(BadRequests, match=words):
        read(path)


def outcome(started: float, ended: float, **more: Any) -> Outcome:
    return Outcome(started, ended, first=started + 0.1, last=ended, deltas=2, tokens=2, **more)


def test_a_gap_counts_for_each_token_of_its_delta() -> None:
    told = Outcome(0.0, gaps_s=array("d", [0.3, 0.4]), sizes=array("I", [3, 1]), deltas=3, tokens=5)
    assert list(token_gaps(told)) == pytest.approx([0.1, 0.1, 0.1, 0.4])
    untold = Outcome(0.0, gaps_s=array("d", [0.2, 0.4]), sizes=array("I", [0, 0]), deltas=3, tokens=6)
    assert list(token_gaps(untold)) == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_capacity_is_what_a_full_loop_keeps_up() -> None:
    # Two at a time, two seconds each: one a second, whatever the last ones still take.
    full = [outcome(at, at + 2.0) for at in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    full[0] = outcome(0.0, 1.0)
    assert capacity(full) == pytest.approx(1.0, abs=0.1)
    assert capacity([outcome(0.0, 2.0), outcome(0.0, 4.0)]) == pytest.approx(0.5)
    assert capacity([outcome(0.0, 1.0, error="timeout")]) == 0.0


def measured(server: str, number: int, ttft_s: float, good: int) -> Measured:
    outcomes = [outcome(0.0, 1.0) for _ in range(good)] + [outcome(0.0, 9.0, error="timeout") for _ in range(4 - good)]
    for one in outcomes:
        one.first = ttft_s
    found = report(outcomes, 2.0, "http://h", "m", 1, Objectives(ttft_ms=5e3), 0.0)
    usage = Usage(engine="e", engine_cpu_s=1.0, outside_cpu_s=0.5, memory_bytes_max=1, others_share=0.0, processes={})
    return Measured(
        server=server,
        round=number,
        workload="load 50 %",
        rate=2.0,
        load=0.5,
        capacity=4.0,
        report=found,
        token_ms=None,
        usage=usage,
    )


def test_a_ratio_compares_within_a_round_and_says_how_many_times_better() -> None:
    found = Comparison(machine={}, requests="", timeout_s=1.0, objectives=Objectives(), rounds=3)
    found.measured = [measured("a", 1, 0.1, 4), measured("b", 1, 0.2, 2), measured("a", 2, 0.4, 4)]
    found.measured += [measured("b", 2, 0.2, 4), measured("b", 3, 0.2, 4)]
    times = better(found, TTFT_P50, "load 50 %", "a", "b")
    assert times is not None and (times.least, times.most, times.count) == (0.5, 2.0, 2)
    good = better(found, GOODPUT, "load 50 %", "a", "b")
    assert good is not None and (good.least, good.most) == (1.0, 2.0)
    assert found.measured[1].timeout_share == 0.5 and GOODPUT.value(found.measured[1]) == 1.0
    found.measured = [measured("a", 1, 0.1, 4), measured("b", 1, 0.2, 0)]
    never = better(found, GOODPUT, "load 50 %", "a", "b")
    assert never is not None and never.median == math.inf


def test_processor_time_and_memory_are_those_of_the_whole_family() -> None:
    spin = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    code = f"import subprocess, sys\nsys.stdin.readline()\nchild = subprocess.Popen([sys.executable, '-c', {spin!r}"
    code += (
        " + 'print(1, flush=True)\\ninput()'], stdin=subprocess.PIPE)\nsys.stdin.readline()\nchild.communicate(b'x')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        meter = Meter(process.pid, "process_time")
        meter.start()
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        usage = meter.stop()
        process.stdin.write(b"\n")
        process.stdin.close()
    # The parent's own command line has the child's in it. Where the interpreter lies is not told.
    assert usage.engine.startswith(f"{Path(sys.executable).name} -c ") and "/bin/" not in usage.engine
    assert usage.engine.count("python") == 2 and 0.2 < usage.engine_cpu_s < 5.0 and usage.outside_cpu_s < 0.01
    assert usage.memory_bytes_max > 1 << 20 and len(usage.processes) == 2


def test_without_a_pattern_the_busiest_process_is_the_model() -> None:
    meter = Meter(os.getpid(), "")
    meter.start()
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    usage = meter.stop()
    assert usage.engine_cpu_s > 0.05 and usage.engine and 0.0 <= usage.others_share <= 1.0


def test_a_workload_is_sent_in_one_way() -> None:
    with pytest.raises(ValueError, match="needs one of"):
        Workload(name="a", concurrency=1, rate=1.0)
