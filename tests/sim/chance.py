"""How often a world takes the rare ways of ``engine.buggify``: never in half of all seeds, else by odds of its own."""

from __future__ import annotations

import random
from collections.abc import Callable

from baton.engine.buggify import SITES


def chance(seed: int, met: set[str] | None = None) -> Callable[[str], bool]:
    """The answers of one seed; from a source of their own, so that they change nothing else of what the seed says.

    What was asked and answered with yes is added to ``met``.
    """
    rng = random.Random(f"rare ways of {seed}")
    odds = {site: rng.choice((0.0, 0.02, 0.2)) for site in SITES} if rng.random() < 0.5 else dict.fromkeys(SITES, 0.0)

    def answer(site: str) -> bool:
        yes = rng.random() < odds[site]
        if yes and met is not None:
            met.add(site)
        return yes

    return answer
