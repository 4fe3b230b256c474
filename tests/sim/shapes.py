"""How the world of a seed is cut: deliberately small, so that every bound is met."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec

from baton.engine.limits import Limits
from tests.sim.script import Shape


def make_shape(rng: random.Random) -> Shape:
    """Cut a world."""
    block_tokens = rng.choice((1, 4, 4, 8))
    capacity = rng.choice((40, 64, 200))
    poison = rng.random() < 0.15
    tokens_per_row_max = 1 if poison else rng.choice((1, 1, 2, 4))
    limits = Limits(
        mailbox_tokens_max=rng.choice((1, 2, 4, 1024)),
        step_tokens_max=rng.choice((3, 8, 64)),
        running_requests_max=rng.choice((2, 4, 16)),
        requests_per_frontend_max=rng.choice((2, 3, 6, 16)),
        request_spans_max=rng.choice((2, 64)),
        sweep_interval_s=0.02,
        stalled_s_max=0.4,
        answer_s_max=0.3,
        lives_max=100,
        resume_s_max=0.1,
        idempotency_s_max=0.05,
        lone_deaths_max=2 if poison else 100,
        predictor_lengths_min=3,
    )
    return Shape(
        limits=limits,
        frontends=rng.choice((1, 2, 2)),
        tokenizers=rng.choice((1, 1, 2, 3)),
        blocks=-(-capacity // block_tokens),
        block_tokens=block_tokens,
        context_tokens=rng.choice((32, 48)),
        mean_tokens=rng.choice((6, 20)),
        token_ring_bytes=rng.choice((1024, 8192)) if tokens_per_row_max == 1 else 16384,
        plan_ring_bytes=8192,
        slow_links=rng.random() < 0.5,
        repeats=rng.random() < 0.3,
        faulty={7: rng.randrange(4)},
        poison=poison,
        tokens_per_row_max=tokens_per_row_max,
    )


def with_bounds(seed: int, shape: Shape, limits: Limits) -> Shape:
    """The same world under these limits; in one of three only little work may wait for a seat; some have swap space.

    It has chance of its own, so that the rest of the world stays as it is.
    """
    rng = random.Random(f"queue {seed}")
    if rng.random() < 1 / 3:
        limits = msgspec.structs.replace(limits, queue_tokens_max=rng.choice((16, 40)))
    return with_swap(seed, shape, limits)


def with_swap(seed: int, shape: Shape, limits: Limits) -> Shape:
    """The same world under these limits; two of three have swap space, whose use seems cheap, dear, or now one and now
    the other. It has chance of its own, so that the rest of the world stays as it is.
    """
    rng = random.Random(f"swap {seed}")
    if rng.random() < 1 / 3:
        return replace(shape, limits=limits)
    limits = msgspec.structs.replace(limits, swap_prior_bytes_per_s=rng.choice((1, 300, 1 << 40, 1 << 40)))
    return replace(shape, limits=limits, host_blocks=rng.choice((2, shape.blocks // 2, 4 * shape.blocks)))
