"""The Llama family in one C++ call a step: what goes into the call, the memory it works in, what comes out.

It computes rows it is given and chooses tokens in the common case; it knows no request and no file. Rows are
independent: a row's tokens do not depend on the rows beside it, in bfloat16 as in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from baton.engine.batch import StepRow
from baton.kernels.native import BLOCK_TOKENS, PANEL, PHASES, Choice, Draw, Layer, Matrix, Model, Step, Team
from baton.workers.model.huge import huge_bytes
from baton.workers.model.packed import PackedMatrix, PackedWeights
from baton.workers.model.rope import frequencies

DRAW = np.dtype([("number", "f8"), ("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4")])
CHOICE = np.dtype([("token", "i4"), ("logprob", "f4"), ("log_normaliser", "f4"), ("finite", "i4")])
assert DRAW.itemsize == ctypes.sizeof(Draw)
assert CHOICE.itemsize == ctypes.sizeof(Choice)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``choices`` is ``[wanted]`` of dtype ``CHOICE``; ``logits``, float32 ``[wanted, vocab]``, till the next call."""

    choices: np.ndarray
    logits: Tensor


class NativeLlama:
    """Invariant: between two calls nothing is kept but weights, pool and the memory to work in, which only grows."""

    def __init__(
        self,
        weights: PackedWeights,
        library: ctypes.CDLL,
        team: Team,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        """``keys`` and ``values`` are each layer's pool, ``block_size * kv_heads * head_dim`` bfloat16 a block."""
        self.config = config = weights.config
        self._library, self._team = library, team
        factors = weights.vectors.get("rope_factors")
        self._frequencies, scale = frequencies(config, factors)
        self._kept = (weights, self._frequencies, keys, values)  # whatever the structs point at
        vector = {name: tensor.data_ptr() for name, tensor in weights.vectors.items()}

        def matrix(name: str, out: int, inputs: int) -> Matrix:
            held: PackedMatrix = weights.matrices[name]
            assert held.panels.data_ptr() % 64 == 0, name
            return Matrix(held.kind, out, inputs, 0, held.panels.data_ptr())

        attended = config.heads * config.head_dim
        fused = attended + 2 * config.kv_heads * config.head_dim
        self._layers = (Layer * config.layers)(
            *(
                Layer(
                    vector[f"{i}.attn_norm"],
                    vector[f"{i}.ffn_norm"],
                    matrix(f"{i}.qkv", fused, config.hidden),
                    matrix(f"{i}.out", config.hidden, attended),
                    matrix(f"{i}.gate_up", 2 * config.intermediate, config.hidden),
                    matrix(f"{i}.down", config.hidden, config.intermediate),
                    keys[i].data_ptr(),
                    values[i].data_ptr(),
                )
                for i in range(config.layers)
            )
        )
        self._model = Model(
            *(config.layers, config.hidden, config.intermediate, config.heads, config.kv_heads),
            *(config.head_dim, config.vocab, 0, config.rms_eps, scale),
            weights.embedding.data_ptr(),
            self._frequencies.data_ptr(),
            vector["norm"],
            matrix("head", config.vocab, config.hidden),
            self._layers,
        )
        self._workspace = huge_bytes(0)
        self._logits = torch.empty(0, -(-config.vocab // PANEL) * PANEL)
        self._blocks = len(keys[0])
        self._last: Step | None = None
        self._seconds = np.zeros(len(PHASES))

    def step(self, rows: Sequence[StepRow], draws: np.ndarray, vocab: int, layers: int | None = None) -> Outcome:
        """Compute ``rows``; a token is chosen after each that samples, by its own of ``draws`` (of dtype ``DRAW``).

        Ids from ``vocab`` on are never chosen. ``layers`` are how many are computed, by default all.
        """
        counts = np.fromiter((len(row.tokens) for row in rows), np.int32, len(rows))
        ends = counts.cumsum(dtype=np.int32)
        starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
        tables = np.fromiter((len(row.blocks) for row in rows), np.int32, len(rows))
        ids = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int32, int(ends[-1]))
        blocks = np.fromiter(chain.from_iterable(row.blocks for row in rows), np.int32, int(tables.sum()))
        part = np.stack((ends - counts, counts, starts, tables.cumsum(dtype=np.int32) - tables), 1)
        wanted = ends[np.fromiter((row.sample for row in rows), bool, len(rows))] - 1
        # The kernels look at none of this again: what is wrong here would be read and written anywhere.
        assert counts.min() > 0 and (starts + counts <= tables * BLOCK_TOKENS).all(), "tokens without a block"
        assert ids.min() >= 0 and ids.max() < self.config.vocab, "token ids outside the vocabulary"
        assert blocks.min() >= 0 and blocks.max() < self._blocks, "blocks outside the pool"
        step = Step(
            tokens=len(ids),
            parts=len(rows),
            layers=self.config.layers if layers is None else min(layers, self.config.layers),
            vocab=vocab,
            ids=ids.ctypes.data,
            part=part.ctypes.data,
            blocks=blocks.ctypes.data,
        )
        return self._call(self._library.baton_step, step, wanted, draws)

    def phases_s(self) -> dict[str, float]:
        """Seconds by part of a step, summed over all steps since this was asked last."""
        seconds = dict(zip(PHASES, self._seconds.tolist(), strict=True))
        self._seconds[:] = 0
        return seconds

    def more_logits(self, rows: np.ndarray) -> Outcome:
        """Logits after further tokens of the last step, by their index in it; the likeliest is chosen."""
        assert self._last is not None
        draws = np.zeros(len(rows), DRAW)
        again = Step(tokens=self._last.tokens, vocab=self._last.vocab)  # whose parts and ids are no longer needed
        return self._call(self._library.baton_head, again, rows, draws)

    def _call(self, function: ctypes._NamedFuncPointer, step: Step, wanted: np.ndarray, draws: np.ndarray) -> Outcome:
        assert len(draws) == len(wanted) and self._team.handle is not None
        wanted = np.ascontiguousarray(wanted, np.int32)
        choices = np.empty(len(wanted), CHOICE)
        self._make_room(step.tokens, len(wanted), keep=step.parts == 0)
        step.wanted, step.rows, step.draw = len(wanted), wanted.ctypes.data, draws.ctypes.data
        step.logits, step.choice = self._logits.data_ptr(), choices.ctypes.data
        step.workspace, step.seconds = self._workspace.data_ptr(), self._seconds.ctypes.data
        function(self._team.handle, ctypes.byref(self._model), ctypes.byref(step))
        self._last = step
        return Outcome(choices, self._logits[: len(wanted), : step.vocab])

    def _make_room(self, tokens: int, wanted: int, keep: bool) -> None:
        """Memory for a step; one that wants more than any before has it made anew. ``keep`` what the last one left."""
        need = self._library.baton_workspace_bytes(ctypes.byref(self._model), tokens, wanted, self._team.threads)
        if need > len(self._workspace):
            kept, self._workspace = self._workspace if keep else None, huge_bytes(0)  # so that it is let go first
            self._workspace = huge_bytes(need)
            if kept is not None:
                self._workspace[: len(kept)] = kept
        if wanted > len(self._logits):
            width = self._logits.shape[1]
            self._logits = torch.empty(0, width)
            self._logits = huge_bytes(wanted * width * 4).view(torch.float32).view(wanted, width)
