"""The prefix cache as requests meet it: what is computed once, who waits for whom, what is copied, who shares."""

from __future__ import annotations

from baton.engine.blocks import Move
from baton.engine.effects import Plan
from baton.engine.limits import Limits
from baton.engine.policies import Policies
from baton.ipc.frames import Handed, Params, Role, Terms
from tests.engine.rig import TRACE, Engine, address, hand, truth

LONG = list(range(2, 15))  # three blocks of four, and one token more


def params(seed: int = 1, max_tokens: int = 4) -> Params:
    return Params(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def caching(in_flight: int = 1, blocks: int = 64, share: bool = False, limits: Limits | None = None) -> Engine:
    return Engine(
        limits, blocks=blocks, in_flight=in_flight, policies=Policies(share_prefixes=share, admission="optimistic")
    )


def computed(plans: list[Plan], slot: int) -> int:
    """Tokens of a slot that the plans had computed."""
    return sum(row.count for plan in plans for row in plan.rows if row.slot == slot)


def test_a_prompt_that_was_computed_before_is_found_and_only_its_rest_computed() -> None:
    engine = caching()
    engine.submit(0, LONG, params(1))
    engine.run()
    before = len(engine.plans)
    engine.submit(1, [*LONG[:12], 20, 21], params(2))
    assert engine.core.sequences[1].cached_tokens == 12
    engine.run()
    assert computed(engine.plans[before:], 1) == 2 + 3
    assert engine.flushed()[1].cached_tokens == 12
    assert engine.flushed()[0].cached_tokens == 0


def test_what_is_found_changes_nothing_of_what_is_said() -> None:
    engine = caching(in_flight=2)
    said: dict[int, list[int]] = {}
    for slot in range(6):
        engine.submit(slot, LONG[: 13 - slot % 3], params(slot))
        said[slot] = engine.core.sequences[slot].output
        engine.step()
    engine.run()
    for slot in range(6):
        assert said[slot] == truth(LONG[: 13 - slot % 3], params(slot), 4)


def test_of_a_prompt_that_is_there_whole_the_last_block_is_copied_and_one_token_computed() -> None:
    engine = caching()
    prompt = LONG[:12]
    engine.submit(0, prompt, params(1))
    engine.run()
    engine.submit(1, prompt, params(2))
    plan = engine.plan
    assert plan is not None
    (row,), (move,) = plan.rows, plan.moves
    assert (row.start, row.count, row.sample) == (11, 1, True)
    assert (move[0], move[2]) == (Move.COPY, row.blocks[-1])
    said = engine.core.sequences[1].output
    engine.run()
    assert said == truth(prompt, params(2), 4)


def test_equal_prompts_at_once_are_computed_once() -> None:
    engine = caching()
    for slot in range(5):
        engine.submit(slot, LONG, params(slot))
    engine.run()
    assert sum(row.count for plan in engine.plans for row in plan.rows if row.count > 1 or row.start < 13) == 13 + 4
    assert len(engine.flushed()) == 5


def test_a_prefix_is_not_waited_for_longer_than_the_bound() -> None:
    engine = caching(limits=Limits(prefix_wait_s_max=1e-6))
    engine.submit(0, LONG, params(1))
    engine.submit(1, LONG, params(2))
    waiting, batcher = engine.core.sequences[1], engine.core.batcher
    assert batcher._waits_for_prefix(waiting, 500)
    assert batcher._waits_for_prefix(waiting, 1_499)
    assert not batcher._waits_for_prefix(waiting, 1_500)


def test_who_must_compute_its_prompt_itself_does() -> None:
    engine = caching()
    engine.submit(0, LONG, params(1))
    engine.submit(1, LONG, params(2))
    engine.core.sequences[1].prefix_reads = False
    engine.run()
    assert computed(engine.plans, 1) == len(LONG) + 3
    assert engine.flushed()[1].cached_tokens == 0


def test_tenants_share_where_they_are_to() -> None:
    for share in (False, True):
        engine = caching(share=share)
        for slot, tenant in enumerate(("a", "b")):
            key = hand(engine.board, slot, "queued", Role.TOKENIZER)
            engine.tell(
                Handed(key, address(Role.FRONTEND), TRACE, Terms("m", tenant=tenant), params(slot), LONG, [], 99)
            )
            engine.run()
        assert engine.flushed()[1].cached_tokens == (12 if share else 0)


def test_a_dead_worker_takes_the_cache_with_it() -> None:
    engine = caching()
    engine.submit(0, LONG, params(1))
    engine.run()
    engine.start_worker(2, 64)
    engine.submit(1, LONG, params(2))
    engine.run()
    assert engine.flushed()[1].cached_tokens == 0


def test_what_is_cached_makes_room_for_what_is_needed() -> None:
    engine = caching(blocks=6)
    for slot in range(6):
        engine.submit(slot, [slot + 2, *LONG[1:12]], params(slot, 8))
        engine.run()
    assert {flush.length for flush in engine.flushed().values()} == {8}
    pool = engine.core.batcher.pool
    assert pool is not None and pool.counts.evictions > 0 and pool.available == pool.total


def test_the_preempted_find_what_they_had_computed() -> None:
    engine = caching(blocks=8)
    engine.submit(0, LONG[:8], params(1, 20))
    engine.submit(1, [30, 29, 28, 27, 26], params(2, 20))
    engine.run()
    assert engine.core.batcher.preemptions > 0
    assert {flush.length for flush in engine.flushed().values()} == {20}


def test_what_the_cache_was_asked_and_had_is_published_and_outlives_a_worker() -> None:
    engine = caching()
    engine.submit(0, LONG, params(1))
    engine.run()
    engine.submit(1, LONG, params(2))
    engine.run()
    shown = engine.board.gauges()
    assert (shown["prefix_queries_tokens"], shown["prefix_hits_tokens"]) == (26, 12)
    engine.start_worker(2, 64)
    assert engine.board.gauges()["prefix_hits_tokens"] == 12
