"""Giving way by recompute and by swap: nobody says another token for it, and no block is lost, here or on the host."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.blocks import Move
from baton.engine.limits import Limits
from baton.engine.policies import Policies
from baton.engine.sequence import Sequence
from baton.ipc.frames import Cancel, Credit, Life, Params, Role
from tests.engine.rig import Engine, truth

CHEAP, DEAR = 1 << 50, 1  # bytes a second that a swap moves, as is believed before any has been seen
PROMPT = [5, 6, 7, 8]
CACHED, UNCACHED = (Policies(prefix_cache=cached, admission="optimistic") for cached in (True, False))


def limits(bytes_per_s: int, step_tokens: int = 16) -> Limits:
    return Limits(step_tokens_max=step_tokens, swap_prior_bytes_per_s=bytes_per_s)


def params(max_tokens: int, seed: int) -> Params:
    return Params(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def balanced(engine: Engine) -> None:
    """Every block, here and on the host, is free, cached or somebody's."""
    pool = engine.core.batcher.pool
    if pool is None:
        return
    held = {block for seq in engine.core.sequences.values() for block in seq.blocks}
    assert pool.free + pool.cached + len(held) == pool.total
    swapped = [block for seq in engine.core.sequences.values() for block in seq.host_blocks]
    assert len(set(swapped)) == len(swapped) == pool.host.total - pool.host.free
    for seq in engine.core.sequences.values():
        assert not (seq.blocks and seq.host_blocks), "a sequence has its tokens in one place"
        assert len(seq.host_blocks) == pool.blocks_for(seq.host_tokens)


def play(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> dict[int, list[int]]:
    """All come at once; what each has said in the end."""
    said: dict[int, list[int]] = {}
    for slot, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(slot, prompt, params(length, slot))
    for _ in range(20_000):
        said.update((slot, seq.output) for slot, seq in engine.core.sequences.items())
        balanced(engine)
        if not engine.step():
            break
    balanced(engine)
    assert not engine.core.sequences
    pool = engine.core.batcher.pool
    assert pool is not None and pool.available == pool.total and pool.host.free == pool.host.total
    return said


def until_swapped(engine: Engine) -> Sequence:
    """Step until somebody's tokens are on the host."""
    for _ in range(500):
        swapped = [seq for seq in engine.core.sequences.values() if seq.host_blocks]
        if swapped:
            return swapped[0]
        assert engine.step()
    raise AssertionError("nobody was swapped out")


@pytest.mark.parametrize("policies", [CACHED, UNCACHED])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("host_blocks", "bytes_per_s", "ways"),
    [(64, CHEAP, {"swap"}), (64, DEAR, {"recompute"}), (0, CHEAP, {"recompute"}), (9, CHEAP, {"swap", "recompute"})],
)
def test_twenty_long_requests_in_a_tiny_pool_say_what_they_say_alone(
    policies: Policies, in_flight: int, host_blocks: int, bytes_per_s: int, ways: set[str]
) -> None:
    engine = Engine(limits(bytes_per_s), 12, 4, in_flight, policies, host_blocks)
    said = play(engine, [PROMPT] * 20, [30] * 20)
    assert said == {slot: truth(PROMPT, params(30, slot), 30) for slot in range(20)}
    counts = engine.core.batcher.preemption.counts
    assert {way for way in counts if counts[way]} == ways
    kinds = {kind for plan in engine.plans for kind, _, _ in plan.moves}
    assert ({Move.OUT, Move.IN} <= kinds) == ("swap" in ways)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(6, 20),
    st.integers(0, 24),
    st.sampled_from([CHEAP, 300, DEAR]),
    st.sampled_from([1, 2]),
    st.sampled_from([CACHED, UNCACHED]),
    st.sampled_from([1, 3]),
)
def test_whatever_comes_and_however_little_room_there_is(
    seed: int, blocks: int, hosts: int, bytes_per_s: int, in_flight: int, policies: Policies, of_a_row: int
) -> None:
    rng = Random(seed)
    beginning = [rng.randrange(2, 30) for _ in range(rng.randrange(12))]
    prompts = [beginning + [rng.randrange(2, 30) for _ in range(rng.randint(1, 8))] for _ in range(6)]
    lengths = [rng.randint(1, blocks * 4 - len(prompt)) for prompt in prompts]
    engine = Engine(limits(bytes_per_s, rng.choice([3, 8, 64])), blocks, 4, in_flight, policies, hosts)
    engine.runner.tokens_per_row_max = engine.core.batcher.tokens_per_row = of_a_row
    said = play(engine, prompts, lengths)
    for slot, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert said[slot] == truth(prompt, params(length, slot), length)


