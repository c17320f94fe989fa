"""Text to token ids and back, the way a stream needs it.

Knows the target's tokenizer and its chat template.  Does not know where the tokens come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowspec_edge.chat import BUILT_IN, TURN_ENDS, Message, read_template, recognise
from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import ModelDir

_UNFINISHED = "\ufffd"  # what decoders put for bytes that are not (yet) a character
_CONTEXT = 8  # tokens of the text so far that decide how the next one is written


class Tokenizer:
    """The tokenizer of a model's target, and the template of its chats.

    chat_template  one of ``chat.BUILT_IN``, or a file with a Jinja template; None takes the tokenizer's own,
                   else the built-in one that the model's name asks for
    """

    def __init__(self, model: ModelDir, chat_template: str | None = None) -> None:
        from transformers import AutoTokenizer  # slow to import

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model.target, local_files_only=True,
                                                                 trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare Exceptions for a file it cannot read
            raise UsageError(f"the tokenizer in {model.target} cannot be loaded: {_first_line(error)}"
                             ) from error
        self._model = model
        self._jinja: str | None = None
        if chat_template is not None and chat_template not in BUILT_IN:
            self._jinja = read_template(Path(chat_template))
        elif chat_template is None:
            self._jinja = self._own_template()
        self._built_in = None if self._jinja is not None else chat_template or recognise(model)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens added as the model wants; UsageError if it is empty."""
        ids: list[int] = list(self._tokenizer(text, verbose=False)["input_ids"]) if text else []
        if not ids:
            raise UsageError("the prompt is empty; give some text to continue")
        return ids

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins.

        UsageError if the model has no template, or if its template does not take such a chat.
        """
        if self._jinja is not None:
            return self._rendered(messages, self._jinja)
        if self._built_in is None:
            raise UsageError(f"{self._model.path} has no chat template, and its name is not that of a model "
                             f"with a known one; give --chat-template {', '.join(BUILT_IN)} or a file with a "
                             "Jinja template")
        ids: list[int] = []
        for piece in BUILT_IN[self._built_in](messages):
            begin, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
            ids += [begin] if piece.begins and begin is not None else []
            ids += self._tokenizer(piece.text, add_special_tokens=False, verbose=False)["input_ids"]
            ids += [end] if piece.ends and end is not None else []
        return ids

    @property
    def chats(self) -> bool:
        """Whether there is a template for chats."""
        return self._jinja is not None or self._built_in is not None

    @property
    def chat_stop_ids(self) -> frozenset[int]:
        """The ids that end an answer: the tokenizer's end of sequence, and what ends a turn in the chat
        template.  ``ModelDir.stop_ids`` come on top."""
        ends = {self._tokenizer.eos_token_id} - {None}
        special = {str(token): number for number, token in self._tokenizer.added_tokens_decoder.items()
                   if token.special}
        template = self._jinja or ""
        return frozenset(ends | {special[end] for end in TURN_ENDS if end in special and end in template})

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True,
                                          clean_up_tokenization_spaces=False))

    def _own_template(self) -> str | None:
        """The tokenizer's chat template; of several the one it calls the default."""
        own = self._tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        return None if own is None else str(own)

    def _rendered(self, messages: Sequence[Message], template: str) -> list[int]:
        from jinja2 import TemplateError

        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                chat, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False)
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(f"the chat template of {self._model.path} cannot be used for this chat: "
                             f"{_first_line(error)}") from error
        if not ids:
            raise UsageError(f"the chat template of {self._model.path} makes nothing of this chat")
        return list(ids)


class TextStream:
    """Turns tokens into text as they come; a character split over tokens waits for its last byte.

    The pieces together depend on the tokens alone, not on how many come at a time.  They are the text
    of all tokens, unless that has bytes which are no character: there some tokenizers spoil the
    characters beside them too, which a stream has written long before.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None],
                 after: Sequence[int] = ()) -> None:
        """``after``: the ids before the first.  Some tokenizers drop the space that a text's first token
        begins with, and only what comes before tells that it is not the first."""
        self._decode, self._write = decode, write
        self._ids = self._lead(after)
        self._done = len(self._ids)  # ids whose text has been written
        self._context = 0  # ids decoded again before them, for the same reason

    def push(self, ids: Sequence[int]) -> None:
        """Write what ``ids`` completes."""
        pieces = []
        for token in ids:
            self._ids.append(token)
            new = self._new_text()
            if new and not new.endswith(_UNFINISHED):
                pieces.append(self._take(new))
        if pieces:
            self._write("".join(pieces))

    def close(self) -> None:
        """Write what is left, complete or not."""
        if left := self._take(self._new_text()):
            self._write(left)

    def _lead(self, ids: Sequence[int]) -> list[int]:
        """The last few of ``ids``, cut where a character begins: half of one would spoil those after it."""
        starts = range(max(0, len(ids) - _CONTEXT), len(ids))
        tails = (list(ids[start:]) for start in starts)
        return next((tail for tail in tails if _UNFINISHED not in self._decode(tail)), [])

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._context : self._done])
        text = self._decode(self._ids[self._context :])
        if text.startswith(before):
            return text[len(before) :]
        # The new tokens begin with bytes that are no character, and a decoder with byte fallback gives up
        # a whole run of bytes, with what had been good in it.
        return self._decode(self._ids[self._done :])

    def _take(self, text: str) -> str:
        """``text``, of all tokens so far, is done with."""
        self._context, self._done = self._done, len(self._ids)
        return text


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
