"""From an answer's tokens to the text that may be sent.

Knows that a character may take several tokens and a stop string may begin anywhere.  Does not know
where tokens come from or how text is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowspec_edge.serving.stops import StopMatcher
from flowspec_edge.text import TextStream


class Reader:
    """One answer's text, token by token: what comes out depends on the tokens, not on their grouping.

    stopped  whether a stop string ended the text
    tokens   how many tokens were read, up to the one that completed the stop string
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str],
                 after: Sequence[int] = ()) -> None:
        """``after``: token ids of the text that goes on; none for an answer in a chat."""
        self._pieces: list[str] = []
        self._stream = TextStream(decode, self._pieces.append, after)
        self._stops = StopMatcher(stops)
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, tokens: Sequence[int]) -> str:
        """The text that may be sent after these tokens; what follows a stop string is not read."""
        text = ""
        for token in tokens:
            if self.stopped:
                break
            self._stream.push([token])
            self.tokens += 1
            text += self._take()
        return text

    def close(self) -> str:
        """The rest of a text that has come to its end, half a character included."""
        if self.stopped:
            return ""
        self._stream.close()
        return self._take() + self._stops.close()

    def _take(self) -> str:
        piece = "".join(self._pieces)
        self._pieces.clear()
        return self._stops.push(piece)
