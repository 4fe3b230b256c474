"""What a shared prefix saves: ``python -m baton.ops.bench.prefix``.

One server of the real model. *Warm* is a prompt whose long prefix is cached and whose end is new; *short* is a cold
prompt that is only as long as what is not cached of the warm one: its end, and what of the prefix fills no block;
*cold* is the whole length with nothing cached. Their times to first token are taken in turn.
"""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import click
import msgspec
from rich.table import Table

from baton.ops.bench import loop
from baton.ops.bench.server import Running, ServerFailed, server
from baton.ops.bench.stream import ask
from baton.ops.http import target
from baton.ops.terminal import out

REQUEST_S_MAX = 120.0
VOCABULARY = range(1000, 20000)
BLOCK_TOKENS = 16  # only whole blocks are cached


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """Median times to first token, in ms, over the rounds, and warm over short."""

    prefix_tokens: int
    end_tokens: int
    uncached_tokens: int
    rounds: int
    cold_ms: float
    warm_ms: float
    short_ms: float
    ratio: float


async def ttft_ms(running: Running, prompt: list[int]) -> float:
    """The time to the first token of one request, alone on the server."""
    document = {"model": running.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    outcome = await ask(target(running.url), msgspec.json.encode({**document, "stream": True}), REQUEST_S_MAX, 2)
    if outcome.error is not None:
        raise ServerFailed(f"a request failed: {outcome.error}: {outcome.detail}")
    return outcome.ttft_s * 1e3


def measure(running: Running, prefix_tokens: int, end_tokens: int, rounds: int) -> PrefixReport:
    """Each kind in turn; nothing but the one prefix is ever repeated."""
    chance = random.Random(0)

    uncached = prefix_tokens % BLOCK_TOKENS + end_tokens

    def tokens(count: int) -> list[int]:
        return chance.choices(VOCABULARY, k=count)

    async def alternate() -> dict[str, list[float]]:
        prefix = tokens(prefix_tokens)
        for warm_up in (prefix + tokens(end_tokens), tokens(uncached)):
            await ttft_ms(running, warm_up)
        taken: dict[str, list[float]] = {"cold": [], "warm": [], "short": []}
        for _ in range(rounds):
            taken["cold"].append(await ttft_ms(running, tokens(prefix_tokens + end_tokens)))
            taken["warm"].append(await ttft_ms(running, prefix + tokens(end_tokens)))
            taken["short"].append(await ttft_ms(running, tokens(uncached)))
        return taken

    middle = {name: median(times) for name, times in loop.run(alternate()).items()}
    return PrefixReport(
        prefix_tokens=prefix_tokens,
        end_tokens=end_tokens,
        uncached_tokens=uncached,
        rounds=rounds,
        cold_ms=round(middle["cold"], 1),
        warm_ms=round(middle["warm"], 1),
        short_ms=round(middle["short"], 1),
        ratio=round(middle["warm"] / middle["short"], 3),
    )


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="Model to serve.")
@click.option("--prefix-tokens", type=click.IntRange(16), default=600, show_default=True, help="Tokens shared.")
@click.option("--end-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens that are new.")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Requests of each kind.")
@click.option("--json", "json_path", metavar="PATH", help="Write the report as JSON.")
def main(model: str, prefix_tokens: int, end_tokens: int, rounds: int, json_path: str | None) -> None:
    """Measure what a cached prefix saves of the time to first token."""
    try:
        with server(model, {}) as running:
            found = measure(running, prefix_tokens, end_tokens, rounds)
    except ServerFailed as error:
        raise click.ClickException(str(error)) from None
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("prompt")
    shown.add_column("TTFT ms", justify="right")
    shown.add_row(f"cold, {prefix_tokens + end_tokens} tokens", f"{found.cold_ms:,.1f}")
    shown.add_row(f"warm, {prefix_tokens} of them cached", f"{found.warm_ms:,.1f}")
    shown.add_row(f"cold, {found.uncached_tokens} tokens", f"{found.short_ms:,.1f}")
    out().print(shown)
    out().print(f"warm over the short one: {found.ratio:.2f}")
    if json_path is not None:
        Path(json_path).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


if __name__ == "__main__":
    main()
