"""Whole models by the C++ kernels against float32, for every way of holding weights; rows are independent."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.engine.batch import INVALID_FLAG, UNKNOWN, History, Sampled, Sampling, StepRow
from baton.engine.blocks import Move
from baton.engine.scores import unpack_entries
from baton.workers.model.paths import cache_directory
from baton.workers.runner import Runner
from tests.workers.model.tiny import F16, F32, Q4_0, Q4_1, Q6_K, Q8_0, Tiny
from tests.workers.test_runner import generate

BLOCKS = 64
GREEDY = Sampling(0.0, 1.0, 0, 0, ())
SAMPLED = Sampling(0.9, 0.95, 40, 11, ())
#: prompts across blocks, and one that attends in several items at once
PROMPTS = [[(7 * i * i + 3 * i + k) % 250 for i in range(n)] for k, n in enumerate((1, 15, 16, 17, 40, 70))]

MODELS: dict[str, dict[str, Any]] = {
    "64": {"hidden": 128, "heads": 6, "kv_heads": 2, "head_dim": 64, "kind": F32},
    "64, untied": {"hidden": 64, "heads": 13, "kv_heads": 1, "head_dim": 64, "tied": False, "kind": F32},
    "80": {"hidden": 96, "heads": 4, "kv_heads": 2, "head_dim": 80, "kind": F32},
    "128, factors": {
        **{"hidden": 64, "heads": 5, "kv_heads": 5, "head_dim": 128, "intermediate": 160, "kind": F32},
        "factors": [1.0 + i / 8 for i in range(64)],
    },
    "64, yarn": {
        **{"hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 64, "kind": F32, "layers": 1},
        "scaling": {"type": "yarn", "factor": 4.0, "original_context_length": 64},
    },
}
PLAIN = MODELS["64"]
QUANTISED: dict[str, dict[str, Any]] = {
    "q8_0": {**PLAIN, "kind": Q8_0},
    "q4_0": {**PLAIN, "kind": Q4_0},
    "q4_1, untied": {**MODELS["64, untied"], "kind": Q4_1},
    "q4_0 and q4_1": {**PLAIN, "kind": Q4_0, "kinds": {"attn_k": Q4_1, "ffn_up": Q4_1}},
    "mixed": {
        **{**PLAIN, "hidden": 256, "tied": False, "intermediate": 64},
        **{"kind": Q8_0, "kinds": {"attn_v": F16, "output": Q6_K, "ffn_gate": Q6_K, "ffn_down": Q4_1}},
    },
}
#: how far from float32 log-probabilities may be, in standard deviations of them: on average and at most
BFLOAT16, INT8 = (0.02, 0.2), (0.08, 0.5)

Load = Callable[..., Runner]


@pytest.fixture(scope="module")
def load(native_library: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Loads models, each once in each way; their converted weights go, the kernels' library stays where it is."""
    directory, kernels = tmp_path_factory.mktemp("models"), cache_directory("kernels")
    (directory / "baton").mkdir()
    (directory / "baton" / "kernels").symlink_to(kernels)
    before, threads, loaded = os.environ.get("XDG_CACHE_HOME"), torch.get_num_threads(), dict[str, Runner]()
    os.environ["XDG_CACHE_HOME"] = str(directory)

    def runner(changes: dict[str, Any], **how: Any) -> Runner:
        name = repr((changes, how))
        if name not in loaded:
            path = directory / f"{abs(hash(repr(changes)))}.gguf"
            if not path.exists():
                Tiny(**changes).write(path)
            loaded[name] = Runner(path, **{"blocks": BLOCKS, "threads": 2, **how})
            torch.set_num_threads(1)  # threads that wait for one another make a busy machine's tests much slower
        return loaded[name]

    yield runner
    loaded.clear()
    torch.set_num_threads(threads)
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


def native(load: Load, changes: dict[str, Any], weights: str = "bfloat16", **how: Any) -> Runner:
    return load(changes, kernels="native", weights=weights, **how)


