"""Rendering chat messages with the template a model file carries, in a sandbox and within bounds.

The template is a program from a model file: it runs in Jinja's immutable sandbox, sees the messages and
nothing else, and stops at a length. Knows no tokenizer and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

PROMPT_CHARACTERS_MAX = 16 << 20
FAULT_CHARACTERS_MAX = 400


class ChatTemplateError(Exception):
    """The template refuses these messages, or fails on them; one line for the client."""

    def __init__(self, fault: str) -> None:
        super().__init__(" ".join(fault.split())[:FAULT_CHARACTERS_MAX])


class ChatTemplate:
    """A compiled template; rendering depends on nothing but its arguments and, where it asks for it, the
    date.
    """

    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        *,
        now: Callable[[], datetime] = datetime.now,
        characters_max: int = PROMPT_CHARACTERS_MAX,
    ) -> None:
        """Compile ``source``; ``ChatTemplateError`` where it is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda pattern: now().strftime(pattern),
            "bos_token": bos_token,
            "eos_token": eos_token,
        }
        self._characters_max = characters_max
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for ``messages``; ``variables`` are further names the template may use, such as
        ``tools``.

        Raises ``ChatTemplateError`` where the template refuses the messages, fails, or writes too much.
        """
        given = {**(variables or {}), "messages": messages, "add_generation_prompt": add_generation_prompt}
        pieces, length = [], 0
        try:
            for piece in self._template.generate(given):
                length += len(piece)
                if length > self._characters_max:
                    raise ChatTemplateError(f"the prompt exceeds {self._characters_max} characters")
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can fail in any way a Python expression can
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return "".join(pieces)


def _refuse(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses these messages: {message}")


def _to_json(value: object, indent: int | None = None) -> str:
    """Unlike Jinja's own filter it does not escape for HTML, which models have not learnt to read."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
