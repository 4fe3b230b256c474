"""When a sequence ends, told the same way to everyone who reads the token ring.

The scheduler and the detokenizer both read every record; both call ``counts`` and ``ending``, so that they cannot
disagree about which tokens exist. Stop strings are the detokenizer's alone to find (it has the text); it reports them.
"""

from __future__ import annotations

from baton.engine.batch import END_FLAG, INVALID_FLAG, NOTHING_FLAG
from baton.engine.effects import TokenRecord
from baton.ipc.frames import Failure, Params


def counts(record: TokenRecord, generation: int, run: int, length: int) -> bool:
    """Whether a record is the next token of (generation, run) with ``length`` output tokens so far."""
    return record.position == length and record.run == run and record.generation == generation


def ending(flags: int, length: int, max_tokens: int | None) -> str | None:
    """What a counted record ends: "error" (the token is no token), "stop" (an end id), "length", or None."""
    if flags & INVALID_FLAG:
        return "error"
    if flags & END_FLAG:
        return "stop"
    return "length" if max_tokens is not None and length >= max_tokens else None


def stop_token(token: int, params: Params, model_end_ids: tuple[int, ...]) -> int | None:
    """The stop reason of a sequence that ended by ``token``: the id if the client named it, None for the model's own.

    An end of sequence is the model's own also where the client names it, unless ``ignore_eos`` took it from the model.
    """
    if token not in params.stop_token_ids or (token in model_end_ids and not params.ignore_eos):
        return None
    return token


def no_token(flags: int) -> Failure:
    """Why a record with INVALID_FLAG has no token."""
    if flags & NOTHING_FLAG:
        message = "the request's parameters leave no token to choose from"
        return Failure(400, "invalid_request_error", message, None, "no_token_left")
    message = "the model produced numbers that are not finite for this request"
    return Failure(500, "server_error", message, None, "invalid_logits")


class StopScanner:
    """Finds the first of several stop strings in text that comes in pieces.

    Text is held back only while its tail is a prefix of a stop string. Invariant: what was released never contains
    the beginning of a stop string that is found later. With ``include`` the stop string found is released too.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self.stops = stops
        self.include = include
        self.held = ""
        self.hit: str | None = None

    def feed(self, text: str, heed: bool = True) -> str:
        """Take text, release what can no longer be part of a stop string; sets ``hit`` when one is complete.

        A stop string that is complete with text that is not to be heeded is none; its beginning may lie there.
        """
        if not self.stops:
            return text
        assert self.hit is None
        buffer = self.held + text
        found = [(at, stop) for stop in self.stops if heed and (at := self._find(buffer, stop)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda match: match[0])
            self.held = ""
            return buffer[: at + len(self.hit)] if self.include else buffer[:at]
        keep = max((_overlap(buffer, stop) for stop in self.stops), default=0)
        self.held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def _find(self, buffer: str, stop: str) -> int:
        """Where a stop string begins that ends in the new text; what ends in the held text was not to be heeded."""
        return buffer.find(stop, max(0, len(self.held) - len(stop) + 1))


def _overlap(text: str, stop: str) -> int:
    """The length of the longest tail of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
