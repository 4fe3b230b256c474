"""Random work for the real model, played by the production scheduler in one process, disturbed or not.

The scheduler, the worker's core and the runner take turns; what a step yielded is checked to be said once for each
position. A *house* is what the workload meets: how many blocks the cache has, and the scheduler's bounds and switches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from baton.engine.batch import Sampling, StepRow, sampling_of
from baton.engine.blocks import Move
from baton.engine.limits import Limits
from baton.engine.policies import Policies
from baton.engine.worker import WorkerCore
from baton.ipc.frames import KVLayout, Params
from baton.ops.bench.lockstep import Lockstep
from baton.workers.runner import Runner
from baton.workers.sampler import uniforms

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


def play(runner: Runner, requests: list[Request], house: House) -> Played:
    """Serve the workload to its end; every request says all its tokens, each once."""
    own = runner.layout
    assert house.blocks <= own.blocks and house.host_blocks <= runner.host_blocks
    layout = KVLayout(
        own.block_size, house.blocks, own.bytes_per_block, own.layers, own.kv_heads, own.head_dim, own.dtype
    )
    model = (runner.config.vocab, runner.config.context_length)
    engine = Lockstep(SLOTS, layout, *model, house.limits, house.policies, house.host_blocks)
    worker = WorkerCore(0, (1,), own.block_size)
    found = Played([[] for _ in requests])
    coming = list(enumerate(requests))
    while coming or engine.plans:
        while coming and (coming[0][1].at <= found.steps or not engine.plans):
            slot, request = coming.pop(0)
            engine.submit(slot, request.prompt, request.params)
        assert engine.plans, "work waits and nothing is planned"
        plan = engine.plans[0]
        rows = worker.apply(plan)
        assert rows is not None
        runner.move(plan.moves)
        found.copies += sum(kind == Move.COPY for kind, _, _ in plan.moves)
        found.swaps += sum(kind == Move.IN for kind, _, _ in plan.moves)
        done = worker.commit(plan, rows, runner.step(rows) if rows else [])
        for record in done.records:
            said = found.outputs[record.slot]
            assert record.position == len(said), f"slot {record.slot} said position {record.position} at {len(said)}"
            said.append(record.token)
        engine.answer(done)
        found.steps += 1
        assert found.steps < STEPS_MAX, "no end"
    found.preemptions = engine.core.batcher.preemptions
    pool = engine.core.batcher.pool
    assert pool is not None and pool.available == pool.total, "a block was not given back"
    assert pool.host.free == house.host_blocks, "a host block was not given back"
    found.cached_tokens = pool.counts.hits
    for request, said in zip(requests, found.outputs, strict=True):
        assert len(said) == request.params.max_tokens, "a request did not say all it may"
    assert not engine.core.sequences
    return found


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

    def catch(logits: torch.Tensor, *_: object) -> list[object]:
        caught.append(logits[0].clone())
        return []

    from baton.workers import runner as module

    kept = module.sample
    module.sample = catch  # type: ignore[assignment]
    try:
        runner.step([row])
    finally:
        module.sample = kept
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
