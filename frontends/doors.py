"""All doors of a frontend, opened and closed together; what the process's main sees of them."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

from aiohttp import web

from baton.engine.effects import Account
from baton.frontends import server_log
from baton.frontends.client.keys import ServerKeys, read_server
from baton.frontends.http import HttpDoor
from baton.frontends.metrics import Metrics
from baton.frontends.reception import Reception
from baton.frontends.status import Sources
from baton.frontends.websocket import ROUTE, WebSocketDoor
from baton.frontends.zmq_gateway import Gateway, socket_name
from baton.workers.config import Settings

#: an unread rest of a refused body is read for this long, so that the client sees the refusal
_LINGER_S = 1.0


class StartError(Exception):
    """A door cannot be opened; the message is one line for the operator."""


class Doors:
    """Invariant: between ``start`` and ``stop`` every door listens, or ``start`` raised and none does."""

    def __init__(self) -> None:
        self.metrics: Metrics | None = None
        self._reception: Reception | None = None
        self._websocket: WebSocketDoor | None = None
        self._gateway: Gateway | None = None
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._keep_alive: asyncio.Task[None] | None = None

    async def start(
        self, reception: Reception, settings: Settings, sources: Sources, directory: Path, joins: bool = False
    ) -> dict[str, str]:
        """Open all doors; returns their addresses by name. Raises ``StartError``.

        ``joins`` says that the port is this server's already, held by another of its frontends.
        """
        self._reception = reception
        self.metrics = Metrics(sources.gauges, sources.totals, sources.index)
        keys = zmq_keys(settings)
        send_bytes_max = settings.limits.socket_send_bytes_max
        listener = listen(settings.host, settings.port, send_bytes_max, settings.frontends > 1, joins)
        door = HttpDoor(reception, settings, sources, self.metrics)
        self._websocket = WebSocketDoor(reception, settings, self.metrics)
        door.app.add_routes(self._websocket.routes())
        runner = web.AppRunner(
            door.app,
            access_log=None,
            logger=server_log.log,
            handler_cancellation=True,
            lingering_time=_LINGER_S,
            shutdown_timeout=0,
        )
        gateway = Gateway(reception, self.metrics)
        address = f"ipc://{directory / socket_name(sources.index)}"
        if settings.zmq is not None and not sources.index:
            address = settings.zmq
        try:
            zmq_address = gateway.start(address, keys)
        except OSError as error:
            listener.close()
            raise StartError(f"cannot listen on {address}: {error.strerror}") from None
        self._gateway, self._runner = gateway, runner
        await runner.setup()
        server = runner.server
        assert server is not None
        door.connections = lambda: len(server.connections)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            door.patience.around(server), sock=listener, backlog=socket.SOMAXCONN
        )
        self._keep_alive = loop.create_task(door.keep_alive())
        host, port = listener.getsockname()[:2]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return {"http": f"http://{place}", "websocket": f"ws://{place}{ROUTE}", "zmq": zmq_address}

    def observe(self, account: Account) -> None:
        """Count a closed request."""
        if self.metrics is not None:
            self.metrics.observe(account)

    async def stop(self, grace_s: float) -> None:
        """Stop listening; open requests may end for ``grace_s``, then their clients are cut off."""
        reception, runner = self._reception, self._runner
        if reception is None or runner is None:
            return
        if self._listening is not None:
            self._listening.close()
        try:
            async with asyncio.timeout(grace_s):
                await reception.idle()
        except TimeoutError:
            pass
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        if self._gateway is not None:
            self._gateway.stop()
        if self._websocket is not None:
            await self._websocket.close()
        await runner.cleanup()
        reception.close()


def zmq_keys(settings: Settings) -> ServerKeys | None:
    """The CURVE keys named in the settings; a TCP address must have some."""
    if settings.zmq_curve_keys is None:
        if settings.zmq is not None and not settings.zmq.startswith("ipc://"):
            raise StartError(f"{settings.zmq}: a ZeroMQ door that is not ipc:// needs CURVE keys (zmq_curve_keys)")
        return None
    try:
        return read_server(Path(settings.zmq_curve_keys))
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read the CURVE keys: {error}") from None


def listen(host: str, port: int, send_bytes_max: int, shared: bool = False, joins: bool = False) -> socket.socket:
    """A listening socket, bound once and kept; accepted sockets inherit its bounded send buffer.

    A server's first socket takes the port alone, like any other server's, and only then lets those in that pass
    ``joins``: two servers never share a port, though the frontends of one do (SO_REUSEPORT spreads connections).
    """
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StartError(f"cannot listen on {where}: {error.strerror}") from None
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes_max)
        if joins:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"cannot listen on {where}: the port is taken; choose another with --port") from None
        raise StartError(f"cannot listen on {where}: {error.strerror}") from None
    listener.setblocking(False)
    return listener
