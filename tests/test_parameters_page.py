"""The page of the parameters names every one that is read, no limit that is not there, and the ranges in force."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.engine.limits import Limits
from baton.frontends import parameters, sampling

PAGE = (Path(__file__).parent.parent / "docs" / "parameters.md").read_text(encoding="utf-8")
#: of each table's rows the names in the first column
NAMED = {name for row in re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
READ = {*parameters.CHAT, *parameters.COMPLETION, *parameters.RESPONSE, *parameters.STREAMING, *parameters.LABELS}


@pytest.mark.parametrize("name", sorted(READ))
def test_every_parameter_that_is_read_has_its_row(name: str) -> None:
    assert name in NAMED


def test_no_row_is_of_a_parameter_that_is_refused_everywhere() -> None:
    assert NAMED & parameters.REFUSED_EVERYWHERE.keys() - READ == set()


def test_the_limits_it_names_are_there() -> None:
    named = set(re.findall(r"`limits\.(\w+)`", PAGE))
    assert named and named <= set(Limits.__struct_fields__)


def test_the_ranges_are_those_in_force() -> None:
    assert f"| `repetition_penalty` | {sampling.REPETITION_MIN:g} to {sampling.REPETITION_MAX:g}, 1 |" in PAGE
    assert f"| `presence_penalty` | {-sampling.PENALTY_MAX:g} to {sampling.PENALTY_MAX:g}, 0 |" in PAGE
    assert f"| `logit_bias` | object of ids to {-sampling.BIAS_MAX:g} to {sampling.BIAS_MAX:g}, none |" in PAGE
