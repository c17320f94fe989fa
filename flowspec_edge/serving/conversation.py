"""One person's chat: what was said, and what the next request is made of.

Knows the chat's template and the model's context.  Does not know a terminal, HTTP or clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec_edge.chat import Message
from flowspec_edge.errors import UsageError
from flowspec_edge.modeldir import ModelDir
from flowspec_edge.text import Tokenizer

_SHORTEST_ANSWER = 64  # tokens of room that are worth asking with; below that the oldest exchange goes


@dataclass(frozen=True)
class Question:
    """What is asked of the cluster.

    prompt    token ids of all that counts of the chat
    limit     tokens that the answer may have
    left_out  exchanges, the oldest ones, that the context has no room for any more
    """

    prompt: list[int]
    limit: int
    left_out: int


class Conversation:
    """Messages in turn; those that no longer fit are left out of what the model sees, oldest first."""

    def __init__(self, tokenizer: Tokenizer, model: ModelDir, answer_tokens: int, system: str | None = None,
                 ) -> None:
        """``answer_tokens``: the longest answer.  UsageError if the model has no chat template."""
        self._tokenizer = tokenizer
        self._room = model.max_positions
        self._answer_tokens = answer_tokens
        self._system = [Message("system", system)] if system is not None else []
        self._turns: list[Message] = []  # user and assistant, in turn
        self._forgotten = 0  # of the turns
        self.stop_ids = model.stop_ids | tokenizer.chat_stop_ids
        tokenizer.chat([*self._system, Message("user", "?")])

    @property
    def messages(self) -> Sequence[Message]:
        """All of them, left out or not, the system's first."""
        return [*self._system, *self._turns]

    def ask(self, text: str) -> Question:
        """What to ask for an answer to ``text``, which becomes part of the chat with :meth:`answered`.

        UsageError if it does not fit into the context even alone.
        """
        asked = Message("user", text)
        forgotten = self._forgotten
        while True:
            ids = self._tokenizer.chat([*self._system, *self._turns[forgotten:], asked])
            left = self._room - len(ids)
            if left >= min(_SHORTEST_ANSWER, self._answer_tokens):
                break
            if forgotten >= len(self._turns):
                raise UsageError(f"the message has {len(ids)} tokens with what belongs to it; the model's "
                                 f"context is {self._room}, the answer included: shorten it")
            forgotten += 2
        self._forgotten = forgotten
        return Question(ids, min(self._answer_tokens, left), forgotten // 2)

    def answered(self, question: str, answer: str) -> None:
        """The exchange took place, if only in part."""
        self._turns += [Message("user", question), Message("assistant", answer)]

    def undo(self) -> str | None:
        """Take back the last exchange; its question, or None if there was none."""
        if not self._turns:
            return None
        question = self._turns[-2].content
        del self._turns[-2:]
        self._forgotten = min(self._forgotten, len(self._turns))
        return question

    def reset(self, system: str | None = None) -> None:
        """Begin anew, with another system message if one is given."""
        if system is not None:
            self._system = [Message("system", system)]
        self._turns.clear()
        self._forgotten = 0
