"""Stop strings in a text that comes in pieces.

Knows which part of a text may be sent before the rest of it is known.  Does not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets a text through up to the first stop string, however it is cut into pieces.

    The first is the one that is complete first; of those that end at the same character, the longest.
    What may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that may be sent now; empty once a stop string was found."""
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
        """What was held back and is no stop string after all: the text ends here."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, less than all of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
