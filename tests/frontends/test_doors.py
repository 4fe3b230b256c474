"""Who gets a port: one server of many that want it, and of that one every frontend."""

from __future__ import annotations

import socket
import threading

import pytest

from baton.frontends.doors import StartError, listen

SEND_BYTES = 1 << 16


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("shared", [False, True])
def test_of_many_servers_that_want_one_port_at_once_one_has_it(shared: bool) -> None:
    port, count = free_port(), 32
    start, got, refused = threading.Barrier(count), list[socket.socket](), list[str]()

    def want() -> None:
        start.wait(10)
        try:
            got.append(listen("127.0.0.1", port, SEND_BYTES, shared=shared))
        except StartError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=want) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    try:
        assert (len(got), len(refused)) == (1, count - 1)
        assert all(str(port) in why and "taken" in why for why in refused)
    finally:
        for listener in got:
            listener.close()


def test_ports_that_the_kernel_chooses_are_kept_from_the_choice_on() -> None:
    listeners = [listen("127.0.0.1", 0, SEND_BYTES) for _ in range(32)]
    try:
        assert len({listener.getsockname()[1] for listener in listeners}) == 32
    finally:
        for listener in listeners:
            listener.close()


def test_frontends_of_one_server_share_its_port_and_another_server_stays_out() -> None:
    first = listen("127.0.0.1", 0, SEND_BYTES, shared=True)
    port = first.getsockname()[1]
    second = listen("127.0.0.1", port, SEND_BYTES, shared=True, joins=True)
    try:
        with pytest.raises(StartError, match="taken"):
            listen("127.0.0.1", port, SEND_BYTES, shared=True)
    finally:
        first.close()
        second.close()
