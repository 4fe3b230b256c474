"""Bad input through every open door: 400, the field by its name, and the engine never sees it.

The doors are real: HTTP, a WebSocket, and the SDK through the ZeroMQ gateway.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai.types import completion_create_params as openai_completion
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as openai_chat
from openai.types.responses import response_create_params as openai_response

from baton.engine.effects import Open
from baton.engine.limits import Limits
from baton.frontends import parameters, validate
from baton.frontends.client import AsyncClient, RequestFailed
from baton.frontends.client.stream import AsyncStream
from tests.frontends.conftest import House
from tests.frontends.double import admit
from tests.frontends.talk import CHAT, TEXT
from tests.frontends.wrong import CASES, WRONG, with_field

INPUT: dict[str, Any] = {"model": "model-1", "input": "hi"}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

#: sends a body; answers with status, field and message of the refusal
Say = Callable[[bytes], Any]
Refusal = tuple[int, str | None, str]


def http(path: str) -> Callable[[House], Any]:
    @asynccontextmanager
    async def door(house: House) -> AsyncIterator[Say]:
        async def say(body: bytes) -> Refusal:
            async with house.client.post(house.url + path, data=body) as response:
                error = (await response.json())["error"]
                return response.status, error["param"], error["message"]

        yield say

    return door


@asynccontextmanager
async def websocket(house: House) -> AsyncIterator[Say]:
    async with house.client.ws_connect(house.places["websocket"]) as socket:

        async def say(body: bytes) -> Refusal:
            await socket.send_str(body.decode())
            event = json.loads(await socket.receive_str(timeout=10))
            assert event["type"] == "error", event
            return event["status"], event["param"], event["message"]

        yield say


def sdk(operation: str) -> Callable[[House], Any]:
    @asynccontextmanager
    async def door(house: House) -> AsyncIterator[Say]:
        async with AsyncClient(house.places["zmq"]) as client:

            async def say(body: bytes) -> Refusal:
                stream = AsyncStream(client._connect, lambda model: (operation, body), None, 10)
                with pytest.raises(RequestFailed) as failed:
                    async with stream:
                        await stream.result()
                return failed.value.status, failed.value.param, failed.value.message

            yield say

    return door


DOORS: dict[str, tuple[Callable[[House], Any], dict[str, Any]]] = {
    "chat": (http("/v1/chat/completions"), CHAT),
    "completion": (http("/v1/completions"), TEXT),
    "response": (http("/v1/responses"), INPUT),
    "websocket": (websocket, {"type": "response.create", **INPUT}),
    "sdk chat": (sdk("chat"), CHAT),
    "sdk completion": (sdk("text_completion"), TEXT),
}


@pytest.mark.parametrize(
    ("door", "body"),
    [pytest.param(*DOORS[name], id=name, marks=[pytest.mark.sdk] * name.startswith("sdk")) for name in DOORS],
)
@pytest.mark.parametrize("part", range(4))
async def test_bad_input_is_refused_by_name_and_the_engine_never_sees_it(
    house: House, door: Callable[[House], Any], body: dict[str, Any], part: int
) -> None:
    async with door(house) as say:
        for name, value in CASES[part::4]:
            raw = with_field(body, name, value)
            status, param, message = await say(raw) if len(raw) <= Limits().body_bytes_max else (400, name, "")
            no_json = any(word in value for word in ("NaN", "Infinity")) and "not valid JSON" in message
            assert status == 400, (name, value[:80], message)
            assert (param or "").startswith(name) or no_json, (name, value[:80], param, message)
    assert not house.engine.jobs
    assert not [event for event in house.engine.events if isinstance(event, Open)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("idempotency_key", 3), ("idempotency_key", "\ud800"), ("resumable", "yes"), ("traceparent", 5)),
        *(("timeout_s", "1"), ("timeout_s", True), ("user", "\ud800"), ("metadata", {"a": object()}), ("stop", {1j})),
    ],
)
@pytest.mark.sdk
async def test_what_the_sdk_cannot_send_is_refused_by_name_and_costs_the_others_nothing(
    house: House, name: str, value: Any
) -> None:
    house.engine.on_submit = admit
    async with AsyncClient(house.places["zmq"]) as client, client.stream(prompt="hi") as other:
        with pytest.raises(RequestFailed) as refused:
            await client.complete("x", max_tokens=1, **{name: value})
        assert (refused.value.status, refused.value.param) == (400, name)
        (job,) = house.engine.jobs
        job.say("a")
        job.finish("stop")
        assert "".join([delta.text async for delta in other]) == "a"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2**70, -(2**70)])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"1": value}, lambda value: [[value]]])
@pytest.mark.sdk
async def test_the_sdk_refuses_numbers_that_json_cannot_say(house: House, value: float, wrap: Any) -> None:
    async with AsyncClient(house.places["zmq"]) as client:
        for ask in (lambda **more: client.chat(HI, **more), lambda **more: client.complete("x", **more)):
            for name in ("temperature", "logit_bias", "stop_token_ids", "seed", "unknown"):
                with pytest.raises(RequestFailed) as failed:
                    await ask(**{name: wrap(value)})
                assert (failed.value.status, failed.value.param) == (400, name)
    assert not house.engine.jobs


@pytest.mark.sdk
async def test_the_sdk_refuses_what_is_nested_too_deeply(house: House) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    async with AsyncClient(house.places["zmq"]) as client:
        with pytest.raises(RequestFailed) as failed:
            await client.complete("x", metadata=nested)
    assert failed.value.param == "metadata"


# ------------------------------------------------------------------------ nothing is silently ignored


def test_every_parameter_that_is_read_has_its_wrong_values() -> None:
    read = {*parameters.CHAT, *parameters.COMPLETION, *parameters.RESPONSE, *parameters.STREAMING, *parameters.LABELS}
    assert read <= WRONG.keys()


def named(*shapes: type) -> set[str]:
    """The names of typed dictionaries."""
    return {name for shape in shapes for name in shape.__annotations__}


OPENAI = {
    "chat": named(openai_chat.CompletionCreateParamsNonStreaming, openai_chat.CompletionCreateParamsStreaming),
    "completion": named(
        openai_completion.CompletionCreateParamsNonStreaming, openai_completion.CompletionCreateParamsStreaming
    ),
    "response": named(openai_response.ResponseCreateParamsNonStreaming, openai_response.ResponseCreateParamsStreaming),
}

#: vLLM's SamplingParams and what its server takes in the body beside OpenAI's parameters
VLLM = """
    n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs flat_logprobs logprob_token_ids
    detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
    logits_processors truncate_prompt_tokens logit_bias allowed_token_ids bad_words structured_outputs extra_args
    vllm_xargs skip_reading_prefix_cache thinking_token_budget repetition_detection use_beam_search length_penalty
    echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
    chat_template_kwargs mm_processor_kwargs media_io_kwargs guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern structural_tag priority request_id cache_salt
    return_tokens_as_token_ids return_token_ids kv_transfer_params include_reasoning prompt_embeds stream_interval
