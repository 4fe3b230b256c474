"""The tokenizer process: renders chats and encodes prompts for its core. The only process that imports tokenizers."""

from __future__ import annotations

from baton.engine.effects import Encode, Encoded
from baton.engine.tokenizer import TokenizerCore
from baton.ipc.frames import Failure, Prompt
from baton.workers.model.chat import ChatTemplate, ChatTemplateError
from baton.workers.model.gguf import ModelFileError, read_header
from baton.workers.model.vocabulary import Vocabulary, build_encoder, read_vocabulary
from baton.workers.process import Process, StartError


class PromptEncoder:
    """From a prompt to token ids, by the model's own template and vocabulary."""

    def __init__(self, path: str) -> None:
        from pathlib import Path

        header = read_header(Path(path))
        self._vocabulary: Vocabulary = read_vocabulary(header)
        self._encoder = build_encoder(header)
        template = self._vocabulary.chat_template
        self._template = (
            None if template is None else ChatTemplate(template, self._piece("bos_id"), self._piece("eos_id"))
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt; ``ChatTemplateError`` if its messages cannot be rendered."""
        if prompt.messages is not None:
            if self._template is None:
                raise ChatTemplateError("this model has no chat template; use /v1/completions")
            ids: list[int] = self._encoder.encode(self._template.render(prompt.messages), add_special_tokens=False).ids
            return ids
        text_ids: list[int] = self._encoder.encode(prompt.text or "", add_special_tokens=False).ids
        bos = self._vocabulary.bos_id
        return [bos, *text_ids] if self._vocabulary.add_bos and bos is not None else text_ids

    def _piece(self, name: str) -> str:
        token = getattr(self._vocabulary, name)
        return "" if token is None else self._vocabulary.token_bytes(token).decode("utf-8", "replace")


async def run(process: Process) -> None:
    """Serve until halted."""
    try:
        encoder = PromptEncoder(process.card.path)
    except (ModelFileError, ChatTemplateError) as error:
        raise StartError(str(error)) from error

    def encode(effect: Encode) -> None:
        ids, failure = list[int](), None
        try:
            ids = encoder.encode(effect.prompt)
        except ChatTemplateError as error:
            failure = Failure(400, "invalid_request_error", str(error), "messages", "chat_template")
        process.feed(Encoded(effect.slot, effect.generation, ids, failure))

    core = TokenizerCore(process.me, process.board, process.card.context_tokens_max, process.limits)
    process.run_core(core, {Encode: encode})
    process.ready({})
    await process.halted.wait()
