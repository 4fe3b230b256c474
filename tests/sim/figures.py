"""What was played, in numbers: counted by seed, added up over many, written as a page or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.world import World

HOUR_NS = 3_600_000_000_000


def figures_of(world: World | Host) -> Counter[str]:
    """One history in numbers; times in ns of the virtual clock."""
    figures = Counter(world.struck)
    figures["seeds"] = 1
    figures["virtual ns"] = world.now - world.began_ns
    figures["events"] = world.handled
    figures["requests"] = len(world.clients)
    figures["deaths"] = world.deaths
    figures["restarts"] = sum(max(0, child.incarnation - 1) for child in world.health.children.values())
    for client in world.clients:
        how = client.finish.reason if client.finish is not None else client.state
        figures[f"end: {how}"] += 1
    return figures


def as_text(levels: dict[int, Counter[str]], wall_s: dict[int, float], form: str) -> str:
    """The figures of each level, as ``json`` or as a table in Markdown (``md``)."""
    shown = {level: _readable(figures, wall_s[level]) for level, figures in levels.items()}
    if form == "json":
        return json.dumps(shown, indent=1) + "\n"
    names = list(dict.fromkeys(name for figures in shown.values() for name in figures))
    head = "| | " + " | ".join(f"level {level}" for level in shown) + " |\n" + "| --- |" + " ---: |" * len(shown) + "\n"
    rows = [[name, *(f"{figures.get(name, 0):,}" for figures in shown.values())] for name in names]
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def save(path: Path, levels: dict[int, Counter[str]], wall_s: dict[int, float]) -> None:
    """Into a file, in the form that its name ends in: ``.json``, or Markdown."""
    path.write_text(as_text(levels, wall_s, "json" if path.suffix == ".json" else "md"))


def _readable(figures: Counter[str], wall_s: float) -> dict[str, float]:
    first = ("seeds", "failed", "requests", "events", "deaths", "restarts")
    rest = sorted(name for name in figures if name not in (*first, "virtual ns"))
    shown: dict[str, float] = {name: figures[name] for name in first}
    shown["virtual hours"] = round(figures["virtual ns"] / HOUR_NS, 3)
    shown["wall seconds"] = round(wall_s, 1)
    return shown | {name: figures[name] for name in rest}
