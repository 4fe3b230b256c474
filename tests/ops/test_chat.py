"""Chatting: a pipe gets one answer, a terminal a conversation, and Ctrl-C ends an answer only."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from collections.abc import AsyncGenerator, Iterator

import pytest
from click.testing import CliRunner

from baton.ops import chat
from baton.ops.chat import AnswerFailed, Asked, Message, over_http
from baton.ops.cli import cli
from baton.ops.http import target
from tests.ops import misbehaving as server
from tests.ops.misbehaving import How


def asking(how: How) -> list[Message]:
    return [{"role": "user", "content": how.name}]


async def answered(url: str, how: How) -> str:
    return "".join([piece async for piece in over_http(target(url), Asked())(asking(how))])


async def test_an_answer_is_its_pieces_and_the_model_is_found_out() -> None:
    async with server.misbehaving_server() as (url, seen):
        assert await answered(url, How.GOOD) == "a" * server.TOKENS
    assert json.loads(seen[0]) == {"model": "tiny", "messages": asking(How.GOOD), "stream": True}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (How.EARLY_END, "broken off"),
        (How.CUT, "broken off"),
        (How.ERROR_EVENT, "the engine died"),
        (How.MALFORMED, "unreadable"),
        (How.TOO_MANY, "status 429.*not now"),
        (How.CLOSED, "status none"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(how: How, words: str) -> None:
    async with server.misbehaving_server() as (url, _):
        with pytest.raises(AnswerFailed, match=words):
            await answered(url, how)


@pytest.fixture
def url() -> Iterator[str]:
    with server.server_beside() as (address, _):
        yield address


def test_a_pipe_gets_one_answer(url: str) -> None:
    result = CliRunner().invoke(cli, ["chat", "--url", url], input="GOOD\n")
    assert (result.exit_code, result.stdout) == (0, "a" * server.TOKENS + "\n")


def test_a_pipe_whose_answer_fails_gets_a_line_and_a_status(url: str) -> None:
    result = CliRunner().invoke(cli, ["chat", "--url", url], input="BROKEN\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("baton: status 500") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "9"),
        (["--url", "http://h", "--zmq", "tcp://h:1"], "exclude each other"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(cli, ["chat", *arguments], input="GOOD")
    assert result.exit_code == 1
    assert words in result.stderr and result.stderr.count("\n") == 1
    assert CliRunner().invoke(cli, ["chat", "--url", "http://127.0.0.1:9"], input=" \n").exit_code == 1


class Terminal(io.StringIO):
    """Standard input as a terminal."""

    def isatty(self) -> bool:
        return True


def talk(monkeypatch: pytest.MonkeyPatch, answer: chat.Answer, lines: list[str | type[BaseException]]) -> int:
    """A conversation whose person types ``lines``, or an interrupt, or the end of input."""
    typed = iter(lines)

    def read(_: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    with asyncio.Runner() as runner:
        return chat.converse(runner, answer, [])


def test_a_conversation_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[Message]] = []

    async def answer(messages: list[Message]) -> AsyncGenerator[str, None]:
        sent.append(messages)
        yield "yes"
        yield "!"

    assert talk(monkeypatch, answer, ["one", "", KeyboardInterrupt, "two", EOFError]) == 0
    assert [len(messages) for messages in sent] == [1, 3]
    assert sent[1][1] == {"role": "assistant", "content": "yes!"}


def test_ctrl_c_cancels_the_answer_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[str] = []
    sent: list[list[Message]] = []

    async def answer(messages: list[Message]) -> AsyncGenerator[str, None]:
        sent.append(messages)
        yield "so far"
        if len(sent) > 1:
            return
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("yes")
            raise

    assert talk(monkeypatch, answer, ["one", "two", EOFError]) == 0
    assert cancelled == ["yes"]
    assert sent[1][:2] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "so far"}]


def test_a_failed_answer_is_told_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[list[Message]] = []

    async def answer(messages: list[Message]) -> AsyncGenerator[str, None]:
        sent.append(messages)
        if len(sent) == 1:
            raise AnswerFailed("no")
        yield "yes"

    assert talk(monkeypatch, answer, ["one", "two", EOFError]) == 0
    assert "baton: no" in capsys.readouterr().err
    assert sent[1] == [{"role": "user", "content": "two"}]


def test_a_terminal_gets_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(chat, "converse", lambda runner, answer, messages: len(messages) + 40)
    assert chat.run(Asked(system="Be brief.")) == 41
