"""What a server says once it is ready: one line a door, each with a command to paste."""

from __future__ import annotations

import json

STORY = "Tell me a story."
TOKENS = 100


def greeting(model: str, http: str, websocket: str, zmq: str) -> list[str]:
    """The lines, for a model served at these addresses."""
    chat = {"model": model, "stream": True, "max_tokens": TOKENS, "messages": [{"role": "user", "content": STORY}]}
    create = {"type": "response.create", "model": model, "input": STORY, "max_output_tokens": TOKENS}
    python = (
        f"from baton import Client; c = Client('{zmq}'); "
        f"s = c.stream(max_tokens={TOKENS}, messages=[{{'role': 'user', 'content': '{STORY}'}}]); "
        "[print(d.text, end='', flush=True) for d in s]; print()"
    )
    return [
        f"ready: {model} at {http}",
        f"HTTP       curl -sN {http}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(chat)}'",
        f"WebSocket  (echo '{json.dumps(create)}'; sleep 20) | .venv/bin/python -m websockets {websocket}",
        f'Python     .venv/bin/python -c "{python}"',
    ]
