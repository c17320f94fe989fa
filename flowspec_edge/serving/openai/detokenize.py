"""An answer's text as it arrives: characters of several tokens, stop strings, tool calls."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec_edge.model.chat import ToolFormat
from flowspec_edge.model.text import TextStream


class StopMatcher:
    """Passes on a text up to the first stop string, regardless of how the text is split into pieces.

    The stop string that is complete first wins, then the longest. A possible beginning of one is held back.
    """

    def __init__(self, stops: Sequence[str], keeps: bool = False) -> None:
        """Look for ``stops``; with ``keeps`` the text ends after the stop string, not before.

        ValueError for an empty stop string.
        """
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._keeps_stop = keeps
        self._pending = ""
        self.stop: str | None = None  # the one that was found

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Return the text that may be sent now; empty after a stop string.

        ``may_stop``: a stop string that is complete now counts.
        """
        if self.stopped:
            return ""
        text = self._pending + piece
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches and may_stop:
            end, start = min(matches)
            self.stop, self._pending = text[start:end], ""
            return text[: end if self._keeps_stop else start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def close(self) -> str:
        """Return the text held back, because no stop string can follow any more."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Detokenizer:
    """One answer's text, independent of how the tokens are grouped.

    ``tokens``: how many were read, up to the one that completed the stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str],
                 after: Sequence[int] = (), keeps_stop: bool = False, least: int = 0) -> None:
        """Begin an answer without tokens.

        after       token ids of the text that the answer continues; none in a chat
        keeps_stop  the text has the stop string
        least       tokens before which no stop string counts
        """
        self._pieces: list[str] = []
        self._stream = TextStream(decode, self._pieces.append, after)
        self._stops = StopMatcher(stops, keeps_stop)
        self._least = least
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.stopped

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.stop

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that may be sent now; tokens after a stop string are not read."""
        text = ""
        for token in tokens:
            if self.stopped:
                break
            self._stream.push([token])
            self.tokens += 1
            text += self._take()
        return text

    def close(self) -> str:
        """Return the rest of the text, including an incomplete character."""
        if self.stopped:
            return ""
        self._stream.close()
        return self._take() + self._stops.close()

    def end(self, token: int) -> str:
        """Return the text of a token that ended the answer."""
        self._stream.push([token])
        return self._take()

    def _take(self) -> str:
        piece = "".join(self._pieces)
        self._pieces.clear()
        return self._stops.push(piece, self.tokens > self._least)


@dataclass(frozen=True)
class CallPiece:
    """A part of a tool call; the first part of a call has its ``id`` and ``name``."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def as_delta(self) -> dict[str, Any]:
        """Write the call as an entry of a chunk's ``tool_calls``."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, "id": self.id, "type": "function",
                "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits a text into content and tool calls, which the format's grammar has shaped.

    An incomplete call at the end is passed on as far as it goes.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._call = re.compile(rf'\s*\{{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"{form.key}"\s*:\s*(?=\{{)')
        self._buffer = ""
        self._step = self._content if form.open else self._first
        self._arguments = _ObjectScanner()
        self.calls = 0  # found so far

    def push(self, text: str) -> list[str | CallPiece]:
        """Return what is certain now: content, and parts of calls; none is empty."""
        self._buffer += text
        pieces: list[str | CallPiece] = []
        step = None
        while step != self._step:  # until a step needs more text
            step = self._step
            pieces += filter(None, step())
        return pieces

    def close(self) -> list[str | CallPiece]:
        """Return the rest: the text has ended."""
        remainder, self._buffer = self._buffer, ""
        in_call = self.calls or (self._form.open and self._step == self._head)
        return [remainder] if remainder and not in_call else []

    # Each step yields what it reads from the buffer, and sets the next step when it has read everything.

    def _first(self) -> Iterator[str | CallPiece]:
        """Begin the call of a format in which a call is the whole answer."""
        if text := self._buffer.lstrip():
            self._step = self._head if text.startswith("{") else self._plain
        return iter(())

    def _plain(self) -> Iterator[str | CallPiece]:
        yield self._take(len(self._buffer))

    def _content(self) -> Iterator[str | CallPiece]:
        """Text before a call, without the whitespace before that."""
        marker = self._form.open
        at = self._buffer.find(marker)
        if at >= 0:
            text = self._take(at).rstrip()
            self._take(len(marker))
            self._step = self._head
        else:
            prefix = next((n for n in range(len(marker) - 1, 0, -1) if self._buffer.endswith(marker[:n])), 0)
            text = self._take(len(self._buffer[:len(self._buffer) - prefix].rstrip()))
        yield "" if self.calls else text

    def _head(self) -> Iterator[str | CallPiece]:
        head = self._call.match(self._buffer)
        if head:
            self._take(head.end())
            self.calls += 1
            self._arguments = _ObjectScanner()
            self._step = self._object
            yield CallPiece(self.calls - 1, "", f"call_{uuid.uuid4().hex[:24]}", head[1])

    def _object(self) -> Iterator[str | CallPiece]:
        if text := self._take(self._arguments.scan(self._buffer)):
            yield CallPiece(self.calls - 1, text)
        if self._arguments.ended:
            self._step = self._content if self._form.open else self._end

    def _end(self) -> Iterator[str | CallPiece]:
        return iter(())

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text


class _ObjectScanner:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.ended = False

    def scan(self, text: str) -> int:
        """Return how many characters of ``text`` belong to the object."""
        for at, letter in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return at + 1
        return len(text)
