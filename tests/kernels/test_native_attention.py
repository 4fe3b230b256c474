"""The C++ attention and its pool against the reference, over contexts of every length; rows are independent."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from baton.kernels.native import HEAD_DIMS, Team
from baton.kernels.reference import Part
from tests.kernels.native_attention import Attention, same_bits, shuffled

#: 512 positions are a tile, 16 a block
DECODES = [(0, 1), (15, 1), (16, 1), (510, 1), (511, 1), (512, 1), (1099, 1)]
CHUNKS = [(0, 17), (3, 1), (5, 33), (505, 30), (0, 16), (1023, 2), (32, 5)]
STEPS = pytest.mark.parametrize("spans", [DECODES, CHUNKS], ids=["decodes", "chunks"])
GROUPS = (1, 2, 3, 5, 8, 13)


def begun(
    library: ctypes.CDLL, group: int, head_dim: int, spans: list[tuple[int, int]]
) -> tuple[Attention, list[Part]]:
    """A pool that holds all that comes before the ``spans``."""
    parts, blocks = shuffled(spans)
    attention = Attention(library, 2, group, head_dim, blocks, scale=1.25)
    for seed, part in enumerate(parts):
        attention.hold(part.table, part.start, seed)
    attention.publish()
    return attention, parts


def positions(parts: list[Part]) -> Tensor:
    return torch.cat([torch.arange(part.start, part.start + part.count) for part in parts])


@STEPS
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_is_the_references_over_blocks_that_held_what_is_not_finite(
    native_library: ctypes.CDLL, teams: list[Team], head_dim: int, group: int, spans: list[tuple[int, int]]
) -> None:
    attention, parts = begun(native_library, group, head_dim, spans)
    fused = attention.fused(sum(part.count for part in parts))
    stored = attention.fork()
    found, rotated = attention.attend(teams[1], fused, parts)
    torch.testing.assert_close(rotated, attention.rotated(fused, positions(parts)), rtol=2**-7, atol=1e-3)
    expected = attention.expected(rotated, parts)
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)
    assert attention.holds_what_is_expected()
    assert same_bits(stored.store(fused, parts), rotated)
    assert same_bits(stored.keys, attention.keys) and same_bits(stored.values, attention.values)


@STEPS
@pytest.mark.parametrize(("group", "head_dim"), [(1, 80), (3, 64), (5, 128), (13, 64), (2, 256)])
def test_a_row_is_the_same_bit_for_bit_alone_and_among_others_with_any_number_of_threads(
    native_library: ctypes.CDLL, teams: list[Team], head_dim: int, group: int, spans: list[tuple[int, int]]
) -> None:
    attention, parts = begun(native_library, group, head_dim, spans)
    fused = attention.fused(sum(part.count for part in parts))
    together, first = [attention.fork().attend(team, fused, parts)[0] for team in teams], 0
    for part in parts:
        alone = attention.fork().attend(teams[0], fused[first : first + part.count], [part])[0]
        assert all(same_bits(found[first : first + part.count], alone) for found in together)
        first += part.count


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 80), (8, 128), (13, 256)])
@pytest.mark.parametrize("cuts", [[7, 27, 28, 58, 70], [1, 2, 3, 50, 64], [16, 48, 511, 512, 530]], ids=str)
def test_a_prompt_in_chunks_is_a_whole_one_bit_for_bit(
    native_library: ctypes.CDLL, teams: list[Team], head_dim: int, group: int, cuts: list[int]
) -> None:
    length = cuts[-1]
    (part,), blocks = shuffled([(0, length)])
    whole = Attention(native_library, 2, group, head_dim, blocks)
    fused, chunked = whole.fused(length), whole.fork()
    expected, _ = whole.attend(teams[1], fused, [part])
    found = [
        chunked.attend(teams[index % 3], fused[begin:end], [Part(begin, end - begin, part.table)])[0]
        for index, (begin, end) in enumerate(zip([0, *cuts], cuts, strict=False))
    ]
    assert same_bits(torch.cat(found), expected)
    assert same_bits(chunked.keys, whole.keys) and same_bits(chunked.values, whole.values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("group", [3, 13])
def test_a_sequence_that_is_not_finite_spoils_no_other(
    native_library: ctypes.CDLL, teams: list[Team], group: int, bad: float
) -> None:
    attention, parts = begun(native_library, group, 64, CHUNKS)
    fused = attention.fused(sum(part.count for part in parts))
    clean, _ = attention.fork().attend(teams[1], fused, parts)
    fused[20] = bad  # the third part's
    spoilt, _ = attention.fork().attend(teams[1], fused, parts)
    first = CHUNKS[0][1] + CHUNKS[1][1]
    last = first + CHUNKS[2][1]
    assert not spoilt[20].isfinite().any()
    assert not spoilt[last - 1].isfinite().any()
    assert same_bits(spoilt[:first], clean[:first]) and same_bits(spoilt[last:], clean[last:])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_of_any_size_are_weighed(native_library: ctypes.CDLL, teams: list[Team], head_dim: int) -> None:
    """Where one key outweighs all others by far, its value is the answer, in whichever tile it stands."""
    for at in (0, 100, 511, 512, 700):
        parts, blocks = shuffled([(700, 1)])
        attention = Attention(native_library, 1, 2, head_dim, blocks)
        attention.hold(parts[0].table, 700, 0)
        attention.k[parts[0].table] = -20.0
        fused = torch.full((1, attention.width), 20.0, dtype=torch.bfloat16)
        attention.frequencies.zero_()
        if at < 700:
            attention.k[parts[0].table[at // 16], at % 16] = 30.0
        attention.publish()
        value = attention.v[parts[0].table[at // 16], at % 16, 0] if at < 700 else fused[0, :head_dim]
        found, _ = attention.attend(teams[0], fused, parts)
        assert same_bits(found[0], value.expand(2, -1))
