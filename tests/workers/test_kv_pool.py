"""The pool's sizes and its refusal."""

from __future__ import annotations

import re

import pytest
import torch

from baton.workers.cache import KvPool, MemoryBudgetError, available_bytes, blocks_for_bytes, bytes_per_block
from baton.workers.model.config import ModelConfig, RopeScaling

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="llama",
    name="none",
    layers=3,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=300,
    context_length=512,
    rms_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=RopeScaling("none"),
    tied_embeddings=True,
    bos_id=1,
    end_ids=(0,),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_pool_is_zero_and_of_the_promised_size(dtype: torch.dtype) -> None:
    pool = KvPool(CONFIG, dtype, 5, CPU)
    tensors = [*pool.keys, *pool.values]
    assert len(pool.keys) == len(pool.values) == 3
    assert all(t.shape == (5, 16, 2, 16) and t.dtype == dtype and not t.any() for t in tensors)
    assert sum(t.numel() * t.element_size() for t in tensors) == 5 * pool.layout.bytes_per_block


def test_layers_do_not_overlap() -> None:
    pool = KvPool(CONFIG, torch.float32, 2, CPU)
    for number, tensor in enumerate([*pool.keys, *pool.values]):
        tensor.fill_(number)
    assert all(bool((t == i).all()) for i, t in enumerate([*pool.keys, *pool.values]))


def test_clear_zeroes_whole_blocks_in_every_layer() -> None:
    pool = KvPool(CONFIG, torch.bfloat16, 4, CPU)
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(float("nan"))
    pool.clear([2, 0])
    pool.clear([])
    for tensor in (*pool.keys, *pool.values):
        assert not tensor[[0, 2]].any() and tensor[[1, 3]].isnan().all()


def test_blocks_for_bytes_rounds_down() -> None:
    each = bytes_per_block(CONFIG, torch.bfloat16)
    assert each == 2 * 3 * 16 * 2 * 16 * 2
    assert blocks_for_bytes(CONFIG, torch.bfloat16, 3 * each + each - 1) == 3


def test_a_pool_that_does_not_fit_says_what_would() -> None:
    blocks = available_bytes(CPU)
    with pytest.raises(MemoryBudgetError) as caught:
        KvPool(CONFIG, torch.float32, blocks, CPU)
    text = str(caught.value)
    assert "\n" not in text and str(blocks * bytes_per_block(CONFIG, torch.float32)) in text
    found = re.search(r"from 1 to (\d+) blocks", text)
    assert found and 0 < int(found[1]) < blocks


def test_no_blocks_are_no_pool() -> None:
    with pytest.raises(MemoryBudgetError):
        KvPool(CONFIG, torch.float32, 0, CPU)
