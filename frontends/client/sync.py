"""The same client without asyncio: it runs an ``AsyncClient`` on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from baton.frontends.client.aio import AsyncClient, Messages
from baton.frontends.client.errors import BatonError
from baton.frontends.client.stream import AsyncStream, Choice, Completion, Delta, Usage
from baton.frontends.client.wire import PromptScored, Scored

T = TypeVar("T")


class Client:
    """Blocking calls, from any thread. See ``AsyncClient`` for the parameters; close it, or use it in a ``with``."""

    def __init__(
        self, address: str | None = None, *, curve_keys: str | Path | None = None, connect_timeout_s: float = 5.0
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-client", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._client = AsyncClient(address, curve_keys=curve_keys, connect_timeout_s=connect_timeout_s)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Client:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> str:
        """Make sure there is a connection; returns the name of the model served. Raises ``NotConnected``."""
        return self._run(self._client.connect())

    def close(self) -> None:
        """Close the connection and end the thread; open requests are cancelled."""
        if not self._closed:
            self._run(self._client.close())
            self._stop()

    def stream(
        self,
        *,
        messages: Messages | None = None,
        prompt: str | list[int] | None = None,
        traceparent: str | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        resumable: bool = False,
        **parameters: Any,  # JSON values, validated by the server
    ) -> Stream:
        """An answer to iterate over, in a ``with`` block."""
        stream = self._client.stream(
            messages=messages,
            prompt=prompt,
            traceparent=traceparent,
            timeout_s=timeout_s,
            idempotency_key=idempotency_key,
            resumable=resumable,
            **parameters,
        )
        return Stream(self, stream)

    def chat(
        self,
        messages: Messages,
        *,
        traceparent: str | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        resumable: bool = False,
        **parameters: Any,  # JSON values, validated by the server
    ) -> Completion:
        """The whole answer to a chat."""
        answer = self._client.chat(
            messages,
            traceparent=traceparent,
            timeout_s=timeout_s,
            idempotency_key=idempotency_key,
            resumable=resumable,
            **parameters,
        )
        return self._run(answer)

    def complete(
        self,
        prompt: str | list[int],
        *,
        traceparent: str | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        resumable: bool = False,
        **parameters: Any,  # JSON values, validated by the server
    ) -> Completion:
        """The whole continuation of a text or of token ids."""
        answer = self._client.complete(
            prompt,
            traceparent=traceparent,
            timeout_s=timeout_s,
            idempotency_key=idempotency_key,
            resumable=resumable,
            **parameters,
        )
        return self._run(answer)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise BatonError("the client was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class Stream:
    """An answer in the making; the blocking side of ``AsyncStream``."""

    def __init__(self, client: Client, stream: AsyncStream) -> None:
        self._client = client
        self._stream = stream

    def __enter__(self) -> Stream:
        self._client._run(self._stream.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """No more is wanted; cancels the request where it has not ended."""
        self._client._run(self._stream.aclose())

    def __del__(self) -> None:
        """A loop that was left without a ``with`` block still ends its request, once nobody can read on."""
        if not self._client._closed:
            self._client._loop.call_soon_threadsafe(self._stream.abandon)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        try:
            return self._client._run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def result(self) -> Completion:
        """Read to the end; the whole answer."""
        return self._client._run(self._stream.result())

    @property
    def request_id(self) -> str:
        """The server's name for the request."""
        return self._stream.request_id

    @property
    def text(self) -> str:
        """All text so far."""
        return self._stream.text

    @property
    def token_ids(self) -> list[int]:
        """All token ids so far."""
        return self._stream.token_ids

    @property
    def logprobs(self) -> list[float]:
        """One log-probability a token so far, where they were asked for."""
        return self._stream.logprobs

    @property
    def scores(self) -> list[Scored]:
        """With each log-probability the token's bytes and the likeliest tokens in its place."""
        return self._stream.scores

    @property
    def prompt_scores(self) -> list[PromptScored]:
        """With ``prompt_logprobs``, what is told of each of the prompt's tokens but the first; there with the end."""
        return self._stream.prompt_scores

    @property
    def choices(self) -> list[Choice]:
        """All choices, as far as they have come."""
        return self._stream.choices

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None while it has not."""
        return self._stream.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or end token that ended it, if one did."""
        return self._stream.stop_reason

    @property
    def usage(self) -> Usage | None:
        """The tokens counted; None before the end."""
        return self._stream.usage

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's ids, with ``return_token_ids``."""
        return self._stream.prompt_token_ids
