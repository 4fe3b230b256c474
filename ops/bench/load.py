"""A closed loop of load: a fixed number of requests is open until so many were sent or so long has passed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import msgspec

from baton.ops.bench.stream import Outcome, ask
from baton.ops.http import Target

#: a server that refuses at once is not hammered
FAILURE_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. Without ``requests`` and ``seconds`` there is no end, so at least one of them is set.

    ``vocabulary`` is the half-open range of prompt ids, unless ``text`` is the prompt.
    """

    model: str
    concurrency: int
    requests: int | None
    seconds: float | None
    prompt_tokens: int
    output_tokens: int
    vocabulary: range
    text: str | None
    ignore_eos: bool
    timeout_s: float
    seed: int

    def body(self, number: int) -> bytes:
        """Request ``number``'s JSON; the same for the same seed and number."""
        prompt: str | list[int]
        if self.text is not None:
            prompt = self.text
        else:
            prompt = random.Random(f"{self.seed}/{number}").choices(self.vocabulary, k=self.prompt_tokens)
        document = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            document["ignore_eos"] = True
        return msgspec.json.encode(document)


async def drive(where: Target, plan: Plan, on_outcome: Callable[[Outcome], None]) -> None:
    """Run the plan; ``on_outcome`` hears of each request as it ends. Cancelling drops what is open, unreported."""
    assert plan.requests is not None or plan.seconds is not None
    deadline = perf_counter() + plan.seconds if plan.seconds is not None else float("inf")
    most = plan.requests if plan.requests is not None else float("inf")
    expected = plan.output_tokens if plan.ignore_eos else None
    sent = 0

    async def one_after_another() -> None:
        nonlocal sent
        while sent < most and perf_counter() < deadline:
            number, sent = sent, sent + 1
            outcome = await ask(where, plan.body(number), plan.timeout_s, expected)
            on_outcome(outcome)
            if outcome.error is not None:
                await asyncio.sleep(FAILURE_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.concurrency):
            group.create_task(one_after_another())
