"""A chat's messages, and prompts that fit into the model's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec_edge.errors import UsageError
from flowspec_edge.model.chat import Message, Rendering
from flowspec_edge.model.opened import OpenModel
from flowspec_edge.model.text import Tokenizer

_MIN_ANSWER = 64  # tokens; if the answer has less room, the prompt leaves out the oldest exchange


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt made from a chat.

    limit              tokens that the answer may have
    omitted_exchanges  number of oldest exchanges that the prompt leaves out
    """

    prompt: list[int]
    limit: int
    omitted_exchanges: int


class Conversation:
    """A chat; when the context is full, prompts leave out the oldest exchanges."""

    def __init__(self, tokenizer: Tokenizer, model: OpenModel, answer_tokens: int, system: str | None = None,
                 rendering: Rendering | None = None) -> None:
        """Begin a chat; UsageError if the model has no chat template.

        ``answer_tokens``: the longest answer; ``rendering``: how chats become prompts.
        """
        self._tokenizer = tokenizer
        self._rendering = rendering
        self._room = model.max_positions
        self._answer_tokens = answer_tokens
        self._system = [Message("system", system)] if system is not None else []
        self._turns: list[Message] = []  # user and assistant, in turn
        self._dropped = 0  # how many of the oldest turns prompts leave out
        self.stop_ids = model.stop_ids | tokenizer.chat_stop_ids
        tokenizer.chat([*self._system, Message("user", "?")], rendering=rendering)

    @property
    def messages(self) -> Sequence[Message]:
        return [*self._system, *self._turns]

    def ask(self, text: str) -> ChatPrompt:
        """Return the prompt for ``text``; :meth:`answered` adds it to the chat.

        UsageError if ``text`` alone does not fit into the context.
        """
        message = Message("user", text)
        dropped = self._dropped
        while True:
            ids = self._tokenizer.chat([*self._system, *self._turns[dropped:], message], rendering=self._rendering)
            room = self._room - len(ids)
            if room >= min(_MIN_ANSWER, self._answer_tokens):
                break
            if dropped >= len(self._turns):
                raise UsageError(f"the message has {len(ids)} tokens with what belongs to it; the model's "
                                 f"context is {self._room}, the answer included: shorten it")
            dropped += 2
        self._dropped = dropped
        return ChatPrompt(ids, min(self._answer_tokens, room), dropped // 2)

    def answered(self, question: str, answer: str) -> None:
        """Add an exchange, even with a partial answer."""
        self._turns += [Message("user", question), Message("assistant", answer)]

    def undo(self) -> str | None:
        """Remove the last exchange; return its question, None if there is none."""
        if not self._turns:
            return None
        question = self._turns[-2].content
        del self._turns[-2:]
        self._dropped = min(self._dropped, len(self._turns))
        return question

    def reset(self, system: str | None = None) -> None:
        """Remove all exchanges; ``system`` replaces the system message."""
        if system is not None:
            self._system = [Message("system", system)]
        self._turns.clear()
        self._dropped = 0
