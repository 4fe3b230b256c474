"""``python -m tests.sim --seeds 500``: play many seeds; each that fails is printed with the story of its request."""

from __future__ import annotations

import re
import sys
import time

import click

from tests.sim.oracles import Broken
from tests.sim.world import World


def failure(seed: int) -> str | None:
    """What is wrong with a seed, or None. Whatever a core or the world raises is wrong as well."""
    try:
        World(seed).run()
    except Broken as broken:
        return str(broken)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def story(seed: int, lines_max: int) -> str:
    """The last lines of a failing history: those of the client that the failure names, and every death."""
    world = World(seed, record=True)
    try:
        world.run()
    except Exception as error:
        named = re.search(r"client (\d+)", str(error))
        lines = about(world, int(named[1])) if named is not None else world.lines
        return "\n".join([*(line[:400] for line in lines[-lines_max:]), repr(world.shape)])
    return "the failure did not come again"


def about(world: World, number: int) -> list[str]:
    """The lines of one client: those that name its door, its trace or a row it had; and the deaths among them."""
    trace, door = repr(world.clients[number].trace), f"door={number},"
    mine = [line for line in world.lines if trace in line]
    rows = {found for line in mine for found in re.findall(r"slot=\d+, generation=\d+", line)}
    marks = (trace, door, "is killed", "starts", "is reaped", *rows)
    return [line.replace(trace, "…") for line in world.lines if any(mark in line for mark in marks)]


@click.command()
@click.option("--seeds", default=500, help="How many seeds to play.")
@click.option("--first", default=0, help="The first seed.")
@click.option("--lines", default=60, help="Lines of the story to print for a failing seed.")
def main(seeds: int, first: int, lines: int) -> None:
    """Play seeds; exit with 1 if any fails."""
    started = time.monotonic()
    failed = 0
    for seed in range(first, first + seeds):
        what = failure(seed)
        if what is not None:
            failed += 1
            click.echo(f"seed {seed}: {what}\n{story(seed, lines)}\n")
    wall_s = time.monotonic() - started
    click.echo(f"{seeds} seeds in {wall_s:.1f} s, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
