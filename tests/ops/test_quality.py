"""Perplexity is that of the plain formulas, a miss is told, and no type of weights costs more than it may."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from baton.ops.bench import quality
from baton.ops.bench.quality import DATA, TRUTHS, Measured, Reference, Score, Subject, compare, read_references
from tests.workers.model.tiny import Tiny

#: by what computes and what is held: how far the perplexity of the whole text may be from its truth's, in per cent,
#: and how large a lead in float32 (a difference of log-probabilities) may be lost where a reference is missed
LIMITS = {
    ("bfloat16", "bfloat16"): (0.1, 0.25),
    ("bfloat16", "int8"): (1.0, 0.6),
    ("bfloat16", "native"): (1.5, 0.6),
}
TEXT = (DATA / "quality.txt").read_text(encoding="utf-8")
REFERENCES = read_references(DATA / "smollm2-135m-reference.json")


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a tiny model leave nothing in the user's cache."""
    if "tiny_path" in request.fixturenames:
        monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("tmp_path")))


@pytest.fixture
def tiny_path(tmp_path: Path) -> Path:
    return Tiny().write(tmp_path / "tiny.gguf")


def expected(ids: list[int]) -> list[Score]:
    """The scores of a window by the plain formulas, in float64."""
    scores = []
    for at in range(1, len(ids)):
        chances = Tiny().logits(ids[:at]).log_softmax(-1)
        scores.append(Score(chances[ids[at]].item(), int(chances.argmax())))
    return scores


def continuation(prompt: list[int], count: int) -> Reference:
    """What the plain formulas make of a prompt, greedily."""
    ids, gaps = list(prompt), []
    for _ in range(count):
        (first, second), (token, _) = Tiny().logits(ids).log_softmax(-1).topk(2)
        ids.append(int(token))
        gaps.append((first - second).item())
    return Reference(prompt, ids[len(prompt) :], gaps)


@pytest.mark.parametrize("step_tokens", [None, 1, 5])
def test_scores_are_those_of_the_plain_formulas_however_a_window_is_computed(
    tiny_path: Path, step_tokens: int | None
) -> None:
    subject = Subject(tiny_path, "hello, said he.", [], window_tokens=6, step_tokens=step_tokens, threads=1)
    assert [len(window) for window in subject.windows] == [6, 5] and len(subject.ids) == 11
    found = subject.measure("float32", "float32").scores
    wanted = [score for window in subject.windows for score in expected(window)]
    assert [score.likeliest for score in found] == [score.likeliest for score in wanted]
    assert [score.logprob for score in found] == pytest.approx([score.logprob for score in wanted], abs=1e-4)


def test_a_last_window_of_one_token_has_nothing_to_score(tiny_path: Path) -> None:
    subject = Subject(tiny_path, "abcdefg", [], window_tokens=3)
    assert [len(window) for window in subject.windows] == [3, 3]


def test_a_reference_is_met_and_each_miss_is_told_with_its_gap(tiny_path: Path) -> None:
    good = [continuation([5, 6, 7], 8), continuation([100, 30], 5)]
    wrong = list(good[1].output_ids)
    wrong[4] += 1
    tampered = Reference(good[1].prompt_ids, wrong, [*good[1].top1_top2_gap[:4], 0.5])
    for references, misses in ((good, []), ([good[0], tampered], [(1, 4, 0.5)])):
        found = Subject(tiny_path, "hello", references, window_tokens=4, threads=1).measure("float32", "float32")
        assert [(miss.reference, miss.position, miss.float32_gap) for miss in found.misses] == misses


def test_scores_are_compared_token_by_token() -> None:
    exact = [Score(-1.0, 3), Score(-2.0, 4), Score(-3.0, 5), Score(-4.0, 6)]
    other = [Score(-1.1, 3), Score(-2.1, 4), Score(-2.9, 5), Score(-4.3, 7)]
    against = compare("truth", exact, other)
    assert quality.perplexity(exact) == pytest.approx(math.exp(2.5))
    assert against.change_percent == pytest.approx(100 * (quality.perplexity(other) / quality.perplexity(exact) - 1))
    assert against.same_likeliest == 0.75
    assert against.mean_logprob_shift == pytest.approx(0.15)
    deviation = math.sqrt((2 * 0**2 + 0.2**2 + 0.2**2) / 3)
    assert against.error_percent == pytest.approx(100 * math.exp(0.1) * deviation / 2)


def test_numbers_that_are_not_finite_are_refused(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "score_window", lambda *_: iter([Score(math.nan, 0)]))
    with pytest.raises(quality.Refused, match="float32 over bfloat16: computes numbers that are not finite"):
        Subject(tiny_path, "hello", [], window_tokens=4).measure("float32", "bfloat16")


