"""The whole model against the reference, however its prompts are cut, ordered and placed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engine.batch import END_FLAG, History, Sampled, Sampling, StepRow
from baton.engine.scores import unpack_entries
from baton.workers.cache import BLOCK_SIZE
from baton.workers.runner import Runner

REFERENCES = json.loads((Path(__file__).parents[1] / "data" / "smollm2-135m-reference.json").read_text())["references"]
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, end_ids=())
BLOCKS = 64
THREADS = 1  # threads that wait for one another make a busy machine's tests thirty times slower


@pytest.fixture(scope="module")
def exact(model_path: Path) -> Runner:
    return Runner(model_path, dtype="float32", weights="bfloat16", blocks=BLOCKS, threads=THREADS)


@pytest.fixture(scope="module")
def runner(model_path: Path) -> Runner:
    return Runner(model_path, dtype="bfloat16", weights="bfloat16", blocks=BLOCKS, threads=THREADS)


def generate(
    runner: Runner,
    prompts: Sequence[list[int]],
    count: int,
    *,
    samplings: Sequence[Sampling] | None = None,
    chunk: int = 1 << 20,
    seed: int | None = None,
) -> list[list[Sampled]]:
    """Generate ``count`` tokens for all prompts at once; ``seed`` shuffles blocks, and rows in every step."""
    samplings = samplings or [GREEDY] * len(prompts)
    order = list(range(BLOCKS))
    shuffle = random.Random(seed)
    if seed is not None:
        shuffle.shuffle(order)
    free = iter(order)
    tables = [[next(free) for _ in range(-(-(len(p) + count) // BLOCK_SIZE))] for p in prompts]
    outputs: list[list[Sampled]] = [[] for _ in prompts]
    computed = [0] * len(prompts)
    while any(len(output) < count for output in outputs):
        rows = []
        for i, prompt in enumerate(prompts):
            ids = prompt + [sampled.token for sampled in outputs[i]]
            tokens = ids[computed[i] : computed[i] + chunk]
            if len(outputs[i]) == count:
                continue
            whole, history = computed[i] + len(tokens) == len(ids), History(ids, len(prompt))
            rows.append(StepRow(i, tokens, computed[i], tables[i], whole, len(outputs[i]), samplings[i], history))
            computed[i] += len(tokens)
        if seed is not None:
            shuffle.shuffle(rows)
        answers: Iterator[Sampled] = iter(runner.step(rows))
        for row in rows:
            if row.sample:
                outputs[row.slot].append(next(answers))
        assert next(answers, None) is None
    return outputs


def check_reference(outputs: Sequence[list[Sampled]], references: Sequence[dict[str, Any]]) -> None:
    for output, reference in zip(outputs, references, strict=True):
        assert [sampled.token for sampled in output] == reference["output_ids"]
        assert [sampled.logprob for sampled in output] == pytest.approx(reference["logprobs"], abs=1e-3)
        assert not any(sampled.flags for sampled in output)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference["prompt_ids"][-1])
def test_each_prompt_alone_gives_the_reference(exact: Runner, reference: dict[str, Any]) -> None:
    check_reference(generate(exact, [reference["prompt_ids"]], 48), [reference])


def test_all_prompts_at_once_give_the_reference(exact: Runner) -> None:
    check_reference(generate(exact, [r["prompt_ids"] for r in REFERENCES], 48), REFERENCES)


def test_odd_chunks_and_shuffled_blocks_and_rows_give_the_reference(exact: Runner) -> None:
    check_reference(generate(exact, [r["prompt_ids"] for r in REFERENCES], 48, chunk=7, seed=3), REFERENCES)


def test_bfloat16_stays_close_to_the_reference(runner: Runner) -> None:
    outputs = generate(runner, [r["prompt_ids"] for r in REFERENCES], 8)
    for output, reference in zip(outputs, REFERENCES, strict=True):
        if output[0].token == reference["output_ids"][0]:
            assert output[0].logprob == pytest.approx(reference["logprobs"][0], abs=0.15)
    same = sum(o[0].token == r["output_ids"][0] for o, r in zip(outputs, REFERENCES, strict=True))
    assert same >= 4  # one reference begins with a near tie


def test_a_seeded_request_is_the_same_alone_in_company_and_after_preemption(exact: Runner) -> None:
    prompts = [r["prompt_ids"] for r in REFERENCES[:3]]
    samplings = [
        Sampling(0.8, 0.95, 50, seed=11, end_ids=()),
        GREEDY,
        Sampling(1.3, 1.0, 0, seed=12, end_ids=()),
    ]
    together = generate(exact, prompts, 8, samplings=samplings)
    alone = generate(exact, prompts[:1], 8, samplings=samplings[:1], seed=5)
    assert [s.token for s in alone[0]] == [s.token for s in together[0]]
    # Preempted after five tokens: prompt and tokens are computed anew, output positions go on.
    known = prompts[0] + [s.token for s in together[0][:5]]
    row = StepRow(0, known, 0, list(range(10, 10 + len(known) // BLOCK_SIZE + 1)), True, 5, samplings[0])
    assert exact.step([row])[0].token == together[0][5].token


EVERYTHING = Sampling(
    temperature=0.9,
    top_p=0.97,
    top_k=400,
    seed=21,
    end_ids=(2,),
    min_tokens=4,
    min_p=0.001,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    repetition_penalty=1.15,
    logit_bias=((260, 1.5), (28, -2.0)),
    allowed_ids=bytes([0xFE]) * (49152 // 8),
    bad_ids=((28,), (30, 198)),
    choice=1,
)


def test_with_every_parameter_set_a_request_says_the_same_alone_and_among_eight(exact: Runner) -> None:
    prompts = [REFERENCES[i % len(REFERENCES)]["prompt_ids"] for i in range(8)]
    samplings = [msgspec.structs.replace(EVERYTHING, seed=i, choice=i % 3) for i in range(8)]
    samplings[3] = GREEDY
    together = generate(exact, prompts, 6, samplings=samplings, seed=4)
    for i in (0, 5):
        alone = generate(exact, prompts[i : i + 1], 6, samplings=samplings[i : i + 1])[0]
        assert [s.token for s in alone] == [s.token for s in together[i]]
        assert not any(s.token % 8 == 0 or s.token == 28 for s in alone)


def test_padding_of_the_vocabulary_is_never_said(model_path: Path, exact: Runner) -> None:
    """Were the reference's first token padding, the next best would be said, and with its chance of what is left."""
    prompt, first = REFERENCES[0]["prompt_ids"], REFERENCES[0]["output_ids"][0]
    row = StepRow(0, prompt, 0, [0], True, 0, GREEDY)
    short = Runner(model_path, dtype="float32", weights="bfloat16", blocks=2, threads=THREADS, vocab=first)
    (said,) = short.step([row])
    assert said.token < first
    bias = msgspec.structs.replace(GREEDY, logit_bias=((first, 1e9), (first + 1, 1e9)))
    assert short.step([StepRow(0, prompt, 0, [0], True, 0, bias)])[0].token == said.token
    assert exact.step([row])[0].token == first


