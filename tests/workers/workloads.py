"""Random work for the real model, played by the production scheduler in one process, disturbed or not.

The scheduler, the worker's core and the runner take turns; what a step yielded is checked to be said once for each
position. A *house* is what the workload meets: how many blocks the cache has, and the scheduler's bounds and switches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.engine.batch import Sampled, Sampling, StepRow, sampling_of
from baton.engine.blocks import Move
from baton.engine.effects import Plan
from baton.engine.limits import Limits
from baton.engine.policies import Policies
from baton.engine.worker import WorkerCore
from baton.ipc.frames import KVLayout, Params
from baton.ops.bench.lockstep import Lockstep
from baton.workers.model import torch_steps
from baton.workers.runner import Runner
from baton.workers.sampler import Choice, uniforms

SLOTS = 16
STEPS_MAX = 5000


@dataclass(frozen=True)
class Request:
    """One request of a workload; it comes before step ``at``."""

    at: int
    prompt: list[int]
    params: Params


@dataclass(frozen=True)
class House:
    """What a workload meets. ``blocks`` is the size of the pool, ``host_blocks`` that of the swap space."""

    name: str
    blocks: int
    limits: Limits
    policies: Policies = field(default_factory=Policies)
    host_blocks: int = 0


@dataclass
class Played:
    """What came of it: the tokens of each request, and what happened on the way."""

    outputs: list[list[int]]
    steps: int = 0
    preemptions: int = 0
    swaps: int = 0
    copies: int = 0
    cached_tokens: int = 0


def workload(seed: int, vocab: int, requests: int = 5) -> list[Request]:
    """Requests that share a beginning, two of them whole, and others; greedy and sampled, coming at different times."""
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(100, vocab) for _ in range(count)]

    beginning = tokens(16 * chance.randint(1, 2))
    prompts = [beginning, beginning + tokens(chance.randint(1, 9)), tokens(chance.randint(1, 15)), list(beginning)]
    prompts += [tokens(chance.randint(1, 15)) for _ in range(requests - len(prompts))]
    arrivals = [0, *sorted(chance.randint(0, 8) for _ in prompts[1:])]
    return [
        Request(at, prompt, _params(chance, number))
        for number, (at, prompt) in enumerate(zip(arrivals, prompts, strict=True))
    ]


def _params(chance: random.Random, number: int) -> Params:
    length = chance.randint(2, 12)
    if chance.random() < 0.4:
        return Params(max_tokens=length, ignore_eos=True, temperature=0.0)
    return Params(
        max_tokens=length,
        ignore_eos=True,
        temperature=chance.choice((0.5, 0.8, 1.0)),
        top_p=chance.choice((1.0, 0.95, 0.8)),
        top_k=chance.choice((20, 50)),  # of fifty thousand flat choices too many are as near as rounding
        seed=chance.randrange(1 << 62) + number,
    )


class Guest:
    """A workload in its house, with slots and blocks of the runner to itself, so that many are played at once."""

    def __init__(
        self, runner: Runner, requests: list[Request], house: House, slots: int, blocks: int, hosts: int
    ) -> None:
        own = runner.layout
        assert blocks + house.blocks <= own.blocks and hosts + house.host_blocks <= runner.host_blocks
        layout = KVLayout(
            own.block_size, house.blocks, own.bytes_per_block, own.layers, own.kv_heads, own.head_dim, own.dtype
        )
        model = (runner.config.vocab, runner.config.context_length)
        self.requests, self.house = requests, house
        self.found = Played([[] for _ in requests])
        self._first_slot, self._first_block, self._first_host = slots, blocks, hosts
        self._engine = Lockstep(SLOTS, layout, *model, house.limits, house.policies, house.host_blocks)
        self._worker = WorkerCore(0, (1,), own.block_size)
        self._coming = list(enumerate(requests))
        self._step: tuple[Plan, list[StepRow]]

    @property
    def over(self) -> bool:
        """Whether everything was said."""
        return not (self._coming or self._engine.plans)

    def begin(self) -> tuple[list[tuple[int, int, int]], list[StepRow]]:
        """The next step's moves and rows, in the runner's own numbers."""
        found, engine = self.found, self._engine
        while self._coming and (self._coming[0][1].at <= found.steps or not engine.plans):
            slot, request = self._coming.pop(0)
            engine.submit(slot, request.prompt, request.params)
        assert engine.plans, "work waits and nothing is planned"
        plan = engine.plans[0]
        rows = self._worker.apply(plan)
        assert rows is not None
        self._step = plan, rows
        found.copies += sum(kind == Move.COPY for kind, _, _ in plan.moves)
        found.swaps += sum(kind == Move.IN for kind, _, _ in plan.moves)
        return [self._moved(*move) for move in plan.moves], [self._placed(row) for row in rows]

    def end(self, sampled: list[Sampled]) -> None:
        """What the rows with ``sample`` yielded, in order."""
        plan, rows = self._step
        done = self._worker.commit(plan, rows, sampled)
        for record in done.records:
            said = self.found.outputs[record.slot]
            assert record.position == len(said), f"slot {record.slot} said position {record.position} at {len(said)}"
            said.append(record.token)
        self._engine.answer(done)
        self.found.steps += 1
        assert self.found.steps < STEPS_MAX, "no end"

    def leave(self) -> Played:
        """What came of it; every request said all its tokens, each once, and everything was given back."""
        core, found = self._engine.core, self.found
        pool = core.batcher.pool
        assert pool is not None and pool.available == pool.total, "a block was not given back"
        assert pool.host.free == self.house.host_blocks, "a host block was not given back"
        found.preemptions, found.cached_tokens = core.batcher.preemptions, pool.counts.hits
        for request, said in zip(self.requests, found.outputs, strict=True):
            assert len(said) == request.params.max_tokens, "a request did not say all it may"
        assert not core.sequences
        return found

    def _placed(self, row: StepRow) -> StepRow:
        blocks = [self._first_block + block for block in row.blocks]
        return msgspec.structs.replace(row, slot=self._first_slot + row.slot, blocks=blocks)

    def _moved(self, kind: int, source: int, destination: int) -> tuple[int, int, int]:
        origin = self._first_host if kind == Move.IN else self._first_block
        target = self._first_host if kind == Move.OUT else self._first_block
        return kind, origin + source, target + destination


def play(runner: Runner, stays: list[tuple[list[Request], House]]) -> list[Played]:
    """Serve each workload to its end in its house. Their steps are computed together, which costs little more than one
    alone: a row's result does not depend on the rows beside it.
    """
    guests, blocks, hosts = list[Guest](), 0, 0
    for number, (requests, house) in enumerate(stays):
        guests.append(Guest(runner, requests, house, number * SLOTS, blocks, hosts))
        blocks, hosts = blocks + house.blocks, hosts + house.host_blocks
    while playing := [guest for guest in guests if not guest.over]:
        begun = [guest.begin() for guest in playing]
        runner.move([move for moves, _ in begun for move in moves])
        rows = [row for _, part in begun for row in part]
        sampled = iter(runner.step(rows) if rows else [])
        for guest, (_, part) in zip(playing, begun, strict=True):
            guest.end([next(sampled) for row in part if row.sample])
    return [guest.leave() for guest in guests]


def closeness(runner: Runner, request: Request, said: list[int]) -> float:
    """How near to another choice the token after ``said`` is: the two best logits' difference where it is greedy, else
    the distance of the random number from an edge of the interval it falls in.
    """
    tokens = request.prompt + said
    blocks = list(range(-(-len(tokens) // runner.layout.block_size)))
    sampling = sampling_of(request.params, ())
    logits = raw_logits(runner, StepRow(0, tokens, 0, blocks, True, len(said), sampling)).double()
    if sampling.temperature < 1e-5:
        best = logits.topk(2).values
        return float(best[0] - best[1])
    return edge_distance(logits.numpy(), sampling, len(said))


def raw_logits(runner: Runner, row: StepRow) -> torch.Tensor:
    """The logits after one row, float32 ``[vocab]``."""
    caught: list[torch.Tensor] = []
    choose = torch_steps.choose

    def catch(logits: torch.Tensor, *rest: Any) -> Choice:
        caught.append(logits[0].clone())
        return choose(logits, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_steps, "choose", catch)
        runner.step([row])
    return caught[0]


def edge_distance(logits: np.ndarray, sampling: Sampling, position: int) -> float:
    """Where the row's random number falls among the kept tokens' shares, in the order of their ids: how far from the
    nearer end of the share it hits. Where the last tokens that top-k keeps and drops are nearer in logits, that.
    """
    scaled = (logits - logits.max()) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order])
    kept, tie = len(order), np.inf
    if 0 < sampling.top_k < kept:
        kept = sampling.top_k
        tie = (scaled[order[kept - 1]] - scaled[order[kept]]) * sampling.temperature
    if sampling.top_p < 1:
        before = np.cumsum(weights[:kept]) - weights[:kept]
        kept = int((before / weights[:kept].sum() < sampling.top_p).sum())
    edges = np.cumsum(np.exp(scaled[np.sort(order[:kept])]))
    number = float(uniforms([sampling.seed], [position])[0]) * edges[-1]
    return float(min(tie, np.abs(edges - number).min() / edges[-1]))
