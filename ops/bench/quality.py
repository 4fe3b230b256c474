"""What a narrower type costs in quality: ``python -m baton.ops.bench.quality``.

A text is computed in windows, each alone, and every token but a window's first is scored: the perplexity is e to the
mean of the negated log-probabilities. Each combination of a type of computation and a type of weights is held against
float32 computation over weights held in bfloat16, and over weights as exact as the file's (float32), token by token.
The first is what the narrow types round, so it is their truth; ``native`` weights are the file's own: theirs is the
second.

Beside it the greedy reference continuations are told to the model one token at a time, all at once, as they would be
decoded: how often is the reference's next token the likeliest? So both ways through the kernels are measured, the one
for many tokens of a prompt and the one for few rows. Nothing here is timed: one thread is enough, and on a busy machine
it is faster than two that wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import get_args, get_type_hints

import click
import msgspec
from rich.table import Table

from baton.engine.batch import INVALID_FLAG, Sampling, StepRow
from baton.engine.scores import unpack_entries
from baton.ops.terminal import err, out
from baton.workers.cache import BLOCK_SIZE, MemoryBudgetError
from baton.workers.config import Settings
from baton.workers.model.gguf import ModelFileError, read_header
from baton.workers.model.loaded import KernelsUnavailable
from baton.workers.model.pull import resolve
from baton.workers.model.vocabulary import build_encoder, read_vocabulary
from baton.workers.runner import Runner

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
#: likewise every type of weights that a server takes
WEIGHTS: tuple[str, ...] = get_args(get_type_hints(Settings)["weights"])
TRUTHS = (("float32", "bfloat16"), ("float32", "float32"))
#: weights that hold what the file says, unrounded
UNROUNDED = ("float32", "native")
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, end_ids=())
SCORED = msgspec.structs.replace(GREEDY, prompt_logprobs=1)


class Refused(Exception):
    """A combination that cannot be measured; one line that names it and says why."""


class Reference(msgspec.Struct, frozen=True):
    """A greedy continuation in float32; the gaps are between its tokens' log-probabilities and the second likeliest."""

    prompt_ids: list[int]
    output_ids: list[int]
    top1_top2_gap: list[float]


class References(msgspec.Struct, frozen=True):
    """The file of them."""

    references: list[Reference]


class Score(msgspec.Struct, frozen=True):
    """Of one token of the text: its log-probability, and the likeliest token in its place."""

    logprob: float
    likeliest: int


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """Where another token than the reference's was the likeliest, and by how much the reference's had been."""

    reference: int
    position: int
    float32_gap: float


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """How the text's scores differ from a truth's. ``error_percent`` is the standard error of ``change_percent``,
    from the differences token by token, as if they were independent.
    """

    truth: str
    change_percent: float
    error_percent: float
    same_likeliest: float
    mean_logprob_shift: float


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """One combination: over the text, and over the references, of whose positions all but the ``misses`` agree."""

    dtype: str
    weights: str
    weights_bytes: int
    perplexity: float
    against: list[Against]
    positions: int
    misses: list[Miss]


class QualityReport(msgspec.Struct, frozen=True, kw_only=True):
    """All combinations in the order asked for, the truths first; ``refused`` says why others are not there."""

    model: str
    text_tokens: int
    scored_tokens: int
    window_tokens: int
    step_tokens: int
    measured: list[Quality]
    refused: list[str]


class Measured(msgspec.Struct, frozen=True):
    """What a combination computed, before it is held against anything."""

    scores: list[Score]
    misses: list[Miss]
    weights_bytes: int


class Subject:
    """The model, the text cut into windows, and the references; what all combinations are measured on."""

    def __init__(
        self,
        path: Path,
        text: str,
        references: Sequence[Reference],
        *,
        window_tokens: int,
        step_tokens: int | None = None,
        threads: int | None = None,
    ) -> None:
        header = read_header(path)
        self.path, self.references, self.threads = path, references, threads
        self.step_tokens = step_tokens or window_tokens
        self.vocab = read_vocabulary(header).used
        self.ids: list[int] = build_encoder(header).encode(text).ids
        self.windows = [window for window in cut(self.ids, window_tokens) if len(window) > 1]
        longest = [len(one.prompt_ids) + len(one.output_ids) for one in references]
        self.blocks = max(_blocks(window_tokens), sum(map(_blocks, longest)))

    def measure(self, dtype: str, weights: str) -> Measured:
        """Compute everything with one combination; ``Refused`` where that is not possible."""
        runner = self._runner(dtype, weights)
        scores = [score for window in self.windows for score in score_window(runner, window, self.step_tokens)]
        if not all(math.isfinite(score.logprob) for score in scores):
            raise Refused(f"{dtype} over {weights}: computes numbers that are not finite")
        return Measured(scores, find_misses(runner, self.references), runner.weights_bytes)

    def _runner(self, dtype: str, weights: str) -> Runner:
        try:
            return Runner(
                self.path, dtype=dtype, weights=weights, blocks=self.blocks, threads=self.threads, vocab=self.vocab
            )
        except (ValueError, NotImplementedError, ModelFileError, KernelsUnavailable, MemoryBudgetError) as error:
            raise Refused(f"{dtype} over {weights}: {' '.join(str(error).split())}") from None


