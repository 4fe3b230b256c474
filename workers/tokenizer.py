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


class BadWordError(Exception):
    """A bad word of which the vocabulary has no token; one line for the client."""


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
        """The ids of a prompt, its own if it has them; ``ChatTemplateError`` if its messages cannot be rendered."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.messages is not None:
            if self._template is None:
                raise ChatTemplateError("this model has no chat template; use /v1/completions")
            ids: list[int] = self._encoder.encode(self._template.render(prompt.messages), add_special_tokens=False).ids
            return ids
        text_ids: list[int] = self._encoder.encode(prompt.text or "", add_special_tokens=False).ids
        bos = self.vocabulary.bos_id
        return [bos, *text_ids] if self.vocabulary.add_bos and bos is not None else text_ids

    def bad_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The sequences of ids that write the words, each as it stands and after a space; none twice.

        ``BadWordError`` for a word of which the vocabulary has no token.
        """
        found = dict[tuple[int, ...], None]()
        for word in words:
            for text in (word,) if word.startswith(" ") else (word, f" {word}"):
                ids = tuple(self._encoder.encode(text, add_special_tokens=False).ids)
                if not ids:
                    raise BadWordError(f"the vocabulary has no token for {word!r}")
                found[ids] = None
        return tuple(found)

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
            ids, bad_ids = encoder.encode(effect.prompt), encoder.bad_ids(effect.bad_words)
            return Encoded(effect.slot, effect.generation, ids, None, bad_ids)
        except ChatTemplateError as error:
            failure = Failure(400, "invalid_request_error", str(error), "messages", "chat_template")
        except BadWordError as error:
            failure = Failure(400, "invalid_request_error", str(error), "bad_words")
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
