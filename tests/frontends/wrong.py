"""What is wrong with each parameter, for the tests of every door: as JSON, so that it can be no number at all."""

from __future__ import annotations

import json

from tests.frontends.double import CARD

V = CARD.vocab

COUNT = ["0", "-1", "1.5", '"5"', "true", "[5]", "{}", str(2**70), "1e400", "NaN"]
TRUTH = ["1", "0", '"true"', "[]", "{}", "NaN"]
LABEL = [json.dumps("x" * (1 << 20)), "5", "true", "[]", '["x"]', "{}"]
TEXT = ["5", "true", "{}", "1.5", "NaN"]

#: name -> values that no door takes
WRONG: dict[str, list[str]] = {
    "model": [*TEXT, "[]"],
    "messages": [*TEXT, "[]", '"hi"', "[5]", '[{"role": "wizard", "content": "x"}]', "[[]]"],
    "prompt": [*TEXT, "[]", '""', '["a", "b"]', f"[{V}]", "[-1]", "[[1], [2]]", '[1, "a"]', "[1.5]"],
    "input": [*TEXT, "[]", '""', '["a"]', f"[{V}]", "[-1]", '[{"type": "reasoning", "role": "user", "content": ""}]'],
    "instructions": [*TEXT, "[]"],
    "max_tokens": [*COUNT, "4097"],
    "max_completion_tokens": [*COUNT, "4097"],
    "max_output_tokens": [*COUNT, "4097"],
    "temperature": ["-0.01", "2.01", "NaN", "1e400", "true", '"1"', "[]", "-Infinity"],
    "top_p": ["0", "-1", "1.01", "1e-400", "NaN", '"1"', "true"],
    "top_k": ["-2", "1.5", '"5"', "true", "1e400", "NaN", "[]"],
    "min_p": ["-0.1", "1.1", "NaN", "[]", '"0"', "true"],
    "presence_penalty": ["-2.1", "2.1", "1e400", '"1"', "false", "[]"],
    "frequency_penalty": ["-2.1", "2.1", "-1e400", "{}", '"1"', "true"],
    "repetition_penalty": ["0", "-1", "0.009", "101", "1e-400", "NaN", '"1"', "true"],
    "seed": [str(2**70), str(2**63), str(-(2**63) - 1), "1.5", "true", '"1"', "1e400", "[]"],
    "min_tokens": ["-1", str(2**70), "1.5", "4097", "true", '"1"', "NaN"],
    "ignore_eos": TRUTH,
    "include_stop_str_in_output": TRUTH,
    "skip_special_tokens": TRUTH,
    "stop": [
        *('""', '[""]', "5", "[5]", "true", '{"a": 1}', "[null]", json.dumps(["x"] * 17), json.dumps(["x" * 257])),
        *(json.dumps("x" * (1 << 20)), json.dumps(["x"] * 1_000_000)),
    ],
    "stop_token_ids": [
        *(str([V]), "[-1]", "[1.5]", "[true]", "5", str([1] * 129), str([2**70]), '["1"]', '"1"', "{}"),
        *("[NaN]", "[1e400]", json.dumps([1] * 1_000_000)),
    ],
    "allowed_token_ids": [
        *("[]", str([V]), "[-1]", str([1] * (V + 1)), "{}", "[true]", '"all"', "[1e400]", json.dumps([1] * 1_000_000)),
    ],
    "bad_words": ['[""]', '[" "]', '"x"', "[5]", "{}", json.dumps(["x" * 65]), json.dumps(["x"] * 1_000_000)],
    "logit_bias": [
        *(f'{{"{V}": 1}}', '{"-1": 1}', '{"x": 1}', '{"01": 1}', '{"1": 100.1}', '{"1": NaN}', '{"1": 1e400}'),
        *('{"1": "1"}', '{"1": true}', "[]", "5", json.dumps({str(n): 1 for n in range(301)}), '{"\u0661": 1}'),
        *('"1"', '{"1": null}', json.dumps({str(n): 1 for n in range(1_000_000)})),
    ],
    "n": [*COUNT, "5000000"],
    "best_of": [*COUNT, "1000000000"],
    "logprobs": ["-1", "21", "1.5", '"yes"', "[]", "{}", str(2**70), "1e400", "NaN"],
    "top_logprobs": ["1000000000", "-1", "21", "1.5", '"1"', "true", str(2**70), "1e400", "NaN", "[]"],
    "prompt_logprobs": ["1000000000", "-2", "1.5", '"1"', "true", str(2**70), "1e400", "NaN"],
    "include": ["5", '"x"', '["x"]', "[5]", "{}", "true"],
    "stream": TRUTH,
    "stream_options": ["5", "[]", '"x"', "true", "NaN"],
    "return_token_ids": TRUTH,
    "resumable": TRUTH,
    "store": TRUTH,
    "deadline_ms": [*COUNT, str(10**9)],
    "queue_ms_max": [*COUNT, str(10**9)],
    "priority": ["101", "-101", "0.5", '"high"', "false", str(2**70), "1e400", "NaN", "[]"],
    "service_tier": [*LABEL, '"slow"', '""'],
    "metadata": ['{"a": 1}', "5", '"x"', "[]", "true", json.dumps({str(n): "" for n in range(100_000)})],
    "user": LABEL,
    "safety_identifier": LABEL,
    "prompt_cache_key": LABEL,
    "request_id": LABEL,
    "use_beam_search": ["true", "1"],
    "logits_processors": ['["x"]', "5"],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


def with_field(body: dict[str, object], name: str, value: str) -> bytes:
    """The body with one more field, whose value is JSON or none; of two of one name the last one counts."""
    return (json.dumps(body)[:-1] + f', "{name}": {value}}}').encode()
