"""Where the settings come from: defaults, then a file, then the environment, then flags; each later one wins.

The one list of what can be set is ``workers.config.Settings``; this module only merges, checks and remembers where
each value came from. A key nobody knows is an error wherever it stands, because a setting that is silently ignored is
worse than a server that does not start. Called by the command line, before any process exists.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton.engine.limits import Limits
from baton.workers.config import Settings, contradicting, size_bytes

PREFIX = "BATON_"
FILE_VARIABLE = "BATON_CONFIG"
#: variables that begin like a setting and are none: where the settings' file is, and which server the SDK speaks to
OTHER_VARIABLES = (FILE_VARIABLE, "BATON_ADDRESS")
#: settings that say the same thing in two ways: a later source's choice replaces an earlier source's
EXCLUSIVE = ("kv_memory", "kv_blocks")


class ConfigurationError(Exception):
    """What was configured cannot be used; the message is one line and names the source, the setting and the value."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was found, and where. ``textual`` values (environment, flags) are still to be read as a type."""

    value: object
    source: str
    textual: bool


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings in force. ``sources`` has an entry for every setting, nested ones as "limits.<name>"."""

    settings: Settings
    sources: dict[str, str]

    def values(self) -> dict[str, object]:
        """All settings in force, flat, in the order they are declared."""
        settings = self.settings
        return {
            name: getattr(settings.limits, name.removeprefix("limits."))
            if name.startswith("limits.")
            else getattr(settings, name)
            for name in known_settings()
        }


@functools.cache
def known_settings() -> dict[str, msgspec.inspect.Type]:
    """Every setting's dotted name and type."""
    known: dict[str, msgspec.inspect.Type] = {}
    for struct, prefix in ((Settings, ""), (Limits, "limits.")):
        described = msgspec.inspect.type_info(struct)
        assert isinstance(described, msgspec.inspect.StructType)
        for field in described.fields:
            if not isinstance(field.type, msgspec.inspect.StructType):
                known[prefix + field.name] = field.type
    return known


def configure(
    flags: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
    file: str | None = None,
) -> Configuration:
    """Merge all sources into settings. ``flags`` maps setting names to their text; ``file`` is what --config said."""
    layers = []
    path = file if file is not None else environment.get(FILE_VARIABLE)
    if path is not None:
        layers.append(from_file(Path(path)))
    layers.append(from_environment(environment))
    layers.append({name: Given(text, "--" + name.replace("_", "-"), True) for name, text in flags.items()})
    given: dict[str, Given] = {}
    for layer in layers:
        rivals = [layer[name] for name in EXCLUSIVE if name in layer]
        if len(rivals) > 1:
            where = ", ".join(dict.fromkeys(rival.source for rival in rivals))
            raise ConfigurationError(f"{where}: {' and '.join(EXCLUSIVE)} exclude each other")
        if rivals:
            for name in EXCLUSIVE:
                given.pop(name, None)
        given.update(layer)
    top: dict[str, Any] = {}  # values of any setting's type, each just checked against it
    limits: dict[str, Any] = {}
    for name, found in given.items():
        leaf = name.removeprefix("limits.")
        (top if leaf == name else limits)[leaf] = checked(name, found)
    sources = {name: given[name].source if name in given else "default" for name in known_settings()}
    settings = Settings(**top, limits=Limits(**limits))
    if (pair := contradicting(settings)) is not None:
        where = ", ".join(dict.fromkeys(sources[name] for name in pair if name in given))
        what = " and ".join(f"{name} {getattr(settings, name)}" for name in pair)
        raise ConfigurationError(f"{where}: {what} exclude each other")
    return Configuration(settings, sources)


def from_file(path: Path) -> dict[str, Given]:
    """The settings of a TOML file; nested ones stand in the table [limits]."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: not TOML: {error}") from None
    limits = document.pop("limits", {})
    if not isinstance(limits, dict):
        raise ConfigurationError(f"{path}: limits must be a table, got {limits!r}")
    flat = document | {f"limits.{name}": value for name, value in limits.items()}
    for name in flat:
        if name not in known_settings():
            raise ConfigurationError(f"{path}: unknown setting {name!r}{suggestion(name, known_settings())}")
    return {name: Given(value, str(path), False) for name, value in flat.items()}


def from_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    """The settings among the variables that begin with BATON_; two underscores stand for the dot of a nested one."""
    variables = {PREFIX + name.replace(".", "__").upper(): name for name in known_settings()}
    given = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if text.startswith("tcp://") or variable.startswith(f"{PREFIX}SERVICE_"):
            raise ConfigurationError(
                f"{variable}={text!r} looks like a Kubernetes service link, not a setting; "
                "set enableServiceLinks: false, or give the service another name"
            )
        if variable not in variables:
            hint = suggestion(variable, variables, PREFIX)
            raise ConfigurationError(f"unknown setting {variable} in the environment{hint}")
        given[variables[variable]] = Given(text, variable, True)
    return given


def checked(name: str, given: Given) -> object:
    """The value as its setting's type, or an error that says what would have been right."""
    kind = known_settings()[name]
    wrong = ConfigurationError(f"{given.source}: {name} must be {expectation(kind)}, got {given.value!r}")
    leaf = name.removeprefix("limits.")
    struct = Settings if leaf == name else Limits
    found = given.value
    if isinstance(kind, msgspec.inspect.VarTupleType) and given.textual and isinstance(found, str):
        found = [part.strip() for part in found.split(",") if part.strip()]
    try:
        value: object = getattr(msgspec.convert({leaf: found}, struct, strict=not given.textual), leaf)
    except msgspec.ValidationError:
        raise wrong from None
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong
    if name in ("kv_memory", "swap_memory") and isinstance(value, str):
        try:
            if (name, value.strip()) != ("swap_memory", "0"):  # none
                size_bytes(value)
        except ValueError:
            raise ConfigurationError(f"{given.source}: {name} must be a size like 4GiB, got {value!r}") from None
    if struct is Limits and not (isinstance(value, int | float) and value > 0):
        raise ConfigurationError(f"{given.source}: {name} must be a positive number, got {given.value!r}")
    return value


def expectation(kind: msgspec.inspect.Type) -> str:
    """What a value of this type looks like, in words."""
    match kind:
        case msgspec.inspect.UnionType():
            return " or ".join(expectation(t) for t in kind.types if not isinstance(t, msgspec.inspect.NoneType))
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in kind.values)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            noun = "an integer" if isinstance(kind, msgspec.inspect.IntType) else "a number"
            if kind.ge is not None and kind.le is not None:
                return f"{noun} from {kind.ge} to {kind.le}"
            return noun if kind.ge is None else f"{noun} of at least {kind.ge}"
        case msgspec.inspect.VarTupleType():
            return "a list of texts"
        case _:
            return "a text"


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A question after the nearest known name, or nothing where none is near; a common ``prefix`` does not count."""
    near = difflib.get_close_matches(name.removeprefix(prefix), [other.removeprefix(prefix) for other in known], n=1)
    return f"; did you mean {prefix + near[0]!r}?" if near else ""
