"""``baton chat``: a conversation in the terminal, or one prompt from a pipe.

Answers come over HTTP or through the SDK; both are an iterator of text pieces here, and closing it cancels the answer
at the server. The conversation lives in this process only and is sent whole each time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import click
import msgspec

from baton import AsyncClient
from baton.frontends.client import BatonError
from baton.ops.completions import DONE, Chunk, Lines, first_model
from baton.ops.http import Exchange, Target, target

Message = dict[str, str]
Answer = Callable[[list[Message]], AsyncGenerator[str, None]]

FIND_MODEL_S_MAX = 10.0
INTERRUPTED_STATUS = 130


class AnswerFailed(Exception):
    """The server gave no answer or broke it off; one line that says why."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for."""

    url: str | None = None
    zmq: str | None = None
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None

    def options(self) -> dict[str, str | int | float]:
        """What is sent with each request, as far as it was given."""
        given = {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        return {name: value for name, value in given.items() if value is not None}


def run(asked: Asked) -> int:
    """Chat until the end of input; the exit status."""
    if asked.url is not None and asked.zmq is not None:
        raise ValueError("--url and --zmq exclude each other")
    answer = over_http(target(asked.url), asked) if asked.url is not None else over_sdk(asked.zmq, asked)
    messages = [{"role": "system", "content": asked.system}] if asked.system is not None else []
    with asyncio.Runner() as runner:
        if not sys.stdin.isatty():
            return once(runner, answer, messages)
        return converse(runner, answer, messages)


def once(runner: asyncio.Runner, answer: Answer, messages: list[Message]) -> int:
    """One prompt from standard input, its answer to standard output."""
    prompt = sys.stdin.read().strip()
    if not prompt:
        raise ValueError("there is no prompt on standard input")
    try:
        runner.run(speak(answer, [*messages, {"role": "user", "content": prompt}], []))
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    return 0


def converse(runner: asyncio.Runner, answer: Answer, messages: list[Message]) -> int:
    """Prompt and answer in turns. An interrupted answer stays in the conversation as far as it came."""
    click.secho("Ctrl-C cancels an answer, Ctrl-D ends.", dim=True, err=True)
    while True:
        try:
            prompt = input("> ").strip()
        except EOFError:
            click.echo()
            return 0
        except KeyboardInterrupt:
            click.echo()
            continue
        if not prompt:
            continue
        said: list[str] = []
        question = {"role": "user", "content": prompt}
        try:
            runner.run(speak(answer, [*messages, question], said))
        except KeyboardInterrupt:
            click.secho(" (cancelled)", dim=True, err=True)
        except (AnswerFailed, BatonError, OSError) as error:
            click.secho(f"baton: {error}", fg="red", err=True)
        if said:
            messages += [question, {"role": "assistant", "content": "".join(said)}]


async def speak(answer: Answer, messages: list[Message], said: list[str]) -> None:
    """Print an answer as it comes, and keep it in ``said`` piece by piece."""
    async with aclosing(answer(messages)) as pieces:
        async for piece in pieces:
            said.append(piece)
            click.echo(piece, nl=False)
    click.echo()


def over_http(where: Target, asked: Asked) -> Answer:
    """Answers from an OpenAI-compatible server."""
    options = asked.options()

    async def answer(messages: list[Message]) -> AsyncGenerator[str, None]:
        if "model" not in options:
            options["model"] = await first_model(where, FIND_MODEL_S_MAX)
        body = msgspec.json.encode({**options, "messages": messages, "stream": True})
        pieces: asyncio.Queue[bytes] = asyncio.Queue()
        _, exchange = await asyncio.get_running_loop().create_connection(
            lambda: Exchange(where.request("POST", "/v1/chat/completions", body), pieces.put_nowait),
            where.host,
            where.port,
            ssl=where.tls or None,
        )
        exchange.done.add_done_callback(lambda _: pieces.put_nowait(b""))
        lines, finished, refusal = Lines(), False, b""
        try:
            # Read on after the last token, to the end of the body: hanging up before would look like a cancel.
            while piece := await pieces.get():
                if exchange.status != 200:
                    refusal += piece
                    continue
                for data in lines.feed(piece):
                    text, ended = read_chunk(data)
                    finished = finished or ended
                    if text:
                        yield text
        finally:
            exchange.close()
        if refusal or exchange.status != 200:
            raise AnswerFailed(f"status {exchange.status or 'none'}: {refusal.decode(errors='replace').strip()}")
        if not finished:
            raise AnswerFailed("the answer was broken off")

    return answer


def read_chunk(data: bytes) -> tuple[str, bool]:
    """The text in an event, and whether it ends the answer; ``AnswerFailed`` for an error event or no JSON."""
    if data == DONE:
        return "", False
    try:
        chunk = msgspec.json.decode(data, type=Chunk)
    except msgspec.DecodeError:
        raise AnswerFailed("the server sent something unreadable") from None
    if (failure := chunk.failure()) is not None:
        raise AnswerFailed(failure.decode(errors="replace"))
    text = "".join(choice.delta.content or "" for choice in chunk.choices if choice.delta is not None)
    return text, any(choice.finish_reason is not None for choice in chunk.choices)


def over_sdk(address: str | None, asked: Asked) -> Answer:
    """Answers through the SDK, from the newest server on this machine if there is no address.

    A client lives as long as one answer, because between two answers no loop runs.
    """
    options: dict[str, Any] = asked.options()  # the SDK takes any JSON value under any name

    async def answer(messages: list[Message]) -> AsyncGenerator[str, None]:
        async with AsyncClient(address) as client, client.stream(messages=messages, **options) as stream:
            async for delta in stream:
                yield delta.text

    return answer
