"""Where the server is: an address given, else ``BATON_ADDRESS``, else the newest server that runs on this machine."""

from __future__ import annotations

import os
import random

from baton.frontends.client.errors import NotConnected

ENVIRONMENT = "BATON_ADDRESS"
SOCKET_NAMES = "client*.sock"


def find(address: str | None) -> str:
    """A ZeroMQ address. Raises ``NotConnected`` where none was given and no server runs here."""
    chosen = address or os.environ.get(ENVIRONMENT)
    if chosen:
        return chosen
    from baton.ipc.rundir import default_base, live_instances

    for directory in live_instances(default_base()):
        sockets = list(directory.glob(SOCKET_NAMES))  # one a frontend, any of which will do
        if sockets:
            return f"ipc://{random.choice(sockets)}"
    raise NotConnected(f"no server runs here; start one, or give its address (or set {ENVIRONMENT})")
