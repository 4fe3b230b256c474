"""Who gives way when blocks run out, and how: by forgetting its blocks or by moving them to the host.

Why everybody finishes: a request takes blocks only from its juniors (a lower class, or the same and younger), so the
most senior one is never made to give way and ends; then the next is. Nobody gives way more often than
``limits.preemptions_per_request_max``: after that it is *protected*, seated only with all it may need
(``Admission.promise_tokens``), and takes from any unprotected one. Two big ones cannot push each other out for ever.
Who waits for its client gives way to anybody, however often, and that is not counted: else a slow client could earn
itself protection, and hold up all others with blocks that compute nothing.

Pure functions over small views of what runs; the caller carries out what they say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, Literal, Protocol, TypeVar

from baton.engine.limits import Limits
from baton.engine.steptime import StepTime, Transfer

Way = Literal["recompute", "swap"]


class Running(Protocol):
    """What the choice looks at. ``own_blocks``: blocks that come free when it leaves (shared ones do not).
    ``priority``: lower is more urgent. ``paused``: it waits for its client.
    """

    @property
    def slot(self) -> int: ...
    @property
    def arrived_ns(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def own_blocks(self) -> int: ...
    @property
    def paused(self) -> bool: ...


One = TypeVar("One", bound=Running)


@dataclass(slots=True, frozen=True)
class Verdict(Generic[One]):
    """``victims`` give way, in that order. ``yields``: nobody may for the asking one; it gives way itself.

    Neither: blocks that are coming back are enough, the asking one sits out a step.
    """

    victims: tuple[One, ...] = ()
    yields: bool = False


def protected(one: Running, limits: Limits) -> bool:
    """Whether it has given way as often as it must."""
    return one.preemptions >= limits.preemptions_per_request_max


def seniority(one: Running) -> tuple[int, int, int]:
    """Smaller is more senior: class, then age."""
    return (one.priority, one.arrived_ns, one.slot)


def choose(
    asking: One, running: Iterable[One], missing_blocks: int, coming_back_blocks: int, limits: Limits
) -> Verdict[One]:
    """Who gives ``missing_blocks`` blocks to ``asking``: those that wait for their clients, then the youngest of the
    lowest class.

    ``running`` is who may still be made to give way: not the asking one, nor those already leaving, whose
    ``coming_back_blocks`` come free when their step has landed and count first. Nobody is made to give way in vain: if
    all that may would not be enough, the asking one yields, which a protected one never needs to while the ledger's
    promises are kept. O(n log n) of what runs.
    """
    wanted = missing_blocks - coming_back_blocks
    if wanted <= 0:
        return Verdict()
    safe, rank = protected(asking, limits), seniority(asking)
    may = [
        one
        for one in running
        if one is not asking and (one.paused or (not protected(one, limits) and (safe or seniority(one) > rank)))
    ]
    victims = _enough(may, wanted)
    return Verdict(tuple(victims)) if victims is not None else Verdict(yields=True)


def cheaper_way(
    computed_tokens: int,
    blocks: int,
    host_free_blocks: int,
    step_tokens: int,
    model: StepTime,
    transfer: Transfer | None,
) -> Way:
    """How ``computed_tokens`` tokens in ``blocks`` blocks come back cheapest: recomputed, in steps of ``step_tokens``,
    or moved to the host and back. Without room there (or any swap space: None) they are recomputed.
    """
    if transfer is None or blocks > host_free_blocks or blocks == 0:
        return "recompute"
    return "swap" if transfer.swap_s(blocks) < model.recompute_s(computed_tokens, step_tokens) else "recompute"


def _enough(may: Sequence[One], wanted: int) -> list[One] | None:
    """As few as give ``wanted`` blocks, the paused first, then from the least senior on; None if all are too few."""
    chosen: list[One] = []
    ranked = [(one.paused, seniority(one), one) for one in may]
    ranked.sort(key=itemgetter(0, 1), reverse=True)
    for _, _, one in ranked:
        if wanted <= 0:
            break
        if own := one.own_blocks:  # counting them costs more than all else: only of those whose turn it is
            chosen.append(one)
            wanted -= own
    return chosen if wanted <= 0 else None
