"""The scripted runner: a model without tensors, for tests, simulation and capacity studies. It ships.

It keeps a cache as a real model does, in the blocks it is told to use, and a token is a pure function of the request's
seed and of everything the cache says came before. So a block given to two sequences, a lost token or a wrong position
changes what it says next. It never sleeps: ``cost_ns`` says how long a step would have taken.

Of a request's parameters it heeds ``seed``, what ends an answer (``stop_token_ids``, ``ignore_eos``, ``min_tokens``;
stop strings and ``max_tokens`` are not a worker's business) and ``top_logprobs``, with made-up numbers. It has no
logits, so what shapes them means nothing to it: temperature, top-k, top-p, min-p, penalties, bias, allowed ids, bad
words, and which of several choices it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.engine.batch import END_FLAG, INVALID_FLAG, UNKNOWN, Sampled, Sampling, StepRow
from baton.engine.blocks import Move
from baton.engine.scores import pack, pack_entry

_MASK = (1 << 64) - 1


def follow(state: int, token: int) -> int:
    """The state of a context that grows by one token; the empty context has state 0."""
    return (state * 6364136223846793005 + token + 1442695040888963407) & _MASK


def choose(state: int, sampling: Sampling, vocab: int, mean_tokens: int, position: int = 1 << 30) -> int:
    """The token after a context: once in ``mean_tokens`` tokens one of the end ids, else any id that is none.

    The end ids are the model's own, unless they are ignored, and those the client named. Below output position
    ``sampling.min_tokens`` it is none of them.
    """
    mixed = (state ^ (sampling.seed * 0x9E3779B97F4A7C15)) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    if sampling.end_ids and position >= sampling.min_tokens and mixed % mean_tokens == 0:
        return sampling.end_ids[(mixed >> 24) % len(sampling.end_ids)]
    token = (mixed >> 24) % vocab
    while token in sampling.end_ids:
        token = (token + 1) % vocab
    return token


def prompt_entry(state: int, token: int, top: int, vocab: int) -> tuple[int, list[tuple[int, float]]]:
    """What is told of a prompt's token after a context: its rank, its own pair, and those of the likeliest."""
    logprob = -1.0 - (state & 0xFF) / 256
    rivals = [((token + 1 + rank) % vocab, logprob + top - rank) for rank in range(min(top, vocab))]
    return 1 + (state >> 8) % vocab, [(token, logprob), *rivals]


class ScriptedRunner:
    """Runs steps over a cache of ``blocks`` blocks of ``block_tokens`` tokens.

    ``vocab`` is the number of token ids; with ``mean_tokens`` an answer has that many tokens on average if it is not
    bounded; ``step_ns`` and ``token_ns`` are the time model. ``faulty`` maps a request's seed to the output position
    at which its numbers are not finite. A row yields up to ``tokens_per_row_max`` tokens a step, as with speculation:
    how many is a function of its context and of the room in its blocks. An ``asynchronous`` one can be given a step
    before the one before it is collected, as a device that works by itself.
    """

    def __init__(
        self,
        vocab: int,
        blocks: int,
        block_tokens: int,
        mean_tokens: int = 256,
        step_ns: int = 0,
        token_ns: int = 0,
        faulty: Mapping[int, int] | None = None,
        tokens_per_row_max: int = 1,
        asynchronous: bool = False,
        host_blocks: int = 0,
    ) -> None:
        assert vocab > 1 and blocks > 0 and block_tokens > 0 and mean_tokens > 0 and tokens_per_row_max > 0
        self.vocab = vocab
        self.block_tokens = block_tokens
        self.mean_tokens = mean_tokens
        self.step_ns = step_ns
        self.token_ns = token_ns
        self.faulty = dict(faulty or {})
        self.asynchronous = asynchronous
        self.kernels = "scripted"
        self.tokens_per_row_max = tokens_per_row_max
        self._cache = [0] * (blocks * block_tokens)
        self._last: dict[int, int] = {}  # each slot's last sampled token, as a device keeps it
        self._host = [0] * (host_blocks * block_tokens)
        self.host_blocks = host_blocks
        self.swap_bytes_per_s = 0  # not measured
        self.weights_bytes = self.workspace_bytes = 0  # it has no weights, and computes in place

    def step(self, rows: Sequence[StepRow]) -> list[Sampled]:
        """Compute the rows; one ``Sampled`` for each row with ``sample``, in order."""
        sampled = []
        for row in rows:
            state = self._compute(row)
            if row.sample:
                sampled.append(self._burst(state, row))
                self._last[row.slot] = sampled[-1].token
        return sampled

    def launch(self, rows: Sequence[StepRow]) -> list[Sampled]:
        """Begin a step; what to ``collect``."""
        return self.step(rows)

    def collect(self, handle: list[Sampled]) -> list[Sampled]:
        """What a launched step sampled."""
        return handle

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy and swap blocks, as ``engine.blocks.Move`` says, in order."""
        size = self.block_tokens
        for kind, source, destination in moves:
            origin = self._host if kind == Move.IN else self._cache
            target = self._host if kind == Move.OUT else self._cache
            assert (source + 1) * size <= len(origin) and (destination + 1) * size <= len(target), "no such block"
            target[destination * size : (destination + 1) * size] = origin[source * size : (source + 1) * size]

    def cost_ns(self, rows: Sequence[StepRow]) -> int:
        """How long the step would take."""
        return self.step_ns + self.token_ns * sum(len(row.tokens) for row in rows)

    def _compute(self, row: StepRow) -> int:
        """Write the row's tokens into its blocks, after what the cache holds of those before."""
        state, entries = self._cache[self._place(row, row.start - 1)] if row.start else 0, []
        top = row.sampling.prompt_logprobs or 0
        for position, token in enumerate(row.tokens, row.start):
            state = follow(state, self._last[row.slot] if token == UNKNOWN else token)
            self._cache[self._place(row, position)] = state
            if position - row.start < len(row.targets):
                entries.append(pack_entry(*prompt_entry(state, row.targets[position - row.start], top, self.vocab)))
        row.prompt_scores = b"".join(entries)
        return state

    def _place(self, row: StepRow, position: int) -> int:
        return row.blocks[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    def _burst(self, state: int, row: StepRow) -> Sampled:
        """The next token and perhaps some after it; also past an end id, for whoever reads them to drop."""
        first = last = self._sample(state, row, row.position)
        if self.tokens_per_row_max == 1:
            return first
        more: list[Sampled] = []
        end = row.start + len(row.tokens)
        room = len(row.blocks) * self.block_tokens - end
        most = min((state >> 40) % self.tokens_per_row_max, room)
        while len(more) < most and not last.flags & INVALID_FLAG:
            state = follow(state, last.token)
            self._cache[self._place(row, end + len(more))] = state
            last = self._sample(state, row, row.position + len(more) + 1)
            more.append(last)
        first.more = tuple(more)
        return first

    def _sample(self, state: int, row: StepRow, position: int) -> Sampled:
        if self.faulty.get(row.sampling.seed) == position:
            return Sampled(0, 0.0, INVALID_FLAG)
        token = choose(state, row.sampling, self.vocab, self.mean_tokens, position)
        flags = END_FLAG if token in row.sampling.end_ids else 0
        logprob = -1.0 - (state & 0xFF) / 256
        count = min(row.sampling.top_logprobs, self.vocab)
        tops = pack(((token + rank) % self.vocab, logprob - rank) for rank in range(count)) if count else b""
        return Sampled(token, logprob, flags, tops)