def cut(ids: Sequence[int], window_tokens: int) -> list[list[int]]:
    """One window after the other; the last may be shorter."""
    return [list(ids[at : at + window_tokens]) for at in range(0, len(ids), window_tokens)]


def score_window(runner: Runner, ids: list[int], step_tokens: int) -> Iterator[Score]:
    """Score every token but the first, ``step_tokens`` computed at a time."""
    blocks = list(range(_blocks(len(ids))))
    for start in range(0, len(ids) - 1, step_tokens):
        tokens, targets = ids[start : start + step_tokens], ids[start + 1 : start + 1 + step_tokens]
        row = StepRow(0, tokens, start, blocks, False, 0, SCORED, targets=targets)
        runner.step([row])
        for _, ((_, logprob), (likeliest, _)) in unpack_entries(row.prompt_scores, 1):
            yield Score(logprob, likeliest)


def find_misses(runner: Runner, references: Sequence[Reference]) -> list[Miss]:
    """Tell the model all references at once, a token a step, and see what it would have said each time."""
    misses, first, tables = [], 0, []
    for one in references:
        count = _blocks(len(one.prompt_ids) + len(one.output_ids))
        tables.append(list(range(first, first + count)))
        first += count
    for position in range(max((len(one.output_ids) for one in references), default=0)):
        going = [number for number, one in enumerate(references) if position < len(one.output_ids)]
        rows = []
        for number in going:
            one = references[number]
            tokens = [one.output_ids[position - 1]] if position else one.prompt_ids
            start = len(one.prompt_ids) + position - 1 if position else 0
            rows.append(StepRow(number, tokens, start, tables[number], True, position, GREEDY))
        for number, sampled in zip(going, runner.step(rows), strict=True):
            one = references[number]
            if sampled.flags & INVALID_FLAG or sampled.token != one.output_ids[position]:
                gap = round(one.top1_top2_gap[position], 4)
                misses.append(Miss(reference=number, position=position, float32_gap=gap))
    return misses


def perplexity(scores: Sequence[Score]) -> float:
    """e to the mean of the negated log-probabilities."""
    return math.exp(-fmean(score.logprob for score in scores))


def compare(truth: str, exact: Sequence[Score], scores: Sequence[Score]) -> Against:
    """Hold scores against a truth's for the same tokens, of which there are two or more."""
    worse = [one.logprob - other.logprob for one, other in zip(exact, scores, strict=True)]
    ratio = math.exp(fmean(worse))
    return Against(
        truth=truth,
        change_percent=100 * (ratio - 1),
        error_percent=100 * ratio * stdev(worse) / math.sqrt(len(worse)),
        same_likeliest=fmean(one.likeliest == other.likeliest for one, other in zip(exact, scores, strict=True)),
        mean_logprob_shift=fmean(map(abs, worse)),
    )


def truth_of(weights: str) -> tuple[str, str]:
    """What a combination with such weights should have computed."""
    return "float32", "float32" if weights in UNROUNDED else "bfloat16"


def examine(subject: Subject, combinations: Sequence[tuple[str, str]]) -> tuple[list[Quality], list[str]]:
    """Measure the truths and then the combinations, each against both, its own first; and why others were refused."""
    truths = {combination: subject.measure(*combination) for combination in TRUTHS}
    found, refused = [], []
    for combination in dict.fromkeys((*TRUTHS, *combinations)):
        dtype, weights = combination
        try:
            measured = truths[combination] if combination in truths else subject.measure(dtype, weights)
        except Refused as error:
            refused.append(str(error))
            continue
        others = sorted((one for one in TRUTHS if one != combination), key=lambda one: one != truth_of(weights))
        found.append(
            Quality(
                dtype=dtype,
                weights=weights,
                weights_bytes=measured.weights_bytes,
                perplexity=perplexity(measured.scores),
                against=[compare(_name(*one), truths[one].scores, measured.scores) for one in others],
                positions=sum(len(one.output_ids) for one in subject.references),
                misses=measured.misses,
            )
        )
    return found, refused


