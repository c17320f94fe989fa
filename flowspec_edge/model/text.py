"""Text to token ids and back, also incrementally for streams; the target's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from flowspec_edge.errors import UsageError, first_line
from flowspec_edge.model.chat import (
    BUILT_IN,
    Message,
    PromptPiece,
    ReasoningFormat,
    Rendering,
    Tool,
    ToolFormat,
    check_values,
    continued,
    no_template,
    read_template,
    recognise,
    recognise_reasoning_format,
    recognise_tool_format,
    turn_ends,
    variables_of,
)
from flowspec_edge.model.grammar import GrammarCompiler
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.untrusted.processes import TemplateRenderer
from flowspec_edge.model.weights.located import display_path

_UNFINISHED = "\ufffd"  # what decoders write for bytes that are not (yet) a character
_HERE = "END_OF_THE_LAST_MESSAGE "  # replaced by nothing
THINKING = ("enable_thinking", "thinking")  # variables of chat templates that turn reasoning on or off
_MOST_UNFINISHED = 3  # bytes of a character without its last
_CONTEXT = 8  # preceding tokens that affect the text of the next


class Tokenizer:
    """A model's tokenizer and chat template.

    ``chat_template``: one of ``chat.BUILT_IN``, or a file with a Jinja template; None: the tokenizer's own, else the
    built-in one for the model's name.
    """

    def __init__(self, model: OpenModel, chat_template: str | None = None) -> None:
        from transformers import AutoTokenizer  # slow to import

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model.target, local_files_only=True,
                                                                 trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare Exceptions for a file it cannot read
            raise UsageError(f"the tokenizer in {display_path(model.target)} cannot be loaded: {first_line(error)}"
                             ) from error
        self._model = model
        self._templates = TemplateRenderer()
        self._jinja: str | None = None
        if chat_template is not None and chat_template not in BUILT_IN:
            self._jinja = read_template(Path(chat_template))
        elif chat_template is None:
            self._jinja = self._own_template()
        self._built_in = None if self._jinja is not None else chat_template or recognise(model)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return token ids, ``special``: with the model's special tokens.

        UsageError if ``text`` is empty, or has a token that the model lacks.
        """
        ids = self._ids(text, special) if text else []
        if not ids:
            raise UsageError("the prompt is empty; give some text to continue")
        return self._require_in_vocabulary(ids)

    def words(self, text: str) -> list[tuple[int, ...]]:
        """Return the tokens of ``text`` within an answer: at its beginning, and after a space."""
        encodings = (tuple(self._ids(start + text.lstrip(), False)) for start in ("", " "))
        return [*dict.fromkeys(ids for ids in encodings if ids)]

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = (), rendering: Rendering | None = None
             ) -> list[int]:
        """Return the token ids of a chat.

        UsageError without a template, if the template rejects the chat, or if it has a token that the model
        lacks. ``tools`` need a :attr:`tool_format`.
        """
        rendering = rendering or Rendering()
        check_values(rendering.values)
        if self._jinja is not None:
            return self._require_in_vocabulary(self._rendered(messages, self._jinja, tools, rendering))
        if self._built_in is None:
            raise no_template(self._model)
        ids: list[int] = []
        for piece in self._built_in_pieces(self._built_in, messages, rendering):
            begin, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
            ids += [begin] if piece.add_bos and begin is not None else []
            ids += self._ids(piece.text, False)
            ids += [end] if piece.add_eos and end is not None else []
        return self._require_in_vocabulary(ids)

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _built_in_pieces(self, name: str, messages: Sequence[Message], rendering: Rendering) -> list[PromptPiece]:
        if rendering.continues:
            if not messages or messages[-1].role != "assistant":
                raise UsageError("only an assistant's message can be continued")
            pieces = BUILT_IN[name](messages[:-1])
            return continued(pieces, messages[-1].content, "\n" if name == "bare" else " ")
        if not rendering.opens:
            raise UsageError(f"a prompt in the format {name} always ends where the answer begins")
        return BUILT_IN[name](messages)

    def reads(self, name: str) -> bool:
        """Whether the chat template has a variable of this name."""
        return name in self._variables

    @cached_property
    def _variables(self) -> frozenset[str]:
        return frozenset() if self._jinja is None else variables_of(self._jinja)

    @property
    def always_thinks(self) -> bool:
        """Whether the chat template lets the model think, and no variable can tell it not to."""
        return (self._jinja is not None and "<think>" in self._jinja
                and not any(map(self.reads, THINKING)))

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for the model's answers; UsageError without llguidance."""
        return GrammarCompiler(self._tokenizer, int(self._model.config["vocab_size"]))

    @cached_property
    def longest_token(self) -> int:
        """No token stands for more characters.

        A byte-level vocabulary spells each byte as a character, and a character has at least one byte.
        """
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def chats(self) -> bool:
        return self._jinja is not None or self._built_in is not None

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the chat template has the model write tool calls; None: not, or in no known format."""
        return None if self._jinja is None else recognise_tool_format(self._jinja)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How answers by the chat template have reasoning; None: not, or in no known format."""
        return None if self._jinja is None else recognise_reasoning_format(self._jinja)

    def hides(self, words: Sequence[str]) -> bool:
        """Whether one of ``words`` is a special token, which texts do not show."""
        special = {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        return not special.isdisjoint(words)

    @property
    def chat_stop_ids(self) -> frozenset[int]:
        """Further ids that end an answer: the tokenizer's EOS, and the chat template's end of turn."""
        ends = {self._tokenizer.eos_token_id} - {None}
        special = {str(token): number for number, token in self._tokenizer.added_tokens_decoder.items()
                   if token.special}
        return frozenset(ends | {special[end] for end in turn_ends(self._jinja or "") if end in special})

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Decode token ids to text; ``special``: with special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special,
                                          clean_up_tokenization_spaces=False))

    def _require_in_vocabulary(self, ids: list[int]) -> list[int]:
        """Raise UsageError for a token that the tokenizer has and the model lacks, such as an added <pad>."""
        vocabulary = int(self._model.config["vocab_size"])
        for token in ids:
            if token >= vocabulary:
                token_text = self._tokenizer.convert_ids_to_tokens(token)
                raise UsageError(f"the text has {token_text!r}, token {token} of the tokenizer, but the model's "
                                 f"vocabulary has {vocabulary} tokens: leave it out")
        return ids

    def _own_template(self) -> str | None:
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return None if template is None else str(template)

    def start(self) -> None:
        """Begin what the first chat needs, without waiting for it."""
        if self._jinja is not None:
            self._templates.start()

    def _rendered(self, messages: Sequence[Message], template: str, tools: Sequence[Tool], rendering: Rendering
                  ) -> list[int]:
        chat = [message.for_template() for message in messages]
        if rendering.continues:
            chat[-1]["content"] += _HERE
        try:
            text = self._templates.render(template, self._tokenizer.special_tokens_map, chat,
                                          [tool.definition for tool in tools],
                                          rendering.opens and not rendering.continues,
                                          rendering.values)
            text = _up_to_here(text, messages[-1].content) if rendering.continues else text
            ids = self._ids(text, rendering.special)
        except (UsageError, TypeError, ValueError) as error:  # surrogates are no text
            raise UsageError(f"the chat template of {self._model.display_path} cannot be used for this chat: "
                             f"{first_line(error)}") from error
        if not ids:
            raise UsageError(f"the chat template of {self._model.display_path} gives no tokens for this chat")
        return ids


