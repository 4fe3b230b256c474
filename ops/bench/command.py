"""``baton bench``: drive a server, show progress on stderr, print the report."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.ops.bench import loop
from baton.ops.bench.load import Plan, drive
from baton.ops.bench.report import Objectives, report, table
from baton.ops.bench.stream import Outcome
from baton.ops.completions import first_model
from baton.ops.http import Target, target
from baton.ops.terminal import err, out

INTERRUPTED_STATUS = 130


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for, flag by flag."""

    url: str
    model: str | None
    concurrency: int
    requests: int | None
    seconds: float | None
    prompt_tokens: int
    output_tokens: int
    vocabulary: str
    text: str | None
    timeout: float
    ignore_eos: bool
    ttft_slo_ms: float | None
    itl_slo_ms: float | None
    tpot_slo_ms: float | None
    e2e_slo_ms: float | None
    api_key: str | None
    seed: int
    json_path: str | None


def run(asked: Asked) -> int:
    """Measure and report: 0 if any request succeeded, 1 if none did, 130 if interrupted (then of what had ended)."""
    where = target(asked.url, asked.api_key)
    plan = Plan(
        model=asked.model if asked.model is not None else loop.run(first_model(where, asked.timeout)),
        concurrency=asked.concurrency,
        requests=4 * asked.concurrency if asked.requests is None and asked.seconds is None else asked.requests,
        seconds=asked.seconds,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
        vocabulary=id_range(asked.vocabulary),
        text=asked.text,
        ignore_eos=asked.ignore_eos,
        timeout_s=asked.timeout,
        seed=asked.seed,
    )
    outcomes: list[Outcome] = []
    wall, cpu = time.perf_counter(), time.process_time()
    interrupted = loop.run(watched(where, plan, outcomes))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    objectives = Objectives(
        ttft_ms=asked.ttft_slo_ms, itl_ms=asked.itl_slo_ms, tpot_ms=asked.tpot_slo_ms, e2e_ms=asked.e2e_slo_ms
    )
    found = report(outcomes, wall, asked.url, plan.model, plan.concurrency, objectives, cpu / wall)
    console = out()
    if asked.json_path != "-":
        console.print(table(found))
    if asked.json_path is not None:
        document = msgspec.json.format(msgspec.json.encode(found), indent=2)
        if asked.json_path == "-":
            console.out(document.decode(), highlight=False)
        else:
            Path(asked.json_path).write_bytes(document + b"\n")
    return INTERRUPTED_STATUS if interrupted else 0 if found.succeeded else 1


def id_range(text: str) -> range:
    """The ids "FROM-TO", both included; ValueError where it is no such range."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ValueError(f"--vocabulary must be FROM-TO, got {text!r}")
    return range(int(first), int(last) + 1)


async def watched(where: Target, plan: Plan, outcomes: list[Outcome]) -> bool:
    """Drive the plan under a progress bar; an interrupt ends it early, and then this is True."""
    console = err()
    bar = Progress(
        "requests",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]} failed"),
        console=console,
        transient=True,
        refresh_per_second=2,  # the bar must not take CPU from what is measured
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("requests", total=plan.requests, failed=0)
        failures = 0

        def heard(outcome: Outcome) -> None:
            nonlocal failures
            outcomes.append(outcome)
            failures += outcome.error is not None
            bar.update(task, advance=1, failed=failures)

        driving = asyncio.ensure_future(drive(where, plan, heard))
        here = asyncio.get_running_loop()
        here.add_signal_handler(signal.SIGINT, driving.cancel)
        try:
            await driving
        except asyncio.CancelledError:
            return True
        finally:
            here.remove_signal_handler(signal.SIGINT)
    return False