HEADINGS = (
    "computation over weights",
    "MB",
    "perplexity",
    "held against",
    "change",
    "same likeliest",
    "mean shift",
    "references",
    "gap missed",
)


def lines(found: Sequence[Quality]) -> Iterator[tuple[str, ...]]:
    """The cells under ``HEADINGS``: a line for each truth that a combination is held against."""
    for one in found:
        widest = max((miss.float32_gap for miss in one.misses), default=None)
        agreed = f"{one.positions - len(one.misses)} of {one.positions}", "none" if widest is None else f"{widest:.3f}"
        for number, against in enumerate(one.against):
            own = _name(one.dtype, one.weights), f"{one.weights_bytes / 1e6:.0f}", f"{one.perplexity:.4f}"
            yield (
                *(own if number == 0 else ("", "", "")),
                against.truth,
                f"{against.change_percent:+.3f} % ± {against.error_percent:.3f}",
                f"{100 * against.same_likeliest:.2f} %",
                f"{against.mean_logprob_shift:.4f}",
                *(agreed if number == 0 else ("", "")),
            )


def table(found: Sequence[Quality]) -> Table:
    """For the terminal."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if number in (0, 3) else "right")
    for cells in lines(found):
        shown.add_row(*cells)
    return shown


def markdown(found: Sequence[Quality]) -> str:
    """The same as a table in Markdown."""
    ruled = ["---" if number in (0, 3) else "---:" for number in range(len(HEADINGS))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADINGS, ruled, *lines(found)))


def read_references(path: Path) -> list[Reference]:
    """The references of a file such as ``tests/data/smollm2-135m-reference.json``."""
    return msgspec.json.decode(path.read_bytes(), type=References).references


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _name(dtype: str, weights: str) -> str:
    return f"{dtype} over {weights}"


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="Model to measure.")
@click.option(
    "--weights", "kinds", multiple=True, default=WEIGHTS, show_default=True, help="Type of weights; may be repeated."
)
@click.option("--dtype", default="bfloat16", show_default=True, help="Type they compute in.")
@click.option("--text", type=FILE, default=DATA / "quality.txt", show_default="the tests'", help="What is scored.")
@click.option(
    "--references",
    type=FILE,
    default=DATA / "smollm2-135m-reference.json",
    show_default="the tests'",
    help="Greedy continuations.",
)
@click.option("--window-tokens", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a window.")
@click.option("--step-tokens", type=click.IntRange(1), help="Tokens of a window that a step computes; all by default.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads that compute.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table in Markdown.")
@click.option("--json", "json_path", metavar="PATH", help="Write the report as JSON.")
def main(
    model: str,
    kinds: tuple[str, ...],
    dtype: str,
    text: Path,
    references: Path,
    window_tokens: int,
    step_tokens: int | None,
    threads: int,
    as_markdown: bool,
    json_path: str | None,
) -> None:
    """Measure what types of weights and of computation cost in quality, against float32."""
    try:
        subject = Subject(
            resolve(model),
            text.read_text(encoding="utf-8"),
            read_references(references),
            window_tokens=window_tokens,
            step_tokens=step_tokens,
            threads=threads,
        )
        scored = sum(len(window) - 1 for window in subject.windows)
        if scored < 2:
            raise click.ClickException(f"{text} is too short: nothing of it can be scored")
        found, refused = examine(subject, [(dtype, weights) for weights in kinds])
    except (ModelFileError, Refused, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise click.ClickException(str(error)) from None
    report = QualityReport(
        model=model,
        text_tokens=len(subject.ids),
        scored_tokens=scored,
        window_tokens=window_tokens,
        step_tokens=subject.step_tokens,
        measured=found,
        refused=refused,
    )
    if as_markdown:
        out().out(markdown(found), highlight=False)
    else:
        out().print(table(found))
        out().print(f"{scored} tokens scored, in windows of {window_tokens}; every step computes {subject.step_tokens}")
    if json_path is not None:
        Path(json_path).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    for each in refused:
        err().print(f"refused: {each}", soft_wrap=True, highlight=False)
    if refused:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
