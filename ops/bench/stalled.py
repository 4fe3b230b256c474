"""What clients that never read cost those that do: ``python -m baton.ops.bench.stalled``.

A few streams are read twice, before and while many others are open whose clients read nothing; the gaps between the
deltas of the first are compared. The worker is scripted, so all that is measured is what everything around it does.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

import click
import msgspec

from baton.engine.states import STATE_NUMBERS
from baton.ipc.board import Board
from baton.ops.bench import loop
from baton.ops.bench.load import Plan, drive
from baton.ops.bench.report import percentile
from baton.ops.bench.server import Running, ServerFailed, scripted_server
from baton.ops.bench.stream import Outcome
from baton.ops.http import target
from baton.ops.terminal import out

#: a stalled reader is to be seen soon, and not let go while the others are measured
SETTINGS = {
    "BATON_LIMITS__SOCKET_SEND_BYTES_MAX": "4096",
    "BATON_LIMITS__MAILBOX_TOKENS_MAX": "64",
    "BATON_LIMITS__STALLED_S_MAX": "600",
    "BATON_KV_BLOCKS": "20000",
}
RECEIVE_BYTES = 2048
LONG_TOKENS = 4000
SETTLE_S_MAX = 120.0
REQUEST_S_MAX = 120.0


class StalledReport(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement; gaps are those between one delta and the next of the streams that are read, in ms."""

    reading: int
    stalled: int
    paused: int
    settle_s: float
    failed: int
    itl_p50_ms: float
    itl_p99_ms: float
    itl_p50_stalled_ms: float
    itl_p99_stalled_ms: float

    @property
    def ratio(self) -> float:
        """How much longer the 99th percentile is with the others there."""
        return self.itl_p99_stalled_ms / self.itl_p99_ms if self.itl_p99_ms else 0.0


async def read(running: Running, streams: int, output_tokens: int, seconds: float) -> tuple[list[float], int]:
    """The gaps of so many streams at a time, ascending, and how many requests failed."""
    outcomes: list[Outcome] = []
    plan = Plan(
        model=running.model,
        concurrency=streams,
        requests=None,
        seconds=seconds,
        prompt_tokens=16,
        output_tokens=output_tokens,
        vocabulary=range(1000, 20000),
        text=None,
        ignore_eos=True,
        timeout_s=REQUEST_S_MAX,
        seed=0,
    )
    await drive(target(running.url), plan, outcomes.append)
    gaps = sorted(gap for outcome in outcomes for gap in outcome.gaps_s)
    return gaps, sum(outcome.error is not None for outcome in outcomes)


@asynccontextmanager
async def stalled(running: Running, count: int) -> AsyncIterator[None]:
    """So many clients that ask for a long stream and read nothing of it."""
    current, place = asyncio.get_running_loop(), urlsplit(running.url)
    body = msgspec.json.encode(
        {"model": running.model, "prompt": [5], "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            client = socket.socket()
            sockets.append(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            client.setblocking(False)
            await current.sock_connect(client, (place.hostname, place.port))
            await current.sock_sendall(client, head + body)
        yield
    finally:
        for client in sockets:
            client.close()


async def paused(running: Running, count: int) -> int:
    """Wait until so many requests are paused, within bounds; how many are."""
    board = Board.open(Path(running.zmq.removeprefix("ipc://")).parent / "board", readonly=True)
    until, found = perf_counter() + SETTLE_S_MAX, 0
    try:
        while found < count and perf_counter() < until:
            await asyncio.sleep(0.05)
            found = sum(view.row.state == STATE_NUMBERS["paused"] for view in board.rows())
        return found
    finally:
        board.close()


async def measure(running: Running, streams: int, others: int, output_tokens: int, seconds: float) -> StalledReport:
    """Read without and with the others there."""
    await read(running, streams, output_tokens, seconds / 4)  # warm up
    alone, failed = await read(running, streams, output_tokens, seconds)
    began = perf_counter()
    async with stalled(running, others):
        found = await paused(running, others)
        settle_s = perf_counter() - began
        beside, failed_beside = await read(running, streams, output_tokens, seconds)
    return StalledReport(
        reading=streams,
        stalled=others,
        paused=found,
        settle_s=round(settle_s, 2),
        failed=failed + failed_beside,
        itl_p50_ms=_ms(alone, 50),
        itl_p99_ms=_ms(alone, 99),
        itl_p50_stalled_ms=_ms(beside, 50),
        itl_p99_stalled_ms=_ms(beside, 99),
    )


def _ms(gaps: list[float], percent: float) -> float:
    return round(percentile(gaps, percent) * 1e3, 3) if gaps else 0.0


@click.command()
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True, help="Streams that are read.")
@click.option(
    "--stalled", "others", type=click.IntRange(1), default=200, show_default=True, help="Streams that are not."
)
@click.option("--output-tokens", type=click.IntRange(2), default=256, show_default=True, help="Tokens an answer.")
@click.option("--seconds", type=click.FloatRange(0.1), default=8.0, show_default=True, help="Window for each reading.")
@click.option(
    "--step-ms", type=click.FloatRange(0), default=2.0, show_default=True, help="Time a step is made to take."
)
@click.option("--model", default="smollm2-135m", show_default=True, help="Model whose vocabulary is used.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    streams: int, others: int, output_tokens: int, seconds: float, step_ms: float, model: str, as_json: bool
) -> None:
    """Measure what clients that never read cost those that do."""
    try:
        with scripted_server(model, step_ms, SETTINGS) as running:
            found = loop.run(measure(running, streams, others, output_tokens, seconds))
    except ServerFailed as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(
            msgspec.json.encode({**msgspec.structs.asdict(found), "itl_p99_ratio": round(found.ratio, 3)}).decode()
        )
    else:
        terminal = out()
        terminal.print(f"{found.paused} of {found.stalled} stalled readers paused after {found.settle_s:g} s")
        terminal.print(
            f"gaps of {found.reading} streams that are read, in ms: p50 {found.itl_p50_ms}, p99 {found.itl_p99_ms}"
        )
        terminal.print(f"the same beside the stalled: p50 {found.itl_p50_stalled_ms}, p99 {found.itl_p99_stalled_ms}")
        terminal.print(f"p99 ratio {found.ratio:.2f}, failed {found.failed}")
    sys.exit(1 if found.failed or found.paused < found.stalled else 0)


if __name__ == "__main__":
    main()
