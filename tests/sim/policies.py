"""How the scheduler of one world is told to choose: a policy of each kind, drawn at random."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from baton.engine.order import MOVES
from baton.engine.policies import Policies


def make_policies(seed: int) -> Policies:
    """How the scheduler of one world is told to choose. By chance of its own, so that the worlds stay as they are."""
    rng = random.Random(f"policies {seed}")
    return Policies(
        prefix_cache=rng.random() < 0.8,
        admission=rng.choice(("reserve", "optimistic", "optimistic", "predicted")),
        order=rng.choice(tuple(MOVES)),
        itl_target_ms=rng.choice((0.0, 0.2, 1.0, 200.0)),
    )


def policy_settings(seed: int) -> dict[str, Any]:
    """The same as settings of a server."""
    return msgspec.structs.asdict(make_policies(seed))