def test_who_comes_back_computes_nothing_again() -> None:
    engine = Engine(limits(CHEAP), 8, 4, host_blocks=16)
    for slot in (0, 1):
        engine.submit(slot, PROMPT, params(16, slot))
    seq = until_swapped(engine)
    tokens, before = seq.host_tokens, len(engine.plans)
    assert tokens == seq.tokens - 1
    engine.run()
    begun = next(row for plan in engine.plans[before - 1 :] for row in plan.rows if row.slot == 1)
    assert (begun.start, begun.count) == (tokens, 1)


def test_what_is_still_in_the_pool_is_shared_again_and_not_moved() -> None:
    engine = Engine(limits(CHEAP), 8, 4, policies=CACHED, host_blocks=16)
    prompt = [*PROMPT, *PROMPT]
    for slot in (0, 1):
        engine.submit(slot, prompt, params(14, slot))
    seq = until_swapped(engine)
    shared, moved = engine.core.sequences[0].blocks[:2], len(seq.host_blocks)
    engine.run()
    table = next(row.blocks for plan in reversed(engine.plans) for row in plan.rows if row.slot == 1 and row.blocks[1:])
    assert table[:2] == shared
    back = [move for plan in engine.plans for move in plan.moves if move[0] == Move.IN]
    assert 0 < len(back) <= moved - 2
    assert engine.flushed()[1].length == 14


def test_who_is_cancelled_while_swapped_out_gives_its_host_blocks_back() -> None:
    engine = Engine(limits(CHEAP), 8, 4, host_blocks=16)
    for slot in (0, 1):
        engine.submit(slot, PROMPT, params(16, slot))
    seq, pool = until_swapped(engine), engine.core.batcher.pool
    assert pool is not None and pool.host.free < 16
    engine.board.set_cancel(seq.held.slot, seq.held.generation)
    engine.tell(Cancel(seq.held.slot, seq.held.generation, 0))
    assert (engine.flushed()[seq.held.slot].reason, pool.host.free) == ("cancelled", 16)
    engine.run()
    assert engine.flushed()[0].length == 16


def test_what_was_on_the_host_dies_with_the_worker() -> None:
    engine = Engine(limits(CHEAP), 8, 4, host_blocks=16)
    for slot in (0, 1):
        engine.submit(slot, PROMPT, params(16, slot))
    seq = until_swapped(engine)
    engine.waiting.clear()
    engine.board.set_live(Role.WORKER, 0, 2, 0)
    engine.tell(Life(Role.WORKER, 0, 2))
    assert (seq.host_blocks, seq.host_tokens) == ([], 0)
    said = {slot: seq.output for slot, seq in engine.core.sequences.items()}
    engine.start_worker(2, 8)
    balanced(engine)
    engine.run()
    assert said == {slot: truth(PROMPT, params(16, slot), 16) for slot in (0, 1)}


def test_a_new_worker_without_swap_space_is_asked_for_none() -> None:
    engine = Engine(limits(CHEAP), 8, 4, host_blocks=16)
    engine.host_blocks = 0
    engine.board.set_live(Role.WORKER, 0, 2, 0)
    engine.tell(Life(Role.WORKER, 0, 2))
    engine.start_worker(2, 8)
    play(engine, [PROMPT, PROMPT], [16, 16])
    counts = engine.core.batcher.preemption.counts
    assert counts["recompute"] and not counts["swap"]


@pytest.mark.parametrize(("measured", "way"), [(1 << 20, "swap"), (0, "recompute")])
def test_what_a_worker_measured_counts_and_not_what_was_believed(measured: int, way: str) -> None:
    engine = Engine(limits(DEAR), 8, 4, host_blocks=16)
    engine.board.set_live(Role.WORKER, 0, 2, 0)
    engine.tell(Life(Role.WORKER, 0, 2))
    engine.swap_bytes_per_s = measured
    engine.start_worker(2, 8)
    play(engine, [PROMPT, PROMPT], [16, 16])
    counts = engine.core.batcher.preemption.counts
    assert [found for found in counts if counts[found]] == [way]


def test_blocks_are_taken_from_juniors_and_from_those_that_wait_for_their_clients() -> None:
    engine = Engine(limits(CHEAP), 8, 4, host_blocks=16)
    engine.submit(0, PROMPT, params(20, 0), credit=9)
    for slot in (1, 2):
        engine.submit(slot, PROMPT, params(12, slot))
    engine.run()
    slow = engine.core.sequences[0]
    assert set(engine.flushed()) == {1, 2} and slow.held.state in ("preempted", "paused")
    assert slow.preemptions == 0, "a slow client earns no protection"
    engine.tell(Credit(0, slow.held.generation, slow.run, 1 << 20))
    engine.run()
    assert engine.flushed()[0].length == 20
