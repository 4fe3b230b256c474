"""What whoever runs the server may choose about scheduling, as the scheduler's core is told it."""

from __future__ import annotations

import msgspec

from baton.engine.admission import Policy
from baton.engine.order import Order


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    """``prefix_cache``: what was computed is kept and found again by later prompts that begin alike, of one tenant, or
    of all of them with ``share_prefixes``. ``admission`` says how much a request is promised when it takes its seat
    (``engine.admission``), ``order`` in which order the waiting are served (``engine.order``). A step with a prompt in
    it is cut to take ``itl_target_ms`` at most, for the sake of those that decode; 0 is no target.
    """

    prefix_cache: bool = True
    share_prefixes: bool = False
    admission: Policy = "predicted"
    order: Order = "priority"
    itl_target_ms: float = 25.0
