"""The simulator is worth something only if it catches what it is there for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.__main__ import failure
from tests.sim.mutants import MUTANTS, SEEDS


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_mutant_is_caught(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        what = next((what for seed in SEEDS if (what := failure(seed))), None)
    assert what is not None, f"{mutant.__doc__} Nobody noticed in {len(SEEDS)} seeds."
    assert not what.startswith(("TypeError", "AttributeError")), f"the mutant itself is broken: {what}"
