"""A start that hangs: real processes that stop for good in one phase are dumped, killed and started again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.system.server import Server

#: read by every Python that starts: makes the worker hang where it would make its runner, as often as the file says,
#: and the tokenizer slow to start
HANGS = """
import os, sys, time
argv = getattr(sys, "orig_argv", [])
if argv and argv[-1].endswith("worker-0.json"):
    from baton.workers import gpu
    run, file = gpu.run, os.environ["HANGS"]
    def make(settings, card, phase):
        with open(file) as left:
            times = int(left.read())
        if times:
            with open(file, "w") as left:
                left.write(str(times - 1))
            phase(os.environ["HANGS_IN"])
            time.sleep(3600)
        return gpu.make_runner(settings, card, phase)
    gpu.run = lambda process: run(process, make)
if argv and argv[-1].endswith("tokenizer-0.json"):
    time.sleep(float(os.environ["TOKENIZER_STARTS_S"]))
"""


def hanging(tmp_path: Path, times: int, phase: str, starts_s: float = 0, **limits: str) -> Server:
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    (tmp_path / "hangs").write_text(str(times))
    environment = {
        "PYTHONPATH": ":".join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", "")))),
        "HANGS": str(tmp_path / "hangs"),
        "HANGS_IN": phase,
        "TOKENIZER_STARTS_S": str(starts_s),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "BATON_WORKER": "scripted",
        **{f"BATON_LIMITS__{name.upper()}": value for name, value in limits.items()},
    }
    return Server(environment=environment)


@pytest.mark.parametrize("phase", ["loading", "warming"])
async def test_a_worker_that_hangs_in_a_phase_is_dumped_and_the_next_one_serves(tmp_path: Path, phase: str) -> None:
    async with hanging(tmp_path, 1, phase, **{f"{phase}_s_max": "1"}) as server:
        assert server.places()["worker"].incarnation == 2
        answer = await server.complete(prompt=[1, 2, 3], max_tokens=4)
        assert answer["usage"]["completion_tokens"] == 4
        assert f"it has been {phase} for" in server.log()
        (dump,) = (tmp_path / "state" / "baton" / "dumps").iterdir()
        text = dump.read_text()
        assert f"worker-0: it has been {phase} for" in text
        assert "sitecustomize.py" in text, "the stack shows where it hung"


async def test_a_dump_kills_nobody_who_is_only_about_to_start(tmp_path: Path) -> None:
    async with hanging(tmp_path, 1, "loading", starts_s=4, loading_s_max="1") as server:
        places = server.places()
        assert (places["worker"].incarnation, places["tokenizer"].incarnation) == (2, 1)
        assert "it has been loading for" in server.log()


async def test_a_worker_that_hangs_every_time_ends_the_server_with_the_phase_in_its_last_line(tmp_path: Path) -> None:
    server = await hanging(tmp_path, 9, "loading", loading_s_max="0.5", restarts_max="1").launch()
    try:
        assert await server.wait() == 1
        last = server.log().strip().splitlines()[-1]
        assert last.startswith("baton: worker-0 failed to start 2 times, the last time: it has been loading for")
        assert "limits.loading_s_max is 0.5" in last
    finally:
        await server.__aexit__()