def _up_to_here(text: str, content: str) -> str:
    """Return a rendered chat up to the mark at the end of its last message's ``content``.

    A template that strips messages strips spaces before the end, too.
    """
    at = text.rfind(_HERE.strip())
    if at < 0 or content.strip() not in text:
        raise UsageError("it changes the last message, so this message cannot be continued")
    return text[:at] if text[at:].startswith(_HERE) else text[:at].rstrip()


class TextStream:
    """Writes the text of tokens as they arrive.

    A character split over tokens waits for its last byte, and at most three bytes wait.

    The text does not depend on how many tokens arrive at a time.  It equals that of all tokens decoded
    together, except near invalid UTF-8, where some tokenizers change characters already written.  The work
    for a token does not depend on the text's length, whatever the tokens are.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None],
                 after: Sequence[int] = ()) -> None:
        """Write text as tokens come; ``after``: the preceding ids.

        Some tokenizers drop the leading space of a text's first token.
        """
        self._decode, self._write = decode, write
        self._ids = self._lead(after)  # the newest, which affect the text of the next
        self._text = self._decode(self._ids)  # the text of these ids
        self._written_text = self._text  # the beginning of it that has been written
        self._ids_in_text = len(self._ids)  # how many of the ids the text comes from

    def push(self, ids: Sequence[int]) -> None:
        if new := "".join(map(self._pushed, ids)):
            self._write(new)

    def close(self) -> None:
        """Write the rest, even if its last character is incomplete."""
        remaining = self._text[len(self._written_text):]
        self._written_text, self._ids_in_text = self._text, len(self._ids)
        if remaining:
            self._write(remaining)

    def _lead(self, ids: Sequence[int]) -> list[int]:
        """Return the last few of ``ids``, starting at a character: a partial one would change the text after it."""
        starts = range(max(0, len(ids) - _CONTEXT), len(ids))
        tails = (list(ids[start:]) for start in starts)
        return next((tail for tail in tails if _UNFINISHED not in self._decode(tail)), [])

    def _pushed(self, token: int) -> str:
        """Return the text that is certain with one more token."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text and text == self._text and not self._decode([token]):  # it has no text, and there may be many
            self._ids.pop()
            return ""
        if not text.startswith(self._written_text):
            # The new tokens begin with incomplete bytes, and a decoder with byte fallback rejects the whole
            # run of bytes, valid characters included.
            del self._ids[:self._ids_in_text]
            text, self._written_text = self._decode(self._ids), ""
        pending = self._unfinished(text)
        certain = text[:len(text) - pending]
        new = certain[len(self._written_text):]
        self._text, self._ids_in_text = text, len(self._ids) - pending
        self._written_text += new
        if len(self._ids) >= 2 * _CONTEXT:
            self._forget(pending)
        return new

    def _unfinished(self, text: str) -> int:
        """How many of the last characters of ``text`` may change: the bytes of one character at most.

        Decoders write one sign for the bytes of an incomplete character, or with byte fallback one for each byte.
        """
        if not text.endswith(_UNFINISHED):
            return 0
        count = 1
        while (count < _MOST_UNFINISHED and count < len(self._ids)
               and text.endswith(_UNFINISHED * (count + 1))
               and self._decode([self._ids[-count - 1]]) == _UNFINISHED
               and len(self._decode(self._ids[:-count - 1])) == len(text) - count - 1):
            count += 1
        return count

    def _forget(self, pending: int) -> None:
        """Drop the oldest ids, as many as the text of the others allows."""
        for start in range(len(self._ids) - _CONTEXT, 0, -1):
            tail = self._decode(self._ids[start:])
            if self._text.endswith(tail) and len(tail) >= pending and bool(tail) == bool(self._text):
                del self._ids[:start]
                self._text, self._ids_in_text = tail, len(self._ids) - pending
                self._written_text = tail[:len(tail) - pending]
                return
