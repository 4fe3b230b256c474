"""Recorded arrivals of requests, as the benchmarks read them."""

from __future__ import annotations

import csv
import gzip
from datetime import datetime
from io import StringIO
from pathlib import Path

import msgspec


class Arrival(msgspec.Struct, frozen=True):
    """One request of a trace: seconds since its first, and tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals in time order, from gzipped or plain CSV.

    Columns are those of the Azure LLM inference trace (TIMESTAMP, ContextTokens, GeneratedTokens), or ``gap_ms`` since
    the request before, ``context_tokens``, ``generated_tokens``. Raises ValueError for other columns.
    """
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    reader = csv.DictReader(StringIO(text))
    found: list[Arrival] = []
    named = reader.fieldnames or ()
    azure = "TIMESTAMP" in named
    needed = ("ContextTokens", "GeneratedTokens") if azure else ("gap_ms", "context_tokens", "generated_tokens")
    missing = [name for name in needed if name not in named]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}, and these: {', '.join(named) or 'none'}")
    if azure:
        for row in reader:
            at = datetime.strptime(row["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f")
            found.append(Arrival(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        found.sort(key=lambda one: one.at_s)
        first_s = found[0].at_s if found else 0.0
        return [msgspec.structs.replace(one, at_s=one.at_s - first_s) for one in found]
    at_ms = 0
    for row in reader:
        at_ms += int(row["gap_ms"])
        found.append(Arrival(at_ms / 1e3, int(row["context_tokens"]), int(row["generated_tokens"])))
    return found