def test_end_ids_set_the_end_flag(exact: Runner) -> None:
    prompt, first = REFERENCES[0]["prompt_ids"], REFERENCES[0]["output_ids"][0]
    ending = Sampling(0.0, 1.0, 0, 0, end_ids=(2, first))
    (sampled,) = exact.step([StepRow(0, prompt, 0, [0], True, 0, ending)])
    assert (sampled.token, sampled.flags) == (first, END_FLAG)


def test_a_step_without_samples_answers_nothing(exact: Runner) -> None:
    assert exact.step([StepRow(0, [1, 2, 3], 0, [0], False, 0, GREEDY)]) == []


@pytest.mark.parametrize(
    ("tokens", "start", "blocks"), [([49152], 0, [0]), ([-1], 0, [0]), ([], 0, [0]), ([1, 2], 15, [0])]
)
def test_rows_that_make_no_sense_are_our_own_fault(
    exact: Runner, tokens: list[int], start: int, blocks: list[int]
) -> None:
    with pytest.raises(AssertionError):
        exact.step([StepRow(0, tokens, start, blocks, True, 0, GREEDY)])


def test_a_blocks_number_outside_the_pool_is_an_error_not_a_stray_write(exact: Runner) -> None:
    with pytest.raises(IndexError):
        exact.step([StepRow(0, [1], 0, [BLOCKS], True, 0, GREEDY)])


def test_what_a_block_held_before_reaches_nobody(exact: Runner) -> None:
    """Not even infinities and NaNs, which no mask hides, left by a sequence that went wrong."""
    for pool in (*exact._pool.keys, *exact._pool.values):
        pool.fill_(float("nan"))
    outputs = generate(exact, [r["prompt_ids"] for r in REFERENCES], 12, seed=1)
    for output, reference in zip(outputs, REFERENCES, strict=True):
        assert [sampled.token for sampled in output] == reference["output_ids"][:12]


def test_warm_up_can_be_run_at_any_time(runner: Runner) -> None:
    runner.warm_up()


def test_the_layout_describes_the_pool(runner: Runner) -> None:
    layout = runner.layout
    assert (layout.blocks, layout.block_size, layout.layers, layout.kv_heads, layout.head_dim) == (
        64,
        16,
        30,
        3,
        64,
    )
    assert layout.dtype == "bfloat16" and layout.bytes_per_block == 2 * 30 * 16 * 3 * 64 * 2
    assert len(runner.weights_digest) == 64


@pytest.mark.parametrize("chunk", [5, 40, 1 << 20])
def test_a_prompt_is_told_of_as_if_each_token_had_been_sampled(exact: Runner, chunk: int) -> None:
    """The reference's answer as a prompt: each of its tokens was the likeliest, with the reference's chance."""
    reference, top = REFERENCES[0], 2
    known = reference["prompt_ids"] + reference["output_ids"]
    blocks, entries = list(range(-(-len(known) // BLOCK_SIZE))), b""
    asked = msgspec.structs.replace(GREEDY, prompt_logprobs=top)
    for start in range(0, len(known), chunk):
        tokens, targets = known[start : start + chunk], known[start + 1 : start + 1 + chunk]
        row = StepRow(0, tokens, start, blocks, False, 0, asked, targets=targets)
        other = StepRow(1, [5], 0, [BLOCKS - 1], True, 0, GREEDY)
        exact.step([other, row])
        entries += row.prompt_scores
        assert other.prompt_scores == b""
    found = list(unpack_entries(entries, top))
    assert len(found) == len(known) - 1
    said = found[len(reference["prompt_ids"]) - 1 :]
    assert [rank for rank, _ in said] == [1] * len(reference["output_ids"])
    assert [pairs[0][0] for _, pairs in said] == [pairs[1][0] for _, pairs in said] == reference["output_ids"]
    assert [pairs[0][1] for _, pairs in said] == pytest.approx(reference["logprobs"], abs=1e-3)
