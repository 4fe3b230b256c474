"""The table of states: whole, reachable, and the source of its own picture."""

from __future__ import annotations

import itertools

import pytest

from baton.engine.states import STATE_NAMES, STATE_NUMBERS, STATES, check_move, diagram, owner_of
from baton.ipc.frames import Role


def reachable(start: str) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        for following in STATES[todo.pop()][1]:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


def test_every_state_can_be_reached_and_left_for_the_end() -> None:
    assert reachable("received") == set(STATES)
    assert all("closed" in reachable(state) for state in STATES)
    assert STATES["closed"][1] == ()


def test_moves_lead_to_states_that_exist() -> None:
    assert {state for _, moves in STATES.values() for state in moves} <= set(STATES)


def test_whatever_somebody_else_owns_can_be_given_back() -> None:
    assert all("received" in moves for role, moves in STATES.values() if role != Role.FRONTEND)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(STATES, STATES)))
def test_check_move_is_the_table(old: str, new: str) -> None:
    if new in STATES[old][1]:
        check_move(old, new)
    else:
        with pytest.raises(AssertionError, match="illegal move"):
            check_move(old, new)


def test_numbers_name_states_one_to_one_and_none_is_zero() -> None:
    assert {STATE_NAMES[number] for number in STATE_NUMBERS.values()} == set(STATES)
    assert 0 not in STATE_NAMES


def test_the_diagram_shows_every_state_and_every_move() -> None:
    lines = {line.strip() for line in diagram().splitlines()}
    for state, (role, moves) in STATES.items():
        assert owner_of(state) == role
        assert f"{state}: {state} ({role.name.lower()})" in lines
        assert {f"{state} --> {move}" for move in moves} <= lines
