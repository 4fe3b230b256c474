"""A worker that finds no memory for a step: a line in the log, a new worker, and no answer the worse for it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.system.server import Server

#: runs in every process of the server; the file says that it happened already
STARVE_ONCE = """
import pathlib

import baton.workers.fake as fake


class Starved(fake.ScriptedRunner):
    def step(self, rows):
        mark = pathlib.Path(__file__).with_name("starved")
        if len(rows) > 1 and not mark.exists() and any(row.position == 40 for row in rows):
            mark.touch()
            raise {error}
        return super().step(rows)


fake.ScriptedRunner = Starved
"""
ERRORS = {"python": "MemoryError", "device": "RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB.')"}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
async def test_a_step_without_memory_costs_a_worker_and_no_answer(tmp_path: Path, error: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(STARVE_ONCE.format(error=error))
    environment = {"BATON_SCRIPTED_STEP_MS": "2", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ask = {"prompt": [5, 6, 7], "max_tokens": 120, "ignore_eos": True, "return_token_ids": True}
    async with Server("--worker", "scripted", environment=environment) as server:
        answers = await asyncio.gather(*(server.complete(seed=seed, **ask) for seed in range(4)))
        assert (tmp_path / "starved").exists()
        again = await asyncio.gather(*(server.complete(seed=seed, **ask) for seed in range(4)))
        assert server.places()["worker"].incarnation == 2
        (line,) = [line for line in server.log().splitlines() if "out_of_memory" in line]
    for answer, same in zip(answers, again, strict=True):
        assert answer["choices"][0]["token_ids"] == same["choices"][0]["token_ids"]
        assert len(answer["choices"][0]["token_ids"]) == 120
    assert "rows" in line
    assert "tokens" in line
