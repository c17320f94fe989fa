"""The tokens that may come next in an answer with restrictions, by the text before a row.

A row's own path in the draft tree determines its text, so every strategy chooses the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flowspec_edge.sampling.settings import Restrictions


class AnswerRestrictions:
    """The restrictions of one answer, which grows."""

    def __init__(self, restrictions: Restrictions, prompt: Sequence[int], ends: Iterable[int]) -> None:
        """Begin an answer to ``prompt``.

        ``ends``: the tokens that end the answer. The model's vocabulary may lack some that its tokenizer has.
        """
        self._restrictions = restrictions
        self._ends = sorted(ends)
        self._length = 0  # of the answer
        self._longest = max(map(len, restrictions.bad_words), default=1) - 1
        # of the text: what bad words may begin with
        self._tail = list(prompt[max(0, len(prompt) - self._longest):])
        self._long = [word for word in restrictions.bad_words if len(word) > 1]
        self._always: NDArray[np.bool_] | None = None  # what the text before a row does not change

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the answer."""
        self._length += len(tokens)
        self._tail = self._after(tokens)

    def allowed(self, path: Sequence[int], vocabulary: int) -> NDArray[np.uint8]:
        """Return which tokens may follow the answer and then ``path``.

        The result has ceil(V / 8) bytes with a bit for each token, the lowest first.
        """
        if self._always is None or len(self._always) != vocabulary:
            self._always = self._allowed_always(vocabulary)
        may = self._always.copy()
        before = self._after(path)
        for *first, last in self._long:
            if before[len(before) - len(first):] == first:
                may[last] = False
        if self._length + len(path) < self._restrictions.min_tokens:
            may[[end for end in self._ends if end < vocabulary]] = False
        return np.packbits(may, bitorder="little")

    def _allowed_always(self, vocabulary: int) -> NDArray[np.bool_]:
        allowed = self._restrictions.allowed
        may = np.full(vocabulary, allowed is None)
        may[[*(allowed or ())]] = True
        may[[word[0] for word in self._restrictions.bad_words if len(word) == 1]] = False
        return may

    def _after(self, tokens: Sequence[int]) -> list[int]:
        text = [*self._tail, *tokens]
        return text[max(0, len(text) - self._longest):]