"""

SHAPES = {"chat": validate.CHAT, "completion": validate.COMPLETION, "response": validate.RESPONSE}


@pytest.mark.parametrize("kind", SHAPES)
def test_no_parameter_of_openai_or_vllm_is_ignored(kind: str) -> None:
    shape = SHAPES[kind]
    assert len(OPENAI[kind]) > 15, "the official types were not found"
    assert OPENAI[kind] - shape.names == set(), "neither read, nor a label, nor refused by name"
    assert set(VLLM.split()) - shape.names == set()
    everything = set().union(*(shape.names for shape in SHAPES.values())) - {*parameters.ENVELOPE}
    assert everything - shape.names == set(), "what one door knows is no typo at another"


def test_no_stream_option_is_ignored() -> None:
    assert named(ChatCompletionStreamOptionsParam) <= validate.STREAM_OPTIONS.names


@pytest.mark.parametrize(
    ("table", "read"),
    [
        (parameters.REFUSED_CHAT, {*parameters.CHAT, *parameters.STREAMING}),
        (parameters.REFUSED_COMPLETION, {*parameters.COMPLETION, *parameters.STREAMING}),
        (parameters.REFUSED_RESPONSE, {*parameters.RESPONSE}),
    ],
)
def test_a_parameter_is_read_or_refused_or_a_label(table: dict[str, Any], read: set[str]) -> None:
    assert not table.keys() & read and not table.keys() & parameters.LABELS.keys()
    assert not read & parameters.LABELS.keys()