def scores(runner: Runner, prompts: list[list[int]], top: int = 3) -> list[list[tuple[int, list[tuple[int, float]]]]]:
    """What is told of each prompt's tokens."""
    asked, free = msgspec.structs.replace(GREEDY, prompt_logprobs=top), iter(range(BLOCKS))
    rows = [
        StepRow(i, ids, 0, [next(free) for _ in range(-(-len(ids) // 16))], False, 0, asked, targets=ids[1:])
        for i, ids in enumerate(prompts)
    ]
    assert runner.step(rows) == []
    return [[(rank, list(pairs)) for rank, pairs in unpack_entries(row.prompt_scores, top)] for row in rows]


def assert_scores_near(found: Runner, exact: Runner, bounds: tuple[float, float]) -> None:
    ours, theirs = (
        np.array([pairs[0][1] for prompt in scores(runner, PROMPTS) for _, pairs in prompt])
        for runner in (found, exact)
    )
    difference = np.abs(ours - theirs)
    assert len(difference) == sum(map(len, PROMPTS)) - len(PROMPTS)
    mean, most = difference.mean() / theirs.std(), difference.max() / theirs.std()
    assert mean < bounds[0] and most < bounds[1], (mean, most)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_near_those_of_float32(load: Load, name: str) -> None:
    runner = native(load, MODELS[name])
    assert runner.kernels == "C++ on cpu, bfloat16 weights, 2 threads"
    exact = load(MODELS[name], kernels="torch", dtype="float32", weights="bfloat16")
    assert_scores_near(runner, exact, BFLOAT16)
    same = [
        ours.logprob == pytest.approx(theirs.logprob, abs=0.2)
        for (ours,), (theirs,) in zip(generate(runner, PROMPTS, 1), generate(exact, PROMPTS, 1), strict=True)
        if ours.token == theirs.token
    ]
    assert all(same) and len(same) >= len(PROMPTS) - 1


@pytest.mark.parametrize("name", MODELS)
def test_torch_in_bfloat16_is_near_float32_in_prompts_and_decoding(load: Load, name: str) -> None:
    runner = load(MODELS[name], kernels="torch", dtype="bfloat16", weights="bfloat16")
    exact = load(MODELS[name], kernels="torch", dtype="float32", weights="bfloat16")
    assert_scores_near(runner, exact, BFLOAT16)
    asked = [msgspec.structs.replace(GREEDY, logit_bias=((7, 1000.0),))] * len(PROMPTS)  # both go on with the same
    for ours, theirs in zip(*(generate(r, PROMPTS, 6, samplings=asked, seed=5) for r in (runner, exact)), strict=True):
        assert [s.token for s in ours] == [7] * 6
        assert [s.logprob for s in ours] == pytest.approx([s.logprob for s in theirs], rel=0.01, abs=0.2)


@pytest.mark.parametrize("name", MODELS)
def test_int8_weights_are_near_float32(load: Load, name: str) -> None:
    exact = load(MODELS[name], kernels="torch", dtype="float32", weights="float32")
    assert_scores_near(native(load, MODELS[name], "int8"), exact, INT8)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_files_own_blocks_are_near_their_numbers_in_float32(load: Load, name: str) -> None:
    runner = native(load, QUANTISED[name], "native")
    exact = load(QUANTISED[name], kernels="torch", dtype="float32", weights="float32")
    assert_scores_near(runner, exact, INT8)
    assert runner.weights_bytes < exact.weights_bytes


WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "bfloat16": (MODELS["64, untied"], "bfloat16"),
    "int8": (MODELS["80"], "int8"),
    "q8_0": (QUANTISED["q8_0"], "native"),
    "q4_0": (QUANTISED["q4_0"], "native"),
    "mixed": (QUANTISED["mixed"], "native"),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
SAMPLINGS = [
    *(
        GREEDY,
        SAMPLED,
        msgspec.structs.replace(SAMPLED, min_p=0.05, top_k=0),
        msgspec.structs.replace(SAMPLED, top_p=1),
    ),
    msgspec.structs.replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, logit_bias=((5, 2.0), (9, -9.0))),
    msgspec.structs.replace(SAMPLED, top_logprobs=4, min_tokens=3, end_ids=(1, 2, 3), bad_ids=((4,), (5, 6))),
]


@EVERY_WAY
def test_a_row_is_the_same_bit_for_bit_alone_in_company_in_chunks_and_wherever_its_blocks_lie(
    load: Load, way: str
) -> None:
    runner = native(load, *WAYS[way])
    together = generate(runner, PROMPTS, 6, samplings=SAMPLINGS)
    assert generate(runner, PROMPTS, 6, samplings=SAMPLINGS, chunk=7, seed=3) == together
    assert generate(runner, PROMPTS, 6, samplings=SAMPLINGS, chunk=24, seed=4) == together
    for i, prompt in enumerate(PROMPTS):
        assert generate(runner, [prompt], 6, samplings=SAMPLINGS[i : i + 1]) == together[i : i + 1]
    assert scores(runner, PROMPTS) == [scores(runner, [prompt])[0] for prompt in PROMPTS]


@EVERY_WAY
def test_many_rows_at_once_are_each_what_they_are_alone(load: Load, way: str) -> None:
    """More than the kernels take at a time of anything: rows of a product, of logits, parts of a step."""
    runner = native(load, *WAYS[way])
    rows = [
        StepRow(i, [i % 250 + 2], 0, [i], True, 0, msgspec.structs.replace(SAMPLED, seed=i) if i % 2 else GREEDY)
        for i in range(BLOCKS)
    ]
    together = runner.step(rows)
    assert [runner.step([row])[0] for row in rows] == together
    long = [(5 * i) % 250 for i in range(BLOCKS * 8)]
    (whole,) = runner.step([StepRow(0, long, 0, list(range(BLOCKS)), True, 0, GREEDY)])
    halves = [
        StepRow(0, long[a:b], a, list(range(BLOCKS)), b == len(long), 0, GREEDY) for a, b in ((0, 300), (300, 512))
    ]
    assert [said for half in halves for said in runner.step([half])] == [whole]


def test_any_number_of_threads_says_the_same(load: Load) -> None:
    """But for the last bits of log-probabilities, whose sums threads share."""
    outputs = [generate(native(load, PLAIN, threads=threads), PROMPTS, 6, samplings=SAMPLINGS) for threads in (1, 2, 3)]
    for other in outputs[1:]:
        for ours, theirs in zip(chain(*outputs[0]), chain(*other), strict=True):
            assert ours.token == theirs.token
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_prompt_scores_name_the_rank_and_the_likeliest(load: Load) -> None:
    told = scores(native(load, PLAIN), [PROMPTS[5]], top=5)[0]
    for (rank, pairs), target in zip(told, PROMPTS[5][1:], strict=True):
        assert pairs[0][0] == target
        values = [logprob for _, logprob in pairs[1:]]
        assert values == sorted(values, reverse=True)
        assert (pairs[0] in pairs[1:]) == (rank <= 5)


def test_what_a_request_asks_of_its_logits_is_heard(load: Load) -> None:
    runner, prompt = native(load, PLAIN), PROMPTS[4]
    (plain,) = generate(runner, [prompt], 1)[0]

    def ask(**changes: Any) -> Sampled:
        return generate(runner, [prompt], 1, samplings=[msgspec.structs.replace(GREEDY, **changes)])[0][0]

    assert ask(top_logprobs=3).token == plain.token
    tops = np.frombuffer(ask(top_logprobs=3).tops, [("token", "<u4"), ("logprob", "<f4")])
    assert tops["token"][0] == plain.token and tops["logprob"][0] == pytest.approx(plain.logprob, abs=1e-5)
    second = int(tops["token"][1])
    assert ask(bad_ids=((plain.token,),)).token == second
    assert ask(logit_bias=((77, 1000.0),)).token == 77
    assert ask(min_tokens=1, end_ids=(plain.token,)).token == second
    assert ask(end_ids=(plain.token,)).flags == 1
    history = History([*prompt, plain.token], len(prompt))
    again = msgspec.structs.replace(GREEDY, presence_penalty=2.0)
    row = StepRow(0, [*prompt, plain.token], 0, [0, 1, 2], True, 1, again, history)
    assert runner.step([row])[0].flags == 0


def go_on(runner: Runner, ids: list[int], start: int, blocks: list[int]) -> Sampled:
    (said,) = runner.step([StepRow(0, ids[start:], start, blocks, True, 0, GREEDY)])
    return said


@EVERY_WAY
def test_a_sequence_goes_on_from_blocks_that_were_copied_swapped_or_another_began(load: Load, way: str) -> None:
    runner = native(load, *WAYS[way], swap_bytes=1 << 22, verify_swaps=True)
    assert runner.host_blocks >= 3
    ids, table = PROMPTS[5][:45], [9, 4, 30]
    expected = go_on(runner, ids, 0, [1, 2, 3])
    runner.step([StepRow(0, ids[:40], 0, table, False, 0, GREEDY)])
    runner.move([(Move.COPY, 9, 11), (Move.COPY, 4, 12), (Move.COPY, 30, 13)])
    assert go_on(runner, ids, 40, [11, 12, 13]) == expected
    runner.move([(Move.OUT, block, host) for host, block in enumerate(table)])
    spoil(runner)
    runner.move([(Move.IN, host, block) for host, block in enumerate((50, 20, 8))])
    assert go_on(runner, ids, 40, [50, 20, 8]) == expected
    assert go_on(runner, ids, 32, [50, 20, 40]) == expected, "the first two blocks are shared"


def spoil(runner: Runner) -> None:
    for pool in (*runner._pool.keys, *runner._pool.values):
        pool.fill_(float("nan"))
        pool[::2] = float("inf")


@EVERY_WAY
def test_what_a_block_held_before_reaches_nobody(load: Load, way: str) -> None:
    runner = native(load, *WAYS[way])
    before = generate(runner, PROMPTS, 3, samplings=SAMPLINGS)
    spoil(runner)
    assert generate(runner, PROMPTS, 3, samplings=SAMPLINGS, chunk=5, seed=8) == before


def test_a_sequence_whose_numbers_are_not_finite_is_invalid_alone(load: Load) -> None:
    runner = native(load, MODELS["64, untied"], blocks=BLOCKS + 1)
    weights = runner._steps._model._kept[0]  # type: ignore[attr-defined]
    before = generate(runner, PROMPTS, 3, samplings=SAMPLINGS)
    weights.embedding[258] = torch.nan
    spoilt = [*PROMPTS[4][:20], 258, 3]
    asked = [GREEDY, SAMPLED, msgspec.structs.replace(GREEDY, top_logprobs=2)]
    said = generate(runner, [spoilt] * 3 + PROMPTS, 1, samplings=asked + SAMPLINGS)
    assert [s.flags for (s,) in said] == [INVALID_FLAG] * 3 + [0] * len(PROMPTS)
    assert generate(runner, PROMPTS, 3, samplings=SAMPLINGS) == before


def test_padding_of_the_vocabulary_is_never_said(load: Load) -> None:
    known, untied = 130, MODELS["64, untied"]
    runner, whole = native(load, untied, vocab=known), native(load, untied)
    said = [generate(r, PROMPTS, 8, samplings=[GREEDY, SAMPLED] * 3) for r in (runner, whole)]
    assert all(s.token < known for output in said[0] for s in output)
    assert any(s.token >= known for output in said[1] for s in output)


def test_a_step_of_a_single_layer_is_measured(load: Load) -> None:
    runner = native(load, MODELS["64, yarn"])
    runner.warm_up()
    assert runner.measure(64, 8) > 0
    assert runner.step([StepRow(0, [1, 2, 3], 0, [0], False, 0, GREEDY)]) == []


@pytest.mark.parametrize(
    ("tokens", "start", "blocks"),
    [
        *(([261], 0, [0]), ([-2], 0, [0]), ([UNKNOWN], 0, [0]), ([], 0, [0]), ([1, 2], 15, [0]), ([1], 0, [])),
        *(([1], 0, [BLOCKS]), ([1], 0, [-1])),
    ],
)
def test_rows_that_make_no_sense_are_our_own_fault_and_no_stray_write(
    load: Load, tokens: list[int], start: int, blocks: list[int]
) -> None:
    fine = StepRow(1, [5], 0, [1], True, 0, GREEDY)
    with pytest.raises(AssertionError):
        native(load, PLAIN).step([fine, StepRow(0, tokens, start, blocks, True, 0, GREEDY)])