def command(tmp_path: Path, model: Path, *arguments: str, text: str = "hello, said he.") -> Result:
    (tmp_path / "text.txt").write_text(text)
    references = {"references": [msgspec.to_builtins(continuation([5, 6], 4))]}
    (tmp_path / "references.json").write_text(json.dumps(references))
    files = ["--text", str(tmp_path / "text.txt"), "--references", str(tmp_path / "references.json")]
    return CliRunner().invoke(quality.main, ["--model", str(model), "--threads", "1", *files, *arguments])


def test_a_combination_that_is_refused_is_named_and_the_others_are_reported(tmp_path: Path, tiny_path: Path) -> None:
    written = tmp_path / "report.json"
    kinds = ["--weights", "int3", "--weights", "bfloat16"]
    done = command(tmp_path, tiny_path, *kinds, "--json", str(written), "--window-tokens", "8", "--markdown")
    assert done.exit_code == 1
    (complaint,) = done.stderr.splitlines()
    assert complaint.startswith("refused: bfloat16 over int3: ")
    report = msgspec.json.decode(written.read_bytes(), type=quality.QualityReport)
    assert (report.text_tokens, report.scored_tokens, report.window_tokens, report.step_tokens) == (11, 9, 8, 8)
    assert [complaint] == [f"refused: {each}" for each in report.refused]
    named = [(one.dtype, one.weights) for one in report.measured]
    assert named == [*TRUTHS, ("bfloat16", "bfloat16")]
    assert [[against.truth for against in one.against] for one in report.measured] == [
        ["float32 over float32"],
        ["float32 over bfloat16"],
        ["float32 over bfloat16", "float32 over float32"],
    ]
    assert all(one.positions == 4 for one in report.measured)
    rows = done.stdout.splitlines()
    assert rows[0].startswith("| computation over weights | ") and rows[1].startswith("| --- | ---: | ")
    assert len(rows) == 2 + 4 and len({row.count("|") for row in rows}) == 1


def test_the_command_measures_every_type_of_weights_a_server_takes(tmp_path: Path, tiny_path: Path) -> None:
    done = command(tmp_path, tiny_path)
    assert {"bfloat16", "float32"} <= set(quality.WEIGHTS)
    assert all(f"bfloat16 over {weights}" in done.output for weights in quality.WEIGHTS)


@pytest.mark.parametrize(("text", "model"), [("", None), ("a", None), ("hello", "nowhere.gguf")])
def test_what_cannot_be_measured_at_all_is_one_line(
    tmp_path: Path, tiny_path: Path, text: str, model: str | None
) -> None:
    done = command(tmp_path, tmp_path / model if model else tiny_path, text=text)
    assert done.exit_code == 1 and len(done.output.splitlines()) == 1
    assert ("nowhere.gguf" if model else "too short") in done.output


def test_native_weights_are_held_against_the_files_own() -> None:
    assert [quality.truth_of(weights) for weights in ("bfloat16", "int8")] == [TRUTHS[0]] * 2
    assert [quality.truth_of(weights) for weights in ("native", "float32")] == [TRUTHS[1]] * 2


def test_a_few_tokens_of_the_real_model_are_near_their_truth(model_path: Path) -> None:
    subject = Subject(model_path, TEXT[:500], [], window_tokens=64, threads=1)
    exact = subject.measure(*TRUTHS[0])
    for combination in LIMITS:
        against = compare("float32", exact.scores, subject.measure(*combination).scores)
        assert abs(against.change_percent) < 3 and against.same_likeliest > 0.85 and against.mean_logprob_shift < 0.2


@pytest.fixture(scope="module")
def whole(model_path: Path) -> tuple[Subject, dict[tuple[str, str], Measured]]:
    """The whole text and the references, and what the truths make of them."""
    subject = Subject(model_path, TEXT, REFERENCES, window_tokens=512, threads=1)
    return subject, {truth: subject.measure(*truth) for truth in TRUTHS}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("combination", LIMITS, ids=" over ".join)
def test_the_whole_text_is_within_the_limits(
    whole: tuple[Subject, dict[tuple[str, str], Measured]], combination: tuple[str, str]
) -> None:
    subject, truths = whole
    assert len(subject.ids) >= 4000
    assert all(truth.misses == [] for truth in truths.values())
    measured = subject.measure(*combination)
    against = compare("its truth", truths[quality.truth_of(combination[1])].scores, measured.scores)
    change_percent, gap = LIMITS[combination]
    assert abs(against.change_percent) <= change_percent, against
    assert all(miss.float32_gap <= gap for miss in measured.misses), measured.misses
