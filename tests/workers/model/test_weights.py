"""Loading: models of every shape compute what their file says; caches are mapped, checked and made again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.batch import Sampling, StepRow
from baton.workers.model.gguf import ModelFileError
from baton.workers.model.paths import cache_directory
from baton.workers.model.weights import load_model
from baton.workers.runner import Runner
from tests.workers.model.tiny import F16, F32, Q4_1, Q8_0, Tiny

CPU = torch.device("cpu")
IDS = [5, 77, 200, 31, 9, 120, 64]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "weights"


def digest(path: Path, weights: torch.dtype = torch.bfloat16) -> str:
    return load_model(path, torch.float32, weights, CPU).weights.digest


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": F32, "tied": False},
        {"kind": F16, "heads": 6, "kv_heads": 1, "head_dim": 10},
        {"kind": Q4_1, "hidden": 96, "heads": 3, "kv_heads": 3, "head_dim": 32, "intermediate": 160},
        {"factors": [1.0, 1.0, 2.0, 3.0, 4.0, 8.0, 8.0, 8.0], "kind": Q8_0},
    ],
    ids=str,
)
def test_logits_are_those_of_the_plain_formulas(tmp_path: Path, changes: dict[str, Any]) -> None:
    tiny = Tiny(**changes)
    path = tiny.write(tmp_path / "m.gguf")
    runner = Runner(path, dtype="float32", weights="float32", blocks=4)
    expected = tiny.logits(IDS).log_softmax(-1)
    sampling = Sampling(0.0, 1.0, 0, 0, ())
    runner.step([StepRow(0, IDS[:4], 0, [2], False, 0, sampling)])
    (sampled,) = runner.step([StepRow(0, IDS[4:], 4, [2], True, 0, sampling)])
    assert sampled.token == expected.argmax()
    assert sampled.logprob == pytest.approx(expected.max().item(), abs=1e-4)


@pytest.mark.parametrize(
    ("dtype", "weights"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_every_pair_of_dtypes_is_near(tmp_path: Path, dtype: str, weights: str) -> None:
    tiny = Tiny()
    runner = Runner(tiny.write(tmp_path / "m.gguf"), dtype=dtype, weights=weights, blocks=4)
    (sampled,) = runner.step([StepRow(0, IDS, 0, [1], True, 0, Sampling(0.0, 1.0, 0, 0, ()))])
    expected = tiny.logits(IDS).log_softmax(-1)
    assert sampled.logprob == pytest.approx(expected[sampled.token].item(), abs=0.3)
    assert runner.layout.dtype == dtype


def test_the_second_load_maps_what_the_first_wrote(tmp_path: Path, cache: Path) -> None:
    path = Tiny().write(tmp_path / "m.gguf")
    first = digest(path)
    (written,) = cache.iterdir()
    before = written.stat()
    assert digest(path) == first
    assert written.stat() == before or written.stat().st_mtime_ns == before.st_mtime_ns


def test_digests_tell_weights_dtypes_and_shapes_apart(tmp_path: Path) -> None:
    paths = [Tiny(seed=seed).write(tmp_path / f"{seed}.gguf") for seed in (0, 1)]
    longer = Tiny(numbers={"llama.rope.dimension_count": 16, "tokenizer.ggml.eot_token_id": 3}).write(
        tmp_path / "l.gguf"
    )
    found = [digest(paths[0]), digest(paths[0], torch.float32), digest(paths[1]), digest(longer)]
    assert len(set(found)) == 4


def test_what_no_start_has_used_for_a_month_goes_with_the_next_conversion(tmp_path: Path, cache: Path) -> None:
    first, other = Tiny().write(tmp_path / "first.gguf"), Tiny().write(tmp_path / "other.gguf")
    digest(first)
    digest(other)
    for kept in cache.iterdir():
        os.utime(kept, (0, 0))
    digest(first)  # in use again
    digest(Tiny().write(tmp_path / "third.gguf"))
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_read_all_the_same(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tiny().write(tmp_path / "m.gguf")
    first = digest(model)
    (kept,) = cache.iterdir()
    written = kept.stat().st_ino

    def refuse(*given: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert digest(model) == first and kept.stat().st_ino == written


def test_what_a_killed_conversion_left_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = cache_directory("weights")
    cache.mkdir(parents=True)
    gone, own = (
        cache / ".converting-4194305-abc",
        cache / f".converting-{os.getpid()}-abc",
    )  # no process has that number
    for left in (gone, own):
        left.write_bytes(b"half a file")
    Runner(Tiny().write(tmp_path / "m.gguf"), dtype="float32", weights="float32", blocks=4)
    assert not gone.exists() and own.exists()


def test_a_changed_model_file_is_converted_anew(tmp_path: Path) -> None:
    path = Tiny().write(tmp_path / "m.gguf")
    first = digest(path)
    Tiny(seed=9).write(path)
    os.utime(path, ns=(1, 1))  # another moment, however coarse the clock
    assert digest(path) != first


@pytest.mark.parametrize("damage", ["cut", "longer", "data", "header", "trailer", "empty", "noise"])
def test_a_damaged_cache_is_noticed_and_made_again(tmp_path: Path, cache: Path, damage: str) -> None:
    path = Tiny().write(tmp_path / "m.gguf")
    first = digest(path)
    (written,) = cache.iterdir()
    good = written.read_bytes()

    def flipped(at: int) -> bytes:
        return good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]

    length = len(good)
    bad = {
        "cut": good[: length // 2],
        "longer": good + b"\0",
        "data": flipped(1000),
        "header": flipped(length - 100),
        "trailer": flipped(length - 20),
        "empty": b"",
        "noise": bytes(range(256)) * 10,
    }[damage]
    written.write_bytes(bad)
    assert digest(path) == first
    assert written.read_bytes() == good


def test_nothing_half_written_is_left_behind(tmp_path: Path, cache: Path) -> None:
    path = Tiny().write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[-64:] = b"\xff" * 64  # NaNs among the last tensor's scales
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="holds non-finite numbers"):
        digest(path)
    assert list(cache.iterdir()) == []


def test_an_unwritable_cache_is_one_clear_error(tmp_path: Path, cache: Path) -> None:
    path = Tiny().write(tmp_path / "m.gguf")
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the directory should be")
    with pytest.raises(ModelFileError, match="cannot write the converted weights"):
        digest(path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"architecture": "qwen3"}, "architecture 'qwen3' is not supported"),
        ({"numbers": {"llama.expert_count": 8}}, "mixtures of experts"),
        ({"numbers": {"llama.attention.sliding_window": 128}}, "attention.sliding_window is not supported"),
        ({"numbers": {"llama.rope.dimension_count": 8}}, "partial rotary"),
        ({"numbers": {"llama.vocab_size": 7}}, "outside|has shape"),
        ({"numbers": {"tokenizer.ggml.eot_token_id": 1 << 31}}, "outside the vocabulary"),
        ({"scaling": {"type": "longrope", "factor": 2.0}}, "rotary scaling 'longrope' is not supported"),
        ({"scaling": {"type": "yarn", "factor": 0.5, "original_context_length": 8}}, "makes no sense"),
        ({"scaling": {"type": "linear", "factor": -1.0}}, "not a positive number"),
        ({"spare": "blk.0.attn_q.bias"}, "tensor blk.0.attn_q.bias has no place in a llama model"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelFileError, match=fault):
        digest(Tiny(**changes).write(tmp_path / "m.gguf"))
