"""The steps that take the most memory of all that limits and pool allow, made up to be measured. Pure."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.batch import Sampling, StepRow

#: sampled from a distribution so flat that the cut at a share of its mass takes a sort of the whole vocabulary, of a
#: prompt that is told of
WIDE = Sampling(temperature=1e6, top_p=0.99, top_k=0, seed=0, end_ids=(), prompt_logprobs=20)


def largest_steps(
    step_tokens: int,
    rows_max: int,
    blocks: int,
    block_tokens: int,
    context_tokens: int,
    padded: Callable[[int, int], int],
) -> list[list[StepRow]]:
    """Two steps: as many rows as there can be, and one chunk as long as can be at the end of a whole context.

    In the first, all but one of up to ``rows_max`` rows decode and the last computes the rest of ``step_tokens``.
    A gather of keys is as wide as ``padded`` says (see ``kernels.reference.padded_blocks``): contexts are chosen that
    are just past a width, and as long as the pool's ``blocks`` have room for. Tables name few blocks over and over:
    only the sizes matter.
    """
    rows = min(rows_max, step_tokens, blocks)  # each holds one block at least
    decoding, table = _widest(rows - 1, blocks, -(-context_tokens // block_tokens), padded)
    start = (table - 1) * block_tokens  # the first place of the block that is just past a width
    first = [_row(slot, start if slot < decoding else 0, 1, block_tokens) for slot in range(rows - 1)]
    rest = min(step_tokens - len(first), context_tokens)
    chunk = min(step_tokens, context_tokens)
    return [
        [*first, _row(rows - 1, context_tokens - rest, rest, block_tokens)],
        [_row(0, context_tokens - chunk, chunk, block_tokens)],
    ]


def _widest(rows: int, blocks: int, longest: int, padded: Callable[[int, int], int]) -> tuple[int, int]:
    """How many of ``rows`` can attend over tables of how many blocks each, such that they gather the most."""
    best, most = (0, 1), 0
    for table in range(1, longest + 1):
        attending, width = min(rows, blocks // table), padded(table, 1)
        if attending * width > most:
            best, most = (attending, table), attending * width
    return best


def _row(slot: int, start: int, count: int, block_tokens: int) -> StepRow:
    table = [0] * -(-(start + count) // block_tokens)
    return StepRow(slot, [0] * count, start, table, True, 0, WIDE, targets=[0] * (count - 1))
