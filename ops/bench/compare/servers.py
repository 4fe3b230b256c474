"""The table of servers: how each is started and asked. A TOML file; placeholders in braces are filled from flags.

It starts nothing. Whatever is wrong with the table, or missing on the machine, is said here, before anything runs.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from string import Formatter

import msgspec

#: the table that ships with this package
EXAMPLE = Path(__file__).with_name("servers.toml")
#: filled in at the start, not by flags
AT_START = {"port": "0", "python": sys.executable}


class BadTable(ValueError):
    """The table, or what was said about it, cannot be used; the message names the server and the field."""


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server of the table. Braces in ``command``, ``environment`` and ``version`` are placeholders.

    ``request`` is added to every request's JSON: each server's own way to ignore the end of the sequence. ``engine`` is
    a regular expression on command lines that says which process computes the model; without one it is the one that
    took most CPU time. ``defaults`` fill placeholders for which no flag does. What is ``by_name`` is measured if named.
    """

    command: list[str]
    served: str
    ready: str = "/v1/models"
    token_ids: bool = False
    request: dict[str, bool | int | float | str] = {}
    environment: dict[str, str] = {}
    engine: str = ""
    version: list[str] = []
    start_s_max: float = 300.0
    defaults: dict[str, str] = {}
    by_name: bool = False
    name: str = ""

    def placeholders(self) -> set[str]:
        """What must be filled before it can be started."""
        texts = (*self.command, *self.environment.values(), *self.version)
        return {name for text in texts for _, name, _, _ in Formatter().parse(text) if name} - set(AT_START)

    def filled(self, values: Mapping[str, str]) -> Server:
        """The same without placeholders but those of the start; ``values`` has the others."""
        kept = {name: "{" + name + "}" for name in AT_START}
        return self._with({**self.defaults, **values, **kept})

    def at(self, port: int) -> Server:
        """The same, ready to be started at a port."""
        return self._with({**AT_START, "port": str(port)})

    def _with(self, values: Mapping[str, str]) -> Server:
        return msgspec.structs.replace(
            self,
            command=[text.format_map(values) for text in self.command],
            environment={name: text.format_map(values) for name, text in self.environment.items()},
            version=[text.format_map(values) for text in self.version],
        )


def read_table(path: Path) -> dict[str, Server]:
    """All servers of a table, by name; ``BadTable`` names what is wrong, and where."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadTable(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadTable(f"{path}: {error}") from None
    found = {}
    for name, row in rows.items():
        try:
            server = msgspec.convert(like(row, rows), Server)
            re.compile(server.engine)
            server.placeholders()
        except (msgspec.ValidationError, re.error, ValueError) as error:
            raise BadTable(f"{path}: server {name!r}: {error}") from None
        if server.name or not server.command:
            raise BadTable(f"{path}: server {name!r}: it needs a command, and its name stands in the brackets")
        found[name] = msgspec.structs.replace(server, name=name)
    if not found:
        raise BadTable(f"{path}: no server in it")
    return found


def like(row: object, rows: Mapping[str, object]) -> object:
    """A row that says ``like = "other"`` is the other's, with what it says itself in place of that."""
    if not isinstance(row, dict) or "like" not in row:
        return row
    other = rows.get(row["like"])
    if not isinstance(other, dict) or "like" in other:
        raise ValueError(f"like = {row['like']!r} names no other server that stands for itself")
    return {**other, **{name: value for name, value in row.items() if name != "like"}}


def chosen(table: Mapping[str, Server], names: Sequence[str], settings: Sequence[tuple[str, str, str]]) -> list[Server]:
    """The servers to measure, filled: those named, else all that can be filled and are not ``by_name``.

    ``settings`` are (pattern of names, placeholder, value). ``BadTable`` where a name is unknown, a setting meets no
    server or no placeholder, a value is missing, or what a server needs is not installed.
    """
    for name in names:
        if name not in table:
            raise BadTable(f"no server {name!r} in the table, which has: {', '.join(table)}")
    for pattern, key, _ in settings:
        met = [server for name, server in table.items() if fnmatch(name, pattern)]
        if not met:
            raise BadTable(f"no server is called {pattern!r}; the table has: {', '.join(table)}")
        if not any(key in server.placeholders() for server in met):
            raise BadTable(f"{pattern}: its command has no place for {{{key}}}")
    found = []
    for name in names or (name for name, server in table.items() if not server.by_name):
        server = table[name]
        values = {key: value for pattern, key, value in settings if fnmatch(name, pattern)}
        missing = server.placeholders() - set(values) - set(server.defaults)
        if not missing:
            found.append(installed(server, values))
        elif names:
            flags = " ".join(f"--set {name}.{key}=…" for key in sorted(missing))
            raise BadTable(f"{name}: nothing says {', '.join(sorted(missing))}; give {flags}")
    return found


def installed(server: Server, values: Mapping[str, str]) -> Server:
    """A server, filled, whose environment and program are there; ``BadTable`` where they are not."""
    venv = {**server.defaults, **values}.get("venv")
    if venv is not None and not Path(venv).is_dir():
        raise BadTable(f"{server.name}: no such directory: {venv}")
    filled = server.filled(values)
    program = filled.at(0).command[0]
    if shutil.which(program) is None:
        raise BadTable(f"{server.name}: no such program: {program}")
    return filled
