"""The file of requests: workloads and what each sends, as JSON lines; made from a seed, written, and read back.

Every server gets the file's requests, in the file's order. No prompt stands in it twice, so nothing but the prefix that
is meant to be shared is ever found in a cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from baton.ops.bench.arrivals import Arrival, read_trace

# fmt: off
#: a server that takes no token ids gets as many of these, which most vocabularies have as one token each
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area",
    "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue",
    "side", "kind", "head", "house", "service", "friend",
)
# fmt: on


class BadRequests(ValueError):
    """The file of requests, or what should be in it, makes no sense; the message says where."""


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="workload"):
    """How requests are sent: a closed loop of ``concurrency``, or at random at a rate.

    The rate is ``load`` times what the workload "capacity" found at this server, or ``rate`` requests/s at each.
    ``counted`` is false for a warm-up.
    """

    name: str
    concurrency: int = 0
    load: float = 0.0
    rate: float = 0.0
    counted: bool = True

    def __post_init__(self) -> None:
        if [self.concurrency > 0, self.load > 0, self.rate > 0].count(True) != 1:
            raise ValueError(f"workload {self.name!r} needs one of concurrency, load and rate")


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="request"):
    """One request of the workload above it. ``gap`` is the wait since the one before, in means: 1 on average."""

    prompt: list[int]
    output_tokens: int
    gap: float = 0.0

    @property
    def text(self) -> str:
        """As many words as the prompt has tokens, for servers that take no ids; the same words for the same ids."""
        return "".join(f" {WORDS[token % len(WORDS)]}" for token in self.prompt).strip()


class Part(msgspec.Struct, frozen=True):
    """A workload with its requests."""

    workload: Workload
    requests: list[Request]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What to make. ``trace`` is needed for loads and rates; lengths from it keep to ``context_tokens``."""

    workloads: Sequence[str]
    loads: Sequence[float]
    rates: Sequence[float]
    repeats: int
    arrivals: int
    trace: Path | None
    context_tokens: int
    vocabulary: range
    seed: int


#: those that are always the same: name, (concurrency, requests or 0 for the shape's repeats, prompt, output)
FIXED = {
    "single": (1, 0, 128, 128),
    "many": (32, 32, 128, 128),
    "prompt": (1, 0, 1024, 1),
}
WARM_UP = {"warm-up, one": (1, 1, 128, 16), "warm-up, prompt": (1, 1, 1024, 1), "warm-up, many": (32, 32, 64, 16)}
PREFIX, PREFIX_FIRST, PREFIX_TOKENS, END_TOKENS, PREFIX_OUTPUT = "prefix", "prefix, first", 600, 64, 16
CAPACITY, CAPACITY_CONCURRENCY = "capacity", 32
KINDS = (*FIXED, PREFIX, "load", "rate")


def make(shape: Shape) -> Iterator[Part]:
    """All parts of a shape, the warm-up first; the same for the same shape."""
    lengths = trace_lengths(shape) if {"load", "rate"} & set(shape.workloads) else []

    def ids(chance: random.Random, count: int) -> list[int]:
        return chance.choices(shape.vocabulary, k=count)

    def fixed(name: str, concurrency: int, count: int, prompt: int, output: int) -> Part:
        chance, counted = random.Random(f"{shape.seed}/{name}"), name not in WARM_UP
        requests = [Request(prompt=ids(chance, prompt), output_tokens=output) for _ in range(count or shape.repeats)]
        return Part(Workload(name=name, concurrency=concurrency, counted=counted), requests)

    def drawn(workload: Workload) -> Part:
        """The same lengths and gaps under every name, other ids."""
        chance, timing = random.Random(f"{shape.seed}/{workload.name}"), random.Random(f"{shape.seed}/gaps")
        return Part(
            workload,
            [
                Request(prompt=ids(chance, one.prompt_tokens), output_tokens=one.output_tokens, gap=gap)
                for one in lengths
                for gap in (round(timing.expovariate(1), 6),)
            ],
        )

    for name, row in WARM_UP.items():
        yield fixed(name, *row)
    for name, row in FIXED.items():
        if name in shape.workloads:
            yield fixed(name, *row)
    if PREFIX in shape.workloads:
        chance = random.Random(f"{shape.seed}/{PREFIX}")
        shared = ids(chance, PREFIX_TOKENS)
        requests = [
            Request(prompt=shared + ids(chance, END_TOKENS), output_tokens=PREFIX_OUTPUT)
            for _ in range(1 + shape.repeats)
        ]
        # The first fills the cache.
        yield Part(Workload(name=PREFIX_FIRST, concurrency=1), requests[:1])
        yield Part(Workload(name=PREFIX, concurrency=1), requests[1:])
    if "load" in shape.workloads:
        yield drawn(Workload(name=CAPACITY, concurrency=CAPACITY_CONCURRENCY))
        for load in shape.loads:
            yield drawn(Workload(name=f"load {100 * load:g} %", load=load))
    if "rate" in shape.workloads:
        for rate in shape.rates:
            yield drawn(Workload(name=f"{rate:g} requests/s", rate=rate))


def trace_lengths(shape: Shape) -> list[Arrival]:
    """Lengths drawn from the trace: an answer has at most half the context, a prompt what the answer leaves of it."""
    if shape.trace is None:
        raise BadRequests("loads and rates draw their lengths from a trace: give --trace, or other --workload")
    try:
        arrivals = read_trace(shape.trace)
    except (ValueError, OSError) as error:
        raise BadRequests(f"{shape.trace} is no trace: {error}") from None
    if not arrivals:
        raise BadRequests(f"{shape.trace}: nothing in it")
    found = []
    for one in random.Random(f"{shape.seed}/lengths").choices(arrivals, k=shape.arrivals):
        output = max(1, min(one.output_tokens, shape.context_tokens // 2))
        prompt = max(1, min(one.prompt_tokens, shape.context_tokens - output))
        found.append(Arrival(0.0, prompt, output))
    return found


def write(path: Path, parts: Iterator[Part]) -> None:
    """Write the file, whole or not at all."""
    encoder = msgspec.json.Encoder()
    lines = [encoder.encode(one) for part in parts for one in (part.workload, *part.requests)]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_bytes(b"\n".join(lines) + b"\n")
    beside.rename(path)


def read(path: Path) -> list[Part]:
    """The parts of a file; ``BadRequests`` names the line that cannot be read."""
    decoder = msgspec.json.Decoder(Workload | Request)
    found: list[Part] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            one = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise BadRequests(f"{path}:{number}: {error}") from None
        if isinstance(one, Workload):
            if any(one.name == part.workload.name for part in found):
                raise BadRequests(f"{path}:{number}: workload {one.name!r} is there twice")
            if one.load and not any(part.workload.name == CAPACITY for part in found):
                raise BadRequests(f"{path}:{number}: a load before the workload {CAPACITY!r}")
            found.append(Part(one, []))
        elif not found:
            raise BadRequests(f"{path}:{number}: a request before any workload")
        elif not one.prompt or one.output_tokens < 1 or one.gap < 0:
            raise BadRequests(f"{path}:{number}: a request without a prompt or an output, or with a negative gap")
        else:
            found[-1].requests.append(one)
    empty = [part.workload.name for part in found if not part.requests]
    if empty or not found:
        raise BadRequests(f"{path}: no requests for {', '.join(empty) or 'anything'}")
    return found
