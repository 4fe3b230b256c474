"""The official openai package against the HTTP door, with nothing but a base URL."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from baton.ipc.frames import Failure
from tests.frontends.conftest import House
from tests.frontends.double import Job, admit_and_say, play

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def client(house: House) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none", max_retries=0)


async def test_chats(house: House) -> None:
    house.engine.on_submit = play("Hel", "lo")
    async with client(house) as api:
        done = await api.chat.completions.create(model="model-1", messages=MESSAGES, logprobs=True)
        assert done.choices[0].message.content == "Hello" and done.choices[0].finish_reason == "stop"
        assert done.usage is not None and done.usage.total_tokens == 5
        logprobs = done.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None and logprobs.content[0].token == "Hel"
        stream = await api.chat.completions.create(
            model="model-1", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
        assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2
        assert chunks[0].choices[0].delta.role == "assistant"


async def test_completions_and_models(house: House) -> None:
    house.engine.on_submit = play("a", "b")
    async with client(house) as api:
        done = await api.completions.create(model="model-1", prompt="x", logprobs=0)
        assert done.choices[0].text == "ab" and done.choices[0].logprobs is not None
        assert done.choices[0].logprobs.tokens == ["a", "b"]
        stream = await api.completions.create(model="model-1", prompt=[1, 2], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "ab"
        assert [model.id async for model in await api.models.list()] == ["model-1"]
        assert (await api.models.retrieve("model-1")).id == "model-1"


async def test_errors_become_its_exceptions(house: House) -> None:
    async with client(house) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model="model-1", messages=MESSAGES, temperature=9)
        assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        free, house.engine.core.free = house.engine.core.free, []
        with pytest.raises(openai.RateLimitError):
            await api.chat.completions.create(model="model-1", messages=MESSAGES)
        house.engine.core.free = free
        house.engine.on_submit = lambda job: job.refuse(Failure(500, "server_error", "it broke"))
        with pytest.raises(openai.InternalServerError):
            await api.chat.completions.create(model="model-1", messages=MESSAGES)

        def half(job: Job) -> None:
            job.admit().say("half").finish("error", failure=Failure(500, "server_error", "it broke"))

        house.engine.on_submit = half
        stream = await api.chat.completions.create(model="model-1", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="it broke"):
            [chunk async for chunk in stream]
        await stream.close()


async def test_closing_a_stream_cancels(house: House) -> None:
    house.engine.on_submit = admit_and_say
    async with client(house) as api:
        stream = await api.chat.completions.create(model="model-1", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.wait_for(house.engine.jobs[0].cancelled.wait(), 5)
    await house.engine.empty()


async def test_the_blocking_client(house: House) -> None:
    house.engine.on_submit = play("a", "b")

    def use() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=house.url + "/v1", api_key="none") as api:
            done = api.chat.completions.create(model="model-1", messages=MESSAGES)
            stream = api.chat.completions.create(model="model-1", messages=MESSAGES, stream=True)
            return done.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(use) == ("ab", "ab")
