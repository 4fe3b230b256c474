"""A model and its KV pool behind one call: ``step`` computes rows of tokens and samples where asked.

The worker process drives it; it knows no request and no queue, and between two steps it keeps nothing but the pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from baton.engine.batch import UNKNOWN, Sampled, Sampling, StepRow
from baton.engine.blocks import Move
from baton.kernels.reference import Part, padded_blocks, plan_ragged
from baton.kernels.upload import upload
from baton.workers.cache import BLOCK_SIZE, KvPool, blocks_for_bytes
from baton.workers.largest import largest_steps
from baton.workers.model.weights import load_model
from baton.workers.peak import Peak, resident_peak
from baton.workers.sampler import Choice, choose, prompt_scores
from baton.workers.workspace import remembered

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KV_BYTES_DEFAULT = 1 << 30
TIMED_BLOCKS, TIMED_MOVES = 32, 4
SCORED_AT_ONCE = 32  # tokens of a prompt


def has_device(device: str) -> bool:
    """Whether torch can compute on such a device here."""
    return device == "cpu" or torch.cuda.is_available()


@dataclass(slots=True, eq=False)
class Launched:
    """A step that was begun: the slots it samples for, and what it chooses for them; None where it is for none."""

    slots: list[int]
    choice: Choice | None


class Runner:
    """One device's model. ``layout``, ``config`` and ``weights_digest`` describe it and do not change.

    Steps and moves take effect in the order in which they are asked for. A device that works by itself is
    ``asynchronous``: a step may be launched before the ones before it were collected. Each slot's last sampled token
    stays on the device, so that such a step finds it there.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: str = "bfloat16",
        weights: str = "bfloat16",
        blocks: int | None = None,
        kv_bytes: int | None = None,
        swap_bytes: int = 0,
        verify_swaps: bool = False,
        threads: int | None = None,
        device: str = "cpu",
        vocab: int | None = None,
    ) -> None:
        """Load the model and set up a pool of ``blocks``, or as many as ``kv_bytes`` hold (by default 1 GiB).

        ``swap_bytes`` of host memory take in blocks that are swapped out, with checksums where ``verify_swaps``.
        ``dtype`` is that of computation, ``weights`` that in which weights are held (``bfloat16`` or
        ``float32``); ids from ``vocab`` on are padding and never sampled; ``threads`` are torch's, by default
        one a core this process may use. Raises ``ModelFileError`` and ``MemoryBudgetError``.
        """
        assert blocks is None or kv_bytes is None, "blocks and kv_bytes say the same thing twice"
        _keep_freed_memory()
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        self.tokens_per_row_max = 1
        self._device = torch.device(device)
        self.asynchronous = self._device.type == "cuda"
        self._last = torch.zeros(0, dtype=torch.int64, device=self._device)  # by slot
        self._sampling: Counter[int] = Counter()  # slots that launched steps sample for, which were not collected
        self._model = load_model(model_path, DTYPES[dtype], DTYPES[weights], self._device)
        self.config = self._model.config
        self.weights_digest = self._model.weights.digest
        self._vocab = self.config.vocab if vocab is None else vocab
        if blocks is None:
            blocks = blocks_for_bytes(self.config, DTYPES[dtype], KV_BYTES_DEFAULT if kv_bytes is None else kv_bytes)
        host_blocks = blocks_for_bytes(self.config, DTYPES[dtype], swap_bytes)
        self._pool = KvPool(
            self.config, DTYPES[dtype], blocks, self._device, host_blocks=host_blocks, verify=verify_swaps
        )
        self.layout = self._pool.layout
        self.host_blocks = host_blocks
        self.swap_bytes_per_s = 0  # once timed
        self.weights_bytes = self._model.weights.bytes
        self.workspace_bytes = 0  # once measured, the most a step takes

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy and swap blocks, as ``engine.blocks.Move`` says, in order. Raises ``SwapDamaged``."""
        with torch.inference_mode():
            self._pool.move(moves)

    def step(self, rows: Sequence[StepRow]) -> list[Sampled]:
        """Compute every row's tokens, write their keys and values, and sample after the rows that ask for it.

        Answers follow the order of ``rows``, one for each with ``sample`` set. A row with ``targets`` has their
        ``prompt_scores`` afterwards.
        """
        return self.collect(self.launch(rows))

    def launch(self, rows: Sequence[StepRow]) -> Launched:
        """Begin such a step; what to ``collect``, in the order of launching.

        A token that is ``UNKNOWN`` is the one that the last launched step samples for the row's slot.
        """
        return self._launch(rows)

    def collect(self, launched: Launched) -> list[Sampled]:
        """Wait for a step; what it sampled."""
        self._sampling -= Counter(launched.slots)
        return launched.choice.answers() if launched.choice is not None else []

    def _launch(self, rows: Sequence[StepRow], layers: int | None = None) -> Launched:
        # Decoding rows of like length first, so that they attend together.
        ordered = sorted(rows, key=_attention_order)
        ids = [token for row in ordered for token in row.tokens]
        unknown = [(at, slot) for at, slot in enumerate(_slots(ordered)) if ids[at] == UNKNOWN]
        assert all(self._sampling[slot] for _, slot in unknown), "an unknown token that no launched step samples"
        for at, _ in unknown:
            ids[at] = 0
        assert ids and min(ids) >= 0 and max(ids) < self.config.vocab, "token ids outside the vocabulary"
        ends, total = {}, 0
        for row in ordered:
            total += len(row.tokens)
            ends[id(row)] = total - 1
        sampled = [row for row in rows if row.sample]
        slots = [row.slot for row in sampled]
        parts = [Part(row.start, len(row.tokens), row.blocks) for row in ordered]
        with torch.inference_mode():
            ragged = plan_ragged(parts, BLOCK_SIZE, self._device)
            self._pool.clear([block for part in parts for block in _begun(part)])
            tokens = upload(ids, self._device)
            if unknown:
                places, theirs = upload(unknown, self._device).T
                tokens[places] = self._last[theirs]
            states = self._model.states(tokens, ragged, self._pool.keys, self._pool.values, layers)
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

    def _indices(self, indices: Sequence[int]) -> Tensor:
        return upload(list(indices), self._device, torch.int64)

    def measure(self, step_tokens: int, rows: int) -> int:
        """The most memory beyond weights and pool that a step takes, in bytes; before anything is in the pool.

        Steps of ``step_tokens`` tokens in at most ``rows`` rows are run that need the most (see
        ``workers.largest``), through two layers: what they hold at once, all of them hold, though on the CPU gaps in
        the heap may add some. Done once for a configuration on a machine (see ``workers.workspace``).
        """
        what = (self.weights_digest, self.layout, str(self._device), torch.get_num_threads(), torch.__version__)
        found = remembered((*what, step_tokens, rows, SCORED_AT_ONCE), lambda: self._measure(step_tokens, rows))
        self.workspace_bytes = found
        return found

    def _measure(self, step_tokens: int, rows: int) -> int:
        context = min(self.config.context_length, self.layout.blocks * BLOCK_SIZE)
        peaks = []
        for step in largest_steps(step_tokens, rows, self.layout.blocks, BLOCK_SIZE, context):
            touched = {block for row in step for block in row.blocks}
            self._pool.clear(sorted(touched))  # so that the pool's own pages are not counted again
            with self._peak() as peak:
                self.collect(self._launch(step, layers=2))
            peaks.append(peak.bytes)
        return max(peaks)

    @contextlib.contextmanager
    def _peak(self) -> Iterator[Peak]:
        if self._device.type == "cpu":
            with resident_peak() as peak:
                yield peak
            return
        peak, gpu = Peak(), self._device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(gpu)
        before = torch.cuda.memory_reserved(gpu)
        yield peak
        torch.cuda.synchronize(gpu)
        peak.bytes = torch.cuda.max_memory_reserved(gpu) - before

    def time_swaps(self) -> None:
        """How fast blocks move to the host and back: the best of a few moves, before anything is in the pool."""
        count = min(self.host_blocks, self.layout.blocks, TIMED_BLOCKS)
        if not count:
            return
        outs = [(int(Move.OUT), block, block) for block in range(count)]
        backs = [(int(Move.IN), block, block) for block in range(count)]
        best_s = float("inf")
        for _ in range(TIMED_MOVES):
            began = perf_counter()
            self._pool.move([*outs, *backs])
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            best_s = min(best_s, perf_counter() - began)
        self.swap_bytes_per_s = max(1, int(2 * count * self.layout.bytes_per_block / best_s))

    def warm_up(self) -> None:
        """Run a prefill and a decode step through block 0, so that no request pays for first calls."""
        sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, end_ids=())
        for start, count in ((0, BLOCK_SIZE - 1), (BLOCK_SIZE - 1, 1)):
            self.step([StepRow(0, [0] * count, start, [0], True, 0, sampling)])


def _slots(rows: Sequence[StepRow]) -> Iterator[int]:
    """The slot of each token of a step."""
    return (row.slot for row in rows for _ in row.tokens)


def _begun(part: Part) -> Sequence[int]:
    """The blocks whose first place this step writes."""
    return part.table[-(-part.start // BLOCK_SIZE) : -(-(part.start + part.count) // BLOCK_SIZE)]


def _keep_freed_memory() -> None:
    """Have the C library keep large freed blocks for the next layer instead of giving them back to the
    kernel.

    A step frees and takes the same megabytes in every layer; with glibc's defaults each time faults in fresh
    pages, which was 40 % of a step of 32 rows and 30 % of a prefill of 512 tokens. Process-wide, like torch's
    threads.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    libc = ctypes.CDLL(None)
    for parameter in (m_trim_threshold, m_mmap_threshold):
        assert libc.mallopt(parameter, (1 << 31) - 1) == 1, "glibc refused to keep freed memory"


def _attention_order(row: StepRow) -> tuple[int, int]:
    chunk = len(row.tokens) > 1
    return (1, 0) if chunk else (0, padded_blocks(row.start + 1, BLOCK_SIZE))
