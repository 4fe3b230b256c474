"""A model and its KV pool behind one call: ``step`` computes rows of tokens and samples where asked.

The worker process drives it; it knows no request and no queue, and between two steps it keeps nothing but the pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from baton.engine.batch import Sampled, Sampling, StepRow
from baton.engine.blocks import Move
from baton.workers.cache import BLOCK_SIZE, KvPool, blocks_for_bytes
from baton.workers.largest import largest_steps
from baton.workers.model.loaded import DTYPES, Kernels, load_for
from baton.workers.peak import Peak, resident_peak
from baton.workers.workspace import remembered

KV_BYTES_DEFAULT = 1 << 30
TIMED_BLOCKS, TIMED_MOVES = 32, 4


def has_device(device: str) -> bool:
    """Whether torch can compute on such a device here."""
    return device == "cpu" or torch.cuda.is_available()


class Runner:
    """One device's model. ``layout``, ``config``, ``kernels`` and ``weights_digest`` describe it and do not change.

    Steps and moves take effect in the order in which they are asked for. A device that works by itself is
    ``asynchronous``: a step may be launched before the ones before it were collected.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: str = "bfloat16",
        weights: str = "bfloat16",
        kernels: Kernels = "auto",
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
        ``dtype`` is that of computation, ``weights`` how weights are held (``bfloat16``, ``float32``, ``int8`` or
        ``native``), ``kernels`` who computes; ids from ``vocab`` on are padding and never sampled; ``threads`` are by
        default one a core this process may use. Raises ``ModelFileError``, ``KernelsUnavailable`` and
        ``MemoryBudgetError``.
        """
        assert blocks is None or kv_bytes is None, "blocks and kv_bytes say the same thing twice"
        _keep_freed_memory()
        threads = threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        self.tokens_per_row_max = 1
        self._device = torch.device(device)
        loaded = load_for(
            model_path, dtype=dtype, weights=weights, kernels=kernels, device=self._device, threads=threads
        )
        self.config = loaded.config
        self.weights_digest = loaded.digest
        self.weights_bytes = loaded.weights_bytes
        self.kernels = loaded.kernels
        if blocks is None:
            blocks = blocks_for_bytes(self.config, DTYPES[dtype], KV_BYTES_DEFAULT if kv_bytes is None else kv_bytes)
        host_blocks = blocks_for_bytes(self.config, DTYPES[dtype], swap_bytes)
        self._pool = KvPool(
            self.config, DTYPES[dtype], blocks, self._device, host_blocks=host_blocks, verify=verify_swaps
        )
        self.layout = self._pool.layout
        self.host_blocks = host_blocks
        self.swap_bytes_per_s = 0  # once timed
        self._steps = loaded.steps(self._pool, self.config.vocab if vocab is None else vocab)
        self.asynchronous = self._steps.asynchronous
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

    def launch(self, rows: Sequence[StepRow]) -> Any:
        """Begin such a step; what to ``collect``, in the order of launching.

        A token that is ``UNKNOWN`` is the one that the last launched step samples for the row's slot.
        """
        return self._steps.launch(rows)

    def collect(self, launched: Any) -> list[Sampled]:
        """Wait for a step; what it sampled."""
        return self._steps.collect(launched)

    def phases_s(self) -> dict[str, float]:
        """Seconds by part of a step, summed since this was asked last; nothing where the kernels do not tell."""
        return self._steps.phases_s()

    def measure(self, step_tokens: int, rows: int) -> int:
        """The most memory beyond weights and pool that a step takes, in bytes; before anything is in the pool.

        Steps of ``step_tokens`` tokens in at most ``rows`` rows are run that need the most (see
        ``workers.largest``), through two layers: what they hold at once, all of them hold, though on the CPU gaps in
        the heap may add some. Done once for a configuration on a machine (see ``workers.workspace``).
        """
        what = (self.weights_digest, self.layout, self.kernels, torch.get_num_threads(), torch.__version__)
        found = remembered((*what, step_tokens, rows), lambda: self._measure(step_tokens, rows))
        self.workspace_bytes = found
        return found

    def _measure(self, step_tokens: int, rows: int) -> int:
        context = min(self.config.context_length, self.layout.blocks * BLOCK_SIZE)
        peaks = []
        for step in largest_steps(step_tokens, rows, self.layout.blocks, BLOCK_SIZE, context):
            touched = {block for row in step for block in row.blocks}
            self._pool.clear(sorted(touched))  # so that the pool's own pages are not counted again
            with self._peak() as peak:
                self.collect(self._steps.launch(step, layers=2))
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
