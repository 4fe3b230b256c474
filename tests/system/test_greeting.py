"""The commands a ready server prints work when they are pasted."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.system.server import Server


async def paste(line: str) -> str:
    """What a shell prints for the command of a door's line."""
    command = line.split(None, 1)[1].replace("sleep 20", "sleep 3").replace(".venv/bin/python", sys.executable)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE, env=environment)
    out, _ = await shell.communicate()
    assert shell.returncode == 0
    return out.decode()


async def test_one_command_a_door_streams_an_answer() -> None:
    async with Server("--worker", "scripted") as server:
        http, websocket, python = [await paste(line) for line in server.lines[1:]]
        assert '"content":' in http and http.rstrip().endswith("data: [DONE]")
        assert "response.output_text.delta" in websocket
        assert "response.completed" in websocket or "response.incomplete" in websocket
        assert len(python) > 1
