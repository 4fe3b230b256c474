"""``python -m tests.sim --seeds 500``: play many seeds; each that fails is printed with the story of its request.

Level one is the cores alone (``world``), level two whole processes on a machine in memory (``host``).
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import click

from baton.workers import detokenizer, tokenizer
from tests.sim.figures import figures_of, save
from tests.sim.host import Host
from tests.sim.oracles import Broken
from tests.sim.world import World

STORIES_MAX = 5  # told of each level; of more failures only the seeds
LEVELS: dict[int, type[World] | type[Host]] = {1: World, 2: Host}


def failure(seed: int, level: int = 1) -> str | None:
    """What is wrong with a seed, or None. Whatever a core or the world raises is wrong as well."""
    return play(seed, level)[0]


def play(seed: int, level: int = 1) -> tuple[str | None, Counter[str]]:
    """What is wrong with a seed, or None, and its history in numbers."""
    world, what = LEVELS[level](seed), None
    try:
        world.run()
    except Broken as broken:
        what = str(broken)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
    return what, figures_of(world)


def story(seed: int, lines_max: int, level: int = 1) -> str:
    """The last lines of a failing history: those of the client that the failure names, and every death."""
    world = LEVELS[level](seed, record=True)
    try:
        world.run()
    except Exception as error:
        named = re.search(r"client (\d+)", str(error))
        lines = about(world, int(named[1])) if named is not None else world.lines
        return "\n".join([*(line[:400] for line in lines[-lines_max:]), repr(world.shape)])
    return "the failure did not come again"


def about(world: World | Host, number: int) -> list[str]:
    """The lines of one client: those that name it, its door or a row it had; and the deaths among them."""
    trace, door = repr(world.clients[number].trace)[2:-1], f"door={number},"
    named = trace[: 4 * 16]  # of a trace's context, level two's clients choose the first 16 bytes
    mine = [line for line in world.lines if named in line]
    rows = {found for line in mine for found in re.findall(r"slot=\d+, generation=\d+", line)}
    marks = (named, door, f"client {number} ", "is killed", "starts", "is reaped", "Fault(", *rows)
    return [line.replace(trace, "…") for line in world.lines if any(mark in line for mark in marks)]


def settle() -> None:
    """What a process that plays does first: what is there now stays, garbage is looked for less often, and the one
    model's file is read once, not at every start of a simulated process.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    tokenizer.PromptEncoder = functools.cache(tokenizer.PromptEncoder)  # type: ignore[assignment, misc]
    detokenizer.read_header = functools.cache(detokenizer.read_header)


@click.command()
@click.option("--seeds", default=500, help="How many seeds to play, at each level.")
@click.option("--first", default=0, help="The first seed.")
@click.option("--level", "levels", type=click.IntRange(1, 2), multiple=True, help="A level to play; by default both.")
@click.option("--lines", default=60, help="Lines of the story to print for a failing seed.")
@click.option("--report", type=Path, help="A file for the figures of what was played; .json, or else Markdown.")
@click.option("--processes", default=len(os.sched_getaffinity(0)), help="Processes to play in.")
def main(seeds: int, first: int, levels: tuple[int, ...], lines: int, report: Path | None, processes: int) -> None:
    """Play seeds; exit with 1 if any fails."""
    figures: dict[int, Counter[str]] = {}
    walls: dict[int, float] = {}
    with ProcessPoolExecutor(processes, initializer=settle) as pool:
        for level in levels or tuple(LEVELS):
            started = time.monotonic()
            played = range(first, first + seeds)
            total = figures[level] = Counter[str](failed=0)
            results = pool.map(partial(play, level=level), played, chunksize=20)
            for seed, (what, figures_of_one) in zip(played, results, strict=True):
                total += figures_of_one
                if what is not None:
                    total["failed"] += 1
                    told = story(seed, lines, level) if total["failed"] <= STORIES_MAX else "…"
                    click.echo(f"level {level}, seed {seed}: {what}\n{told}\n")
            wall_s = walls[level] = time.monotonic() - started
            click.echo(f"level {level}: {seeds} seeds in {wall_s:.1f} s, {total['failed']} failed")
            figures[level] = total
            if report is not None:
                save(report, figures, walls)
    sys.exit(1 if any(total["failed"] for total in figures.values()) else 0)


if __name__ == "__main__":
    main()
