"""The life of a request, as one literal table.

Rules:
  * a request is in exactly one state, and a state has exactly one owning role;
  * a move that is not in the table is a defect of ours: it raises, it is never repaired;
  * a move between two roles is a hand-over (epoch + 1); a move within one role is not;
  * the spans of a trace, ``baton top``, the diagram in ``docs/states.md`` and the tests are derived from this table.
"""

from __future__ import annotations

from baton.ipc.frames import Role

F, T, S, D = Role.FRONTEND, Role.TOKENIZER, Role.SCHEDULER, Role.DETOKENIZER

#: state -> (owning role, states it may move to)
STATES: dict[str, tuple[Role, tuple[str, ...]]] = {
    "received": (F, ("tokenizing", "closed")),
    "tokenizing": (T, ("queued", "closed", "received")),
    "queued": (S, ("prefilling", "aborting", "flushing", "closed", "received")),
    "prefilling": (S, ("decoding", "paused", "preempted", "aborting", "flushing", "closed", "received")),
    "decoding": (S, ("paused", "preempted", "aborting", "flushing", "closed", "received")),
    "paused": (S, ("prefilling", "decoding", "preempted", "aborting", "flushing", "closed", "received")),
    "preempted": (S, ("prefilling", "paused", "aborting", "flushing", "closed", "received")),
    "aborting": (S, ("flushing", "closed", "received")),
    "flushing": (D, ("closed", "received")),
    "closed": (F, ()),
}

#: the numbers the board stores; names only, never an order
STATE_NUMBERS: dict[str, int] = {name: number for number, name in enumerate(STATES, start=1)}
STATE_NAMES: dict[int, str] = {number: name for name, number in STATE_NUMBERS.items()}


def owner_of(state: str) -> Role:
    """The role that owns a request in ``state``."""
    return STATES[state][0]


def check_move(old: str, new: str) -> None:
    """Assert that the table allows the move from ``old`` to ``new``."""
    assert new in STATES[old][1], f"illegal move {old} -> {new}"


def diagram() -> str:
    """The table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2", "    [*] --> received"]
    for name, (role, moves) in STATES.items():
        lines.append(f"    {name}: {name} ({role.name.lower()})")
        lines.extend(f"    {name} --> {move}" for move in moves)
    return "\n".join([*lines, "    closed --> [*]"]) + "\n"
