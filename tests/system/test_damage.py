"""A ring damaged under a living server: its writer and the reader that lost tokens are replaced, no answer changes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from baton.ipc.ring import CURSORS, WRITTEN, Ring
from baton.ipc.rundir import live_instances
from tests.system.server import Server
from tests.system.test_death import ids

#: the watch would kill a stopped process before its ring is damaged
ENVIRONMENT = {"BATON_SCRIPTED_STEP_MS": "4", "BATON_LIMITS__WATCH_INTERVAL_S": "60"}
DETOKENIZER = 1


def turn_over_unread(run: Path) -> bool:
    """Damage the first frame that the detokenizer has not read; False if there is none yet."""
    ring = Ring.open(run / "tokens")
    try:
        cursor = ring.words[CURSORS + DETOKENIZER]
        unread = ring.words[WRITTEN] > cursor
        if unread:
            ring.data[(cursor + 20) % ring.capacity] ^= 1
        return bool(unread)
    finally:
        ring.close()


async def test_a_damaged_token_ring_costs_a_pause_and_no_token(tmp_path: Path) -> None:
    async with Server("--worker", "scripted", environment={**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path)}) as server:
        ask = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "seed": 3, "return_token_ids": True}
        whole = await server.complete(**ask)
        (run,) = live_instances(server.base)
        chunks = []
        async for chunk in server.stream(**ask):
            chunks.append(chunk)
            if len(chunks) == 10:
                server.kill("detokenizer", signal.SIGSTOP)
                async with asyncio.timeout(5):
                    while not turn_over_unread(run):
                        await asyncio.sleep(0.001)
                server.kill("detokenizer", signal.SIGCONT)
        assert ids(chunks) == whole["choices"][0]["token_ids"]
        await server.until_ready()
        places = server.places()
        assert {name: place.incarnation for name, place in places.items()} == {
            **dict.fromkeys(places, 1),
            "worker": 2,
            "detokenizer": 2,
        }
        assert "ring_damaged" in server.log()
