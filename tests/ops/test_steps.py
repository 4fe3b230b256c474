"""The bench of steps: what it says of a tiny model, and one line for what cannot be measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from baton.ops.bench.steps import StepsReport, main
from baton.workers.model.loaded import KernelsUnavailable
from baton.workers.model.probe import peaks
from tests.workers.model.tiny import Tiny


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        peaks(1)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return Tiny().write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def bench(model: Path, *flags: str) -> Result:
    sizes = ["--rows", "2", "--context", "3", "--prompts", "5", "--repeats", "1", "--threads", "1"]
    return CliRunner().invoke(main, ["--model", str(model), *sizes, *flags])


def test_each_size_of_step_is_held_against_the_machine(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.ops.bench.steps.FIRST_ID", 1)  # this model has few
    done = bench(small, "--weights", "bfloat16", "--json")
    assert done.exit_code == 0, done.output
    report = msgspec.json.decode(done.stdout, type=StepsReport)
    assert [(one.rows, one.tokens, one.context) for one in report.timed] == [(2, 2, 3), (1, 5, 0)]
    assert all(one.limit_ms > 0 and 0 < one.least_ms <= one.step_ms for one in report.timed)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--weights", "int3"], "int3: there is no way of holding weights named 'int3'"),
        (["--weights", "int8", "--kernels", "torch"], "int8: weights int8 need the C++ kernels"),
        (["--model", "none.gguf"], "none.gguf"),
    ],
)
def test_what_cannot_be_measured_is_one_line_that_names_it(small: Path, flags: list[str], words: str) -> None:
    done = bench(small, *flags)
    assert done.exit_code == 1 and words in done.output, done.output
    assert len(done.output.strip().splitlines()) == 1
