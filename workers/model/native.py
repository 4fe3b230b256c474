"""The Llama family in one C++ call a step: what goes into the call, the memory it works in, what comes out.

It computes rows it is given and chooses tokens in the common case; it knows no request and no file. Rows are
independent: a row's tokens do not depend on the rows beside it, in bfloat16 as in float32.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_char, c_double
from dataclasses import dataclass
from struct import Struct

import torch
from torch import Tensor

from baton.engine.batch import StepRow
from baton.kernels.native import BLOCK_TOKENS, PANEL, PHASES, Choice, Draw, Layer, Matrix, Model, Step, Team
from baton.workers.model.huge import huge_bytes
from baton.workers.model.packed import PackedMatrix, PackedWeights
from baton.workers.model.rope import frequencies

#: ``BatonDraw``: number, temperature, top-p, min-p, top-k; and ``BatonChoice``
DRAW, CHOICE = Struct("@dfffi"), Struct("@iffi")
assert (DRAW.size, CHOICE.size) == (ctypes.sizeof(Draw), ctypes.sizeof(Choice))


@dataclass(frozen=True, slots=True)
class Outcome:
    """``choices`` of the wanted rows are (token, log-probability, log-normaliser, whether all is finite).

    ``logits`` are float32 ``[wanted or more, vocab or more]``, good till the next call.
    """

    choices: list[tuple[int, float, float, int]]
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
        vocab: int,
    ) -> None:
        """Ids from ``vocab`` on are never chosen.

        ``keys`` and ``values`` are each layer's pool, ``block_size * kv_heads * head_dim`` bfloat16 a block."""
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
        self._room = (0, 0)  # for a step of so many tokens, of which so many are wanted
        self._logits = torch.empty(0, -(-config.vocab // PANEL) * PANEL)
        self._blocks = len(keys[0])
        self._step = Step(vocab=vocab)
        self._seconds = (c_double * len(PHASES))()
        self._step.seconds = ctypes.addressof(self._seconds)

    def step(self, rows: Sequence[StepRow], draws: bytearray, layers: int | None = None) -> Outcome:
        """Compute ``rows``; a token is chosen after each that samples, by its own of ``draws`` (see ``DRAW``), or
        greedily where those are empty. ``layers`` are how many are computed, by default all.

        This is between two steps, when nothing that Python touches is in the caches: it makes few objects.
        """
        ids, parts, blocks, wanted = list[int](), list[int](), list[int](), list[int]()
        for row in rows:
            count, table = len(row.tokens), row.blocks
            # The kernels look at none of this again: what is wrong here would be read and written anywhere.
            assert count > 0 and row.start + count <= len(table) * BLOCK_TOKENS, "tokens without a block"
            parts += (len(ids), count, row.start, len(blocks))
            ids += row.tokens
            blocks += table
            if row.sample:
                wanted.append(len(ids) - 1)
        assert min(ids) >= 0 and max(ids) < self.config.vocab, "token ids outside the vocabulary"
        assert min(blocks) >= 0 and max(blocks) < self._blocks, "blocks outside the pool"
        step, tokens = self._step, len(ids)
        ids += parts
        ids += blocks
        numbers = array("i", ids)
        address, size = numbers.buffer_info()[0], numbers.itemsize
        step.tokens, step.parts = tokens, len(rows)
        step.layers = self.config.layers if layers is None else min(layers, self.config.layers)
        step.ids, step.part, step.blocks = address, address + size * tokens, address + size * (tokens + len(parts))
        return self._call(self._library.baton_step, wanted, draws, keep=False)

    def phases_s(self) -> dict[str, float]:
        """Seconds by part of a step, summed over all steps since this was asked last."""
        seconds = dict(zip(PHASES, self._seconds, strict=True))
        ctypes.memset(self._seconds, 0, ctypes.sizeof(self._seconds))
        return seconds

    def more_logits(self, rows: Sequence[int]) -> Outcome:
        """Logits after further tokens of the last step, by their index in it; the likeliest is chosen."""
        self._step.parts = 0  # what describes them is gone
        return self._call(self._library.baton_head, rows, bytearray(), keep=True)

    def _call(self, function: ctypes._NamedFuncPointer, wanted: Sequence[int], draws: bytearray, keep: bool) -> Outcome:
        step, count = self._step, len(wanted)
        assert self._team.handle is not None
        assert not draws or len(draws) == count * DRAW.size
        if step.tokens > self._room[0] or count > self._room[1]:
            self._make_room(step.tokens, count, keep)
        rows, chosen = array("i", wanted), bytearray(count * CHOICE.size)
        draws = draws or bytearray(count * DRAW.size)
        step.wanted, step.rows = count, rows.buffer_info()[0]
        step.draw, step.choice = _address(draws), _address(chosen)
        function(self._team.handle, ctypes.byref(self._model), ctypes.byref(step))
        return Outcome(list(CHOICE.iter_unpack(chosen)), self._logits)

    def _make_room(self, tokens: int, wanted: int, keep: bool) -> None:
        """Memory for a step; one that wants more than any before has it made anew. ``keep`` what the last one left."""
        tokens, wanted = max(tokens, self._room[0]), max(wanted, self._room[1])
        need = self._library.baton_workspace_bytes(ctypes.byref(self._model), tokens, wanted, self._team.threads)
        kept, self._workspace = self._workspace if keep else None, huge_bytes(0)  # so that it is let go first
        self._workspace = huge_bytes(need)
        if kept is not None:
            self._workspace[: len(kept)] = kept
        width = self._logits.shape[1]
        if wanted > len(self._logits):
            self._logits = torch.empty(0, width)
            self._logits = huge_bytes(wanted * width * 4).view(torch.float32).view(wanted, width)
        self._room = tokens, wanted
        self._step.workspace, self._step.logits = self._workspace.data_ptr(), self._logits.data_ptr()


def _address(data: bytearray) -> int | None:
    return ctypes.addressof(c_char.from_buffer(data)) if data else None
