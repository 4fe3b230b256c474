"""The tokenizer process: renders chats and encodes prompts for its core. The only process that imports tokenizers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from baton.engine.effects import Encode, Encoded
from baton.engine.tokenizer import TokenizerCore, prompt_bytes
from baton.ipc.frames import Failure, Prompt
from baton.workers.model.chat import ChatTemplate, ChatTemplateError
from baton.workers.model.gguf import ModelFileError, read_header
from baton.workers.model.vocabulary import Vocabulary, build_encoder, read_vocabulary
from baton.workers.process import Process, StartError

#: a prompt up to this size is encoded in a few milliseconds
INLINE_BYTES = 16 << 10


class PromptEncoder:
    """From a prompt to token ids, by the model's own template and vocabulary."""

    def __init__(self, path: str) -> None:
        from pathlib import Path

        header = read_header(Path(path))
        self.vocabulary: Vocabulary = read_vocabulary(header)
        self._encoder = build_encoder(header)
        template = self.vocabulary.chat_template
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
        bos = self.vocabulary.bos_id
        return [bos, *text_ids] if self.vocabulary.add_bos and bos is not None else text_ids

    def _piece(self, name: str) -> str:
        token = getattr(self.vocabulary, name)
        return "" if token is None else self.vocabulary.token_bytes(token).decode("utf-8", "replace")


async def run(process: Process) -> None:
    """Serve until halted."""
    try:
        encoder = PromptEncoder(process.card.path)
    except (ModelFileError, ChatTemplateError) as error:
        raise StartError(str(error)) from error

    def encoded(effect: Encode) -> Encoded:
        try:
            return Encoded(effect.slot, effect.generation, encoder.encode(effect.prompt), None)
        except ChatTemplateError as error:
            failure = Failure(400, "invalid_request_error", str(error), "messages", "chat_template")
            return Encoded(effect.slot, effect.generation, [], failure)

    def encode(effect: Encode) -> None:
        """Small prompts at once; large ones in a thread, one by one, so that they hold up only one another."""
        if prompt_bytes(effect.prompt) <= INLINE_BYTES:
            process.feed(encoded(effect))
        else:
            future = process.loop.run_in_executor(threads, encoded, effect)
            future.add_done_callback(lambda done: process.feed(done.result()))

    threads = ThreadPoolExecutor(1, "encode")
    longest = max(map(len, encoder.vocabulary.pieces))
    core = TokenizerCore(process.me, process.board, process.card.context_tokens_max, longest, process.limits)
    process.run_core(core, {Encode: encode})
    process.ready({})
    await process.halted.wait()
    threads.shutdown(wait=False, cancel_futures=True)
