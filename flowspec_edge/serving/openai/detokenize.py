"""Incremental detokenization: characters of several tokens, and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowspec_edge.model.text import TextStream


class StopMatcher:
    """Passes on a text up to the first stop string, regardless of how the text is split into pieces. The stop
    string that is complete first wins, then the longest. A possible beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        """ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Return the text that may be sent now; empty after a stop string."""
        if self.found:
            return ""
        text = self._held + piece
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.found, self._held = True, ""
            return text[: min(matches)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def close(self) -> str:
        """Return the text held back: no stop string can follow."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Detokenizer:
    """One answer's text, independent of how the tokens are grouped. ``tokens``: how many were read, up to the
    one that completed the stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str],
                 after: Sequence[int] = ()) -> None:
        """``after``: token ids of the text that the answer continues; none in a chat."""
        self._pieces: list[str] = []
        self._stream = TextStream(decode, self._pieces.append, after)
        self._stops = StopMatcher(stops)
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.found

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

    def _take(self) -> str:
        piece = "".join(self._pieces)
        self._pieces.clear()
        return self._stops.push(piece)
