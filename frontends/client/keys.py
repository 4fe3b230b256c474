"""CURVE keys for a ZeroMQ door on TCP: one file for the server, one for the clients it lets in.

Both sides prove who they are, and everything is encrypted. A file is JSON and readable by its owner only; anybody who
has the clients' file is a client.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import zmq

SERVER_FILE = "server.json"
CLIENT_FILE = "client.json"


class ServerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server's pair, and the public keys of those it lets in."""

    public: str
    secret: str
    clients: list[str]


class ClientKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client's pair, and the server's public key."""

    server: str
    public: str
    secret: str


def generate(directory: Path) -> tuple[Path, Path]:
    """Make a fresh set; returns the server's file and the clients' file. Never overwrites: raises FileExistsError."""
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    server, client = directory / SERVER_FILE, directory / CLIENT_FILE
    _write(server, ServerKeys(server_public, server_secret, [client_public]))
    _write(client, ClientKeys(server_public, client_public, client_secret))
    return server, client


def read_server(path: Path) -> ServerKeys:
    """The server's file; OSError or ValueError says in one line what is wrong."""
    return msgspec.json.decode(path.read_bytes(), type=ServerKeys)


def read_client(path: Path) -> ClientKeys:
    """The clients' file; OSError or ValueError says in one line what is wrong."""
    return msgspec.json.decode(path.read_bytes(), type=ClientKeys)


def _write(path: Path, keys: ServerKeys | ClientKeys) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
