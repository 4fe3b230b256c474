"""A tiny OpenAI-compatible server as a program, for what measures servers: ``fake_openai.py PORT HOW``.

HOW is "well", or some way to be wrong: "die" at the start, leave an "orphan" then, "unready" for ever, "refuse" every
request, "fall" in the middle of the first counted one. It writes the bodies it was sent to the file named by FAKE_SEEN,
a line each. Its answers have FAKE_PER_DELTA tokens a delta, the ids told where FAKE_IDS is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

from aiohttp import web

HELD_BACK = 3  # the number of the token whose text waits for the next one's


async def ready(request: web.Request) -> web.Response:
    if sys.argv[2] == "unready":
        raise web.HTTPServiceUnavailable
    return web.json_response({"data": [{"id": "tiny"}]})


def remember(body: object) -> None:
    with open(os.environ["FAKE_SEEN"], "a", encoding="utf-8") as seen:
        seen.write(json.dumps(body) + "\n")


async def completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    remember(body)
    if sys.argv[2] == "refuse":
        return web.json_response({"error": {"message": "no such model"}}, status=404)
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    if sys.argv[2] == "fall" and body["max_tokens"] == 128:
        os._exit(3)

    async def event(document: object) -> None:
        await answer.write(b"data: " + json.dumps(document).encode() + b"\n\n")

    tokens, step = body["max_tokens"], int(os.environ.get("FAKE_PER_DELTA", "1"))
    for at in range(0, tokens, step):
        count = min(step, tokens - at)
        choice: dict[str, object] = {"text": "" if at == HELD_BACK else "a" * count, "finish_reason": None}
        if "FAKE_IDS" in os.environ:
            choice["token_ids"] = [7] * count
        await event({"choices": [choice]})
        await asyncio.sleep(0)
    await event({"choices": [{"text": "", "finish_reason": "length"}]})
    prompt = body["prompt"]
    count = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    await event({"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": tokens}})
    await answer.write(b"data: [DONE]\n\n")
    return answer


def main() -> None:
    if sys.argv[2] == "orphan":
        subprocess.Popen([sys.executable, "-c", f"import time\ntime.sleep(600)  # {__file__}"])
    if sys.argv[2] in ("die", "orphan"):
        sys.exit("the weights are not there")
    application = web.Application()
    application.router.add_get("/v1/models", ready)
    application.router.add_post("/v1/completions", completions)
    web.run_app(application, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
