"""What the orchestration costs: a scripted worker, many streams, each door in turn (``make bench``).

With no model to wait for, tokens per second and CPU time per token are those of everything around the model. With steps
as long as a model's (``--streams 32 --step-ms 20``, or the model itself: ``--worker model``) the time per token is what
a server of that size pays: fewer tokens share a wake-up, and the caches are cold. The client is this process; on a
small machine it competes with the server, so its own CPU time is reported as well.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.ops.bench import loop
from baton.ops.bench.doors import DOORS, Count, Load
from baton.ops.bench.server import Running, ServerFailed, cpu_seconds, scripted_server, server
from baton.ops.terminal import out

WARM_UP_S = 0.5


class DoorReport(msgspec.Struct, frozen=True, kw_only=True):
    """One door. CPU is in µs a token, by process; the client's is this program's own."""

    door: str
    seconds: float
    requests: int
    failed: int
    error: str
    tokens: int
    tokens_per_s: float
    tokens_per_delta: float
    cpu_us_per_token: dict[str, float]
    client_cpu_us_per_token: float

    @property
    def around_us_per_token(self) -> float:
        """What everything around the worker costs."""
        return sum(us for name, us in self.cpu_us_per_token.items() if not name.startswith("worker-"))


class OrchestrationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole measurement."""

    model: str
    streams: int
    output_tokens: int
    step_ms: float | None  # None where the model computed
    doors: list[DoorReport]


def measure(running: Running, door: str, load: Load) -> DoorReport:
    """Drive one door for the load's seconds, after a short warm-up."""
    drive = DOORS[door]
    warm_up = Load(load.streams, min(16, load.output_tokens), load.prompt_tokens, WARM_UP_S)

    async def both() -> tuple[Count, float, dict[str, float], float]:
        await drive(running, warm_up)
        before = {name: cpu_seconds(pid) for name, pid in running.pids.items()}
        own, began = time.process_time(), time.perf_counter()
        count = await drive(running, load)
        seconds, own = time.perf_counter() - began, time.process_time() - own
        return count, seconds, {name: cpu_seconds(running.pids[name]) - cpu for name, cpu in before.items()}, own

    count, seconds, cpu, own = loop.run(both())
    tokens = max(count.tokens, 1)
    return DoorReport(
        door=door,
        seconds=round(seconds, 3),
        requests=count.requests,
        failed=count.failed,
        error=count.error,
        tokens=count.tokens,
        tokens_per_s=round(count.tokens / seconds, 1),
        tokens_per_delta=round(count.tokens / count.deltas, 3) if count.deltas else 0.0,
        cpu_us_per_token={name: round(taken / tokens * 1e6, 2) for name, taken in cpu.items()},
        client_cpu_us_per_token=round(own / tokens * 1e6, 2),
    )


def table(found: OrchestrationReport) -> RenderableType:
    """The measurement for people."""
    doors = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("door", "tokens/s", "tokens a delta", "requests", "failed", "seconds"):
        doors.add_column(name, justify="left" if name == "door" else "right")
    costs = Table(box=None, pad_edge=False, header_style="bold")
    costs.add_column("CPU, µs a token")
    for door in found.doors:
        row = (f"{door.tokens_per_s:,.0f}", f"{door.tokens_per_delta:.2f}", str(door.requests), str(door.failed))
        doors.add_row(door.door, *row, f"{door.seconds:.1f}")
        costs.add_column(door.door, justify="right")
    for name in found.doors[0].cpu_us_per_token if found.doors else ():
        costs.add_row(name, *(f"{door.cpu_us_per_token[name]:.2f}" for door in found.doors))
    costs.add_row("all but the worker", *(f"{door.around_us_per_token:.2f}" for door in found.doors), style="bold")
    costs.add_row("this client", *(f"{door.client_cpu_us_per_token:.2f}" for door in found.doors), style="dim")
    errors = [Text(f"{door.door}: {door.error}", "red") for door in found.doors if door.error]
    worker = found.model if found.step_ms is None else f"scripted worker, {found.step_ms:g} ms a step"
    head = f"{found.streams} streams of {found.output_tokens} tokens, {worker}"
    return Group(Text(head, "bold"), doors, Text(), costs, *errors)


@click.command()
@click.option("--seconds", type=click.FloatRange(0.1), default=8.0, show_default=True, help="Window for each door.")
@click.option("--streams", type=click.IntRange(1), default=64, show_default=True, help="Streams at a time.")
@click.option("--output-tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens an answer.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens a prompt, about.")
@click.option(
    "--step-ms", type=click.FloatRange(0), default=0.0, show_default=True, help="Time a step is made to take."
)
@click.option("--worker", type=click.Choice(["scripted", "model"]), default="scripted", show_default=True)
@click.option("--model", default="smollm2-135m", show_default=True, help="Model whose vocabulary, or more, is used.")
@click.option("--door", "doors", type=click.Choice(list(DOORS)), multiple=True, help="Only this door (repeatable).")
@click.option("--json", "json_path", metavar="PATH", help="Write the report as JSON ('-': to stdout, no table).")
def main(
    seconds: float,
    streams: int,
    output_tokens: int,
    prompt_tokens: int,
    step_ms: float,
    worker: str,
    model: str,
    doors: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Measure what everything around the model costs, at each door."""
    load = Load(streams, output_tokens, prompt_tokens, seconds)
    try:
        with server(model, {}) if worker == "model" else scripted_server(model, step_ms) as running:
            reports = [measure(running, door, load) for door in doors or DOORS]
    except ServerFailed as error:
        raise click.ClickException(str(error)) from None
    step = None if worker == "model" else step_ms
    found = OrchestrationReport(model=model, streams=streams, output_tokens=output_tokens, step_ms=step, doors=reports)
    if json_path != "-":
        out().print(table(found))
    if json_path is not None:
        document = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
        if json_path == "-":
            click.echo(document)
        else:
            Path(json_path).write_text(document + "\n", encoding="utf-8")
    sys.exit(1 if any(report.failed or not report.tokens for report in reports) else 0)


if __name__ == "__main__":
    main()
