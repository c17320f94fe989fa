"""Reasoning, apart from an answer's content: between two words, or in gpt-oss' channels."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowspec_edge.model.chat import ReasoningFormat


@dataclass(frozen=True)
class ReasoningPiece:
    """A part of an answer's reasoning."""

    text: str


Piece = str | ReasoningPiece  # content, or reasoning
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def reasoning_parser(form: ReasoningFormat, starts_inside: bool, call: str = "") -> ReasoningParser:
    """Return the parser for answers in a format.

    ``starts_inside``: the prompt has begun the reasoning; ``call``: the word that begins a tool call, which ends
    the reasoning, too.
    """
    return ChannelParser() if form.channels else ThinkParser(form, starts_inside, call)


class ReasoningParser(ABC):
    """Splits a text into reasoning and content, regardless of how it is split into pieces.

    ``inside``: whether the text so far ends within reasoning.
    """

    inside = False

    def __init__(self) -> None:
        self._buffer = ""
        self._step = self._first

    def push(self, text: str) -> list[Piece]:
        """Return what is certain now; no piece is empty."""
        self._buffer += text
        pieces: list[Piece] = []
        step = None
        while step != self._step:  # until a step needs more text
            step = self._step
            pieces += step()
        return pieces

    def close(self) -> list[Piece]:
        """Return the rest: the text has ended."""
        remainder, self._buffer = self._buffer, ""
        return self._flush(remainder)

    @abstractmethod
    def _first(self) -> Iterator[Piece]:
        """Return the first step.

        A step yields what it reads from the buffer, and sets the next step when it has read everything.
        """

    @abstractmethod
    def _flush(self, text: str) -> list[Piece]:
        """Return the pieces of what the buffer has at the end of the text."""

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text


class ThinkParser(ReasoningParser):
    """Reasoning between two words, with which the answer may begin. The space around it belongs to neither."""

    def __init__(self, form: ReasoningFormat, starts_inside: bool, call: str) -> None:
        super().__init__()
        self._open, self._close = form.open, form.close
        self._ends = [marker for marker in (form.close, call) if marker]
        self._starts_inside = self.inside = starts_inside
        self._has_reasoning = False  # reasoning

    def _first(self) -> Iterator[Piece]:
        """Decide whether the text begins in reasoning or content; some models repeat the prompt's mark."""
        text = self._buffer.lstrip()
        if text.startswith(self._open):
            self._buffer = text[len(self._open):]
            self.inside, self._step = True, self._reasoning
        elif text and not self._open.startswith(text):
            self._step = self._reasoning if self._starts_inside else self._content
        return iter(())

    def _reasoning(self) -> Iterator[Piece]:
        if not self._has_reasoning:
            self._buffer = self._buffer.lstrip()
        at, marker = min(((at, marker) for marker in self._ends if (at := self._buffer.find(marker)) >= 0),
                         default=(-1, ""))
        if marker:
            text = self._take(at).rstrip()
            self._take(len(marker) if marker == self._close else 0)
            self.inside, self._step = False, self._between
        else:
            certain = len(self._buffer) - _partial_length(self._buffer, self._ends)
            text = self._take(len(self._buffer[:certain].rstrip()))
        if text:
            self._has_reasoning = True
            yield ReasoningPiece(text)

    def _between(self) -> Iterator[Piece]:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._content
        return iter(())

    def _content(self) -> Iterator[Piece]:
        if self._buffer:
            yield self._take(len(self._buffer))

    def _flush(self, text: str) -> list[Piece]:
        text = text.rstrip() if self.inside else text
        return [] if not text else [ReasoningPiece(text)] if self.inside else [text]


class ChannelParser(ReasoningParser):
    """Messages of gpt-oss' format: analysis is reasoning, the other channels are content.

    Messages of one kind have an empty line between them.
    """

    _ENDS = ("<|end|>", "<|start|>", "<|channel|>", "<|return|>", "<|call|>")
    _MESSAGE = "<|message|>"

    def __init__(self) -> None:
        super().__init__()
        self._kinds_read: set[bool] = set()  # which kinds there were: reasoning, or not
        self._begins = True

    def _first(self) -> Iterator[Piece]:
        """Return a message's head; a text without one is content."""
        text = self._buffer.lstrip()
        at = text.find(self._MESSAGE)
        if not text.startswith("<|"):
            if text and text != "<":
                self._open("")
        elif at >= 0:
            channel = _CHANNEL.search(text, 0, at)
            self._buffer = text[at + len(self._MESSAGE):]
            self._open(channel[1] if channel else "")
        return iter(())

    def _open(self, channel: str) -> None:
        self.inside, self._begins, self._step = channel == "analysis", True, self._body

    def _body(self) -> Iterator[Piece]:
        at, marker = min(((at, marker) for marker in self._ENDS if (at := self._buffer.find(marker)) >= 0),
                         default=(-1, ""))
        end = at if marker else len(self._buffer) - _partial_length(self._buffer, self._ENDS)
        yield from self._part(self._take(end))
        if marker:
            if marker not in ("<|start|>", "<|channel|>"):  # which belong to the next head
                self._take(len(marker))
            self.inside, self._step = False, self._first

    def _part(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._begins and self.inside in self._kinds_read:
            text = f"\n\n{text}"
        self._begins = False
        self._kinds_read.add(self.inside)
        return [ReasoningPiece(text)] if self.inside else [text]

    def _flush(self, text: str) -> list[Piece]:
        in_head = self._step != self._body and text.lstrip().startswith("<|")
        return [] if in_head else self._part(text)


def _partial_length(text: str, words: Sequence[str]) -> int:
    """Length of the longest beginning of one of ``words`` that ``text`` ends with."""
    return max((n for marker in words for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0)
