"""What a long prompt costs those who are being answered: ``python -m baton.ops.bench.interference``.

A few streams decode when one long prompt arrives. In turn on two servers of the real model: one that computes prompts
in chunks, one that computes each whole. The largest gap between two tokens of the streams, and the time to the first
token of the prompt itself, are compared.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import click
import msgspec
from rich.table import Table

from baton.ops.bench import loop
from baton.ops.bench.server import Running, ServerFailed, server
from baton.ops.bench.stream import Outcome, ask
from baton.ops.http import target
from baton.ops.terminal import out

REQUEST_S_MAX = 300.0
#: as long as the longest prompt: a step takes it whole (the worker measures the largest step when it starts)
WHOLE_TOKENS = "2048"
VOCABULARY = range(1000, 20000)


class Arrival(msgspec.Struct, frozen=True):
    """One arrival of the prompt: the streams' largest gap, and the prompt's time to first token, in ms."""

    gap_ms: float
    ttft_ms: float


class InterferenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the arrivals; the ratios are chunked over whole."""

    streams: int
    prompt_tokens: int
    chunked: list[Arrival]
    whole: list[Arrival]
    gap_ratio: float
    ttft_ratio: float


def body(model: str, seed: int, prompt_tokens: int, output_tokens: int) -> bytes:
    """A request of random token ids, the same for the same seed."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": random.Random(seed).choices(VOCABULARY, k=prompt_tokens),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )


async def arrival(running: Running, seed: int, streams: int, prompt_tokens: int, output_tokens: int) -> Arrival:
    """Let the streams decode, then send the prompt."""
    where = target(running.url)

    def send(number: int, prompt: int, output: int) -> asyncio.Task[Outcome]:
        request = body(running.model, 1000 * seed + number, prompt, output)
        return asyncio.create_task(ask(where, request, REQUEST_S_MAX, output))

    decoding = [send(number, 16, output_tokens) for number in range(streams)]
    first = send(streams, 16, 8)  # as long as this takes, all of them have begun
    outcomes = [await first, await send(streams + 1, prompt_tokens, 1)]
    long = outcomes[1]
    outcomes += [await task for task in decoding]
    wrong = [f"{outcome.error}: {outcome.detail}" for outcome in outcomes if outcome.error is not None]
    if wrong:
        raise ServerFailed(f"a request failed: {wrong[0]}")
    if any(outcome.ended < long.first for outcome in outcomes[2:]):
        raise ServerFailed("the streams ended before the prompt was computed: give them more tokens")
    gaps = [gap for outcome in outcomes[2:] for gap in outcome.gaps_s]
    return Arrival(round(max(gaps) * 1e3, 1), round(long.ttft_s * 1e3, 1))


def measure(
    servers: dict[str, Running], rounds: int, streams: int, prompt_tokens: int, output_tokens: int
) -> dict[str, list[Arrival]]:
    """In turn at each server; the first round warms up and is not counted."""
    found: dict[str, list[Arrival]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        for name, running in servers.items():
            found[name].append(loop.run(arrival(running, number, streams, prompt_tokens, output_tokens)))
    return {name: arrivals[1:] for name, arrivals in found.items()}


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="Model to serve.")
@click.option("--streams", type=click.IntRange(1), default=4, show_default=True, help="Streams that decode.")
@click.option("--prompt-tokens", type=click.IntRange(2), default=1500, show_default=True, help="The long prompt.")
@click.option("--output-tokens", type=click.IntRange(2), default=160, show_default=True, help="Tokens a stream.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Arrivals counted at each server.")
@click.option("--chunk-tokens", type=click.IntRange(1), help="Most tokens a step; the server's default otherwise.")
@click.option("--itl-target-ms", type=click.FloatRange(1), help="The chunked server's target; its default otherwise.")
@click.option("--json", "json_path", metavar="PATH", help="Write the report as JSON.")
def main(
    model: str,
    streams: int,
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    chunk_tokens: int | None,
    itl_target_ms: float | None,
    json_path: str | None,
) -> None:
    """Measure what a long prompt costs those who are being answered, in chunks and whole."""
    chunked = {"BATON_MAX_STEP_TOKENS": str(chunk_tokens)} if chunk_tokens is not None else {}
    if itl_target_ms is not None:
        chunked["BATON_ITL_TARGET_MS"] = str(itl_target_ms)
    whole = {"BATON_MAX_STEP_TOKENS": WHOLE_TOKENS, "BATON_ITL_TARGET_MS": "0"}
    try:
        with ExitStack() as stack:
            servers = {
                "chunked": stack.enter_context(server(model, chunked)),
                "whole": stack.enter_context(server(model, whole)),
            }
            found = measure(servers, rounds, streams, prompt_tokens, output_tokens)
    except ServerFailed as error:
        raise click.ClickException(str(error)) from None
    middle = {
        name: Arrival(median(a.gap_ms for a in all_), median(a.ttft_ms for a in all_)) for name, all_ in found.items()
    }
    report = InterferenceReport(
        streams=streams,
        prompt_tokens=prompt_tokens,
        chunked=found["chunked"],
        whole=found["whole"],
        gap_ratio=round(middle["chunked"].gap_ms / middle["whole"].gap_ms, 3),
        ttft_ratio=round(middle["chunked"].ttft_ms / middle["whole"].ttft_ms, 3),
    )
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "largest gap ms", "prompt's TTFT ms"):
        shown.add_column(column, justify="right")
    for name, one in middle.items():
        shown.add_row(name, f"{one.gap_ms:,.0f}", f"{one.ttft_ms:,.0f}")
    shown.add_row("ratio", f"{report.gap_ratio:.2f}", f"{report.ttft_ratio:.2f}", style="bold")
    out().print(shown)
    if json_path is not None:
        Path(json_path).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
