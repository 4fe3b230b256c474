"""The figures of ``docs/scheduling.md``, drawn from the scheduler's own tables as SVG: ``make docs`` writes them.

A small history is played by the production scheduler, with made-up tokens in the workers' place; what is drawn is what
it planned and what its ledger said. The same program draws the same bytes.
"""

from __future__ import annotations

from baton.engine.effects import Plan, StepDone, TokenRecord
from baton.engine.ledger import Line
from baton.engine.limits import Limits
from baton.engine.policies import Policies
from baton.ipc.frames import KVLayout, Params
from baton.ops.bench.lockstep import Lockstep

BLOCK_TOKENS = 16
COLOURS = {"decode": "#4c78a8", "chunk": "#f58518", "idle": "#e8e8e8"}
#: the lines of the ledger that make up the pool, from the bottom up
PARTS = {
    "held": "#4c78a8",
    "growth of the admitted": "#9ecae9",
    "needed to come back": "#e45756",
    "headroom": "#bab0ac",
    "unpromised": "#e8e8e8",
}
CELL, LEFT, TOP = 46, 96, 44


class Played:
    """A history being played: ``steps`` are its plans, in order."""

    def __init__(self, blocks: int, limits: Limits, policies: Policies | None = None) -> None:
        layout = KVLayout(BLOCK_TOKENS, blocks, 23_040, 30, 3, 64, "bfloat16")
        self.blocks = blocks
        self.engine = Lockstep(16, layout, 49_152, 2048, limits, policies)
        self.steps: list[Plan] = []
        self._positions: dict[int, int] = {}
        self._runs: dict[int, tuple[int, int]] = {}

    def submit(self, slot: int, prompt_tokens: int, output_tokens: int) -> None:
        """A request; no two have a token of their prompts in common."""
        prompt = [1000 * (slot + 1) + at for at in range(prompt_tokens)]
        self.engine.submit(slot, prompt, Params(max_tokens=output_tokens, ignore_eos=True, temperature=0.0))

    def ledger(self) -> list[Line]:
        """What the ledger says now."""
        admission = self.engine.core.batcher.seating.admission
        assert admission is not None, "no worker has greeted"
        return admission.ledger.lines()

    def step(self) -> None:
        """The workers carry out the oldest plan."""
        plan = self.engine.plans[0]
        self.steps.append(plan)
        for start in plan.starts:
            self._positions[start.slot], self._runs[start.slot] = 0, (start.generation, start.run)
        records = []
        for row in plan.rows:
            if row.sample:
                position = self._positions[row.slot]
                self._positions[row.slot] = position + 1
                records.append(TokenRecord(row.slot, *self._runs[row.slot], position, 5, 0, -1.0))
        self.engine.answer(StepDone(1, plan.step, records))


def ledger_figure() -> str:
    """Six requests come to a small pool under ``reserve``: where each block is, or whose it will be, step by step."""
    played = Played(24, Limits(step_tokens_max=64, kv_headroom_share=0.05), Policies(admission="reserve"))
    kept: list[dict[str, int]] = []
    arrivals = {0: (0, 40, 24), 2: (1, 60, 30), 4: (2, 20, 60), 8: (3, 90, 20), 10: (4, 30, 30), 14: (5, 50, 16)}
    at = 0
    while at in arrivals or played.engine.plans:
        if at in arrivals:
            played.submit(*arrivals[at])
        kept.append({line.name: line.blocks or 0 for line in played.ledger()})
        played.step()
        at += 1
    width, unit = 8, 8
    height = unit * played.blocks
    parts = _head(LEFT + width * len(kept) + 190, TOP + height + 34)
    parts.append(_text(LEFT, 18, f"the {played.blocks} blocks of the pool after each step", "start", 13))
    for number, lines in enumerate(kept):
        y = float(TOP + height)
        for name, colour in PARTS.items():
            tall = unit * max(0, lines[name])
            y -= tall
            if tall:
                parts.append(_box(LEFT + width * number, y, width - 1, tall, colour))
        cached = unit * lines["cached, evictable"]
        if cached:
            parts.append(_box(LEFT + width * number, TOP + cached - 1, width - 1, 2, "#333"))
    for at, (name, colour) in enumerate([*PARTS.items(), ("cached: from the top to here", "#333")]):
        y = TOP + 20 * at
        parts.append(_box(LEFT + width * len(kept) + 12, y, 12, 12, colour))
        parts.append(_text(LEFT + width * len(kept) + 30, y + 11, name, "start"))
    parts.append(_text(LEFT, TOP + height + 20, "step 1", "start"))
    parts.append(_text(LEFT + width * len(kept), TOP + height + 20, f"step {len(kept)}", "end"))
    return "\n".join([*parts, "</svg>", ""])


def step_figure() -> str:
    """Three requests decode when a long prompt comes: who computes how many tokens in which step."""
    played = Played(64, Limits(step_tokens_max=32))
    for slot in range(3):
        played.submit(slot, 8, 12)
    for _ in range(3):
        played.step()
    played.submit(3, 90, 3)
    while played.engine.plans:
        played.step()
    plans = played.steps[:14]
    slots = sorted({row.slot for plan in plans for row in plan.rows})
    parts = _head(LEFT + CELL * len(plans) + 8, TOP + CELL * len(slots) + 54)
    parts.append(_text(LEFT, 18, "tokens each request computes in each step (budget: 32 tokens)", "start", 13))
    for at, _ in enumerate(plans):
        parts.append(_text(LEFT + CELL * at + CELL // 2, TOP - 8, f"{at + 1}"))
    for line, slot in enumerate(slots):
        y = TOP + CELL * line
        parts.append(_text(LEFT - 8, y + CELL // 2 + 4, f"request {slot + 1}", "end"))
        for at, plan in enumerate(plans):
            count = next((row.count for row in plan.rows if row.slot == slot), 0)
            kind = "idle" if count == 0 else "decode" if count == 1 else "chunk"
            parts.append(_box(LEFT + CELL * at, y, CELL - 2, CELL - 2, COLOURS[kind]))
            if count:
                parts.append(_text(LEFT + CELL * at + CELL // 2 - 1, y + CELL // 2 + 4, str(count), fill="white"))
    y = TOP + CELL * len(slots) + 12
    for at, (kind, said) in enumerate((("decode", "decode"), ("chunk", "part of a prompt"), ("idle", "nothing"))):
        parts.append(_box(LEFT + 150 * at, y, 14, 14, COLOURS[kind]))
        parts.append(_text(LEFT + 150 * at + 20, y + 12, said, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _head(width: int, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12, fill: str = "#333") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
