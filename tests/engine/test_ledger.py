"""The ledger: its sums are those of its entries, and it promises only what there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.ledger import Ledger, Memory
from baton.engine.limits import Limits
from tests.engine.pools import Counts

LIMITS = Limits()


def test_a_request_is_promised_what_is_neither_held_nor_promised() -> None:
    pool = Counts(10)
    ledger = Ledger(pool, Memory(), LIMITS)
    assert ledger.fits(1, 160) and not ledger.fits(1, 161)
    ledger.seat(1, 96)  # 6 blocks in all
    assert ledger.growth_blocks == 6 and ledger.unpromised_blocks == 4
    pool.held = 2
    ledger.hold(1, 2)
    assert ledger.growth_blocks == 4 and ledger.unpromised_blocks == 4
    assert ledger.fits(2, 64) and not ledger.fits(2, 65)
    ledger.drop(1)
    pool.held = 0
    assert ledger.unpromised_blocks == 10
    ledger.drop(1)  # once more does no harm


def test_shared_blocks_count_once() -> None:
    pool = Counts(10, held=4)
    ledger = Ledger(pool, Memory(), LIMITS)
    ledger.seat(1, 96, table_blocks=4)
    assert not ledger.fits(2, 96) and ledger.fits(2, 96, table_blocks=4)  # four of its six blocks are those of slot 1
    ledger.seat(2, 96, table_blocks=4)
    assert (ledger.held_blocks, ledger.growth_blocks, ledger.unpromised_blocks) == (4, 4, 2)


def test_headroom_and_margin_stay_free_beside_others_but_one_alone_may_have_all() -> None:
    ledger = Ledger(Counts(100), Memory(), Limits(kv_headroom_share=0.1))
    assert ledger.headroom_blocks == 10 and ledger.fits(1, 1600)
    ledger.seat(1, 16)
    assert ledger.fits(2, 89 * 16) and not ledger.fits(2, 90 * 16)
    assert ledger.fits(2, 80 * 16, margin_blocks=9) and not ledger.fits(2, 81 * 16, margin_blocks=9)


def test_who_left_comes_back_before_anybody_new() -> None:
    pool = Counts(10)
    ledger = Ledger(pool, Memory(swap_blocks=8), LIMITS)
    ledger.seat(1, 64)
    ledger.seat(2, 64)
    ledger.leave(2, 64, swapped_blocks=3)
    assert (ledger.resume_blocks, ledger.swapped_blocks, ledger.growth_blocks) == (4, 3, 4)
    assert not ledger.fits(3, 48) and ledger.fits(3, 32)  # four of the six that are left are for slot 2
    assert ledger.fits(2, 96)
    ledger.seat(2, 96)
    assert (ledger.resume_blocks, ledger.swapped_blocks, ledger.growth_blocks) == (0, 0, 10)
    ledger.leave(1, 0)
    assert ledger.resume_blocks == 0 and ledger.busy
    ledger.drop(1)
    ledger.drop(2)
    assert not ledger.busy and ledger.growth_blocks == 0


def test_growth_is_never_negative_and_a_promise_never_below_what_is_held() -> None:
    ledger = Ledger(Counts(10), Memory(), LIMITS)
    ledger.seat(1, 32)
    ledger.hold(1, 3)
    assert ledger.growth_blocks == 0
    ledger.promise(1, 16)
    assert ledger.growth_blocks == 0 and ledger.promised_tokens(1) == 48
    ledger.promise(1, 80)
    assert ledger.growth_blocks == 2


steps = st.lists(
    st.tuples(
        st.sampled_from(["seat", "hold", "promise", "leave", "drop"]),
        st.integers(0, 4),
        st.integers(0, 300),
        st.integers(0, 12),
    ),
    max_size=60,
)


@given(steps)
def test_the_sums_are_those_of_the_entries(moves: list[tuple[str, int, int, int]]) -> None:
    ledger = Ledger(Counts(64), Memory(), LIMITS)
    seated: dict[int, tuple[int, int]] = {}
    left: dict[int, tuple[int, int]] = {}
    for what, slot, tokens, blocks in moves:
        needed = -(-tokens // 16)
        if what == "seat" and slot not in seated:
            ledger.seat(slot, tokens, blocks)
            left.pop(slot, None)
            seated[slot] = (needed, blocks)
        elif what == "drop":
            ledger.drop(slot)
            seated.pop(slot, None)
            left.pop(slot, None)
        elif slot in seated:
            if what == "hold":
                ledger.hold(slot, blocks)
                seated[slot] = (seated[slot][0], blocks)
            elif what == "promise":
                ledger.promise(slot, tokens)
                seated[slot] = (max(needed, seated[slot][1]), seated[slot][1])
            elif what == "leave":
                ledger.leave(slot, tokens, blocks)
                del seated[slot]
                left[slot] = (needed, blocks)
        assert ledger.growth_blocks == sum(max(0, promised - table) for promised, table in seated.values())
        assert ledger.resume_blocks == sum(resume for resume, _ in left.values())
        assert ledger.swapped_blocks == sum(swapped for _, swapped in left.values())
        assert ledger.seated == len(seated) and ledger.busy == bool(seated or left)


def test_the_ledger_prints_itself() -> None:
    pool = Counts(100, held=20, cached=5)
    ledger = Ledger(pool, Memory(1000, 5_000_000, 300_000, 20_000, 50), LIMITS)
    ledger.seat(1, 480, 20)
    ledger.seat(2, 160, 0)
    ledger.leave(2, 160, 10)
    found = {line.name: (line.blocks, line.bytes) for line in ledger.lines()}
    assert found["weights"] == (None, 5_000_000) and found["workspace of a step"] == (None, 300_000)
    assert found["KV pool"] == (100, 100_000) and found["held"] == (20, 20_000)
    assert found["growth of the admitted"] == (10, 10_000) and found["needed to come back"] == (10, 10_000)
    assert found["headroom"] == (1, 1000) and found["unpromised"] == (59, 59_000)
    assert found["swapped out"] == (10, 10_000) and found["cached, evictable"] == (5, 5000)
    table = ledger.table().splitlines()
    assert len(table) == 1 + len(found) and len({len(line) for line in table}) == 1
    assert any(line.split() == ["weights", "5,000,000"] for line in table)
