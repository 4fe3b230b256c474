"""What a request's fields are called in an error: as its endpoint's clients call them, whoever found the fault."""

from __future__ import annotations

from typing import Any

import pytest

from baton.ipc.frames import Failure
from tests.frontends.conftest import House
from tests.frontends.talk import CHAT, TEXT

RESPONSE = {"model": "model-1", "input": "hi"}
WHERE: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 9}, "messages", "max_completion_tokens"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 9}, "messages", "max_tokens"),
    ("/v1/completions", {**TEXT, "max_tokens": 9}, "prompt", "max_tokens"),
    ("/v1/responses", {**RESPONSE, "max_output_tokens": 9}, "input", "max_output_tokens"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("place", "body", "prompt", "most"), WHERE)
async def test_what_the_engine_refuses_is_named_as_the_endpoint_calls_it(
    house: House, place: str, body: dict[str, Any], prompt: str, most: str, streamed: bool
) -> None:
    for engine_s, own in (("prompt", prompt), ("max_tokens", most)):
        failure = Failure(400, "invalid_request_error", "31 tokens and max_tokens 9 make 40", engine_s, "too_long")
        house.engine.on_submit = lambda job, failure=failure: job.refuse(failure)
        async with house.post(place, {**body, "stream": streamed}) as response:
            text = await response.text()
            assert f'"param":"{own}"' in text and f"31 tokens and {most} 9 make 40" in text, text


@pytest.mark.parametrize(("place", "body", "prompt", "most"), WHERE)
async def test_so_is_what_the_door_refuses(
    house: House, place: str, body: dict[str, Any], prompt: str, most: str
) -> None:
    async with house.post(place, {**body, "min_tokens": 20}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "min_tokens")
        assert error["message"] == f"min_tokens is 20, more than {most}, 9"
