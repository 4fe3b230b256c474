"""Chat templates: the model's own gives the reference's prompts; a bad one is the client's clear error."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from baton.workers.model.chat import ChatTemplate, ChatTemplateError
from baton.workers.model.gguf import read_header
from baton.workers.model.vocabulary import read_vocabulary

REFERENCES = json.loads((Path(__file__).parents[2] / "data" / "smollm2-135m-reference.json").read_text())["references"]
HELLO = [{"role": "user", "content": "hello"}]


def template(source: str, characters_max: int = 10_000) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>", now=lambda: datetime(2024, 2, 29, 12, 30), characters_max=characters_max)


def test_the_models_template_gives_the_reference_prompts(model_path: Path) -> None:
    source = read_vocabulary(read_header(model_path)).chat_template
    assert source is not None
    chat = [reference for reference in REFERENCES if reference["kind"] == "chat"]
    assert chat
    for reference in chat:
        messages = [{"role": "user", "content": reference["message"]}]
        assert template(source).render(messages) == reference["prompt"]


def test_the_usual_names_are_there() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%d %b') }}"
        "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}"
        "{% if add_generation_prompt %}>{% endif %}{{ eos_token }}"
    )
    messages = [{"role": "skip", "content": ""}, {"role": "user", "content": "<é>"}]
    assert template(source).render(messages, variables={"tools": [1]}) == (
        '<s>{"role": "user", "content": "<é>"}29 Feb[\n 1\n]></s>'
    )
    assert template(source).render(messages, add_generation_prompt=False).endswith("29 Feb</s>")


def test_variables_do_not_hide_the_messages() -> None:
    assert template("{{ messages[0].content }}").render(HELLO, variables={"messages": []}) == "hello"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{{ raise_exception('roles must\\n alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[7].content.x }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{% for i in range(9999) %}hello{% endfor %}", "exceeds 10000 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_whatever_a_template_does_is_a_client_error(source: str, fault: str) -> None:
    with pytest.raises(ChatTemplateError, match=fault) as caught:
        template(source).render(HELLO)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        template("{% if %}")
