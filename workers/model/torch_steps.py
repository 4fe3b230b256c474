"""Steps by torch: the kernels of ``kernels.reference``, on the CPU or on a device that works by itself.

Each slot's last sampled token stays on the device, so that a step which is launched before the one before it was
collected finds it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.batch import UNKNOWN, Sampled, StepRow
from baton.kernels.reference import Part, plan_ragged
from baton.kernels.upload import upload
from baton.workers.cache import BLOCK_SIZE, KvPool
from baton.workers.model.llama import Llama
from baton.workers.sampler import Choice, choose, prompt_scores

SCORED_AT_ONCE = 32  # tokens of a prompt


@dataclass(slots=True, eq=False)
class Launched:
    """A step that was begun: the slots it samples for, and what it chooses for them; None where it is for none."""

    slots: list[int]
    choice: Choice | None


class TorchSteps:
    """``asynchronous`` where the device works by itself: then a step may be launched before the one before it was
    collected, and a token that is ``UNKNOWN`` in it is the one that the earlier step samples for that slot.
    """

    def __init__(self, model: Llama, pool: KvPool, vocab: int) -> None:
        self._model, self._pool, self._vocab = model, pool, vocab
        self._device = model.device
        self.asynchronous = self._device.type == "cuda"
        self.padded = model.padded
        self._last = torch.zeros(0, dtype=torch.int64, device=self._device)  # by slot
        self._sampling: Counter[int] = Counter()  # slots that launched steps sample for, which were not collected

    def phases_s(self) -> dict[str, float]:
        """Torch does not tell."""
        return {}

    def collect(self, launched: Launched) -> list[Sampled]:
        """Wait for a step; what it sampled."""
        self._sampling -= Counter(launched.slots)
        return launched.choice.answers() if launched.choice is not None else []

    def launch(self, rows: Sequence[StepRow], layers: int | None = None) -> Launched:
        """Begin a step; what to ``collect``, in the order of launching."""
        # Decoding rows of like length first, so that they attend together.
        ordered = sorted(rows, key=self._attention_order)
        ids = [token for row in ordered for token in row.tokens]
        unknown = [(at, slot) for at, slot in enumerate(_slots(ordered)) if ids[at] == UNKNOWN]
        assert all(self._sampling[slot] for _, slot in unknown), "an unknown token that no launched step samples"
        for at, _ in unknown:
            ids[at] = 0
        assert ids and min(ids) >= 0 and max(ids) < self._model.config.vocab, "token ids outside the vocabulary"
        ends, total = {}, 0
        for row in ordered:
            total += len(row.tokens)
            ends[id(row)] = total - 1
        sampled = [row for row in rows if row.sample]
        slots = [row.slot for row in sampled]
        parts = [Part(row.start, len(row.tokens), row.blocks) for row in ordered]
        with torch.inference_mode():
            ragged = plan_ragged(parts, BLOCK_SIZE, self._device, self.padded)
            self._pool.clear([block for part in parts for block in _begun(part)])
            tokens = upload(ids, self._device)
            if unknown:
                places, theirs = upload(unknown, self._device).T
                tokens[places] = self._last[theirs]
            states = self._model.states(tokens, ragged, self._pool, layers)
            for row in ordered:
                if row.targets:
                    self._score(row, states[ends[id(row)] + 1 - len(row.tokens) :])
            if not sampled:
                return Launched([], None)
            logits = self._model.logits(states, self._indices([ends[id(row)] for row in sampled]))
            choice = choose(
                logits[:, : self._vocab],
                [row.sampling for row in sampled],
                [row.position for row in sampled],
                [row.history for row in sampled],
            )
            self._remember(slots, choice.tokens)
            choice.fetch()
        self._sampling.update(slots)
        return Launched(slots, choice)

    def _remember(self, slots: list[int], tokens: torch.Tensor) -> None:
        """Keep each slot's last token where the next step finds it."""
        if (missing := max(slots) + 1 - len(self._last)) > 0:
            room = max(missing, len(self._last))  # twice as many, so that growing is rare
            self._last = torch.cat((self._last, torch.zeros(room, dtype=torch.int64, device=self._device)))
        self._last[upload(slots, self._device)] = tokens

    def _score(self, row: StepRow, states: Tensor) -> None:
        """Leave a row its prompt's log-probabilities; a few tokens at a time, so that few logits are there at once."""
        scores, top = [], row.sampling.prompt_logprobs or 0
        for first in range(0, len(row.targets), SCORED_AT_ONCE):
            targets = row.targets[first : first + SCORED_AT_ONCE]
            logits = self._model.logits(states, self._indices(range(first, first + len(targets))))
            scores.append(prompt_scores(logits[:, : self._vocab], targets, top))
        row.prompt_scores = b"".join(scores)

    def _attention_order(self, row: StepRow) -> tuple[int, int]:
        chunk = len(row.tokens) > 1
        return (1, 0) if chunk else (0, self.padded(row.start + 1, BLOCK_SIZE))

    def _indices(self, indices: Sequence[int]) -> Tensor:
        return upload(list(indices), self._device, torch.int64)


def _slots(rows: Sequence[StepRow]) -> Iterator[int]:
    """The slot of each token of a step."""
    return (row.slot for row in rows for _ in row.tokens)


def _begun(part: Part) -> Sequence[int]:
    """The blocks whose first place this step writes."""
    return part.table[-(-part.start // BLOCK_SIZE) : -(-(part.start + part.count) // BLOCK_SIZE)]
